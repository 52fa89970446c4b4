"""Episodes that begin on demand, at odd moments and with environments of other kinds than in the contracts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo import ParallelEnv

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvContext,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    TaskResult,
    Wait,
)
from envmanager.adapters.gymnasium import GymnasiumEnvironment
from envmanager.data.steps import Begin
from envmanager.errors import BadAction, EnvRaised, RestartsExhausted, UsageError, WorkerError
from envmanager.kernel.tasks import TaskBook
from envmanager.observe.events import Restarted, TaskLost

Make = Callable[..., EnvManager]

ON_DEMAND: Mapping[str, Any] = {"episodes": "on_demand"}


def one_each(factory: Any, n_envs: int = 3, **options: Any) -> EnvManager:
    return SubprocessEnvManager(factory, n_envs, seed=1, **options)


def all_in_one(factory: Any, n_envs: int = 3, **options: Any) -> EnvManager:
    return SubprocessEnvManager(factory, n_envs, n_workers=1, seed=1, **options)


def in_process(factory: Any, n_envs: int = 3, **options: Any) -> EnvManager:
    return SimpleEnvManager(factory, n_envs, seed=1, **options)


def in_threads(factory: Any, n_envs: int = 3, **options: Any) -> EnvManager:
    return AsyncioEnvManager(factory, n_envs, seed=1, **options)


KINDS = pytest.mark.parametrize("make", [in_process, in_threads, all_in_one, one_each])


class Level(gymnasium.Env[Any, Any]):
    """An environment of one task. An observation has the level, the number of steps, and the seed of the reset."""

    observation_space = gymnasium.spaces.Box(-1e12, 1e12, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(1000)

    def __init__(self, context: EnvContext) -> None:
        self.env_id = context.env_id
        self.given: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.given = options
        self.level = (options or {}).get("level", -1)
        self.length = (options or {}).get("length", 2 + self.level % 3)
        self.n_steps, self.seed = 0, seed
        return self._obs(), {"level": self.level, "step": 0}

    def _obs(self) -> Any:
        return np.array([self.level, self.n_steps, self.seed or 0], np.float64)

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        reward = float(self.np_random.random())
        is_end = self.n_steps >= self.length
        return self._obs(), reward, is_end, False, {"level": self.level, "step": self.n_steps}


class Leaving(ParallelEnv[Any, Any, Any]):
    """Agents of two behaviors that leave one by one, in an order that depends on the level."""

    metadata = {"name": "leaving"}
    possible_agents = ["ant_0", "bee_0", "ant_1"]

    def observation_space(self, agent: Any) -> Any:
        return gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float64 if agent.startswith("ant") else np.float32)

    def action_space(self, agent: Any) -> Any:
        return gymnasium.spaces.Discrete(1000)

    def _results(self) -> Any:
        return {
            agent: np.array([self.level, self.n_steps], self.observation_space(agent).dtype) for agent in self.agents
        }

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.level, self.n_steps, self.agents = options["level"], 0, list(self.possible_agents)
        self.lives = {agent: 1 + (self.level + place) % 3 for place, agent in enumerate(self.agents)}
        return self._results(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        assert set(actions) == set(self.agents)
        self.n_steps += 1
        played, obs = self.agents, self._results()
        ends = {agent: self.n_steps >= self.lives[agent] for agent in played}
        self.agents = [agent for agent in played if not ends[agent]]
        return obs, dict.fromkeys(played, 1.0), ends, dict.fromkeys(played, False), {agent: {} for agent in played}


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def play(manager: EnvManager, use: str, wait: Wait | str) -> None:
    """Play all tasks with ``step``, or with ``recv`` and ``send``; every action is 0."""
    while not manager.tasks.done:
        if use == "step":
            manager.step(wait)
        else:
            batch = manager.recv(wait)
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)


@KINDS
@pytest.mark.parametrize("wait", ["any", "all"])
def test_an_environment_plays_on_until_its_last_agent_of_any_behavior_has_left(make: Make, wait: str) -> None:
    with make(lambda context: Leaving()) as manager:
        for behavior in manager.behavior_specs:
            manager.set_policy(behavior, Zeros())
        manager.reset(tasks=[{"level": level} for level in range(12)])
        finished = Counter[int]()
        while not manager.tasks.done:
            for info in manager.step(wait):
                for behavior, steps in info.current.items():
                    assert steps.obs[:, 0].tolist() == [info.tasks[env_id] for env_id in steps.env_id.tolist()]
                    made = info.transitions(behavior)
                    assert (made.next_obs - made.obs).tolist() == [[0, 1]] * len(made.obs)
                finished.update(info.final_tasks.values())
        assert finished == Counter(range(12))
        assert [(each.total, each.length, len(each.episodes)) for each in manager.tasks.results] == [(6, 3, 3)] * 12
        assert manager.episodes.env_steps == manager.stats().env_steps == 36


def test_an_agent_that_leaves_early_does_not_have_its_episode_recycled() -> None:
    with one_each(lambda context: Leaving(), 1, restarts=RestartPolicy(recycle_after_steps=1)) as manager:
        for behavior in manager.behavior_specs:
            manager.set_policy(behavior, Zeros())
        manager.reset(tasks=[{"level": level} for level in range(3)])
        for _ in range(30):
            manager.step()
        assert [result.attempts for result in manager.tasks.results] == [1, 1, 1]
        assert manager.stats().restarts == 0
        assert [worker.generation for worker in manager.stats().workers] == [3]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("use", ["recv", "step"])
@pytest.mark.parametrize("max_lead", [1, 3])
def test_a_worker_that_rests_holds_up_no_other(use: str, prefetch: bool, max_lead: int) -> None:
    wait = Wait(max_lead=max_lead)
    tasks = [{"level": 0, "length": 1 + 9 * (number % 2)} for number in range(3)]
    with one_each(Level) as manager:
        manager.set_policy("default", Zeros())
        manager.reset(tasks=tasks, prefetch=prefetch)
        play(manager, use, wait)
        assert [result.length for result in manager.tasks.results] == [1, 10, 1]


def test_a_worker_that_has_rested_may_play_again_under_max_lead() -> None:
    class Late:
        """A source that has a task for environment 0 only when environment 1 has played for long."""

        def __init__(self) -> None:
            self.given = [{"length": 1}, {"length": 20}, {"length": 10}]
            self.is_late = True

        def next_task(self, env_id: int) -> Any:
            if len(self.given) == 1 and self.is_late:
                return None
            if not self.given:
                raise StopIteration
            return self.given.pop(0)

    source, wait, n_rows = Late(), Wait(max_lead=2), [0, 0]
    with one_each(Level, 2) as manager:
        manager.reset(tasks=source, prefetch=False)
        while not manager.tasks.done:
            batch = manager.recv(wait)
            for env_id in batch.env_ids.tolist():
                n_rows[env_id] += 1
            if n_rows[1] == 10:
                source.is_late = False
            if n_rows[0] == 3:  # env 1 was not held back until env 0 had as many rows
                assert n_rows[1] <= 13
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        assert sorted(result.length for result in manager.tasks.results) == [1, 10, 20]


def test_a_gymnasium_environment_rests_beside_environments_of_other_kinds_too() -> None:
    environment = GymnasiumEnvironment.wrap(Level(EnvContext(0, 0)))
    environment.rests = True
    steps = environment.reset(seeds=[None], options={"level": 3})["default"]
    while not steps.ended.any():
        assert steps.acting is None
        steps = environment.step({"default": np.zeros(1, np.int64)})["default"]
    assert steps.acting is not None
    assert (steps.acting.tolist(), steps.obs.tolist()) == ([False], steps.final_obs.tolist())
    assert environment.reset(seeds=[None], options={"level": 4})["default"].acting is None


@KINDS
def test_actions_for_resting_rows_alone_cost_no_step(make: Make) -> None:
    with make(Level, infos=True) as manager:
        manager.reset(tasks=[{"length": 1}, {"length": 2}, {"length": 2}])
        batch = manager.recv(Wait.all())
        manager.send(np.zeros(3, np.int64), batch.env_ids)
        assert manager.recv(Wait.all()).terminated.tolist() == [True, False, False]
        n_steps = manager.stats().steps
        manager.send(np.zeros(1, np.int64), [0])
        manager.send(np.zeros(2, np.int64), [1, 2])
        assert sorted(manager.recv(Wait.all()).env_ids.tolist()) == [1, 2]
        assert manager.tasks.done
        assert manager.stats().steps - n_steps <= 2


@pytest.mark.parametrize("use", ["recv", "step"])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("wait", ["any", "all"])
def test_the_same_tasks_have_the_same_results_wherever_they_are_played(wait: str, prefetch: bool, use: str) -> None:
    tasks = [{"length": 1 + number % 4} for number in range(12)] + [5, 6]
    policy = Zeros()
    found = []
    for make, n_envs in (in_process, 1), (in_process, 4), (one_each, 4), (all_in_one, 16):
        with make(Level, n_envs) as manager:
            manager.set_policy("default", policy)
            manager.reset(tasks=tasks, prefetch=prefetch)
            play(manager, use, wait)
            found.append([(result.total, result.length) for result in manager.tasks.results])
    assert found == [found[0]] * 4
    assert len({total for total, _ in found[0]}) == 14


def test_a_copy_of_a_batch_has_its_own_tasks() -> None:
    with in_process(Level, zero_copy=True) as manager:
        manager.reset(tasks=[{"length": 1}] * 6, prefetch=True)
        manager.recv()
        manager.send(np.zeros(3, np.int64), [0, 1, 2])
        batch = manager.recv()
        copy = batch.copy()
        batch.task[:] = batch.final_task[:] = 9
        batch.first[:] = True
        assert (copy.task.tolist(), copy.final_task.tolist(), copy.first.any()) == ([3, 4, 5], [0, 1, 2], False)


@KINDS
def test_begin_without_tasks_passes_the_options_of_the_reset(make: Make) -> None:
    with make(Level, **ON_DEMAND) as manager:
        manager.reset()
        manager.begin([0, 1, 2])
        manager.recv(Wait.all())
        assert manager.get_attr("given") == [None] * 3


@KINDS
def test_each_task_drawn_is_running_or_has_a_result(make: Make) -> None:
    drawn: list[int] = []

    class Endless:
        def next_task(self, env_id: int) -> dict[str, int]:
            drawn.append(env_id)
            return {"length": 2 + len(drawn) % 3}

    with make(Level) as manager:
        manager.reset(tasks=Endless())
        for _ in range(20):
            batch = manager.recv()
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
            running = manager.tasks.running
            assert set(running.values()) <= {0, 1, 2}
            assert sorted([*running, *(result.index for result in manager.tasks.results)]) == list(range(len(drawn)))


@KINDS
def test_step_after_begin_is_refused_and_recv_is_not(make: Make) -> None:
    with make(Level, **ON_DEMAND) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        manager.begin([1], [{"level": 7}])
        assert manager.tasks.running == {0: 1}
        with pytest.raises(UsageError, match="begin"):
            manager.step()
        batch = manager.recv(Wait.all())
        rows = dict(zip(batch.env_ids.tolist(), batch.obs[:, :2].tolist(), strict=True))
        assert rows[0] == rows[2] == [-1, 0]
        manager.send(np.zeros(2, np.int64), [0, 2])
        while rows != {0: [-1, 1], 1: [7, 0], 2: [-1, 1]}:
            batch = manager.recv()
            rows.update(zip(batch.env_ids.tolist(), batch.obs[:, :2].tolist(), strict=True))


def test_begin_between_the_first_rows_of_a_reset_leaves_no_action_for_the_row_that_it_cuts() -> None:
    with one_each(Level, **ON_DEMAND) as manager:
        manager.reset()
        assert manager.recv(Wait(max_ready=1)).env_ids.tolist() == [0]
        manager.begin([1], [{"level": 7}])
        assert manager.recv(Wait(min_ready=2, max_ready=2)).env_ids.tolist() == [1, 2]
        with pytest.raises(BadAction, match="env 1"):
            manager.send(np.zeros(2, np.int64), [1, 2])
        batch = manager.recv()
        assert (batch.env_ids.tolist(), batch.obs[:, 0].tolist(), batch.task.tolist()) == ([1], [7], [0])


@pytest.mark.parametrize("make", [all_in_one, one_each])
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_reset_begins_an_episode_in_each_environment_of_a_dead_worker(make: Make, max_restarts: int) -> None:
    with make(Level, **ON_DEMAND, restarts=RestartPolicy(max_restarts, backoff_s=0)) as manager:
        manager.reset()
        with pytest.raises(WorkerError):
            manager.call(_exit, env_ids=[1])
        assert sum(len(info.current["default"]) for info in manager.reset()) == 3
        batch = manager.recv(Wait.all())
        assert (batch.env_ids.tolist(), batch.first.tolist()) == ([0, 1, 2], [True] * 3)
        manager.send(np.zeros(3, np.int64), batch.env_ids)
        assert len(manager.recv(Wait.all())) == 3


@KINDS
@pytest.mark.parametrize("kind", [list, iter])
def test_a_failed_reset_loses_no_task_and_the_next_one_may_differ(make: Make, kind: Any, tmp_path: Path) -> None:
    class FailsOnce(Level):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if self.env_id == 1 and not (tmp_path / "failed").exists():
                (tmp_path / "failed").touch()
                raise RuntimeError("no level yet")
            return super().reset(seed=seed, options=options)

    tasks = kind([{"level": number} for number in range(6)])
    with make(FailsOnce, restarts=RestartPolicy(0)) as manager:
        with pytest.raises(EnvRaised, match="no level yet"):
            manager.reset(tasks=tasks, options={"length": 9}, seed=1)
        manager.reset(tasks=tasks, options={"length": 1}, seed=2)
        seeds = {}
        while not manager.tasks.done:
            batch = manager.recv()
            seeds.update(zip(batch.task.tolist(), batch.obs[:, 2].tolist(), strict=True))
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        assert [(result.task.options, result.length) for result in manager.tasks.results] == [
            ({"level": number}, 1) for number in range(6)
        ]
        manager.reset(tasks=[{}], seed=2)
        assert manager.recv().obs[0, 2] == seeds[0]


@KINDS
def test_a_list_has_no_task_none(make: Make) -> None:
    with make(Level) as manager, pytest.raises(UsageError, match="None"):
        manager.reset(tasks=[None])


@pytest.mark.parametrize("make", [all_in_one, one_each])
def test_a_task_that_cannot_be_sent_takes_none_of_the_last_tasks_along(make: Make) -> None:
    with make(Level) as manager:
        manager.reset(tasks=[{"level": level} for level in (0, 0, 0, threading.Lock(), 5)])
        with pytest.raises(UsageError, match="pickled"):
            play(manager, "recv", "all")
        play(manager, "recv", "all")
        assert [result.task.options["level"] for result in manager.tasks.results] == [0, 0, 0, 5]


@pytest.mark.parametrize("options", [{}, {"zero_copy": True}])
@pytest.mark.parametrize("make", [in_process, all_in_one])
def test_after_tasks_a_plain_reset_lets_no_environment_rest(make: Make, options: Any) -> None:
    with make(Level, 2, **options) as manager:
        for length in (3, 4, 5):  # of the two, so that one rests while the other plays
            manager.reset(tasks=[{"length": 2}, {"length": length}])
            play(manager, "recv", "all")
            manager.reset()
            for _ in range(10):
                batch = manager.recv("all")
                assert len(batch) == 2
                manager.send(np.zeros(2, np.int64), batch.env_ids)


@KINDS
def test_tasks_whose_workers_all_failed_are_no_reason_to_wait_for_ever(make: Make) -> None:
    tasks = [{"level": 0, "length": 0}] * 5
    with make(Level, restarts=RestartPolicy(0)) as manager:
        manager.set_policy("default", Zeros())
        for call in (manager.recv, manager.step):
            manager.reset(tasks=tasks)
            if call == manager.recv:
                batch = manager.recv(Wait.all())
                manager.set_attr("level", "no number")
                manager.send(np.zeros(3, np.int64), batch.env_ids)
            else:
                manager.set_attr("level", "no number")
            for _ in range(manager.n_workers):
                with pytest.raises(EnvRaised):
                    call(Wait.all())
            with pytest.raises(UsageError, match="no number"):
                call()
            assert not manager.tasks.done


@KINDS
def test_tasks_are_not_done_before_the_last_rows_are_returned(make: Make) -> None:
    class Complains:
        def __init__(self) -> None:
            self.n_left = 3

        def next_task(self, env_id: int) -> Any:
            if not self.n_left:
                raise StopIteration
            self.n_left -= 1
            return {"length": 1}

        def ended(self, result: Any) -> None:
            raise ValueError("what a game")

    n_ended = n_errors = 0
    with make(Level) as manager:
        manager.reset(tasks=Complains())
        while not manager.tasks.done:
            try:
                batch = manager.recv()
            except ValueError:
                n_errors += 1
                continue
            n_ended += int(batch.terminated.sum())
            if batch.first.any():
                manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
    assert (n_ended, n_errors) == (3, 3)


def test_a_source_may_call_the_environments_even_if_a_call_kills_one_inside_the_reset() -> None:
    class Careless:
        def __init__(self) -> None:
            self.n_asked = 0

        def next_task(self, env_id: int) -> Any:
            self.n_asked += 1
            if self.n_asked > 8:
                raise StopIteration
            if self.n_asked == 2:
                with pytest.raises(WorkerError):
                    manager.call(_exit, env_ids=[0])
            return {"level": self.n_asked - 1}

    with all_in_one(Level, restarts=RestartPolicy(3, backoff_s=0)) as manager:
        manager.reset(tasks=Careless())
        finished = Counter[int]()
        while not manager.tasks.done:
            batch = manager.recv()
            assert batch.obs[:, 0].tolist() == batch.task.tolist()
            finished.update(batch.final_task[~batch.lost[batch.terminated | batch.truncated]].tolist())
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
    assert finished == Counter(range(8))


def _exit(env: Any) -> None:
    os._exit(3)


@KINDS
def test_recv_begins_episodes_beside_others_that_play_if_nothing_is_in_flight(make: Make) -> None:
    with make(Level, **ON_DEMAND) as manager:
        manager.reset(options={"length": 9})
        manager.recv(Wait.all())
        manager.begin([1, 2], [{"level": 4}, {"level": 5}])
        rows: dict[int, Any] = {}
        while len(rows) < 2:
            batch = manager.recv(Wait.all())
            rows.update(zip(batch.env_ids.tolist(), batch.obs[:, :2].tolist(), strict=True))
            assert batch.first.all()
        assert rows == {1: [4, 0], 2: [5, 0]}
        manager.send([1, 1, 1], [0, 1, 2])
        assert manager.recv(Wait.all()).obs[:, :2].tolist() == [[-1, 1], [4, 1], [5, 1]]


@KINDS
def test_on_demand_a_reset_without_a_seed_repeats_no_seed(make: Make) -> None:
    with make(Level, **ON_DEMAND) as manager:
        manager.reset(seed=[7, 8, 9])
        assert manager.recv(Wait.all()).obs[:, 2].tolist() == [7, 8, 9]
        manager.reset()
        assert manager.recv(Wait.all()).obs[:, 2].tolist() == [0, 0, 0]


@KINDS
def test_after_a_reset_with_a_seed_for_some_begin_derives_seeds_for_these_alone(make: Make) -> None:
    with make(Level, **ON_DEMAND) as manager:
        manager.reset(seed=[7, None, 8])
        manager.recv(Wait.all())
        manager.begin([0, 1, 2])
        seeds: dict[int, float] = {}
        while len(seeds) < 3:
            batch = manager.recv(Wait.all())
            seeds.update(zip(batch.env_ids.tolist(), batch.obs[:, 2].tolist(), strict=True))
        assert seeds[1] == 0
        assert len({7, 8, seeds[0], seeds[2]}) == 4


@KINDS
def test_a_task_keeps_its_options_when_the_mapping_that_gave_them_is_changed(make: Make) -> None:
    given: dict[str, Any] = {"more": 5}

    def levels() -> Iterator[dict[str, Any]]:
        own: dict[str, Any] = {}
        for level in range(9):
            own["level"] = level
            yield own

    with make(Level) as manager:
        manager.reset(tasks=levels(), options=given)
        given["more"] = 6
        while not manager.tasks.done:
            batch = manager.recv()
            assert batch.obs[:, 0].tolist() == batch.task.tolist()
            assert {own["more"] for own in manager.get_attr("given", batch.env_ids)} <= {5}
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        assert [result.task.options for result in manager.tasks.results] == [{"level": level} for level in range(9)]


@KINDS
def test_step_plays_tasks_that_come_after_it_has_returned_nothing(make: Make) -> None:
    answers = iter([None, None, None, {"level": 1}, {"level": 2}])

    class Late:
        def next_task(self, env_id: int) -> Any:
            return next(answers)

    with make(Level) as manager:
        manager.set_policy("default", Zeros())
        manager.reset(tasks=Late())
        assert manager.step() == []
        while not manager.tasks.done:
            manager.step()
        assert [result.length for result in manager.tasks.results] == [3, 4]


@KINDS
def test_an_interrupt_reaches_a_source_that_waits_and_loses_no_task(make: Make) -> None:
    interrupted: list[str] = []

    class Waiting:
        n_given = 0

        def next_task(self, env_id: int) -> Any:
            if self.n_given == 4 and not interrupted:
                self.interrupt("next_task")
            if self.n_given == 8:
                raise StopIteration
            self.n_given += 1
            return {"level": self.n_given - 1}

        def ended(self, result: TaskResult) -> None:
            if result.index == 6:
                signal.raise_signal(signal.SIGINT)  # is raised once ``ended`` has returned; a second one at once
                self.interrupt("ended")

        def interrupt(self, where: str) -> None:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                interrupted.append(where)
                raise

    with make(Level) as manager:
        manager.set_policy("default", Zeros())
        manager.reset(tasks=Waiting())
        n_raised = 0
        while not manager.tasks.done:
            try:
                manager.step()
            except KeyboardInterrupt:
                n_raised += 1
        assert (interrupted, n_raised) == (["next_task", "ended"], 2)
        assert [result.task.options for result in manager.tasks.results] == [{"level": level} for level in range(8)]


def test_a_source_is_told_of_the_task_that_the_last_worker_took_along_in_the_call_that_counts_it() -> None:
    class Source:
        def __init__(self) -> None:
            self.lost_tasks: list[Any] = []

        def next_task(self, env_id: int) -> Any:
            return {"level": 7}

        def lost(self, task: Any, error: Exception) -> None:
            self.lost_tasks.append(task.options)

    class Raising(Level):
        def step(self, action: Any) -> Any:
            raise ValueError("this level does not exist")

    source = Source()
    with in_process(Raising, 1) as manager:
        manager.reset(tasks=source, attempts=1)
        manager.send([0], manager.recv().env_ids)
        with pytest.raises(EnvRaised):
            manager.recv()
        with pytest.raises(UsageError, match="call reset"):
            manager.recv()

        assert (manager.tasks.n_lost, source.lost_tasks) == (1, [{"level": 7}])


def test_an_interrupt_between_any_two_lines_loses_no_task_and_tells_each_result_once() -> None:
    class Source:
        def __init__(self) -> None:
            self.n_given, self.told = 0, list[int]()

        def next_task(self, env_id: int) -> Any:
            if self.n_given == 3:
                raise StopIteration
            self.n_given += 1
            return {"level": 0, "length": 1, "number": self.n_given, "raises": self.n_given == 2}

        def ended(self, result: TaskResult) -> None:
            self.told.append(result.index)

        def lost(self, task: Any, error: Exception) -> None:
            self.told.append(task.options["number"] - 1)

    class Raising(Level):
        def step(self, action: Any) -> Any:
            if self.given["raises"]:
                raise ValueError("this level does not exist")
            return super().step(action)

    def lines_until_interrupted(nth: int) -> int:
        n_lines, source, n_raised = 0, Source(), 0
        own = (Source.ended.__code__, Source.lost.__code__)  # in next_task, which may wait, it is raised at once

        def count(frame: Any, event: str, _: Any) -> Any:
            nonlocal n_lines
            if frame.f_code not in own and frame.f_code.co_filename != TaskBook.tell.__code__.co_filename:
                return None
            n_lines += event == "line"
            if n_lines == nth and event == "line":
                signal.raise_signal(signal.SIGINT)
            return count

        with in_process(Raising, 1, restarts=RestartPolicy(on_exception="restart", backoff_s=0)) as manager:
            manager.reset(tasks=source, attempts=1)
            before, batch = sys.gettrace(), None
            while not manager.tasks.done:
                try:
                    sys.settrace(None if n_raised else count)
                    if batch is None:
                        batch = manager.recv()
                    manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
                    batch = None
                except KeyboardInterrupt:
                    n_raised += 1
                except BadAction:  # the actions were sent before the interrupt was raised
                    batch = None
                sys.settrace(before)
            assert source.told == [0, 1, 2]
            assert [result.index for result in manager.tasks.results] == [0, 1, 2]
            assert n_raised == (0 < nth <= n_lines)
        return n_lines

    n_lines = lines_until_interrupted(-1)
    assert n_lines > 100
    for nth in range(1, n_lines + 1, 7):
        lines_until_interrupted(nth)


def vector(context: EnvContext) -> Any:
    return gymnasium.vector.SyncVectorEnv([lambda: Level(context)] * context.n_envs)


@pytest.mark.parametrize("factory", [Level, vector])
def test_a_replaced_worker_that_rested_takes_no_infos_from_the_rows_of_others(factory: Any) -> None:
    with one_each(factory, 2, infos=True, restarts=RestartPolicy(backoff_s=0)) as manager:
        manager.reset(tasks=[{"level": 1, "length": 4}])
        batch = manager.recv(Wait.all())
        with pytest.raises(WorkerError):
            manager.call(lambda env: os._exit(3), env_ids=[1])
        while len(batch):
            assert batch.info is not None
            assert batch.info[0]["step"] == batch.obs[0, 1]
            manager.send(np.zeros(1, np.int64), [0])
            batch = manager.recv(Wait.all())
            if manager.tasks.done:
                break
        assert manager.tasks.results[0].length == 4


@KINDS
@pytest.mark.parametrize("how", ["beside others", "at once", "cutting"])
def test_recycling_loses_no_episode_that_was_begun_on_demand(make: Make, how: str) -> None:
    with make(Level, 3, **ON_DEMAND, restarts=RestartPolicy(recycle_after_steps=10)) as manager:
        manager.reset()
        acting, begun = list(range(3)), 0
        batch = manager.recv("all")
        for _ in range(50):
            if acting:
                manager.send(np.zeros(len(acting), np.int64), acting)
            batch = manager.recv("all")
            assert not batch.lost.any()
            acting = batch.env_ids[~(batch.terminated | batch.truncated)].tolist()
            ended = sorted(set(range(3)) - set(acting) - set(manager.tasks.running.values()))
            if how == "cutting" and acting and batch.obs[0, 1] == 1:
                ended, acting = [*ended, acting[0]], acting[1:]
            manager.begin(ended, [{"length": 2 + (begun + k) % 3} for k in range(len(ended))])
            begun += len(ended)
            while how == "at once" and ended:
                batch = manager.recv("all")
                acting = sorted({*acting, *batch.env_ids[batch.first].tolist()})
                ended = [env_id for env_id in ended if env_id not in acting]
        results = manager.tasks.results
        assert manager.tasks.n_lost == 0
        assert {result.attempts for result in results} == {1}
        assert len(results) + len(manager.tasks.running) == begun
        if how != "at once" or len(manager.stats().workers) > 1:
            assert all(worker.generation >= 2 for worker in manager.stats().workers)


def test_begins_without_a_step_between_them_all_reach_the_worker() -> None:
    """As when a step could not be sent for lack of memory."""
    for make in (in_process, in_threads, one_each, all_in_one):
        with make(Level, 1, **ON_DEMAND) as manager:
            manager.reset()
            worker: Any = manager.env_workers[0]
            worker.send("begin", [Begin(0, True, 0, {"level": 7})])
            worker.send("begin", [Begin(0, False, 0, {"level": 9})])
            worker.send("step_rows", (np.zeros(0, np.int64), {"default": np.zeros(0, np.int64)}))
            (response,) = manager.step_queue.get(1, time.monotonic() + 60)
            assert response.payload["default"].obs[:, 0].tolist() == [7]
            worker.send("begin", [Begin(0, True, 0, {"level": 11})])
            worker.send("reset", [Begin(0, True, 0, {"level": 13})])
            assert worker.recv().payload["default"].obs[:, 0].tolist() == [13]
            worker.send("step", {"default": np.zeros(1, np.int64)})
            (response,) = manager.step_queue.get(1, time.monotonic() + 60)
            assert response.payload["default"].obs[:, 0].tolist() == [13]


@pytest.mark.parametrize(
    ("make", "factory", "use", "prefetch"),
    [
        (in_process, Level, "recv", False),
        (in_process, Level, "step", None),
        (all_in_one, Level, "recv", None),
        (all_in_one, Level, "step", False),
        (all_in_one, vector, "recv", None),
    ],
)
def test_recycling_loses_no_episode_of_a_task(make: Make, factory: Any, prefetch: bool | None, use: str) -> None:
    class Uneven:
        """An endless source in which one task of nine is longer than a worker lives."""

        n = 0

        def next_task(self, env_id: int) -> dict[str, int]:
            self.n += 1
            return {"length": 40 if self.n % 9 == 1 else 3}

    with make(factory, 3, restarts=RestartPolicy(recycle_after_steps=10)) as manager:
        manager.set_policy("default", Zeros())
        manager.reset(tasks=Uneven(), prefetch=prefetch)
        for _ in range(200):
            if use == "step":
                manager.step("all")
            else:
                batch = manager.recv("all")
                manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
        results = manager.tasks.results
        assert [result.index for result in results if result.length == 40][:3] == [0, 9, 18]
        assert {result.attempts for result in results} == {1}
        assert manager.stats().workers[0].generation >= 3


@pytest.mark.parametrize("make", [in_process, one_each])
def test_after_any_reset_the_first_rows_are_marked_once(make: Make) -> None:
    with make(Level, 3) as manager:
        for _ in range(2):
            manager.reset()
            assert manager.recv(Wait(max_ready=1)).first.all()
            manager.reset()
            batch = manager.recv("all")
            assert batch.first.tolist() == [True] * 3
            assert batch.copy().first.tolist() == [True] * 3
            for _ in range(5):
                manager.send(np.zeros(3, np.int64), range(3))
                assert not manager.recv("all").first.any()
        manager.reset()
        manager.send(np.zeros(3, np.int64), range(3))
        assert not manager.recv("all").first.any()


def test_a_lost_row_is_no_first_row() -> None:
    with one_each(Level, 2, restarts=RestartPolicy(backoff_s=0)) as manager:
        manager.reset()
        with pytest.raises(WorkerError):
            manager.call(lambda env: os._exit(3), env_ids=[0])
        batch = manager.recv("all")
        assert dict(zip(batch.env_ids.tolist(), batch.first.tolist(), strict=True))[1]
        while not batch.lost.any():
            batch = manager.recv("any")
        assert not batch.first[batch.lost].any()


@KINDS
def test_a_task_that_was_laid_ready_is_not_lost_with_its_worker(make: Make) -> None:
    class Raising(Level):
        def step(self, action: Any) -> Any:
            if self.level == 1 and self.n_steps == 1:
                raise ValueError("this level does not exist")
            return super().step(action)

    def endless() -> Iterator[Any]:
        for level in range(6):
            yield {"level": level}

    with make(Raising, 1, restarts=RestartPolicy(on_exception="restart", backoff_s=0)) as manager:
        manager.reset(tasks=endless(), attempts=1)
        play(manager, "recv", "any")
        assert [event.index for event in manager.events if isinstance(event, TaskLost)] == [1]
        assert [result.attempts for result in manager.tasks.results] == [1] * 6


class Poisoned(Level):
    """A step of a task raises if its options say so."""

    def step(self, action: Any) -> Any:
        if self.given.get("raises"):
            raise ValueError("this level does not exist")
        return super().step(action)


@pytest.mark.parametrize("make", [in_process, all_in_one])
def test_a_task_beside_one_that_raises_is_not_given_up_although_each_has_one_attempt(make: Make) -> None:
    with make(Poisoned, 2, restarts=RestartPolicy(on_exception="restart", backoff_s=0)) as manager:
        manager.reset(tasks=[{"length": 9}, {"raises": True}], attempts=1)
        play(manager, "recv", "any")
        sound, poisoned = manager.tasks.results
        assert (sound.error, sound.length, sound.attempts) == (None, 9, 2)
        assert isinstance(poisoned.error, EnvRaised)
        assert manager.tasks.n_lost == 1


@pytest.mark.parametrize("max_restarts", [1, 2])
def test_a_worker_may_give_up_as_many_tasks_in_a_row_as_it_may_restart_before_they_count(max_restarts: int) -> None:
    policy = RestartPolicy(max_restarts=max_restarts, on_exception="restart", backoff_s=0)
    with in_process(Poisoned, 1, restarts=policy) as manager:
        manager.reset(tasks=[{"raises": True}] * 20, attempts=1)
        with pytest.raises(RestartsExhausted):
            play(manager, "recv", "any")
        assert manager.events.count(Restarted) == (max_restarts + 1) + max_restarts  # excused, and counted
        manager.reset(tasks=[{"raises": number % 2 == 0, "length": 1} for number in range(20)], attempts=1)
        play(manager, "recv", "any")  # each sound task shows that it is not the worker
        assert manager.tasks.n_lost == 10


def test_the_options_of_a_task_win_over_those_of_the_reset() -> None:
    with in_process(Level, 1) as manager:
        manager.reset(tasks=[{"level": 5}, {"length": 1}, 7], options={"level": 8, "length": 3})
        rows = []
        while not manager.tasks.done:
            rows.append(manager.recv().obs[0].tolist()[:2])
            manager.send(np.zeros(1, np.int64), [0])
        assert rows == [[5, 0], [5, 1], [5, 2], [5, 3], [8, 0], [8, 1], [8, 0], [8, 1], [8, 2], [8, 3]]


@KINDS
def test_options_given_to_begin_are_not_kept_when_their_episode_has_ended(make: Make) -> None:
    with make(Level, 1, **ON_DEMAND) as manager:
        manager.reset(options={"length": 1})
        manager.recv()
        for level in range(3):
            manager.begin([0], [Task(options={"level": level}, seed=level, id=f"level {level}")])
            assert manager.recv().obs[:, 0].tolist() == [level]
            manager.send(np.zeros(1, np.int64), [0])
            manager.recv()
        tasks = [result.task for result in manager.tasks.results]
        assert tasks == [Task(seed=level, id=f"level {level}") for level in range(3)]
        assert [task.options for task in tasks] == [None] * 3
