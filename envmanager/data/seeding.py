"""Draws seeds: one per environment and generation, no two of them related.

The rule: never ``seed + i``. Neighbouring seeds of many generators give related streams, and the same environment in
two runs with seeds 0 and 1 would share all but one of its seeds. ``numpy.random.SeedSequence`` exists for this
(https://numpy.org/doc/stable/reference/random/parallel.html).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def derive_seed(seed: int, env_id: int, generation: int = 0) -> int:
    """The seed of one environment: a number in [0, 2**31), which every environment library accepts."""
    sequence = np.random.SeedSequence(seed, spawn_key=(env_id, generation))
    return int(sequence.generate_state(1)[0] >> 1)


def derive_seeds(
    seed: int | Sequence[int | None] | None, env_ids: Sequence[int], generation: int = 0
) -> list[int | None]:
    """The seeds of some environments for one reset.

    None asks for no seeding: each environment goes on with the random numbers it has. A list holds one seed per
    environment of the manager, by env_id, and is passed on unchanged.
    """
    if seed is None:
        return [None] * len(env_ids)
    if isinstance(seed, int):
        return [derive_seed(seed, env_id, generation) for env_id in env_ids]
    return [seed[env_id] for env_id in env_ids]


def reseeded(seed: int | Sequence[int | None] | None, generation: int) -> int | list[int | None] | None:
    """What a worker's replacement is reset with, so that it does not play the old generation's episodes again.

    One number stays: each generation derives another seed from it. Of a list, every seed is made another.
    """
    if seed is None or isinstance(seed, int):
        return seed
    return [None if own is None else derive_seed(own, env_id, generation) for env_id, own in enumerate(seed)]
