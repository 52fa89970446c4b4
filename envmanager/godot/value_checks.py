"""Finds numbers in an engine's steps that are not finite or outside their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from envmanager.data.specs import SpecMismatch, check_values
from envmanager.data.steps import Steps
from envmanager.data.trees import Tree, leaves, leaves_like, paths
from envmanager.godot.engine_specs import EngineSpecs


def bad_numbers(specs: EngineSpecs, steps: Steps) -> tuple[tuple[int, ...], SpecMismatch] | None:
    """Whose numbers are not finite or outside their bounds, and what is wrong; None when all are as they should be.

    The environments are those of the rows with the first mistake found.
    """
    for behavior in specs.behaviors:
        own = steps.get(behavior.name)
        if own is None:
            continue
        found = _bad_rows(behavior.spec.observation, own.obs, "obs", own.env_id)
        if found is None and own.final_obs is not None:
            found = _bad_rows(behavior.spec.observation, own.final_obs, "final_obs", own.env_id[own.ended])
        if found is None and not np.isfinite(own.reward).all():
            bad = own.env_id[~np.isfinite(own.reward)]
            found = _once(bad), SpecMismatch("reward", "finite", "NaN or infinite in part")
        if found is not None:
            return found
    return None


def _bad_rows(spec: Tree, tree: Tree, root: str, env_id: np.ndarray) -> tuple[tuple[int, ...], SpecMismatch] | None:
    for leaf_spec, leaf, path in zip(leaves(spec), leaves_like(spec, tree), paths(spec, root), strict=True):
        try:
            check_values(leaf_spec, leaf, path)
        except SpecMismatch as mismatch:
            bad = [row for row in range(len(leaf)) if not _fits(leaf_spec, leaf[row])]
            return _once(env_id[bad]), mismatch
    return None


def _fits(spec: Any, value: Any) -> bool:
    try:
        check_values(spec, value, "")
    except SpecMismatch:
        return False
    return True


def _once(env_id: np.ndarray) -> tuple[int, ...]:
    return tuple(sorted(set(env_id.tolist())))
