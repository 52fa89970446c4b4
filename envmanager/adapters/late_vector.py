"""Adapter for vector environments that can begin the next episode only one step after an episode's end.

::

    step     VectorEnv, NEXT_STEP mode      EnvManager.send and recv                 EnvManager.step, with policies
    t        ended, obs = last              the row is still in flight               obs = final_obs = last, not acting
    t + 1    action ignored, obs = first    ended, obs = first, final_obs = last     obs = first, no transition

If the episodes of all environments end in step t, ``EnvManager.step`` returns the first observations in step t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.adapters.gymnasium_vector import Info, VectorGroup, batch, declares_mode, restarts_late
from envmanager.data.specs import zeros
from envmanager.data.steps import AgentSteps, RowBuffer, Steps, concat_steps
from envmanager.data.trees import Tree, copy_tree, map_tree, take_rows, with_rows
from envmanager.errors import UsageError


class LateVectorGroup(VectorGroup):
    """A group of the environments of a VectorEnv in NEXT_STEP mode whose ``reset`` takes no ``reset_mask``.

    The ``rows`` passed to ``step`` must include every row that is not in flight. ``step`` then returns the ready rows,
    except rows whose episode has just ended.
    """

    steps_some_rows = True

    def __init__(
        self, vector_env: Any, env_ids: Sequence[int], *, infos: bool = False, check_values: bool = False
    ) -> None:
        super().__init__(vector_env, env_ids, infos=infos, check_values=check_values)
        self.batch_size = self._n
        self._is_copied, self.returns_new_arrays = self.returns_new_arrays, True
        self._actions = zeros(self.behavior_specs[self.behavior].action, self._n)
        """Last action of each row, sent again as a valid action in the step that begins the next episode."""
        self._acting = np.ones(self._n, np.bool_)
        """Mask of the rows whose next action is used; false where the next step of all rows only begins an episode."""
        self._is_late = np.zeros(self._n, np.bool_)
        """Mask of the rows in flight whose episode has ended and whose next episode has not begun."""
        self._last = AgentSteps.first(agent_id=self._agent_id.copy(), obs=zeros(self._spec, self._n))
        """Last step of each row in ``_is_late``, with the final observation."""
        self._last_info: list[Info] = [{} for _ in range(self._n)]
        self.assumes_mode = not self._is_gymnasiums and not declares_mode(vector_env)
        """Whether the VectorEnv declares no AutoresetMode, so that NEXT_STEP is only assumed."""
        self.earned_at_restart: float | None = None
        """The first reward of a step that only began an episode, which is dropped; ``envmanager check`` reports it."""

    def offer_rows(self, buffer: RowBuffer) -> None:
        """Ignore the buffer, because a step may return fewer rows than the buffer has."""

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._is_late[:], self._acting[:] = False, True
        steps = super().reset(seeds=seeds, options=options)[self.behavior]
        self._last.obs = copy_tree(steps.obs)
        return {self.behavior: steps if self._is_copied else steps.copy()}

    def step(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Steps:
        """Step the environments at ``rows`` and return the next ready rows. With ``rows=None``, step and return all."""
        acting = np.flatnonzero(self._acting) if rows is None else rows
        given = actions[self.behavior]
        self._actions = copy_tree(given) if len(acting) == self._n else with_rows(self._actions, acting, given)
        if rows is not None:
            self._send(rows)
            return {self.behavior: self._ready()}
        steps = self._step_all()
        steps.reward[~self._acting] = 0
        ended = steps.ended
        self._acting = ~ended
        if ended.any():
            steps.reset_info = [{} for _ in range(np.count_nonzero(ended))] if self._infos else None
            if ended.all():  # no agent could act in the next step, so it is taken now
                first = self._step_all()
                steps.obs, steps.reset_info, self._acting = first.obs, first.info, ended
            else:
                steps.acting = self._acting.copy()
        return {self.behavior: steps}

    def _step_all(self) -> AgentSteps:
        self._send(np.arange(self._n))
        parts = [self._received() for _ in range(self._n // self.batch_size)]
        for part in parts:
            if part.ended.any():
                part.final_obs = take_rows(part.obs, np.flatnonzero(part.ended))
        steps = concat_steps(parts)
        return steps if len(parts) == 1 else steps.take(np.argsort(steps.agent_id))

    def _ready(self) -> AgentSteps:
        """Return the next ready rows. Rows whose episode ended are first stepped again, to begin the next episode."""
        while True:
            steps = self._received()
            rows, ended, last = steps.env_id - self.env_ids[0], steps.ended, self._last
            if ended.any():
                late = rows[ended]
                last.obs = with_rows(last.obs, late, take_rows(steps.obs, ended))
                last.reward[late], last.terminated[late] = steps.reward[ended], steps.terminated[ended]
                last.truncated[late] = steps.truncated[ended]
                for place in np.flatnonzero(ended) if steps.info is not None else ():
                    self._last_info[rows[place]] = steps.info[place]  # type: ignore[index]
                self._is_late[late] = True
                self._send(late)
            if not ended.all():
                break
        steps = steps.take(np.flatnonzero(~ended))
        rows = rows[~ended]
        begun = np.flatnonzero(self._is_late[rows])
        if len(begun):
            late = rows[begun]
            self._is_late[late] = False
            steps.reward[begun], steps.terminated[begun] = last.reward[late], last.terminated[late]
            steps.truncated[begun], steps.final_obs = last.truncated[late], take_rows(last.obs, late)
            if steps.info is not None:
                steps.reset_info = [steps.info[place] for place in begun]
                for place, row in zip(begun, late, strict=True):
                    steps.info[place] = self._last_info[row]
        return steps

    # Calls of the VectorEnv, which an asynchronous pool has instead.

    def _send(self, rows: np.ndarray) -> None:
        """Begin to step ``rows`` with their last actions. A no-op in this class, whose ``_received`` steps all rows."""

    def _received(self) -> AgentSteps:
        """Return the next ``batch_size`` ready rows, in new arrays. This class steps the VectorEnv for all rows."""
        result = self._vector_env.step(map_tree(batch, self._actions))
        steps = self._steps(*result)
        self._require_late(steps, result[4])
        return steps if self._is_copied else steps.copy()

    def _require_late(self, steps: AgentSteps, infos: Info) -> None:
        """Raise SpecMismatch if an episode has begun in the step in which another one ended, and not in the next."""
        ended, begun = steps.ended, self._is_late | ~self._acting
        if ended.any():
            self._require_last(steps, ended, infos)
        if not begun.any():
            return
        earned = begun & (steps.reward != 0)
        if earned.any() and self.earned_at_restart is None:
            self.earned_at_restart = float(steps.reward[earned][0])
        if (begun & ended).any() or (earned.any() and self.assumes_mode):
            what = "an end" if (begun & ended).any() else f"a reward of {self.earned_at_restart:g}"
            raise self._restarts_at_once(f"the step after an episode's end, whose action is ignored, had {what}")


def vector_group(vector_env: Any, env_ids: Sequence[int], *, infos: bool, check_values: bool) -> VectorGroup:
    """Return a group that steps ``vector_env``. Raises UsageError if each step would return only some of its rows."""
    batch_size = getattr(getattr(vector_env, "unwrapped", vector_env), "batch_size", None)
    if isinstance(batch_size, int) and batch_size < vector_env.num_envs:  # of ale_py
        raise UsageError(
            f"a vector of {vector_env.num_envs} environments returns batch_size={batch_size} of them at a time. Leave "
            "batch_size out; for steps of some environments use several workers, each with a vector."
        )
    group = LateVectorGroup if restarts_late(vector_env) else VectorGroup
    return group(vector_env, env_ids, infos=infos, check_values=check_values)
