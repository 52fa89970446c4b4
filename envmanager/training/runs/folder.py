"""The folder of a training run: a check before the first file is written, and the deletion of an earlier run's files.

::

    run/episodes.csv, run/metrics.csv, run/tensorboard/…
    run/config.json, run/versions.json     config and library versions of the training
    run/checkpoints/latest, run/checkpoints/best, run/checkpoints/000000102400/…
    run/control.toml                       written by a person; optional
    run/.training.lock                     locked during a training run; kept afterwards

The rule: a folder holds one training run. ``clear`` deletes the files of earlier training runs, but not files that no
training run has written. A training run calls ``clear`` only with the option ``force``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from envmanager.errors import UsageError
from envmanager.training.runs import checkpoints, figures, records, writers
from envmanager.training.runs.plan import CHECKPOINTS

_FILES: dict[str, Callable[[Path], bool]] = {
    figures.EPISODES: lambda path: writers.is_of_others(path, figures.COLUMNS),
    writers.METRICS: lambda path: writers.is_of_others(path, writers.COLUMNS),
    records.CONFIG: records.is_of_others,
    records.VERSIONS: records.is_of_others,
}
"""Checks by file name. Each takes the file's path, and returns whether the path exists and no training run wrote it."""


def check(directory: Path, *, resume: bool, force: bool) -> None:
    """Raise UsageError if ``directory`` is a file, or if a training run would overwrite a file of another program.

    Also raises UsageError on checkpoints or episodes of an earlier run, unless ``resume`` or ``force`` is true.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a folder: a training run needs one. Train elsewhere (--dir).")
    for path in _of_others(directory):
        raise UsageError(f"{path} was not written by a training run: move it, or train elsewhere (--dir).")
    found = _left_by_a_run(directory)
    if found and not resume and not force:
        go_on = "go on with it (--resume)" if _latest(directory).exists() else "(no checkpoint: --resume cannot go on)"
        raise UsageError(
            f"{directory} holds a training run already: {', '.join(found)}. Either {go_on}, or delete its files and "
            "begin again (--force), or train elsewhere (--dir). In Python: "
            "TrainingPlan(resume=…, force=…, directory=…)."
        )


def clear(directory: Path) -> None:
    """Delete the files of training runs in ``directory``. Raises OSError, but ignores errors in checkpoint folders."""
    for name in _names(directory):  # before the checkpoints, so that no file names a half-deleted one
        if not _is_somebody_elses_name(name):
            name.unlink(missing_ok=True)
    for path, facts in checkpoints.own(directory / CHECKPOINTS).items():
        checkpoints.remove(path, facts)
    with contextlib.suppress(OSError):  # the folder has other files, or does not exist
        (directory / CHECKPOINTS).rmdir()
    for file, is_foreign in _FILES.items():
        if not is_foreign(directory / file):
            (directory / file).unlink(missing_ok=True)
    writers.remove_events(directory / writers.FOLDER)


def _latest(directory: Path) -> Path:
    return directory / CHECKPOINTS / checkpoints.LATEST


def _names(directory: Path) -> list[Path]:
    """Return the paths of the files that name a checkpoint: ``latest`` and ``best``."""
    return [directory / CHECKPOINTS / name for name in (checkpoints.LATEST, checkpoints.BEST)]


def _of_others(directory: Path) -> Iterator[Path]:
    """Yield existing paths that have the name of a training run's file but were not written by a training run."""
    folder = directory / CHECKPOINTS
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        yield folder
    else:
        yield from filter(_is_somebody_elses_name, _names(directory))
    for file, is_foreign in _FILES.items():
        if is_foreign(directory / file):
            yield directory / file


def _is_somebody_elses_name(path: Path) -> bool:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return True
    return path.exists() and checkpoints.named(path) is None


def _left_by_a_run(directory: Path) -> list[str]:
    found = [f"{CHECKPOINTS}/{path.name}" for path in checkpoints.own(directory / CHECKPOINTS)]
    if not found and _latest(directory).exists():
        found.append(f"{CHECKPOINTS}/{checkpoints.LATEST}")
    if writers.holds_rows(directory / figures.EPISODES):
        found.append(figures.EPISODES)
    return found
