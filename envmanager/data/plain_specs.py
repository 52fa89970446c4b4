"""Specs as plain data, for files.

::

    BehaviorSpec ── plain_spec ──▶ dicts, lists, texts and numbers ── spec_from_plain ──▶ an equal BehaviorSpec

The rule: the result is equal to the original, with bounds of the same dtype, since actions are scaled with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.trees import Tree


def plain_spec(spec: BehaviorSpec) -> dict[str, Any]:
    """Return ``spec`` as JSON data: dicts, lists, texts and numbers."""
    return {"observation": _plain_tree(spec.observation), "action": _plain_tree(spec.action)}


def spec_from_plain(plain: Mapping[str, Any]) -> BehaviorSpec:
    """Return the spec from which ``plain_spec`` made ``plain``. Raises KeyError, TypeError or ValueError."""
    return BehaviorSpec(_tree(plain["observation"]), _tree(plain["action"]))


def _plain_tree(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, dict):  # in pairs: a key may be a number, and the order counts
        return {"dict": [[key, _plain_tree(child)] for key, child in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_plain_tree(child) for child in tree]}
    leaf: ArraySpec = tree
    plain: dict[str, Any] = {"shape": list(leaf.shape), "dtype": leaf.dtype.str}
    for name in ("minimum", "maximum"):
        if getattr(leaf, name) is not None:
            plain[name] = _plain_bound(getattr(leaf, name))
    return {**plain, "name": leaf.name} if leaf.name else plain


def _tree(plain: Mapping[str, Any]) -> Tree:
    if "dict" in plain:
        return {key: _tree(child) for key, child in plain["dict"]}
    if "tuple" in plain:
        return tuple(_tree(child) for child in plain["tuple"])
    low, high = (_bound(plain[name]) if name in plain else None for name in ("minimum", "maximum"))
    return ArraySpec(plain["shape"], _dtype(plain), low, high, plain.get("name", ""))


def _dtype(plain: Mapping[str, Any]) -> str:
    """Return the name of the dtype; refuse dicts, lists and None, from which NumPy makes dtypes too."""
    if not isinstance(plain["dtype"], str):
        raise TypeError(f"a dtype should be text, but is {plain['dtype']!r}")
    return plain["dtype"]


def _plain_bound(bound: np.ndarray) -> dict[str, Any]:
    """Return the bound, as one number if all are equal: an image has a bound for each pixel."""
    numbers = [_json_number(number) for number in bound.ravel().tolist()]
    values = numbers[0] if numbers and numbers.count(numbers[0]) == len(numbers) else numbers
    return {"shape": list(bound.shape), "dtype": bound.dtype.str, "values": values}


def _bound(plain: Mapping[str, Any]) -> np.ndarray:
    values = plain["values"]
    if isinstance(values, list):
        bound: np.ndarray = np.array([_number(value) for value in values], _dtype(plain)).reshape(plain["shape"])
    else:
        bound = np.full(plain["shape"], _number(values), _dtype(plain))
    return bound


def _json_number(number: Any) -> Any:
    """Return the number, or its text if it is infinite or NaN, which JSON does not have."""
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
