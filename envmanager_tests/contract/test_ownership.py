"""Steps belong to the trainer: no environment that goes on in place changes what was delivered, over every manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs as dm_specs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pettingzoo import ParallelEnv

from envmanager import (
    AgentSteps,
    ArraySpec,
    BehaviorSpec,
    Environment,
    EnvManager,
    RandomPolicy,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
)
from envmanager.data.steps import Steps

LENGTH = 3
GRAPHS = spaces.Graph(spaces.Box(0, 9, (1,)), None)
MANAGERS = {"simple": SimpleEnvManager, "processes": SubprocessEnvManager}
managers = pytest.mark.parametrize("make_manager", MANAGERS.values(), ids=MANAGERS)


class Counts(gymnasium.Env):  # type: ignore[misc]
    """Counts in one Graph and one info, for ever."""

    observation_space: Any = GRAPHS
    action_space: Any = spaces.Discrete(2)

    def __init__(self) -> None:
        self.nodes = np.zeros((1, 1), np.float32)
        self.info: dict[str, Any] = {"n": 0, "inner": {"place": self.nodes, "seen": [0]}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.nodes[:] = self.info["n"] = self.info["inner"]["seen"][0] = 0
        return spaces.GraphInstance(self.nodes, None, None), self.info

    def step(self, action: Any) -> Any:
        self.nodes += 1
        self.info["n"] += 1
        self.info["inner"]["seen"][0] += 1
        return spaces.GraphInstance(self.nodes, None, None), 1.0, self.info["n"] == LENGTH, False, self.info

    def render(self) -> Any:
        return self.nodes


class Line(Counts):
    """The same with new arrays of numbers, because SyncVectorEnv keeps a last observation by reference."""

    observation_space = spaces.Box(0, 9, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset()[0].nodes[0].copy(), self.info

    def step(self, action: Any) -> Any:
        graph, *rest = super().step(action)
        return graph.nodes[0].copy(), *rest


class Parallel(ParallelEnv):  # type: ignore[misc]
    """Two agents, each with one array and one info for ever."""

    possible_agents = ("a_0", "a_1")

    def __init__(self) -> None:
        self.seen = {agent: np.zeros(1, np.float32) for agent in self.possible_agents}
        self.infos = {agent: {"n": 0} for agent in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 9, (1,))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        for agent in self.agents:
            self.seen[agent][:] = self.infos[agent]["n"] = 0
        return self.seen, self.infos

    def step(self, actions: Any) -> Any:
        for agent in self.possible_agents:
            self.seen[agent] += 1
            self.infos[agent]["n"] += 1
        is_over = self.infos["a_0"]["n"] == LENGTH
        self.agents = [] if is_over else self.agents
        flags = dict.fromkeys(self.possible_agents, is_over)
        return self.seen, dict.fromkeys(flags, 1.0), flags, dict.fromkeys(flags, False), self.infos


class Dm(dm_env.Environment):  # type: ignore[misc]
    """Counts in one list, which is an object for its spec."""

    def __init__(self) -> None:
        self.seen = [0]

    def observation_spec(self) -> Any:
        return dm_specs.Array((), object)

    def action_spec(self) -> Any:
        return dm_specs.DiscreteArray(2)

    def reset(self) -> Any:
        self.seen[0] = 0
        return dm_env.restart(self.seen)

    def step(self, action: Any) -> Any:
        self.seen[0] += 1
        return (dm_env.termination if self.seen[0] == LENGTH else dm_env.transition)(1.0, self.seen)


class Own(Environment):
    """An Environment of one's own with one AgentSteps for ever."""

    def __init__(self) -> None:
        self.seen, self.info = np.empty(1, object), {"n": 0}
        self.seen[0] = [0]

    @property
    def behavior_specs(self) -> Any:
        return {"default": BehaviorSpec(ArraySpec(dtype=object), ArraySpec((), np.int64, 0, 1))}

    def reset(self, *, seeds: Any, options: Any) -> Steps:
        self.seen[0][0] = self.info["n"] = 0
        steps = AgentSteps.first(agent_id=np.zeros(1, np.int64), obs=self.seen)
        steps.info = [self.info]
        return {"default": steps}

    def step(self, actions: Any) -> Steps:
        self.seen[0][0] += 1
        self.info["n"] += 1
        no = np.zeros(1, np.bool_)
        return {
            "default": AgentSteps(np.zeros(1, np.int64), self.seen, np.ones(1, np.float32), no, no, info=[self.info])
        }

    def close(self) -> None:
        pass


def batches_of(manager: EnvManager, n_steps: int = 4) -> list[Any]:
    manager.reset()
    batches = [manager.recv("all")]
    for _ in range(n_steps):
        manager.send(np.zeros(1, np.int64), [0])
        batches.append(manager.recv("all"))
    return batches


def numbers(infos: list[Any]) -> list[Any]:
    return [(info["n"], info["inner"]["place"].item(), info["inner"]["seen"][0]) for info in infos]


@managers
def test_infos_and_graphs_that_a_trainer_keeps_stay_those_of_their_step(make_manager: Any) -> None:
    with make_manager(Counts, 1, infos=True) as manager:
        batches = batches_of(manager)
    assert numbers([batch.info[0] for batch in batches]) == [(n, n, n) for n in (0, 1, 2, 3, 1)]
    assert [batch.obs[0].nodes.item() for batch in batches] == [0, 1, 2, 0, 1]
    assert batches[LENGTH].final_obs[0].nodes.item() == LENGTH
    assert numbers(batches[LENGTH].reset_info) == [(0, 0, 0)]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@managers
def test_infos_of_vectors_that_a_trainer_keeps_stay_those_of_their_step(make_manager: Any, mode: Any) -> None:
    with make_manager(lambda: SyncVectorEnv([Line], autoreset_mode=mode), 1, infos=True) as manager:
        batches = batches_of(manager)
    assert [batch.info[0]["n"] for batch in batches] == [0, 1, 2, 3, 1]
    assert [batch.obs.item() for batch in batches] == [0, 1, 2, 0, 1]
    assert batches[LENGTH].final_obs.item() == LENGTH


class CountsInPlace(gymnasium.vector.VectorEnv):  # type: ignore[misc]
    """A vector of one's own whose infos are the same arrays for ever."""

    num_envs = 1
    metadata: Any = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space, single_action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def __init__(self) -> None:
        self.place = np.zeros((1, 2))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.place[:] = 0
        return np.zeros((1, 1), np.float32), {"place": self.place}

    def step(self, actions: Any) -> Any:
        self.place += 1
        no = np.zeros(1, np.bool_)
        return np.zeros((1, 1), np.float32), np.ones(1), no, no, {"place": self.place}


@managers
def test_infos_that_a_vector_changes_in_place_stay_those_of_their_step(make_manager: Any) -> None:
    with make_manager(CountsInPlace, 1, infos=True) as manager:
        batches = batches_of(manager, 3)
    assert [batch.info[0]["place"].tolist() for batch in batches] == [[n, n] for n in range(4)]


@pytest.mark.parametrize("env", [Dm, Own])
@managers
def test_objects_that_a_trainer_keeps_stay_those_of_their_step(make_manager: Any, env: Any) -> None:
    with make_manager(env, 1, infos=True) as manager:
        batches = batches_of(manager, 2)
    assert [batch.obs[0][0] for batch in batches] == [0, 1, 2]
    if env is Own:
        assert [batch.info[0]["n"] for batch in batches] == [0, 1, 2]


@managers
def test_the_last_observations_and_infos_of_agents_are_not_those_of_the_next_episode(make_manager: Any) -> None:
    with make_manager(Parallel, 1, infos=True) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], seed=0))
        manager.reset()
        kept = [manager.step()[0].current["default"] for _ in range(4)]
    assert kept[2].final_obs.ravel().tolist() == [LENGTH, LENGTH]
    assert [[info["n"] for info in steps.info] for steps in kept] == [[1, 1], [2, 2], [3, 3], [1, 1]]
    assert [info["n"] for info in kept[2].reset_info] == [0, 0]


@managers
def test_pictures_that_a_trainer_keeps_are_not_painted_over(make_manager: Any) -> None:
    with make_manager(Counts, 1) as manager:
        pictures = []
        for _ in batches_of(manager, 1):
            pictures += manager.render()
            manager.send(np.zeros(1, np.int64), [0])
            manager.recv("all")
    assert [picture.item() for picture in pictures] == [1, 2]


class Keeps(gymnasium.Env):  # type: ignore[misc]
    """Writes into its last action, which is a Graph."""

    observation_space, action_space = spaces.Box(-9, 9, (1,)), GRAPHS

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        seen = action.nodes[0].copy()
        action.nodes[:] = -1
        return seen, 1.0, False, False, {}


@managers
def test_neither_side_changes_an_action_of_the_other(make_manager: Any) -> None:
    with make_manager(Keeps, 1) as manager:
        manager.reset()
        manager.recv("all")
        action = spaces.GraphInstance(np.full((1, 1), 5, np.float32), None, None)
        manager.send([action], [0])
        assert action.nodes.item() == 5
        action.nodes[:] = 7
        assert manager.recv("all").obs.item() == 5
        assert action.nodes.item() == 7


def local(env: Callable[..., Any], n_envs: int, **options: Any) -> EnvManager:
    return SubprocessEnvManager(env, n_envs, n_workers=2, local_envs=2, **options)


class Lasts(gymnasium.Env):  # type: ignore[misc]
    observation_space, action_space = spaces.Box(-1, 1000, (1,)), spaces.Discrete(2)

    def __init__(self, n_steps: int) -> None:
        self.n_steps = n_steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.n += 1
        return np.full(1, self.n, np.float32), 1.0, False, self.n >= self.n_steps, {}


RECYCLING = {"simple": SimpleEnvManager, "local": local, "processes": SubprocessEnvManager}


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("make_manager", RECYCLING.values(), ids=RECYCLING)
def test_rows_of_recycled_workers_are_truncated_after_any_reset(make_manager: Any, zero_copy: bool) -> None:
    n_lost = 0
    restarts = RestartPolicy(recycle_after_steps=7)
    make = lambda context: Lasts(2 + context.env_id)  # noqa: E731
    with make_manager(make, n_envs=4, zero_copy=zero_copy, restarts=restarts) as manager:
        for n in range(60):
            if n % 20 == 0:  # in the middle of episodes
                manager.reset()
                batch = manager.recv("all")
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
            batch = manager.recv("all")
            n_lost += np.count_nonzero(batch.lost)
            assert batch.truncated[batch.lost].all()
            n_ended = np.count_nonzero(batch.terminated | batch.truncated)
            assert n_ended == (0 if batch.final_obs is None else len(batch.final_obs))
    assert n_lost
