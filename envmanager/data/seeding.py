"""Derivation of independent seeds, one for each environment in each generation of its worker.

A derived seed is not ``seed + i``, because adjacent seeds cause correlated streams in many generators. Also, two runs
with seeds 0 and 1 would share most of their seeds. ``numpy.random.SeedSequence`` derives independent seeds
(https://numpy.org/doc/stable/reference/random/parallel.html).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1


def derive_seed(seed: int, env_id: int, generation: int = 0) -> int:
    """Derive a seed from all three arguments. It is in [0, 2**31), a range that environment libraries accept."""
    return _derived(seed, env_id, generation)


def task_seed(seed: int, index: int) -> int:
    """Derive the seed of a manager's task ``index``, which no environment shares, in the range of ``derive_seed``."""
    return _derived(seed, index)


def _derived(seed: int, *key: int) -> int:
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0] >> 1)


def seed_of_series(first: int, number: int) -> int:
    """Return the seed of an environment's episode ``number`` after one with the seed ``first``, which has number 0.

    A mixer of 64 bits (https://dl.acm.org/doi/10.1145/2660193.2660195) takes a tenth of the time of ``derive_seed``,
    which would be seen in environments with short episodes.
    """
    if number == 0:
        return first
    bits = (first + number * 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK
    return (bits ^ bits >> 31) >> 33


def derive_seeds(
    seed: int | Sequence[int | None] | None, env_ids: Sequence[int], generation: int = 0
) -> list[int | None]:
    """Return the seeds of the environments ``env_ids`` for one reset.

    If ``seed`` is an int, the seeds are derived from it. If it is None, all seeds are None, for unseeded resets. If it
    is a sequence, item i is the seed of the manager's environment i, and is returned unchanged in every generation.
    """
    if seed is None:
        return [None] * len(env_ids)
    if isinstance(seed, int):
        return [derive_seed(seed, env_id, generation) for env_id in env_ids]
    return [seed[env_id] for env_id in env_ids]


def reseeded(seed: int | Sequence[int | None] | None, generation: int) -> int | list[int | None] | None:
    """Return the ``seed`` with which to reset a worker's replacement, so that no old episode is repeated.

    None and an int are returned unchanged. From an int, ``derive_seeds`` derives different seeds in each generation
    anyway. In a sequence, each seed is replaced by one derived from it and ``generation``, but None remains None.
    """
    if seed is None or isinstance(seed, int) or generation == 0:
        return seed  # type: ignore[return-value]
    return [None if own is None else derive_seed(own, env_id, generation) for env_id, own in enumerate(seed)]
