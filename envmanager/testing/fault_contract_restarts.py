"""Tests of cases 14, 17, 18 and 20 to 23 of FaultContract: restarts, recycling and dropping of workers.

Most tests in which an environment raises an exception run for every kind of manager. Tests in which a worker dies or
hangs need workers that run in separate processes.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager.data.seeding import derive_seed, derive_seeds
from envmanager.env_manager import EnvManager
from envmanager.environment import EnvContext
from envmanager.errors import (
    BadObservation,
    EnvRaised,
    RestartsExhausted,
    UsageError,
    WorkerDied,
    WorkerError,
    WorkerTimedOut,
)
from envmanager.observe import events
from envmanager.options import RestartPolicy, Timeouts, Wait
from envmanager.tasks import TaskResult
from envmanager.testing.bad_steps import BAD_STEPS
from envmanager.testing.fakes import Die, EchoEnvironment, Raise, Sleep
from envmanager.testing.fault_checks import (
    IDLE,
    SIGKILL,
    FaultyManagers,
    check_error,
    is_gone,
    only_with_processes,
    returns_within,
    until,
)
from envmanager.testing.faults import FaultyEnvironment, faulty

SHORT = Timeouts(reset_s=3.0, step_s=3.0, call_s=3.0)
ON_EXCEPTION = RestartPolicy(on_exception="restart")
KEPT = RestartPolicy(keep_episodes=True, on_exception="restart")
BROKEN = Raise(ValueError("gear 7 broke"))
BREAKS_ONCE = faulty(BROKEN, after=3, only_env=1, only_generation=0)


class RestartsAfterFaults(FaultyManagers):
    """Tests of how workers are replaced, dropped and recycled, and how lost episodes and errors are reported."""

    def _is_replaced_once(self, fault: Any, kind: type[WorkerError], restarts: RestartPolicy) -> None:
        """Cause ``fault`` in env 1. Assert that only env 1's worker is replaced, once, because of a ``kind`` error."""
        factory = faulty(fault, after=3, only_env=1, only_generation=0)
        worker_id = self.worker_of(1)
        with self.running(factory, restarts=restarts, timeouts=SHORT) as trainer:
            n_workers = trainer.manager.n_workers
            info = trainer.until_lost()
            assert info.lost is not None
            assert (info.worker_id, info.lost.generation) == (worker_id, 1)
            check_error(info.lost.cause, kind, worker_id=worker_id, env_id=1, phase="step")

            trainer.go_on(range(n_workers), n_steps=10)
            assert len(trainer.lost) == 1
            stats, told = trainer.manager.stats(), trainer.manager.events
            expected = [int(each == worker_id) for each in range(n_workers)]
            assert [worker.generation for worker in stats.workers] == expected
            assert [worker.restarts for worker in stats.workers] == expected
            assert (stats.restarts, stats.steps_lost) == (1, 1)
            assert (told.count(events.Failed), told.count(events.Restarted)) == (1, 1)
            assert told.count(events.Started) == n_workers + 1

    @only_with_processes
    @pytest.mark.parametrize(
        ("fault", "kind"),
        [(Die(0), WorkerDied), (Die(signal_number=SIGKILL), WorkerDied), (Sleep(600), WorkerTimedOut)],
        ids=["exits", "is killed", "hangs"],
    )
    def test_case_20_a_worker_that_fails_is_replaced_once_and_its_episode_is_lost(self, fault: Any, kind: Any) -> None:
        self._is_replaced_once(fault, kind, RestartPolicy())

    @pytest.mark.parametrize(
        ("fault", "kind"),
        [(BROKEN, EnvRaised), (BAD_STEPS["obs: shape"], BadObservation)],
        ids=["raises", "breaks its spec"],
    )
    def test_case_22_an_exception_is_a_fault_when_asked_for(self, fault: Any, kind: Any) -> None:
        self._is_replaced_once(fault, kind, ON_EXCEPTION)

    @pytest.mark.parametrize(
        "fault",
        [Die(0), Die(signal_number=SIGKILL), Sleep(600), BROKEN],
        ids=["exits", "is killed", "hangs", "raises"],
    )
    def test_case_20_a_kept_episode_goes_on_in_the_replacement(self, fault: Any) -> None:
        if not self.has_processes and fault is not BROKEN:
            pytest.skip("needs workers outside this process")
        factory = faulty(fault, after=3, only_env=1, only_generation=0)
        if not self.keeps_episodes:
            with pytest.raises(UsageError, match="keep_episodes"):
                self.make_manager(factory, 3, restarts=KEPT)
            return
        assert self._rows_of_kept(factory, n_restarts=1) == self._rows_of_kept(EchoEnvironment, n_restarts=0)

    def _rows_of_kept(self, factory: Any, *, n_restarts: int) -> list[list[Any]]:
        """Return 40 rows of each environment. Assert that none was lost by so many restarts."""
        with self.managing(factory, restarts=KEPT, timeouts=SHORT) as manager:
            rows: list[list[Any]] = [[] for _ in range(manager.n_envs)]
            manager.reset(seed=1)
            batch = manager.recv()
            while min(map(len, rows)) < 40:
                for place, env_id in enumerate(batch.env_ids.tolist()):
                    flags = batch.first[place], batch.terminated[place], batch.truncated[place], batch.lost[place]
                    rows[env_id].append((batch.obs[place].tolist(), float(batch.reward[place]), *map(bool, flags)))
                manager.send(np.array([len(rows[env_id]) for env_id in batch.env_ids.tolist()]), batch.env_ids)
                batch = manager.recv()
            stats = manager.stats()
            assert (stats.restarts, stats.steps_lost, stats.episodes_diverged) == (n_restarts, 0, 0)
            assert (stats.episodes_kept > 0) == (n_restarts > 0)
        return [own[:40] for own in rows]

    @only_with_processes
    def test_case_14_a_worker_killed_while_idle_is_lost_at_the_next_wait(self) -> None:
        with self.running(EchoEnvironment) as trainer:
            trainer.step(Wait.all())
            os.kill(trainer.pid_of(1), SIGKILL)
            trainer.step_until(lambda: trainer.manager.events.count(events.Died) == 1, within_s=0.5)
            info = trainer.until_lost()
            assert info.lost is not None
            check_error(info.lost.cause, WorkerDied, worker_id=1, env_id=1, phase=IDLE)
            trainer.go_on([0, 1, 2])

    @only_with_processes
    def test_case_17_workers_that_die_at_once_are_all_replaced(self) -> None:
        with self.running(EchoEnvironment) as trainer:
            trainer.step(Wait.all())
            for worker_id in range(3):
                os.kill(trainer.pid_of(worker_id), SIGKILL)
            trainer.until_lost(n=3)
            trainer.go_on([0, 1, 2], n_steps=5)
            assert sorted(info.worker_id for info in trainer.lost) == [0, 1, 2]
            assert trainer.manager.stats().restarts == 3

    @only_with_processes
    def test_case_20_no_worker_waits_for_the_replacement(self, tmp_path: Path) -> None:
        may_start = tmp_path / "may start"

        def make(context: EnvContext) -> EchoEnvironment:
            if context.generation == 1:
                until(may_start.exists)
            return FaultyEnvironment(context, Die(3), after=3, only_env=1, only_generation=0)

        with self.running(make, timeouts=SHORT) as trainer:
            trainer.step_until(lambda: trainer.manager.events.count(events.Restarted) == 1)
            trainer.go_on([0, 2], n_steps=20)
            assert trainer.lost == []
            assert trainer.workers[1].waiting
            may_start.touch()
            trainer.until_lost()
            trainer.go_on([0, 1, 2])

    def test_case_20_a_new_generation_has_seeds_of_its_own(self) -> None:
        with self.running(BREAKS_ONCE, restarts=ON_EXCEPTION, seed=7) as trainer:
            trainer.until_lost()

            generations = [trainer.workers[self.worker_of(env_id)].generation for env_id in range(3)]
            expected = [derive_seed(7, env_id, generation) for env_id, generation in enumerate(generations)]
            contexts = trainer.manager.get_attr("context")
            assert generations[1] == 1
            assert [context.generation for context in contexts] == generations
            assert [context.seed for context in contexts] == expected
            assert trainer.manager.get_attr("seeds") == [[seed] for seed in expected]

    def test_case_20_the_seed_of_the_last_reset_counts(self) -> None:
        with self.running(BREAKS_ONCE, restarts=ON_EXCEPTION, seed=7) as trainer:
            trainer.reset({"seed": 4})
            trainer.until_lost()
            assert trainer.manager.get_attr("seeds")[1] == [derive_seed(4, 1, 1)]

    @pytest.mark.parametrize("seed", [7, [5, None, 6]], ids=["a number", "a list"])
    def test_case_20_a_reset_with_a_seed_gives_the_same_seeds_whatever_was_replaced_before(self, seed: Any) -> None:
        expected = derive_seeds(seed, [0, 1, 2])
        with self.running(BREAKS_ONCE, restarts=ON_EXCEPTION) as trainer:
            trainer.until_lost()
            trainer.manager.reset(seed=seed)
            assert [seeds[-1] for seeds in trainer.manager.get_attr("seeds")] == expected
            if self.has_processes:
                os.kill(trainer.pid_of(1), SIGKILL)
                trainer.manager.reset(seed=seed)
                assert [seeds[-1] for seeds in trainer.manager.get_attr("seeds")] == expected

    def test_case_20_attributes_that_were_set_hold_in_the_replacement(self) -> None:
        with self.running(BREAKS_ONCE, restarts=ON_EXCEPTION) as trainer:
            trainer.manager.set_attr("label", "first")
            trainer.manager.set_attr("label", ["x", "y", "z"])
            trainer.manager.set_attr("label", "last", env_ids=[0])
            trainer.until_lost()
            assert trainer.manager.get_attr("label") == ["last", "y", "z"]

    def test_case_23_a_new_generation_has_slot_numbers_of_its_own(self) -> None:
        with self.running(BREAKS_ONCE, restarts=ON_EXCEPTION) as trainer:
            before = [context.slot for context in trainer.manager.get_attr("context")]
            trainer.until_lost()
            after = [context.slot for context in trainer.manager.get_attr("context")]

        assert len(set(before)) == 3
        assert after[1] not in before
        assert len(set(after)) == 3

    @only_with_processes
    @pytest.mark.parametrize("noticed", [False, True], ids=["not yet noticed", "noticed"])
    def test_case_20_an_action_for_a_worker_that_has_died_is_dropped_and_counted(
        self, noticed: bool, tmp_path: Path
    ) -> None:
        may_start = tmp_path / "may start"  # when the action was sent

        def make(context: EnvContext) -> EchoEnvironment:
            if context.generation == 1:
                until(may_start.exists)
            return EchoEnvironment(context)

        with self.managing(make) as manager:
            manager.reset()
            last = manager.recv(Wait.all())
            pid = manager.stats().workers[1].pid
            assert pid is not None
            os.kill(pid, SIGKILL)
            until(lambda: is_gone(pid))
            while noticed and not manager.events.count(events.Died):
                manager.send(np.array([1, 3]), [0, 2])
                manager.recv(Wait(min_ready=2, max_ready=2))
            manager.send(np.array([4]), [1])
            may_start.touch()
            lost = manager.recv(Wait.all())
            while not lost.lost.any():
                lost = manager.recv(Wait.all())

            row = lost.env_ids.tolist().index(1)
            assert np.flatnonzero(lost.lost).tolist() == [row]
            assert lost.obs[row].tolist() == [1, 0, 0, 0, 0]
            assert (lost.reward[row], lost.truncated[row], lost.terminated[row]) == (0, True, False)
            assert lost.final_obs.tolist() == [last.obs[1].tolist()]
            assert manager.stats().steps_lost == 1
            manager.send(np.array([5]), [1])
            assert manager.recv(Wait.all()).obs.tolist() == [[1, 0, 1, 5, 0]]

    # Budgets.

    @only_with_processes
    @pytest.mark.parametrize(
        ("fault", "kind"), [(Die(4), WorkerDied), (Sleep(600), WorkerTimedOut)], ids=["dies", "hangs"]
    )
    def test_case_21_replacements_that_cannot_start_are_counted_too(self, fault: Any, kind: Any) -> None:
        def make(context: EnvContext) -> EchoEnvironment:
            if context.generation:
                return FaultyEnvironment(context, fault, at="start")
            return FaultyEnvironment(context, Die(3), after=3, only_env=1)

        policy = RestartPolicy(max_restarts=1, backoff_s=0)
        with self.running(make, restarts=policy, timeouts=Timeouts(start_s=self.start_s)) as trainer:
            with returns_within(2 * self.start_s):
                error = trainer.first_error()
            told = check_error(error, RestartsExhausted, worker_id=1, env_id=1, phase="start")
            check_error(told.first, WorkerDied, worker_id=1, env_id=1, phase="step")
            check_error(told.last, kind, worker_id=1, env_id=1, phase="start")
            trainer.go_on([0, 2])

    # Start, reset, call.

    @pytest.mark.parametrize("fault", [BROKEN, Die(3), Sleep(600)], ids=["raises", "dies", "hangs"])
    def test_case_18_a_worker_that_fails_in_reset_is_replaced_within_it(self, fault: Any) -> None:
        if isinstance(fault, Die | Sleep) and not self.has_processes:
            pytest.skip("an environment in this process can neither die nor be stopped")
        factory = faulty(fault, at="reset", only_env=1, only_generation=0)
        with self.running(factory, restarts=ON_EXCEPTION, timeouts=SHORT) as trainer:
            trainer.go_on(range(trainer.manager.n_workers))
            assert trainer.lost == []
            assert trainer.workers[self.worker_of(1)].generation == 1
            assert trainer.manager.stats().restarts == 1

    @only_with_processes
    @pytest.mark.parametrize(
        ("fault", "kind"), [(Die(3), WorkerDied), (Sleep(600), WorkerTimedOut)], ids=["dies", "hangs"]
    )
    def test_a_fault_in_a_call_is_raised_by_it_and_the_worker_is_replaced_meanwhile(
        self, fault: Any, kind: Any
    ) -> None:
        factory = faulty(fault, at="call", only_env=1, only_generation=0)
        with self.running(factory, timeouts=SHORT) as trainer:
            trainer.step(Wait.all())
            with pytest.raises(kind) as raised:
                trainer.manager.call("misbehave")
            check_error(raised.value, kind, worker_id=1, env_id=1, phase="call")
            info = trainer.until_lost()
            assert info.lost is not None
            assert (info.worker_id, info.lost.cause) == (1, raised.value)
            trainer.go_on([0, 1, 2])
            assert trainer.manager.call("misbehave") == ["fine"] * 3

    # Recycling.

    def test_a_healthy_worker_is_recycled_at_the_end_of_an_episode_and_no_step_is_lost(self) -> None:
        policy = RestartPolicy(recycle_after_steps=10)
        with self.running(EchoEnvironment, recycling=True, restarts=policy) as trainer:
            n_workers = trainer.manager.n_workers
            trainer.step_until(lambda: len({info.worker_id for info in trainer.recycled}) == n_workers)
            trainer.go_on(range(n_workers), n_steps=5)
            # Wait for all workers, since with "any" one of them might always be restarting.
            told = lambda: len(trainer.recycled) == trainer.manager.events.count(events.Recycled)  # noqa: E731
            trainer.step_until(told, wait=Wait.all())

            assert trainer.lost == []
            assert trainer.manager.stats().steps_lost == 0
            n_recycled = [sum(info.worker_id == each for info in trainer.recycled) for each in range(n_workers)]
            assert [worker.generation for worker in trainer.workers] == n_recycled
            assert trainer.manager.events.count(events.Failed) == 0


class TasksUnderFaults(FaultyManagers):
    """Tests of tasks whose episodes are lost with their workers: each is finished once or given up, none forgotten."""

    @pytest.fixture(autouse=True)
    def _is_for_those_that_begin(self, request: pytest.FixtureRequest) -> None:
        if request.function.__qualname__.startswith("TasksUnderFaults"):
            if not self.begins_on_demand:
                pytest.skip("episodes do not begin on demand")
            if not self.has_processes and "exits" in request.node.name:
                pytest.skip("needs processes")

    def _play(self, manager: EnvManager, tasks: Any, prefetch: bool) -> list[TaskResult]:
        finished = Counter[int]()
        manager.reset(tasks=tasks, prefetch=prefetch and None)
        while not manager.tasks.done:
            batch = manager.recv()
            assert batch.obs[:, 4].tolist() == batch.task.tolist()
            has_ended = batch.terminated | batch.truncated
            finished.update(batch.final_task[~batch.lost[has_ended]].tolist())
            manager.send(np.arange(len(batch)) + 1, batch.env_ids)
        results = manager.tasks.results
        assert [result.index for result in results] == list(range(len(results)))
        assert finished == Counter(result.index for result in results if result.error is None)
        assert all(result.length == 7 + result.env_id for result in results if result.error is None)
        return results

    @pytest.mark.parametrize("prefetch", [False, True])
    @pytest.mark.parametrize("fault", [Die(0), BROKEN], ids=["exits", "raises"])
    def test_a_task_whose_episode_is_lost_is_played_again(self, fault: Any, prefetch: bool) -> None:
        factory = faulty(fault, after=3, only_env=1, only_generation=0)
        with self.managing(factory, restarts=ON_EXCEPTION) as manager:
            results = self._play(manager, iter([{"task": number} for number in range(15)]), prefetch)
            assert len(results) == 15
            assert manager.stats().restarts == 1
            assert manager.tasks.n_lost == 0
            assert sum(result.attempts for result in results) > 15

    @pytest.mark.parametrize("prefetch", [False, True])
    @pytest.mark.parametrize("fault", ["exits", "raises"])
    @pytest.mark.parametrize("fails", [[4], [4, 5, 11, 14, 17]], ids=["one", "five"])
    def test_tasks_that_always_fail_are_given_up_and_cost_no_other(
        self, fails: Any, fault: Any, prefetch: bool
    ) -> None:
        tasks = [{"task": number, **({"fault": fault} if number in fails else {})} for number in range(20)]
        policy = RestartPolicy(max_restarts=3, within_s=600, backoff_s=0, on_exception="restart")
        with self.managing(EchoEnvironment, restarts=policy) as manager:
            results = self._play(manager, iter(tasks), prefetch)
            assert [result.index for result in results if result.error is not None] == fails
            assert (len(results), manager.tasks.n_lost) == (20, len(fails))
            assert min(results[number].attempts for number in fails) >= 3
            assert results[4].attempts == 3 or len(fails) > 1
            assert isinstance(results[4].error, WorkerError)
            n_restarts = manager.stats().restarts  # of five, some may fail together in one worker
            assert n_restarts == 3 if len(fails) == 1 else 3 * 3 <= n_restarts <= 3 * 5
            failures = [each.tasks for each in manager.events if isinstance(each, events.Failed)]
            assert all(set(fails) & set(under_way) for under_way in failures)
            assert len(failures) == n_restarts

    @pytest.mark.parametrize("n_sound", [0, 10])
    @pytest.mark.parametrize("fault", ["exits", "raises"])
    def test_case_21_a_crash_loop_ends_if_each_task_fails(self, fault: Any, n_sound: int) -> None:
        tasks = [{"task": number, **({} if number < n_sound else {"fault": fault})} for number in range(1000)]
        policy = RestartPolicy(max_restarts=3, within_s=600, backoff_s=0, on_exception="restart")
        with self.managing(EchoEnvironment, restarts=policy) as manager:
            with pytest.raises(RestartsExhausted):
                self._play(manager, tasks, prefetch=False)
            assert manager.tasks.n_lost <= (3 + 4) * manager.n_workers

    @pytest.mark.parametrize("prefetch", [False, True])
    def test_recycling_charges_no_task(self, prefetch: bool) -> None:
        policy = RestartPolicy(recycle_after_steps=5)
        with self.managing(EchoEnvironment, restarts=policy) as manager:
            results = self._play(manager, iter([{"task": number} for number in range(30)]), prefetch)
            assert len(results) == 30
            assert manager.events.count(events.Recycled) >= 5
            assert manager.tasks.n_lost == 0
