"""Conversion of Gymnasium's spaces to trees of ArraySpec, and of rows of action arrays to elements of the spaces.

``row_reader`` inspects a space once and returns a function, which is called in each step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
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


def to_spec(space: Any) -> Tree:
    """Convert a space to a tree of ArraySpec. Spaces without a fixed shape (Text, Graph, …) become object leaves."""
    if isinstance(space, spaces.Box):
        return ArraySpec(space.shape, space.dtype, compact_bound(space.low), compact_bound(space.high))
    if isinstance(space, spaces.Discrete):
        # Always int64: environments with a smaller dtype still return plain ints and int64.
        start = int(space.start)
        return ArraySpec((), np.int64, start, start + int(space.n) - 1)
    if isinstance(space, spaces.MultiDiscrete):
        maximum = space.start + (space.nvec - 1)
        return ArraySpec(space.shape, space.dtype, compact_bound(space.start), compact_bound(maximum))
    if isinstance(space, spaces.MultiBinary):
        return ArraySpec(space.shape, space.dtype, 0, 1)
    if isinstance(space, spaces.Dict):
        return {key: to_spec(child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(to_spec(child) for child in space.spaces)
    return ArraySpec(dtype=object)


def row_reader(space: Any) -> RowReader:
    """Return a function ``(batch, row)`` that returns one agent's action: an element of the space, never a view."""
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return read_array
    if isinstance(space, spaces.Discrete) and space.dtype != np.int64:
        dtype = np.dtype(space.dtype)
        return lambda batch, row: dtype.type(batch[row])  # an int64 is not in an int8 space
    if isinstance(space, spaces.Dict):
        return read_dict({key: row_reader(child) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return read_tuple([row_reader(child) for child in space.spaces])
    return operator.getitem


_FEW = 1024
"""Size of the largest Discrete space for which ``known_actions`` makes the scalars of all actions in advance."""


def known_actions(space: Any) -> Callable[[int], Any] | None:
    """Return a function that maps an int action to its NumPy scalar, or None if the space is not a small Discrete."""
    if not isinstance(space, spaces.Discrete) or space.n > _FEW:
        return None
    # Making a scalar takes four times as long as this lookup.
    dtype, start = np.dtype(space.dtype).type, int(space.start)
    return {action: dtype(action) for action in range(start, start + int(space.n))}.__getitem__
