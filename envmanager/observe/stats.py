"""What a manager reports about itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs

from envmanager.observe.timing import WaitTimes, WorkerTimes

_EVEN = 0.1
"""Shares of the time that differ by less than this are as good as equal."""
_LEAST_STEPS = 1000
"""Of fewer environment steps nothing is said: at first everything takes longer."""
_MESSAGE_S = 150e-6
"""A step of a worker costs a trainer whose policy takes no time less than that."""
_MUCH_SLOWER = 1.5
"""A worker whose steps take so many times as long as usual is named."""


@attrs.frozen
class WorkerStats:
    """One worker: ``steps`` handed out, how long steps take, shares of the time since its first step.

    ``start_s``: how long its last start took, from the decision until its environments were made. ``step_time_s``:
    the mean time inside a step; its percentiles are within 7 %. ``idle_share``: it waited for a command.
    ``core_wait_share``: it could have run and no core was free, inside steps or before them (0.0 where the kernel
    does not report it). ``queue_wait_s``: how long a response waited, on average, from the end of the step until it was
    handed out. ``node``: the host that it is on, where there may be several. ``failed``: it takes no steps until the
    next reset; ``dropped``: nor after it. ``restarts``: how often a failure made another process of it; the counts and
    times go on over that.
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
    start_s: float = 0.0
    step_time_s: float = 0.0
    step_time_p50_s: float = 0.0
    step_time_p95_s: float = 0.0
    step_time_p99_s: float = 0.0
    idle_share: float = 0.0
    queue_wait_s: float = 0.0
    core_wait_share: float = 0.0
    node: str = ""

    def with_times(self, times: WorkerTimes) -> WorkerStats:
        """With the times of the steps that the worker has taken, handed out or not."""
        total_ns = times.busy_ns + times.idle_ns
        p50, p95, p99 = times.busy.percentiles(50, 95, 99)
        return attrs.evolve(
            self,
            start_s=times.start_s,
            step_time_s=times.busy_ns / max(1, times.steps) / 1e9,
            step_time_p50_s=p50 / 1e9,
            step_time_p95_s=p95 / 1e9,
            step_time_p99_s=p99 / 1e9,
            idle_share=times.idle_ns / total_ns if total_ns else 0.0,
            queue_wait_s=times.queued_ns / max(1, self.steps) / 1e9,
        )


@attrs.frozen
class ManagerStats:
    """All workers, and sums: worker steps and environment steps handed out, late responses discarded.

    ``steps_lost``: worker steps that were asked for and never handed out, because the worker failed. ``wait_share``:
    the share of the time that the trainer waited for steps; in-process, that they took. ``placement``: what a probe
    chose and why, where the choice was ``"auto"``.
    """

    workers: tuple[WorkerStats, ...]
    steps: int = 0
    env_steps: int = 0
    late_replies: int = 0
    restarts: int = 0
    steps_lost: int = 0
    wait_share: float = 0.0
    placement: str = ""

    @property
    def verdict(self) -> str:
        """In one sentence, what the speed depends on, and how that shows: the environments, or the trainer.

        Empty before the first thousand environment steps.
        """
        return verdict(self.workers, self.wait_share) if self.env_steps >= _LEAST_STEPS else ""


def wait_share(times: Sequence[WorkerTimes], waits: WaitTimes) -> float:
    """The share of the time that a trainer waited; the time is that of the worker that has been there longest."""
    total_ns = max((each.busy_ns + each.idle_ns for each in times), default=0)
    return min(1.0, waits.waited_ns / total_ns) if total_ns else 0.0


def verdict(workers: Sequence[WorkerStats], wait_share: float) -> str:
    """Whoever is at work most of the time, the busiest worker or the trainer, sets the pace.

    When both wait for more of it than that, what lies between them does: messages, and waking processes. All of it is
    beside the point where one process would be as fast. Empty when no step was measured.
    """
    measured = [worker for worker in workers if worker.step_time_s and not worker.failed]
    if not measured:
        return ""
    if _are_too_cheap(measured, wait_share):
        return (
            f"too cheap for processes: {_waits_of(measured)}, and one process could take all their steps in "
            f"{_busy_share(measured):.0%} of it. Try kind: simple, or ask envmanager tune"
        )
    busiest = max(measured, key=_at_work)
    at_work, trainer_at_work = _at_work(busiest), 1.0 - wait_share
    shares = f"{_waits_of(measured)}, the trainer for steps {wait_share:.0%} of it"
    if 1.0 - at_work - trainer_at_work > max(at_work, trainer_at_work):
        return f"communication-bound: {shares}, and most goes into passing messages: put more environments in a worker"
    if at_work > trainer_at_work + _EVEN:
        return f"environment-bound: {_what_is_slow(measured, busiest)}{shares}"
    if trainer_at_work > at_work + _EVEN:
        queued_ms = 1e3 * statistics.fmean(worker.queue_wait_s for worker in measured)
        return f"policy-bound: {shares}, and a response lies {queued_ms:.3g} ms in the queue until it is handed out"
    return f"balanced: {shares}"


def _are_too_cheap(measured: Sequence[WorkerStats], wait_share: float) -> bool:
    """Whether several processes together do less than one could, and what the trainer does meanwhile is messages."""
    if len(measured) < 2 or any(worker.pid is None for worker in measured):
        return False
    total_s = max(worker.steps * worker.step_time_s / max(1e-9, 1.0 - worker.idle_share) for worker in measured)
    trainer_s = (1.0 - wait_share) * total_s / max(1, sum(worker.steps for worker in measured))
    return _busy_share(measured) < 1.0 - _EVEN and trainer_s < _MESSAGE_S


def _busy_share(measured: Sequence[WorkerStats]) -> float:
    """The time that all workers have spent in steps, one after the other, through the time that has passed."""
    return sum(1.0 - worker.idle_share for worker in measured)


def _at_work(worker: WorkerStats) -> float:
    """The share of the time that a worker had something to do; one that waits for a core has, and may look idle."""
    return min(1.0, 1.0 - worker.idle_share + worker.core_wait_share)


def _waits_of(measured: Sequence[WorkerStats]) -> str:
    idle = statistics.fmean(worker.idle_share for worker in measured)
    core_wait = statistics.fmean(worker.core_wait_share for worker in measured)
    if core_wait < _EVEN:
        return f"the workers wait for actions {idle:.0%} of the time"
    waits = f"the workers wait for a free core {core_wait:.0%} of the time"
    return f"{waits} and for actions {max(0.0, idle - core_wait):.0%}"


def _what_is_slow(measured: Sequence[WorkerStats], busiest: WorkerStats) -> str:
    """The one worker that the others wait for, if there is one."""
    usual_s = statistics.median(worker.step_time_s for worker in measured)
    usually_at_work = statistics.fmean(_at_work(worker) for worker in measured)
    if busiest.step_time_s < _MUCH_SLOWER * usual_s or _at_work(busiest) - usually_at_work < _EVEN:
        return ""
    envs = f"env {busiest.env_ids[0]}" if len(busiest.env_ids) == 1 else f"envs {', '.join(map(str, busiest.env_ids))}"
    return (
        f"a step of worker {busiest.worker_id} ({envs}) takes {busiest.step_time_s * 1e3:.3g} ms, of the median worker "
        f"{usual_s * 1e3:.3g} ms; "
    )
