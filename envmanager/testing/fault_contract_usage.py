"""Tests of cases 29, 36, 37, 42 and 43 of FaultContract: bad options, bad factories, and calls at the wrong time."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from envmanager.errors import EnvRaised, ManagerClosed, UsageError
from envmanager.options import RestartPolicy, Timeouts, Wait
from envmanager.testing.contract import calls_of_an_open_manager
from envmanager.testing.contract_asking import NumberedActions
from envmanager.testing.fakes import EchoEnvironment, FakeEnvironment, Raise, Sleep
from envmanager.testing.fault_checks import (
    FaultyManagers,
    check_close,
    check_error,
    only_with_processes,
    returns_within,
    unless_windows,
)
from envmanager.testing.faults import SendSignal, faulty


class UsageFaults(FaultyManagers):
    """Tests that misuse raises an error that states the reason, and that ``close()`` works at any time."""

    # Options.

    @pytest.mark.parametrize("field", ["start_s", "reset_s", "step_s", "call_s", "close_s"])
    def test_case_29_a_timeout_that_makes_no_sense_is_refused_at_construction(self, field: str) -> None:
        bad: list[Any] = [0, -1, math.nan, None, "1", True]
        for value in [*bad, math.inf] if field == "close_s" else bad:
            with pytest.raises(UsageError, match=field):
                Timeouts(**{field: value})

    def test_case_29_a_manager_refuses_what_is_no_timeouts_or_restart_policy(self) -> None:
        bad: list[dict[str, Any]] = [{"timeouts": 5}, {"restarts": 3}, {"wait": "soon"}]
        for options in bad:
            with pytest.raises(UsageError):
                self.make_manager(EchoEnvironment, 1, **options)
        for value in (-1, math.nan, math.inf, None):
            with pytest.raises(UsageError, match="backoff_s"):
                RestartPolicy(backoff_s=value)  # type: ignore[arg-type]

    def test_case_29_no_limit_and_no_waiting_are_both_possible(self) -> None:
        no_limit = Timeouts(start_s=math.inf, reset_s=math.inf, step_s=math.inf, call_s=math.inf)
        with self.running(EchoEnvironment, timeouts=no_limit) as trainer:
            with returns_within(0):
                for _ in range(10):
                    trainer.step(Wait.any(timeout_s=0))
            trainer.go_on(range(trainer.manager.n_workers))

    # Factories.

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

    def test_case_36_a_factory_that_makes_nothing_is_refused(self) -> None:
        factories: list[Any] = [None, lambda: None, FakeEnvironment(), 7, "no:where", []]
        for factory in factories:
            with pytest.raises(UsageError):
                self.make_manager(factory, 1)

    def test_case_36_one_environment_for_two_is_refused(self) -> None:
        if self.has_processes:
            pytest.skip("each worker has a copy")
        one = FakeEnvironment()
        with pytest.raises(UsageError, match="same environment"):
            self.make_manager(lambda: one, 2)

    def test_case_37_one_behavior_with_two_specs_is_refused_and_both_are_shown(self) -> None:
        with pytest.raises(UsageError) as raised:
            self.make_manager([EchoEnvironment, FakeEnvironment], 2)
        assert "int64[5]" in str(raised.value)
        assert "float32[3]" in str(raised.value)

    # Calls at the wrong time.

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

    def test_case_43_every_call_after_close_says_so(self) -> None:
        with self.running(EchoEnvironment, 1) as trainer:
            trainer.manager.close()
            for call in calls_of_an_open_manager(trainer.manager):
                with pytest.raises(ManagerClosed):
                    call()

    def test_case_43_a_step_before_the_first_reset_says_so(self) -> None:
        with self.managing(EchoEnvironment, 1) as manager:
            manager.set_policy("default", NumberedActions())
            for call in (manager.step, manager.recv, lambda: manager.send(np.zeros(1, np.int64), [0])):
                with pytest.raises(UsageError, match=r"reset\(\)"):
                    call()

    def test_case_43_the_error_of_a_worker_that_is_out_comes_again_when_it_is_addressed(self) -> None:
        with self.managing(faulty(Raise(ValueError("gear 7 broke")), only_env=1)) as manager:
            manager.reset()
            manager.recv(Wait.all())
            manager.send(np.array([1, 2, 3]), [0, 1, 2])
            with pytest.raises(EnvRaised) as raised:
                manager.recv(Wait.all())
            check_error(raised.value, EnvRaised, worker_id=self.worker_of(1), env_id=1, phase="step")
            if self.has_processes:
                others = manager.recv(Wait.all())
                assert sorted(zip(others.env_ids.tolist(), others.obs[:, 3].tolist(), strict=True)) == [(0, 1), (2, 3)]
            for _ in range(2):
                with pytest.raises(EnvRaised, match="gear 7 broke"):
                    manager.send(np.array([1]), [1])
                with pytest.raises(EnvRaised, match="gear 7 broke"):
                    manager.get_attr("label", env_ids=[1])
