"""``local_envs``: a share of the environments runs in the trainer's process, as one more worker."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ManagerOptions,
    RestartPolicy,
    SubprocessEnvManager,
    UsageError,
    Wait,
    make_manager,
)
from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.hosts.local_worker import LocalStepQueue
from envmanager.kernel.host import ResponseSource
from envmanager.testing import EchoEnvironment, Raise, faulty
from envmanager.testing.fault_checks import CheckedTrainer, is_gone, until
from envmanager_tests.envs import CountsSteps

WAITS = [Wait.any(), Wait.all(), Wait(min_ready=2), Wait(max_ready=1), Wait(max_lead=2)]


class WithPid(EchoEnvironment):
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("n_workers", [None, 2])
def test_the_last_environments_run_in_this_process_and_the_others_in_workers(n_workers: int | None) -> None:
    with SubprocessEnvManager(WithPid, 6, n_workers=n_workers, local_envs=2) as manager:
        manager.reset()
        pids = manager.call("pid")
        workers = manager.stats().workers
    n_apart = 4 if n_workers is None else n_workers
    assert [pid == os.getpid() for pid in pids] == [False] * 4 + [True] * 2
    assert len(set(pids)) == n_apart + 1
    assert workers[-1].env_ids == (4, 5)
    assert workers[-1].pid is None
    assert len(workers) == manager.n_workers == n_apart + 1


@pytest.mark.parametrize("wait", WAITS, ids=str)
@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
def test_every_step_is_paired_whatever_is_waited_for(wait: Wait, zero_copy: bool) -> None:
    with SubprocessEnvManager(EchoEnvironment, 5, n_workers=2, local_envs=2, zero_copy=zero_copy) as manager:
        trainer = CheckedTrainer(manager)
        trainer.reset()
        trainer.step_until(lambda: min(trainer.n_infos[worker_id] for worker_id in range(3)) >= 20, wait=wait)
        trainer.reset()
        trainer.go_on(range(3))


@pytest.mark.parametrize("wait", [Wait.any(), Wait.all()], ids=str)
def test_send_and_recv_reach_every_environment(wait: Wait) -> None:
    with SubprocessEnvManager(CountsSteps, 5, n_workers=2, local_envs=2, wait=wait) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        n_steps = np.zeros(5, np.int64)
        while n_steps.min() < 30:
            manager.send(batch.env_ids, batch.env_ids)
            batch = manager.recv()
            n_steps[batch.env_ids] += 1
            assert (batch.obs[:, 0] == n_steps[batch.env_ids]).all()
            assert (batch.reward == batch.env_ids).all()


def test_an_exception_in_this_process_replaces_its_environments_alone() -> None:
    policy = RestartPolicy(on_exception="restart", backoff_s=0.0)
    factory = faulty(Raise(ValueError("local")), after=5, only_env=3, only_generation=0)
    with SubprocessEnvManager(factory, 4, n_workers=2, local_envs=1, restarts=policy) as manager:
        trainer = CheckedTrainer(manager)
        trainer.reset()
        trainer.step_until(lambda: bool(trainer.lost))
        trainer.go_on(range(3), n_steps=10)
        assert [info.worker_id for info in trainer.lost] == [2]
        assert [worker.generation for worker in trainer.workers] == [0, 0, 1]


def test_a_worker_that_dies_is_replaced_while_this_process_goes_on() -> None:
    with SubprocessEnvManager(EchoEnvironment, 4, n_workers=2, local_envs=1) as manager:
        trainer = CheckedTrainer(manager)
        trainer.reset()
        trainer.go_on(range(3))
        pid = trainer.pid_of(1)
        os.kill(pid, signal.SIGKILL)
        until(lambda: is_gone(pid))
        trainer.step_until(lambda: bool(trainer.lost))
        trainer.go_on(range(3), n_steps=10)
        assert [worker.generation for worker in trainer.workers] == [0, 1, 0]


def test_environments_of_this_process_are_closed_with_the_manager() -> None:
    closed = []

    class Closing(EchoEnvironment):
        def close(self) -> None:
            closed.append(self.label)

    with SubprocessEnvManager(Closing, 3, n_workers=1, local_envs=2) as manager:
        manager.reset()
    assert closed == ["env 1", "env 2"]


def test_a_constructor_that_fails_in_this_process_stops_the_workers() -> None:
    with pytest.raises(Exception, match="local") as failure:
        SubprocessEnvManager(faulty(Raise(ValueError("local")), at="start", only_env=2), 3, local_envs=1)
    assert failure.value.worker_id == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_envs": 4, "local_envs": 4}, "leaves none of n_envs=4"),
        ({"n_envs": 4, "local_envs": -1}, "local_envs must be a whole number of at least 0"),
        ({"n_envs": 4, "n_workers": 3, "local_envs": 2}, "n_workers=3 is more than n_envs=4 without local_envs=2"),
    ],
    ids=str,
)
def test_a_share_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ManagerOptions(**options)


@pytest.mark.parametrize("kind", ["subprocess", "auto"])
def test_a_probe_places_the_other_environments(kind: str) -> None:
    config = {"kind": kind, "n_envs": 4, "n_workers": "auto", "local_envs": 2}
    with make_manager(config, EchoEnvironment) as manager:
        manager.reset()
        assert manager.stats().placement.startswith("2 in this process and 2 environments in ")
        assert manager.stats().workers[-1].env_ids == (2, 3)


def test_kind_simple_takes_no_notice_of_it() -> None:
    with make_manager({"kind": "simple", "n_envs": 3, "local_envs": 1}, EchoEnvironment) as manager:
        assert len(manager.reset()) == 1


# The order of answers, without processes.


class Others(ResponseSource):
    def __init__(self) -> None:
        self.answers: list[EnvironmentResponse] = []
        self.deadlines: list[float] = []

    def take(self) -> Sequence[EnvironmentResponse]:
        taken, self.answers = self.answers, []
        return taken

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        self.deadlines.append(deadline)
        return self.take()


class Local:
    def __init__(self) -> None:
        self.has_step = True

    def take_step(self) -> Sequence[EnvironmentResponse]:
        had, self.has_step = self.has_step, False
        return [answer(2)] if had else []


def answer(worker_id: int) -> EnvironmentResponse:
    return EnvironmentResponse(CommandName.STEP, worker_id, {})


def workers_of(responses: Sequence[EnvironmentResponse]) -> list[int]:
    return [response.worker_id for response in responses]


def test_what_others_have_answered_comes_before_a_step_in_this_process() -> None:
    others = Others()
    step_queue = LocalStepQueue([None, None, Local()], 2, others)
    others.answers = [answer(0), answer(1)]
    assert workers_of(step_queue.get(1, math.inf)) == [0, 1]
    assert workers_of(step_queue.get(1, math.inf)) == [2]


def test_this_process_steps_when_every_other_worker_has_had_its_turn() -> None:
    others = Others()
    step_queue = LocalStepQueue([None, None, Local()], 2, others)
    others.answers = [answer(0), answer(0)]
    assert workers_of(step_queue.take()) == [0, 0]
    others.answers = [answer(0)]
    assert workers_of(step_queue.take()) == [2, 0]


def test_take_steps_nothing_as_long_as_others_have_their_turn_before_them() -> None:
    local = Local()
    assert workers_of(LocalStepQueue([None, None, local], 2, Others()).take()) == []
    assert local.has_step


def test_with_nothing_to_step_others_are_waited_for() -> None:
    others, local = Others(), Local()
    local.has_step = False
    assert workers_of(LocalStepQueue([None, None, local], 2, others).get(1, 1.5)) == []
    assert others.deadlines == [1.5]


def test_those_of_the_others_stay_where_they_are_when_the_step_in_this_process_is_interrupted() -> None:
    class Interrupted(Local):
        def take_step(self) -> Sequence[EnvironmentResponse]:
            raise KeyboardInterrupt

    others = Others()
    step_queue = LocalStepQueue([None, Interrupted()], 1, others)
    others.answers = [answer(0)]
    step_queue.take()
    others.answers = [answer(0)]
    with pytest.raises(KeyboardInterrupt):
        step_queue.take()
    assert workers_of(others.answers) == [0]
