"""Adapter for Gymnasium's VectorEnv: one environment with M agents, whose episodes restart in the step that ends them.

The rule: steps are neither invented nor hidden. A VectorEnv that resets a sub-environment one step later (Gymnasium's
NEXT_STEP, the default) ignores the action of that step, so the agent does not act in it::

    step    VectorEnv                       here
    t       obs = last, terminated          obs = final_obs = last, terminated, acting False
    t + 1   action ignored, obs = first     obs = first, reward 0, acting True, no transition

If all sub-environments end in one step, no agent could act in the next one, so step t + 1 is taken inside step t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.adapters.resets import Resetter
from envmanager.adapters.rows import check_info
from envmanager.adapters.spaces import behavior_spec
from envmanager.data.casting import Casting, fitting_array
from envmanager.data.specs import (
    ArraySpec,
    BehaviorSpecs,
    SpecMismatch,
    check_structure,
    describe_value,
    object_array,
    zeros,
)
from envmanager.data.steps import AgentSteps, Steps
from envmanager.data.trees import Tree, build, leaves, leaves_like, map_tree, paths, take_rows
from envmanager.environment import Environment
from envmanager.importing import needed_by

with needed_by("envmanager.adapters", extra="gymnasium"):
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

BEHAVIOR = "default"
NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # the values of Gymnasium's AutoresetMode

Info = dict[str, Any]


class VectorEnvironment(Environment):
    """The M sub-environments of a VectorEnv, as agents 0 … M-1 of behavior ``"default"``.

    Gymnasium's SyncVectorEnv and AsyncVectorEnv receive M independent seeds, derived from the seed; other classes
    receive the seed itself. In NEXT_STEP mode, unless all episodes end at once, ``reset_info`` is empty, and the info
    of a restart comes with the next step.
    """

    def __init__(self, vector_env: Any) -> None:
        self._vector_env = vector_env
        self._reset = Resetter(vector_env)
        self.casting: Casting = Casting()
        self._n = int(vector_env.num_envs)
        self._spec = behavior_spec(vector_env.single_observation_space, vector_env.single_action_space)
        mode = vector_env.metadata.get("autoreset_mode", NEXT_STEP)  # Gymnasium 1.0 has only this and does not state it
        ways = {NEXT_STEP: self._sit_out, SAME_STEP: self._take_restarted, DISABLED: self._reset_ended}
        self._restart = ways[getattr(mode, "value", mode)]
        self._options: Info | None = None
        self._actions = zeros(self._spec.action, self._n)
        self._acting = np.ones(self._n, np.bool_)

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return {BEHAVIOR: self._spec}

    @property
    def max_agents(self) -> Mapping[str, int]:
        return {BEHAVIOR: self._n}

    @property
    def subject(self) -> Any:
        return self._vector_env

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._options = None if options is None else dict(options)
        self._acting = np.ones(self._n, np.bool_)
        obs, infos = self._reset(self._vector_env, seed=self._seed(seeds[0]), options=_own(self._options))
        none_ended = np.zeros(self._n, np.bool_)
        reward = np.zeros(self._n, np.float32)
        return {BEHAVIOR: self._steps(self._own_arrays(obs), reward, none_ended, none_ended.copy(), infos)}

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        # A sub-environment that is being reset ignores its action; it receives its previous one, which is valid.
        _put(self._actions, self._acting, actions[BEHAVIOR])
        obs, reward, terminated, truncated, infos = self._step_vector_env()
        reward[~self._acting] = 0
        self._acting = np.ones(self._n, np.bool_)
        steps = self._steps(obs, reward, terminated, truncated, infos)
        ended = steps.ended
        if ended.any():
            self._restart(steps, ended, infos)
            steps.acting = None if self._acting.all() else self._acting.copy()
        return {BEHAVIOR: steps}

    def close(self) -> None:
        self._vector_env.close()

    def _seed(self, seed: int | None) -> int | list[int] | None:
        # Sync and async vector environments would use seed + i; other classes may not accept a list.
        unwrapped = getattr(self._vector_env, "unwrapped", self._vector_env)
        if seed is None or not isinstance(unwrapped, SyncVectorEnv | AsyncVectorEnv):
            return seed
        return [int(word) for word in np.random.SeedSequence(seed).generate_state(self._n) >> 1]

    def _step_vector_env(self) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray, Info]:
        result = self._vector_env.step(map_tree(_batch, self._actions))
        if not isinstance(result, tuple) or len(result) != 5:
            what = "a tuple of 5 (obs, reward, terminated, truncated, info)"
            raise SpecMismatch("the result of step", what, describe_value(result))
        obs, reward, terminated, truncated, infos = result
        return (
            self._own_arrays(obs),
            np.array(reward, np.float32),
            _flags(terminated, self._n, "terminated", self.casting),
            _flags(truncated, self._n, "truncated", self.casting),
            infos,
        )

    def _steps(
        self, obs: Tree, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, infos: Info
    ) -> AgentSteps:
        agent_id = np.arange(self._n, dtype=np.int64)
        return AgentSteps(agent_id, obs, reward, terminated, truncated, info=info_rows(infos, self._n))

    def _own_arrays(self, obs: Tree) -> Tree:
        """Copy a batched observation to new arrays ``[M, …]``, because a VectorEnv may overwrite its own."""
        spec = self._spec.observation
        check_structure(spec, obs, "obs")
        parts = zip(leaves(spec), leaves_like(spec, obs), paths(spec, "obs"), strict=True)
        return build(spec, [_column(leaf, part, self._n, path, self.casting) for leaf, part, path in parts])

    def _sit_out(self, steps: AgentSteps, ended: np.ndarray, _infos: Info) -> None:
        """NEXT_STEP: agents whose episode ended do not act in the next step. If all ended, take that step at once."""
        steps.final_obs = take_rows(steps.obs, ended)
        steps.reset_info = [{} for _ in range(np.count_nonzero(ended))]
        if ended.all():
            obs, _, _, _, infos = self._step_vector_env()
            steps.obs, steps.reset_info = obs, info_rows(infos, self._n)
        else:
            self._acting = ~ended

    def _take_restarted(self, steps: AgentSteps, ended: np.ndarray, infos: Info) -> None:
        """SAME_STEP: the VectorEnv has reset the ended agents; their final observations are in its infos."""
        numbers = np.flatnonzero(ended).tolist()
        if "final_obs" not in infos:
            raise SpecMismatch("infos['final_obs']", "there, since an episode ended in SAME_STEP mode", "missing")
        steps.final_obs = self._final_rows(infos["final_obs"], numbers)
        final_info = info_rows(infos.get("final_info", {}), self._n)
        rest = {key: value for key, value in infos.items() if key.removeprefix("_") not in ("final_obs", "final_info")}
        after = info_rows(rest, self._n)
        steps.reset_info = [after[number] for number in numbers]
        steps.info = [final_info[number] if ended[number] else after[number] for number in range(self._n)]

    def _final_rows(self, final_obs: Any, numbers: list[int]) -> Tree:
        spec = self._spec.observation
        if not isinstance(final_obs, np.ndarray) or final_obs.dtype.kind != "O":
            return take_rows(self._own_arrays(final_obs), numbers)
        chosen = [final_obs[number] for number in numbers]
        for value in chosen:
            check_structure(spec, value, "final_obs")
        columns = zip(*(leaves_like(spec, value) for value in chosen), strict=True)
        parts = zip(leaves(spec), columns, paths(spec, "final_obs"), strict=True)
        return build(spec, [_stacked(leaf, column, path, self.casting) for leaf, column, path in parts])

    def _reset_ended(self, steps: AgentSteps, ended: np.ndarray, _infos: Info) -> None:
        """DISABLED: reset the ended sub-environments, because the VectorEnv does not do so by itself."""
        steps.final_obs = take_rows(steps.obs, ended)
        obs, infos = self._vector_env.reset(options={**(self._options or {}), "reset_mask": ended.copy()})
        _put(steps.obs, ended, take_rows(self._own_arrays(obs), ended))
        after = info_rows(infos, self._n)
        steps.reset_info = [after[number] for number in np.flatnonzero(ended)]


def _own(options: Info | None) -> Info | None:
    return None if options is None else dict(options)


def _put(tree: Tree, rows: np.ndarray, values: Tree) -> None:
    for column, part in zip(leaves(tree), leaves_like(tree, values), strict=True):
        column[rows] = part


def _batch(column: np.ndarray) -> Any:
    """Return a column of actions as an element of the batched space: a copied array, or a tuple of objects."""
    return tuple(column) if column.dtype.kind == "O" else column.copy()


def _flags(value: Any, n: int, path: str, casting: Casting) -> np.ndarray:
    return np.array(fitting_array(ArraySpec((n,), np.bool_), np.asarray(value), path, casting))


def _column(spec: ArraySpec, value: Any, n: int, path: str, casting: Casting) -> np.ndarray:
    if not spec.is_object:
        batched = ArraySpec((n, *spec.shape), spec.dtype)
        return np.array(fitting_array(batched, value, path, casting), spec.dtype)
    if not hasattr(value, "__len__") or len(value) != n:
        raise SpecMismatch(path, f"{n} objects", describe_value(value))
    return object_array(value)


def _stacked(spec: ArraySpec, values: Sequence[Any], path: str, casting: Casting) -> np.ndarray:
    if spec.is_object:
        return object_array(values)
    return np.array([fitting_array(spec, value, path, casting) for value in values], spec.dtype)


def info_rows(infos: Info, n: int) -> list[Info]:
    """Split the infos of a VectorEnv, which are arrays by key, into n dicts.

    A mask ``_key`` selects the sub-environments that have the key. A key without a mask is kept if it has n entries.
    """
    check_info(infos, "infos")
    rows: list[Info] = [{} for _ in range(n)]
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        entries = info_rows(value, n) if isinstance(value, dict) else value
        mask = infos.get(f"_{key}")
        if not hasattr(entries, "__len__") or len(entries) != n:
            continue
        for number in range(n) if mask is None else np.flatnonzero(mask):
            rows[number][key] = entries[number]
    return rows
