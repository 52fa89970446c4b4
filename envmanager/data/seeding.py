"""Derives independent seeds, one for each environment and generation.

A seed is never ``seed + i``, because with adjacent seeds many generators give related streams, and two runs with seeds
0 and 1 would share all but one of their environments' seeds. ``numpy.random.SeedSequence`` derives independent seeds
(https://numpy.org/doc/stable/reference/random/parallel.html).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def derive_seed(seed: int, env_id: int, generation: int = 0) -> int:
    """Return the seed of one environment, in [0, 2**31), a range that every environment library accepts."""
    sequence = np.random.SeedSequence(seed, spawn_key=(env_id, generation))
    return int(sequence.generate_state(1)[0] >> 1)


def derive_seeds(
    seed: int | Sequence[int | None] | None, env_ids: Sequence[int], generation: int = 0
) -> list[int | None]:
    """Return the seeds of some environments for one reset.

    If ``seed`` is None, all are None, so that each environment keeps the state of its random number generator. If it is
    a list, it has one seed per environment of the manager, by env_id, and these are returned unchanged.
    """
    if seed is None:
        return [None] * len(env_ids)
    if isinstance(seed, int):
        return [derive_seed(seed, env_id, generation) for env_id in env_ids]
    return [seed[env_id] for env_id in env_ids]


def reseeded(seed: int | Sequence[int | None] | None, generation: int) -> int | list[int | None] | None:
    """Return the ``seed`` for the reset of a worker's replacement, which must not repeat the old episodes.

    A single number is unchanged, because ``derive_seed`` derives another seed from it for each generation. From each
    seed in a list, a new one is derived.
    """
    if seed is None or isinstance(seed, int):
        return seed
    return [None if own is None else derive_seed(own, env_id, generation) for env_id, own in enumerate(seed)]
