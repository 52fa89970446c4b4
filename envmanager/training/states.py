"""Conversion of the state of modules and optimizers to named arrays, and back, for checkpoints.

The rule: ``load_learner`` restores what ``learner_state`` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envmanager.data.specs import describe_value
from envmanager.importing import needed_by
from envmanager.training.named_arrays import named, of_part

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn

_SCALE = ".scale."
"""Substring that marks the names of an encoder's normalization tensors."""


def learner_state(optimizer: torch.optim.Optimizer, **modules: nn.Module) -> dict[str, np.ndarray]:
    """Return the weights and the optimizer's tensors by name. Names begin with a module's keyword or ``optimizer``."""
    arrays = named("optimizer", optimizer_state(optimizer))
    for name, module in modules.items():
        arrays |= named(name, arrays_of_module(module))
    return arrays


def load_learner(arrays: Mapping[str, np.ndarray], optimizer: torch.optim.Optimizer, **modules: nn.Module) -> None:
    """Load the arrays that ``learner_state`` returned. Raises the errors of ``load_module`` and ``load_optimizer``."""
    for name, module in modules.items():
        load_module(module, of_part(name, arrays))
    load_optimizer(optimizer, of_part("optimizer", arrays))


def arrays_of_module(module: nn.Module) -> dict[str, np.ndarray]:
    """Return the module's weights and buffers by name. The arrays of a module on the CPU share its memory."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def load_module(module: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Load the arrays that ``arrays_of_module`` returned. Raises RuntimeError or ValueError if they do not fit."""
    is_normalized, was_normalized = (any(_SCALE in name for name in names) for names in (module.state_dict(), arrays))
    if is_normalized != was_normalized:
        raise ValueError(f"it was written with normalize_observations={str(was_normalized).lower()}")
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Return the optimizer's tensors by name (``"3.exp_avg"`` belongs to parameter 3), without its options."""
    return {
        f"{number}.{name}": value.detach().cpu().numpy()
        for number, own in optimizer.state_dict()["state"].items()
        for name, value in own.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: torch.optim.Optimizer, arrays: Mapping[str, np.ndarray]) -> None:
    """Load the arrays that ``optimizer_state`` returned. Raises ValueError or IndexError if they do not fit.

    Checks the shapes, because PyTorch does not. A fused step would write past the end of an array that is too small.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        number, _, key = name.partition(".")
        shape = () if key == "step" else tuple(parameters[int(number)].shape)
        if (array.shape or (1,)) != (shape or (1,)):  # files store a scalar as an array of one number
            raise ValueError(f"optimizer.{name} should have the shape {list(shape)}, but is {describe_value(array)}")
        state.setdefault(int(number), {})[key] = torch.from_numpy(np.array(array)).reshape(shape)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def anneal(optimizer: torch.optim.Optimizer, learning_rate: float, progress: float) -> None:
    """Set the optimizer's learning rate, which falls linearly from ``learning_rate`` at ``progress`` 0 to zero at 1."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * max(0.0, 1.0 - progress)


def means(figures: Sequence[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Return the mean of each figure over the batches in ``figures``. Synchronizes with a GPU once per figure."""
    return {name: float(sum(each[name] for each in figures)) / len(figures) for name in figures[0]}
