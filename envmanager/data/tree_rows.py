"""Trees of arrays with rows: choose, replace and concatenate rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from envmanager.data.trees import Tree, leaves, leaves_like, map_tree


def copy_tree(tree: Tree) -> Tree:
    """Return the tree with every array copied; None stays None."""
    if tree.__class__ is np.ndarray:
        return tree.copy()
    return None if tree is None else map_tree(np.copy, tree)


def take_rows(tree: Tree, rows: Any) -> Tree:
    """Return the tree with only ``rows`` of every array."""
    if tree.__class__ is np.ndarray:
        return tree[rows]
    return map_tree(lambda leaf: leaf[rows], tree)


def no_rows(tree: Tree) -> Tree:
    """Return the tree with 0 rows of every array, in new arrays."""
    return map_tree(lambda leaf: np.asarray(leaf)[:0].copy(), tree)


def with_rows(tree: Tree, rows: Any, values: Tree) -> Tree:
    """Return a copy of the tree with ``rows`` of every array replaced by the rows of ``values``."""
    copied = copy_tree(tree)
    for leaf, new in zip(leaves(copied), leaves_like(copied, values), strict=True):
        leaf[rows] = new
    return copied


def concat_rows(trees: list[Tree]) -> Tree:
    """Return the rows of several trees of one structure, one after the other, in new arrays."""
    if trees[0].__class__ is np.ndarray:
        return np.concatenate(trees)
    return map_tree(lambda *parts: np.concatenate(parts), trees[0], *trees[1:])
