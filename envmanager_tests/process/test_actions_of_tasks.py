"""Episodes that begin with the actions of their task, on managers of all kinds that take them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces
from pettingzoo import ParallelEnv

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvManager,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
)
from envmanager.errors import BadObservation, EpisodeNotBegun
from envmanager.recording import episodes
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager.training.evaluation import evaluate
from envmanager_tests.process.test_pool import AwaitedLevel, Level, Words

SUITE = "core portable"

Make = Callable[..., EnvManager]
ON_DEMAND: Any = {"episodes": "on_demand"}


class Walk(gymnasium.Env[Any, Any]):
    """A walk with random steps. The action is a tree, and an info tells the number of the step."""

    observation_space = spaces.Dict({"at": spaces.Box(-np.inf, np.inf, (2,), np.float64)})
    action_space = spaces.Dict({"push": spaces.Box(-1, 1, (2,)), "turn": spaces.Discrete(3)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.options = options or {}
        self.at, self.n_steps = self.np_random.normal(size=2), 0
        return {"at": self.at}, {"step": 0}

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        self.at = self.at * (1 + action["turn"]) + action["push"] + self.np_random.normal(size=2)
        if self.options.get("breaks") == self.n_steps:
            return {"at": self.at[:1]}, 1.0, False, False, {}
        return {"at": self.at}, 1.0, False, self.n_steps == 12, {"step": self.n_steps}


class AwaitedWalk:
    """A Walk whose ``step`` is a coroutine function."""

    observation_space, action_space = Walk.observation_space, Walk.action_space

    def __init__(self) -> None:
        self.env = Walk()

    def reset(self, **arguments: Any) -> Any:
        return self.env.reset(**arguments)

    async def step(self, action: Any) -> Any:
        return self.env.step(action)


class Leavers(ParallelEnv[str, Any, Any]):
    """Three agents of two behaviors, of which one leaves after each step. Observations have the sum of all actions."""

    possible_agents = ["walker_0", "walker_1", "flyer_0"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1e9, 1e9, (1 if agent == "flyer_0" else 2,), np.float64)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(100)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.total = list(self.possible_agents), float(seed or 0)
        return self._by_agent(self._obs), self._by_agent(lambda agent: {"of": agent, "total": self.total})

    def step(self, actions: Any) -> Any:
        self.total += sum(actions.values())
        ends = self._by_agent(lambda agent: agent == self.agents[0])
        result = (
            self._by_agent(self._obs),
            self._by_agent(lambda _: 1.0),
            ends,
            self._by_agent(lambda _: False),
            self._by_agent(lambda agent: {"of": agent, "total": self.total}),
        )
        self.agents = self.agents[1:]
        return result

    def _by_agent(self, value: Callable[[str], Any]) -> dict[str, Any]:
        return {agent: value(agent) for agent in self.agents}

    def _obs(self, agent: str) -> Any:
        return np.full(self.observation_space(agent).shape, self.total)


class Counter(dm_env.Environment):
    """A dm_env environment that sums its actions, for five steps."""

    def reset(self) -> Any:
        self.n_steps, self.total = 0, 0
        return dm_env.restart(np.array([self.total]))

    def step(self, action: Any) -> Any:
        self.n_steps, self.total = self.n_steps + 1, self.total + int(action)
        obs = np.array([self.total])
        return dm_env.transition(1.0, obs) if self.n_steps < 5 else dm_env.termination(1.0, obs)

    def seed(self, seed: int) -> None:
        pass

    def observation_spec(self) -> Any:
        return specs.Array((1,), np.int64)

    def action_spec(self) -> Any:
        return specs.DiscreteArray(100)


def in_process(env: Any, **options: Any) -> EnvManager:
    return SimpleEnvManager(env, 4, seed=1, **options)


def one_each(env: Any, **options: Any) -> EnvManager:
    return SubprocessEnvManager(env, 4, seed=1, **options)


def two_in_each(env: Any, **options: Any) -> EnvManager:
    return SubprocessEnvManager(env, 4, n_workers=2, seed=1, zero_copy=True, **options)


def local_and_not(env: Any, **options: Any) -> EnvManager:
    return SubprocessEnvManager(env, 4, n_workers=2, local_envs=2, seed=1, **options)


def in_threads(env: Any, **options: Any) -> EnvManager:
    return AsyncioEnvManager(env, 4, seed=1, **options)


def awaited(env: Any, **options: Any) -> EnvManager:
    return AsyncioEnvManager({Walk: AwaitedWalk, Level: AwaitedLevel}[env], 4, seed=1, **options)


KINDS = pytest.mark.parametrize("make", [in_process, one_each, two_in_each, local_and_not, in_threads, awaited])


def some_actions(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"push": rng.uniform(-1, 1, (n, 2)).astype(np.float32), "turn": rng.integers(0, 3, n)}


def rows_of(tree: Any, rows: Any) -> Any:
    return {key: leaf[rows] for key, leaf in tree.items()}


@KINDS
def test_a_branch_goes_on_as_the_original_does_with_the_info_of_its_last_action(make: Make) -> None:
    before, after = some_actions(5), some_actions(7, seed=1)
    with make(Walk, infos=True, **ON_DEMAND) as manager:
        manager.reset()
        manager.recv(Wait.all())
        manager.begin([0], [Task(seed=9, options={"any": 1})])
        batch = manager.recv(Wait.all())
        for step in range(5):
            manager.send(rows_of(before, [step]), [0])
            batch = manager.recv(Wait.all())
        manager.begin([1, 2, 3], [Task(seed=9, actions=before)] * 3)
        branched = manager.recv(Wait.all())
        assert sorted(branched.env_ids.tolist()) == [1, 2, 3]
        assert (branched.obs["at"] == batch.obs["at"]).all()
        assert branched.info == [{"step": 5}] * 3
        assert branched.first.all()
        assert not branched.reward.any()
        for step in range(7):
            manager.send(rows_of(after, [step] * 4), [0, 1, 2, 3])
            batch = manager.recv(Wait.all())
            assert (batch.obs["at"] == batch.obs["at"][0]).all()
        assert batch.truncated.all()
        last = manager.tasks.results[-3:]
        assert [(result.length, result.total) for result in last] == [(7, 7.0)] * 3


@KINDS
def test_episodes_that_end_raise_or_break_their_spec_within_their_actions_fail_alone(make: Make) -> None:
    tasks = [
        Task(options={"length": 3}, actions=[1] * 4),
        Task(options={"length": 3}, actions=[1] * 3),
        Task(options={"raises": 2}, actions=[1] * 4),
        Task(options={"raises": 0}, actions=[1] * 4),
        Task(options={"level": 7}, actions=[1] * 4),
        Task(options={"level": 8}),
    ]
    with make(Level, **ON_DEMAND) as manager:
        manager.reset(tasks=tasks)
        while not manager.tasks.done:
            batch = manager.recv(Wait.all())
            manager.send(np.ones(len(batch), np.int64), batch.env_ids)
        results = manager.tasks.results
        errors = [result.error for result in results]
        assert [error and (type(error), error.step, type(error.failure)) for error in errors] == [
            (EpisodeNotBegun, 3, type(None)),
            (EpisodeNotBegun, 3, type(None)),
            (EpisodeNotBegun, 2, EnvRaised),
            (EpisodeNotBegun, 0, EnvRaised),
            None,
            None,
        ]
        assert "this level does not exist" in str(errors[2])
        assert [(result.length, result.total) for result in results[4:]] == [(1, 7.0), (5, 40.0)]
        assert (manager.tasks.n_lost, manager.stats().restarts) == (4, 0)
        manager.reset(tasks=[5])
        assert manager.recv(Wait.all()).first.all()


@KINDS
def test_an_observation_of_another_shape_after_the_actions_is_the_error_of_its_task(make: Make) -> None:
    with make(Walk) as manager:
        manager.reset(tasks=[Task(options={"breaks": 3}, actions=some_actions(3)), {}])
        batch = manager.recv(Wait.all())
        (result,) = manager.tasks.results
        assert batch.task.tolist() == [1]
        assert isinstance(result.error, EpisodeNotBegun)
        assert isinstance(result.error.failure, BadObservation)


@KINDS
def test_an_episode_that_cannot_begin_still_cuts_the_one_that_played(make: Make) -> None:
    with make(Level, **ON_DEMAND) as manager:
        manager.reset()
        manager.recv(Wait.all())
        manager.begin([0, 1], [{"level": 1, "length": 50}, {"level": 2, "length": 50}])
        manager.recv(Wait.all())
        manager.begin([0], [Task(actions=[1] * 9)])
        manager.send(np.array([3]), [1])
        rows = {}
        while 1 not in rows or manager.tasks.running.keys() != {1}:
            batch = manager.recv(Wait.any())
            rows.update(zip(batch.env_ids.tolist(), batch.obs.tolist(), strict=True))
        assert rows == {1: [2, 1, 3]}
        cut, failed = manager.tasks.results
        assert (cut.cut, cut.error, failed.cut, type(failed.error)) == (True, None, False, EpisodeNotBegun)
        manager.begin([0], [{"level": 4}])
        assert manager.recv(Wait.all()).obs.tolist() == [[4, 0, 0]]


@KINDS
def test_the_coroutine_of_an_episode_that_cannot_begin_gets_the_error_and_others_go_on(make: Make) -> None:
    async def play(pool: Any, actions: list[int]) -> Any:
        try:
            async with pool.begin(Task(options={"level": 3}, actions=actions)) as episode:
                first = episode.obs.tolist()
                while not episode.is_over:
                    await episode.step(2)
                return first, episode.obs.tolist()
        except EpisodeNotBegun as error:
            return error.step

    async def play_all() -> Any:
        pool = manager.pool()
        return await asyncio.gather(*[play(pool, [1] * (k % 6)) for k in range(18)])

    with make(Level) as manager:
        played = asyncio.run(play_all())
        assert played == [5 if k % 6 == 5 else ([3, k % 6, k % 6], [3, 5, 10 - k % 6]) for k in range(18)]
        assert manager.stats().restarts == 0


@pytest.mark.parametrize("make", [one_each, two_in_each])
def test_a_worker_that_dies_within_actions_loses_its_tasks_as_in_any_step(make: Make) -> None:
    policy = RestartPolicy(max_restarts=50, backoff_s=0)
    with make(Level, restarts=policy) as manager:
        dies = Task(options={"dies": 2, "level": 1}, actions=[1] * 3)
        manager.reset(tasks=[Task(options={"level": 2}, actions=[1] * 3), dies, {"level": 3}, {"level": 4}], attempts=2)
        while not manager.tasks.done:
            batch = manager.recv(Wait.any())
            manager.send(np.ones(len(batch), np.int64), batch.env_ids)
        results = manager.tasks.results
        assert [type(result.error) for result in results] == [type(None), WorkerDied, type(None), type(None)]
        assert [result.length for result in results] == [2, 0, 5, 5]
        assert results[1].attempts == 2


@pytest.mark.parametrize("make", [one_each, two_in_each, in_threads, awaited])
def test_many_slow_actions_are_no_hang(make: Make) -> None:
    with make(Level, timeouts=Timeouts(step_s=0.5), **ON_DEMAND) as manager:
        manager.reset()
        manager.recv(Wait.all())
        slow = Task(options={"pause": 0.02, "length": 100}, actions=[1] * 50)
        manager.begin([0, 1], [slow, slow])
        assert manager.recv(Wait.all()).obs.tolist() == [[-1, 50, 50]] * 2
        manager.reset(tasks=[slow] * 4)
        assert manager.recv(Wait.all()).obs.tolist() == [[-1, 50, 50]] * 4


def of_step_or_recv(manager: EnvManager) -> Any:
    return {
        int(agent_id) & 0xFFFFFFFF: obs
        for info in manager.step(Wait.all())
        for steps in info.current.values()
        for agent_id, obs in zip(steps.agent_id, steps.obs, strict=True)
    }


class Threes:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.full(len(steps), 3))


@pytest.mark.parametrize("make", [in_process, two_in_each, in_threads])
def test_agents_that_left_within_the_actions_have_no_first_row(make: Make) -> None:
    with make(Leavers, infos=True) as manager:
        for behavior in ("walker", "flyer"):
            manager.set_policy(behavior, Threes())
        actions = {"walker": [1, 2], "flyer": [10]}
        (info, *_) = manager.reset(tasks=[Task(seed=4, actions=actions), Task(seed=5, actions=actions)])
        assert {name: steps.obs[:1].tolist() for name, steps in info.current.items()} == {
            "walker": [[17.0, 17.0]],
            "flyer": [[17.0]],
        }
        assert [own["of"] for own in info.current["walker"].info][:1] == ["walker_1"]
        assert not any(steps.ended.any() or steps.reward.any() for steps in info.current.values())
        while not manager.tasks.done:
            manager.step(Wait.all())
        assert [result.total for result in manager.tasks.results] == [1.0 + 2.0] * 2


@pytest.mark.parametrize("make", [in_process, two_in_each])
@pytest.mark.parametrize(
    "actions", [{"walker": [1, 2, 3], "flyer": [1]}, {"walker": [1, 2]}, {"walker": [1], "flyer": [1]}]
)
def test_actions_for_other_agents_than_those_that_act_are_the_error_of_the_task(make: Make, actions: Any) -> None:
    with make(Leavers) as manager:
        manager.reset(tasks=[Task(actions=actions)])
        (result,) = manager.tasks.results
        assert isinstance(result.error, EpisodeNotBegun)
        assert ("for the agents that act" in str(result.error)) == ("flyer" in actions)


@pytest.mark.parametrize("make", [in_process, two_in_each, in_threads])
def test_dm_env_begins_with_actions(make: Make) -> None:
    with make(Counter) as manager:
        manager.reset(tasks=[Task(actions=[7, 8, 9]), Task(actions=[1] * 5), 3])
        batch = manager.recv(Wait.all())
        assert dict(zip(batch.task.tolist(), batch.obs.tolist(), strict=True)) == {0: [24], 2: [0]}
        assert isinstance(manager.tasks.results[0].error, EpisodeNotBegun)


def test_actions_may_be_objects() -> None:
    with AsyncioEnvManager(Words, 2, **ON_DEMAND) as manager:
        manager.reset()
        manager.recv(Wait.all())
        manager.begin([0, 1], [Task(actions=["good", "day"]), Task(actions=["good", "bye"])])
        assert [own["said"] for own in manager.recv(Wait.all()).obs] == [["good", "day"]]


def test_an_evaluation_counts_a_task_that_cannot_begin_as_lost() -> None:
    with in_process(Level) as manager:
        tasks = [Task(options={"level": 1}, actions=[1] * k) for k in (0, 2, 5)]
        played = evaluate(manager, {"default": Threes()}, tasks=tasks)
        assert (played.n_episodes, played.lost) == (2, 1)
        assert [result.length for result in played.results] == [5, 3, 0]


def test_a_task_with_actions_waits_for_an_environment_that_rests_though_tasks_are_prefetched() -> None:
    tasks = [Task(options={"level": k}, actions=[1] * (k % 3)) for k in range(40)]
    with two_in_each(Level) as manager:
        manager.reset(tasks=iter(tasks))
        while not manager.tasks.done:
            batch = manager.recv(Wait.any())
            manager.send(np.ones(len(batch), np.int64), batch.env_ids)
        assert [(result.length, result.attempts) for result in manager.tasks.results] == [
            (5 - k % 3, 1) for k in range(40)
        ]


def test_begin_refuses_actions_where_vectors_step_the_environments_and_begins_nothing() -> None:
    def vector() -> Any:
        return gymnasium.vector.SyncVectorEnv([Level] * 4)

    with SimpleEnvManager(vector, 4, **ON_DEMAND) as manager:
        manager.reset()
        manager.recv(Wait.all())
        with pytest.raises(UsageError, match="vector environments"):
            manager.begin([0, 1], [Task(), Task(actions=[1])])
        assert manager.tasks.running == {}


@pytest.mark.parametrize("make", [in_process, two_in_each, in_threads])
def test_a_recorded_run_whose_tasks_have_actions_is_replayed(make: Make, tmp_path: Path) -> None:
    path = str(tmp_path / "run.emrec")
    tasks = [Task(seed=k, options={"level": k}, actions=[1] * (k % 6)) for k in range(12)]

    def played(manager: EnvManager) -> Any:
        rows = []
        manager.reset(tasks=tasks)
        while not manager.tasks.done:
            batch = manager.recv(Wait.all())
            rows += zip(batch.env_ids.tolist(), batch.obs.tolist(), batch.task.tolist(), strict=True)
            manager.send(np.ones(len(batch), np.int64), batch.env_ids)
        return rows, [(result.total, str(result.error)) for result in manager.tasks.results]

    with make(Level, record=path) as manager:
        recorded = played(manager)
    with ReplayEnvManager(recording=path) as replay, make(Level, order=path) as ordered:
        assert played(replay) == recorded
        assert played(ordered) == recorded
    kept = {episode.task: episode for episode in episodes(path)}
    assert sorted(kept) == [k for k in range(12) if k % 6 != 5]
    for k, episode in kept.items():
        assert (episode.seed, episode.length, episode.terminated) == (k, 5 - k % 6, True)
        assert episode.obs[0].tolist() == [k, k % 6, k % 6]
        assert len(episode.begun_with["default"]) == k % 6


def test_a_task_with_actions_compares_pickles_and_keeps_them() -> None:
    given = np.array([1, 2])
    task = Task(seed=1, actions=given)
    given[0] = 5
    assert task == Task(seed=1, actions=np.array([1, 2])) == pickle.loads(pickle.dumps(task))
    assert task != Task(seed=1, actions=np.array([1, 3]))
    assert Task(actions={"a": [np.array([np.nan])]}) == Task(actions={"a": [np.array([np.nan])]})
    assert hash(task) == hash(Task(seed=1))
