"""Adapter for ML-Agents' BaseEnv, an environment with a changing set of agents.

::

    get_steps(behavior)    DecisionSteps ──▶ rows that act (placed first, in the same order)    one AgentSteps
                           TerminalSteps ──▶ rows that ended
                           neither       ──▶ no row: such an agent has not requested a decision

An observation is a dict. It maps ``observations`` to a tuple of float32 arrays, ``group_id`` to int32, and
``group_reward`` to float32. With discrete actions it also has ``action_mask``, a tuple with one array per branch, in
which true means *not* available, as in ML-Agents. An action is a dict with ``continuous`` in float32, ``discrete`` in
int32, or both.

A row has ML-Agents' ``agent_id``. An agent in both kinds of steps has one row, with the terminal reward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec, BehaviorSpecs, zeros
from envmanager.data.steps import AgentSteps, Steps
from envmanager.data.trees import Tree, concat_rows, leaves, take_rows
from envmanager.environment import EnvContext, Environment
from envmanager.errors import UsageError
from envmanager.importing import needed_by

with needed_by("MlagentsEnvironment", extra=None):
    from mlagents_envs.base_env import ActionTuple, BaseEnv
    from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig, EngineConfigurationChannel
    from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
    from mlagents_envs.side_channel.side_channel import SideChannel
    from mlagents_envs.side_channel.stats_side_channel import StatsSideChannel

STATS = "environment_stats"
"""Key of a step's statistics in the first agent's info: ``{name: [(value, aggregation), …]}``."""

Parameters = Mapping[str, float | bytes]
"""Environment parameters by name. A value is a number, or the bytes of a side-channel message that sets a sampler."""


class MlagentsEnvironment(Environment):
    """An ML-Agents BaseEnv as an Environment. Behaviors keep their names, and agents keep their ids.

    The constructor resets the environment, since a Unity build reports its behaviors and agents only after a reset.
    Memory is reserved for twice the number of these agents, because ML-Agents gives an agent a new id per episode.
    ``parameters`` and ``stats`` are side channels of ``env``, or None if it was made without them. The options of
    ``reset`` are environment parameters. ``reset`` cannot seed a BaseEnv, and warns if it gets a seed.
    """

    partial_actions = True

    def __init__(
        self,
        env: BaseEnv,
        *,
        parameters: EnvironmentParametersChannel | None = None,
        stats: StatsSideChannel | None = None,
    ) -> None:
        self.env = env
        self._parameters = parameters
        self._stats = stats
        self._specs: dict[str, BehaviorSpec] = {}
        env.reset()
        self._max_agents = {name: 2 * max(1, len(steps)) for name, steps in self._first_steps().items()}

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return dict(self._specs)

    @property
    def mlagents_specs(self) -> dict[str, Any]:
        """ML-Agents' own BehaviorSpecs, by behavior, with the types and dimension properties of observations."""
        return dict(self.env.behavior_specs)

    @property
    def max_agents(self) -> Mapping[str, int]:
        return dict(self._max_agents)

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        if seeds[0] is not None:
            warnings.warn(
                f"{type(self.env).__qualname__} is an ML-Agents BaseEnv, which cannot be seeded by a reset: pass a "
                "seed to it in its factory.",
                stacklevel=2,
            )
        self.set_environment_parameters(options or {})
        self.env.reset()
        return self._first_steps()

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        for behavior, action in actions.items():
            if len(leaves(action)[0]):
                own = ActionTuple(continuous=action.get("continuous"), discrete=action.get("discrete"))
                self.env.set_actions(behavior, own)
        self.env.step()
        self._learn_specs()
        steps = {name: agent_steps(spec, *self.env.get_steps(name)) for name, spec in self._specs.items()}
        infos = [own.info for own in steps.values() if own.info]
        if self._stats is not None and self._stats.stats and infos:  # without agents, they are kept for a later step
            infos[0][0][STATS] = dict(self._stats.get_and_reset_stats())
        return steps

    def close(self) -> None:
        self.env.close()

    def set_environment_parameters(self, parameters: Parameters) -> None:
        """Queue parameters for the next step or reset. Raises UsageError if the environment has no channel for them."""
        for name, value in parameters.items():
            if self._parameters is None:
                raise UsageError(
                    f"the environment parameter {name!r} cannot be sent: the environment was made without their side "
                    "channel. Make it with MlagentsFactory."
                )
            if isinstance(value, bytes):
                self._parameters.message_queue.append(bytearray(value))
            else:
                self._parameters.set_float_parameter(name, float(value))

    def _first_steps(self) -> dict[str, AgentSteps]:
        """Return the steps after a reset, by behavior, with a row of reward 0 for each agent that needs an action."""
        self._learn_specs()
        return {name: only_decisions(spec, self.env.get_steps(name)[0]) for name, spec in self._specs.items()}

    def _learn_specs(self) -> None:
        """Convert and store the specs of behaviors that have appeared since the last call."""
        for behavior, spec in self.env.behavior_specs.items():
            if behavior not in self._specs:
                self._specs[behavior] = to_spec(spec)


@attrs.frozen
class MlagentsFactory:
    """An ``env_factory`` that calls an ML-Agents factory ``make(worker_id, side_channels) -> BaseEnv``.

    ML-Agents' ``create_environment_factory`` returns such a factory. ``worker_id``, which determines the port of a
    Unity build, is ``EnvContext.slot``, so a restarted environment gets another port. The environment is made with side
    channels for parameters and statistics. ``engine`` is the engine's configuration, such as its time scale, which is
    sent through a third side channel. If ``engine`` is None, there is no such channel.
    """

    make: Callable[[int, list[SideChannel]], BaseEnv]
    engine: EngineConfig | None = None

    def __call__(self, context: EnvContext) -> MlagentsEnvironment:
        """Make the environment, reset it once, and return it. If the reset raises, close it and raise the error."""
        parameters, stats = EnvironmentParametersChannel(), StatsSideChannel()
        channels = [parameters, stats]
        if self.engine is not None:
            channels.append(EngineConfigurationChannel())
            channels[-1].set_configuration(self.engine)
        env = self.make(context.slot, channels)
        try:
            return MlagentsEnvironment(env, parameters=parameters, stats=stats)
        except BaseException:
            env.close()
            raise


def to_spec(spec: Any) -> BehaviorSpec:
    """Convert an ML-Agents BehaviorSpec to envmanager's, without observation types and dimension properties."""
    actions, branches = spec.action_spec, spec.action_spec.discrete_branches
    observation: dict[str, Tree] = {
        "observations": tuple(ArraySpec(each.shape, np.float32, name=each.name) for each in spec.observation_specs),
        "group_id": ArraySpec((), np.int32),
        "group_reward": ArraySpec((), np.float32),
    }
    action: dict[str, Tree] = {}
    if actions.continuous_size or not branches:
        action["continuous"] = ArraySpec((actions.continuous_size,), np.float32)
    if branches:
        observation["action_mask"] = tuple(ArraySpec((size,), np.bool_) for size in branches)
        action["discrete"] = ArraySpec((len(branches),), np.int32, 0, np.array(branches, np.int32) - 1)
    return BehaviorSpec(observation, action)


def agent_steps(spec: BehaviorSpec, decisions: Any, terminals: Any) -> AgentSteps:
    """Merge DecisionSteps and TerminalSteps into AgentSteps. An agent in both has one row, with the terminal reward."""
    steps = only_decisions(spec, decisions)
    steps.reward = np.array(decisions.reward, np.float32)
    if not len(terminals):
        return steps
    row_of = {agent_id: row for row, agent_id in enumerate(steps.agent_id.tolist())}
    rows = np.array([row_of.get(int(agent_id), -1) for agent_id in terminals.agent_id])
    leaving = np.flatnonzero(rows < 0)
    rows[leaving] = len(steps) + np.arange(len(leaving))
    n = len(steps) + len(leaving)
    final_obs = _observation(spec, terminals, None)
    reward = np.concatenate([steps.reward, np.zeros(len(leaving), np.float32)])
    reward[rows] = terminals.reward
    interrupted = np.asarray(terminals.interrupted, np.bool_)
    return AgentSteps.stepped(
        agent_id=np.concatenate([steps.agent_id, np.asarray(terminals.agent_id, np.int64)[leaving]]),
        obs=concat_rows([steps.obs, take_rows(final_obs, leaving)]) if len(leaving) else steps.obs,
        reward=reward,
        terminated=np.isin(np.arange(n), rows[~interrupted]),
        truncated=np.isin(np.arange(n), rows[interrupted]),
        final_obs=take_rows(final_obs, np.argsort(rows)),
        acting=np.arange(n) < len(steps) if len(leaving) else None,
        info=[{} for _ in range(n)],
        reset_info=[{} for _ in range(len(terminals))],
    )


def only_decisions(spec: BehaviorSpec, decisions: Any) -> AgentSteps:
    """Convert DecisionSteps to AgentSteps with reward 0 in which every agent needs an action."""
    return AgentSteps.first(
        agent_id=np.asarray(decisions.agent_id, np.int64),
        obs=_observation(spec, decisions, decisions.action_mask),
        info=[{} for _ in range(len(decisions))],
    )


def _observation(spec: BehaviorSpec, steps: Any, masks: Any) -> Tree:
    obs: dict[str, Tree] = {
        "observations": tuple(steps.obs),
        "group_id": np.asarray(steps.group_id, np.int32),
        "group_reward": np.asarray(steps.group_reward, np.float32),
    }
    branches = spec.observation.get("action_mask")
    if branches is not None:
        obs["action_mask"] = zeros(branches, len(steps)) if not masks else _masks_by_branch(masks, branches)
    return obs


def _masks_by_branch(masks: Sequence[Any], branches: Tree) -> tuple[np.ndarray, ...]:
    """Return the action masks as a tuple with a new array per branch. An array that covers several branches is split.

    ML-Agents allows an environment to return such an array, because ML-Agents' trainers concatenate all arrays.
    """
    if len(masks) == len(branches):
        return tuple(np.array(mask, np.bool_) for mask in masks)
    side_by_side = np.concatenate([np.asarray(mask, np.bool_) for mask in masks], axis=1)
    return tuple(np.split(side_by_side, np.cumsum([branch.shape[0] for branch in branches])[:-1], axis=1))
