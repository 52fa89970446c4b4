"""States of PyTorch's random generators, of the CPU and of each GPU, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from envmanager.importing import needed_by

with needed_by("envmanager.training", extra="torch"):
    import torch


def states() -> dict[str, np.ndarray]:
    """Return all states by name: ``"torch"`` for the CPU, ``"cuda0"`` for the first GPU."""
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    found = {"torch": torch.get_rng_state(), **{f"cuda{number}": state for number, state in enumerate(of_gpus)}}
    return {name: state.numpy() for name, state in found.items()}


def restore(states: Mapping[str, np.ndarray]) -> None:
    """Restore what ``states`` returned. States of missing GPUs are ignored."""
    torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))
    for number in range(torch.cuda.device_count()):
        if f"cuda{number}" in states:
            torch.cuda.set_rng_state(torch.from_numpy(np.array(states[f"cuda{number}"])), number)
