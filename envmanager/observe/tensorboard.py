"""Functions that write a manager's statistics for TensorBoard, and a writer of a training run's metrics.

::

    writer = tensorboard.make_writer("runs/1")           # or your SummaryWriter
    tensorboard.write_stats(writer, manager.stats(), step=n_steps)

Any writer with ``add_scalar(tag, value, step)`` works, such as those of PyTorch and tensorboardX.

The rule: tensorboardX is imported only when this module makes a writer.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from envmanager.importing import needed_by
from envmanager.observe.metrics_writer import RunFacts
from envmanager.observe.stats import ManagerStats

FOLDER = "tensorboard"
"""Default folder of the scalars, inside the training's folder."""
_OF_TRAININGS = "envmanager-"
_OURS = re.compile(rf"events\.out\.tfevents\..*\.{_OF_TRAININGS}[0-9a-f]{{8}}")
_OF_MANAGER = ("steps", "env_steps", "restarts", "steps_lost", "late_replies", "wait_share")
_OF_WORKER = ("steps", "restarts", "step_time_s", "step_time_p99_s", "idle_share", "queue_wait_s")
_OF_WORKER_TOO = ("start_s", "step_time_p50_s", "step_time_p95_s", "core_wait_share")


class ScalarWriter(Protocol):
    """Interface of the writers that ``write_stats`` accepts, such as the SummaryWriters of PyTorch and tensorboardX."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any: ...


def write_stats(
    writer: ScalarWriter, stats: ManagerStats, step: int, *, prefix: str = "envmanager", every: bool = False
) -> None:
    """Write the scalars of ``scalars_of(stats, every=every)`` at ``step``, each under the tag ``{prefix}/{name}``."""
    for name, value in scalars_of(stats, every=every).items():
        writer.add_scalar(f"{prefix}/{name}", value, step)


def scalars_of(stats: ManagerStats, *, every: bool = False) -> dict[str, float]:
    """Return the statistics of the manager and its workers by name: ``{"wait_share": …, "idle_share/worker_0": …}``.

    Each worker has six statistics, or ten if ``every`` is set.
    """
    scalars = {name: float(getattr(stats, name)) for name in _OF_MANAGER}
    for worker in stats.workers:
        for name in _OF_WORKER + (_OF_WORKER_TOO if every else ()):
            scalars[f"{name}/worker_{worker.worker_id}"] = float(getattr(worker, name))
    return scalars


def make_writer(log_dir: str) -> Any:
    """Return a tensorboardX SummaryWriter for ``log_dir``. Raises MissingExtra if tensorboardX is not installed."""
    return _writer(log_dir, "")


def _writer(log_dir: str, mark: str) -> Any:
    with needed_by("writing for TensorBoard", extra="tensorboard"):
        library = importlib.import_module("tensorboardX")
    # tensorboardX names the file after the second and the machine. With a random suffix two writers have two files, and
    # no other user can have put a symbolic link there, because the name cannot be guessed.
    return library.SummaryWriter(log_dir, filename_suffix=f".{mark}{secrets.token_hex(4)}")


def remove_events(folder: Path) -> None:
    """Delete the files that TensorBoardMetrics wrote in ``folder``, then ``folder`` if empty. Skip symbolic links."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


class TensorBoardMetrics:
    """A metrics writer for TensorBoard. The default ``directory`` is ``tensorboard`` in the training's folder."""

    def __init__(self, facts: RunFacts, *, directory: str | None = None) -> None:
        self._writer = _writer(str(facts.directory / FOLDER) if directory is None else directory, _OF_TRAININGS)

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
