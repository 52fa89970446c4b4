"""Checks one agent's observation, reward and flags and puts them into rows of arrays: what every adapter needs.

The rule: a value that would mean something else in its row (0.5 in an integer leaf, a wrong shape) is refused here, by
name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.data.fitting import Casting, fitting_array
from envmanager.data.specs import ArraySpec, SpecMismatch, check_structure, describe_value
from envmanager.data.trees import Tree, build, leaves, leaves_like, paths

REAL_NUMBERS: frozenset[type] = frozenset(
    {float, int, np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8}
)
"""The classes a reward usually has; ``real_number`` looks closer at others."""

FLAGS: frozenset[type] = frozenset({bool, np.bool_})

_FLAG = ArraySpec((), np.bool_)

RowReader = Callable[[Tree, int], Any]
"""``(batch tree of [n, …], row) -> one agent's action``, as its environment wants it, never a view of the batch."""


def real_number(value: Any, path: str, casting: Casting | None = None, *, field: str = "reward") -> float:
    """``value`` as a float; SpecMismatch unless it is one real number. A bool is none, unless ``casting`` allows it."""
    if type(value) in REAL_NUMBERS:
        return float(value)
    if isinstance(value, int | float | np.generic | np.ndarray) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.shape == () and array.dtype.kind in "iuf":
            return float(array)
        if array.shape == () and array.dtype.kind == "b" and casting is not None and not casting.strict:
            casting.note(field, "a real number", describe_value(value))
            return float(array)
    raise SpecMismatch(path, "a real number", describe_value(value))


def finite_number(value: Any, path: str, casting: Casting | None = None) -> float:
    """``real_number`` that is neither NaN nor infinite."""
    number = real_number(value, path, casting)
    if not math.isfinite(number):
        raise SpecMismatch(path, "finite", str(number))
    return number


def flag(value: Any, path: str, casting: Casting | None = None, *, field: str | None = None) -> bool:
    """``value`` as a bool; SpecMismatch unless it is one already (0-d arrays count), or ``casting`` allows 0 and 1."""
    if type(value) in FLAGS:
        return bool(value)
    try:
        return bool(fitting_array(_FLAG, value, path, casting, field=field))
    except SpecMismatch as error:
        raise SpecMismatch(path, "a bool", error.got) from None


def stack_rows(spec: Tree, values: Sequence[Tree], roots: Sequence[str], casting: Casting | None = None) -> Tree:
    """A tree of arrays ``[n, …]`` in which row i is ``values[i]``; SpecMismatch begins with ``roots[i]``.

    What is cast is noted as of the field ``obs``.
    """
    leaf_specs = leaves(spec)
    columns = [np.empty((len(values), *leaf.shape), leaf.dtype) for leaf in leaf_specs]
    fields = paths(spec, "obs")
    for row, (value, root) in enumerate(zip(values, roots, strict=True)):
        check_structure(spec, value, root)
        own = zip(columns, leaf_specs, leaves_like(spec, value), paths(spec, root), fields, strict=True)
        for column, leaf, part, path, field in own:
            column[row] = fitting_array(leaf, part, path, casting, field=field)
    return build(spec, columns)


def check_info(info: Any, path: str) -> None:
    """SpecMismatch unless ``info`` is a dict, or something like one."""
    if not isinstance(info, Mapping):
        raise SpecMismatch(path, "a dict", describe_value(info))


def compact_bound(values: np.ndarray) -> np.ndarray | None:
    """A bound of a spec: one number where all are the same, None where all are infinite.

    A camera's bounds would otherwise travel as two images.
    """
    if not values.size:
        return None
    first = values.flat[0]
    if not (values == first).all():
        return values
    return None if values.dtype.kind == "f" and np.isinf(first) else np.asarray(first)


def read_array(column: np.ndarray, row: int) -> Any:
    """The row as an array of its own, also when it has no dimensions."""
    return column[row, ...].copy()


def read_dict(readers: dict[Any, RowReader]) -> RowReader:
    """A reader of dicts from the readers of their entries."""
    return lambda batch, row: {key: reader(batch[key], row) for key, reader in readers.items()}


def read_tuple(readers: Sequence[RowReader], kind: Callable[[list[Any]], Any] = tuple) -> RowReader:
    """A reader of tuples (or, with ``kind=list``, lists) from the readers of their entries."""
    return lambda batch, row: kind([reader(part, row) for reader, part in zip(readers, batch, strict=True)])
