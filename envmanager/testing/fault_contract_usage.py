"""Tests of cases 36 and 42 of FaultContract: bad factories, and ``close()`` at any time."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from envmanager.errors import UsageError
from envmanager.options import Timeouts, Wait
from envmanager.testing.fakes import EchoEnvironment, FakeEnvironment, Sleep
from envmanager.testing.fault_checks import (
    FaultyManagers,
    check_close,
    only_with_processes,
    returns_within,
    unless_windows,
)
from envmanager.testing.faults import SendSignal, faulty


class UsageFaults(FaultyManagers):
    """Tests that bad factories raise an error that states the reason, and that ``close()`` works at any time."""

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
