"""Conversion of steps and actions to ML-Agents' classes, with the numbers by which ML-Agents identifies agents.

::

    AgentSteps ──▶ DecisionSteps, TerminalSteps        policy's ActionInfo ──▶ actions for a manager
                                                       a worker's share    ◀── actions returned with its step

The rule: an agent gets a new number for every episode, as in Unity, and no number is used twice. When a worker is lost,
its unfinished episodes are therefore never joined to later ones.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from envmanager.data.specs import object_array
from envmanager.data.steps import AGENT_BITS, ActionInfo, AgentSteps
from envmanager.data.trees import Tree, take_rows
from envmanager.importing import needed_by

with needed_by("MlagentsEnvManager", extra=None):
    from mlagents.trainers.action_info import ActionInfo as MlagentsActionInfo
    from mlagents_envs.base_env import DecisionSteps, TerminalSteps

_CALL, _ROW = "call", "row"
"""Keys in a manager's ``ActionInfo.outputs``: ML-Agents' ActionInfo of the policy call, and the agent's row in it."""


class Numbers(defaultdict[int, int]):
    """A mapping from agent or group ids to the numbers given to ML-Agents, counted from 1 over all environments.

    An id without a number is assigned the next unused number.
    """

    def __init__(self) -> None:
        super().__init__(itertools.count(1).__next__)

    def of(self, ids: Iterable[int]) -> np.ndarray:
        """Return the number of each id, int64[n]."""
        return np.array([self[own] for own in ids], np.int64)

    def forget(self, ids: Iterable[int]) -> None:
        """Drop the numbers of ``ids``. An id that appears again gets a new number."""
        for own in ids:
            self.pop(own, None)

    def forget_envs(self, env_ids: Iterable[int]) -> None:
        """Drop the numbers of all agents or groups in the environments ``env_ids``."""
        gone = set(env_ids)
        self.forget([own for own in self if own >> AGENT_BITS in gone])


class StepTranslator:
    """A converter from AgentSteps to ML-Agents' DecisionSteps and TerminalSteps. It also numbers agents and groups."""

    def __init__(self) -> None:
        self._agents = Numbers()
        self._groups = Numbers()

    def translate(self, steps: AgentSteps, *, is_lost: bool = False) -> tuple[DecisionSteps, TerminalSteps]:
        """Convert ``steps`` to DecisionSteps (agents that need actions) and TerminalSteps (agents whose episode ended).

        ``is_lost``: the worker was lost, so the real ends of the episodes are unknown. TerminalSteps is then empty,
        but agents whose episode ended still get new numbers.
        """
        ended = np.flatnonzero(steps.ended)
        terminals = self._terminal_steps(steps, ended[:0] if is_lost else ended)
        self._agents.forget(steps.agent_id[ended].tolist())
        return self.decision_steps(steps), terminals

    def decision_steps(self, steps: AgentSteps) -> DecisionSteps:
        """Convert the steps of the agents that need an action to ML-Agents' DecisionSteps."""
        rows = steps.acting_rows
        obs = take_rows(steps.obs, rows)
        masks = obs.get("action_mask")
        return DecisionSteps(
            list(obs["observations"]),
            np.where(steps.ended[rows], np.float32(0), steps.reward[rows]),  # TerminalSteps has the final reward
            self._agents.of(steps.agent_id[rows].tolist()),
            list(masks) if masks is not None and any(mask.any() for mask in masks) else None,
            self._group_numbers(steps.agent_id[rows], obs),
            obs["group_reward"],
        )

    def _terminal_steps(self, steps: AgentSteps, rows: np.ndarray) -> TerminalSteps:
        obs = take_rows(steps.obs, rows) if not len(rows) else steps.final_obs
        return TerminalSteps(
            list(obs["observations"]),
            steps.reward[rows],
            steps.truncated[rows],
            self._agents.of(steps.agent_id[rows].tolist()),
            self._group_numbers(steps.agent_id[rows], obs),
            obs["group_reward"],
        )

    def _group_numbers(self, agent_id: np.ndarray, obs: Tree) -> np.ndarray:
        """Return each agent's group number, unique across environments, or 0 for an agent without a group."""
        group_id = obs["group_id"].astype(np.int64)
        grouped = np.flatnonzero(group_id)
        keys = (agent_id[grouped] >> AGENT_BITS << AGENT_BITS) + group_id[grouped]
        numbers = np.zeros(len(group_id), np.int64)
        numbers[grouped] = self._groups.of(keys.tolist())
        return numbers

    def forget_envs(self, env_ids: Iterable[int]) -> None:
        """Drop the numbers of all agents and groups in the environments ``env_ids``, which begin new episodes."""
        self._agents.forget_envs(env_ids)
        self._groups.forget_envs(env_ids)


def to_actions(taken: MlagentsActionInfo, n: int) -> ActionInfo:
    """Convert an ML-Agents policy's actions for ``n`` agents to an ActionInfo; ``share_of`` converts back."""
    actions = taken.env_action
    tree = {}
    if actions.continuous.shape[1] or not actions.discrete.shape[1]:
        tree["continuous"] = actions.continuous
    if actions.discrete.shape[1]:
        tree["discrete"] = actions.discrete
    return ActionInfo(tree, {_CALL: object_array([taken] * n), _ROW: np.arange(n)})


def share_of(actions: ActionInfo) -> MlagentsActionInfo:
    """Convert one worker's ``actions`` to an ML-Agents ActionInfo with the worker's part of a policy call's results."""
    if not len(actions.outputs.get(_ROW, ())):
        return MlagentsActionInfo.empty()
    call, first = actions.outputs[_CALL][0], int(actions.outputs[_ROW][0])
    n, rows = len(call.agent_ids), slice(first, first + len(actions.outputs[_ROW]))
    return MlagentsActionInfo(
        _rows(call.action, rows, n),
        _rows(call.env_action, rows, n),
        {name: _rows(value, rows, n) for name, value in call.outputs.items()},
        call.agent_ids[rows],
    )


def _rows(value: Any, rows: slice, n: int) -> Any:
    """Return ``rows`` of ``value`` or of its continuous and discrete parts. Return a value without ``n`` rows whole."""
    if hasattr(value, "to_log_probs_tuple"):
        value = value.to_log_probs_tuple()
    if hasattr(value, "continuous") and hasattr(value, "discrete"):
        parts = {"continuous": value.continuous, "discrete": value.discrete}
        return type(value)(**{name: part[rows] for name, part in parts.items() if part is not None})
    has_rows = hasattr(value, "shape") and len(value.shape) > 0 and len(value) == n
    return value[rows] if has_rows else value
