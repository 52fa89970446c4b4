"""Measures what a step of an environment costs, in a worker process, before the real workers start.

::

    trainer                                        worker of one environment, closed when it was measured
    place ── a manager of one worker ── start ──▶  ProbeFactory: make it, reset it, step it for a moment
          ◀─────────── get_attr("probe") ───────   ProbedEnvironment
          ── choose ──▶ Placement

The rule: the trainer's process never makes the environment. Measuring is a part of the probe worker's start, so that
whatever goes wrong in it is reported as a start that failed, and its end is bounded by Timeouts.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import attrs

from envmanager.adapters.choosing import build_group
from envmanager.adapters.factories import call_factory, factories_for
from envmanager.core.policy_calls import call_policies
from envmanager.data.specs import BehaviorSpec, BehaviorSpecs
from envmanager.data.steps import StepInfo, Steps
from envmanager.data.trees import Tree, leaves
from envmanager.environment import EnvContext, EnvGroup, Environment
from envmanager.errors import UsageError
from envmanager.options import ManagerOptions, RestartPolicy
from envmanager.placing.placement import Placement, Probe, choose
from envmanager.policy import Policy, RandomPolicy
from envmanager.system.cores import count_cores

PROBE_S = 0.5
"""For how long an environment is stepped; a step that takes longer is waited for."""
MAX_STEPS = 20_000
"""After so many steps nothing new is learned about a cheap environment."""
WARM_UP = 0.1
"""The share of the steps, at the beginning, that do not count: what they do for the first time takes longer."""
YARDSTICK_S = 2.3e-6
"""What ``_yardstick`` takes between the steps of a trivial environment on the machine where Costs were measured."""

_T = TypeVar("_T")
_logger = logging.getLogger("envmanager")


def place(
    manager_class: Callable[..., Any], env_factory: Any, options: ManagerOptions, *, in_process: bool
) -> Placement:
    """Where environments of ``env_factory`` should run, after probing the first of them; the choice is logged.

    ``manager_class`` is SubprocessEnvManager. Takes as long as one worker's start and close, and about half a second.
    Raises what a worker's start raises.
    """
    n_workers = None if options.n_workers == "auto" else options.n_workers
    if options.n_envs == 1 and not in_process:
        return Placement("subprocess", 1, "1 environment in 1 worker, because there is only one")
    probe = measure(manager_class, env_factory, options)
    if options.zero_copy:  # nothing is copied out
        probe = attrs.evolve(probe, obs_bytes=0)
    placement = choose(
        probe,
        options.n_envs,
        count_cores(),
        in_process=in_process,
        n_workers=n_workers,
        local_envs=options.local_envs,
    )
    _logger.info("%s", placement)
    return placement


def measure(manager_class: Callable[..., Any], env_factory: Any, options: ManagerOptions) -> Probe:
    """The Probe of the first environment of ``env_factory``, taken in a worker process that then ends."""
    factory = factories_for(env_factory, options.n_envs)[0]
    timeouts = options.timeouts
    # To the worker it is all one start: making the environment, its reset, and the steps.
    start_s = timeouts.start_s + timeouts.reset_s + timeouts.step_s + PROBE_S
    log_dir = options.log_dir
    with manager_class(
        ProbeFactory(factory, options.infos, options.check_values),
        1,
        start_method=options.start_method,
        timeouts=attrs.evolve(timeouts, start_s=start_s),
        restarts=RestartPolicy(max_restarts=0),
        seed=options.seed,
        worker_env=options.worker_env,
        log_dir=None if log_dir is None else os.path.join(log_dir, "probe"),
    ) as manager:
        probe: Probe = manager.get_attr("probe")[0]
    return probe


@attrs.frozen
class ProbeFactory:
    """Makes one environment in a worker, and measures it there and then."""

    factory: Any
    infos: bool = False
    check_values: bool = False

    def __call__(self, context: EnvContext) -> ProbedEnvironment:
        """The measured environment; when measuring fails, it is closed."""
        made = call_factory(self.factory, context)
        try:
            group = build_group([made], [context.env_id], infos=self.infos, check_values=self.check_values)
            probe = probe_group(group, seed=context.seed)
        except BaseException:
            with suppress(Exception):  # the error that is on its way matters more
                made.close()
            raise
        return ProbedEnvironment(group, probe)


class ProbedEnvironment(Environment):
    """An environment that was measured, and is only asked for its ``probe`` and closed."""

    def __init__(self, group: EnvGroup, probe: Probe) -> None:
        self._group = group
        self.probe = probe

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return self._group.behavior_specs

    @property
    def max_agents(self) -> Mapping[str, int]:
        return self._group.max_agents

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        return self._group.reset(seeds=seeds, options=options)

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        return self._group.step(actions)

    def close(self) -> None:
        self._group.close()


def probe_group(
    group: EnvGroup, *, seed: int | None = None, probe_s: float = PROBE_S, max_steps: int = MAX_STEPS
) -> Probe:
    """Reset ``group``, of one environment, and take random steps for ``probe_s`` seconds, at least two steps."""
    started = time.monotonic()
    steps = group.reset(seeds=[seed], options=None)
    reset_s = time.monotonic() - started
    policies: dict[str, Policy] = {}
    times: list[StepTime] = []
    yardsticks: list[StepTime] = []
    deadline = time.monotonic() + probe_s
    with RunDelay() as delay:
        # What the clocks themselves take: an environment may be cheaper than that.
        clocks = StepTime(*map(min, zip(*(_timed(_nothing, delay)[1] for _ in range(20)), strict=True)))
        while len(times) < max_steps and (len(times) < 2 or time.monotonic() < deadline):
            actions = _random_actions(group, steps, policies)
            steps, taken = _timed(functools.partial(group.step, actions), delay)
            times.append(taken.less(clocks))
            _yardstick()  # a step that sleeps leaves cold caches behind
            yardsticks.append(_timed(_yardstick, delay)[1].less(clocks))
    return summarize(times, yardsticks, reset_s=reset_s, obs_bytes=_size_bytes(steps))


def _timed(act: Callable[[], _T], delay: RunDelay) -> tuple[_T, StepTime]:
    """What ``act()`` returns, and how long it took."""
    delay_ns, cpu_ns, wall_ns = delay.ns(), time.process_time_ns(), time.monotonic_ns()
    result = act()
    wall_ns = time.monotonic_ns() - wall_ns
    cpu_ns = time.process_time_ns() - cpu_ns
    return result, StepTime.of(wall_ns, cpu_ns, delay.ns() - delay_ns)


def _nothing() -> None: ...


def _yardstick() -> int:
    """What interpreters do all day. Timed beside each step, it tells how fast this machine is at that moment."""
    table = {}
    for key in range(12):
        table[key] = [key, str(key)]
    return sum(len(pair) for pair in table.values())


class StepTime(NamedTuple):
    """How long a step took, without what it waited for a free core, and the processor time of all its threads."""

    wall_ns: int
    cpu_ns: int

    @classmethod
    def of(cls, wall_ns: int, cpu_ns: int, delay_ns: int) -> StepTime:
        """From the clock, the processor time and the wait for a core; it took at least what it computed."""
        return cls(max(wall_ns - delay_ns, min(wall_ns, cpu_ns)), max(0, cpu_ns))

    def less(self, other: StepTime) -> StepTime:
        """Without what ``other`` took."""
        return StepTime(max(0, self.wall_ns - other.wall_ns), max(0, self.cpu_ns - other.cpu_ns))


def summarize(times: Sequence[StepTime], yardsticks: Sequence[StepTime], *, reset_s: float, obs_bytes: int) -> Probe:
    """The figures of the steps after the warm-up, and of the yardstick beside each."""
    first = max(1, int(len(times) * WARM_UP))
    counted = times[first:]
    walls = sorted(step.wall_ns for step in counted)
    mean_ns = statistics.fmean(walls)
    slow_ns, usual_ns = walls[int(0.95 * (len(walls) - 1))], statistics.median(walls)
    return Probe(
        wall_s=mean_ns / 1e9,
        cpu_s=statistics.fmean(step.cpu_ns for step in counted) / 1e9,
        unevenness=(slow_ns - usual_ns) / max(1.0, mean_ns),
        reset_s=reset_s,
        obs_bytes=obs_bytes,
        n_steps=len(times),
        slowness=statistics.fmean(each.wall_ns for each in yardsticks[first:]) / 1e9 / YARDSTICK_S,
    )


class RunDelay:
    """How long this thread has waited for a free core, so that a busy machine does not look like a slow environment."""

    def __init__(self) -> None:
        try:
            self._fd: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:  # the kernel does not count
            self._fd = None

    def ns(self) -> int:
        """Nanoseconds since the thread began; 0 where the kernel does not report it."""
        if self._fd is None:
            return 0
        words = os.pread(self._fd, 100, 0).split()  # time on a core, time waiting for one, number of turns
        return int(words[1]) if len(words) == 3 else 0

    def __enter__(self) -> RunDelay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _random_actions(group: EnvGroup, steps: Steps, policies: dict[str, Policy]) -> dict[str, Tree]:
    for behavior, spec in group.behavior_specs.items():
        if behavior not in policies:
            policies[behavior] = _random_policy(spec)
    taken = call_policies([StepInfo(None, steps, None, 0)], policies, group.behavior_specs)[0]
    return {behavior: info.action for behavior, info in taken.items()}


def _random_policy(spec: BehaviorSpec) -> Policy:
    try:
        return RandomPolicy(spec)
    except UsageError as error:
        raise UsageError(
            'no placement can be found for this environment ("auto"), because its actions are not arrays, so that '
            "nothing can be drawn for a trial. Choose kind and n_workers yourself."
        ) from error


def _size_bytes(steps: Steps) -> int:
    return sum(leaf.nbytes for current in steps.values() for leaf in leaves(current.obs))
