"""Functions that copy observations to rows of arrays, check rewards and flags, and read actions. Adapters use them.

A value that does not fit its row (0.5 in a row of integers, a wrong shape) raises SpecMismatch, which names
the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from envmanager.data.casting import Casting
from envmanager.data.specs import ArraySpec, SpecMismatch, describe_value, matched
from envmanager.data.trees import Tree, build, leaves, snapshot

REAL_NUMBERS: frozenset[type] = frozenset({float, int, np.float64, np.float32, np.int64, np.int32, np.int16, np.int8})
"""Classes of most rewards: real numbers, which can be compared with ``LARGEST_REWARD``."""

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Magnitude of the largest reward. The columns of rewards are float32, in which larger numbers become infinite."""

_SEVERAL_REWARDS = (
    " (weigh several goals, as mo_gymnasium's LinearReward does; let players be a PettingZoo ParallelEnv)"
)

FLAGS: frozenset[type] = frozenset({bool, np.bool_})

_FLAG = ArraySpec((), np.bool_)
_FLOAT = np.dtype(np.float64)
_KINDS_OF_PYTHON_NUMBERS = {bool: "b", int: "iu", float: "f"}

_T = TypeVar("_T")

RowReader = Callable[[Tree, int], Any]
"""Function ``(batch, row)`` that returns one agent's action: an element of the action space, never a view."""


def fitting_array(spec: ArraySpec, value: Any, path: str, casting: Casting | None = None) -> Any:
    """Return ``value``, cast if necessary, for assignment to an array of the spec's dtype and shape.

    Arrays whose dtype NumPy casts safely need no cast, nor do Python numbers that a scalar spec of their kind can hold.
    Other numbers and arrays of the right shape are cast if ``casting`` allows it. Raises SpecMismatch for other values.
    """
    if spec.is_object:
        return snapshot(value)
    if value.__class__ is np.ndarray and value.dtype == spec.dtype and value.shape == spec.shape:
        return value
    kinds = _KINDS_OF_PYTHON_NUMBERS.get(value.__class__)
    if kinds is not None:
        if spec.shape == () and spec.dtype.kind in kinds:
            limits = np.iinfo(spec.dtype) if spec.dtype.kind in "iu" else None
            if limits is None or limits.min <= value <= limits.max:
                return value
    elif not isinstance(value, np.ndarray | np.generic) and not hasattr(value, "__array__"):
        raise SpecMismatch(path, str(spec), describe_value(value))
    array = np.asarray(value)
    given = array if kinds is None else value
    if array.shape == spec.shape:
        # To cast a time to another unit is never safe, although NumPy says so, because it can overflow.
        is_time = spec.dtype.kind in "mM"
        if kinds is None and (
            array.dtype == spec.dtype or (not is_time and np.can_cast(array.dtype, spec.dtype, "safe"))
        ):
            return array
        cast = None if casting is None else casting.cast(given, spec.dtype, path, spec)
        if cast is not None:
            return cast
    raise SpecMismatch(path, str(spec), describe_value(given))


def real_number(value: Any, path: str, casting: Casting | None = None) -> float:
    """Return ``value`` as a float. Raises SpecMismatch unless it is a real number or a bool that ``casting`` allows.

    Infinite numbers and NaN are returned, but finite numbers that would become infinite in float32 are refused.
    """
    given = value
    if type(value) not in REAL_NUMBERS:
        array = np.asarray(value) if isinstance(value, int | float) or hasattr(value, "__array__") else None
        if array is not None and array.shape == () and array.dtype.kind == "b" and casting is not None:
            array = casting.cast(value, _FLOAT, path, "a real number")
        if array is None or array.shape != () or array.dtype.kind not in "iuf":
            several = _SEVERAL_REWARDS if isinstance(value, list | tuple | np.ndarray) else ""
            raise SpecMismatch(path, "a real number", describe_value(value) + several)
        given = array[()]
    number = given if isinstance(given, int) else float(given)
    if not -LARGEST_REWARD <= number <= LARGEST_REWARD and (isinstance(given, int) or np.isfinite(given)):
        got = given.item() if isinstance(given, np.generic) else given
        raise SpecMismatch(path, "a number that fits float32, at most 3.4e38", describe_value(got))
    return float(number)


def finite_number(value: Any, path: str, casting: Casting | None = None) -> float:
    """Return ``value`` as a float. Raises SpecMismatch as ``real_number`` does, and for NaN and infinite numbers."""
    number = real_number(value, path, casting)
    if not math.isfinite(number):
        raise SpecMismatch(path, "finite", str(number))
    return number


def flag(value: Any, path: str, casting: Casting | None = None) -> bool:
    """Return ``value`` as a bool. Raises SpecMismatch unless it is a bool or, if ``casting`` allows, 0 or 1."""
    if type(value) in FLAGS:
        return bool(value)
    try:
        return bool(fitting_array(_FLAG, value, path, casting))
    except SpecMismatch as error:
        raise SpecMismatch(path, "a bool", error.got) from None


def stack_rows(spec: Tree, values: Sequence[Tree], roots: Sequence[str], casting: Casting | None = None) -> Tree:
    """Stack ``values`` into a tree of arrays ``[n, …]``. A bad value raises SpecMismatch with its name in ``roots``."""
    columns = [np.empty((len(values), *leaf.shape), leaf.dtype) for leaf in leaves(spec)]
    for row, (value, root) in enumerate(zip(values, roots, strict=True)):
        for column, (leaf, part, path) in zip(columns, matched(spec, value, root), strict=True):
            column[row] = fitting_array(leaf, part, path, casting)
    return build(spec, columns)


def check_info(info: Any, path: str) -> None:
    """Raise SpecMismatch unless ``info`` is a mapping."""
    if not isinstance(info, Mapping):
        raise SpecMismatch(path, "a dict", describe_value(info))


def compact_bound(values: np.ndarray) -> np.ndarray | None:
    """Return one number if all bounds in ``values`` are equal; None if this number is infinite or there are no bounds.

    Unequal bounds are returned unchanged. Without this function, the bounds of an image would be sent as two images.
    """
    if not values.size:
        return None
    first = values.flat[0]
    if not (values == first).all():
        return values
    return None if values.dtype.kind == "f" and np.isinf(first) else np.asarray(first)


def groups_of_equals(values: Iterable[_T], is_equal: Callable[[_T, _T], bool]) -> list[list[_T]]:
    """Return lists of equal values, which need no hash. The lists are in the order of their first values."""
    groups: list[list[_T]] = []
    for value in values:
        group = next((group for group in groups if is_equal(group[0], value)), None)
        if group is None:
            groups.append([value])
        else:
            group.append(value)
    return groups


def read_array(column: np.ndarray, row: int) -> Any:
    """Return a copy of one row of ``column`` as an array. A scalar becomes a 0-dimensional array."""
    return column[row, ...].copy()


def read_dict(readers: dict[Any, RowReader]) -> RowReader:
    """Return a RowReader for actions that are dicts. ``readers`` has the RowReader of each key."""
    return lambda batch, row: {key: reader(batch[key], row) for key, reader in readers.items()}


def read_tuple(readers: Sequence[RowReader], kind: Callable[[list[Any]], Any] = tuple) -> RowReader:
    """Return a RowReader for tuples, or for lists if ``kind`` is list. ``readers`` has the RowReader of each item."""
    return lambda batch, row: kind([reader(part, row) for reader, part in zip(readers, batch, strict=True)])
