"""Writes a manager's statistics as TensorBoard scalars.

::

    writer = tensorboard.make_writer("runs/1")           # or the SummaryWriter that the trainer has already
    tensorboard.write_stats(writer, manager.stats(), step=n_steps)

Any writer with ``add_scalar(tag, value, step)`` will do, PyTorch's and tensorboardX's alike.

The rule: only ``make_writer`` imports a library.
"""

from __future__ import annotations

import importlib
import secrets
from typing import Any, Protocol

from envmanager.errors import MissingExtra
from envmanager.observe.stats import ManagerStats

_OF_MANAGER = ("steps", "env_steps", "restarts", "steps_lost", "late_replies", "wait_share")
_OF_WORKER = (
    "steps",
    "restarts",
    "start_s",
    "step_time_s",
    "step_time_p50_s",
    "step_time_p95_s",
    "step_time_p99_s",
    "idle_share",
    "queue_wait_s",
    "core_wait_share",
)


class ScalarWriter(Protocol):
    """What PyTorch's and tensorboardX's SummaryWriter have in common, as far as it is needed here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any: ...


def write_stats(writer: ScalarWriter, stats: ManagerStats, step: int, *, prefix: str = "envmanager") -> None:
    """Write every number of ``stats`` as a scalar at ``step``; what it is called, see ``scalars_of``."""
    for name, value in scalars_of(stats).items():
        writer.add_scalar(f"{prefix}/{name}", value, step)


def scalars_of(stats: ManagerStats) -> dict[str, float]:
    """``{"wait_share": …, "idle_share/worker_0": …}``: one chart per number, in which workers lie side by side."""
    scalars = {name: float(getattr(stats, name)) for name in _OF_MANAGER}
    for worker in stats.workers:
        scalars |= {f"{name}/worker_{worker.worker_id}": float(getattr(worker, name)) for name in _OF_WORKER}
    return scalars


def make_writer(log_dir: str) -> Any:
    """A SummaryWriter of tensorboardX that writes into a new file in ``log_dir``; close it. Raises MissingExtra."""
    try:
        library = importlib.import_module("tensorboardX")
    except ImportError:
        raise MissingExtra("writing for TensorBoard", library="tensorboardX", extra="tensorboard") from None
    # Its file is named by the second and the machine: something that nobody can guess keeps two writers apart, and
    # nobody can have put a link there.
    return library.SummaryWriter(log_dir, filename_suffix=f".{secrets.token_hex(4)}")
