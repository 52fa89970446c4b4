"""What a manager tells about itself."""

from __future__ import annotations

import attrs


@attrs.frozen
class WorkerStats:
    """One worker: ``steps`` handed out, mean time inside a step, share of the time it waited for a command."""

    worker_id: int
    env_ids: tuple[int, ...]
    generation: int = 0
    pid: int | None = None
    waiting: bool = False
    failed: bool = False
    steps: int = 0
    step_time_s: float = 0.0
    idle_share: float = 0.0


@attrs.frozen
class ManagerStats:
    """All workers, and sums: worker steps and environment steps handed out, late replies dropped."""

    workers: tuple[WorkerStats, ...]
    steps: int = 0
    env_steps: int = 0
    late_replies: int = 0
