"""A worker that dies, hangs or raises ends in a typed error within its deadline, and the others go on."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    BadObservation,
    EnvContext,
    EnvRaised,
    RestartPolicy,
    SubprocessEnvManager,
    Timeouts,
    UsageError,
    Wait,
    WorkerError,
    WorkerTimedOut,
)
from envmanager.testing import FakeEnvironment
from envmanager.testing.leaks import SLACK_S

NEVER = RestartPolicy(max_restarts=0)


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def started(factory: Any, n_envs: int = 3, **options: Any) -> SubprocessEnvManager:
    manager = SubprocessEnvManager(factory, n_envs, restarts=NEVER, **options)
    manager.set_policy("default", Zeros())
    manager.reset()
    return manager


def first_error(manager: SubprocessEnvManager, n_calls: int = 1_000_000) -> WorkerError:
    with pytest.raises(WorkerError) as raised:  # noqa: PT012  (any of the calls may be the one)
        for _ in range(n_calls):
            manager.step()
    return raised.value


class HoldsTheGil(FakeEnvironment):
    """Sleeps in native code without giving up the GIL, and ignores SIGTERM."""

    def step(self, actions: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(600)
        return super().step(actions)


def test_close_ends_a_worker_that_hangs_with_the_gil_held_within_close_s() -> None:
    manager = started(HoldsTheGil, 2, timeouts=Timeouts(close_s=1.0))
    manager.step(Wait(timeout_s=0.0))
    before = time.monotonic()
    manager.close()
    assert time.monotonic() - before < 1.0 + SLACK_S


class TwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class CannotBeRebuilt:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("not here")


def test_an_info_that_cannot_be_unpickled_is_an_error_and_the_worker_lives() -> None:
    class Odd(FakeEnvironment):
        def step(self, actions: Any) -> Any:
            results = super().step(actions)
            results["default"].info = [{"error": TwoArguments("a", "b")}]
            return results

    with started([Odd, FakeEnvironment], 2, infos=True) as manager:
        error = first_error(manager)
        assert isinstance(error, EnvRaised)
        assert "cannot be unpickled in the trainer" in error.cause
        assert [info.worker_id for info in manager.step(Wait.all())] == [1]
        assert len(manager.reset()) == 2


def test_a_payload_that_cannot_be_unpickled_in_the_worker_is_an_error_and_the_worker_lives() -> None:
    with started(FakeEnvironment, 2) as manager:
        with pytest.raises(EnvRaised, match="not here") as raised:
            manager.set_attr("label", [CannotBeRebuilt(), 1])
        assert raised.value.phase == "call"
        with pytest.raises(EnvRaised, match="not here"):
            manager.reset({"options": {"odd": CannotBeRebuilt()}})
        assert len(manager.reset()) == 2
        assert {worker.generation for worker in manager.stats().workers} == {0}


def test_a_payload_that_cannot_be_pickled_is_refused_before_anything_is_sent() -> None:
    with started(FakeEnvironment, 2) as manager:
        with pytest.raises(UsageError, match="cannot be pickled"):
            manager.set_attr("label", ["fine", threading.Lock()])
        assert manager.get_attr("closed") == [False, False]
        with pytest.raises(EnvRaised):
            manager.get_attr("label")


class LateBehavior(FakeEnvironment):
    """From its second step on it has a second behavior, whose spec depends on the environment."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__()
        self._size = context.env_id + 2

    @property
    def behavior_specs(self) -> Any:
        from envmanager import ArraySpec, BehaviorSpec

        late = {"late": BehaviorSpec(ArraySpec((self._size,)), ArraySpec((), np.int64))} if self._n_steps >= 2 else {}
        return {**super().behavior_specs, **late}


def test_a_late_behavior_with_two_specs_is_the_fault_of_one_worker() -> None:
    with started(LateBehavior, 2) as manager:
        manager.step(Wait.all())
        with pytest.raises(BadObservation, match="behavior 'late' should be of the spec"):
            manager.step(Wait.all())
        assert "late" in manager.behavior_specs
        assert len(manager.step(Wait.all())) == 1
        assert len(manager.reset()) == 2


def test_a_trainer_that_is_busy_for_longer_than_step_s_kills_nobody() -> None:
    class LargeInfo(FakeEnvironment):
        def step(self, actions: Any) -> Any:
            results = super().step(actions)
            results["default"].info = [{"picture": np.zeros(500_000, np.uint8)}]
            return results

    with started(LargeInfo, 2, infos=True, timeouts=Timeouts(step_s=2.0)) as manager:
        for _ in range(2):
            manager.send(np.zeros(2, np.int64), [0, 1])
            time.sleep(2.5)  # the trainer's own work
            assert len(manager.recv(Wait.all())) == 2


def test_a_worker_that_hangs_in_reset_does_not_take_the_others_along() -> None:
    class Large(FakeEnvironment):
        def __init__(self, context: EnvContext) -> None:
            super().__init__()
            self._hangs = context.env_id == 0 and context.generation == 0

        @property
        def behavior_specs(self) -> Any:
            from envmanager import ArraySpec, BehaviorSpec

            return {"default": BehaviorSpec(ArraySpec((300_000,)), ArraySpec((), np.int64))}

        def reset(self, **arguments: Any) -> Any:
            if self._hangs:
                time.sleep(600)
            results = super().reset(**arguments)
            results["default"].obs = np.zeros((1, 300_000), np.float32)
            return results

    with SubprocessEnvManager(Large, 3, restarts=NEVER, timeouts=Timeouts(reset_s=3.0)) as manager:
        with pytest.raises(WorkerTimedOut) as raised:
            manager.reset()
        assert raised.value.worker_id == 0
        assert len(manager.reset()) == 3
        assert [worker.generation for worker in manager.stats().workers] == [1, 0, 0]


def test_an_env_that_closes_its_pipes_costs_the_trainer_nothing() -> None:
    class ClosesAll(FakeEnvironment):
        def step(self, actions: Any) -> Any:
            os.closerange(3, 1000)
            time.sleep(600)

    with started(ClosesAll, 1, timeouts=Timeouts(step_s=1.0)) as manager:
        before = time.process_time()
        assert isinstance(first_error(manager), WorkerTimedOut)
        assert time.process_time() - before < 0.5
