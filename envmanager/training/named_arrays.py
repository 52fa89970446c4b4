"""Functions for dicts that map names to arrays, such as the arrays of a checkpoint. They do not need PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from envmanager.data.specs import describe_value


def named(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``arrays`` with ``part`` and a dot before each name: in part ``"a"``, ``"bias"`` becomes ``"a.bias"``."""
    return {f"{part}.{name}": array for name, array in arrays.items()}


def of_part(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with ``part`` and a dot. The returned names do not have this prefix."""
    return {name[len(part) + 1 :]: arrays[name] for name in arrays if name.startswith(f"{part}.")}


def copy_into(place: np.ndarray, arrays: Mapping[str, np.ndarray], name: str) -> None:
    """Copy ``arrays[name]`` into ``place``. Raises KeyError if absent, ValueError if shape or dtype kind differ."""
    array = arrays[name]
    if array.shape != place.shape or array.dtype.kind != place.dtype.kind:
        raise ValueError(f"{name} should be {describe_value(place)}, but is {describe_value(array)}")
    place[...] = array
