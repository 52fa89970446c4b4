"""Contracts of managers and environments, as test classes: inherit one, define its ``make_…`` method, and run pytest.

::

    class TestMyManager(ManagerContract):
        def make_manager(self, env_factory, n_envs, **options):
            return MyManager(env_factory, n_envs, **options)

The tests use only the public interface of managers, so they also work with managers of other packages.
"""

from __future__ import annotations

import gc
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager.check.environment import check_environment
from envmanager.data.steps import ActionInfo, AgentSteps, StepInfo
from envmanager.env_manager import EnvManager
from envmanager.errors import BadAction, EnvRaised, EpisodeNotBegun, UsageError
from envmanager.options import Wait
from envmanager.tasks import Task, TaskResult
from envmanager.testing.fakes import EchoEnvironment, FakeEnvironment, Raise, Step
from envmanager.testing.faults import faulty


class NumberedActions:
    """A policy that returns the actions 1, 2, 3, …, each once. ``given`` maps agent ids to their last actions."""

    def __init__(self) -> None:
        self._next = 1
        self.given: dict[int, int] = {}

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return the next numbers as actions, one per row, and store them in ``given``."""
        action = np.arange(self._next, self._next + len(steps), dtype=np.int64)
        self._next += len(steps)
        self.given.update(zip(steps.agent_id.tolist(), action.tolist(), strict=True))
        return ActionInfo(action, {"twice": action * 2}, version=3)


class OwnManagers:
    """Base class of the contracts' test classes, with an abstract ``make_manager`` and two context managers."""

    begins_on_demand = True
    """Whether episodes can begin on demand. If False, a test checks that the manager says so."""
    takes_actions = True
    """Whether episodes can begin with the actions of a task. If False, a test checks that the manager says so."""
    exceptions_travel = True
    """Whether ``EnvRaised.__cause__`` is the environment's exception. If False, only its text is available."""

    @abstractmethod
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        """Return a new manager to test. ``options`` are fields of ManagerOptions, such as ``wait`` and ``seed``."""

    @contextmanager
    def stepping(self, env_factory: Any, n_envs: int, policy: Any = None, **options: Any) -> Iterator[EnvManager]:
        """Yield a new manager that was reset and uses ``policy`` (default: NumberedActions). Close it afterwards."""
        with self.make_manager(env_factory, n_envs, **options) as manager:
            manager.set_policy("default", NumberedActions() if policy is None else policy)
            manager.reset()
            yield manager

    @contextmanager
    def receiving(self, env_factory: Any, n_envs: int, **options: Any) -> Iterator[EnvManager]:
        """Yield a new manager that is ready for ``send``, with all first observations received. Close it afterwards."""
        with self.make_manager(env_factory, n_envs, **options) as manager:
            manager.reset()
            manager.recv(Wait.all())
            yield manager


def check_echo(info: StepInfo, given: dict[int, int], n_steps: Counter[int]) -> None:
    """Assert that each EchoEnvironment's step in ``info`` has the right agent, step number, action and reward.

    ``given`` maps agent ids to the last actions sent. ``n_steps`` maps agent ids to numbers of steps, and is updated.
    """
    steps = info.current["default"]
    assert info.previous is not None
    assert info.actions is not None
    for row, agent_id in enumerate(steps.agent_id.tolist()):
        n_steps[agent_id] += 1
        env_id, agent, step, action, _ = steps.obs[row].tolist()
        assert (env_id, agent) == (agent_id >> 32, agent_id & 0xFFFFFFFF)
        assert step == n_steps[agent_id]
        assert action == given[agent_id]
        assert steps.reward[row] == action % 1000
    made = info.transitions("default")
    assert made.action.tolist() == [given[agent_id] for agent_id in made.agent_id.tolist()]
    assert (made.next_obs[:, 3] == made.action).all()
    assert (made.next_obs[:, 2] == made.obs[:, 2] + 1).all()
    assert (made.next_obs[:, 4] == made.obs[:, 4]).all(), "a transition crosses the end of an episode"


class _StepContract(OwnManagers):
    """Tests of valid calls of ``reset``, ``step``, ``send`` and ``recv``, and of freeing an unclosed manager."""

    def test_reset_gives_one_step_info_per_worker_with_all_environments(self) -> None:
        with self.make_manager(EchoEnvironment, 5) as manager:
            infos = manager.reset()

            assert [info.worker_id for info in infos] == [worker.worker_id for worker in manager.env_workers]
            assert [env_id for info in infos for env_id in info.current["default"].env_id] == [0, 1, 2, 3, 4]
            assert all(info.previous is None and info.actions is None for info in infos)

    @pytest.mark.parametrize("wait", [Wait.any(), Wait.all(), Wait(min_ready=2, max_ready=2)], ids=["any", "all", "2"])
    def test_every_step_belongs_to_its_environment_and_its_action(self, wait: Wait) -> None:
        policy, n_steps = NumberedActions(), Counter[int]()
        with self.stepping(EchoEnvironment, 3, policy) as manager:
            for number in range(20_000):
                for info in manager.step(wait):
                    check_echo(info, policy.given, n_steps)
                if number >= 60 and len(n_steps) == 3:  # on a busy machine one environment may take long
                    break

            assert len(n_steps) == 3, "some environment never got a step"

    def test_a_manager_without_references_is_freed_at_once(self) -> None:
        gc.disable()  # reference counts must suffice, since the collector may run late
        try:
            manager = self.make_manager(FakeEnvironment, 2)
            manager.reset()
            reference = weakref.ref(manager)
            del manager
            assert reference() is None, "something refers back to the manager"
        finally:
            gc.enable()

    def test_earlier_steps_stay_unchanged(self) -> None:
        with self.stepping(EchoEnvironment, 2) as manager:
            kept = [info for _ in range(5) for info in manager.step(Wait.all())]
            copies = [info.current["default"].obs.copy() for info in kept]
            for _ in range(10):
                manager.step(Wait.all())

            assert all((info.current["default"].obs == copy).all() for info, copy in zip(kept, copies, strict=True))

    def test_an_episode_restarts_in_the_step_that_ends_it(self) -> None:
        script = [Step(), Step(reward=2.0, terminated=True)]
        with self.stepping(lambda: FakeEnvironment(script), 1) as manager:
            manager.step(Wait.all())
            (info,) = manager.step(Wait.all())

            steps = info.current["default"]
            assert steps.terminated.tolist() == [True]
            assert steps.reward.tolist() == [2.0]
            assert steps.obs.tolist() == [[1.0, 0.0, 0.0]]
            assert steps.final_obs.tolist() == [[0.0, 2.0, 2.0]]

    def test_the_same_seed_gives_every_environment_the_same_seed_again(self) -> None:
        with self.make_manager(FakeEnvironment, 3) as manager:
            manager.reset({"seed": 4})
            manager.reset({"seed": 4})
            manager.reset({"seed": [7, 8, 9]})
            manager.reset()

            seeds = manager.get_attr("seeds")
        assert all(first == again for first, again, *_ in seeds)
        assert len({first for first, *_ in seeds}) == 3
        assert [own[2:] for own in seeds] == [[7, None], [8, None], [9, None]]

    def test_a_reset_waits_out_and_discards_steps_in_flight(self) -> None:
        policy, n_steps = NumberedActions(), Counter[int]()
        with self.stepping(EchoEnvironment, 3, policy) as manager:
            manager.step(Wait(max_ready=1))
            infos = manager.reset()
            assert all((info.current["default"].obs[:, 2] == 0).all() for info in infos)
            for _ in range(10):
                for info in manager.step(Wait.all()):
                    check_echo(info, policy.given, n_steps)

    def test_send_and_recv_pair_every_row_with_its_action(self) -> None:
        with self.make_manager(EchoEnvironment, 4) as manager:
            manager.reset()
            batch = manager.recv(Wait.all())
            assert batch.env_ids.tolist() == [0, 1, 2, 3]
            for number in range(1, 30):
                sent = number * 10 + batch.env_ids
                manager.send(sent, batch.env_ids)
                sent_to = dict(zip(batch.env_ids.tolist(), sent.tolist(), strict=True))
                batch = manager.recv(Wait.all())
                assert batch.env_ids.tolist() == sorted(sent_to)
                assert batch.obs[:, 0].tolist() == batch.env_ids.tolist()
                assert batch.obs[:, 3].tolist() == [sent_to[env_id] for env_id in batch.env_ids.tolist()]
                assert (batch.obs[:, 2] == number).all()

    def test_send_takes_some_environments_and_leaves_the_others_ready(self) -> None:
        with self.receiving(EchoEnvironment, 4) as manager:
            manager.send(np.array([20, 10]), [2, 1])
            first = manager.recv(Wait.all())
            manager.send(np.array([30, 0]), [3, 0])
            second = manager.recv(Wait.all())

            assert sorted(zip(first.env_ids.tolist(), first.obs[:, 3].tolist(), strict=True)) == [(1, 10), (2, 20)]
            assert sorted(zip(second.env_ids.tolist(), second.obs[:, 3].tolist(), strict=True)) == [(0, 0), (3, 30)]


class _Told:
    """A source of tasks that notes the class of each one's error, by the task's number."""

    def __init__(self, tasks: list[Any]) -> None:
        self._left = iter(enumerate(tasks))
        self.was_told: dict[int, type] = {}

    def next_task(self, env_id: int) -> Task:
        """Return the next task, named by its number."""
        number, task = next(self._left)
        return attrs.evolve(Task.of(task), id=number)

    def ended(self, result: TaskResult) -> None:
        """Note a task whose episode has ended."""
        self.was_told[result.task.id] = type(None)

    def lost(self, task: Task, error: Exception) -> None:
        """Note a task that was given up."""
        self.was_told[task.id] = type(error)


class _TaskContract(OwnManagers):
    """Tests of episodes that begin on demand, and from tasks."""

    @pytest.fixture(autouse=True)
    def _is_for_those_that_begin(self, request: pytest.FixtureRequest) -> None:
        refuses = "refused" in request.node.originalname
        if request.function.__qualname__.startswith("_TaskContract") and refuses is self.begins_on_demand:
            pytest.skip("only where episodes begin on demand, or where they cannot")

    def test_tasks_are_refused_where_episodes_cannot_begin_on_demand(self) -> None:
        with self.make_manager(EchoEnvironment, 2) as manager:
            with pytest.raises(UsageError, match="on demand"):
                manager.reset(tasks=[0, 1, 2])
            assert manager.reset()

    @pytest.mark.parametrize("wait", ["any", "all"])
    @pytest.mark.parametrize("prefetch", [False, None])
    def test_recv_gives_each_task_once_and_its_rows_name_it(self, prefetch: bool | None, wait: str) -> None:
        tasks = [{"task": number} for number in range(20)]
        finished = Counter[int]()
        with self.make_manager(EchoEnvironment, 3) as manager:
            manager.reset(tasks=tasks if prefetch is False else iter(tasks), prefetch=prefetch)
            while not manager.tasks.done:
                batch = manager.recv(wait)
                assert batch.obs[:, 4].tolist() == batch.task.tolist()
                assert not batch.reward[batch.first].any()
                if batch.final_obs is not None:
                    assert batch.final_obs[:, 4].tolist() == batch.final_task.tolist()
                finished.update(batch.final_task.tolist())
                manager.send(np.arange(len(batch)) + 1, batch.env_ids)
            assert finished == Counter(range(20))
            results = manager.tasks.results
            assert [result.index for result in results] == list(range(20))
            assert all((result.length, result.attempts) == (7 + result.env_id, 1) for result in results)
            assert sum(each.total for each in manager.episodes.recent) == sum(result.total for result in results)
            assert sorted(each.task for each in manager.episodes.recent) == list(range(20))

    @pytest.mark.parametrize("wait", ["any", "all"])
    def test_step_gives_each_task_once_and_its_rows_name_it(self, wait: str) -> None:
        policy, finished = NumberedActions(), Counter[int]()
        with self.make_manager(EchoEnvironment, 3) as manager:
            manager.set_policy("default", policy)
            manager.reset(tasks=[{"task": number} for number in range(20)])
            while not manager.tasks.done:
                for info in manager.step(wait):
                    steps, made = info.current["default"], info.transitions("default")
                    tasks = [info.tasks[env_id] for env_id in steps.env_id.tolist()]
                    assert steps.obs[:, 4].tolist() == tasks
                    assert (made.next_obs[:, 4] == made.obs[:, 4]).all()
                    assert (made.next_obs[:, 2] == made.obs[:, 2] + 1).all()
                    finished.update(info.final_tasks.values())
            assert finished == Counter(range(20))
            assert all(result.length == 7 + result.env_id for result in manager.tasks.results)

    def test_fewer_tasks_than_environments_leave_the_others_at_rest(self) -> None:
        with self.make_manager(EchoEnvironment, 3) as manager:
            manager.reset(tasks=[{"task": 5}])
            batch = manager.recv(Wait.all())
            assert (batch.env_ids.tolist(), batch.first.tolist()) == ([0], [True])
            manager.send(np.array([1, 2, 3]), [0, 1, 2])
            assert manager.recv(Wait.all()).env_ids.tolist() == [0]
            manager.reset(tasks=[])
            assert manager.tasks.done
            assert len(manager.recv(Wait.all())) == 0

    @pytest.mark.parametrize("call", ["step", "recv"])
    def test_a_task_begins_behind_its_actions_and_its_results_count_the_later_steps(self, call: str) -> None:
        self._require_actions()
        tasks = [Task(options={"task": k}, actions=np.arange(1, k % 4 + 1)) for k in range(12)]
        firsts = {}
        with self.make_manager(EchoEnvironment, 3) as manager:
            manager.set_policy("default", NumberedActions())
            infos = manager.reset(tasks=tasks)
            while not manager.tasks.done:
                if call == "recv":
                    batch = manager.recv("any")
                    assert not batch.reward[batch.first].any()
                    obs = batch.obs[batch.first]
                    manager.send(np.full(len(batch), 5), batch.env_ids)
                else:
                    obs = [own for info in infos for own in info.current["default"].obs if own[4] not in firsts]
                    infos = manager.step("any")
                firsts.update({int(own[4]): own[2:4].tolist() for own in obs})
            assert firsts == {k: [k % 4, k % 4] for k in range(12)}
            results = manager.tasks.results
            assert [(result.length, result.attempts) for result in results] == [
                (7 + result.env_id - result.index % 4, 1) for result in results
            ]
            if call == "recv":
                assert [result.total for result in results] == [5 * result.length for result in results]

    @pytest.mark.parametrize("prefetch", [False, None])
    def test_a_task_whose_episode_ends_or_fails_within_its_actions_is_given_up_alone(
        self, prefetch: bool | None
    ) -> None:
        self._require_actions()
        ends = {k: Task(options={"task": k}, actions=np.ones(20)) for k in (1, 4, 5, 11)}
        fails = {7: Task(options={"task": 7, "fault": "raise"}, actions=np.ones(3)), **ends}
        source = _Told([fails.get(k, {"task": k}) for k in range(14)])
        with self.make_manager(EchoEnvironment, 3) as manager:
            manager.reset(tasks=source, prefetch=prefetch)
            while not manager.tasks.done:
                batch = manager.recv("any")
                assert not np.isin(batch.task, list(fails)).any()
                manager.send(np.ones(len(batch), np.int64), batch.env_ids)
            assert source.was_told == {k: type(None) if k not in fails else EpisodeNotBegun for k in range(14)}
            for result in manager.tasks.results:
                assert result.attempts == 1
                if isinstance(result.error, EpisodeNotBegun):
                    error = result.error
                    assert (error.task, error.env_ids) == (result.index, (result.env_id,))
                    assert error.env_ids[0] in manager.stats().workers[error.worker_id].env_ids
                    assert error.step == (2 if result.index == 7 else 7 + result.env_id)
                    assert isinstance(error.failure, EnvRaised) == (result.index == 7)
            assert manager.stats().restarts == 0

    def test_bad_actions_of_a_task_are_refused_before_anything_begins(self) -> None:
        self._require_actions()
        with self.make_manager(EchoEnvironment, 2, episodes="on_demand") as manager:
            manager.reset()
            batch = manager.recv(Wait.all())
            for bad in (["x"], [[1], [2]], {"other": [1]}, 1):
                with pytest.raises(BadAction):
                    manager.begin([0, 1], [Task(), Task(actions=bad)])
            manager.send(np.ones(2, np.int64), batch.env_ids)
            assert not manager.recv(Wait.all()).first.any()

    def test_actions_of_tasks_need_workers_that_take_them(self) -> None:
        if self.takes_actions or not self.begins_on_demand:
            pytest.skip("only where tasks, but not their actions, can begin episodes")
        with self.make_manager(EchoEnvironment, 2) as manager:
            with pytest.raises(UsageError, match="actions of a task"):
                manager.reset(tasks=[Task(actions=[1, 2])])
            assert manager.reset(tasks=[{"task": 1}])

    def _require_actions(self) -> None:
        if not self.takes_actions:
            pytest.skip("only where episodes can begin with actions")

    def test_begin_begins_episodes_where_asked_while_others_go_on(self) -> None:
        with self.make_manager(EchoEnvironment, 2, episodes="on_demand") as manager:
            manager.reset()
            batch = manager.recv(Wait.all())
            while not batch.terminated.any():
                manager.send(np.ones(len(batch), np.int64), batch.env_ids)
                batch = manager.recv(Wait.all())
            assert batch.env_ids[batch.terminated].tolist() == [0]
            with pytest.raises(BadAction, match="env 0"):
                manager.send(np.array([1, 1]), [0, 1])
            manager.begin([0], [{"task": 70}])
            manager.send(np.array([2]), [1])
            rows: dict[int, Any] = {}
            while len(rows) < 2:
                batch = manager.recv(Wait.all())
                rows.update(
                    zip(batch.env_ids.tolist(), zip(batch.first.tolist(), batch.obs.tolist(), strict=True), strict=True)
                )
            assert rows[0] == (True, [0, 0, 0, 0, 70])
            assert rows[1] == (False, [1, 0, 8, 2, 0])


class _LifeContract(OwnManagers):
    """Tests of ``call`` and similar methods, of exceptions in environments, and of ``close()``."""

    def test_call_get_attr_set_attr_and_render_reach_the_environments_asked_for(self) -> None:
        with self.stepping(EchoEnvironment, 4) as manager:
            manager.step(Wait(max_ready=1))

            assert manager.call("who", "you", env_ids=[3, 0]) == ["you: env 3", "you: env 0"]
            manager.set_attr("label", ["x", "y"], env_ids=[2, 1])
            assert manager.get_attr("label") == ["env 0", "y", "x", "env 3"]
            assert manager.render(env_ids=[1]) == ["picture of env 1"]
            assert manager.step(Wait.all())

    def test_a_function_is_called_with_each_environment_where_that_is(self) -> None:
        with self.make_manager(EchoEnvironment, 3) as manager:
            manager.reset()
            assert manager.call(lambda env, word: f"{word}, {env.label}", "hello", env_ids=[2, 0]) == [
                "hello, env 2",
                "hello, env 0",
            ]

    def test_a_call_between_send_and_recv_loses_nothing(self) -> None:
        with self.receiving(EchoEnvironment, 3) as manager:
            for number in range(1, 5):
                manager.send(np.full(3, number), [0, 1, 2])
                assert manager.call("who", "you", env_ids=[1]) == ["you: env 1"]
                batch = manager.recv(Wait.all())
                assert batch.obs[:, 3].tolist() == [number] * 3
                assert batch.obs[:, 2].tolist() == [number] * 3

    def test_an_exception_in_a_call_leaves_the_worker_usable(self) -> None:
        policy, n_steps = NumberedActions(), Counter[int]()
        with self.stepping(EchoEnvironment, 2, policy) as manager:
            with pytest.raises(EnvRaised, match="no_such_name") as raised:
                manager.call("no_such_name")
            assert raised.value.phase == "call"
            for info in manager.step(Wait.all()):
                check_echo(info, policy.given, n_steps)

    def test_an_exception_in_step_is_raised_once_and_reset_revives(self) -> None:
        with self.stepping(faulty(Raise(ValueError("gear 7 broke")), after=1, only_env=0), 2) as manager:
            manager.step(Wait.all())
            with pytest.raises(EnvRaised, match="gear 7 broke") as raised:
                manager.step(Wait.all())
            assert raised.value.env_ids == (0,)
            assert raised.value.phase == "step"
            assert isinstance(raised.value.__cause__, ValueError) or not self.exceptions_travel
            assert str(raised.value).rstrip().endswith("ValueError: gear 7 broke")
            if len(manager.env_workers) > 1:
                assert [info.worker_id for info in manager.step(Wait.all())] == [1]
            manager.reset()
            assert manager.step(Wait.all())

    def test_an_exception_in_reset_is_raised_and_another_reset_works(self) -> None:
        with self.make_manager(faulty(Raise(RuntimeError("not yet")), at="reset", only_env=0), 2) as manager:
            manager.set_policy("default", NumberedActions())
            with pytest.raises(EnvRaised, match="not yet") as raised:
                manager.reset()
            assert raised.value.phase == "reset"
            manager.reset()
            assert manager.step(Wait.all())

    def test_an_exception_in_the_factory_is_raised_by_the_constructor(self) -> None:
        with pytest.raises(EnvRaised, match="no license") as raised:
            self.make_manager(faulty(Raise(RuntimeError("no license")), at="start"), 2)
        assert raised.value.phase == "start"
        assert isinstance(raised.value.__cause__, RuntimeError) or not self.exceptions_travel

    def test_close_works_any_number_of_times_and_at_any_moment(self) -> None:
        manager = self.make_manager(EchoEnvironment, 2)
        manager.set_policy("default", NumberedActions())
        manager.reset()
        manager.step(Wait(max_ready=1))
        manager.close()
        manager.close()
        self.make_manager(EchoEnvironment, 1).close()


class ManagerContract(_StepContract, _TaskContract, _LifeContract):
    """A test class to inherit. It tests a manager's steps, tasks, exceptions and closing."""

    @abstractmethod
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        """Return a new manager to test. ``options`` are fields of ManagerOptions, such as ``wait`` and ``seed``."""


class EnvironmentContract:
    """A test class to inherit. It tests an environment's specs, episode ends, seeds and reuse of arrays."""

    n_steps = 300

    @abstractmethod
    def make_environment(self) -> Any:
        """Return a new environment to test: an Environment, or one from a supported library, such as Gymnasium."""

    def test_the_environment_keeps_the_contract(self) -> None:
        findings = check_environment(self.make_environment, n_steps=self.n_steps, seed=0, in_process=True)
        is_repeated = any(each.question == "repeats" and each.outcome == "ok" for each in findings)
        problems = [
            f"{each.text} {each.advice}"
            for each in findings
            if each.outcome == "problem" or (each.question == "repeats" and not is_repeated)
        ]
        assert not problems, "\n".join(problems)
