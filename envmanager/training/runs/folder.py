"""The folder of a training run, in which one training run at a time writes.

::

    run/episodes.csv, run/metrics.csv, run/tensorboard/…
    run/config.json, run/versions.json     config and library versions of the training
    run/logs/train/worker-0-0.log, …       what workers print
    run/checkpoints/latest, run/checkpoints/best, run/checkpoints/000000102400/…
    run/control.toml                       written by a person; optional
    run/.training.lock                     locked during a training run; kept afterwards

The rule: a folder holds one training run, and nothing of an earlier one is deleted. A training run that begins again
renames the folder, with all that is in it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from envmanager.errors import NotWritten, UsageError
from envmanager.importing import needed_by
from envmanager.training.runs import figures, records, writers
from envmanager.training.runs.plan import CHECKPOINTS, LATEST

with needed_by("envmanager.training", extra="torch"):
    from filelock import FileLock, Timeout

LOCK = ".training.lock"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks, such as some that are shared over a network."""
_logger = logging.getLogger("envmanager")
_WRITTEN = (CHECKPOINTS, records.CONFIG, figures.EPISODES, writers.METRICS, records.VERSIONS)
"""Names that a training run writes. If one of them is there, the folder holds a training run."""


def check(directory: Path, *, resume: bool, force: bool | Literal["auto"]) -> None:
    """Raise UsageError if ``directory`` is a file, or holds a training run and is neither resumed nor forced."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a folder: a training run needs one. Train elsewhere (--dir).")
    found = _found_in(directory)
    if found and not resume and not force:
        can_resume = (directory / CHECKPOINTS / LATEST).exists()
        go_on = "go on with it (--resume)" if can_resume else "(no checkpoint: --resume cannot go on)"
        raise UsageError(
            f"{directory} holds a training run already: {', '.join(found)}. Either {go_on}, or rename the folder and "
            "begin again (--force), or train elsewhere (--dir). In Python: "
            "TrainingPlan(resume=…, force=…, directory=…)."
        )


@contextmanager
def held(directory: Path, *, resume: bool, force: bool | Literal["auto"]) -> Iterator[None]:
    """Return a context in which no other training run writes in ``directory``, which is made if necessary.

    With ``force``, a folder that holds a training run is renamed to NAME.1, or the first such name that is free, and a
    new one is made. Raises the errors of ``check``, UsageError if another training run (even in this process) is in
    progress, and NotWritten if the folder cannot be made, written or renamed. If the file system has no locks, only a
    warning is logged.
    """
    with _locked(directory) as lock:
        check(directory, resume=resume, force=force)
        if force == "auto" and (directory / CHECKPOINTS / LATEST).exists():  # another training has just ended here
            raise UsageError(f"{directory} has a checkpoint now: repeat the command, which goes on from it.")
        if not force or not _found_in(directory):
            yield
            return
        if sys.platform == "win32":  # renames no folder in which a file is open
            lock.release()
        _rename(directory.resolve())
        with _locked(directory):
            yield


def _found_in(directory: Path) -> list[str]:
    return [name for name in _WRITTEN if os.path.lexists(directory / name)]


@contextmanager
def _locked(directory: Path) -> Iterator[FileLock]:
    lock = FileLock(directory / LOCK, timeout=0, fallback_to_soft=False)
    try:
        directory.resolve().mkdir(parents=True, exist_ok=True)  # a link to a renamed folder leads to the new one
        lock.acquire()
    except Timeout as error:
        raise UsageError(
            f"a training run is in progress in {directory}. Wait for it, stop it (Ctrl-C there), or train elsewhere "
            "(--dir)."
        ) from error
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise NotWritten(f"{directory / LOCK} cannot be written: {error.strerror or error}.") from error
        _logger.warning(
            "%s cannot be locked (%s): make sure that no other training writes there.", directory, error.strerror
        )
    try:
        yield lock
    finally:
        lock.release()


def _rename(directory: Path) -> None:
    numbered = (directory.with_name(f"{directory.name}.{number}") for number in itertools.count(1))
    to = next(path for path in numbered if not os.path.lexists(path))
    try:
        if Path.cwd().is_relative_to(directory):
            raise UsageError(f"{directory} is the current folder, and cannot be renamed: train elsewhere (--dir).")
        directory.rename(to)
    except OSError as error:
        raise NotWritten(
            f"{directory} cannot be renamed to {to}: {error.strerror or error}. Train elsewhere (--dir)."
        ) from error
    _logger.warning("the earlier training run is in %s now.", to)
