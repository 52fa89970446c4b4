"""A worker that dies, hangs or raises ends in a typed error within its deadline, and the others go on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    EnvContext,
    EnvManagerError,
    EnvRaised,
    RestartPolicy,
    SubprocessEnvManager,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
    WorkerError,
    WorkerTimedOut,
)
from envmanager.testing import Die, FakeEnvironment, Raise, Sleep, Step

NEVER = RestartPolicy(max_restarts=0)
START_METHODS = ["forkserver", "spawn", "fork"]


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def only_env_0(*script: Any) -> Any:
    """Environments of which the first follows ``script`` and the others just step."""

    def make(context: EnvContext) -> FakeEnvironment:
        return FakeEnvironment(script if context.env_id == 0 else [Step()])

    return make


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


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize(
    ("end", "name"),
    [
        (Die(0), "EXIT(0)"),
        (Die(3), "EXIT(3)"),
        (Die(signal_number=signal.SIGKILL), "SIGKILL"),
        (Die(signal_number=signal.SIGSEGV), "SIGSEGV"),
        (Die(signal_number=signal.SIGABRT), "SIGABRT"),
    ],
    ids=["exit 0", "exit 3", "SIGKILL", "SIGSEGV", "SIGABRT"],
)
def test_a_worker_that_dies_in_step_is_named_with_its_exit(start_method: Any, end: Die, name: str) -> None:
    with started(only_env_0(Step(), end), start_method=start_method) as manager:
        error = first_error(manager)

        assert isinstance(error, WorkerDied)
        assert (error.worker_id, error.env_ids, error.exit, error.phase) == (0, (0,), name, "step")
        assert {info.worker_id for _ in range(5) for info in manager.step(Wait.all())} == {1, 2}
        with pytest.raises(WorkerDied):
            manager.get_attr("closed", env_ids=[0])
        assert len(manager.reset()) == 3
        assert manager.stats().workers[0].generation == 1
        assert len(manager.step(Wait.all())) == 3


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_worker_killed_while_idle_is_noticed_at_the_next_wait(start_method: Any) -> None:
    with started(FakeEnvironment, start_method=start_method) as manager:
        manager.step(Wait.all())
        os.kill(manager.stats().workers[1].pid or 0, signal.SIGKILL)
        before = time.monotonic()
        error = first_error(manager)

        assert time.monotonic() - before < 2.0
        assert isinstance(error, WorkerDied)
        assert (error.worker_id, error.exit) == (1, "SIGKILL")


def test_when_all_workers_die_at_once_each_is_told_and_nothing_hangs() -> None:
    with started(FakeEnvironment) as manager:
        manager.step(Wait.all())
        for worker in manager.stats().workers:
            os.kill(worker.pid or 0, signal.SIGKILL)
        told = set()
        for _ in range(3):
            with pytest.raises(WorkerDied) as raised:
                manager.step(Wait.all())
            told.add(raised.value.worker_id)
        assert told == {0, 1, 2}
        with pytest.raises(UsageError, match="every worker has failed"):
            manager.step()
        assert len(manager.reset()) == 3


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_step_that_hangs_times_out_while_the_others_go_on(start_method: Any) -> None:
    timeouts = Timeouts(step_s=1.0)
    with started(only_env_0(Step(), Sleep(600)), start_method=start_method, timeouts=timeouts) as manager:
        before = time.monotonic()
        handed_out = set()
        with pytest.raises(WorkerTimedOut) as raised:  # noqa: PT012
            while True:
                handed_out |= {info.worker_id for info in manager.step()}

        assert time.monotonic() - before < 1.0 + 2.0
        assert handed_out == {0, 1, 2}
        assert (raised.value.worker_id, raised.value.phase, raised.value.timeout_s) == (0, "step", 1.0)
        assert len(manager.step(Wait.all())) == 2
        assert len(manager.reset()) == 3


class HoldsTheGil(FakeEnvironment):
    """Sleeps in native code without giving up the GIL, and ignores SIGTERM."""

    def step(self, actions: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(600)
        return super().step(actions)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_step_that_hangs_with_the_gil_held_times_out(start_method: Any) -> None:
    with started(HoldsTheGil, 1, start_method=start_method, timeouts=Timeouts(step_s=0.5)) as manager:
        assert isinstance(first_error(manager), WorkerTimedOut)


def test_close_ends_a_worker_that_hangs_with_the_gil_held_within_close_s() -> None:
    manager = started(HoldsTheGil, 2, timeouts=Timeouts(close_s=1.0))
    manager.step(Wait(timeout_s=0.0))
    before = time.monotonic()
    manager.close()
    assert time.monotonic() - before < 1.0 + 2.0


def test_a_stopped_worker_times_out() -> None:
    with started(FakeEnvironment, 2, timeouts=Timeouts(step_s=0.7)) as manager:
        manager.step(Wait.all())
        os.kill(manager.stats().workers[0].pid or 0, signal.SIGSTOP)
        assert isinstance(first_error(manager), WorkerTimedOut)


def test_a_factory_that_hangs_times_out_and_all_are_stopped() -> None:
    def make(context: EnvContext) -> FakeEnvironment:
        if context.env_id == 1:
            time.sleep(600)
        return FakeEnvironment()

    with pytest.raises(WorkerTimedOut) as raised:
        SubprocessEnvManager(make, 3, timeouts=Timeouts(start_s=2.0))
    assert (raised.value.worker_id, raised.value.phase) == (1, "start")


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_factory_that_ends_its_process_is_named(start_method: Any) -> None:
    def make() -> None:
        os._exit(7)

    with pytest.raises(WorkerDied) as raised:
        SubprocessEnvManager(make, 2, start_method=start_method)
    assert (raised.value.exit, raised.value.phase) == ("EXIT(7)", "start")


class ResetHangs(FakeEnvironment):
    def reset(self, **arguments: Any) -> Any:
        time.sleep(600)


def test_a_reset_that_hangs_times_out() -> None:
    with SubprocessEnvManager(ResetHangs, 2, restarts=NEVER, timeouts=Timeouts(reset_s=0.5)) as manager:
        with pytest.raises(WorkerTimedOut) as raised:
            manager.reset()
        assert raised.value.phase == "reset"


class CallHangs(FakeEnvironment):
    def think(self) -> None:
        time.sleep(600)


def test_a_call_that_hangs_times_out_and_the_worker_is_out() -> None:
    with started(CallHangs, 2, timeouts=Timeouts(call_s=0.5)) as manager:
        with pytest.raises(WorkerTimedOut):
            manager.call("think", env_ids=[0])
        assert [info.worker_id for info in manager.step(Wait.all())] == [1]


class TwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("locked %s %d")
        self.lock = threading.Lock()


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("make_error", [lambda: TwoArguments("a", "b"), HoldsALock], ids=["two arguments", "lock"])
def test_an_exception_that_cannot_travel_is_described(start_method: Any, make_error: Any) -> None:
    class RaisesIt(FakeEnvironment):
        def step(self, actions: Any) -> Any:
            raise make_error()

    with started(RaisesIt, 1, start_method=start_method) as manager:
        error = first_error(manager)

        assert isinstance(error, EnvRaised)
        assert error.type_name in ("TwoArguments", "HoldsALock")
        assert error.cause in ("a and b", "locked %s %d")
        assert "Traceback (most recent call last)" in error.remote_traceback


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        MemoryError("too much"),
        RecursionError("too deep"),
        ConnectionResetError("simulator"),
        EOFError(),
        BrokenPipeError("simulator"),
    ],
    ids=type,
)
def test_any_exception_of_a_step_is_told_and_the_worker_lives(error: BaseException) -> None:
    with started(only_env_0(Raise(error), Step()), 2) as manager:
        pid = manager.stats().workers[0].pid
        told = first_error(manager)

        assert isinstance(told, EnvRaised)
        assert told.type_name == type(error).__name__
        manager.reset()
        assert manager.stats().workers[0].pid == pid
        assert len(manager.step(Wait.all())) == 2


def test_an_info_that_cannot_be_pickled_is_an_error_and_the_worker_lives() -> None:
    class InfoWithALock(FakeEnvironment):
        def step(self, actions: Any) -> Any:
            results = super().step(actions)
            results["default"].info = [{"lock": threading.Lock()}]
            return results

    with started(InfoWithALock, 1, infos=True) as manager:
        error = first_error(manager)
        assert isinstance(error, EnvRaised)
        assert "pickle" in error.cause
        assert len(manager.reset()) == 1


def test_an_env_that_prints_ten_megabytes_blocks_nobody(tmp_path: Any) -> None:
    class Chatty(FakeEnvironment):
        def step(self, actions: Any) -> Any:
            os.write(1, b"x" * 10_000_000)
            print("last words", file=sys.stderr, flush=True)
            os._exit(1)

    with started(Chatty, 1, log_dir=str(tmp_path)) as manager:
        error = first_error(manager)
        assert isinstance(error, WorkerDied)
        assert "last words" in error.output
        assert "last words" in str(error)


def test_a_factory_that_holds_a_lock_is_refused_before_any_process_starts() -> None:
    lock = threading.Lock()

    with pytest.raises(UsageError, match="cannot be pickled"):
        SubprocessEnvManager(lambda: (lock, FakeEnvironment())[1], 1)


def test_memory_that_does_not_fit_is_an_error_and_not_a_crash() -> None:
    class Huge(FakeEnvironment):
        @property
        def behavior_specs(self) -> Any:
            from envmanager import ArraySpec, BehaviorSpec

            return {"default": BehaviorSpec(ArraySpec((1 << 45,), np.uint8), ArraySpec((), np.int64))}

    with pytest.raises(UsageError, match="shared memory"):
        SubprocessEnvManager(Huge, 1)


def test_two_specs_for_one_behavior_are_refused_with_both_shown() -> None:
    class Other(FakeEnvironment):
        @property
        def behavior_specs(self) -> Any:
            from envmanager import ArraySpec, BehaviorSpec

            return {"default": BehaviorSpec(ArraySpec((9,)), ArraySpec((), np.int64))}

    with pytest.raises(UsageError) as raised:
        SubprocessEnvManager([FakeEnvironment, Other], 2)
    assert "float32[3]" in str(raised.value)
    assert "float32[9]" in str(raised.value)


def test_all_errors_of_a_worker_are_of_one_family() -> None:
    assert issubclass(WorkerError, EnvManagerError)


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
        with pytest.raises(UsageError, match="behavior 'late' has another spec"):
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

    with started(LargeInfo, 2, infos=True, timeouts=Timeouts(step_s=1.0)) as manager:
        for _ in range(2):
            manager.send(np.zeros(2, np.int64), [0, 1])
            time.sleep(1.5)  # the trainer's own work
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

    with SubprocessEnvManager(Large, 3, restarts=NEVER, timeouts=Timeouts(reset_s=0.5)) as manager:
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
