"""Finds the rows that ``recv`` handed out last, to report what an episode that is cut saw last.

The rule: the entry keeps only references to batches. The rows are looked up when the worker has failed, which is rare.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from envmanager.core.table import Entry
from envmanager.data.steps import AgentSteps, Batch, Steps
from envmanager.data.trees import take_rows, with_rows


def batches_with(entry: Entry, batch: Batch) -> list[Batch]:
    """What is to be kept of a worker once ``batch``, in which it has some of its rows, has been handed out.

    The others are in earlier batches, which must outlive the memory they are views of.
    """
    kept = [each.copy() if each.is_view else each for each in (*entry.batches, batch)]
    return _still_last(kept, entry.env_ids)


def last_steps(entry: Entry) -> Steps:
    """What was last handed out of a worker, by a StepInfo or by batches since then."""
    if entry.previous_step is None:
        return {}
    if not entry.batches:
        return entry.previous_step.current
    return {name: _under_batches(steps, entry) for name, steps in entry.previous_step.current.items()}


def _under_batches(first: AgentSteps, entry: Entry) -> AgentSteps:
    """``first``, the worker's steps since the reset, with the observations handed out after it."""
    obs = first.obs
    for batch in entry.batches:
        places = np.flatnonzero(np.isin(batch.env_ids, entry.env_ids))
        obs = with_rows(obs, batch.env_ids[places] - entry.env_ids[0], take_rows(batch.obs, places))
    return attrs.evolve(first, obs=obs)


def _still_last(batches: list[Batch], env_ids: Sequence[int]) -> list[Batch]:
    """Those of some batches, oldest first, in which some environment was seen last."""
    kept: list[Batch] = []
    unseen = set(env_ids)
    for batch in reversed(batches):
        n_unseen = len(unseen)
        unseen.difference_update(batch.env_ids.tolist())
        if len(unseen) < n_unseen:
            kept.insert(0, batch)
    return kept
