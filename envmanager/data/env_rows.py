"""Assignment of environments to workers, and grouping of env_ids by worker.

::

    n_envs=8 over n_workers=3      worker 0: envs 0 1 2    worker 1: envs 3 4 5    worker 2: envs 6 7

Each worker has a contiguous block of env_ids, so its rows are adjacent in arrays of all envs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from envmanager.data.specs import as_array, describe_value
from envmanager.errors import BadAction, UsageError


def split_evenly(n_envs: int, n_workers: int) -> list[range]:
    """Return the env_ids of each worker, as contiguous blocks whose lengths differ by at most one."""
    blocks = np.array_split(np.arange(n_envs), n_workers)
    return [range(int(block[0]), int(block[-1]) + 1) for block in blocks]


def split_by_kind(sizes: Sequence[int], n_workers: int) -> list[list[range]]:
    """Return the env_ids of each worker, by kind. Each kind has the next ``sizes[i]`` environments.

    ``n_workers``: from the number of kinds to that of environments.
    """
    counts = [1] * len(sizes)
    for _ in range(n_workers - len(sizes)):
        fullest = max(range(len(sizes)), key=lambda kind: sizes[kind] / counts[kind])
        counts[fullest] += 1
    first, blocks = 0, []
    for size, count in zip(sizes, counts, strict=True):
        blocks.append([range(first + block.start, first + block.stop) for block in split_evenly(size, count)])
        first += size
    return blocks


class EnvsOfWorker(NamedTuple):
    """The environments of one worker among the ``env_ids`` of a call.

    ``rows``: indices in the worker's block of envs. ``places``: indices in ``env_ids``, as an array or a slice.
    """

    worker_id: int
    rows: np.ndarray
    places: Any


class EnvIndex:
    """An index from each env_id to the worker that hosts the environment."""

    def __init__(self, blocks: Sequence[Sequence[int]]) -> None:
        self.blocks = [tuple(block) for block in blocks]
        self.n_envs = sum(len(block) for block in self.blocks)
        self._first = np.array([block[0] for block in self.blocks])
        self._worker_of = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
        self._hosts_one_each = all(len(block) == 1 for block in blocks)
        self._row_0 = np.zeros(1, np.int64)
        self.all_env_ids = np.arange(self.n_envs)
        """Sorted ids of all environments, int64[n_envs], read-only because batches share this array."""
        self.all_env_ids.flags.writeable = False
        rows_of = {n: np.arange(n) for n in set(map(len, self.blocks))}
        self.all_groups = [
            EnvsOfWorker(worker_id, rows_of[len(block)], slice(block[0], block[0] + len(block)))
            for worker_id, block in enumerate(self.blocks)
        ]

    def grouped(self, env_ids: Any, error: type[BadAction] | type[UsageError]) -> tuple[int, list[EnvsOfWorker]]:
        """Return the number of ``env_ids``, and the ids grouped by worker. Raises ``error`` for invalid ids.

        A pool passes one of ``each_alone``.
        """
        if env_ids.__class__ is EnvsOfWorker:
            return 1, [env_ids]
        everything = self.all_env_ids
        if (  # an array of all ids in order, which is what most callers pass
            env_ids.__class__ is np.ndarray
            and env_ids.shape == everything.shape
            and env_ids.dtype.kind in "iu"
            and (env_ids == everything).all()
        ):
            return self.n_envs, self.all_groups
        ids, numbers = self.checked(env_ids, error)
        if self._hosts_one_each:
            row_0 = self._row_0
            return len(numbers), [
                EnvsOfWorker(env_id, row_0, slice(place, place + 1)) for place, env_id in enumerate(numbers)
            ]
        return len(numbers), self.by_worker(ids.astype(np.int64, copy=False))  # uint64 less int64 would be float64

    def each_alone(self) -> list[EnvsOfWorker]:
        """Return a group of its own for each environment."""
        return [
            EnvsOfWorker(worker_id, np.array([row]), slice(0, 1))
            for worker_id, block in enumerate(self.blocks)
            for row in range(len(block))
        ]

    def checked(self, env_ids: Any, error: type[BadAction] | type[UsageError]) -> tuple[np.ndarray, list[int]]:
        """Return ``env_ids`` as an array of any integer dtype, and as a list.

        Raises ``error`` unless all are distinct ids of existing environments.
        """
        expected = "env_ids should be a list of whole numbers, but is"
        try:
            ids = as_array(env_ids)
        except ValueError as ragged:
            raise error(f"{expected} {ragged}.") from ragged
        if ids.shape == (0,):
            return np.zeros(0, np.int64), []
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise error(f"{expected} {describe_value(ids if ids.ndim else env_ids)}.")
        numbers = ids.tolist()  # most calls pass few ids, for which Python is faster than NumPy
        unknown = [number for number in numbers if not 0 <= number < self.n_envs]
        if unknown:
            raise error(f"env_ids names env {unknown[0]}, but there are envs 0 to {self.n_envs - 1}.")
        if len(set(numbers)) < len(numbers):
            raise error(f"env_ids names an environment twice: {numbers}.")
        return ids, numbers

    def by_worker(self, env_ids: np.ndarray) -> list[EnvsOfWorker]:
        """Group valid ``env_ids`` by worker. Return the groups, with arrays of places, in order of worker_id."""
        order = np.argsort(env_ids, kind="stable")
        workers = self._worker_of[env_ids[order]]
        cuts = np.flatnonzero(np.diff(workers)) + 1
        groups = []
        for places in np.split(order, cuts):
            if len(places):
                worker_id = int(self._worker_of[env_ids[places[0]]])
                groups.append(EnvsOfWorker(worker_id, env_ids[places] - self._first[worker_id], places))
        return groups
