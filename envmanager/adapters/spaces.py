"""Conversion of Gymnasium's spaces to trees of ArraySpec, and of rows of action arrays to elements of the spaces.

``row_reader`` inspects a space once and returns a function, which is called in each step.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from envmanager.adapters.rows import RowReader, compact_bound, read_array, read_dict, read_tuple
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.trees import Tree
from envmanager.errors import MissingExtra
from envmanager.importing import needed_by

try:
    with needed_by("envmanager.adapters", extra="gymnasium"):
        from gymnasium import spaces
except MissingExtra:  # then no environment declares a space, and observations and actions are objects
    _kinds = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple")
    spaces: Any = SimpleNamespace(**{kind: type(kind, (), {}) for kind in _kinds})  # type: ignore[no-redef]


def behavior_spec(observation_space: Any, action_space: Any) -> BehaviorSpec:
    """Return the BehaviorSpec of agents with the given observation space and action space."""
    return BehaviorSpec(to_spec(observation_space), to_spec(action_space))


@functools.singledispatch
def to_spec(_space: Any) -> Tree:
    """Convert a space to a tree of ArraySpec. Spaces without a fixed shape (Text, Graph, …) become object leaves."""
    return ArraySpec(dtype=object)


@to_spec.register(spaces.Box)
def _(space: Any) -> Tree:
    return ArraySpec(space.shape, space.dtype, compact_bound(space.low), compact_bound(space.high))


@to_spec.register(spaces.Discrete)
def _(space: Any) -> Tree:
    # Always int64: environments with a smaller dtype still return plain ints and int64.
    start = int(space.start)
    return ArraySpec((), np.int64, start, start + int(space.n) - 1)


@to_spec.register(spaces.MultiDiscrete)
def _(space: Any) -> Tree:
    maximum = space.start + (space.nvec - 1)
    return ArraySpec(space.shape, space.dtype, compact_bound(space.start), compact_bound(maximum))


@to_spec.register(spaces.MultiBinary)
def _(space: Any) -> Tree:
    return ArraySpec(space.shape, space.dtype, 0, 1)


@to_spec.register(spaces.Dict)
def _(space: Any) -> Tree:
    return {key: to_spec(child) for key, child in space.spaces.items()}


@to_spec.register(spaces.Tuple)
def _(space: Any) -> Tree:
    return tuple(to_spec(child) for child in space.spaces)


@functools.singledispatch
def row_reader(_space: Any) -> RowReader:
    """Return a function ``(batch, row)`` that returns one agent's action: an element of the space, never a view."""
    return operator.getitem


@row_reader.register(spaces.Box)
@row_reader.register(spaces.MultiDiscrete)
@row_reader.register(spaces.MultiBinary)
def _(_: Any) -> RowReader:
    return read_array


@row_reader.register(spaces.Discrete)
def _(space: Any) -> RowReader:
    dtype = np.dtype(space.dtype)
    if dtype == np.int64:
        return operator.getitem
    return lambda batch, row: dtype.type(batch[row])  # an int64 is not in an int8 space


@row_reader.register(spaces.Dict)
def _(space: Any) -> RowReader:
    return read_dict({key: row_reader(child) for key, child in space.spaces.items()})


@row_reader.register(spaces.Tuple)
def _(space: Any) -> RowReader:
    return read_tuple([row_reader(child) for child in space.spaces])


def rows_reader(space: Any) -> Callable[[Tree, int], Iterable[Any]]:
    """Return a function ``(batch, n)`` that returns the actions of n agents, each as an element of the space."""
    read = row_reader(space)
    return lambda batch, n: [read(batch, row) for row in range(n)]


_FEW = 1024
"""Size of the largest Discrete space for which ``known_actions`` makes the scalars of all actions in advance."""


def known_actions(space: Any) -> Callable[[int], Any] | None:
    """Return a function that maps an int action to its NumPy scalar, or None if the space is not a small Discrete."""
    if not isinstance(space, spaces.Discrete) or space.n > _FEW:
        return None
    # Making a scalar takes four times as long as this lookup.
    dtype, start = np.dtype(space.dtype).type, int(space.start)
    return {action: dtype(action) for action in range(start, start + int(space.n))}.__getitem__
