"""Conversion of attrs objects to JSON data (``to_plain``) and back (``from_plain``), and checksums, for files.

One error can list several invalid keys. Unknown keys are ignored, because a later version may have written them.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import cattrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec, describe_value
from envmanager.data.trees import Tree
from envmanager.errors import ConfigError
from envmanager.structuring import structured

Options = TypeVar("Options")


def from_plain(cls: type[Options], plain: Any, *, where: str = "") -> Options:
    """Build a ``cls`` object from JSON data. Raises ConfigError for invalid data. ``where`` prefixes keys in errors."""
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where or 'the whole'} should be a mapping, but is {describe_value(plain)}.")
    return structured(_OF_FILES, cls, plain, where)


def to_plain(value: Any) -> Any:
    """Convert an attrs object to JSON data: dicts, lists, strings, numbers, bools and None."""
    return _OF_FILES.unstructure(value)


def checksum_of(content: Any) -> int:
    """Return a checksum of JSON data, or of the dtype, shape and values of a contiguous array.

    A checksum finds damage, not forgery. CRC-32 is four times as fast as SHA-256, and a replay has gigabytes.
    """
    if isinstance(content, np.ndarray):
        return zlib.crc32(content.data, zlib.crc32(f"{content.dtype.str}{content.shape}".encode()))
    return zlib.crc32(json.dumps(content).encode())


def plain_spec(spec: BehaviorSpec) -> dict[str, Any]:
    """Convert ``spec`` to JSON data, including the dtypes of its bounds. ``spec_from_plain`` converts it back."""
    return {"observation": _to_plain(spec.observation), "action": _to_plain(spec.action)}


def spec_from_plain(plain: Mapping[str, Any]) -> BehaviorSpec:
    """Convert a result of ``plain_spec`` back to a spec. Invalid data raises an error, such as KeyError."""
    return BehaviorSpec(_from_plain(plain["observation"]), _from_plain(plain["action"]))


def _to_plain(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, dict):  # pairs keep integer keys and the order
        return {"dict": [[key, _to_plain(child)] for key, child in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_to_plain(child) for child in tree]}
    leaf: ArraySpec = tree
    plain: dict[str, Any] = {"shape": list(leaf.shape), "dtype": leaf.dtype.str}
    for name in ("minimum", "maximum"):
        bound = getattr(leaf, name)
        if bound is not None:
            # JSON has neither infinity nor NaN, so they are written as strings.
            numbers = [str(x) if isinstance(x, float) and not math.isfinite(x) else x for x in bound.ravel().tolist()]
            is_one = numbers and numbers.count(numbers[0]) == len(numbers)  # an image has equal bounds for all pixels
            values = numbers[0] if is_one else numbers
            plain[name] = {"shape": list(bound.shape), "dtype": bound.dtype.str, "values": values}
    return {**plain, "name": leaf.name} if leaf.name else plain


def _from_plain(plain: Mapping[str, Any]) -> Tree:
    if "dict" in plain:
        return {key: _from_plain(child) for key, child in plain["dict"]}
    if "tuple" in plain:
        return tuple(_from_plain(child) for child in plain["tuple"])
    bounds: dict[str, np.ndarray] = {}
    for name in ("minimum", "maximum"):
        if name in plain:
            values = plain[name]["values"]
            given = values if isinstance(values, list) else [values]
            array = np.array([float(x) if isinstance(x, str) else x for x in given], plain[name]["dtype"])
            shape = plain[name]["shape"]
            bounds[name] = array.reshape(shape) if values is given else np.full(shape, array[0], array.dtype)
    return ArraySpec(plain["shape"], plain["dtype"], name=plain.get("name", ""), **bounds)


def _converter_of_files() -> cattrs.Converter:
    converter = cattrs.Converter()
    converter.register_structure_hook_func(_is_named_tuple, lambda values, wanted: wanted(*values))
    converter.register_unstructure_hook_func(_is_named_tuple, list)
    converter.register_structure_hook(BehaviorSpec, lambda plain, _: spec_from_plain(plain))
    converter.register_unstructure_hook(BehaviorSpec, plain_spec)
    return converter


def _is_named_tuple(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, tuple) and hasattr(wanted, "_fields")


_OF_FILES = _converter_of_files()
