"""Tests of how a manager handles faults, as a class to inherit: FaultContract.

::

    class TestMyManagerUnderFaults(FaultContract):
        has_processes = False

        def make_manager(self, env_factory, n_envs, **options):
            return MyManager(env_factory, n_envs, **options)

The case numbers in the names of the tests are those of the page "Cases of faults" of the documentation. The tests
assert that the right errors are raised, and that the invariants of :mod:`envmanager.testing.fault_checks` hold. They
use only the public interface of managers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager.data.specs import ArraySpec, BehaviorSpec, object_array
from envmanager.env_manager import EnvManager
from envmanager.environment import EnvContext
from envmanager.errors import EnvRaised, UsageError, WorkerDied, WorkerTimedOut
from envmanager.options import Timeouts, Wait
from envmanager.testing.contract import NumberedActions
from envmanager.testing.fakes import Die, EchoEnvironment, FakeEnvironment, Raise, Sleep
from envmanager.testing.fault_checks import (
    IDLE,
    NO_RESTARTS,
    SIGKILL,
    CheckedTrainer,
    FaultyManagers,
    check_close,
    check_error,
    is_gone,
    only_with_processes,
    returns_within,
    unless_windows,
    until,
)
from envmanager.testing.fault_contract_restarts import RestartsAfterFaults, TasksUnderFaults
from envmanager.testing.faults import (
    CloseOutput,
    HoldGil,
    IgnoreSigterm,
    LockedError,
    Meddle,
    Print,
    RaiseNew,
    ReadInput,
    Recurse,
    ReuseArrays,
    SendSignal,
    StartSimulator,
    TwoArgumentError,
    faulty,
    inform,
    surroundings,
)
from envmanager.testing.leaks import descendants

_OBJECT = ArraySpec((), object)


class CodeFaults(FaultyManagers):
    """Tests of faults in the environment's own code: cases 1 to 12 of "Cases of faults" in the documentation."""

    @pytest.mark.parametrize("error", [ValueError("no license"), SystemExit(3), MemoryError("too big")], ids=type)
    def test_case_01_a_constructor_raises_and_all_others_are_stopped(self, error: BaseException) -> None:
        with pytest.raises(EnvRaised) as raised:
            self.make_manager(faulty(Raise(error), at="start", only_env=1), 3)

        told = check_error(raised.value, EnvRaised, worker_id=self.worker_of(1), env_id=1, phase="start")
        assert told.type_name == type(error).__name__
        assert "Traceback (most recent call last)" in told.remote_traceback

    @only_with_processes
    def test_case_02_a_constructor_hangs_and_all_others_are_stopped(self) -> None:
        with pytest.raises(WorkerTimedOut) as raised, returns_within(self.start_s):
            self.make_manager(faulty(Sleep(600), at="start", only_env=1), 2, timeouts=Timeouts(start_s=self.start_s))

        told = check_error(raised.value, WorkerTimedOut, worker_id=1, env_id=1, phase="start")
        assert told.timeout_s == self.start_s

    def test_case_03_every_environment_is_made_once_and_in_its_own_process(self, tmp_path: Path) -> None:
        made = tmp_path / "made"

        def make(context: EnvContext) -> EchoEnvironment:
            with made.open("a", encoding="utf-8") as log:
                log.write(f"{context.env_id} {os.getpid()}\n")
            return EchoEnvironment(context)

        with self.running(make) as trainer:
            trainer.go_on(range(trainer.manager.n_workers))
            trainer.manager.get_attr("label")

        env_ids, pids = zip(
            *(map(int, line.split()) for line in made.read_text(encoding="utf-8").splitlines()), strict=True
        )
        assert sorted(env_ids) == [0, 1, 2]
        assert (os.getpid() in pids) is not self.has_processes

    def test_case_04_a_reset_raises_and_another_reset_works(self) -> None:
        with self.managing(faulty(Raise(ValueError("no track")), at="reset", only_env=1)) as manager:
            trainer = CheckedTrainer(manager)
            with pytest.raises(EnvRaised, match="no track") as raised:
                trainer.reset()
            check_error(raised.value, EnvRaised, worker_id=self.worker_of(1), env_id=1, phase="reset")

            trainer.reset()
            trainer.go_on(range(manager.n_workers))
            assert {worker.generation for worker in trainer.workers} == {0}

    def test_case_05_a_step_raises_and_the_others_results_still_come(self) -> None:
        with self.running(faulty(Raise(ValueError("gear 7 broke")), after=3, only_env=1)) as trainer:
            error = trainer.first_error(wait=Wait.all())

            told = check_error(error, EnvRaised, worker_id=self.worker_of(1), env_id=1, phase="step")
            assert (told.type_name, told.cause) == ("ValueError", "gear 7 broke")
            assert isinstance(told.__cause__, ValueError) or not self.exceptions_travel
            assert str(told).rstrip().endswith("ValueError: gear 7 broke")
            assert told.env_ids == (1,)
            trainer.go_on(self.others_than(1))
            trainer.reset()
            trainer.go_on(range(trainer.manager.n_workers))

    @pytest.mark.parametrize("at", ["reset", "step"])
    @pytest.mark.parametrize(
        ("make_error", "type_name", "cause"),
        [
            (lambda: TwoArgumentError("a", "b"), "TwoArgumentError", "a and b"),
            (LockedError, "LockedError", "locked %s %d"),
        ],
        ids=["cannot be unpickled", "cannot be pickled"],
    )
    def test_case_06_an_exception_that_cannot_travel_is_described(
        self, make_error: Any, type_name: str, cause: str, at: Any
    ) -> None:
        with self.managing(faulty(RaiseNew(make_error), at=at, only_env=1)) as manager:
            trainer = CheckedTrainer(manager)
            with pytest.raises(EnvRaised) as raised:  # noqa: PT012  (either may raise)
                trainer.reset()
                trainer.step(Wait.all())

            told = check_error(raised.value, EnvRaised, worker_id=self.worker_of(1), env_id=1, phase=at)
            assert (told.type_name, told.cause) == (type_name, cause)
            assert "Traceback (most recent call last)" in told.remote_traceback
            trainer.reset()
            trainer.go_on(range(manager.n_workers))

    @pytest.mark.parametrize(
        ("fault", "type_name"),
        [
            (Raise(SystemExit(3)), "SystemExit"),
            (Raise(KeyboardInterrupt()), "KeyboardInterrupt"),
            (Raise(MemoryError("too much")), "MemoryError"),
            (Recurse(), "RecursionError"),
            (Raise(EOFError()), "EOFError"),
            (Raise(BrokenPipeError("the simulator's")), "BrokenPipeError"),
            (Raise(ConnectionResetError("the simulator's")), "ConnectionResetError"),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_case_07_any_error_in_a_step_is_reported_and_the_worker_lives(self, fault: Any, type_name: str) -> None:
        if type_name == "KeyboardInterrupt" and not self.has_processes:
            pytest.skip("in this process it is the user's Ctrl-C")
        with self.running(faulty(fault, after=3, only_env=1)) as trainer:
            pids = [worker.pid for worker in trainer.workers]
            told = check_error(trainer.first_error(), EnvRaised, worker_id=self.worker_of(1), env_id=1, phase="step")
            assert told.type_name == type_name

            trainer.go_on(self.others_than(1))
            trainer.reset()
            trainer.go_on(range(trainer.manager.n_workers))
            assert [worker.pid for worker in trainer.workers] == pids

    @pytest.mark.parametrize("error", [ValueError("no handle"), SystemExit(3)], ids=type)
    def test_case_08_a_close_that_raises_does_not_hinder_ours(self, error: BaseException) -> None:
        with self.running(faulty(Raise(error), at="close")) as trainer:
            trainer.step()

    @only_with_processes
    @pytest.mark.parametrize("faults", [[Sleep(600)], [IgnoreSigterm(), HoldGil()]], ids=["asleep", "with the GIL"])
    def test_case_08_a_close_that_hangs_is_ended_in_close_s(self, faults: Any) -> None:
        with self.running(faulty(faults, at="close"), timeouts=Timeouts(close_s=1)) as trainer:
            trainer.step()

    def test_case_09_ten_megabytes_of_output_block_no_worker(self) -> None:
        with self.running(faulty(Print("x", times=10_000_000), after=1, only_env=1)) as trainer:
            trainer.go_on(range(trainer.manager.n_workers))

    @only_with_processes
    @pytest.mark.parametrize("fault", [CloseOutput(), ReadInput()], ids=["closes its output", "reads its input"])
    def test_case_09_closing_or_reading_the_standard_streams_harms_nothing(self, fault: Any) -> None:
        with self.running(faulty(fault, after=1, only_env=1)) as trainer:
            trainer.go_on(range(3))

    @only_with_processes
    def test_case_09_the_end_of_the_output_is_in_the_error(self, tmp_path: Path) -> None:
        output_tail = [Print("x", times=10_000_000), Print("these were my last words"), Die(1)]
        with self.running(
            faulty(output_tail, after=1, only_env=1), restarts=NO_RESTARTS, log_dir=str(tmp_path)
        ) as trainer:
            told = check_error(trainer.first_error(), WorkerDied, worker_id=1, env_id=1, phase="step")
            assert "these were my last words" in told.output
            assert "these were my last words" in str(told)

    @only_with_processes
    def test_case_10_what_an_environment_does_to_its_process_stays_there(self) -> None:
        with self.running(faulty(Meddle(), after=1, only_env=1)) as trainer:
            before = surroundings(), trainer.manager.call("surroundings")
            trainer.go_on(range(3))
            after = surroundings(), trainer.manager.call("surroundings")

        (ours_before, (first_before, meddler_before, _)) = before
        (ours_after, (first_after, meddler_after, _)) = after
        assert ours_after == ours_before
        assert first_after == first_before
        assert all(meddler_after[key] != meddler_before[key] for key in meddler_before)

    @only_with_processes
    @pytest.mark.parametrize("dies", [True, False], ids=["the worker dies", "the manager closes"])
    @unless_windows(reason="Windows lacks /bin/sh")
    def test_case_11_a_simulator_ends_with_its_worker(self, dies: bool) -> None:
        with self.running(faulty(StartSimulator(), at="reset", only_env=1), restarts=NO_RESTARTS) as trainer:
            simulators = descendants(trainer.pid_of(1))
            assert len(simulators) == 1
            if dies:
                os.kill(trainer.pid_of(1), SIGKILL)
                check_error(trainer.first_error(), WorkerDied, worker_id=1, env_id=1, phase=IDLE)
                until(lambda: all(map(is_gone, simulators)))
                trainer.go_on([0, 2])
        until(lambda: all(map(is_gone, simulators)))

    def test_case_12_arrays_that_are_used_again_do_not_change_earlier_steps(self) -> None:
        with self.running(faulty(ReuseArrays(), times=sys.maxsize)) as trainer:
            kept = [info for _ in range(5) for info in trainer.step(Wait.all())]
            copies = [info.copy() for info in kept]
            trainer.go_on(range(trainer.manager.n_workers), n_steps=10)

        for info, copy in zip(kept, copies, strict=True):
            steps, same = info.current["default"], copy.current["default"]
            assert steps.obs.tolist() == same.obs.tolist()
            assert steps.reward.tolist() == same.reward.tolist()


class UsageFaults(FaultyManagers):
    """Tests of cases 36 and 42: which factories workers accept, and ``close()`` at any time."""

    def test_case_36_lambdas_closures_and_classes_of_the_main_module_are_factories(self) -> None:
        class OfThisFunction(EchoEnvironment):
            pass

        of_main = type("OfMain", (OfThisFunction,), {"__module__": "__main__"})
        factories: list[Any] = [lambda context: OfThisFunction(context), OfThisFunction, [of_main, OfThisFunction]]
        for factory in factories:
            with self.running(factory, 2) as trainer:
                trainer.step(Wait.all())

    @only_with_processes
    def test_case_36_a_factory_that_holds_a_lock_is_refused(self) -> None:
        lock = threading.Lock()
        with pytest.raises(UsageError, match="cannot be pickled"):
            self.make_manager(lambda: (lock, FakeEnvironment())[1], 2)

    def test_case_42_close_before_anything_else(self) -> None:
        check_close(self.make_manager(EchoEnvironment, 2), Timeouts().close_s)

    def test_case_42_close_from_two_threads(self) -> None:
        with self.running(EchoEnvironment) as trainer:
            trainer.step(Wait(max_ready=1))
            with ThreadPoolExecutor(2) as threads, returns_within(Timeouts().close_s):
                both = [threads.submit(trainer.manager.close) for _ in range(2)]
                assert [one.result() for one in both] == [None, None]

    @unless_windows(reason="on Windows os.kill with SIGINT ends the process")
    def test_case_42_an_interrupt_during_start_stops_everything(self) -> None:
        interrupt = [SendSignal(os.getpid()), Sleep(600)]
        with pytest.raises(KeyboardInterrupt), returns_within(self.start_s):
            self.make_manager(faulty(interrupt, at="start", only_env=1), 2, timeouts=Timeouts(close_s=1))


class DataFaults(FaultyManagers):
    """Tests that data that cannot be pickled raises an error, and that large data arrives."""

    large_observation_bytes = 256 << 20

    @contextmanager
    def _ready(self, env_factory: Any, n_envs: int, **options: Any) -> Iterator[EnvManager]:
        """Yield a manager that has a policy and was reset, for environments that CheckedTrainer cannot check."""
        with self.managing(env_factory, n_envs, **options) as manager:
            manager.set_policy("default", NumberedActions())
            manager.reset()
            yield manager

    @only_with_processes
    def test_case_32_an_info_that_cannot_be_pickled_is_an_error_and_the_worker_lives(self) -> None:
        fault = inform(lambda: {"lock": threading.Lock()})
        with self.running(faulty(fault, after=3, only_env=1), infos=True) as trainer:
            pid = trainer.pid_of(1)
            told = check_error(trainer.first_error(), EnvRaised, worker_id=1, env_id=1, phase="step")
            assert "pickle" in told.cause
            trainer.go_on([0, 2])
            trainer.reset()
            trainer.go_on([0, 1, 2])
            assert trainer.pid_of(1) == pid

    @only_with_processes
    def test_case_32_an_observation_that_cannot_be_pickled_is_an_error_and_the_worker_lives(self) -> None:
        locks = [threading.Lock]

        def observe(n_steps: int) -> np.ndarray:
            return object_array([locks.pop()() if n_steps == 1 and locks else n_steps])

        with self._ready(lambda context: _Observed(context, _OBJECT, observe), 1) as manager:
            pid = manager.stats().workers[0].pid
            with pytest.raises(EnvRaised) as raised:
                manager.step(Wait.all())
            told = check_error(raised.value, EnvRaised, worker_id=0, env_id=0, phase="step")
            assert "pickle" in told.cause
            manager.reset()
            assert len(manager.step()) == 1
            assert manager.stats().workers[0].pid == pid

    # Sizes.

    def test_case_34_a_very_large_observation_is_delivered(self) -> None:
        size = self.large_observation_bytes
        spec = ArraySpec((size,), np.uint8)
        observe = lambda n_steps: np.full((1, size), n_steps, np.uint8)  # noqa: E731
        with self._ready(lambda context: _Observed(context, spec, observe), 1) as manager:
            for number in (1, 2):
                (info,) = manager.step()
                obs = info.current["default"].obs
                assert obs.shape == (1, size)
                assert (obs[0, 0], obs[0, size // 2], obs[0, -1]) == (number, number, number)
                assert info.previous is not None
                assert info.previous["default"].obs[0, -1] == number - 1

    def test_case_34_an_observation_whose_size_changes_is_delivered(self) -> None:
        sizes = (1, 10, 1_000_000, 100, 100_000, 10_000, 1_000)

        def observe(n_steps: int) -> np.ndarray:
            return object_array([np.full(sizes[n_steps % len(sizes)], n_steps, np.uint8)])

        with self._ready(lambda context: _Observed(context, _OBJECT, observe), 3) as manager:
            n_steps = dict.fromkeys(range(3), 0)
            while min(n_steps.values()) < 6:
                for info in manager.step():
                    steps = info.current["default"]
                    for env_id, obs in zip(steps.env_id.tolist(), steps.obs, strict=True):
                        n_steps[env_id] += 1
                        assert obs.tolist() == observe(n_steps[env_id])[0].tolist()

    def test_case_34_large_commands_and_large_responses_at_once_do_not_block(self) -> None:
        text = "x" * 1_000_000
        fault = inform(lambda: {"picture": bytes(1_000_000)})
        with self.running(faulty(fault, times=sys.maxsize), infos=True, timeouts=Timeouts(step_s=10)) as trainer:
            for _ in range(20):
                trainer.step(Wait(max_ready=1))
                assert trainer.manager.call("who", text) == [f"{text}: env {env_id}" for env_id in range(3)]
                with returns_within(0):
                    trainer.step(Wait.all())


class FaultContract(CodeFaults, RestartsAfterFaults, TasksUnderFaults, DataFaults, UsageFaults):
    """A test class to inherit, with all fault tests. Set ``has_processes = False`` if no worker is a process."""


class _Observed(EchoEnvironment):
    """An environment whose observations are ``observe(n_steps)``, an array of one row."""

    def __init__(self, context: EnvContext, spec: ArraySpec, observe: Callable[[int], np.ndarray]) -> None:
        super().__init__(context)
        self.SPEC = BehaviorSpec(spec, ArraySpec((), np.int64))
        self._observe = observe

    def _obs(self, action: np.ndarray) -> np.ndarray:
        return self._observe(self._n_steps)
