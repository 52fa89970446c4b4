"""Functions that write a manager's statistics for TensorBoard.

::

    writer = tensorboard.make_writer("runs/1")           # or your SummaryWriter
    tensorboard.write_stats(writer, manager.stats(), step=n_steps)

Any writer with ``add_scalar(tag, value, step)`` works, such as those of PyTorch and tensorboardX.

The rule: tensorboardX is imported only when this module makes a writer.
"""

from __future__ import annotations

import importlib
import secrets
from typing import Any, Protocol

from envmanager.importing import needed_by
from envmanager.observe.stats import ManagerStats

_OF_MANAGER = ("steps", "env_steps", "restarts", "steps_lost", "late_replies", "wait_share")
_OF_WORKER = ("steps", "restarts", "step_time_s", "step_time_p99_s", "idle_share", "queue_wait_s", "memory_bytes")
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

    Each worker has seven statistics, or eleven if ``every`` is set.
    """
    scalars = {name: float(getattr(stats, name)) for name in _OF_MANAGER}
    for worker in stats.workers:
        for name in _OF_WORKER + (_OF_WORKER_TOO if every else ()):
            scalars[f"{name}/worker_{worker.worker_id}"] = float(getattr(worker, name))
    return scalars


def make_writer(log_dir: str, *, purge_step: int | None = None) -> Any:
    """Return a tensorboardX SummaryWriter for ``log_dir``. Its file's name ends with a random number.

    TensorBoard hides what earlier files have from ``purge_step`` on. Raises MissingExtra without tensorboardX.
    """
    with needed_by("writing for TensorBoard", extra="tensorboard"):
        library = importlib.import_module("tensorboardX")
    # tensorboardX names the file after the second and the machine. With a random suffix two writers have two files, and
    # no other user can have put a symbolic link there, because the name cannot be guessed.
    return library.SummaryWriter(log_dir, purge_step=purge_step, filename_suffix=f".{secrets.token_hex(4)}")
