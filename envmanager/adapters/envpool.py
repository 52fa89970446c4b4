"""Adapter for EnvPool: pools of C++ environments, which step in threads of their own.

A pool restarts an episode in the step after its end. Here a reset of only these environments gives their first
observations in the same step. EnvPool seeds its environments when it makes the pool:
``envpool.make(…, seed=context.seed)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.adapters.gymnasium_vector import BEHAVIOR, Info, VectorGroup, VectorResult, info_rows
from envmanager.adapters.spaces import behavior_spec
from envmanager.data.specs import BehaviorSpec, zeros
from envmanager.data.steps import AgentSteps, RowBuffer, Steps
from envmanager.data.trees import Tree, concat_rows, leaves, leaves_like, map_tree, take_rows
from envmanager.errors import UsageError

_logger = logging.getLogger("envmanager")
_LAST = 2  # dm_env.StepType.LAST


class EnvPoolGroup(VectorGroup):
    """The environments of a pool made with ``env_type="gymnasium"`` or ``"dm"``, one agent each.

    A reset cannot seed them; it logs a warning if a seed is given after the first one. In an asynchronous pool
    (``batch_size`` below ``num_envs``), a step of some rows returns those that are ready first. An environment whose
    episode ends is restarted by a step of its own and comes with the first observation of the next episode.
    """

    def __init__(self, pool: Any, env_ids: Sequence[int], *, infos: bool = False, check_values: bool = False) -> None:
        """Wrap a pool. Raises UsageError for several players per environment, and if num_envs is no full batches."""
        n_envs, batch_size = len(pool), pool.config["batch_size"] or len(pool)
        if pool.config.get("max_num_players", 1) > 1:
            raise UsageError("an EnvPool with several players per environment is not supported.")
        if n_envs % batch_size:
            raise UsageError(
                f"an EnvPool of num_envs={n_envs} hands back batch_size={batch_size} environments at a time, so that "
                f"the last {n_envs % batch_size} would never come: take a batch_size that divides num_envs."
            )
        self._has_begun = False
        super().__init__(pool, env_ids, infos=infos, check_values=check_values)
        self.returns_new_arrays = True
        self._n_batches = n_envs // batch_size
        self._flying = np.zeros(n_envs, np.bool_)
        """Mask of the environments that step in an asynchronous pool now."""
        self._acting = np.ones(n_envs, np.bool_)
        """Mask of the environments whose next action counts: all but those that a whole step has ended."""
        self._ended: dict[int, AgentSteps] = {}
        """Last steps of episodes that have ended, by row, until their environments are restarted."""
        if self._n_batches > 1:
            self.batch_size, self.steps_some_rows = batch_size, True
            self._actions = zeros(self.behavior_specs[BEHAVIOR].action, n_envs)

    def _spec_of(self, vector_env: Any) -> BehaviorSpec:
        return behavior_spec(vector_env.spec.gymnasium_observation_space, vector_env.spec.gymnasium_action_space)

    def _way_to_restart(self) -> Callable[[AgentSteps, np.ndarray, Info], None]:
        return self._reset_ended

    def _begin(self, seeds: Sequence[int | None]) -> tuple[Tree, Info]:
        if self._has_begun and seeds[0] is not None:
            _logger.warning("EnvPool cannot seed its environments again: the seed of this reset has no effect.")
        self._has_begun = True
        if not self.batch_size:
            obs, _, _, _, infos = _result(self._vector_env.reset())
            return obs, infos
        if self._flying.any():  # complete the batches, because their rows would come among those of the reset
            self._send(np.flatnonzero(~self._flying))
            self._receive_all()
        self._ended.clear()
        self._acting[:] = True
        self._vector_env.async_reset()
        obs, _, _, _, infos = self._receive_all()
        return obs, infos

    def _take_step(self, action: Tree) -> VectorResult:
        return _result(self._vector_env.step(action))

    def _restarted(self, ended: np.ndarray, numbers: np.ndarray) -> tuple[Tree, list[Info]]:
        obs, _, _, _, infos = _result(self._vector_env.reset(numbers))
        order = np.argsort(infos["env_id"])
        rows = info_rows(infos, len(numbers)) if self._infos else []
        return take_rows(obs, order), [rows[place] for place in order] if rows else []

    # An asynchronous pool.

    def offer_rows(self, buffer: RowBuffer) -> None:
        if not self.batch_size:
            super().offer_rows(buffer)

    def step(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Steps:
        """Step the environments at ``rows``; return those that are ready. Without ``rows``, step and return all.

        A whole step cannot restart the environments whose episode ends; they do not act in the next one.
        """
        if not self.batch_size:
            return super().step(actions, rows)
        acting = np.flatnonzero(self._acting) if rows is None else rows
        for column, part in zip(leaves(self._actions), leaves_like(self._actions, actions[BEHAVIOR]), strict=True):
            column[acting] = part
        if rows is not None:
            self._send(rows)
            return {BEHAVIOR: self._ready()}
        self._send(np.arange(self._n))
        obs, reward, terminated, truncated, infos = self._receive_all()
        reward[~self._acting] = 0
        steps = self._steps(obs, reward, terminated, truncated, infos)
        ended = steps.ended
        self._acting = ~ended
        if ended.any():
            self._put_final(steps, take_rows(steps.obs, np.flatnonzero(ended)))
            steps.reset_info = [{} for _ in range(np.count_nonzero(ended))] if self._infos else None
            steps.acting = self._acting.copy()
        return {BEHAVIOR: steps}

    def _send(self, rows: np.ndarray) -> None:
        self._flying[rows] = True
        self._vector_env.send(map_tree(lambda column: column[rows], self._actions), rows)

    def _receive(self) -> VectorResult:
        result = _result(self._vector_env.recv())
        self._flying[result[4]["env_id"]] = False
        return result

    def _receive_all(self) -> VectorResult:
        """Return the results of all environments, in order."""
        self._flying[:] = True
        parts = [self._receive() for _ in range(self._n_batches)]
        order = np.argsort(np.concatenate([infos["env_id"] for *_, infos in parts]))
        obs, *columns = zip(*(part[:4] for part in parts), strict=True)
        joined = (None if each[0] is None else np.concatenate(each)[order] for each in columns)
        infos = [infos for *_, infos in parts]
        return take_rows(concat_rows(list(obs)), order), *joined, _joined(infos, order)

    def _ready(self) -> AgentSteps:
        """Return the steps of the environments that are ready first. Restart those whose episode ends, for later."""
        while True:
            obs, reward, terminated, truncated, infos = self._receive()
            rows, infos_of = infos["env_id"], info_rows(infos, len(infos["env_id"])) if self._infos else None
            ended = terminated | truncated
            for place in np.flatnonzero(ended).tolist():
                self._ended[int(rows[place])] = AgentSteps(
                    self._agent_id[rows[place : place + 1]],
                    take_rows(obs, slice(place, place + 1)),
                    reward[place : place + 1],
                    terminated[place : place + 1],
                    truncated[place : place + 1],
                    info=None if infos_of is None else [infos_of[place]],
                )
            if ended.any():
                self._send(rows[ended])
            ready = np.flatnonzero(~ended)
            if len(ready):
                break
        steps = AgentSteps(
            self._agent_id[rows[ready]],
            take_rows(obs, ready),
            reward[ready].astype(np.float32, copy=False),
            terminated[ready],
            truncated[ready],
            info=None if infos_of is None else [infos_of[place] for place in ready],
        )
        begun = [(place, row) for place, row in enumerate(rows[ready].tolist()) if row in self._ended]
        if begun:
            last = [self._ended.pop(row) for _, row in begun]
            for (place, _), each in zip(begun, last, strict=True):
                steps.reward[place], steps.terminated[place] = each.reward[0], each.terminated[0]
                steps.truncated[place] = each.truncated[0]
            steps.final_obs = concat_rows([each.obs for each in last])
            if steps.info is not None:
                steps.reset_info = [steps.info[place] for place, _ in begun]
                for (place, _), each in zip(begun, last, strict=True):
                    steps.info[place] = each.info[0]  # type: ignore[index]
        return steps


def _joined(infos: Sequence[Info], order: np.ndarray) -> Info:
    """Return the infos of several batches as those of one, with the rows in ``order``."""
    return {
        key: _joined([each[key] for each in infos], order)
        if isinstance(value, dict)
        else np.concatenate([each[key] for each in infos])[order]
        for key, value in infos[0].items()
    }


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
