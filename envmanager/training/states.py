"""Conversion of modules and optimizers to arrays by name, and back, for checkpoints.

The rule: ``load_learner`` takes what ``learner_state`` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.extras import needed_by

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn

_SCALE = ".scale."
"""Part of the names of an encoder's mean and spread."""


def named(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of one part of a trainer with its name before theirs: ``"model.…"``."""
    return {f"{part}.{name}": array for name, array in arrays.items()}


def of_part(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of one part, without its name: the opposite of ``named``."""
    return {name[len(part) + 1 :]: arrays[name] for name in arrays if name.startswith(f"{part}.")}


def learner_state(
    optimizer: torch.optim.Optimizer, **modules: nn.Module
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return weights and optimizer as arrays by name (``"model.…"``, ``"optimizer.…"``), the rest as JSON data."""
    tensors, facts = optimizer_state(optimizer)
    arrays = named("optimizer", tensors)
    for name, module in modules.items():
        arrays |= named(name, arrays_of_module(module))
    return arrays, {"optimizer": facts}


def load_learner(
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    **modules: nn.Module,
) -> None:
    """Load what ``learner_state`` returned; other arrays and facts are ignored. Raises what ``load_module`` does."""
    for name, module in modules.items():
        load_module(module, of_part(name, arrays))
    load_optimizer(optimizer, of_part("optimizer", arrays), facts["optimizer"])


def arrays_of_module(module: nn.Module) -> dict[str, np.ndarray]:
    """Return the weights and buffers by name."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def load_module(module: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Load weights and buffers. Raises KeyError, RuntimeError or ValueError when they belong to another model."""
    is_normalized, was_normalized = (any(_SCALE in name for name in names) for names in (module.state_dict(), arrays))
    if is_normalized != was_normalized:
        raise ValueError(f"it was written with normalize_observations={str(was_normalized).lower()}")
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the optimizer's tensors by name (``"3.exp_avg"``: for parameter 3), and the rest as JSON data."""
    state = optimizer.state_dict()
    arrays = {
        f"{number}.{name}": value.detach().cpu().numpy()
        for number, own in state["state"].items()
        for name, value in own.items()
        if isinstance(value, Tensor)
    }
    groups = [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items() if name != "params"}
        for group in state["param_groups"]
    ]
    return arrays, {"param_groups": groups}


def load_optimizer(
    optimizer: torch.optim.Optimizer, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]
) -> None:
    """Load what ``optimizer_state`` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = torch.from_numpy(np.array(array))
    groups = optimizer.state_dict()["param_groups"]
    merged = [{**group, **saved} for group, saved in zip(groups, facts["param_groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": merged})


def anneal(optimizer: torch.optim.Optimizer, learning_rate: float, progress: float) -> None:
    """Set the learning rate, which falls to zero as ``progress`` goes from 0 to 1."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * max(0.0, 1.0 - progress)


def means(figures: Sequence[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Return the mean of each figure over several batches. Waits for a GPU once per figure."""
    return {name: float(sum(each[name] for each in figures)) / len(figures) for name in figures[0]}
