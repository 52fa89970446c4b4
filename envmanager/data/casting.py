"""Casting of an environment's observations, rewards and flags, and of a policy's actions, to the dtypes of their specs.

::

    values of the spec's dtype, or of a dtype that NumPy casts to it safely       ──▶ accepted
    numbers of another dtype, if the spec's dtype can hold each of them           ──▶ cast, where casts are allowed
    other values                                                                  ──▶ SpecMismatch

The rule: a cast never changes the meaning of a value. A float64 may be rounded to a float32, but 0.5 is not cast to an
integer, 300 to a uint8, 2 to a bool, or a finite number to infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

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
from envmanager.data.trees import Tree, build, copy_leaf, is_foreign, leaves, map_tree
from envmanager.errors import BadAction

_NUMBERS = "biufc"


@attrs.define(eq=False)
class Casting:
    """Options for casting values whose dtype differs from their spec's.

    A cast may round a float, but not change a value otherwise. Other casts, and all casts with ``strict``, are refused.
    After each cast ``on_cast(path, expected, value)`` is called. Only ``envmanager check`` sets ``on_cast``.
    """

    strict: bool = False
    on_cast: Callable[[str, Any, Any], Any] | None = None

    def cast(self, value: Any, dtype: np.dtype[Any], path: str, expected: Any) -> np.ndarray | None:
        """Return ``value`` cast to ``dtype``, or None if the cast is refused. After a cast, call ``on_cast`` if set."""
        cast = None if self.strict else cast_without_loss(np.asarray(value), dtype)
        if cast is not None and self.on_cast is not None:
            self.on_cast(path, expected, value)
        return cast


def cast_without_loss(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Return ``array`` as ``dtype``, or None if either is not numeric or the cast could do more than round values."""
    if array.dtype.kind not in _NUMBERS or dtype.kind not in _NUMBERS:
        return None
    if array.dtype.kind == "c" and dtype.kind != "c":
        return None
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if dtype.kind in "fc":
            is_kept = np.isfinite(cast).all() or np.array_equal(np.isfinite(cast), np.isfinite(array))
        elif array.dtype.kind == "f" and dtype.kind in "iu":
            limit = float(np.iinfo(dtype).max) + 1.0  # some processors clamp larger numbers, which would compare equal
            is_kept = (array < limit).all() and np.array_equal(cast, array)
        else:
            is_kept = np.array_equal(cast, array)
    return cast if is_kept else None


def fitting_foreign(spec: ArraySpec, value: Any, n: int, path: str) -> Any:
    """Return ``value``, a PyTorch or JAX array. Raises SpecMismatch if its dtype or shape (``n`` rows) does not fit."""
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if shape != (n, *spec.shape) or dtype != spec.dtype.name:
        expected = f"{n} rows of {spec}: {spec.dtype}{[n, *spec.shape]}"
        raise SpecMismatch(path, expected, f"{describe_value(value)}: {dtype}{list(shape)}")
    return value


def check_batch(spec: Tree, batch: Tree, n: int, path: str, strict: bool = True, foreign: bool = False) -> Tree:
    """Return ``batch`` as a tree of arrays ``[n, …]`` with the spec's dtypes. Raises SpecMismatch if it does not fit.

    All numbers must be finite, within the bounds, and unchanged by the cast, apart from a float's rounding. Integers
    are cast to any integer dtype, and integers and floats to any float dtype. Floats are cast to integers only without
    ``strict``. With ``foreign``, only the shapes and dtypes of PyTorch and JAX arrays are checked.
    """
    if isinstance(spec, ArraySpec):
        return _check_leaf(spec, batch, n, path, strict, foreign)
    parts = matched(spec, batch, path)
    return build(spec, [_check_leaf(leaf, part, n, at, strict, foreign) for leaf, part, at in parts])


def _check_leaf(spec: ArraySpec, batch: Any, n: int, path: str, strict: bool, foreign: bool) -> Any:
    if spec.is_object:
        if not hasattr(batch, "__len__") or len(batch) != n:
            raise SpecMismatch(path, f"{n} objects", describe_value(batch))
        return object_array(batch)
    if batch.__class__ is not np.ndarray:
        if foreign and is_foreign(batch):
            return fitting_foreign(spec, batch, n, path)
        if batch is None:
            raise SpecMismatch(path, f"{n} rows of {spec}", "None")
        try:
            batch = as_array(batch)
        except ValueError as error:
            raise SpecMismatch(path, f"{n} rows of {spec}", str(error)) from error
    if batch.shape != (n, *spec.shape):
        raise SpecMismatch(path, f"{n} rows of {spec}: {spec.dtype}{[n, *spec.shape]}", describe_value(batch))
    if batch.dtype == spec.dtype:
        check_values(spec, batch, path)
        return batch
    return _cast_batch(spec, batch, path, strict)


def _cast_batch(spec: ArraySpec, batch: np.ndarray, path: str, strict: bool) -> np.ndarray:
    expected, got = f"{len(batch)} rows of {spec}", describe_value(batch)
    is_whole = spec.dtype.kind in "iu"
    is_same_kind = batch.dtype.kind in "iu" if is_whole else np.can_cast(batch.dtype, spec.dtype, "same_kind")
    is_castable = is_same_kind or (not strict and batch.dtype.kind in "biuf")
    if batch.dtype.kind not in _NUMBERS or not is_castable:
        raise SpecMismatch(path, expected, got)
    check_values(spec, batch, path)
    cast = cast_without_loss(batch, spec.dtype)
    if cast is None:
        reason = "out of the dtype's range" if is_same_kind else f"{got} with values that are not of that dtype"
        raise SpecMismatch(path, expected, reason)
    return cast


def actions_by_behavior(specs: BehaviorSpecs, actions: Any, what: str) -> dict[str, Tree]:
    """Return ``actions`` by behavior, each as new arrays ``[n, …]`` of any length n. Errors refer to them as ``what``.

    ``actions`` is a mapping from behaviors, or has those of the only behavior. Raises BadAction if one breaks its spec.
    """
    if not (isinstance(actions, Mapping) and (not specs or actions.keys() <= specs.keys())):
        if len(specs) > 1:
            raise BadAction(f"{what} must be a mapping from behaviors, which are {sorted(specs)}. Nothing was sent.")
        actions = {next(iter(specs), "default"): actions}
    checked = {}
    for behavior, own in actions.items():
        spec = specs.get(behavior)
        first = own if spec is None or isinstance(spec.action, ArraySpec) else next(iter(leaves(own)), ())
        n = len(first) if hasattr(first, "__len__") and getattr(first, "shape", True) else 0
        checked[behavior] = checked_actions(spec, own, n, f"{what} for behavior {behavior!r}", strict=False)
    return checked


def checked_actions(
    spec: BehaviorSpec | None, action: Tree, n: int, what: str, strict: bool, foreign: bool = False
) -> Tree:
    """Return ``action`` as new arrays ``[n, …]``, or unchanged if ``spec`` is None. Errors refer to it as ``what``.

    With ``foreign``, PyTorch and JAX arrays are not converted to NumPy, and their values are not checked.

    Raises BadAction for a wrong shape or value. With ``strict``, floats for an integer spec are also refused, not cast.
    The arrays are copies, because a policy may write its next actions into the arrays that it returned.
    """
    if spec is None:
        return action
    only = spec.action
    if only.__class__ is ArraySpec and only.is_choices(action) and len(action) == n:
        return action.copy()
    try:
        checked = check_batch(spec.action, action, n, "action", strict, foreign)
    except SpecMismatch as error:
        clip = " Clip it." if error.got.startswith("as ") and error.expected.startswith("float") else ""
        raise BadAction(f"{what}: {error}.{clip} Nothing was sent; the manager is unchanged.") from error
    if checked.__class__ is np.ndarray:
        return checked.copy() if checked is action or checked.base is not None else checked
    given = {id(leaf) for leaf in leaves(action)}
    return map_tree(lambda leaf: copy_leaf(leaf) if id(leaf) in given or leaf.base is not None else leaf, checked)
