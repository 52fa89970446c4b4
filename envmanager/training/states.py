"""Modules and optimizers as arrays by name, and back.

The rule: what ``learner_state`` gives, ``load_learner`` takes; the rest is what the two are made of.
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
"""In the names of what an encoder normalizes by."""


def named(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of one part of a trainer, under its name: ``"model.…"``."""
    return {f"{part}.{name}": array for name, array in arrays.items()}


def of_part(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The opposite: those of one part among all."""
    return {name[len(part) + 1 :]: arrays[name] for name in arrays if name.startswith(f"{part}.")}


def learner_state(
    optimizer: torch.optim.Optimizer, **modules: nn.Module
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """All that is trained, as arrays by name (``"model.…"``, ``"optimizer.…"``), and the rest as JSON can hold it."""
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
    """The opposite; other arrays and facts are passed over. Raises what ``load_module`` does."""
    for name, module in modules.items():
        load_module(module, of_part(name, arrays))
    load_optimizer(optimizer, of_part("optimizer", arrays), facts["optimizer"])


def arrays_of_module(module: nn.Module) -> dict[str, np.ndarray]:
    """The weights and buffers."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def load_module(module: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """The opposite; KeyError, RuntimeError or ValueError when they are of another model."""
    is_normalized, was_normalized = (any(_SCALE in name for name in names) for names in (module.state_dict(), arrays))
    if is_normalized != was_normalized:
        raise ValueError(f"it was written with normalize_observations={str(was_normalized).lower()}")
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors by name (``"3.exp_avg"``: of parameter 3), and the rest as JSON can hold it."""
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
    """The opposite."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = torch.from_numpy(np.array(array))
    groups = optimizer.state_dict()["param_groups"]
    merged = [{**group, **saved} for group, saved in zip(groups, facts["param_groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": merged})


def anneal(optimizer: torch.optim.Optimizer, learning_rate: float, progress: float) -> None:
    """Let the learning rate fall to zero as ``progress`` goes from 0 to 1."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * max(0.0, 1.0 - progress)


def means(figures: Sequence[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """The mean of each figure over several batches, which all have the same. Waits for a GPU once per figure."""
    return {name: float(sum(each[name] for each in figures)) / len(figures) for name in figures[0]}
