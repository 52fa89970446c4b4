"""Gymnasium spaces of a manager's environments, and conversion of arrays to elements of the batched spaces.

An environment's own spaces are preferred, because a spec does not distinguish a Discrete from a Box with one integer,
or a Text from a Graph. If environment 0 has no spaces that match the spec, the spaces are derived from the spec.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from envmanager.adapters.rows import RowReader
from envmanager.adapters.spaces import behavior_spec, row_reader
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.trees import Tree
from envmanager.env_manager import EnvManager
from envmanager.errors import EnvRaised, UsageError
from envmanager.importing import needed_by

with needed_by("envmanager.interop", extra="gymnasium"):
    from gymnasium import Space, spaces

BatchMaker = Callable[[Tree], Any]
"""Function from a tree of arrays ``[n, …]`` to an element of the batched space."""


def spaces_of(manager: EnvManager, spec: BehaviorSpec) -> tuple[Any, Any]:
    """Return environment 0's observation and action spaces if they match ``spec``, else spaces made from ``spec``."""
    try:
        own = [manager.get_attr(name, env_ids=[0])[0] for name in ("observation_space", "action_space")]
    except EnvRaised:  # not a Gymnasium environment
        own = []
    if own and all(isinstance(space, Space) for space in own) and behavior_spec(*own) == spec:
        return own[0], own[1]
    return to_space(spec.observation), to_space(spec.action)


def to_space(spec: Tree) -> Any:
    """Convert a tree of ArraySpec to a Gymnasium space. Raises UsageError for a spec of Python objects."""
    if isinstance(spec, dict):
        return spaces.Dict({key: to_space(child) for key, child in spec.items()})
    if isinstance(spec, tuple):
        return spaces.Tuple([to_space(child) for child in spec])
    if spec.is_object:
        raise UsageError(
            "no Gymnasium space can be derived from a spec of Python objects: give the environment the attributes "
            "observation_space and action_space."
        )
    if spec.shape == () and spec.dtype == np.int64 and spec.whole_bounds is not None:
        low, high = spec.whole_bounds
        return spaces.Discrete(high - low + 1, start=low)
    return spaces.Box(*_bounds(spec), shape=spec.shape, dtype=spec.dtype.type)


def _bounds(spec: ArraySpec) -> tuple[Any, Any]:
    kind = spec.dtype.kind
    widest = (False, True) if kind == "b" else (-np.inf, np.inf)
    if kind in "iu":
        limits = np.iinfo(spec.dtype)
        widest = (limits.min, limits.max)
    given = zip((spec.minimum, spec.maximum), widest, strict=True)
    low, high = (np.full(spec.shape, default if bound is None else bound, spec.dtype) for bound, default in given)
    return low, high


def final_reader(space: Any) -> RowReader:
    """Return a function ``(obs, row)`` that converts one row of batched observations to an element of ``space``.

    For a Discrete, the element is a Python int.
    """
    return _whole_number if isinstance(space, spaces.Discrete) else row_reader(space)


def _whole_number(column: Tree, row: int) -> int:
    return int(column[row])


@functools.singledispatch
def batch_maker(_space: Any) -> BatchMaker:
    """Return a function that makes a Gymnasium batch from arrays ``[n, …]``. The default is a tuple of n elements."""
    return tuple


@batch_maker.register(spaces.Box)
@batch_maker.register(spaces.MultiDiscrete)
@batch_maker.register(spaces.MultiBinary)
def _(_: Any) -> BatchMaker:
    return lambda column: column


@batch_maker.register(spaces.Discrete)
def _(space: Any) -> BatchMaker:
    dtype = np.dtype(space.dtype)  # columns of every Discrete are int64
    return lambda column: column.astype(dtype, copy=False)


@batch_maker.register(spaces.Dict)
def _(space: Any) -> BatchMaker:
    makers = {key: batch_maker(child) for key, child in space.spaces.items()}
    return lambda tree: {key: make(tree[key]) for key, make in makers.items()}


@batch_maker.register(spaces.Tuple)
def _(space: Any) -> BatchMaker:
    makers = [batch_maker(child) for child in space.spaces]
    return lambda tree: tuple(make(part) for make, part in zip(makers, tree, strict=True))
