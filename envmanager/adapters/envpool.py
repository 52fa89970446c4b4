"""Adapter for EnvPool, whose pools step C++ environments in threads of their own.

A pool begins the next episode one step after an episode's end. The group of a synchronous pool instead resets each
environment whose episode ended, and returns its first observation in the same step. The environments of a pool can only
be seeded when the pool is made: ``envpool.make(…, seed=context.seed)``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from envmanager.adapters.gymnasium_vector import Info, VectorGroup, VectorResult, info_rows
from envmanager.adapters.late_vector import LateVectorGroup
from envmanager.adapters.spaces import behavior_spec
from envmanager.data.specs import BehaviorSpec
from envmanager.data.steps import AgentSteps
from envmanager.data.trees import Tree, concat_rows, map_tree, take_rows
from envmanager.errors import UsageError

_logger = logging.getLogger("envmanager")
_LAST = 2  # dm_env.StepType.LAST


def _result(made: Any) -> VectorResult:
    """Convert the result of a pool's step or reset to a VectorResult. Rewards and flags of a reset may be None."""
    if len(made) == 5 and made.__class__ is tuple:
        return made
    if made.__class__ is tuple:
        obs, infos = made
        return obs, None, None, None, infos
    step_type, reward, discount, state = made  # a dm_env.TimeStep of arrays
    is_last = step_type == _LAST
    return state.obs, reward, is_last & (discount == 0), is_last & (discount != 0), {"env_id": state.env_id}


def pool_group(pool: Any, env_ids: Sequence[int], *, infos: bool, check_values: bool) -> VectorGroup:
    """Return an EnvGroup of a pool's environments. Raises UsageError if an environment has several players."""
    if pool.config.get("max_num_players", 1) > 1:
        raise UsageError("an EnvPool with several players per environment is not supported.")
    group = AsyncPoolGroup if pool.is_async else PoolGroup
    return group(pool, env_ids, infos=infos, check_values=check_values)


class PoolGroup(VectorGroup):
    """A group of the environments of an EnvPool with ``env_type`` ``"gymnasium"`` or ``"dm"``, each with one agent.

    A reset cannot seed the environments. Each reset after the first logs a warning if it is given a seed.
    """

    returns_new_arrays = True
    _has_begun = False
    _converted = staticmethod(_result)

    def _spec_of(self, vector_env: Any) -> BehaviorSpec:
        return behavior_spec(vector_env.spec.gymnasium_observation_space, vector_env.spec.gymnasium_action_space)

    def _begin(self, seeds: Sequence[int | None]) -> tuple[Tree, Info]:
        if self._has_begun and seeds[0] is not None:
            _logger.warning("EnvPool cannot seed its environments again: the seed of this reset has no effect.")
        self._has_begun = True
        return self._reset_pool()

    def _reset_pool(self) -> tuple[Tree, Info]:
        obs, _, _, _, infos = _result(self._vector_env.reset())
        return obs, infos

    def _restarted(self, chosen: np.ndarray, *_: Any) -> tuple[Tree, list[Info]]:
        obs, _, _, _, infos = _result(self._vector_env.reset(np.flatnonzero(chosen)))
        order = np.argsort(infos["env_id"])
        rows = info_rows(infos, len(order)) if self._infos else []
        return take_rows(obs, order), [rows[place] for place in order] if rows else []


class AsyncPoolGroup(PoolGroup, LateVectorGroup):
    """A group of the environments of an asynchronous pool, whose ``batch_size`` is below ``num_envs``.

    ``step(actions, rows)`` sends the actions of ``rows`` and returns the next ready rows. When an episode has
    ended, the group itself steps the environment once more to begin the next episode.
    """

    def __init__(self, pool: Any, env_ids: Sequence[int], *, infos: bool = False, check_values: bool = False) -> None:
        """Wrap a pool. Raises UsageError unless ``num_envs`` is ``len(env_ids)`` and a multiple of ``batch_size``."""
        super().__init__(pool, env_ids, infos=infos, check_values=check_values)
        self.assumes_mode = False
        self.batch_size = pool.config["batch_size"]
        if self._n % self.batch_size:
            raise UsageError(
                f"an EnvPool of num_envs={self._n} returns batch_size={self.batch_size} environments at a time, so "
                f"that {self._n % self.batch_size} would never be returned: take a batch_size that divides num_envs."
            )
        self._in_pool = np.zeros(self._n, np.bool_)
        """Mask of the environments whose action was sent to the pool and whose result has not been received."""

    def _reset_pool(self) -> tuple[Tree, Info]:
        n_batches = self._n // self.batch_size
        if self._in_pool.any():  # complete the batches, because their rows would come among those of the reset
            self._send(np.flatnonzero(~self._in_pool))
            for _ in range(n_batches):
                self._vector_env.recv()
        self._vector_env.async_reset()
        parts = [_result(self._vector_env.recv()) for _ in range(n_batches)]
        self._in_pool[:] = False
        order = np.argsort(np.concatenate([infos["env_id"] for *_, infos in parts]))
        infos = [infos for *_, infos in parts]
        return take_rows(concat_rows([obs for obs, *_ in parts]), order), _joined(infos, order)

    def _send(self, rows: np.ndarray) -> None:
        self._in_pool[rows] = True
        self._vector_env.send(map_tree(lambda column: column[rows], self._actions), rows)

    def _received(self) -> AgentSteps:
        result = _result(self._vector_env.recv())
        rows = result[4]["env_id"]
        self._in_pool[rows] = False
        return self._steps(*result, rows)


def _joined(infos: Sequence[Info], order: np.ndarray) -> Info:
    """Concatenate the infos of several batches, and reorder the rows by the indices in ``order``."""
    return {
        key: _joined([each[key] for each in infos], order)
        if isinstance(value, dict)
        else np.concatenate([each[key] for each in infos])[order]
        for key, value in infos[0].items()
    }
