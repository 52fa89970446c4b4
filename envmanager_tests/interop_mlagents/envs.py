"""ML-Agents environments in Python: one that does what a script says, and one that can be learnt."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from mlagents_envs.base_env import (
    ActionSpec,
    ActionTuple,
    BaseEnv,
    BehaviorSpec,
    DecisionSteps,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    TerminalSteps,
)
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.side_channel.side_channel import IncomingMessage, SideChannel
from mlagents_envs.side_channel.stats_side_channel import StatsAggregationMethod, StatsSideChannel

from envmanager import EnvContext
from envmanager.adapters.mlagents import MlagentsEnvironment, MlagentsFactory


def observation_spec(*shape: int, name: str = "") -> ObservationSpec:
    return ObservationSpec(shape, (DimensionProperty.NONE,) * len(shape), ObservationType.DEFAULT, name)


HYBRID = BehaviorSpec([observation_spec(2, name="place"), observation_spec(1, 3)], ActionSpec.create_hybrid(2, (3, 2)))
DISCRETE = BehaviorSpec([observation_spec(2)], ActionSpec.create_discrete((3,)))
CONTINUOUS = BehaviorSpec([observation_spec(2)], ActionSpec.create_continuous(1))


@attrs.frozen
class Agent:
    """One agent's row of a script; its observations are full of ``obs``."""

    agent_id: int
    obs: float = 0.0
    reward: float = 0.0
    group_id: int = 0
    group_reward: float = 0.0
    interrupted: bool = False


@attrs.frozen
class Frame:
    """What one behavior shows: who wants a decision, who ended, and the masks, an array per branch."""

    deciding: Sequence[Agent] = ()
    ended: Sequence[Agent] = ()
    masks: Sequence[Any] | None = None


def _columns(spec: BehaviorSpec, agents: Sequence[Agent]) -> dict[str, Any]:
    n = len(agents)
    filling = np.array([agent.obs for agent in agents], np.float32)
    shapes = [each.shape for each in spec.observation_specs]
    return {
        "obs": [np.ones((n, *s), np.float32) * filling.reshape(n, *[1] * len(s)) for s in shapes],
        "reward": np.array([agent.reward for agent in agents], np.float32),
        "agent_id": np.array([agent.agent_id for agent in agents], np.int32),
        "group_id": np.array([agent.group_id for agent in agents], np.int32),
        "group_reward": np.array([agent.group_reward for agent in agents], np.float32),
    }


def decision_steps(spec: BehaviorSpec, agents: Sequence[Agent], masks: Any = None) -> DecisionSteps:
    masks = None if masks is None else [np.array(mask, bool) for mask in masks]
    return DecisionSteps(action_mask=masks, **_columns(spec, agents))


def terminal_steps(spec: BehaviorSpec, agents: Sequence[Agent]) -> TerminalSteps:
    return TerminalSteps(interrupted=np.array([a.interrupted for a in agents], bool), **_columns(spec, agents))


class ScriptedEnv(BaseEnv):
    """Shows the first frames of its script after a reset, then the next ones with every step, and over again.

    A frame is ``{behavior: Frame}``; a behavior is known from its first frame on.
    """

    academy_capabilities = None

    def __init__(self, specs: Mapping[str, BehaviorSpec], *script: Mapping[str, Frame]) -> None:
        self._all_specs = specs
        self._script = script
        self._shown = 0
        self._known: dict[str, BehaviorSpec] = {}
        self.actions: list[tuple[str, ActionTuple]] = []
        self.n_resets = 0
        self.closed = False

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        return self._known

    def reset(self) -> None:
        self.n_resets += 1
        self._show(0)

    def step(self) -> None:
        self._show(self._shown + 1)

    def get_steps(self, behavior_name: str) -> tuple[DecisionSteps, TerminalSteps]:
        spec = self._known[behavior_name]
        frame = self._script[self._shown].get(behavior_name, Frame())
        return decision_steps(spec, frame.deciding, frame.masks), terminal_steps(spec, frame.ended)

    def set_actions(self, behavior_name: str, action: ActionTuple) -> None:
        self.actions.append((behavior_name, action))

    def set_action_for_agent(self, behavior_name: str, agent_id: int, action: ActionTuple) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def _show(self, index: int) -> None:
        self._shown = index % len(self._script)
        self._known.update({name: self._all_specs[name] for name in self._script[self._shown]})


class CorridorEnv(BaseEnv):
    """An agent in a corridor, which must go to the end that it is told: +1 there, -1 at the other, -0.05 a step.

    Four steps lead to an end; after twelve the episode is interrupted. The shortest way brings 0.85. As in Unity, an
    agent has a new id for every episode. The environment parameter ``hint`` is what it is told times.
    """

    academy_capabilities = None
    BEST = 1 - 3 * 0.05
    LENGTH, LONGEST = 4, 12
    SPEC = BehaviorSpec([observation_spec(2)], ActionSpec.create_discrete((3,)))  # back, stay, forth

    def __init__(self, worker_id: int, side_channels: Sequence[SideChannel] = (), *, dies: bool = False) -> None:
        self._random = random.Random(worker_id)
        self._channels = {type(channel): channel for channel in side_channels}
        self._dies = dies
        self._agent_id = -1
        self._hint = 1.0
        self._ended: list[Agent] = []

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        return {"Corridor?team=0": self.SPEC}

    def reset(self) -> None:
        self._read_parameters()
        self._begin()
        self._reward, self._ended_with = 0.0, None

    def step(self) -> None:
        self._read_parameters()
        self._n_steps += 1
        self._place += self._move
        arrived = abs(self._place) == self.LENGTH
        self._reward = (1.0 if self._place == self._goal else -1.0) if arrived else -0.05
        late = not arrived and self._n_steps == self.LONGEST
        self._ended_with = None
        if self._dies and self._n_steps == 3:
            os._exit(3)
        if arrived or late:
            self._ended_with = (self._obs(), self._agent_id, self._reward, late)
            self._count_episode(self._n_steps)
            self._begin()
            self._reward = 0.0

    def get_steps(self, behavior_name: str) -> tuple[DecisionSteps, TerminalSteps]:
        none, zero = np.zeros(1, np.int32), np.zeros(1, np.float32)
        reward, agent_id = np.array([self._reward], np.float32), np.array([self._agent_id], np.int32)
        decisions = DecisionSteps([self._obs()], reward, agent_id, None, none, zero)
        if self._ended_with is None:
            return decisions, TerminalSteps.empty(self.SPEC)
        obs, ended_id, last_reward, late = self._ended_with
        ids, rewards = np.array([ended_id], np.int32), np.array([last_reward], np.float32)
        return decisions, TerminalSteps([obs], rewards, np.array([late]), ids, none, zero)

    def set_actions(self, behavior_name: str, action: ActionTuple) -> None:
        self._move = int(action.discrete[0, 0]) - 1

    def set_action_for_agent(self, behavior_name: str, agent_id: int, action: ActionTuple) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _begin(self) -> None:
        self._agent_id += 1
        self._place = self._n_steps = self._move = 0
        self._goal = self._random.choice([-self.LENGTH, self.LENGTH])

    def _obs(self) -> np.ndarray:
        told = self._hint * np.sign(self._goal)
        return np.array([[told, self._place / self.LENGTH]], np.float32)

    def _read_parameters(self) -> None:
        """As a Unity build would: the messages that were queued since the last time."""
        channel = self._channels.get(EnvironmentParametersChannel)
        if channel is None:
            return
        for queued in channel.message_queue:
            message = IncomingMessage(bytes(queued))
            name, kind = message.read_string(), message.read_int32()
            if name == "hint" and kind == EnvironmentParametersChannel.EnvironmentDataTypes.FLOAT:
                self._hint = message.read_float32()
        channel.message_queue.clear()

    def _count_episode(self, length: int) -> None:
        channel = self._channels.get(StatsSideChannel)
        if channel is not None:
            channel.stats["Corridor/Length"].append((float(length), StatsAggregationMethod.AVERAGE))


class MaskedCorridorEnv(CorridorEnv):
    """A second branch that does nothing, and one mask over both: the agent may not stay, nor use the last action."""

    SPEC = BehaviorSpec([observation_spec(2)], ActionSpec.create_discrete((3, 2)))
    MASK = (False, True, False, False, True)

    def get_steps(self, behavior_name: str) -> tuple[DecisionSteps, TerminalSteps]:
        decisions, terminals = super().get_steps(behavior_name)
        columns = (decisions.obs, decisions.reward, decisions.agent_id)
        mask = np.array([self.MASK] * len(decisions))
        return DecisionSteps(*columns, [mask], decisions.group_id, decisions.group_reward), terminals

    def set_actions(self, behavior_name: str, action: ActionTuple) -> None:
        assert action.discrete.shape[1] == 2
        assert not self.MASK[action.discrete[0, 0]]
        assert not self.MASK[3 + action.discrete[0, 1]]
        super().set_actions(behavior_name, action)


def make_masked_corridor(worker_id: int, side_channels: Sequence[SideChannel]) -> CorridorEnv:
    """A corridor with two branches of actions and one mask."""
    return MaskedCorridorEnv(worker_id, side_channels)


def make_corridor(worker_id: int, side_channels: Sequence[SideChannel]) -> CorridorEnv:
    """ML-Agents' kind of environment factory."""
    return CorridorEnv(worker_id, side_channels)


def make_mortal_corridor(context: EnvContext) -> MlagentsEnvironment:
    """The first environment with number 1 dies in its third step; what takes its place does not."""
    dies = (context.env_id, context.generation) == (1, 0)
    return MlagentsFactory(lambda worker_id, side_channels: CorridorEnv(worker_id, side_channels, dies=dies))(context)
