"""Groups whose episodes begin with actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager.adapters.choosing import build_group
from envmanager.data.steps import AgentSteps, Begin, CommandName
from envmanager.environment import EnvContext, EnvGroup
from envmanager.errors import EpisodeNotBegun
from envmanager.hosts.hosting import COMMANDS, take_not_begun
from envmanager.testing import EchoEnvironment


class Sum(gymnasium.Env[Any, Any]):
    """An observation has the seed, the option ``level`` and the sum of the actions. An episode ends above 9."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(10)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed = self.seed + 0.5 if seed is None else float(seed)
        self.level, self.total = (options or {}).get("level", 0), 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.total += int(action)
        if self.total == 7:
            raise ValueError("seven")
        return self._obs(), 1.0, self.total > 9, False, {"total": self.total}

    def _obs(self) -> Any:
        return np.array([self.seed, self.level, self.total], np.float64)


def rows() -> EnvGroup:
    return build_group([Sum(), Sum(), Sum()], [4, 5, 6], infos=True, check_values=False)


def actions(*numbers: int) -> dict[str, Any]:
    return {"default": np.array(numbers)}


def obs_of(steps: Any) -> list[Any]:
    return [row for each in steps.values() for row in each.obs.tolist()]


def test_what_could_not_begin_is_named_alone_and_begun_by_another_reset() -> None:
    group = rows()
    begins = [
        Begin(0, True, 1, None, 7, actions(5, 5)),
        Begin(1, True, 1, None, 8, actions(5)),
        Begin(2, True, 1, None, 9, actions(3, 4, 1)),
    ]
    steps = COMMANDS[CommandName.RESET](group, begins)
    assert steps["default"].agent_id.tolist() == [5 << 32]
    told = take_not_begun(group, 2)
    assert told is not None
    assert {env_id: (type(each), each.task, each.step) for env_id, each in told.items()} == {  # type: ignore[attr-defined]
        4: (EpisodeNotBegun, 7, 2),
        6: (EpisodeNotBegun, 9, 2),
    }
    assert "seven" in str(told[6])
    assert take_not_begun(group, 2) is None
    begins[0], begins[2] = Begin(0, True, 3), Begin(2, True, 3)
    assert obs_of(COMMANDS[CommandName.RESET](group, begins)) == [[3, 0, 0], [1, 0, 5], [3, 0, 0]]


def echoes(n_agents: int) -> EnvGroup:
    made = [EchoEnvironment(EnvContext(env_id, 0), n_agents=n_agents) for env_id in (0, 1)]
    return build_group(made, [0, 1], infos=False, check_values=False)


def test_the_actions_of_several_agents_stand_one_after_the_other() -> None:
    group = echoes(2)
    begins = [Begin(0, True, actions=actions(1, 2, 3, 4)), Begin(1, True, actions=actions(5, 6, 7))]
    steps = group.reset_on_demand(begins)
    assert obs_of(steps) == [[0, 0, 2, 3, 0], [0, 1, 2, 4, 0]]
    told = take_not_begun(group, 0)
    assert told is not None
    assert "for the agents that act" in str(told[1])
    assert begins[0].n_repeated == 4
    steps = group.reset_on_demand([begins[0], Begin(1, True, actions=actions(5, 6))])
    for _ in range(5):
        steps = group.step(actions(1, 1, 1, 1))
    assert steps["default"].terminated.tolist() == [True, True, False, False]


def test_an_episode_without_actions_so_far_begins_as_any_other() -> None:
    for nothing in ({}, actions()):
        assert obs_of(echoes(1).reset_on_demand([Begin(1, True, actions=nothing)])) == [[1, 0, 0, 0, 0]]
        assert obs_of(rows().reset_on_demand([Begin(1, True, 2, actions=nothing)])) == [[2, 0, 0]]


def test_a_failure_of_another_environment_forgets_what_could_not_begin() -> None:
    group = rows()
    group.reset_on_demand([Begin(1, True, 2)])
    assert group.on_demand is not None
    group.on_demand.add([Begin(0, True, 1, actions=actions(9, 9))])
    with pytest.raises(ValueError, match="seven"):
        group.step(actions(7))
    assert group.current_env_id == 5


def test_first_steps_have_the_agents_that_are_left_with_their_own_infos() -> None:
    steps = AgentSteps.stepped(
        agent_id=np.arange(4),
        obs=np.arange(4.0),
        reward=np.ones(4, np.float32),
        terminated=np.array([False, True, True, False]),
        truncated=np.zeros(4, np.bool_),
        final_obs=np.array([8.0, 9.0]),
        acting=np.array([True, False, True, False]),
        info=[{"of": 0}, {"of": 1}, {"of": 2}, {"of": 3}],
        reset_info=[{}, {"again": 2}],
    )
    first = steps.as_first()
    assert first.agent_id.tolist() == [0, 2, 3]
    assert first.info == [{"of": 0}, {"again": 2}, {"of": 3}]
    assert not first.ended.any()
    assert first.final_obs is None
    assert steps.info == [{"of": 0}, {"of": 1}, {"of": 2}, {"of": 3}]
