"""Specs of observations and actions, independent of any environment library.

A spec is a tree of :class:`ArraySpec`. The manager checks actions against their spec, and the worker checks
observations. ``training.algorithms.states`` converts specs to JSON data.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from envmanager.data.trees import Tree, as_numpy, is_foreign, leaves, leaves_like, map_tree, paths, snapshot
from envmanager.errors import UsageError


class SpecMismatch(ValueError):
    """Error raised for data that violates its spec. Callers convert it to a subclass of EnvManagerError."""

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(f"{path} should be {expected}, but is {got}")
        self.path, self.expected, self.got = path, expected, got


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in value)


def _dtype(value: Any) -> np.dtype[Any]:
    """Convert ``value`` to a dtype. Native number and bool dtypes become NumPy's shared objects, for ``is`` checks."""
    dtype: np.dtype[Any] = np.dtype(value)
    if dtype.isnative and dtype.kind in "biufc":
        dtype = np.dtype(dtype.type)
    return dtype


def _bound(value: Any) -> Any:
    return None if value is None else np.asarray(value)


ACTION_MASK = "action_mask"
"""Key of an observation that is a dict, under which an array has a number for each choice; zeros forbid theirs."""
_FEW = 1024
"""Maximum number of choices that are kept in a set, for fast checks."""
_SMALL = 32
"""Number of array elements up to which a Python loop is faster than NumPy."""


_SAME_ARRAY = attrs.cmp_using(eq=np.array_equal)


@attrs.frozen
class ArraySpec:
    """The shape, dtype and bounds of one array (leaf) of an observation or action, for one agent.

    ``shape`` excludes the first axis of the data, which counts agents. A leaf with the dtype ``object`` has shape
    ``()``, holds one Python object of any type per agent (a string, a graph, an array whose shape changes), and is sent
    pickled. ``minimum`` and ``maximum`` are inclusive. Each is None or can be broadcast to ``shape``.
    """

    shape: tuple[int, ...] = attrs.field(default=(), converter=_shape)
    dtype: np.dtype[Any] = attrs.field(default=np.dtype(np.float32), converter=_dtype)
    minimum: Any = attrs.field(default=None, converter=_bound, eq=_SAME_ARRAY, hash=False)
    maximum: Any = attrs.field(default=None, converter=_bound, eq=_SAME_ARRAY, hash=False)
    name: str = attrs.field(default="", eq=False)
    whole_bounds: tuple[int, int] | None = attrs.field(init=False, repr=False, eq=False)
    """Minimum and maximum of an integer array if both are given as scalars, else None."""
    span: tuple[float, float] | None = attrs.field(init=False, repr=False, eq=False)
    """Range of finite numbers in the bounds; None for array bounds, or if the dtype is neither integer nor float."""
    is_object: bool = attrs.field(init=False, repr=False, eq=False)
    """Whether the leaf holds Python objects."""
    choices: frozenset[int] = attrs.field(init=False, repr=False, eq=False)
    """Valid values of a scalar integer if there are at most ``_FEW``, else empty."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "is_object", self.dtype.kind == "O")
        plain = self.dtype.kind in "iu" and all(b is not None and b.ndim == 0 for b in (self.minimum, self.maximum))
        bounds = (self.minimum.item(), self.maximum.item()) if plain else None
        object.__setattr__(self, "whole_bounds", bounds)
        span = None
        if self.dtype.kind in "iuf" and all(b is None or b.ndim == 0 for b in (self.minimum, self.maximum)):
            widest = sys.float_info.max if self.dtype.kind == "f" else math.inf
            least = -widest if self.minimum is None else self.minimum.item()
            most = widest if self.maximum is None else self.maximum.item()
            span = max(least, -widest), min(most, widest)
        object.__setattr__(self, "span", span)
        low, high = (0, -1) if bounds is None or self.shape else bounds
        object.__setattr__(self, "choices", frozenset(range(low, high + 1) if high - low < _FEW else ()))

    def __str__(self) -> str:
        if self.is_object:
            return "any object"
        bounds = ""
        if self.minimum is not None or self.maximum is not None:
            bounds = f" in [{_bound_text(self.minimum)}, {_bound_text(self.maximum)}]"
        return f"{self.dtype}{list(self.shape)}{bounds}"


_SHOWN_BOUNDS = 6
_LONGEST_INT = 4096
"""Number of bits above which whole numbers are shown in hexadecimal, because repr() refuses more than 4,300 digits."""


def _bound_text(bound: Any) -> str:
    if bound is None:
        return "-"
    if bound.size and (bound == bound.flat[0]).all():
        return f"{bound.flat[0]:g}" if bound.dtype.kind == "f" else str(bound.flat[0])
    if bound.size <= _SHOWN_BOUNDS:
        return "(" + ", ".join(f"{value:g}" for value in bound.ravel().tolist()) + ")"
    return f"{bound.min():g}…{bound.max():g}"


@attrs.frozen
class BehaviorSpec:
    """The observation and action specs of all agents of one behavior. Both are trees of :class:`ArraySpec`."""

    observation: Tree
    action: Tree

    @property
    def has_objects(self) -> bool:
        """Whether any leaf holds Python objects."""
        return any(spec.is_object for spec in leaves(self.observation) + leaves(self.action))

    def __str__(self) -> str:
        return f"observation {describe_spec(self.observation)}, action {describe_spec(self.action)}"


BehaviorSpecs = Mapping[str, BehaviorSpec]


def describe_spec(spec: Tree) -> str:
    """Return a tree of specs as one line of text, for messages."""
    return str(map_tree(_Plain, spec)) if isinstance(spec, dict | tuple) else str(spec)


class _Plain(str):
    """A string that is printed without quotes inside a dict or tuple."""

    __repr__ = str.__str__


def describe_value(value: Any) -> str:
    """Return a short description of ``value`` for error messages, such as ``float32[3]``, ``int 5`` or ``a list``."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, np.generic):
        return f"{value.dtype}[]"
    if isinstance(value, dict):
        return f"a dict with keys {sorted(map(str, value))}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | str):
        is_long = isinstance(value, int) and value.bit_length() > _LONGEST_INT
        text = f"{value:#x}" if is_long else repr(value)
        return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '…'}"
    return f"{'an' if type(value).__name__[0] in 'aeiouAEIOU' else 'a'} {type(value).__name__}"


def check_structure(spec: Tree, value: Tree, path: str) -> None:
    """Raise SpecMismatch unless ``value`` has the dict keys and tuple lengths of ``spec``. The error names ``path``."""
    if isinstance(spec, dict):
        if not isinstance(value, Mapping):
            raise SpecMismatch(path, f"a dict with keys {sorted(spec)}", describe_value(value))
        if spec.keys() != value.keys():
            raise SpecMismatch(path, f"a dict with keys {sorted(spec)}", describe_value(dict(value)))
        for key, child in spec.items():
            check_structure(child, value[key], f"{path}[{key!r}]")
    elif isinstance(spec, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(spec):
            raise SpecMismatch(path, f"a tuple of {len(spec)}", describe_value(value))
        for index, child in enumerate(spec):
            check_structure(child, value[index], f"{path}[{index}]")


def matched(spec: Tree, value: Tree, path: str) -> list[tuple[ArraySpec, Any, str]]:
    """Return each leaf of ``spec`` with that of ``value`` and its path. Raises SpecMismatch as ``check_structure``."""
    check_structure(spec, value, path)
    return list(zip(leaves(spec), leaves_like(spec, value), paths(spec, path), strict=True))


def check_values(spec: ArraySpec, value: Any, path: str) -> None:
    """Raise SpecMismatch unless all of ``value`` is within the bounds and, for a float or complex spec, finite."""
    if spec.is_object:
        return
    if spec.span is not None and value.__class__ is np.ndarray and value.size <= _SMALL and value.dtype.kind in "biuf":
        low, high = spec.span
        for number in value.ravel().tolist():
            if not low <= number <= high:
                break
        else:
            return
    if spec.dtype.kind in "fc" and not np.isfinite(value).all():
        raise SpecMismatch(path, f"finite {spec}", "NaN or infinite in part")
    if spec.minimum is not None and (value < spec.minimum).any():
        raise SpecMismatch(path, str(spec), f"as low as {np.min(value)}")
    if spec.maximum is not None and (value > spec.maximum).any():
        raise SpecMismatch(path, str(spec), f"as high as {np.max(value)}")


def as_array(values: Any) -> np.ndarray[Any, Any]:
    """Convert ``values`` to a NumPy array, without a copy if possible. Raises ValueError if the conversion fails."""
    if values.__class__ is np.ndarray:
        return values
    try:
        with warnings.catch_warnings():
            # Before NumPy 1.24 a ragged list only causes a warning.
            warnings.filterwarnings("error", "Creating an ndarray from ragged")
            return as_numpy(values) if is_foreign(values) else np.asarray(values)
    except Exception as error:  # ``__array__`` may raise anything, as RuntimeError for a tensor that requires grad
        raise ValueError(f"{describe_value(values)} that cannot be made an array ({error})") from error


def object_array(values: Any) -> np.ndarray[Any, Any]:
    """Return an object array [n] of snapshots of ``values``. ``np.array`` would turn lists into a second dimension."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = snapshot(value)
    return array


def zeros(spec: Tree, *leading: int) -> Tree:
    """Return a tree with an array ``[*leading, *shape]`` of zeros (None for objects) for each leaf of ``spec``."""
    return map_tree(lambda leaf: (np.empty if leaf.is_object else np.zeros)((*leading, *leaf.shape), leaf.dtype), spec)


_KINDS = (
    'pass env_factory=[EnvRecipe(…, n=6, behavior="cart"), EnvRecipe(…, n=2, behavior="acro")], where n is the number '
    "of environments."
)


class SpecConflict(UsageError):
    """Error raised if a behavior has different specs in two environments or workers.

    After the start, it is reported as a BadObservation with the same ``path``, ``expected`` and ``got``.
    """

    def __init__(self, behavior: str, *, known: BehaviorSpec, seen_in: str, new: BehaviorSpec, now_in: str) -> None:
        super().__init__(
            f"behavior {behavior!r} has another spec in {now_in} than in {seen_in}.\n{now_in}: {new}\n{seen_in}: "
            f"{known}\nAgents of one behavior share their specs in all environments. If these are of several kinds, "
            f"name each: {_KINDS} In a config, env: [{{env: …, n: 6, behavior: cart}}, …]."
        )
        self.path = f"behavior {behavior!r}"
        self.expected = f"of the spec that it has in {seen_in} ({known})"
        self.got = str(new)

    def suggest(self, env_factory: str) -> None:
        """Put the list of kinds to write into the message, in place of the example."""
        self.args = (str(self).replace(_KINDS, f"pass env_factory={env_factory}, and leave n_envs out."),)


def merge_specs(known: dict[str, BehaviorSpec], new: BehaviorSpecs, *, seen_in: str, now_in: str) -> None:
    """Add ``new`` to ``known``. If a behavior's specs differ, raise SpecConflict, naming ``seen_in`` and ``now_in``."""
    for behavior, spec in new.items():
        if known.setdefault(behavior, spec) != spec:
            raise SpecConflict(behavior, known=known[behavior], seen_in=seen_in, new=spec, now_in=now_in)
