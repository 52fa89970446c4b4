"""Statistics of a manager and its workers, and the verdict on what limits the speed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs

from envmanager.observe.timing import WaitTimes, WorkerTimes

_EVEN = 0.1
"""Difference below which two shares of the time count as equal."""
_LEAST_STEPS = 1000
"""Number of environment steps before the first verdict, because the first steps are slower."""
_MESSAGE_S = 150e-6
"""Trainer time per worker step in seconds, below which the trainer is assumed to do little but pass messages."""
_OWN_S = 60e-6
"""Trainer time per worker step in seconds. The verdict attributes a shorter time to the manager, not to the policy."""
_YOURS = "your policy, your code and the manager"
_MUCH_SLOWER = 1.5
"""Minimum ratio of a worker's step time to the median for the verdict to name the worker as slow."""


@attrs.frozen
class WorkerStats:
    """Counts and times of one worker. All except ``start_s`` and ``core_wait_share`` include its earlier processes.

    A worker is *idle* while it has no command. ``idle_share`` is idle time / (idle time + step time).
    """

    worker_id: int
    env_ids: tuple[int, ...]
    generation: int = 0
    """Generation of the worker's present process; 0 is the first."""
    pid: int | None = None
    """Process id; None for a worker in the trainer's process and for a game that this library did not start."""
    waiting: bool = False
    """Whether a response is outstanding: the worker steps, is being replaced, or has a step not delivered yet."""
    replacing: bool = False
    """Whether the worker is being replaced, and its next process has not returned the first observations yet."""
    failed: bool = False
    """Whether the worker failed and takes no steps, at least until the next reset."""
    dropped: bool = False
    """Whether the worker failed and is never used again, not even after a reset."""
    restarts: int = 0
    """Number of times that the worker was replaced because it had failed."""
    steps: int = 0
    """Number of worker steps delivered. In a worker step, all or some environments of the worker take a step."""
    start_s: float = 0.0
    """Duration of the last start, from the request until the environments were made."""
    step_time_s: float = 0.0
    """Mean duration of a worker step."""
    step_time_p50_s: float = 0.0
    """Median duration of a worker step. All percentiles are accurate to 7 %, and exact if all times are equal."""
    step_time_p95_s: float = 0.0
    step_time_p99_s: float = 0.0
    idle_share: float = 0.0
    """Share of the time in which the worker had no command."""
    queue_wait_s: float = 0.0
    """Mean time from the end of a step until its response was delivered."""
    core_wait_share: float = 0.0
    """Share of the time in which the worker could have run but no core was free, during a step or before one.

    0.0 where the kernel does not report it.
    """
    memory_bytes: int = 0
    """Resident memory of the worker's process and the processes that it started; 0 where the kernel does not report it.

    Pages that processes share, such as those of a fork, count in each of them.
    """
    node: str = ""
    """Host of a worker on a cluster; else empty."""
    kind: str = ""
    """Kind of its environments, if the manager has several kinds; else empty."""


@attrs.frozen
class ManagerStats:
    """Statistics of a manager: values per worker, sums over all workers, and a verdict on what limits the speed."""

    workers: tuple[WorkerStats, ...]
    steps: int = 0
    """Number of worker steps delivered."""
    env_steps: int = 0
    """Number of environment steps delivered: the sum over worker steps of the environments that took part."""
    late_replies: int = 0
    """Number of responses that came after their deadline and were discarded."""
    restarts: int = 0
    """Number of times that a worker was replaced because it had failed."""
    steps_lost: int = 0
    """Number of worker steps that were requested and never delivered, because the worker failed or was recycled."""
    episodes_kept: int = 0
    """Number of times that an episode went on in a worker's replacement."""
    episodes_diverged: int = 0
    """Number of episodes that were lost because their repetition led elsewhere."""
    steps_repeated: int = 0
    """Number of environment steps that replacements have repeated."""
    wait_share: float = 0.0
    """Share of the time in which the trainer waited for steps or, if ``in_process``, the environments stepped."""
    placement: str = ""
    """Placement that a probe chose, and the reason; empty without ``"auto"``."""
    in_process: bool = False
    """Whether all environments run in the trainer's process."""
    random_policy: bool = False
    """Whether ``step()`` draws all actions with RandomPolicy; then no policy of the user takes time."""

    @property
    def verdict(self) -> str:
        """Text that says what limits the speed, with the measured shares of time and advice.

        Empty before the first thousand environment steps, and if no step of a working worker was timed.
        """
        measured = [worker for worker in self.workers if worker.step_time_s and not worker.failed]
        if self.env_steps < _LEAST_STEPS or not measured:
            return ""
        return _verdict_in_process(self, measured) if self.in_process else _verdict(self, measured)


def wait_share(times: Sequence[WorkerTimes], waits: WaitTimes) -> float:
    """Return the trainer's waiting time as a share (0 to 1) of the total time of the worker that has run longest."""
    total_ns = max((each.busy_ns + each.idle_ns for each in times), default=0)
    return min(1.0, waits.waited_ns / total_ns) if total_ns else 0.0


def _verdict(stats: ManagerStats, measured: Sequence[WorkerStats]) -> str:
    """Return the verdict on a manager with workers outside the trainer's process.

    The busier side limits the speed: the busiest worker, or the trainer. But if the messages between them take more
    time than either side, the messages limit it.
    """
    busiest = max(measured, key=_at_work)
    at_work, trainer_at_work = _at_work(busiest), 1.0 - stats.wait_share
    core_wait = statistics.fmean(worker.core_wait_share for worker in measured)
    for_a_core = f" and wait for a free core {core_wait:.0%}" if core_wait >= _EVEN else ""
    usually_at_work = statistics.fmean(map(_at_work, measured))
    idle = f"the workers are idle {1.0 - usually_at_work:.0%} of the time{for_a_core}"
    shares = f"{idle}, the trainer waits {stats.wait_share:.0%}"
    is_apart = len(measured) > 1 and all(worker.pid is not None for worker in measured)
    if is_apart and _busy_share(measured) < 1.0 - _EVEN and _trainer_s(measured, stats.wait_share) < _MESSAGE_S:
        alone = f"one process would need {_busy_share(measured):.0%} of the time for all steps"
        cheap = f"too cheap for processes: {shares}; {alone}. "
        if not stats.restarts:
            return f"{cheap}Use kind: simple, or let a probe choose: kind: auto."
        times = "once" if stats.restarts == 1 else f"{stats.restarts:,} times"
        return f"{cheap}Use fewer workers. Stay with processes, since a worker was restarted {times}."
    if 1.0 - at_work - trainer_at_work > max(at_work, trainer_at_work):
        return f"communication-bound: {shares}; messages take the rest. Put more environments in each worker."
    if at_work > trainer_at_work + _EVEN:
        return f"environment-bound: {shares}. {_advice_on_slow_steps(measured, busiest, usually_at_work, core_wait)}"
    its_own = stats.random_policy or _trainer_s(measured, stats.wait_share) < _OWN_S
    if trainer_at_work > at_work + _EVEN:
        if its_own:
            policy, advice = _of_little_cost(stats)
            return (
                f"manager-bound: {shares}; {policy}, so the manager itself takes the rest. "
                f"Put more environments in each worker{advice}."
            )
        return f"policy-bound: {shares}; {_YOURS} take the rest. Make yours faster; workers would not help."
    if its_own:
        return f"balanced: {shares}. Put more environments in each worker: one message then serves them all."
    return f'balanced: {shares}. If each step waits for all workers, wait="any" lets both sides work at the same time.'


def _verdict_in_process(stats: ManagerStats, measured: Sequence[WorkerStats]) -> str:
    """Return the verdict on a manager whose environments all run in the trainer's process."""
    environments, rest = stats.wait_share, 1.0 - stats.wait_share
    its_own = stats.random_policy or _trainer_s(measured, environments) < _OWN_S
    who = "the manager itself" if its_own else _YOURS
    shares = f"the environments take {environments:.0%} of the time, {who} {rest:.0%}"
    if environments > rest + _EVEN:
        return f"environment-bound: {shares}. Make their steps cheaper, or see whether workers help: kind: auto."
    if rest <= environments + _EVEN:
        return f"balanced: {shares}. Workers would let both work at the same time: try kind: auto."
    if its_own:
        policy, advice = _of_little_cost(stats)
        return f"manager-bound: {shares}, since {policy}. Use more environments: one step() serves them all{advice}."
    return f"policy-bound: {shares}. Make yours faster; workers would not help."


def _of_little_cost(stats: ManagerStats) -> tuple[str, str]:
    """Return a clause that says that the policy is random or fast, and further advice, which may be empty."""
    if stats.random_policy:
        return "the policy is random", ", or measure with your own policy"
    return "your policy takes little", ""


def _trainer_s(measured: Sequence[WorkerStats], wait_share: float) -> float:
    """Return the trainer's mean time per worker step, in seconds, excluding the time spent waiting."""
    total_s = max(worker.steps * worker.step_time_s / max(1e-9, 1.0 - worker.idle_share) for worker in measured)
    return (1.0 - wait_share) * total_s / max(1, sum(worker.steps for worker in measured))


def _busy_share(measured: Sequence[WorkerStats]) -> float:
    """Return the sum of all workers' busy shares: the shares of the time in which they had a command."""
    return sum(1.0 - worker.idle_share for worker in measured)


def _at_work(worker: WorkerStats) -> float:
    """Return the share of the time in which a worker had a command or waited for a free core."""
    return min(1.0, 1.0 - worker.idle_share + worker.core_wait_share)


def _advice_on_slow_steps(
    measured: Sequence[WorkerStats], busiest: WorkerStats, usually_at_work: float, core_wait: float
) -> str:
    """Return advice for slow environments. The cause may be one slow worker, too few cores or too few workers."""
    usual_s = statistics.median(worker.step_time_s for worker in measured)
    if busiest.step_time_s >= _MUCH_SLOWER * usual_s and _at_work(busiest) - usually_at_work >= _EVEN:
        ids = busiest.env_ids
        envs = f"env {ids[0]}" if len(ids) == 1 else f"envs {', '.join(map(str, ids))}"
        return (
            f"A step of worker {busiest.worker_id} ({envs}) takes {busiest.step_time_s * 1e3:.3g} ms, of the median "
            f'worker {usual_s * 1e3:.3g} ms: use wait="any", so that the others go on.'
        )
    if core_wait >= _EVEN:
        return "Use more cores, or make the steps cheaper."
    return "Use more workers if cores are free, or make the steps cheaper."
