"""The batch that ``recv`` returns: one step each of some environments, as a struct of arrays."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, concat_steps
from envmanager.data.tree_rows import copy_tree
from envmanager.data.trees import Tree


@attrs.define(eq=False)
class Batch:
    """One environment step each of n environments, a row per environment, for ``send`` and ``recv``.

    ``env_ids`` int64[n]; ``obs`` a tree of ``[n, …]``; ``reward`` float32[n]; ``terminated``, ``truncated``, ``lost``
    bool[n]; ``final_obs`` a tree of ``[m, …]`` for the rows that ended, or None; ``info`` (n dicts) and ``reset_info``
    (m dicts) when the manager has ``infos=True``. The rows are in order of ``env_id`` if the batch has all
    environments, else in order of arrival. If ``is_view``, the arrays are valid until the next ``recv``, ``step`` or
    ``reset``.
    """

    env_ids: np.ndarray
    obs: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    _lost: np.ndarray | None
    final_obs: Tree = None
    info: list[dict[str, Any]] | None = None
    reset_info: list[dict[str, Any]] | None = None
    is_view: bool = False

    @classmethod
    def of(cls, steps: AgentSteps, env_ids: np.ndarray | None = None, *, is_view: bool = True) -> Batch:
        """Return a batch that shares the arrays of ``steps``, in which each environment has one agent.

        ``env_ids`` saves computing the environments of the rows.
        """
        return cls(
            steps.env_id if env_ids is None else env_ids,
            steps.obs,
            steps.reward,
            steps.terminated,
            steps.truncated,
            None,
            steps.final_obs,
            steps.info,
            steps.reset_info,
            is_view,
        )

    @classmethod
    def copied(cls, steps: AgentSteps, env_ids: np.ndarray | None = None) -> Batch:
        """Return a batch with copies of the arrays of ``steps``."""
        obs, final_obs = steps.obs, steps.final_obs
        return cls(
            steps.env_id if env_ids is None else env_ids,
            obs.copy() if obs.__class__ is np.ndarray else copy_tree(obs),
            steps.reward.copy(),
            steps.terminated.copy(),
            steps.truncated.copy(),
            None,
            None if final_obs is None else copy_tree(final_obs),
            steps.info,
            steps.reset_info,
        )

    @classmethod
    def joined(cls, parts: list[AgentSteps], env_ids: np.ndarray | None = None) -> Batch:
        """Return a batch with the rows of all parts, copied, one part after the other.

        With ``env_ids``, which must be sorted and those of the rows, the rows are sorted like them.
        """
        steps = concat_steps(parts)
        if env_ids is not None and (np.diff(steps.agent_id) < 0).any():
            steps = steps.take(np.argsort(steps.agent_id))
        return cls.of(steps, env_ids, is_view=False)

    def __len__(self) -> int:
        return len(self.env_ids)

    @property
    def lost(self) -> np.ndarray:
        """Whether each environment's episode was cut because its worker was replaced: bool[n]."""
        if self._lost is None:
            self._lost = np.zeros(len(self.env_ids), np.bool_)
        return self._lost

    def copy(self) -> Batch:
        """Return a batch with copies of the arrays."""
        return Batch(
            self.env_ids.copy(),
            copy_tree(self.obs),
            self.reward.copy(),
            self.terminated.copy(),
            self.truncated.copy(),
            None if self._lost is None else self._lost.copy(),
            copy_tree(self.final_obs),
            self.info,
            self.reset_info,
        )
