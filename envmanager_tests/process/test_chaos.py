"""Workers that are killed and stopped at random, while a trainer that checks everything goes on."""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    EnvContext,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Timeouts,
    UsageError,
    Wait,
)
from envmanager.observe.stats import WorkerStats
from envmanager.testing import EchoEnvironment, chaos
from envmanager_tests.chaos_runs import SendingAndReceiving, Stepping, run_under_chaos

SUITE = "many portable faults"

PLENTY = RestartPolicy(max_restarts=10**6, backoff_s=0.0)


@pytest.mark.parametrize(
    ("kind", "seconds", "rate", "sleep_s"),
    [
        (Stepping, 15, 2.0, 0.005),
        pytest.param(SendingAndReceiving, 60, 0.5, 0.002, marks=pytest.mark.thorough),
    ],
    ids=["step", "send-recv"],
)
def test_under_chaos_nothing_is_mixed_up_and_every_fault_is_told_once(
    kind: Any, seconds: int, rate: float, sleep_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="envmanager")  # each fault is a warning or two
    outcome = run_under_chaos(kind, seconds, rate=rate, seed=seconds, sleep_s=sleep_s, step_s=5.0)
    early, late = outcome.medians(seconds / 4, seconds / 3), outcome.medians(seconds - 5, seconds)
    print(outcome.table(early, late))

    outcome.check_books()
    assert outcome.report.faults > rate * seconds / 5
    assert abs(late.descriptors - early.descriptors) <= 8
    assert late.threads == early.threads
    assert late.rss_mb - early.rss_mb < 20


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def short_steps(context: EnvContext) -> EchoEnvironment:
    return EchoEnvironment(context, sleep_s=0.002)


def running(n_envs: int, **options: Any) -> SubprocessEnvManager:
    manager = SubprocessEnvManager(short_steps, n_envs, restarts=PLENTY, **options)
    manager.set_policy("default", Zeros())
    manager.reset()
    return manager


def step_until(manager: SubprocessEnvManager, condition: Any, *, at_most: int = 100_000) -> None:
    for _ in range(at_most):
        if condition():
            return
        manager.step(Wait.any(timeout_s=1.0))
    raise AssertionError("it did not come true")


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_pauses_are_no_faults_and_everyone_is_resumed() -> None:
    with running(3, timeouts=Timeouts(step_s=60.0)) as manager:
        pids = [worker.pid for worker in manager.stats().workers]
        with chaos(manager, rate=100.0, seed=1, kinds=["pause"], pause_s=0.02) as report:
            step_until(manager, lambda: report.pauses >= 20)

        assert [state_of(pid) == "T" for pid in pids if pid is not None] == [False] * 3
        assert (report.kills, report.freezes, report.faults) == (0, 0, 0)
        assert {each.kind for each in report.injected} == {"pause"}
        assert manager.stats().restarts == 0
        assert [worker.pid for worker in manager.stats().workers] == pids


def test_a_pause_ends_with_the_block() -> None:
    with running(1, timeouts=Timeouts(step_s=60.0)) as manager:
        (worker,) = manager.stats().workers
        with chaos(manager, rate=1000.0, seed=1, kinds=["pause"], pause_s=20.0) as report:
            step_until(manager, lambda: report.pauses)
        assert state_of(worker.pid or 0) != "T"
        step_until(manager, lambda: manager.stats().steps > worker.steps + 100)


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_generation_gets_one_fault_at_most_and_only_when_it_is_well(kind: Any) -> None:
    with running(2, timeouts=Timeouts(step_s=3.0)) as manager:
        with chaos(manager, rate=10_000.0, seed=2, kinds=[kind]) as report:
            step_until(manager, lambda: report.faults >= 6)
        step_until(manager, lambda: manager.stats().restarts == report.faults)

        hit = [(each.worker_id, each.generation) for each in report.injected]
        assert len(set(hit)) == len(hit)
        for worker in manager.stats().workers:
            own = [generation for worker_id, generation in hit if worker_id == worker.worker_id]
            assert own == list(range(worker.generation)), "a generation was skipped, or replaced for another reason"
        assert [each.at_s for each in report.injected] == sorted(each.at_s for each in report.injected)


def test_a_worker_that_hands_out_no_steps_is_left_alone() -> None:
    with running(2) as manager, chaos(manager, rate=10_000.0, seed=2) as report:
        manager.step(Wait.all())
        for _ in range(100):
            manager.get_attr("label")
        assert report.injected == []


def test_the_seed_fixes_what_comes() -> None:
    kinds = []
    for _ in range(2):
        with running(2, timeouts=Timeouts(step_s=60.0)) as manager:
            with chaos(manager, rate=50.0, seed=3, kinds=["pause", "kill"], pause_s=0.0) as report:
                step_until(manager, lambda report=report: len(report.injected) >= 8)
            kinds.append([each.kind for each in itertools.islice(report.injected, 8)])

    assert kinds[0] == kinds[1]
    assert len(set(kinds[0])) == 2


def test_an_error_in_the_block_comes_out_and_the_thread_ends() -> None:
    with running(1) as manager:
        n_descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(KeyError), chaos(manager, rate=1.0, seed=0):
            raise KeyError("the trainer's own")
        assert len(os.listdir("/proc/self/fd")) == n_descriptors


def test_what_goes_wrong_in_the_thread_is_raised_at_the_end(mocker: Any) -> None:
    with running(1) as manager:
        mocker.patch.object(os, "pidfd_open", side_effect=PermissionError("not allowed"))
        with pytest.raises(PermissionError, match="not allowed"), chaos(manager, rate=1000.0, seed=0):
            step_until(manager, lambda: os.pidfd_open.called)


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"kinds": []}, {"kinds": ["scare"]}, {"pause_s": -1.0}])
def test_options_that_make_no_sense_are_refused(options: Any, mocker: Any) -> None:
    manager = mocker.Mock(spec=SubprocessEnvManager)
    with pytest.raises(UsageError, match="chaos needs"), chaos(manager, **{"rate": 1.0, "seed": 0, **options}):
        pass
    assert not manager.mock_calls


def test_workers_on_another_machine_are_refused(mocker: Any) -> None:
    manager = mocker.Mock(spec=SubprocessEnvManager)
    manager.stats.return_value.workers = (WorkerStats(worker_id=0, env_ids=(0,), pid=os.getppid(), node="elsewhere"),)
    with pytest.raises(UsageError, match="of this machine"), chaos(manager, 1.0, 0):
        pass


def test_a_manager_without_processes_is_refused() -> None:
    refused = pytest.raises(UsageError, match="whose workers are processes")
    with SimpleEnvManager(EchoEnvironment, 2) as manager, refused, chaos(manager, 1.0, 0):
        pass
