"""Adapter for a worker's Gymnasium environments if all have equal spaces. Their steps are rows of the same arrays.

Speed matters, because this module steps most users' environments. Functions that read actions, and the expected dtypes
and shapes, are prepared once rather than in each step, and views of a buffer's rows are reused.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CoroutineType, MappingProxyType
from typing import Any

import numpy as np

from envmanager.adapters.resets import Resetter
from envmanager.adapters.rows import (
    FLAGS,
    LARGEST_REWARD,
    REAL_NUMBERS,
    check_info,
    finite_number,
    fitting_array,
    flag,
    real_number,
)
from envmanager.adapters.spaces import behavior_spec, known_actions, row_reader
from envmanager.data.casting import Casting
from envmanager.data.specs import ArraySpec, BehaviorSpecs, SpecMismatch, check_structure, check_values, describe_value
from envmanager.data.steps import Begin, RowBuffer, Steps, only_agents
from envmanager.data.trees import Tree, leaves, leaves_like, paths, snapshot, take_rows
from envmanager.environment import OnDemand, RowGroup, check_repeated, repeated

ObsWriter = Callable[[Sequence[Any], Any, Casting], None]
"""Function ``(views, obs, casting)`` that checks an observation and copies its parts into the views of one row."""


class GymnasiumEnvironment(RowGroup):
    """A group of Gymnasium environments with equal spaces, each with one agent of the behavior ``"default"``.

    A step of all environments is written into the buffer offered last or, without one, into the group's own arrays.
    Later steps overwrite them. An environment whose episode ends is reset in the same step, without a seed and with
    the options of the last ``reset``. Infos and objects (such as graphs) are snapshots.
    """

    behavior_specs: BehaviorSpecs = MappingProxyType({})
    can_rest = begins_on_demand = begins_when_ready = takes_actions = True

    def __init__(
        self, envs: Sequence[Any], env_ids: Sequence[int] = (0,), *, infos: bool = False, check_values: bool = False
    ) -> None:
        self._environments = list(envs)
        self.env_ids = tuple(env_ids)
        self._all: Sequence[int] = range(len(self._environments))
        self._resets = [Resetter(env) for env in self._environments]
        self.casting: Casting = Casting(strict=check_values)
        self._number = finite_number if check_values else real_number
        self._plain_reward = None if check_values else float
        self._plain_rewards = frozenset() if check_values else REAL_NUMBERS
        first = self._environments[0]
        spec = behavior_spec(first.observation_space, first.action_space)
        self._spec = spec
        self._infos = infos or spec.has_objects  # which are pickled anyway
        self.behavior_specs = {self.behavior: spec}
        read = row_reader(first.action_space)
        self._read_actions: Callable[[Tree, int], Iterable[Any]] = lambda batch, n: [read(batch, i) for i in range(n)]
        self._known_actions = known_actions(first.action_space)
        self._write_obs = _obs_writer(spec.observation, check_numbers=check_values)
        only = spec.observation
        self._is_plain = (
            not check_values and isinstance(only, ArraySpec) and only.dtype.kind in "biuf" and only.dtype.isnative
        )
        self._agent_id = only_agents(self.env_ids)
        self._options: dict[str, Any] | None = None
        self._views = self._new_views(self._all)
        self._scratch: _BufferViews | None = None

    @classmethod
    def wrap(cls, env: Any) -> GymnasiumEnvironment:
        """Return a group of the single environment ``env``. The steps include infos, which a manager may discard."""
        return cls([env], infos=True)

    @property
    def subjects(self) -> Sequence[Any]:
        return self._environments

    @property
    def max_agents(self) -> Mapping[str, int]:
        return {self.behavior: len(self._environments)}

    @property
    def wrapped(self) -> Any:
        return self._environments[0]

    def action_of(self, actions: Mapping[str, Tree]) -> Any:
        (action,) = self.actions_of(actions)
        return action

    def steps_of(self, result: Any) -> Steps:
        return self.joined([result])

    def offer_rows(self, buffer: RowBuffer) -> None:
        """Make later steps write into ``buffer``. Views of the buffer's rows are kept in ``buffer.views`` for reuse."""
        views = buffer.views
        if views is None or views.agent_id is not self._agent_id:
            views = buffer.views = _BufferViews(buffer, self._agent_id, self._is_plain)
            buffer.steps.agent_id[:] = self._agent_id
        self._views = views

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._options = None if options is None else dict(options)
        if self.on_demand is not None:
            self.on_demand, self.rests = None, False
        infos: list[Any] = []
        steps = self._views.steps
        for column in (steps.reward, steps.terminated, steps.truncated):
            column.fill(0)
        for row in self._each(self._all):
            obs, info = self._restart(row, seeds[row], self._options)
            self._write_obs(self._views.obs[row], obs, self.casting)
            infos.append(snapshot(info) if self._infos else None)
        steps.final_obs = steps.reset_info = None
        steps.info = infos if self._infos else None
        return {self.behavior: steps}

    def reset_on_demand(self, begins: Sequence[Begin]) -> Steps:
        self.on_demand, self.rests = OnDemand(len(self._all), begins), True
        return self.joined((), np.zeros(0, np.int64))

    def actions_of(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Iterable[Any]:
        return self._read_actions(actions[self.behavior], len(self._all if rows is None else rows))

    def joined(self, results: Iterable[Any], rows: np.ndarray | None = None) -> Steps:
        chosen, begins, out = self._to_step(rows)
        given = [result for _, result in zip(range(len(chosen) - len(begins)), results, strict=True)]
        return self._one_by_one(chosen, begins, out, iter(given))

    def step(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> Steps:
        """Step the environments at indices ``rows`` (None: all). Row i of actions and steps is for the i-th of them.

        The loop is for steps of all environments, and takes the usual results itself, because a call for each would
        cost cheap environments a tenth of their speed.
        """
        out, envs, on_demand = self._views, self._environments, self.on_demand
        if rows is not None or (on_demand is not None and (on_demand.now or False in on_demand.plays)):
            chosen, begins, out = self._to_step(rows)
            if begins or out is not self._views:
                stepped = [envs[row] for row in chosen if row not in begins]
                own = self._read_actions(actions[self.behavior], len(stepped)) if stepped else ()
                # Not a generator, in which a StopIteration of an environment would be another error.
                return self._one_by_one(chosen, begins, out, map(lambda env, action: env.step(action), stepped, own))
        plain_obs, plain_class, rewards = out.plain_obs, None if self._infos else out.plain_class, out.rewards
        plain_reward, plain_rewards = self._plain_reward, self._plain_rewards
        least, most = -LARGEST_REWARD, LARGEST_REWARD
        out.terminated[:] = out.truncated[:] = out.no_flags  # cleared, because other steps may have been copied here
        out.infos, out.ended, out.resting = [], [], []
        row = 0
        try:
            given, known = actions[self.behavior], self._known_actions
            given = self._read_actions(given, len(envs)) if known is None else map(known, given.tolist())
            for row, env, action, place in zip(out.rows, envs, given, out.places):  # noqa: B905  (strict is slow)
                result = env.step(action)
                try:
                    obs, reward, terminated, truncated, info = result
                except (TypeError, ValueError) as error:
                    raise _not_five(result) from error
                if (
                    obs.__class__ is plain_class
                    and terminated is False
                    and truncated is False
                    and info.__class__ is dict
                    and (reward.__class__ is plain_reward or reward.__class__ in plain_rewards)
                    and least <= reward <= most  # type: ignore[operator]
                ):
                    try:
                        plain_obs[place] = obs
                        rewards[row] = reward
                        continue
                    except ValueError:  # an observation of another dtype or shape, as probably in later steps
                        plain_class = out.plain_class = None
                self._take(out, row, row, result)
        except BaseException:
            self.current_env_id = self.env_ids[row]
            raise
        if out.ended or self._infos:
            return self._taken(out)
        steps = out.steps
        steps.final_obs = steps.info = steps.reset_info = None
        return {self.behavior: steps}

    def _to_step(self, rows: np.ndarray | None) -> tuple[Sequence[int], dict[int, Any], _BufferViews]:
        """Return the rows of a step of ``rows``, what begins there, and the views of the rows of the result.

        What begins is a Begin, or the result of the last of its actions.
        """
        chosen: Sequence[int] = self._all if rows is None else rows.tolist()
        begins: dict[int, Any] = {}
        on_demand = self.on_demand
        if on_demand is not None and (rows is not None or on_demand.now or False in on_demand.plays):
            chosen, begins = on_demand.rows(rows)
            for row in self._each([row for row, begin in begins.items() if begin.actions is not None]):
                begins[row] = self._after_actions(begins[row])
            if self.not_begun:
                chosen = [row for row in chosen if on_demand.plays[row]]
                begins = {row: begin for row, begin in begins.items() if begin is not None}
        is_part = len(chosen) < len(self._all) or (on_demand is None and rows is not None)
        return chosen, begins, self._new_views(chosen) if is_part else self._views

    def _one_by_one(
        self, chosen: Sequence[int], begins: Mapping[int, Any], out: _BufferViews, results: Iterator[Any]
    ) -> Steps:
        """Take a result of each environment at rows ``chosen``: of ``begins``, else the next one of ``results``."""
        out.terminated[:] = out.truncated[:] = out.no_flags
        out.infos, out.ended, out.resting = [], [], []
        place = 0
        try:
            for place, row in enumerate(chosen):
                result = begins[row] if row in begins else next(results)
                if result.__class__ is Begin:
                    obs, info = self._restart(row, result.seed, result.options)
                    result = obs, 0.0, False, False, info
                self._take(out, place, row, result)
        except BaseException:
            if chosen:
                self.current_env_id = self.env_ids[chosen[place]]
            raise
        return self._taken(out)

    def _take(self, out: _BufferViews, place: int, row: int, result: Any) -> None:
        """Check the result of a step of the environment at ``row``, and write it to ``place``. Restart it at an end."""
        try:
            obs, reward, terminated, truncated, info = result
        except (TypeError, ValueError) as error:
            raise _not_five(result) from error
        if reward.__class__ is not self._plain_reward and reward.__class__ not in self._plain_rewards:
            reward = self._number(reward, "reward", self.casting)
        elif not -LARGEST_REWARD <= reward <= LARGEST_REWARD:  # type: ignore[operator]
            reward = real_number(reward, "reward")  # NaN and infinite numbers pass
        out.rewards[place] = reward
        if info.__class__ is not dict:
            check_info(info, "info")
        if self._infos:
            out.infos.append(snapshot(info))  # before a reset, which may change it
        if (terminated is not False or truncated is not False) and self._has_ended(out, place, terminated, truncated):
            self._write_obs(out.final_obs[len(out.ended)], obs, self.casting)
            if not self.rests:
                obs, info = self._restart(row, None, self._options)
            elif self.on_demand is not None and (begin := self.on_demand.ended(row)) is not None:
                obs, info = self._restart(begin.row, begin.seed, begin.options)
            else:
                info = {}
                out.resting.append(place)
            out.ended.append(snapshot(info) if self._infos else None)
        self._write_obs(out.obs[place], obs, self.casting)

    def _taken(self, out: _BufferViews) -> Steps:
        """Return the steps whose rows have been written."""
        steps = out.steps
        steps.final_obs = steps.info = steps.reset_info = None
        if self._infos:
            steps.info, steps.reset_info = out.infos, out.ended or None
        if out.ended:
            steps.final_obs = take_rows(out.all_final_obs, slice(len(out.ended)))
            if out.resting:
                steps = copy.copy(steps)  # later steps reuse the other, and may have no row that rests
                steps.acting = np.isin(out.rows, out.resting, invert=True)
        return {self.behavior: steps}

    def _after_actions(self, begin: Begin) -> Any:
        """Begin an episode and take its actions. Return what stands for its first step, None if it could not begin."""
        env, read, step, n = self._environments[begin.row], self._known_actions, 0, begin.n_repeated
        own: Any = (begin.actions or {}).get(self.behavior, ())
        rewards: list[Any] = []
        calls = self._calls_of(begin)
        try:
            repeated(calls, -1, None)
            obs, info = repeated(calls, 0, self._restart(begin.row, begin.seed, begin.options))
            given = () if not n else self._read_actions(own, n) if read is None else map(read, list(own))
            for step, action in enumerate(given, 1):
                obs, reward, terminated, truncated, info = env.step(action)
                rewards.append(reward)
                if (terminated is not False or truncated is not False) and (
                    flag(terminated, "terminated", self.casting) or flag(truncated, "truncated", self.casting)
                ):
                    return self._could_not_begin(begin, step, None)
                if calls:
                    obs, info = repeated(calls, step, (obs, info))
            check_repeated(calls)
            check_info(info, "info")
            if self._scratch is None:
                self._scratch = self._new_views([0])
            self._write_obs(self._scratch.obs[0], obs, self.casting)  # raises if it does not fit
            self._has_repeated(begin, rewards)
        except Exception as error:
            return self._could_not_begin(begin, step, error)
        return obs, 0.0, False, False, info

    def _restart(self, row: int, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Any, Any]:
        # The options are copied, because Gymnasium's vector environments remove keys from them.
        options = None if options is None else dict(options)
        result = self._resets[row](self._environments[row], seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            old = "" if isinstance(result, tuple) else " (as in gym before 0.26: return an info dict as well)"
            got = describe_value(result) + (_awaited_elsewhere(result) or old)
            raise SpecMismatch("the result of reset", "a tuple of 2 (obs, info)", got)
        if result[1].__class__ is not dict:
            check_info(result[1], "info of reset")
        return result

    def _has_ended(self, out: _BufferViews, row: int, terminated: Any, truncated: Any) -> bool:
        """Write the flags to ``row`` of ``out``. Return whether either is true. Raises SpecMismatch for a bad flag."""
        if terminated.__class__ not in FLAGS or truncated.__class__ not in FLAGS:
            terminated = flag(terminated, "terminated", self.casting)
            truncated = flag(truncated, "truncated", self.casting)
        if terminated:
            out.terminated[row] = True
        if truncated:
            out.truncated[row] = True
        return bool(terminated or truncated)

    def _new_views(self, chosen: Sequence[int]) -> _BufferViews:
        agent_id = self._agent_id[list(chosen)]
        return _BufferViews(RowBuffer.empty(self._spec.observation, agent_id), agent_id, self._is_plain)


class _BufferViews:
    """Views of the rows of a RowBuffer, made once and reused, because making views in each step is slow."""

    def __init__(self, buffer: RowBuffer, agent_id: np.ndarray, is_plain: bool) -> None:
        """Make the views. ``is_plain``: whether an observation is one array of numbers whose values need no check."""
        n, steps = len(agent_id), buffer.steps
        self.agent_id = agent_id
        self.steps = steps
        self.all_final_obs = buffer.final_obs
        self.rows = range(n)
        self.obs = _row_views(steps.obs, n)
        self.final_obs = _row_views(buffer.final_obs, n)
        # Assigning to a memoryview is faster than to an array, and checks the class, dtype and shape of the value.
        self.rewards: Any = steps.reward.data
        self.terminated: Any = steps.terminated.data
        self.truncated: Any = steps.truncated.data
        self.no_flags = np.zeros(n, np.bool_).data
        self.infos: list[Any] = []
        self.ended: list[Any] = []
        """Reset infos of the environments whose episode ended, in the order of ``final_obs``."""
        self.resting: list[int] = []
        """Rows of the environments that rest after their episode ended."""
        self.plain_obs: Any = None
        """Flat memoryview of all rows if observations are plain and 1-D, else None. ``places`` has each row's slice."""
        self.plain_class: type | None = None
        """Class of observations to copy through ``plain_obs``: ``np.ndarray``, or None if ``plain_obs`` is not used."""
        self.places: Sequence[Any] = self.rows
        if is_plain and steps.obs.ndim == 2 and steps.obs.flags.c_contiguous:
            size = steps.obs.shape[1]
            self.plain_obs, self.plain_class = steps.obs.reshape(-1).data, np.ndarray
            self.places = [slice(row * size, (row + 1) * size) for row in self.rows]


class _ObjectRow:
    """A row of an object array. Unlike a NumPy view, it stores an assigned list as one object."""

    def __init__(self, column: np.ndarray, row: int) -> None:
        self.column, self.row = column, row

    def __setitem__(self, _: Any, value: Any) -> None:
        self.column[self.row] = value


def _row_views(tree: Tree, n: int) -> list[list[Any]]:
    """Return, for each of ``n`` rows, a list with one view into each array of ``tree``."""
    columns = leaves(tree)
    return [[_ObjectRow(c, row) if c.dtype.kind == "O" else c[row, ...] for c in columns] for row in range(n)]


def _obs_writer(spec: Tree, *, check_numbers: bool) -> ObsWriter:
    if isinstance(spec, ArraySpec):
        return _leaf_writer(spec, "obs", check_numbers)
    writers = [
        _leaf_writer(leaf, path, check_numbers) for leaf, path in zip(leaves(spec), paths(spec, "obs"), strict=True)
    ]

    def write(views: Sequence[Any], obs: Any, casting: Casting) -> None:
        check_structure(spec, obs, "obs")
        for writer, view, part in zip(writers, views, leaves_like(spec, obs), strict=True):
            writer((view,), part, casting)

    return write


_SHORT = 32
"""Length up to which a sum in Python finds infinite or NaN floats in an observation faster than NumPy does."""


def _leaf_writer(spec: ArraySpec, path: str, check_numbers: bool) -> ObsWriter:
    dtype, shape, array_class = spec.dtype, spec.shape, np.ndarray
    is_short = dtype.kind == "f" and len(shape) == 1 and shape[0] <= _SHORT and not check_numbers

    def write(views: Sequence[Any], obs: Any, casting: Casting) -> None:
        if obs.__class__ is not array_class or obs.dtype is not dtype or obs.shape != shape:
            is_float = obs.__class__ is array_class and obs.dtype.kind == "f" and obs.shape == shape
            if is_float and is_short and not casting.strict and casting.on_cast is None:
                try:
                    views[0][...] = obs
                    if math.isfinite(sum(views[0].tolist())):  # all numbers are finite after rounding
                        return
                except (FloatingPointError, RuntimeWarning):  # if NumPy is set to raise them
                    pass
            obs = fitting_array(spec, obs, path, casting)
        if check_numbers:
            check_values(spec, obs, path)
        views[0][...] = obs

    return write


def _not_five(result: Any) -> SpecMismatch:
    """Return the SpecMismatch to raise for a ``result`` of ``step`` that is not a tuple of five."""
    got = describe_value(result) + _awaited_elsewhere(result)
    if isinstance(result, tuple) and len(result) == 4:
        got += " (as in gym before 0.26: say `terminated, truncated` instead of `done`)"
    return SpecMismatch("the result of step", "a tuple of 5 (obs, reward, terminated, truncated, info)", got)


def _awaited_elsewhere(result: Any) -> str:
    """Return advice for a coroutine, which is closed, since no code awaits it. Empty for any other ``result``."""
    if not isinstance(result, CoroutineType):
        return ""
    result.close()
    return " (environments whose methods are coroutines run with kind: asyncio, AsyncioEnvManager)"
