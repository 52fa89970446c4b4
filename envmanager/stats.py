"""What a manager tells about itself."""

from __future__ import annotations

import attrs


@attrs.frozen
class WorkerStats:
    """One worker: ``steps`` handed out, mean time inside a step, share of the time it waited for a command.

    ``failed``: it takes no steps until the next reset; ``dropped``: nor after it. ``restarts``: how often a failure
    made another process of it.
    """

    worker_id: int
    env_ids: tuple[int, ...]
    generation: int = 0
    pid: int | None = None
    waiting: bool = False
    failed: bool = False
    dropped: bool = False
    restarts: int = 0
    steps: int = 0
    step_time_s: float = 0.0
    idle_share: float = 0.0

    def with_times(self, *, n_steps: int, busy_ns: int, idle_ns: int) -> WorkerStats:
        """With the times of the ``n_steps`` that the worker has taken, handed out or not."""
        total_ns = busy_ns + idle_ns
        idle_share = idle_ns / total_ns if total_ns else 0.0
        return attrs.evolve(self, step_time_s=busy_ns / max(1, n_steps) / 1e9, idle_share=idle_share)


@attrs.frozen
class ManagerStats:
    """All workers, and sums: worker steps and environment steps handed out, late replies dropped.

    ``steps_lost``: worker steps that were asked for and never handed out, because the worker failed.
    """

    workers: tuple[WorkerStats, ...]
    steps: int = 0
    env_steps: int = 0
    late_replies: int = 0
    restarts: int = 0
    steps_lost: int = 0
