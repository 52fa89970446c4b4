"""Seeds of environments: an independent one for each environment and generation.

A seed is never ``seed + i``: neighbouring seeds of many generators give related streams, and two runs with seeds 0 and
1 would share all but one of their environments' seeds. ``numpy.random.SeedSequence`` derives independent ones
(https://numpy.org/doc/stable/reference/random/parallel.html).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def derive_seed(seed: int, env_id: int, generation: int = 0) -> int:
    """Return the seed of one environment: a number in [0, 2**31), which every environment library accepts."""
    sequence = np.random.SeedSequence(seed, spawn_key=(env_id, generation))
    return int(sequence.generate_state(1)[0] >> 1)


def derive_seeds(
    seed: int | Sequence[int | None] | None, env_ids: Sequence[int], generation: int = 0
) -> list[int | None]:
    """Return the seeds of some environments for one reset.

    If ``seed`` is None, all are None: each environment keeps its random number generator. A list has one seed for
    each environment of the manager, by env_id; these are returned unchanged.
    """
    if seed is None:
        return [None] * len(env_ids)
    if isinstance(seed, int):
        return [derive_seed(seed, env_id, generation) for env_id in env_ids]
    return [seed[env_id] for env_id in env_ids]


def reseeded(seed: int | Sequence[int | None] | None, generation: int) -> int | list[int | None] | None:
    """Return the ``seed`` of a worker's replacement, so that it does not repeat the old generation's episodes.

    A single number stays, since ``derive_seed`` derives another seed from it for each generation. In a list, each seed
    is replaced by one derived from it.
    """
    if seed is None or isinstance(seed, int):
        return seed
    return [None if own is None else derive_seed(own, env_id, generation) for env_id, own in enumerate(seed)]
