"""Adapter for EnvPool: pools of C++ environments, which step in threads of their own.

A pool restarts an episode in the step after its end. Here a reset of only these environments gives their first
observations in the same step. EnvPool seeds its environments when it makes the pool:
``envpool.make(…, seed=context.seed)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envmanager.adapters.gymnasium_vector import Info, VectorGroup, VectorResult, info_rows
from envmanager.adapters.spaces import behavior_spec
from envmanager.data.specs import BehaviorSpec
from envmanager.data.steps import AgentSteps
from envmanager.data.trees import Tree, take_rows
from envmanager.errors import UsageError

_logger = logging.getLogger("envmanager")
_LAST = 2  # dm_env.StepType.LAST


class EnvPoolGroup(VectorGroup):
    """The environments of a pool made with ``env_type="gymnasium"`` or ``"dm"``, one agent each.

    A reset cannot seed them; it logs a warning if a seed is given after the first one.
    """

    def __init__(self, pool: Any, env_ids: Sequence[int], *, infos: bool = False, check_values: bool = False) -> None:
        """Wrap a pool. Raises UsageError for an asynchronous pool, and for several players per environment."""
        if pool.is_async:
            raise UsageError(
                "this EnvPool hands back batch_size of its num_envs environments at a time: leave out batch_size, and "
                "take several workers (n_workers), each with a pool, for steps that are partial and asynchronous."
            )
        if pool.config.get("max_num_players", 1) > 1:
            raise UsageError("an EnvPool with several players per environment is not supported.")
        self._has_begun = False
        super().__init__(pool, env_ids, infos=infos, check_values=check_values)
        self.returns_new_arrays = True

    def _spec_of(self, vector_env: Any) -> BehaviorSpec:
        return behavior_spec(vector_env.spec.gymnasium_observation_space, vector_env.spec.gymnasium_action_space)

    def _way_to_restart(self) -> Callable[[AgentSteps, np.ndarray, Info], None]:
        return self._reset_ended

    def _begin(self, seeds: Sequence[int | None]) -> tuple[Tree, Info]:
        if self._has_begun and seeds[0] is not None:
            _logger.warning("EnvPool cannot seed its environments again: the seed of this reset has no effect.")
        self._has_begun = True
        obs, _, _, _, infos = _result(self._vector_env.reset())
        return obs, infos

    def _take_step(self, action: Tree) -> VectorResult:
        return _result(self._vector_env.step(action))

    def _restarted(self, ended: np.ndarray, numbers: np.ndarray) -> tuple[Tree, list[Info]]:
        obs, _, _, _, infos = _result(self._vector_env.reset(numbers))
        order = np.argsort(infos["env_id"])
        rows = info_rows(infos, len(numbers)) if self._infos else []
        return take_rows(obs, order), [rows[place] for place in order] if rows else []


def _result(made: Any) -> VectorResult:
    """Return the result of a pool's ``step`` or ``reset`` in the form of a VectorEnv's step."""
    if len(made) == 5 and made.__class__ is tuple:
        return made
    if made.__class__ is tuple:
        obs, infos = made
        return obs, None, None, None, infos
    step_type, reward, discount, state = made  # a dm_env.TimeStep of arrays
    is_last = step_type == _LAST
    return state.obs, reward, is_last & (discount == 0), is_last & (discount != 0), {"env_id": state.env_id}
