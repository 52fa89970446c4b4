"""The folder of a training: what may be done with what is there already.

::

    run/episodes.csv, run/metrics.csv, run/tensorboard/…
    run/config.json, run/versions.json     what it ran with
    run/checkpoints/latest, run/checkpoints/best, run/checkpoints/000102400/…
    run/control.toml                       a person's, if there is one
    run/.training.lock                     locked while a training runs; stays

The rule: a folder holds one training. What an earlier one has left is deleted only when that was asked for, and what
no training has written never is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from envmanager.errors import UsageError
from envmanager.observe import csv_metrics, tensorboard
from envmanager.training import checkpoints, episode_log, records
from envmanager.training.plan import CHECKPOINTS

_FILES: dict[str, Callable[[Path], bool]] = {
    episode_log.FILE: episode_log.is_of_others,
    csv_metrics.FILE: csv_metrics.is_of_others,
    records.CONFIG: records.is_of_others,
    records.VERSIONS: records.is_of_others,
}
"""What a training writes beside its checkpoints, and how to tell that a file of that name is somebody else's."""


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
    for name in _names(directory):  # first: they must not name a checkpoint that is half there
        if not _is_somebody_elses_name(name):
            name.unlink(missing_ok=True)
    for path, facts in checkpoints.own(directory / CHECKPOINTS).items():
        checkpoints.remove(path, facts)
    with contextlib.suppress(OSError):  # something of others is in it, or there is none
        (directory / CHECKPOINTS).rmdir()
    for file, is_of_others in _FILES.items():
        if not is_of_others(directory / file):
            (directory / file).unlink(missing_ok=True)
    tensorboard.remove_events(directory / tensorboard.FOLDER)


def _latest(directory: Path) -> Path:
    return directory / CHECKPOINTS / checkpoints.LATEST


def _names(directory: Path) -> list[Path]:
    """The files that name a checkpoint."""
    return [directory / CHECKPOINTS / name for name in (checkpoints.LATEST, checkpoints.BEST)]


def _of_others(directory: Path) -> Iterator[Path]:
    """What has a name of ours and is not ours. Links are not: what is written there would go to somewhere else."""
    folder = directory / CHECKPOINTS
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        yield folder
    else:
        yield from filter(_is_somebody_elses_name, _names(directory))
    for file, is_of_others in _FILES.items():
        if is_of_others(directory / file):
            yield directory / file


def _is_somebody_elses_name(path: Path) -> bool:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return True
    return path.exists() and checkpoints.named(path) is None


def _left_by_a_run(directory: Path) -> list[str]:
    found = [f"{CHECKPOINTS}/{path.name}" for path in checkpoints.own(directory / CHECKPOINTS)]
    if not found and _latest(directory).exists():
        found.append(f"{CHECKPOINTS}/{checkpoints.LATEST}")
    if episode_log.holds_episodes(directory / episode_log.FILE):
        found.append(episode_log.FILE)
    return found
