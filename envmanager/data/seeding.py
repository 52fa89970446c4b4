"""Derivation of independent seeds, one for each environment and generation (number of replacements of its worker).

A seed is never ``seed + i``, because adjacent seeds give correlated streams in many generators, and two runs with seeds
0 and 1 would share all but one of their environments' seeds. ``numpy.random.SeedSequence`` derives independent seeds
(https://numpy.org/doc/stable/reference/random/parallel.html).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def derive_seed(seed: int, env_id: int, generation: int = 0) -> int:
    """Return the seed derived from the arguments, in [0, 2**31), a range that every environment library accepts."""
    sequence = np.random.SeedSequence(seed, spawn_key=(env_id, generation))
    return int(sequence.generate_state(1)[0] >> 1)


def derive_seeds(
    seed: int | Sequence[int | None] | None, env_ids: Sequence[int], generation: int = 0
) -> list[int | None]:
    """Return the seeds of the environments ``env_ids`` for one reset.

    From an int, ``derive_seed`` derives all seeds. With None all seeds are None: environments keep the state of their
    random number generators. A list has the seeds of all environments of the manager, by env_id, and is used unchanged.
    """
    if seed is None:
        return [None] * len(env_ids)
    if isinstance(seed, int):
        return [derive_seed(seed, env_id, generation) for env_id in env_ids]
    return [seed[env_id] for env_id in env_ids]


def reseeded(seed: int | Sequence[int | None] | None, generation: int) -> int | list[int | None] | None:
    """Return the ``seed`` for the reset of a worker's replacement, which must not repeat the old episodes.

    None (unseeded) and an int are returned unchanged; from an int, ``derive_seed`` derives other seeds in each
    generation. Each seed in a list is replaced by a seed derived from it.
    """
    if seed is None or isinstance(seed, int):
        return seed
    return [None if own is None else derive_seed(own, env_id, generation) for env_id, own in enumerate(seed)]
