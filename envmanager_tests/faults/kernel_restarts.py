"""Cases 20 to 22 of docs/fault-cases.md as far as the kernel alone decides: budgets and dropped workers.

A kind of manager starts the replacements that it is asked for. When one is due is no part of FaultContract; here it
runs over every manager.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from envmanager.data.seeding import derive_seed, derive_seeds
from envmanager.environment import EnvContext
from envmanager.errors import EnvRaised, RestartsExhausted, WorkerDied, WorkerError
from envmanager.observe import events
from envmanager.options import RestartPolicy, Wait
from envmanager.testing.fakes import Die, EchoEnvironment
from envmanager.testing.fault_checks import CheckedTrainer, FaultyManagers, check_error, only_with_processes
from envmanager.testing.fault_contract_restarts import BROKEN, ON_EXCEPTION
from envmanager.testing.faults import FaultyEnvironment, faulty


class KernelRestarts(FaultyManagers):
    def _skip_deaths_without_processes(self, fault: Any) -> None:
        if isinstance(fault, Die) and not self.has_processes:
            pytest.skip("needs workers outside this process")

    @pytest.mark.parametrize(("fault", "kind"), [(BROKEN, EnvRaised), (Die(3), WorkerDied)], ids=["raises", "dies"])
    def test_case_21_a_crash_loop_ends_and_the_others_keep_their_episodes(self, fault: Any, kind: Any) -> None:
        self._skip_deaths_without_processes(fault)
        policy = RestartPolicy(max_restarts=3, backoff_s=0.5, on_exception="restart")
        worker_id = self.worker_of(1)
        with self.running(faulty(fault, only_env=1), restarts=policy) as trainer:
            told = check_error(trainer.first_error(), RestartsExhausted, worker_id=worker_id, env_id=1, phase="step")
            check_error(told.first, kind, worker_id=worker_id, env_id=1, phase="step")
            check_error(told.last, kind, worker_id=worker_id, env_id=1, phase="step")
            assert told.first is not told.last
            generations = [info.lost.generation for info in trainer.lost if info.lost is not None]
            assert generations == [1, 2, 3]

            trainer.go_on(self.others_than(1), n_steps=10)
            delays = [each.delay_s for each in trainer.manager.events if isinstance(each, events.Restarted)]
            assert delays[0] == 0
            assert 0.25 <= delays[1] <= 0.5
            assert 0.5 <= delays[2] <= 1.0
            assert trainer.manager.stats().restarts == 3
            trainer.reset()
            assert trainer.workers[worker_id].generation == (4 if kind is WorkerDied else 3)

    @only_with_processes
    @pytest.mark.parametrize("on_demand", [False, True], ids=["automatic", "on demand"])
    def test_a_reset_with_a_seed_brings_a_worker_that_was_given_up_back_with_that_seed(self, on_demand: bool) -> None:
        if on_demand and not self.begins_on_demand:
            pytest.skip("its episodes cannot begin on demand")
        options: Any = {"episodes": "on_demand"} if on_demand else {}
        with self.managing(faulty([]), restarts=RestartPolicy(0), **options) as manager:
            manager.reset(seed=4)
            for seed in (7, [5, None, 6], None):
                worker = manager.stats().workers[1]
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                with pytest.raises(WorkerDied):
                    manager.reset(seed=9)
                manager.reset(seed=seed)
                own = derive_seed(9, 1, worker.generation + 1)  # no old episode again without a seed
                expected = derive_seeds(seed, [0, 1, 2]) if seed is not None else [None, own, None]
                assert [seeds[-1] for seeds in manager.get_attr("seeds")] == expected

    def test_a_reset_tries_its_seed_twice_in_a_worker_and_then_others(self) -> None:
        def make(context: EnvContext) -> EchoEnvironment:
            return FaultyEnvironment(context, BROKEN if context.generation < 2 else [], at="reset", only_env=1)

        with self.managing(make, restarts=ON_EXCEPTION) as manager:
            manager.reset(seed=7)
            assert manager.get_attr("seeds", [1]) == [[derive_seed(7, 1, 2)]]

    @pytest.mark.parametrize("max_restarts", [0, 1])
    @pytest.mark.parametrize(
        ("fault", "on_exception"), [(BROKEN, "restart"), (Die(3), "raise")], ids=["raises", "dies"]
    )
    @only_with_processes
    def test_a_worker_beyond_its_budget_can_be_dropped(self, fault: Any, on_exception: Any, max_restarts: int) -> None:
        policy = RestartPolicy(max_restarts=max_restarts, backoff_s=0, on_exception=on_exception, then="drop")
        with self.running(faulty(fault, only_env=1), restarts=policy) as trainer:
            trainer.step_until(lambda: trainer.workers[1].dropped)
            assert len(trainer.lost) == max_restarts
            assert trainer.manager.events.count(events.Dropped) == 1
            assert [worker.dropped for worker in trainer.workers] == [False, True, False]

            trainer.go_on([0, 2], n_steps=10)
            trainer.step(Wait.all())
            assert [info.worker_id for info in trainer.reset()] == [0, 2]
            trainer.go_on([0, 2])
            trainer.reset()
            assert sorted(trainer.manager.recv(Wait.all()).env_ids.tolist()) == [0, 2]
            with pytest.raises(WorkerError):
                trainer.manager.send(np.array([1]), [1])
            trainer.manager.send(np.array([5, 7]), [0, 2])
            batch = trainer.manager.recv(Wait.all())
            assert sorted(batch.obs[:, [0, 3]].tolist()) == [[0, 5], [2, 7]]

    @pytest.mark.parametrize(("fault", "kind"), [(BROKEN, EnvRaised), (Die(3), WorkerDied)], ids=["raises", "dies"])
    def test_a_fault_during_the_first_start_is_always_raised(self, fault: Any, kind: Any) -> None:
        self._skip_deaths_without_processes(fault)
        with pytest.raises(kind) as raised:
            self.make_manager(faulty(fault, at="start", only_env=1, only_generation=0), 3, restarts=ON_EXCEPTION)
        check_error(raised.value, kind, worker_id=self.worker_of(1), env_id=1, phase="start")

    @pytest.mark.parametrize(("fault", "kind"), [(BROKEN, EnvRaised), (Die(3), WorkerDied)], ids=["raises", "dies"])
    def test_case_21_a_crash_loop_in_reset_ends_and_another_reset_may_follow(self, fault: Any, kind: Any) -> None:
        self._skip_deaths_without_processes(fault)

        def make(context: EnvContext) -> EchoEnvironment:
            return FaultyEnvironment(context, fault if context.generation < 3 else [], at="reset", only_env=1)

        policy = RestartPolicy(max_restarts=1, backoff_s=0, on_exception="restart")
        with self.managing(make, restarts=policy) as manager:
            trainer = CheckedTrainer(manager)
            with pytest.raises(RestartsExhausted) as raised:
                trainer.reset()
            worker_id = self.worker_of(1)
            told = check_error(raised.value, RestartsExhausted, worker_id=worker_id, env_id=1, phase="reset")
            check_error(told.first, kind, worker_id=worker_id, env_id=1, phase="reset")
            trainer.reset()
            trainer.go_on(range(manager.n_workers))
