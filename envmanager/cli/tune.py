"""``envmanager tune``: measure placements (numbers of environments and workers, and ``wait``) and show the fastest.

::

    probe ──▶ trials, the most promising first ──▶ rounds: equal time for each trial, then the slower half is dropped
                                                       └──▶ the best so far ──▶ table, config file

The time limit begins after the probe. A start, reset or step in progress can exceed it. At the limit, or earlier after
Ctrl-C, the command ends and shows the best placement so far. No environment runs in the command's own process.
The placement "in process" is measured in a worker, and counts as failed once any trial has restarted a worker.
"""

from __future__ import annotations

import importlib
import logging
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.cli.display import count
from envmanager.cli.hosted import HostedManager
from envmanager.cli.plan import check_out, random_policy, set_policies
from envmanager.cli.run import EXIT_DONE, Notices, StopSignals
from envmanager.cli.tune_display import TuneDisplay
from envmanager.cli.tuning import (
    RAY,
    SUBPROCESS,
    Trial,
    best,
    candidates,
    command_line,
    config_text,
    halve,
    n_rounds,
    remaining,
    restart_options,
    summarize_failures,
    trials_for,
)
from envmanager.errors import ConfigError, EnvManagerError, UsageError, WorkerDied, WorkerError, WorkerTimedOut
from envmanager.observe.events import Restarted
from envmanager.observe.files import write_atomically
from envmanager.options import RestartPolicy, Timeouts, Wait
from envmanager.placing.placement import IN_PROCESS, Probe
from envmanager.placing.probing import ProbeEnded, measure
from envmanager.ray_cluster.options import ClusterOptions
from envmanager.registry import ManagerOptions, make_manager, structure
from envmanager.subprocess_env_manager import SubprocessEnvManager
from envmanager.system.machine import count_cores

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

LEAST_S = 0.1
"""Minimum seconds for which a trial is measured if the deadline allows, even if its start took all of its time."""

LOOK_S = 0.5
"""Maximum seconds for which a trial steps or waits before it checks the deadline again."""

LEAST_PATIENCE_S = 10.0
"""Timeout in seconds of the probe's reset and step. A longer ``--seconds`` raises it; the manager's timeouts cap it."""

RESTARTS = RestartPolicy(max_restarts=1000, backoff_s=0.0)
"""Restart budget of a trial's worker. An environment that dies every 1000 steps may need ten restarts per second."""


@attrs.frozen(kw_only=True)
class TunePlan:
    """The checked options of ``envmanager tune``. If ``out`` is set, the best placement is written to this file."""

    env: str
    n_envs: int | None = None
    seconds: float = 30.0
    out: Path | None = None
    start_method: str | None = None
    kind: str = SUBPROCESS

    def __attrs_post_init__(self) -> None:
        check_out(self.out, ".toml")
        if self.kind not in (SUBPROCESS, RAY):
            raise ConfigError(f"--manager {self.kind}: what can be tuned is {SUBPROCESS} or {RAY}.")
        if self.kind == RAY and self.start_method is not None:
            raise ConfigError(f"--start-method {self.start_method}: Ray starts its processes. Leave it out.")

    def settings(self, trial: Trial | None = None) -> dict[str, Any]:
        """Return the settings of a config's table ``manager`` for ``trial``, or for the probe if ``trial`` is None."""
        own = {"env": self.env, **({} if trial is None else trial.candidate.options())}
        return own if self.start_method is None else {**own, "start_method": self.start_method}


def tune(plan: TunePlan, display: TuneDisplay) -> int:
    """Run the trials, show the results on ``display`` and return the exit code.

    If a signal or an error ends the trials early, the results so far are shown.
    """
    course = _Tuning(plan, display)
    try:
        with _FewNotices(display), StopSignals() as signals:
            course.go(signals)
    finally:
        if any(trial.n_steps or trial.failure for trial in course.trials):
            display.show_result(course.trials, best(course.trials), *course.conclude())
    return EXIT_DONE


class _FewNotices(Notices):
    """A Notices handler that shows only the first restart, because a tuning may have thousands of restarts."""

    _has_restarted = False

    def emit(self, record: logging.LogRecord) -> None:
        is_restart = isinstance(record.args, tuple) and any(isinstance(each, Restarted) for each in record.args)
        if not (is_restart and self._has_restarted):
            super().emit(record)
        self._has_restarted |= is_restart


@attrs.define
class _Tuning:
    """A tuning in progress. ``trials`` has the results so far, even after an error."""

    plan: TunePlan
    display: TuneDisplay
    n_cores: int = 0
    trials: list[Trial] = attrs.field(factory=list)
    deadline: float = 0.0

    def go(self, signals: StopSignals) -> None:
        make, self.n_cores = _managers_and_cores(self.plan.kind)
        tried = candidates(self.plan.n_envs, self.n_cores, self.plan.kind)
        envs = "several numbers of environments" if self.plan.n_envs is None else count(self.plan.n_envs, "environment")
        cores, placements = count(self.n_cores, "core"), count(len(tried), "placement")
        self.display.show_start(f"{self.plan.env}: {envs} on {cores}, {placements}, takes {self.plan.seconds:g} s")
        probe = self._probe(make)
        if probe is None:
            tried = [each for each in tried if each.n_workers != IN_PROCESS]
        self.trials = trials_for(tried, probe, self.n_cores)
        self.deadline = time.perf_counter() + self.plan.seconds
        with self.display.running(self.trials):
            try:
                self._halve_until_the_end()
            finally:
                signals.hold()
        self._require_some_result()

    def _probe(self, make: Callable[..., Any]) -> Probe | None:
        """Probe an environment in a worker. Return None if the worker dies or hangs in a step. Raise other failures."""
        options = structure(ManagerOptions, self.plan.settings())
        own, patience_s = options.timeouts, max(LEAST_PATIENCE_S, self.plan.seconds)
        timeouts = attrs.evolve(own, reset_s=min(own.reset_s, patience_s), step_s=min(own.step_s, patience_s))
        try:
            return measure(make, self.plan.env, attrs.evolve(options, timeouts=timeouts))
        except ProbeEnded as ended:
            if ended.error.phase == "reset":
                raise _no_reset(self.plan.env, ended.error) from ended
            self.display.show_notice(
                "warning", f"{ended}. In process that would end the trainer, so only workers are tried."
            )
            return None

    def conclude(self) -> tuple[list[str], str]:
        """Write the best config if ``plan.out`` is set. Return remarks and the next command, ``""`` without results."""
        winner = best(self.trials)
        lines = summarize_failures(self.trials)
        if winner is None:
            return lines, ""
        speed = f"{winner.steps_per_s:,.0f} environment steps/s with random actions"
        lines.append(f"best: {winner.candidate}: {speed}")
        settings = {**self.plan.settings(winner), **restart_options(winner, RESTARTS)}
        if self.plan.out is None:
            return lines, command_line(settings)
        remark = f"Found by envmanager tune on {count(self.n_cores, 'core')}: {speed}."
        write_atomically(self.plan.out, config_text(settings, remark=remark))
        return lines, shlex.join(["envmanager", "run", str(self.plan.out)])

    def _halve_until_the_end(self) -> None:
        for left_rounds in range(n_rounds(len(self.trials)), 0, -1):
            now = time.perf_counter()
            self._round(now + (self.deadline - now) / left_rounds)
            if time.perf_counter() >= self.deadline:
                return
            if left_rounds > 1:
                halve(self.trials)

    def _round(self, ends_at: float) -> None:
        """Run every remaining trial for an equal share of the time until ``ends_at`` (by ``time.perf_counter``)."""
        left = remaining(self.trials)
        while left and time.perf_counter() < self.deadline:
            first = left[0].candidate
            size = first.n_envs, first.n_workers
            together = [trial for trial in left if (trial.candidate.n_envs, trial.candidate.n_workers) == size]
            self._try(together, ends_at, n_after=len(left) - len(together))
            left = left[len(together) :]

    def _try(self, trials: Sequence[Trial], ends_at: float, *, n_after: int) -> None:
        """Measure ``trials``, which differ only in ``wait``, in one manager. An EnvManagerError marks all as failed."""
        is_hosted = trials[0].candidate.n_workers == IN_PROCESS
        try:
            with self._hosted(trials[0]) if is_hosted else self._manager(trials[0]) as manager:
                manager.reset()
                for place, trial in enumerate(trials):
                    now = time.perf_counter()
                    share_s = (ends_at - now) / (len(trials) - place + n_after)
                    measure_one = self._measure_hosted if is_hosted else self._measure
                    measure_one(manager, trial, until=min(self.deadline, now + max(LEAST_S, share_s)))
                    self.display.update(trial, is_done=True)
        except EnvManagerError as error:
            for trial in trials:
                trial.fail(_of_the_trainer(error) if is_hosted else error)
                self.display.update(trial, is_done=True)
        if any(trial.restarts for trial in trials):
            self._leave_out_this_process(trials)

    def _leave_out_this_process(self, restarted: Sequence[Trial]) -> None:
        """Mark the in-process trials as failed, because the trials ``restarted`` had to restart a worker."""
        failure = next(trial.last_failure for trial in restarted if trial.last_failure is not None)
        for trial in self.trials:
            if trial.candidate.n_workers == IN_PROCESS and trial.failure is None:
                trial.fail(_of_the_trainer(failure))
                self.display.update(trial, is_done=True)

    def _manager(self, trial: Trial) -> EnvManager:
        options = structure(ManagerOptions, self.plan.settings(trial))
        return make_manager(attrs.evolve(options, restarts=RESTARTS))

    def _hosted(self, trial: Trial) -> EnvManager:
        """Return a manager with one worker that runs a SimpleEnvManager with the environments of ``trial``."""
        n_envs, own = trial.candidate.n_envs, Timeouts()
        return SubprocessEnvManager(
            partial(HostedManager, self.plan.settings(trial)),
            timeouts=Timeouts(start_s=own.start_s * n_envs, reset_s=own.reset_s * n_envs, call_s=own.step_s * n_envs),
            restarts=RestartPolicy(max_restarts=0),
            start_method=self.plan.start_method,  # type: ignore[arg-type]  # the options are checked
        )

    def _measure_hosted(self, manager: EnvManager, trial: Trial, *, until: float) -> None:
        """Step the worker's HostedManager until the time ``until``, but at least once. Add the results to ``trial``."""
        is_done = False
        while not is_done:
            left_s = until - time.perf_counter()
            trial.add(*manager.call("run", min(LOOK_S, max(0.0, left_s)))[0])
            is_done = time.perf_counter() >= until
            self.display.update(trial, is_done=False)

    def _measure(self, manager: EnvManager, trial: Trial, *, until: float) -> None:
        """Step until the time ``until``, or longer, up to the deadline, if fewer than ``n_workers`` responses arrived.

        Add the results to ``trial``. If it has no steps and a worker was restarted, raise the last restart's cause.
        """
        wait = attrs.evolve(Wait.parse(trial.candidate.wait), timeout_s=LOOK_S)
        n_behaviors = set_policies(manager, random_policy, 0)
        before = manager.stats()
        manager.step(Wait.all(timeout_s=max(0.0, self.deadline - time.perf_counter())))  # so that all begin together
        n_before, n_seen = manager.stats().env_steps, 0
        started = now = time.perf_counter()
        try:
            while now < until or (n_seen < manager.n_workers and now < self.deadline):
                n_behaviors = set_policies(manager, random_policy, n_behaviors)
                n_seen += len(manager.step(wait))
                now = time.perf_counter()
                self.display.update(trial, is_done=False)
        finally:
            now, after = time.perf_counter(), manager.stats()
            trial.add(after.env_steps - n_before, now - started)
            causes = [event.cause for event in manager.events if isinstance(event, Restarted)]
            trial.restarts += after.restarts - before.restarts
            trial.last_failure = causes[-1] if causes else trial.last_failure
        if not trial.n_steps and trial.last_failure is not None:
            raise trial.last_failure

    def _require_some_result(self) -> None:
        if best(self.trials) is not None:
            return
        failures = [trial.failure for trial in self.trials if trial.failure is not None]
        if failures:
            raise failures[0]
        raise UsageError(
            f"nothing was measured within {self.plan.seconds:g} seconds: starting this environment and stepping it "
            "takes longer. Give it more time with --seconds."
        )


def _managers_and_cores(kind: str) -> tuple[Callable[..., Any], int]:
    """Return the manager class for ``kind`` and the number of cores. For Ray, connect and count the cluster's CPUs."""
    if kind == SUBPROCESS:
        return SubprocessEnvManager, count_cores()
    manager = importlib.import_module("envmanager.ray_cluster.manager")  # MissingExtra without Ray
    clusters = importlib.import_module("envmanager.ray_cluster.cluster")
    clusters.connect(ClusterOptions())
    return manager.RayEnvManager, max(1, clusters.n_cpus())


def _no_reset(env: str, error: WorkerError) -> EnvManagerError:
    """Return the error to raise after the probe's reset failed: ``error``, or for a timeout a new error with advice."""
    if not isinstance(error, WorkerTimedOut):
        return error
    return EnvManagerError(
        f"{env} cannot be tuned: its reset took longer than {error.timeout_s:g} s. If it is only slow, give it more "
        f"time with --seconds; if it hangs, see where: envmanager check --env {env}"
    )


def _of_the_trainer(error: Exception) -> Exception:
    """Convert ``error``, which was raised for a worker, to the error that is reported for an in-process placement."""
    if isinstance(error, WorkerDied | WorkerTimedOut):
        return EnvManagerError(f"a failure in process would have ended the trainer ({error.cause})")
    return error.__cause__ if isinstance(error.__cause__, EnvManagerError) else error
