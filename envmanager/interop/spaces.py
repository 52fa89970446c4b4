"""Gymnasium spaces of a manager's environments, and conversion of arrays to elements of the batched spaces.

An environment's own spaces are preferred, because a spec does not distinguish a Discrete from a Box with one integer,
or a Text from a Graph. If environment 0 has no spaces that match the spec, the spaces are derived from the spec.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envmanager.adapters.rows import RowReader
from envmanager.adapters.spaces import behavior_spec, row_reader
from envmanager.data.specs import BehaviorSpec
from envmanager.data.trees import Tree
from envmanager.env_manager import EnvManager
from envmanager.errors import EnvRaised, UsageError
from envmanager.importing import needed_by

with needed_by("envmanager.interop", extra="gymnasium"):
    from gymnasium import Space, spaces


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
    widest: tuple[Any, Any] = (False, True) if spec.dtype.kind == "b" else (-np.inf, np.inf)
    if spec.dtype.kind in "iu":
        limits = np.iinfo(spec.dtype)
        widest = (limits.min, limits.max)
    given = zip((spec.minimum, spec.maximum), widest, strict=True)
    bounds = [np.full(spec.shape, default if bound is None else bound, spec.dtype) for bound, default in given]
    return spaces.Box(*bounds, shape=spec.shape, dtype=spec.dtype.type)


def final_reader(space: Any) -> RowReader:
    """Return a function ``(obs, row)`` that converts one row of batched observations to an element of ``space``.

    For a Discrete, the element is a Python int.
    """
    if isinstance(space, spaces.Discrete):
        return lambda column, row: int(column[row])
    return row_reader(space)


def batch_of(space: Any, column: Tree) -> Any:
    """Convert a tree of arrays ``[n, …]`` to a Gymnasium batch: an element of the batched ``space``.

    The batch of a space without arrays, such as Text or Graph, is a tuple of n elements.
    """
    if isinstance(space, spaces.Dict):
        return {key: batch_of(child, column[key]) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(batch_of(child, part) for child, part in zip(space.spaces, column, strict=True))
    if isinstance(space, spaces.Discrete):
        return column.astype(space.dtype, copy=False)  # columns of every Discrete are int64
    is_array = isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
    return column if is_array else tuple(column)
