"""Functions on trees. A tree is a leaf, or a dict or tuple of trees. Observations, actions and their specs are trees.

Leaves of observations and actions are NumPy arrays. Vector environments in the trainer's process may also use PyTorch
or JAX arrays, which stay on their device. The last functions of this module select, replace and concatenate rows.

The rule: if a function takes several trees, the dict keys of the first tree set the order of the leaves. Leaves are
paired correctly even if the dict keys of other trees are in another order.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Tree = Any
"""A leaf, or ``dict[str, Tree]``, or ``tuple[Tree, ...]``."""


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Return a tree whose leaves are ``function(leaf, *other_leaves)``. All trees must have the same structure."""
    if isinstance(tree, dict):
        return {key: map_tree(function, child, *(other[key] for other in others)) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, *children) for children in zip(tree, *others, strict=True))
    return function(tree, *others)


def leaves(tree: Tree) -> list[Any]:
    """Return all leaves of ``tree``, depth first."""
    return leaves_like(tree, tree)


def leaves_like(structure: Tree, tree: Tree) -> list[Any]:
    """Return the leaves of ``tree`` in the order of ``leaves(structure)``. Both trees must have the same structure."""
    if isinstance(structure, dict):
        return [leaf for key, child in structure.items() for leaf in leaves_like(child, tree[key])]
    if isinstance(structure, tuple):
        pairs = zip(structure, tree, strict=True)
        return [leaf for child, other in pairs for leaf in leaves_like(child, other)]
    return [tree]


def build(structure: Tree, values: list[Any]) -> Tree:
    """Return a tree like ``structure`` with the leaves ``values``, which are in the order of ``leaves(structure)``."""
    rest = iter(values)
    return map_tree(lambda _: next(rest), structure)


def paths(tree: Tree, root: str = "") -> list[str]:
    """Return the path of each leaf as a Python expression, such as ``root['camera'][0]``."""
    if isinstance(tree, dict):
        return [path for key, child in tree.items() for path in paths(child, f"{root}[{key!r}]")]
    if isinstance(tree, tuple):
        return [path for index, child in enumerate(tree) for path in paths(child, f"{root}[{index}]")]
    return [root]


def is_foreign(leaf: Any) -> bool:
    """Return whether ``leaf`` is an array of a library other than NumPy, such as PyTorch or JAX."""
    return leaf.__class__ is not np.ndarray and hasattr(leaf, "__dlpack__") and not isinstance(leaf, np.ndarray)


def as_numpy(leaf: Any) -> np.ndarray:
    """Return a PyTorch or JAX array as a NumPy array. An array on a device such as a GPU is copied."""
    return np.asarray(leaf.cpu() if hasattr(leaf, "cpu") else leaf)


def copy_leaf(leaf: Any) -> Any:
    """Return a copy of an array, on the same device."""
    if not is_foreign(leaf):
        return np.copy(leaf)
    if hasattr(leaf, "at"):  # JAX, whose own ``copy`` is compiled for each shape
        return sys.modules["jax"].device_put(leaf, leaf.device, may_alias=False)
    return leaf.clone() if hasattr(leaf, "clone") else leaf.copy()


def copy_tree(tree: Tree) -> Tree:
    """Return ``tree`` with a copy of every array. None is returned unchanged."""
    if tree.__class__ is np.ndarray:
        return tree.copy()
    return None if tree is None else map_tree(copy_leaf, tree)


_VALUES = frozenset({type(None), bool, int, float, str, bytes, np.bool_, np.int64, np.float64, np.int32, np.float32})
"""Classes of most values in infos. Their objects cannot be changed, so ``snapshot`` returns them unchanged."""


def snapshot(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a copy of an info or an object that its environment may change later.

    Dicts, lists, sets, tuples and arrays in it are copied, at any depth. Other objects (such as a simulator in an info)
    are shared, because they may be large, or refuse to be copied. ``known`` has the copies made so far, by id.
    """
    kind = value.__class__
    if kind in _VALUES:
        return value
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        parts = [snapshot(part, known) for part in value]
        try:
            return value if all(map(operator.is_, parts, value)) else tuple.__new__(kind, parts)
        except TypeError:  # a tuple of C code, such as a structseq
            return value
    if not isinstance(value, dict | list | set | bytearray | np.ndarray):
        is_array = hasattr(kind, "__dlpack__") and (hasattr(kind, "clone") or hasattr(kind, "copy"))
        return copy_leaf(value) if is_array else value
    copied: Any = value.copy() if isinstance(value, np.ndarray) else copy.copy(value)
    known[id(value)] = copied  # before its parts, which may contain it
    if isinstance(value, dict):
        dict.update(copied, {key: snapshot(part, known) for key, part in value.items()})  # a Counter's own would add
    elif isinstance(value, list):
        copied[:] = [snapshot(part, known) for part in value]
    elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
        for index, part in enumerate(value.flat):
            copied.reshape(-1)[index] = snapshot(part, known)
    return copied


def take_rows(tree: Tree, rows: Any) -> Tree:
    """Return a tree with only the rows at ``rows`` of every array. If ``rows`` is a slice, NumPy arrays are views."""
    if tree.__class__ is np.ndarray:
        return tree[rows]
    return map_tree(lambda leaf: _take_of_jax(leaf, rows) if hasattr(leaf, "at") else leaf[rows], tree)


SMALL_BYTES = 1 << 20
"""Size up to which an array of JAX is changed on the host. JAX compiles for each number of rows, for up to 0.1 s."""


def _take_of_jax(leaf: Any, rows: Any) -> Any:
    """Return ``leaf[rows]``. Of a large array, a power of two of rows is taken on the device, and cut on the host."""
    chosen, jax = np.arange(len(leaf))[rows], sys.modules["jax"]
    if not chosen.ndim or len(leaf.devices()) > 1:
        return leaf[rows]
    if leaf.nbytes > SMALL_BYTES and chosen.size:
        leaf, chosen = jax.numpy.take(leaf, _padded(chosen), axis=0, mode="clip"), np.arange(len(chosen))
    return jax.device_put(np.asarray(leaf)[chosen], leaf.device)


def _padded(rows: np.ndarray) -> np.ndarray:
    """Return ``rows``, repeated until their number is a power of two."""
    return np.resize(rows, (1 << (len(rows) - 1).bit_length(), *rows.shape[1:]))


def with_rows(tree: Tree, rows: Any, values: Tree) -> Tree:
    """Return a copy of ``tree`` in which the rows at ``rows`` of every array are replaced by the rows of ``values``."""
    return build(tree, [_with_rows(*pair, rows) for pair in zip(leaves(tree), leaves_like(tree, values), strict=True)])


def _with_rows(leaf: Any, new: Any, rows: Any) -> Any:
    is_jax = hasattr(leaf, "at")
    if is_jax and len(new) and (leaf.nbytes > SMALL_BYTES or len(leaf.devices()) > 1):
        sources = np.arange(len(leaf))
        sources[rows] = np.arange(len(leaf), len(leaf) + len(new))
        both = sys.modules["jax"].numpy.concatenate([leaf, _padded(as_numpy(new))])
        return both.take(sources, axis=0, mode="clip")
    copied = np.array(leaf) if is_jax else copy_leaf(leaf)
    copied[rows] = sys.modules["torch"].as_tensor(new, device=leaf.device) if is_foreign(copied) else new
    return sys.modules["jax"].device_put(copied, leaf.device) if is_jax else copied


def concat_rows(trees: list[Tree]) -> Tree:
    """Return the concatenated rows of several trees of the same structure, in new arrays."""
    if trees[0].__class__ is np.ndarray:
        return np.concatenate(trees)
    return map_tree(lambda *parts: _concatenated(parts), trees[0], *trees[1:])


def _concatenated(parts: tuple[Any, ...]) -> Any:
    if not is_foreign(parts[0]):
        return np.concatenate(parts)
    library = parts[0].__array_namespace__() if hasattr(parts[0], "__array_namespace__") else sys.modules["torch"]
    return library.concatenate(parts)
