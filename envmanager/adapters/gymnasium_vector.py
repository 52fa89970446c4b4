"""Adapter for vector environments, which step all environments of one worker in one call.

::

    VectorEnv, at the end of an episode                  what the group does, in the same step
    SAME_STEP   obs = first, infos["final_obs"] = last   uses both
    NEXT_STEP   obs = last; the next action is ignored   resets ended environments by ``options["reset_mask"]``
                                                         if the class supports it, else see ``late_vector``
    DISABLED    obs = last; waits for a reset            resets ended environments by ``options["reset_mask"]``

In the trainer's process, observations and actions may stay PyTorch or JAX arrays. In a worker process, observations are
converted to NumPy arrays. Rewards and flags are always converted, because the manager reads them.

``VectorGroup.step`` returns one row per environment. If an episode ended, ``obs`` has the first observation of the next
episode, and ``final_obs`` has the last observation of the ended episode.

Episodes begin on demand by a ``reset_mask`` too. The vector still steps all environments; the rows of those that rest
are dropped. In DISABLED mode, those whose episode has ended are reset before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from types import MappingProxyType
from typing import Any

import numpy as np

from envmanager.adapters.names import base_names
from envmanager.adapters.resets import Resetter
from envmanager.adapters.rows import (
    LARGEST_REWARD,
    check_info,
    fitting_array,
    groups_of_equals,
    real_number,
    stack_rows,
)
from envmanager.adapters.spaces import behavior_spec
from envmanager.data.casting import Casting, fitting_foreign
from envmanager.data.specs import (
    ArraySpec,
    BehaviorSpec,
    BehaviorSpecs,
    SpecMismatch,
    as_array,
    check_values,
    describe_value,
    matched,
    object_array,
)
from envmanager.data.steps import AgentSteps, Begin, RowBuffer, Steps, concat_steps, only_agents
from envmanager.data.trees import (
    Tree,
    as_numpy,
    build,
    copy_tree,
    is_foreign,
    leaves,
    leaves_like,
    map_tree,
    snapshot,
    take_rows,
    with_rows,
)
from envmanager.environment import EnvGroup, OnDemand, attribute_of
from envmanager.errors import UsageError
from envmanager.importing import needed_by

with needed_by("envmanager.adapters", extra="gymnasium"):
    from gymnasium.utils.env_checker import data_equivalence
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # the values of Gymnasium's AutoresetMode

_all = np.logical_and.reduce  # ``np.all`` and the method are Python functions

Info = dict[str, Any]
VectorResult = tuple[Tree, Any, Any, Any, Info]
"""The result of a VectorEnv's ``step``: obs, rewards, terminated, truncated, infos."""


class VectorGroup(EnvGroup):
    """A group of the environments of a Gymnasium VectorEnv, each with one agent.

    The environments can only be stepped together. Gymnasium's SyncVectorEnv and AsyncVectorEnv, and ``ale_py``'s
    AtariVectorEnv receive a seed for each environment; other classes receive only the first seed. ``get_attr``,
    ``set_attr`` and ``render`` act on the sub-environments of a SyncVectorEnv or AsyncVectorEnv, else on the VectorEnv.
    """

    behavior_specs: BehaviorSpecs = MappingProxyType({})
    steps_some_rows = False
    _converted: Callable[[Any], VectorResult] | None = None
    """Function that converts the result of ``step`` to a VectorResult; None if ``step`` returns a VectorResult."""

    def __init__(
        self, vector_env: Any, env_ids: Sequence[int], *, infos: bool = False, check_values: bool = False
    ) -> None:
        """Wrap a VectorEnv. Raises UsageError if its ``num_envs`` differs from the number of ``env_ids``."""
        self._vector_env = vector_env
        self._unwrapped = getattr(vector_env, "unwrapped", vector_env)
        self.env_ids = tuple(env_ids)
        self._n = int(getattr(vector_env, "num_envs", 0) or len(vector_env))
        if self._n != len(self.env_ids):
            raise UsageError(
                f"env_factory returned a vector of {self._n} environments for a worker of {len(self.env_ids)}. It is "
                f"called once per worker, so n_envs must be {self._n} times n_workers: pass n_envs and n_workers that "
                "give it, or make a vector of context.n_envs (def make(context: EnvContext))."
            )
        self._infos = infos
        self._check_values = check_values
        self.casting = Casting(strict=check_values)
        self._reset = Resetter(vector_env)
        spec = self._spec_of(vector_env)
        self.behavior_specs = {self.behavior: spec}
        self._spec: Tree = spec.observation
        is_plain = isinstance(spec.observation, ArraySpec) and not spec.observation.is_object
        self._plain = (spec.observation.dtype, spec.observation.shape) if is_plain else None
        """Dtype and shape to check in each row if an observation is a single array of numbers, else None."""
        self._acts_plainly = isinstance(spec.action, ArraySpec) and not spec.action.is_object
        self._mode = mode_of(vector_env)
        self._is_gymnasiums = isinstance(self._unwrapped, SyncVectorEnv | AsyncVectorEnv)
        self.begins_on_demand = self._is_gymnasiums and not restarts_late(vector_env)
        self._to_park = np.zeros(self._n, np.bool_)
        """Mask of the environments that must be reset before the next step of all, though they rest."""
        self._agent_id = only_agents(self.env_ids)
        self._options: Info | None = None
        self._buffer: RowBuffer | None = None
        self._accepts_device_arrays = False
        is_copied = getattr(vector_env, "copy", False) is True  # an option of SyncVectorEnv and AsyncVectorEnv
        self.returns_new_arrays |= vector_env is self._unwrapped and (is_copied or _ALE in base_names(vector_env))

    def _spec_of(self, vector_env: Any) -> BehaviorSpec:
        return behavior_spec(vector_env.single_observation_space, vector_env.single_action_space)

    @property
    def max_agents(self) -> Mapping[str, int]:
        return {self.behavior: self._n}

    @property
    def subjects(self) -> Sequence[Any]:
        return self._unwrapped.envs if isinstance(self._unwrapped, SyncVectorEnv) else [self._vector_env] * self._n

    @property
    def subject(self) -> Any:
        return self._vector_env

    def accept_device_arrays(self) -> bool:
        self._accepts_device_arrays = True
        return True

    def offer_rows(self, buffer: RowBuffer) -> None:
        """Make later steps write their results into the arrays of ``buffer``."""
        self._buffer = buffer
        buffer.steps.agent_id = self._agent_id

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._options, self.on_demand = None if options is None else dict(options), None
        obs, infos = self._begin(seeds)
        zeros = np.zeros(self._n, np.float32), np.zeros(self._n, np.bool_), np.zeros(self._n, np.bool_)
        steps = self._steps(obs, *zeros, infos)
        if self._buffer is None and not self.returns_new_arrays:
            steps.obs = copy_tree(steps.obs)  # because the next step may be written into a buffer, beside this one
        return {self.behavior: steps}

    def reset_on_demand(self, begins: Sequence[Begin]) -> Steps:
        self._options, self.on_demand = None, OnDemand(self._n, begins)
        self._to_park[:] = False
        if [len(group) for group in _with_equal_options(begins)] != [self._n]:
            self._begin([None] * self._n)  # each environment must have been reset before a reset_mask leaves it out
        return self.step({}, np.zeros(0, np.int64))

    def step(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Steps:
        """Step all environments and return their steps. Raises SpecMismatch for a bad result.

        ``rows`` is ignored, unless episodes begin on demand: then it has all environments that play, or none.
        """
        on_demand = self.on_demand
        if on_demand is not None:
            chosen, begins = on_demand.rows(rows)
            acting = np.array([row for row in chosen if row not in begins], np.intp)
            if not len(acting):
                return self._with_begun([], begins)
            if self._to_park.any():
                self._restarted(self._to_park)
            given = np.zeros(self._n, np.intp)  # the environments that rest take the first action
            given[acting] = np.arange(len(acting))
            action = take_rows(actions[self.behavior], given)
        else:
            action = actions[self.behavior]
        # A copy, because the environments may keep their actions, and these may lie in shared memory.
        is_plain = self._acts_plainly and action.__class__ is np.ndarray
        result = self._vector_env.step(action.copy() if is_plain else map_tree(batch, action))
        if self._converted is not None:
            result = self._converted(result)
        if result.__class__ is not tuple or len(result) != 5:
            what = "a tuple of 5 (obs, reward, terminated, truncated, info)"
            raise SpecMismatch("the result of step", what, describe_value(result))
        obs, reward, terminated, truncated, infos = result
        steps = self._steps(obs, reward, terminated, truncated, infos)
        ended = steps.terminated | steps.truncated
        if on_demand is not None:
            return self._with_begun([self._of_acting(on_demand, acting, steps, ended, infos)], begins)
        if len(ended.nonzero()[0]):  # any() is a Python function
            if self._mode == SAME_STEP:
                self._take_restarted(steps, ended, infos)
            else:
                self._reset_ended(steps, ended, infos)
        return {self.behavior: steps}

    # Episodes that begin on demand.

    def _of_acting(
        self, on_demand: OnDemand, acting: np.ndarray, steps: AgentSteps, ended: np.ndarray, infos: Info
    ) -> AgentSteps:
        """Return the rows of the environments at ``acting``. Those whose episode ended rest."""
        self._to_park = ended & (self._mode == DISABLED)
        if ended.any():
            if self._mode == SAME_STEP:
                self._take_restarted(steps, ended, infos)
            else:
                self._put_final(steps, take_rows(steps.obs, np.flatnonzero(ended)))
            steps.reset_info = [{} for _ in np.flatnonzero(ended)] if self._infos else None
        elif len(acting) == self._n:
            return steps
        steps = steps.take(acting)
        if len(places := np.flatnonzero(steps.ended)):
            steps.obs, steps.acting = with_rows(steps.obs, places, steps.final_obs), ~steps.ended
            for row in acting[places].tolist():
                on_demand.ended(row)
        return steps

    def _with_begun(self, parts: list[AgentSteps], begins: Mapping[int, Begin]) -> Steps:
        """Begin episodes, with one reset for all that have equal options. Return ``parts`` and the first rows."""
        for group in _with_equal_options(begins.values()):
            seeds: list[int | None] = [None] * self._n
            mask = np.zeros(self._n, np.bool_)
            for begin in group:
                mask[begin.row], seeds[begin.row] = True, begin.seed
            obs, info = self._restarted(mask, seeds, group[0].options)
            self._to_park &= ~mask
            first = AgentSteps.first(agent_id=self._agent_id[mask], obs=obs, info=info if self._infos else None)
            parts.append(first)
        if len(parts) > 1:
            steps = concat_steps(parts)
            parts = [steps.take(np.argsort(steps.agent_id))]
        return dict(zip([self.behavior], parts, strict=False))

    def close(self) -> None:
        self._vector_env.close()

    # Results of the VectorEnv.

    def _steps(
        self, obs: Tree, reward: Any, terminated: Any, truncated: Any, infos: Info, rows: np.ndarray | None = None
    ) -> AgentSteps:
        """Check the results of a step, write them into the offered buffer, and return the buffer's steps.

        Without a buffer, or with PyTorch or JAX observations to pass on, the returned steps may share arrays with the
        VectorEnv. ``rows``: indices of the environments (None: all). Raises SpecMismatch for arrays that do not fit.
        """
        n = self._n if rows is None else len(rows)
        plain = self._plain
        if plain is None or obs.__class__ is not np.ndarray or obs.dtype != plain[0] or obs.shape != (n, *plain[1]):
            obs = self._fitting(obs, "obs", n)
        is_kept = obs.__class__ is not np.ndarray and self._accepts_device_arrays and any(map(is_foreign, leaves(obs)))
        if self._check_values:
            for leaf, part, path in matched(self._spec, obs, "obs"):
                check_values(leaf, as_array(part), path)
        if reward.__class__ is not np.ndarray or reward.dtype.kind not in "fiu" or reward.shape != (n,):
            reward = fitting_array(ArraySpec((n,), np.float64), as_array(reward), "reward", self.casting)
        if self._check_values and not np.isfinite(reward).all():
            raise SpecMismatch("reward", "finite", "NaN or infinite in part")
        if reward.itemsize > 4 and not _all(np.abs(reward) <= LARGEST_REWARD):
            for number in reward.tolist():
                real_number(number, "reward")  # NaN and infinite numbers pass
        if terminated.__class__ is not np.ndarray or terminated.dtype != np.bool_ or terminated.shape != (n,):
            terminated = self._flags(terminated, "terminated", n)
        if truncated.__class__ is not np.ndarray or truncated.dtype != np.bool_ or truncated.shape != (n,):
            truncated = self._flags(truncated, "truncated", n)
        if self._buffer is None or is_kept:
            agent_id = self._agent_id if rows is None else self._agent_id[rows]
            steps = AgentSteps(agent_id, obs, reward.astype(np.float32, copy=False), terminated, truncated)
        else:
            steps = self._buffer.steps
            _copy_into(steps.obs, obs)
            steps.reward[:], steps.terminated[:], steps.truncated[:] = reward, terminated, truncated
            steps.final_obs = steps.reset_info = None
        steps.info = info_rows(infos, n) if self._infos else None
        return steps

    def _flags(self, value: Any, path: str, n: int) -> np.ndarray:
        return np.asarray(fitting_array(ArraySpec((n,), np.bool_), as_array(value), path, self.casting))

    def _fitting(self, obs: Tree, root: str, n: int) -> Tree:
        """Return ``obs`` as a tree of arrays ``[n, …]`` with the spec's dtypes. Raises SpecMismatch for a bad array."""
        columns = []
        for leaf, part, path in matched(self._spec, obs, root):
            if is_foreign(part) and self._accepts_device_arrays:
                columns.append(fitting_foreign(leaf, part, n, path))
            elif not leaf.is_object:
                part = as_numpy(part) if is_foreign(part) else part
                batched = ArraySpec((n, *leaf.shape), leaf.dtype)
                columns.append(np.asarray(fitting_array(batched, part, path, self.casting), leaf.dtype))
            elif not hasattr(part, "__len__") or len(part) != n:
                raise SpecMismatch(path, f"{n} objects", describe_value(part))
            else:
                columns.append(object_array(part))
        return build(self._spec, columns)

    # Ends of episodes.

    def _take_restarted(self, steps: AgentSteps, ended: np.ndarray, infos: Info) -> None:
        """Complete ``steps`` with the final observations that a VectorEnv in SAME_STEP mode returns in ``infos``."""
        numbers = np.flatnonzero(ended)
        name = next((name for name in _FINAL_OBS if name in infos), None)
        if name is None:
            raise SpecMismatch("infos['final_obs']", "there, since an episode ended in SAME_STEP mode", "missing")
        self._put_final(steps, self._final_rows(infos[name], numbers))
        if self._infos:
            final_info = info_rows(infos.get("final_info", {}), self._n)
            others = {key: value for key, value in infos.items() if key.removeprefix("_") not in _FINAL}
            after = info_rows(others, self._n)
            steps.reset_info = [after[number] for number in numbers]
            steps.info = [final_info[number] if ended[number] else after[number] for number in range(self._n)]

    def _final_rows(self, final_obs: Any, numbers: np.ndarray) -> Tree:
        if isinstance(final_obs, np.ndarray) and final_obs.dtype.kind == "O":  # of Gymnasium: an observation per row
            last = [final_obs[number] for number in numbers]
            return stack_rows(self._spec, last, ["final_obs"] * len(last), self.casting)
        return take_rows(self._fitting(final_obs, "final_obs", self._n), numbers)

    def _require_last(self, steps: AgentSteps, ended: np.ndarray, infos: Info) -> None:
        """Raise SpecMismatch if ``infos`` show that ``obs`` of an ended row is not the last one, but the next first."""
        for name in () if self._is_gymnasiums else _FINAL_OBS:  # whose environments may use the names for themselves
            numbers = np.flatnonzero(ended)
            try:
                final_obs = self._final_rows(infos[name], numbers)
            except (KeyError, SpecMismatch):  # what does not fit is no observation
                continue
            if not data_equivalence(*(map_tree(as_array, rows) for rows in (final_obs, take_rows(steps.obs, numbers)))):
                raise self._restarts_at_once(f"infos[{name!r}] differs from obs where an episode ended")

    def _restarts_at_once(self, evidence: str) -> SpecMismatch:
        """Return the error for a VectorEnv that, by ``evidence``, restarts in the step of the end, as in SAME_STEP."""
        mode = self._mode if declares_mode(self._vector_env) else "missing, which means NextStep"
        return SpecMismatch(
            "metadata['autoreset_mode']",
            "AutoresetMode.SAME_STEP, with the last observations in infos['final_obs'], if the next episode begins in "
            "the step of the end, else the mode that it has",
            f"{mode}, although {evidence}",
        )

    def _reset_ended(self, steps: AgentSteps, ended: np.ndarray, infos: Info) -> None:
        """Reset the environments that ``ended`` selects. Put their first and final observations into ``steps``."""
        self._require_last(steps, ended, infos)
        numbers = np.flatnonzero(ended)
        self._put_final(steps, take_rows(steps.obs, numbers))  # a copy, because the reset may write into the arrays
        is_buffered = self._buffer is not None and steps is self._buffer.steps
        if not is_buffered and not self.returns_new_arrays:  # the reset may write into the arrays
            steps.obs = copy_tree(steps.obs)
            steps.reward, steps.terminated = steps.reward.copy(), steps.terminated.copy()
            steps.truncated = steps.truncated.copy()
        first, reset_infos = self._restarted(ended)
        if is_buffered:
            _copy_into(steps.obs, first, numbers)
        else:
            steps.obs = with_rows(steps.obs, numbers, first)
        if self._infos:
            steps.reset_info = reset_infos

    def _put_final(self, steps: AgentSteps, final_obs: Tree) -> None:
        if self._buffer is None or steps is not self._buffer.steps:
            steps.final_obs = final_obs
        else:
            (column, *_) = leaves(final_obs) or [()]
            steps.final_obs = take_rows(self._buffer.final_obs, slice(len(column)))
            _copy_into(steps.final_obs, final_obs)

    # Calls of the VectorEnv, which EnvPool's group replaces by its own.

    def _begin(self, seeds: Sequence[int | None]) -> tuple[Tree, Info]:
        """Reset all environments, with seeds in the form that the VectorEnv takes. Return observations and infos."""
        seed: Any = seeds[0]
        if self._is_gymnasiums:
            seed = None if all(each is None for each in seeds) else list(seeds)
        elif _ALE in base_names(self._unwrapped) and None not in seeds:
            seed = np.array(seeds)
        options = None if self._options is None else dict(self._options)
        return self._reset(self._vector_env, seed=seed, options=options)  # type: ignore[no-any-return]

    def _restarted(
        self, chosen: np.ndarray, seed: Any = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Tree, list[Info]]:
        """Reset the environments that the mask ``chosen`` selects. Return their first observations and infos."""
        options = {**(self._options or {}), **(options or {}), "reset_mask": chosen}
        obs, infos = self._reset(self._vector_env, seed=seed, options=options)
        first = take_rows(self._fitting(obs, "obs", self._n), np.flatnonzero(chosen))
        return first, list(compress(info_rows(infos, self._n), chosen)) if self._infos else []

    # Questions.

    def call(
        self,
        name: str | Callable[..., Any],
        args: Sequence[Any],
        rows: Sequence[int],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Call the method or function ``name``, and return one result per row.

        With a SyncVectorEnv, the call is made on each sub-environment at ``rows``. With an AsyncVectorEnv, a method is
        called on all sub-environments. Otherwise one call is made, on the vector environment.
        """
        if isinstance(self._unwrapped, SyncVectorEnv):
            return super().call(name, args, rows, kwargs)
        if callable(name):
            result = name(self._vector_env, *args, **kwargs)
        elif isinstance(self._unwrapped, AsyncVectorEnv):
            result = self._vector_env.call(name, *args, **kwargs)
        else:
            result = attribute_of(self._vector_env, name)(*args, **kwargs)
        return self._by_row(result, rows)

    def get_attr(self, name: str, rows: Sequence[int]) -> list[Any]:
        if isinstance(self._unwrapped, AsyncVectorEnv):
            return self._by_row(self._vector_env.get_attr(name), rows)
        return super().get_attr(name, rows)

    def set_attr(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        if isinstance(self._unwrapped, AsyncVectorEnv):
            if len(rows) < self._n:
                raise UsageError("an AsyncVectorEnv sets an attribute in all of its environments: name all env_ids.")
            self._vector_env.set_attr(name, list(values))
        else:
            super().set_attr(name, values, rows)

    def render(self, rows: Sequence[int]) -> list[Any]:
        return self._by_row(snapshot(self._vector_env.render()), rows)

    def _by_row(self, result: Any, rows: Sequence[int]) -> list[Any]:
        """Return ``result[row]`` for each row, or ``result`` for each if it does not have one entry per environment."""
        if isinstance(result, list | tuple | np.ndarray) and len(result) == self._n:
            return [result[row] for row in rows]
        return [result] * len(rows)


def _with_equal_options(begins: Iterable[Begin]) -> list[list[Begin]]:
    return groups_of_equals(begins, lambda one, other: data_equivalence(one.options, other.options))


def mode_of(vector_env: Any) -> str:
    """Return the value of a VectorEnv's AutoresetMode, or NEXT_STEP if its metadata has none, as in Gymnasium 1.0.

    Raises UsageError for what is no AutoresetMode.
    """
    mode = vector_env.metadata["autoreset_mode"] if declares_mode(vector_env) else NEXT_STEP
    value = str(getattr(mode, "value", mode))
    if value not in (NEXT_STEP, SAME_STEP, DISABLED):
        raise UsageError(f"metadata['autoreset_mode'] is {mode!r}: declare a gymnasium.vector.AutoresetMode.")
    return value


def declares_mode(vector_env: Any) -> bool:
    """Return whether the metadata of a VectorEnv have an AutoresetMode."""
    return (getattr(vector_env, "metadata", None) or {}).get("autoreset_mode") is not None


def restarts_late(vector_env: Any) -> bool:
    """Return whether a VectorEnv resets only in the step after an episode's end, and has no usable ``reset_mask``."""
    unwrapped = getattr(vector_env, "unwrapped", vector_env)
    if mode_of(vector_env) != NEXT_STEP:
        return False
    if not declares_mode(vector_env):  # Gymnasium 1.0
        return True
    if isinstance(unwrapped, AsyncVectorEnv):  # without shared memory its processes reset a second time
        return not unwrapped.shared_memory
    return not isinstance(unwrapped, SyncVectorEnv) and _ALE not in base_names(unwrapped)


_ALE = "ale_py.vector_env.AtariVectorEnv"
_FINAL_OBS = ("final_obs", "final_observation")
"""Key of the last observations in infos, and the one of Gymnasium before 1.0, which some libraries have kept."""
_FINAL = (*_FINAL_OBS, "final_info")


def _copy_into(target: Tree, source: Tree, rows: Any = ...) -> None:
    if target.__class__ is np.ndarray:
        target[rows] = source
        return
    for column, part in zip(leaves(target), leaves_like(target, source), strict=True):
        column[rows] = part


def batch(column: Any) -> Any:
    """Copy an array of actions for a VectorEnv, objects into a tuple. Return PyTorch and JAX arrays unchanged."""
    if is_foreign(column):  # a copy already
        return column
    return tuple(column) if column.dtype.kind == "O" else column.copy()


def info_rows(infos: Info, n: int) -> list[Info]:
    """Split the infos of a VectorEnv, a dict of arrays, into ``n`` dicts, one per environment.

    A mask ``_key`` selects the sub-environments that have the key. Values without n entries are left out.
    """
    check_info(infos, "infos")
    rows: list[Info] = [{} for _ in range(n)]
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        is_nested = isinstance(value, dict)
        entries = info_rows(value, n) if is_nested else value
        mask = infos.get(f"_{key}")
        if not hasattr(entries, "__len__") or len(entries) != n:
            continue
        for number in range(n) if mask is None else np.flatnonzero(mask):
            rows[number][key] = entries[number] if is_nested else snapshot(entries[number])
    return rows
