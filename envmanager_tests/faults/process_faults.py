"""Cases 13 to 19 and 24 to 27 of docs/fault-cases.md: processes that die, processes that do not respond.

Here no worker is restarted, so that each error can be inspected. Restarts are tested in
:mod:`envmanager.testing.fault_contract_restarts`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager.data.steps import Steps
from envmanager.data.trees import Tree
from envmanager.environment import EnvContext
from envmanager.errors import EnvRaised, UsageError, WorkerDied, WorkerTimedOut
from envmanager.observe.events import LateReplyDiscarded
from envmanager.options import RestartPolicy, Timeouts, Wait
from envmanager.testing.fakes import Die, EchoEnvironment, Sleep
from envmanager.testing.fault_checks import (
    IDLE,
    KILLED,
    NO_RESTARTS,
    SIGKILL,
    CheckedTrainer,
    FaultyManagers,
    check_error,
    is_gone,
    only_with_processes,
    returns_within,
    unless_windows,
    until,
)
from envmanager.testing.faults import (
    ExhaustMemory,
    HoldGil,
    IgnoreSigterm,
    Segfault,
    SendSignal,
    StartSimulator,
    Stop,
    faulty,
    inform,
)
from envmanager.testing.leaks import descendants, state_of

SHORT = Timeouts(reset_s=3.0, step_s=3.0, call_s=3.0)
"""Timeouts that are short for a worker that hangs, and long enough for a healthy one on a busy machine."""
LARGE = inform(lambda: {"picture": bytes(5_000_000)})
"""An info larger than any pipe's buffer: sending the response blocks until the manager reads it."""


def until_asleep(pid: int) -> None:
    """Wait until the process sleeps: until twenty checks in a row, within a fifth of a second, have found it asleep."""
    n_looks = 0

    def sleeps() -> bool:
        nonlocal n_looks
        n_looks = n_looks + 1 if state_of(pid) == "S" else 0
        return n_looks >= 20

    until(sleeps)


class ProcessFaults(FaultyManagers):
    """Faults of workers that are processes, and how long it may take to report them."""

    exits_are_known = True
    """Whether the error of a death names the signal or exit code. If not, it only says that the process ended."""

    def check_exit(self, error: WorkerDied, expected: str) -> None:
        """Assert that ``error`` names the process's exit, as far as ``exits_are_known``."""
        assert error.exit == expected if self.exits_are_known else error.exit

    def _dies(self, fault: Any, **options: Any) -> WorkerDied:
        """Let env 1 die in its fourth step. Check that the others go on and that a reset revives it."""
        factory = faulty(fault, after=3, only_env=1, only_generation=0)
        with self.running(factory, restarts=NO_RESTARTS, **options) as trainer:
            error = trainer.first_error()
            trainer.go_on([0, 2])
            trainer.reset()
            trainer.go_on([0, 1, 2])
            assert [worker.generation for worker in trainer.workers] == [0, 1, 0]
        return check_error(error, WorkerDied, worker_id=1, env_id=1, phase="step")

    @only_with_processes
    @pytest.mark.parametrize("code", [0, 3])
    def test_case_13_an_exit_is_a_death_whatever_its_code(self, code: int) -> None:
        self.check_exit(self._dies(Die(code)), f"EXIT({code})")

    @only_with_processes
    def test_case_14_a_worker_killed_while_idle_is_noticed_at_the_next_wait(self) -> None:
        with self.running(EchoEnvironment, restarts=NO_RESTARTS) as trainer:
            trainer.step(Wait.all())
            os.kill(trainer.pid_of(1), SIGKILL)
            with returns_within(0.5):
                error = trainer.first_error()

            told = check_error(error, WorkerDied, worker_id=1, env_id=1, phase=IDLE)
            self.check_exit(told, KILLED)
            trainer.go_on([0, 2])

    @only_with_processes
    @pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGFPE"])
    @unless_windows(reason="Windows lacks signals between processes")
    def test_case_15_a_signal_in_step_is_named(self, name: str) -> None:
        error = self._dies(Die(signal_number=signal.Signals[name]))

        self.check_exit(error, name)
        assert ("memory" in str(error)) == (name == "SIGKILL") or not self.exits_are_known

    @only_with_processes
    @unless_windows(reason="on Windows a bad read of ctypes is an OSError")
    def test_case_15_a_segmentation_fault_brings_its_traceback(self, tmp_path: Path) -> None:
        error = self._dies(Segfault(), log_dir=str(tmp_path))

        assert error.exit == "SIGSEGV"
        assert "Fatal Python error: Segmentation fault" in error.output
        assert "string_at" in str(error)

    @only_with_processes
    @unless_windows(reason="Windows does not tell which processes sleep")
    def test_case_16_a_worker_killed_while_it_sends_a_large_response_harms_no_other_worker(self) -> None:
        factory = faulty(LARGE, after=3, only_env=1)
        with self.running(factory, restarts=NO_RESTARTS, infos=True) as trainer:
            self._get_stuck_in_a_response(trainer)
            os.kill(trainer.pid_of(1), SIGKILL)

            told = check_error(trainer.first_error(), WorkerDied, worker_id=1, env_id=1, phase="step")
            self.check_exit(told, KILLED)
            trainer.go_on([0, 2])
            trainer.reset()
            trainer.go_on([0, 1, 2])

    def _get_stuck_in_a_response(self, trainer: CheckedTrainer) -> None:
        """Request the fourth step, and wait until worker 1 blocks because its response is not read."""
        for _ in range(3):
            trainer.step(Wait.all())
        trainer.step(Wait(timeout_s=0))
        until_asleep(trainer.pid_of(1))

    @only_with_processes
    def test_case_17_when_all_workers_die_at_once_each_is_reported_and_nothing_hangs(self) -> None:
        with self.running(EchoEnvironment, restarts=NO_RESTARTS) as trainer:
            trainer.step(Wait.all())
            for worker_id in range(3):
                os.kill(trainer.pid_of(worker_id), SIGKILL)
            with returns_within(1):
                errors = [trainer.first_error(wait=Wait.all()) for _ in range(3)]

            for error in errors:
                check_error(error, WorkerDied, worker_id=error.worker_id, env_id=error.worker_id, phase=IDLE)
            assert {error.worker_id for error in errors} == {0, 1, 2}
            with pytest.raises(UsageError, match="every worker has failed"):
                trainer.step()
            trainer.reset()
            trainer.go_on([0, 1, 2])

    @only_with_processes
    def test_case_18_a_death_during_reset_is_reported_and_another_reset_works(self) -> None:
        factory = faulty(Die(3), at="reset", only_env=1, only_generation=0)
        with self.managing(factory, restarts=NO_RESTARTS) as manager:
            trainer = CheckedTrainer(manager)
            with pytest.raises(WorkerDied) as raised:
                trainer.reset()
            told = check_error(raised.value, WorkerDied, worker_id=1, env_id=1, phase="reset")
            self.check_exit(told, "EXIT(3)")
            trainer.reset()
            trainer.go_on([0, 1, 2])

    @only_with_processes
    def test_case_18_a_death_during_start_stops_all_others(self) -> None:
        with pytest.raises(WorkerDied) as raised, returns_within(self.start_s):
            self.make_manager(faulty(Die(3), at="start", only_env=1), 3)
        told = check_error(raised.value, WorkerDied, worker_id=1, env_id=1, phase="start")
        self.check_exit(told, "EXIT(3)")

    @only_with_processes
    def test_case_18_a_death_during_close_does_not_hinder_it(self) -> None:
        with self.running(faulty(Die(3), at="close")) as trainer:
            trainer.step()

    @only_with_processes
    @pytest.mark.parametrize("restarts", [NO_RESTARTS, RestartPolicy()], ids=["raised", "restarted"])
    @unless_windows(reason="Windows does not tell which processes sleep")
    def test_case_18_a_response_that_is_complete_is_delivered_before_a_death_is_reported(
        self, restarts: RestartPolicy
    ) -> None:
        with self.managing(EchoEnvironment, restarts=restarts) as manager:
            manager.reset()
            manager.recv(Wait.all())
            pid = manager.stats().workers[1].pid
            assert pid is not None
            manager.send(np.array([5, 6, 7]), [0, 1, 2])
            until_asleep(pid)
            os.kill(pid, SIGKILL)
            until(lambda: is_gone(pid))

            batch = manager.recv(Wait.all())
            assert batch.obs[:, 3].tolist() == [5, 6, 7]
            assert not batch.lost.any()
            if restarts is not NO_RESTARTS:
                manager.send(np.array([8, 9, 10]), [0, 1, 2])
                assert manager.recv(Wait.all()).lost.tolist() == [False, True, False]
                return
            with pytest.raises(WorkerDied) as raised:  # noqa: PT012  (either may raise)
                manager.send(np.array([8, 9, 10]), [0, 1, 2])
                manager.recv(Wait.all())
            check_error(raised.value, WorkerDied, worker_id=1, env_id=1, phase=IDLE)

    @only_with_processes
    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory and reports what it uses")
    def test_case_19_a_memory_limit_is_a_memory_error_and_the_worker_lives(self) -> None:
        with self.running(faulty(ExhaustMemory(), after=3, only_env=1)) as trainer:
            pid = trainer.pid_of(1)
            error = check_error(trainer.first_error(), EnvRaised, worker_id=1, env_id=1, phase="step")
            assert error.type_name == "MemoryError"
            trainer.go_on([0, 2])
            trainer.reset()
            trainer.go_on([0, 1, 2])
            assert trainer.pid_of(1) == pid

    # Not responding.

    def _hangs(self, fault: Any, **options: Any) -> WorkerTimedOut:
        """Let env 1 hang in its fourth step. Check that the others go on meanwhile and afterwards."""
        factory = faulty(fault, after=3, only_env=1, only_generation=0)
        with self.running(factory, restarts=NO_RESTARTS, timeouts=SHORT, **options) as trainer:
            for _ in range(3):
                trainer.step(Wait.all())
            family = [trainer.pid_of(1)]
            with returns_within(SHORT.step_s):
                error = trainer.first_error(within_s=SHORT.step_s)

            assert trainer.n_infos[0] > 10, "the other workers did not step while one worker hung"
            assert trainer.n_infos[2] > 10
            until(lambda: all(map(is_gone, family)))
            trainer.go_on([0, 2])
            trainer.reset()
            trainer.go_on([0, 1, 2])
        return check_error(error, WorkerTimedOut, worker_id=1, env_id=1, phase="step")

    @only_with_processes
    def test_case_24_a_step_that_hangs_times_out_while_the_others_go_on(self) -> None:
        assert self._hangs(Sleep(600)).timeout_s == SHORT.step_s

    @only_with_processes
    @pytest.mark.parametrize("at", ["reset", "call"])
    def test_case_24_a_reset_or_call_that_hangs_times_out(self, at: Any) -> None:
        factory = faulty(Sleep(600), at=at, only_env=1, only_generation=0)
        with self.managing(factory, restarts=NO_RESTARTS, timeouts=SHORT) as manager:
            trainer = CheckedTrainer(manager)
            with pytest.raises(WorkerTimedOut) as raised, returns_within(SHORT.step_s):  # noqa: PT012  (either may raise)
                trainer.reset()
                manager.call("misbehave")
            check_error(raised.value, WorkerTimedOut, worker_id=1, env_id=1, phase=at)
            trainer.reset()
            trainer.go_on([0, 1, 2])

    @only_with_processes
    @pytest.mark.parametrize(
        "faults",
        [
            [IgnoreSigterm(), Sleep(600)],
            [IgnoreSigterm(), HoldGil()],
            pytest.param([Stop()], marks=unless_windows(reason="Windows lacks SIGSTOP")),
        ],
        ids=["ignores SIGTERM", "holds the GIL", "is stopped"],
    )
    def test_case_25_a_worker_that_cannot_be_asked_is_killed(self, faults: Any) -> None:
        self._hangs(faults)

    @only_with_processes
    @unless_windows(reason="Windows lacks /bin/sh")
    def test_case_25_a_worker_that_hangs_is_killed_with_its_simulator(self) -> None:
        faults = [StartSimulator(), IgnoreSigterm(), HoldGil()]
        with self.running(faulty(faults, only_env=1), restarts=NO_RESTARTS, timeouts=SHORT) as trainer:
            pid = trainer.pid_of(1)
            trainer.step_until(lambda: descendants(pid))
            simulators = descendants(pid)
            check_error(trainer.first_error(), WorkerTimedOut, worker_id=1, env_id=1, phase="step")
            until(lambda: all(map(is_gone, [pid, *simulators])))
            trainer.go_on([0, 2])

    @only_with_processes
    @unless_windows(reason="Windows lacks SIGSTOP")
    def test_case_25_a_worker_stopped_while_it_sends_a_large_response_times_out(self) -> None:
        factory = faulty(LARGE, after=3, only_env=1)
        with self.running(factory, restarts=NO_RESTARTS, timeouts=SHORT, infos=True) as trainer:
            self._get_stuck_in_a_response(trainer)
            os.kill(trainer.pid_of(1), signal.SIGSTOP)
            with returns_within(2 * SHORT.step_s):  # part of the response had been read
                error = trainer.first_error()

            check_error(error, WorkerTimedOut, worker_id=1, env_id=1, phase="step")
            trainer.go_on([0, 2])
            trainer.reset()
            trainer.go_on([0, 1, 2])

    @unless_windows(reason="on Windows os.kill with SIGINT ends the process")
    def test_case_26_after_an_interrupted_step_the_next_ones_are_paired(self) -> None:
        interrupt = [SendSignal(os.getpid()), Sleep(2)]
        with self.running(faulty(interrupt, after=3, only_env=1)) as trainer:
            with pytest.raises(KeyboardInterrupt):
                trainer.step_until(lambda: False, wait=Wait.all())
            if not self.has_processes:
                trainer.reset()  # the Ctrl-C interrupted the environment itself in its step
            trainer.go_on(range(trainer.manager.n_workers))

    @only_with_processes
    @unless_windows(reason="on Windows os.kill with SIGINT ends the process")
    def test_case_26_a_late_response_to_an_interrupted_call_is_dropped_and_counted(self) -> None:
        interrupt = [SendSignal(os.getpid()), Sleep(2)]
        with self.running(faulty(interrupt, at="call", only_env=1)) as trainer:
            with pytest.raises(KeyboardInterrupt):
                trainer.manager.call("misbehave", env_ids=[1])

            assert trainer.manager.call("who", "you") == ["you: env 0", "you: env 1", "you: env 2"]
            assert trainer.manager.stats().late_replies == 1
            assert trainer.manager.events.count(LateReplyDiscarded) == 1
            trainer.go_on([0, 1, 2])

    @only_with_processes
    def test_case_27_a_slow_worker_delays_no_other_and_is_not_forgotten(self, tmp_path: Path) -> None:
        may_end = tmp_path / "may end"

        class OneIsSlow(EchoEnvironment):
            def __init__(self, context: EnvContext) -> None:
                super().__init__(context)
                self._is_slow = context.env_id == 1

            def step(self, actions: Mapping[str, Tree]) -> Steps:
                if self._is_slow:
                    until(may_end.exists)
                return super().step(actions)

        with self.running(OneIsSlow) as trainer:
            trainer.go_on([0, 2], n_steps=20)
            assert trainer.n_infos[1] == 0
            may_end.touch()
            trainer.go_on([0, 1, 2], n_steps=20)

    @only_with_processes
    def test_case_27_with_one_step_at_a_time_every_worker_that_is_ready_has_its_turn(self) -> None:
        one_of_all = Wait(Wait.ALL, max_ready=1)
        with self.running(EchoEnvironment) as trainer:
            for _ in range(3):
                trainer.step(Wait(timeout_s=0, max_ready=1))
                turns = [info.worker_id for _ in range(3) for info in trainer.step(one_of_all)]
                assert sorted(turns) == [0, 1, 2]
                ready = [worker.worker_id for worker in trainer.workers if worker.waiting]  # these have responded
                turns = [info.worker_id for _ in ready for info in trainer.step(Wait(max_ready=1))]
                assert len(ready) == 2
                assert sorted(turns) == ready
