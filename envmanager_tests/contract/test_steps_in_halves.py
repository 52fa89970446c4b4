"""A step in halves: a caller takes the actions, steps the environments in its own way, and has the results joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs as dm_specs
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pytest_mock import MockerFixture

from envmanager import AgentSteps, ArraySpec, BehaviorSpec, Environment
from envmanager.adapters.choosing import build_group
from envmanager.adapters.pettingzoo import ParallelEnvironment
from envmanager.data.specs import SpecMismatch
from envmanager.data.steps import Steps
from envmanager.data.trees import Tree, leaves
from envmanager.environment import RowGroup

LENGTH = 3


class Walk(gymnasium.Env):  # type: ignore[misc]
    """Three steps long. Observes a random place into the same array each time."""

    action_space = spaces.Discrete(5)

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-99, 99, (2,), np.float32)
        self._place = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n_steps = 0
        self._place[:] = self.np_random.uniform(-1, 1, self._place.shape)
        return self._place, {"options": options}

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        self._place += action
        return self._place, float(action), False, self._n_steps == LENGTH, {"n": self._n_steps}


class Pair(ParallelEnv):  # type: ignore[misc]
    """Two agents, of which the second leaves after a step. The episode ends with the first."""

    metadata: dict[str, Any] = {"name": "pair"}
    possible_agents = ["a_0", "a_1"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-99, 99, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self._n_steps = list(self.possible_agents), 0
        return self._by_agent(lambda _: self._obs(0)), self._by_agent(lambda _: {"options": options})

    def step(self, actions: Mapping[str, Any]) -> Any:
        self._n_steps += 1
        ended = self._by_agent(lambda agent: agent == "a_1" or self._n_steps == LENGTH)
        result = (
            self._by_agent(lambda agent: self._obs(actions[agent])),
            self._by_agent(lambda agent: float(actions[agent])),
            ended,
            self._by_agent(lambda _: False),
            self._by_agent(lambda _: {"n": self._n_steps}),
        )
        self.agents = [agent for agent in self.agents if not ended[agent]]
        return result

    def _obs(self, action: Any) -> np.ndarray:
        return np.array([self._n_steps, action], np.float32)

    def _by_agent(self, make: Callable[[str], Any]) -> dict[str, Any]:
        return {agent: make(agent) for agent in self.agents}


class Stroll(dm_env.Environment):  # type: ignore[misc]
    """Three steps long. Observes its count into the same array each time."""

    def reset(self) -> Any:
        self._place = np.zeros(2)
        self._n_steps = 0
        return dm_env.restart(self._place)

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        self._place += action
        end = dm_env.termination if self._n_steps == LENGTH else dm_env.transition
        return end(reward=float(action), observation=self._place)

    def observation_spec(self) -> Any:
        return dm_specs.Array((2,), np.float64)

    def action_spec(self) -> Any:
        return dm_specs.DiscreteArray(5)

    def seed(self, seed: int) -> None:
        pass


class Own(Environment):
    """An environment of this library, three steps long."""

    SPEC = BehaviorSpec(ArraySpec((1,), np.float32), ArraySpec((), np.int64, 0, 4))

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        return {"default": self.SPEC}

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._n_steps = 0
        return {"default": AgentSteps.first(agent_id=np.zeros(1, np.int64), obs=np.zeros((1, 1), np.float32))}

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        self._n_steps = self._n_steps % LENGTH + 1
        ended = np.array([self._n_steps == LENGTH])
        obs = actions["default"][:, None].astype(np.float32)
        steps = AgentSteps.stepped(
            agent_id=np.zeros(1, np.int64),
            obs=np.zeros_like(obs) if ended else obs,
            reward=obs[:, 0],
            terminated=ended,
            truncated=~ended & False,
            final_obs=obs if ended else None,
        )
        return {"default": steps}

    def close(self) -> None:
        pass


KINDS: dict[str, Callable[[], list[Any]]] = {
    "gymnasium": lambda: [Walk(), Walk(), Walk()],
    "gymnasium, side by side": lambda: [build_group([Walk()], [0]) for _ in range(3)],
    "pettingzoo": lambda: [Pair(), Pair(), Pair()],
    "dm_env": lambda: [Stroll(), Stroll(), Stroll()],
    "our own": lambda: [Own(), Own(), Own()],
}


def begun(kind: str) -> tuple[RowGroup, Steps]:
    """A group of three environments, and the steps of its reset."""
    group = build_group(KINDS[kind](), (0, 1, 2), infos=True)
    assert isinstance(group, RowGroup)
    return group, group.reset(seeds=[3, 4, 5], options=None if kind == "dm_env" else {"level": 1})


def actions_for(steps: Steps, number: int) -> dict[str, np.ndarray]:
    return {name: (number + np.arange(len(own.acting_rows))) % 5 for name, own in steps.items()}


def in_coroutines(group: RowGroup, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Steps:
    """A step in which a coroutine for each environment steps it, the last environment first."""

    async def step(env: Any, action: Any, turn: int) -> Any:
        for _ in range(turn):
            await asyncio.sleep(0)
        return env.step(action)

    async def step_all() -> list[Any]:
        chosen = range(len(group.envs)) if rows is None else rows.tolist()
        pairs = list(zip(chosen, group.actions_of(actions, rows), strict=True))
        return await asyncio.gather(*(step(group.envs[row], action, len(group.envs) - row) for row, action in pairs))

    return group.joined(asyncio.run(step_all()), rows)


def described(steps: Steps) -> dict[str, Any]:
    return {
        name: (
            own.agent_id.tolist(),
            [leaf.tolist() for leaf in leaves(own.obs)],
            own.reward.tolist(),
            own.terminated.tolist(),
            own.truncated.tolist(),
            None if own.final_obs is None else [leaf.tolist() for leaf in leaves(own.final_obs)],
            own.acting_rows.tolist(),
            own.info,
            own.reset_info,
        )
        for name, own in steps.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_halves_give_what_a_step_gives(kind: str) -> None:
    (whole, steps), (halves, others) = begun(kind), begun(kind)
    n_ended = 0

    for number in range(3 * LENGTH):
        assert described(steps) == described(others)
        actions = actions_for(steps, number)
        steps, others = whole.step(actions), in_coroutines(halves, actions)
        n_ended += sum(int(own.ended.sum()) for own in steps.values())

    assert described(steps) == described(others)
    assert n_ended >= 9


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pettingzoo"])
def test_halves_of_some_rows_give_what_a_step_of_them_gives(kind: str) -> None:
    (whole, _), (halves, _) = begun(kind), begun(kind)

    for number in range(3 * LENGTH):
        rows = np.array([[2, 0], [1], [0, 1, 2], [2]][number % 4])
        actions = {"default": (number + np.arange(len(rows))) % 5}
        assert described(whole.step(actions, rows)) == described(in_coroutines(halves, actions, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_result_is_refused_and_its_environment_named(kind: str) -> None:
    group, steps = begun(kind)
    own_actions = zip(group.envs, group.actions_of(actions_for(steps, 0)), strict=True)
    results = [env.step(action) for env, action in own_actions]

    with pytest.raises(SpecMismatch, match="the result"):
        group.joined([results[0], "nonsense", results[2]])

    assert group.current_env_id == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_results", [2, 4])
def test_there_is_one_result_for_each_environment(kind: str, n_results: int) -> None:
    group, steps = begun(kind)
    own_actions = zip(group.envs, group.actions_of(actions_for(steps, 0)), strict=True)
    results = [env.step(action) for env, action in own_actions]

    with pytest.raises(ValueError, match=r"argument 2 is (shorter|longer)"):
        group.joined((results + results)[:n_results])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["reset", "step"])
def test_the_exception_of_an_environment_is_raised_unchanged(kind: str, method: str, mocker: MockerFixture) -> None:
    """StopIteration, as of an environment that reads a file to its end, has a meaning of its own in generators."""
    group, steps = begun(kind)
    mocker.patch.object(group.subjects[1], method, side_effect=StopIteration("no more lines"))

    arguments = {"actions": actions_for(steps, 0)} if method == "step" else {"seeds": [None] * 3, "options": None}

    with pytest.raises(StopIteration, match="no more lines"):
        getattr(group, method)(**arguments)
    assert group.current_env_id == 1


class Counted(list[Any]):
    """An observation that is an object, and counts its copies."""

    n_copies = 0

    def __copy__(self) -> Counted:
        Counted.n_copies += 1
        return Counted(self)


class Speaker(Pair):
    def observation_space(self, agent: str) -> Any:
        return spaces.Text(9)

    def _obs(self, action: Any) -> Any:
        return Counted([action])


class Talk(Stroll):
    def reset(self) -> Any:
        super().reset()
        return dm_env.restart(Counted([0]))

    def step(self, action: Any) -> Any:
        return super().step(action)._replace(observation=Counted([action]))

    def observation_spec(self) -> Any:
        return dm_specs.StringArray(())


class Told(Walk):
    """Its group is one of several behaviors, so it is stepped side by side with others."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Text(9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return Counted([0]), {}

    def step(self, action: Any) -> Any:
        return Counted([action]), *super().step(action)[1:]


@pytest.mark.parametrize(
    "env", [Speaker(), Talk(), build_group([Told()], [0])], ids=["pettingzoo", "dm_env", "wrapped"]
)
def test_objects_are_copied_once_for_each_place_in_the_steps(env: Any) -> None:
    group = build_group([env], [0])
    Counted.n_copies = 0
    steps = group.reset(seeds=[None], options=None)
    n_places = len(steps["default"])

    for number in range(2 * LENGTH):
        steps = group.step(actions_for(steps, number))
        own = steps["default"]
        n_places += len(own) + (0 if own.final_obs is None else len(own.final_obs))

    assert Counted.n_copies == n_places


def test_a_group_takes_the_step_of_an_adapter_s_subclass() -> None:
    class Louder(ParallelEnvironment):
        def step(self, actions: Mapping[str, Tree]) -> Steps:
            steps = super().step(actions)
            steps["default"].reward += 100
            return steps

    group = build_group([Louder(Pair())], [0])
    steps = group.step(actions_for(group.reset(seeds=[None], options=None), 1))

    assert steps["default"].reward.tolist() == [101, 102]
