"""The rows that were last handed out by ``recv``, to say what an episode that is cut last saw.

The rule: only references are kept; the rows of a worker are looked up when it has failed, which is rare.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from envmanager.env_rows import EnvRows
from envmanager.steps import AgentSteps, Batch, take_rows, with_rows


class LastBatches:
    """For each worker the batches that hold its rows, oldest first."""

    def __init__(self, env_rows: EnvRows) -> None:
        self._env_rows = env_rows
        self._batches: list[list[Batch]] = [[] for _ in env_rows.blocks]

    def clear(self) -> None:
        """After a reset nothing has been handed out."""
        for batches in self._batches:
            batches.clear()

    def with_rows_of(self, worker_id: int, steps: AgentSteps, batch: Batch) -> list[Batch]:
        """What is to be kept for a worker once ``batch``, in which it has ``steps``, has been handed out."""
        if len(steps.agent_id) == len(self._env_rows.blocks[worker_id]):
            return [batch]
        # The other rows are in earlier batches, which must outlive the memory they are views of.
        kept = [each.copy() if each.is_view else each for each in (*self._batches[worker_id], batch)]
        return _still_last(kept, self._env_rows.blocks[worker_id])

    def keep(self, batches: Sequence[tuple[int, list[Batch]]]) -> None:
        """A batch has been handed out; these are the results of ``with_rows_of`` for the workers in it."""
        for worker_id, own in batches:
            self._batches[worker_id] = own

    def over(self, first: AgentSteps, worker_id: int) -> AgentSteps:
        """``first``, the worker's steps since the reset, with the observations handed out after it."""
        env_ids = self._env_rows.blocks[worker_id]
        obs = first.obs
        for batch in self._batches[worker_id]:
            places = np.flatnonzero(np.isin(batch.env_ids, env_ids))
            obs = with_rows(obs, batch.env_ids[places] - env_ids[0], take_rows(batch.obs, places))
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
