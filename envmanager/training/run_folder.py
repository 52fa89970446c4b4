"""The folder of a training: what may be done with what is there already.

::

    run/episodes.csv
    run/checkpoints/latest, run/checkpoints/000102400/…
    run/control.toml                       a person's, if there is one

The rule: a folder holds one training. What an earlier one has left is deleted only when that was asked for, and what
no training has written never is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from envmanager.errors import UsageError
from envmanager.training import checkpoints, episode_log

CHECKPOINTS = "checkpoints"
CONTROL = "control.toml"
"""What a person may put there; a training reads it only: see ``envmanager.training.control``."""


def check(directory: Path, *, resume: bool, force: bool) -> None:
    """Raise UsageError when a training that begins (or goes on) in ``directory`` would destroy something there."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a folder, as a training needs one: train elsewhere (--dir).")
    for path in _of_others(directory):
        raise UsageError(f"{path} was not written by a training: move it, or train elsewhere (--dir).")
    found = _left_by_a_run(directory)
    if found and not resume and not force:
        go_on = "go on with it (--resume)" if _latest(directory).exists() else "(no checkpoint: --resume cannot go on)"
        raise UsageError(
            f"{directory} holds a training already: {', '.join(found)}. Either {go_on}, or delete what it has left and "
            "begin anew (--force), or train elsewhere (--dir). In Python: TrainingPlan(resume=…, force=…, directory=…)."
        )


def clear(directory: Path) -> None:
    """Delete what trainings have left in ``directory``, and nothing else. Raises OSError."""
    _latest(directory).unlink(missing_ok=True)  # first: it must not name a checkpoint that is half there
    for path, facts in checkpoints.written(directory / CHECKPOINTS).items():
        checkpoints.remove(path, facts)
    with contextlib.suppress(OSError):  # something of others is in it, or there is none
        (directory / CHECKPOINTS).rmdir()
    if not episode_log.is_of_others(directory / episode_log.FILE):
        (directory / episode_log.FILE).unlink(missing_ok=True)


def _latest(directory: Path) -> Path:
    return directory / CHECKPOINTS / checkpoints.LATEST


def _of_others(directory: Path) -> Iterator[Path]:
    """What has a name of ours and is not ours. Links are not: what is written there would go to somewhere else."""
    folder, latest, log = directory / CHECKPOINTS, _latest(directory), directory / episode_log.FILE
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        yield folder
    elif latest.is_symlink() or (latest.exists() and not latest.is_file()):
        yield latest
    if episode_log.is_of_others(log):
        yield log


def _left_by_a_run(directory: Path) -> list[str]:
    found = [f"{CHECKPOINTS}/{path.name}" for path in checkpoints.written(directory / CHECKPOINTS)]
    if not found and _latest(directory).exists():
        found.append(f"{CHECKPOINTS}/{checkpoints.LATEST}")
    if episode_log.holds_episodes(directory / episode_log.FILE):
        found.append(episode_log.FILE)
    return found
