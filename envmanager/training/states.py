"""Modules and optimizers as arrays by name, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def arrays_of_module(module: nn.Module) -> dict[str, np.ndarray]:
    """The weights and buffers."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def load_module(module: nn.Module, arrays: Mapping[str, np.ndarray], prefix: str) -> None:
    """The opposite; KeyError or RuntimeError when they are of another model."""
    own = {name[len(prefix) :]: torch.from_numpy(np.array(a)) for name, a in arrays.items() if name.startswith(prefix)}
    module.load_state_dict(own)


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
    optimizer: torch.optim.Optimizer, arrays: Mapping[str, np.ndarray], prefix: str, facts: Mapping[str, Any]
) -> None:
    """The opposite."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            number, _, key = name[len(prefix) :].partition(".")
            state.setdefault(int(number), {})[key] = torch.from_numpy(np.array(array))
    groups = optimizer.state_dict()["param_groups"]
    merged = [{**group, **saved} for group, saved in zip(groups, facts["param_groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": merged})
