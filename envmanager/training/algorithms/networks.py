"""Networks for observations of any spec (vectors, images, dicts and tuples of them), and what their optimizers share.

The rule: ``load_learner`` restores what ``learner_state`` returns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.adapters.other_names import other_names
from envmanager.data.specs import ArraySpec, BehaviorSpec, as_array, describe_value
from envmanager.data.trees import Tree, leaves, leaves_like
from envmanager.errors import ConfigError
from envmanager.importing import nearest, needed_by
from envmanager.options import layer_sizes, one_of, plain_numbers, within
from envmanager.training.trainer import of_part

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn


SMALLEST_IMAGE = 36
"""Minimum height and width for a 3-D array to be treated as an image; the convolutions need this size."""
CONVOLUTIONS = {
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),  # Mnih et al. 2015
    "small": ((32, 5, 5), (64, 5, 5)),  # van Hasselt, Hessel and Aslanides 2019; four times as fast
}
"""Convolutional layers by name. Each layer is given as (number of filters, kernel size, stride)."""
_MOST_ONE_HOT = 1000


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class NetworkOptions:
    """The options of all trainers of this library. Subclasses override some defaults."""

    other_names = staticmethod(other_names)

    learning_rate: float = attrs.field(default=1e-4, validator=within(0))
    anneal: bool = False
    """Whether the learning rate falls linearly to zero over the training."""
    gamma: float = attrs.field(default=0.99, validator=within(0, 1))
    hidden: Sequence[int] = attrs.field(default=(256, 256), validator=layer_sizes)
    """Sizes of each network's hidden layers after the encoder. Networks for images usually need no hidden layers."""
    convolutions: str = attrs.field(default="nature", validator=one_of(*CONVOLUTIONS))
    """Convolutional layers for images: ``nature`` (Mnih et al. 2015) or ``small``."""
    normalize_observations: bool = False
    """Whether to normalize flat observations by their mean and standard deviation so far; images are left unchanged."""
    normalize_rewards: bool = False
    """Whether to divide rewards by the standard deviation of the discounted returns so far."""


class Encoder(nn.Module):
    """A network that maps a tree of observations to features ``[n, n_features]``.

    Images go through ``CONVOLUTIONS[convolutions]``. Scalars and vectors of integers other than uint8 become one-hot if
    each integer has at most 1,000 possible values. Other leaves are flattened and, with ``normalize``, normalized by a
    running mean and standard deviation. ``unseen`` is the index of a leaf to ignore.
    """

    def __init__(
        self, spec: Tree, *, convolutions: str = "nature", normalize: bool = False, unseen: int | None = None
    ) -> None:
        super().__init__()
        self._spec = spec
        parts: list[Any] = [
            Unseen() if place == unseen else _part(leaf, convolutions, normalize)
            for place, leaf in enumerate(leaves(spec))
        ]
        self.parts = nn.ModuleList(parts)
        self.n_features = sum(int(part.n_features) for part in parts)

    @classmethod
    def of(cls, spec: BehaviorSpec, options: NetworkOptions, *, unseen: int | None = None) -> Encoder:
        """Return an encoder of a behavior's observations, as the options of its trainer say."""
        normalize = options.normalize_observations
        return cls(spec.observation, convolutions=options.convolutions, normalize=normalize, unseen=unseen)

    def forward(self, obs: Sequence[Tensor]) -> Tensor:
        """Return the features of a batch. ``obs`` lists the observations' leaves, each ``[n, …]``, in tree order."""
        features = [part(leaf) for part, leaf in zip(self.parts, obs, strict=True) if part.n_features]
        return torch.cat(features, dim=-1)

    @property
    def is_normalized(self) -> bool:
        """Whether any leaf of the observations is normalized."""
        return any(_has_scale(part) for part in self.parts)

    def learn_scale(self, obs: Sequence[Tensor]) -> None:
        """Update the normalization's means and variances from a batch of observations. ``obs`` lists their leaves."""
        for part, leaf in zip(self.parts, obs, strict=True):
            if _has_scale(part):
                part.scale.update(as_rows(leaf).float())

    def share_scale(self, other: Encoder) -> None:
        """Share the normalization of ``other``, an encoder of the same observations, so that updates affect both."""
        for part, theirs in zip(self.parts, other.parts, strict=True):
            if _has_scale(part):
                part.scale = theirs.scale

    def tensors(self, obs: Tree, device: torch.device) -> list[Tensor]:
        """Return the leaves of the tree ``obs`` as tensors on ``device``. Leaves may be arrays or tensors."""
        return [
            leaf.to(device) if isinstance(leaf, Tensor) else to_tensor(as_array(leaf), device)
            for leaf in leaves_like(self._spec, obs)
        ]


def to_tensor(array: np.ndarray, device: torch.device, *, pinned: bool = True) -> Tensor:
    """Convert an array to a tensor. Copies to a GPU use pinned memory if ``pinned``. uint16/32/64 become int64."""
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.astype(np.int64)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)


def as_rows(leaf: Tensor) -> Tensor:
    """Flatten a tensor ``[n, …]`` to ``[n, k]``. The size n is not read, so that a traced module works for any n."""
    return leaf.flatten(1) if leaf.ndim > 1 else leaf.unsqueeze(1)


class Flat(nn.Module):
    """An encoder that flattens each observation to a row of floats and, with ``normalize``, normalizes them."""

    def __init__(self, spec: ArraySpec, *, normalize: bool) -> None:
        super().__init__()
        self.n_features = math.prod(spec.shape)
        self.scale = Scale(self.n_features) if normalize else None

    def forward(self, leaf: Tensor) -> Tensor:
        flat = as_rows(leaf).float()
        return flat if self.scale is None else self.scale(flat)


class OneHot(nn.Module):
    """An encoder that converts bounded integers to one-hot rows."""

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        assert spec.whole_bounds is not None
        self._low, high = spec.whole_bounds
        self._n = high - self._low + 1
        self.n_features = self._n * math.prod(spec.shape)

    def forward(self, leaf: Tensor) -> Tensor:
        indices = as_rows(leaf).long() - self._low
        return nn.functional.one_hot(indices, self._n).flatten(1).float()


class Convolutions(nn.Module):
    """An encoder that maps each image, channels first or last, to 512 features. uint8 images are divided by 255."""

    n_features = 512

    def __init__(self, spec: ArraySpec, kind: str = "nature") -> None:
        super().__init__()
        self._channels_last = spec.shape[2] < spec.shape[0]
        channels, height, width = (spec.shape[2], *spec.shape[:2]) if self._channels_last else spec.shape
        self._divisor = 255.0 if spec.dtype == np.uint8 else 1.0
        layers: list[nn.Module] = []
        n_before = channels
        for n_filters, size, stride in CONVOLUTIONS[kind]:
            layers += [orthogonal(nn.Conv2d(n_before, n_filters, size, stride=stride)), nn.ReLU()]
            n_before = n_filters
        self.layers = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            n_flat = self.layers(torch.zeros(1, channels, height, width)).shape[1]
        self.last = nn.Sequential(orthogonal(nn.Linear(n_flat, self.n_features)), nn.ReLU())

    def forward(self, leaf: Tensor) -> Tensor:
        images = leaf.permute(0, 3, 1, 2) if self._channels_last else leaf
        features: Tensor = self.last(self.layers(images.to(torch.float32, copy=True).div_(self._divisor)))
        return features


class Scale(nn.Module):
    """A layer that normalizes values by a running mean and variance (Welford 1962, batched), and clips to ±MOST."""

    MOST = 10.0
    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("variance", torch.ones(n))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, values: Tensor) -> Tensor:
        return ((values - self.mean) / self.deviation()).clamp(-self.MOST, self.MOST)

    def deviation(self) -> Tensor:
        """Return the standard deviations, none of which is 0."""
        return (self.variance + 1e-8).sqrt()

    def update(self, values: Tensor) -> None:
        """Update the mean and variance with values ``[n, k]``."""
        n = len(values)
        variance, mean = torch.var_mean(values, dim=0, correction=0)
        total = self.count + n
        delta = mean - self.mean
        spread = self.variance * self.count + variance * n + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.variance.copy_(spread / total)
        self.count.copy_(total)


class Unseen(nn.Module):
    """A placeholder for a leaf that the network ignores, such as an action mask."""

    n_features = 0


def _has_scale(part: nn.Module) -> bool:
    return getattr(part, "scale", None) is not None


def _part(spec: ArraySpec, convolutions: str, normalize: bool) -> nn.Module:
    if len(spec.shape) == 3 and sorted(spec.shape)[1] >= SMALLEST_IMAGE:
        return Convolutions(spec, convolutions)
    bounds = spec.whole_bounds
    if bounds is not None and bounds[1] - bounds[0] < _MOST_ONE_HOT and len(spec.shape) <= 1 and spec.dtype != np.uint8:
        return OneHot(spec)
    return Flat(spec, normalize=normalize)


def mlp(
    n_in: int, hidden: Sequence[int], n_out: int, *, activation: type[nn.Module], last_gain: float | None = None
) -> nn.Sequential:
    """Return a multilayer perceptron with PyTorch's initial weights or, with ``last_gain``, orthogonal ones.

    ``last_gain`` scales the last layer's weights. DQN learns worse from orthogonal weights (docs/training-results.md).
    """
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise([n_in, *hidden]):
        layers += [nn.Linear(before, after), activation()]
    last = nn.Linear([n_in, *hidden][-1], n_out)
    if last_gain is not None:
        for layer in layers[::2]:
            orthogonal(layer)
        orthogonal(last, last_gain)
    return nn.Sequential(*layers, last)


@attrs.frozen
class DenseLayer:
    """A dense layer as arrays. ``weights`` is ``[outputs, inputs]``, ``activation`` is "tanh", "relu" or "linear"."""

    weights: np.ndarray
    biases: np.ndarray
    activation: str

    @classmethod
    def of_mlp(cls, layers: nn.Sequential) -> list[DenseLayer]:
        """Return the layers of a network that ``mlp`` has made."""
        linear: list[Any] = list(layers)[::2]
        names = [{nn.Tanh: "tanh", nn.ReLU: "relu"}[type(each)] for each in list(layers)[1::2]]
        return [
            cls(layer.weight.detach().cpu().numpy(), layer.bias.detach().cpu().numpy(), name)
            for layer, name in zip(linear, [*names, "linear"], strict=True)
        ]


def orthogonal(layer: Any, gain: float = math.sqrt(2)) -> Any:
    """Initialize ``layer`` with orthogonal weights scaled by ``gain`` (Saxe et al. 2013) and zero biases. Return it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def pick_device(device: str, *, where: str = "device") -> torch.device:
    """Return the device named ``device``; ``"auto"`` selects a GPU if CUDA is available, else the CPU.

    Raises ConfigError, which begins with ``where``, if PyTorch has no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except Exception as error:  # AssertionError without CUDA, RuntimeError for an unknown name
        known = ["auto", "cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise ConfigError(
            f"{where} is {device!r}, which PyTorch {torch.__version__} cannot use here{nearest(str(device), known)} "
            f"Devices: {', '.join(known)}. PyTorch says: {str(error).partition(chr(10))[0]}"
        ) from error
    return found


_SCALE = ".scale."
"""Substring that marks the names of an encoder's normalization tensors."""


def learner_state(optimizer: torch.optim.Optimizer, **modules: nn.Module) -> dict[str, np.ndarray]:
    """Return the weights and the optimizer's tensors by name. Names begin with a module's keyword or ``optimizer``.

    ``"optimizer.3.exp_avg"`` belongs to parameter 3. The optimizer's options are left out. The arrays of a module on
    the CPU share its memory.
    """
    arrays = {
        f"optimizer.{number}.{name}": value.detach().cpu().numpy()
        for number, own in optimizer.state_dict()["state"].items()
        for name, value in own.items()
        if isinstance(value, Tensor)
    }
    for part, module in modules.items():
        arrays |= {f"{part}.{name}": tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}
    return arrays


def load_learner(arrays: Mapping[str, np.ndarray], optimizer: torch.optim.Optimizer, **modules: nn.Module) -> None:
    """Load the arrays that ``learner_state`` returned. Raises RuntimeError, ValueError or IndexError if they misfit.

    Checks the shapes of the optimizer's tensors, because PyTorch does not. A fused step would write past the end of an
    array that is too small.
    """
    for part, module in modules.items():
        load_module(module, of_part(part, arrays))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, array in of_part("optimizer", arrays).items():
        number, _, key = name.partition(".")
        shape = () if key == "step" else tuple(parameters[int(number)].shape)
        if (array.shape or (1,)) != (shape or (1,)):  # files store a scalar as an array of one number
            raise ValueError(f"optimizer.{name} should have the shape {list(shape)}, but is {describe_value(array)}")
        state.setdefault(int(number), {})[key] = torch.from_numpy(np.array(array)).reshape(shape)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def load_module(module: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Load a module's part of what ``learner_state`` returned. Raises RuntimeError or ValueError if it does not fit."""
    is_normalized, was_normalized = (any(_SCALE in name for name in names) for names in (module.state_dict(), arrays))
    if is_normalized != was_normalized:
        raise ValueError(f"it was written with normalize_observations={str(was_normalized).lower()}")
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})


def anneal(optimizer: torch.optim.Optimizer, learning_rate: float, progress: float) -> None:
    """Set the optimizer's learning rate, which falls linearly from ``learning_rate`` at ``progress`` 0 to zero at 1."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * max(0.0, 1.0 - progress)


def means(figures: Sequence[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Return the mean of each figure over the batches in ``figures``. Synchronizes with a GPU once per figure."""
    return {name: float(sum(each[name] for each in figures)) / len(figures) for name in figures[0]}
