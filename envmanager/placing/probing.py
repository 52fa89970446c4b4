"""Measurement of the cost of an environment's steps, in a worker, before the manager's own workers start.

::

    trainer                                        worker of one environment, closed after the measurement
    place ── a manager of one worker ── start ──▶  make_probed: make the environment
                                     ── reset ──▶  ProbedEnvironment: reset it
                                     ── step ───▶  time some random steps; repeated until the measurement ends
                                     ── step ───▶  do nothing: the trainer measures the messages
          ◀─────────── get_attr("probe") ───────
                                     ── call ───▶  close it
          ── choose ──▶ Placement ── several in a process? ──▶ try_two (in pair.py)

The probe does not make the environment in the trainer's process. By default, each environment gets its own worker if
one ended the probe's worker in the reset, in a step or in ``close()``, or if two cannot live in one process.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import attrs
import numpy as np

from envmanager.adapters.choosing import build_group, n_envs_of
from envmanager.adapters.factories import call_factory, factories_for
from envmanager.data.seeding import derive_seeds
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AgentSteps, Steps
from envmanager.data.trees import Tree, leaves
from envmanager.environment import EnvContext, EnvGroup
from envmanager.errors import BadObservation, EnvRaised, UsageError, WorkerError
from envmanager.options import ProcessOptions
from envmanager.placing.pair import Hosted, OnePerProcess, actions_for, probing_manager, try_two
from envmanager.placing.placement import Placement, Probe, better_form, choose, isolate
from envmanager.policy import Policy, RandomPolicy
from envmanager.system.machine import count_cores

PROBE_S = 0.5
"""Time in seconds for which an environment is stepped. A step that has begun is completed."""
MAX_STEPS = 20_000
WARM_UP = 0.1
"""Share of the steps that is discarded at the start, because the first steps import, allocate and fill caches."""
LEAST_CLOSE_S = 0.5
"""Least time in seconds that ``close()`` of an environment has before it counts as hung."""
N_MESSAGES = 50
"""Number of round trips measured. Only the fastest counts: on a busy machine the others include waits for a core."""

_T = TypeVar("_T")
_logger = logging.getLogger("envmanager")


class ProbeEnded(Exception):
    """Error raised when an environment fails during its probe. ``error`` is the WorkerError that ended the probe."""

    def __init__(self, error: WorkerError, doing: str) -> None:
        super().__init__(f"an environment failed in {doing} when it was tried ({error.cause})")
        self.error, self.headline = error, error.headline


def place(
    manager_class: Callable[..., Any],
    env_factory: Any,
    options: ProcessOptions,
    *,
    in_process: bool,
    vectorised: Any = None,
) -> Placement:
    """Probe the first environment of ``env_factory``, then log and return a placement for all environments.

    ``manager_class`` is SubprocessEnvManager. ``in_process``: whether the trainer's process may run all environments.
    ``vectorised``: an optional factory of the environments' vectorised form, which is probed as well. A single
    environment that must run in a worker is not probed. Two environments are tried in one process if the fastest
    placement has several in one. Raises the same errors as ``measure``, except ProbeEnded.
    """
    if options.n_envs == 1 and not in_process:
        return Placement("subprocess", 1, "1 environment in 1 worker, because there is only one")
    n_workers = None if options.n_workers == "auto" else options.n_workers
    try:
        probe = measure(manager_class, env_factory, options)
        placement = _fastest(probe, options, in_process, n_workers)
        if placement.shares_a_process(options.n_envs):
            try_two(manager_class, factories_for(env_factory, options.n_envs), options)
    except (ProbeEnded, OnePerProcess) as error:
        reason = f"{error}: each can be replaced alone" if isinstance(error, ProbeEnded) else str(error)
        placement = isolate(reason, options.n_envs, n_workers=n_workers, local_envs=options.local_envs)
    else:
        if vectorised is not None:
            try:
                vector_probe = measure(manager_class, vectorised, options)
            except (WorkerError, ProbeEnded) as error:
                why = f"not in their vectorised form, which failed when it was tried: {error.headline}"
                placement = attrs.evolve(placement, reason=f"{placement}; {why}")
            else:
                vector = _fastest(vector_probe, options, in_process, n_workers)
                placement = better_form(placement, probe, vector, vector_probe)
    _logger.info("%s", placement)
    return placement


def _fastest(probe: Probe, options: ProcessOptions, in_process: bool, n_workers: int | None) -> Placement:
    n_envs, local_envs = options.n_envs, options.local_envs
    if probe.n_rows is not None and probe.n_rows != n_envs:  # a vector of a fixed size
        local_envs = 0 if local_envs == "auto" else local_envs
        n_workers, in_process = max(1, (n_envs - local_envs) // probe.n_rows), False
    return choose(
        attrs.evolve(probe, obs_bytes=0) if options.zero_copy else probe,  # observations are not copied
        n_envs,
        count_cores(),
        in_process=in_process,
        n_workers=n_workers,
        local_envs=local_envs,
    )


def measure(manager_class: Callable[..., Any], env_factory: Any, options: ProcessOptions) -> Probe:
    """Measure the first environment of ``env_factory`` in a temporary worker, and return a Probe.

    A vectorised environment is measured with all its rows, and its Probe states the costs per row.

    Raises ProbeEnded if the reset, a step or ``close()`` ends the process or takes too long, and WorkerError or
    UsageError if the environment cannot be made. EnvRaised and BadObservation are raised, or ProbeEnded with
    ``on_exception="restart"``; in ``close()`` they do not matter.
    """
    factory = functools.partial(
        make_probed,
        factories_for(env_factory, options.n_envs)[0],
        n_envs=options.n_envs,
        infos=options.infos,
        check_values=options.check_values,
    )
    limits = {"step_s": options.timeouts.step_s + PROBE_S, "call_s": max(LEAST_CLOSE_S, options.timeouts.close_s)}
    with probing_manager(manager_class, factory, options, "probe", **limits) as manager:
        doing = "the reset"
        try:
            manager.reset()
            (n_steps, is_done), *_ = manager.recv().obs
            while not is_done:
                doing = (
                    f"step {n_steps + 1:,}" if n_steps < 2 else f"one of the steps {n_steps + 1:,} to {2 * n_steps:,}"
                )
                manager.send(np.zeros(1, np.int64), [0])
                (n_steps, is_done), *_ = manager.recv().obs
            trip_s = math.inf
            for _ in range(N_MESSAGES):
                began = time.perf_counter()
                manager.send(np.zeros(1, np.int64), [0])
                manager.recv()
                trip_s = min(trip_s, time.perf_counter() - began)
            probe: Probe = attrs.evolve(manager.get_attr("probe")[0], message_s=trip_s / 2)
            doing = "close()"
            with suppress(EnvRaised):  # a trainer logs it and goes on
                manager.call("close")
        except WorkerError as error:
            if isinstance(error, EnvRaised | BadObservation) and options.restarts.on_exception == "raise":
                raise
            raise ProbeEnded(error, doing) from error
    return probe


def make_probed(factory: Any, context: EnvContext, *, n_envs: int = 1, **options: bool) -> ProbedEnvironment:
    """Return a ProbedEnvironment around a new environment, or around a vector of ``n_envs`` environments.

    ``options`` are those of ``build_group``. If wrapping fails, close the environment.
    """
    made = call_factory(factory, attrs.evolve(context, n_envs=n_envs))
    try:
        n_rows = n_envs_of(made)
        return ProbedEnvironment(build_group([made], range(n_rows or 1), **options), n_rows=n_rows)
    except BaseException:
        with suppress(Exception):  # the first error matters more
            made.close()
        raise


class ProbedEnvironment(Hosted):
    """An environment that measures another one. Each step about doubles the number of random steps taken in the other.

    An observation is ``[number of random steps, whether the measurement has ended]``. After the end, ``probe`` holds
    the result, and further steps do nothing. After a failure, the last observation shows the trainer about how many
    steps preceded the failure. If there is no observation, the reset failed.
    """

    SPEC = BehaviorSpec(ArraySpec((2,), np.int64), ArraySpec((), np.int64))

    def __init__(
        self, group: EnvGroup, *, n_rows: int | None = None, probe_s: float = PROBE_S, max_steps: int = MAX_STEPS
    ) -> None:
        """Prepare to measure ``group`` for ``probe_s`` seconds, with at least two and at most ``max_steps`` steps.

        ``group`` has one environment, or is a vector of ``n_rows`` environments.
        """
        self._group: Any = group  # None when it is closed
        self._n_rows = n_rows
        self._probe_s, self._max_steps = probe_s, max_steps
        self._policies = {name: _random_policy(spec) for name, spec in group.behavior_specs.items()}
        self._steps: Steps = {}
        self._times: list[StepTime] = []
        self._deadline = 0.0

    @property
    def is_done(self) -> bool:
        """Whether the measurement has ended."""
        n_steps = len(self._times)
        return n_steps >= self._max_steps or (n_steps >= 2 and time.monotonic() >= self._deadline)

    @property
    def probe(self) -> Probe:
        """A Probe with the costs of the steps taken so far. The costs of a vector are per row."""
        obs_bytes = sum(leaf.nbytes for each in self._steps.values() for leaf in leaves(each.obs))
        probe = attrs.evolve(summarize(self._times, obs_bytes), behavior_specs=dict(self._group.behavior_specs))
        if self._n_rows is None:
            return probe
        fixed_s = max(0.0, probe.wall_s - probe.cpu_s)
        return attrs.evolve(
            probe,
            n_rows=self._n_rows,
            fixed_s=fixed_s,
            wall_s=(probe.wall_s - fixed_s) / self._n_rows,
            cpu_s=probe.cpu_s / self._n_rows,
            obs_bytes=probe.obs_bytes // self._n_rows,
            unevenness=0.0,  # all rows of a worker wait for the slowest anyway
            begins_late=self._group.batch_size > 0,
        )

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        own_seeds = seeds if len(self._group.env_ids) == 1 else derive_seeds(seeds[0], self._group.env_ids)
        self._steps = self._group.reset(seeds=own_seeds, options=options)
        self._deadline = time.monotonic() + self._probe_s
        return self._progress()

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        if self.is_done:
            return self._progress()
        n_before = len(self._times)
        with RunDelay() as delay:
            # Time that reading the clocks takes, which is subtracted because a step may take less.
            clocks = StepTime(*map(min, zip(*(_timed(lambda: None, delay)[1] for _ in range(20)), strict=True)))
            while len(self._times) < max(1, 2 * n_before) and not self.is_done:
                taken = actions_for(self._steps, self._policies, self._group.behavior_specs, _random_policy)
                self._steps, step_time = _timed(functools.partial(self._group.step, taken), delay)
                self._times.append(step_time.less(clocks))
        return self._progress()

    def close(self) -> None:
        """Close the environment, and delete it, because that may end the process too. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        del group
        gc.collect()

    def _progress(self) -> Steps:
        obs = np.array([[len(self._times), self.is_done]], np.int64)
        return {"default": AgentSteps.first(agent_id=np.zeros(1, np.int64), obs=obs)}


def _timed(act: Callable[[], _T], delay: RunDelay) -> tuple[_T, StepTime]:
    """Call ``act`` and return its result and StepTime. Waits for a core, measured by ``delay``, are excluded."""
    delay_ns, cpu_ns, wall_ns = delay.ns(), time.process_time_ns(), time.perf_counter_ns()
    result = act()
    wall_ns = time.perf_counter_ns() - wall_ns
    cpu_ns = time.process_time_ns() - cpu_ns
    return result, StepTime.of(wall_ns, cpu_ns, delay.ns() - delay_ns)


class StepTime(NamedTuple):
    """Wall time of a step, without waits for a free core, and its CPU time over all threads of the process."""

    wall_ns: int
    cpu_ns: int

    @classmethod
    def of(cls, wall_ns: int, cpu_ns: int, delay_ns: int) -> StepTime:
        """Return a StepTime. The core wait ``delay_ns`` is subtracted from ``wall_ns``, but not below ``cpu_ns``."""
        return cls(max(wall_ns - delay_ns, min(wall_ns, cpu_ns)), max(0, cpu_ns))

    def less(self, other: StepTime) -> StepTime:
        """Return the difference between this StepTime and ``other``, with 0 instead of negative times."""
        return StepTime(max(0, self.wall_ns - other.wall_ns), max(0, self.cpu_ns - other.cpu_ns))


def summarize(times: Sequence[StepTime], obs_bytes: int) -> Probe:
    """Return a Probe with the means and the unevenness of ``times``, ignoring the warm-up steps at the start."""
    counted = times[max(1, int(len(times) * WARM_UP)) :]
    walls = sorted(step.wall_ns for step in counted)
    mean_ns = statistics.fmean(walls)
    slow_ns, usual_ns = walls[int(0.95 * (len(walls) - 1))], statistics.median(walls)
    return Probe(
        wall_s=mean_ns / 1e9,
        cpu_s=statistics.fmean(step.cpu_ns for step in counted) / 1e9,
        unevenness=(slow_ns - usual_ns) / max(1.0, mean_ns),
        obs_bytes=obs_bytes,
        n_steps=len(times),
    )


class RunDelay:
    """A clock of the time that the current thread has waited for a free core. Step times exclude such waits."""

    def __init__(self) -> None:
        try:
            self._fd: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:  # the kernel does not report it
            self._fd = None

    def ns(self) -> int:
        """Return how long (ns) the thread has waited for a core since it began; 0 if the kernel does not report it."""
        if self._fd is None:
            return 0
        os.lseek(self._fd, 0, os.SEEK_SET)
        words = os.read(self._fd, 100).split()  # time on a core, time waiting for one, number of turns
        return int(words[1]) if len(words) == 3 else 0

    def __enter__(self) -> RunDelay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _random_policy(spec: BehaviorSpec) -> Policy:
    try:
        return RandomPolicy(spec)
    except UsageError as error:
        raise UsageError(
            '"auto" cannot choose for this environment, because its actions are not arrays, so that no random ones can '
            "be drawn for a probe. Set kind and n_workers yourself."
        ) from error
