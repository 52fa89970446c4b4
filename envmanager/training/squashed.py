"""Bounded continuous actions as the tanh of a Gaussian (Haarnoja et al. 2018b, appendix C).

::

    network ── mean, log of the spread ──▶ u ~ Gaussian ──▶ tanh(u), -1 to 1 ──▶ stretched to the action bounds

The rule: SAC learns from actions between -1 and 1; only the environment receives actions stretched to its bounds.
"""

from __future__ import annotations

import math

import numpy as np

from envmanager.data.specs import ArraySpec
from envmanager.data.trees import Tree, build, leaves
from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.training.actions import bounds_of

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor
    from torch.nn.functional import softplus

COLUMN = "raw"
"""Name of the raw action, float32[n_numbers] between -1 and 1, in a policy's outputs and in the replay."""
_LOG_STD = (-20.0, 2.0)
"""Bounds to which the log standard deviation is clipped, as in the authors' implementation."""
_LOG_2 = math.log(2.0)
_LOG_SQRT_2_PI = 0.5 * math.log(2.0 * math.pi)


class SquashedGaussian:
    """A distribution of actions. Each action is flattened to a row of ``n`` floats between -1 and 1.

    The methods' argument ``inputs``, ``[n_rows, 2 n]``, is a network's output: ``n`` means, then ``n`` log standard
    deviations. The constructor raises UsageError unless all leaves of the action spec are floats with finite bounds.
    """

    def __init__(self, spec: Tree) -> None:
        self._spec = spec
        self._parts = [_Part(leaf) for leaf in leaves(spec)]
        self._ends = np.cumsum([part.n for part in self._parts])
        self.n = int(self._ends[-1])
        self.columns = {COLUMN: ArraySpec((self.n,), np.float32)}

    def sample(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled actions ``[n_rows, n]`` and their log-probabilities ``[n_rows]``, both differentiable."""
        mean, log_std = self._mean_and_log_std(inputs)
        noise = torch.randn_like(mean)
        u = mean + log_std.exp() * noise
        gaussian = -0.5 * noise.square() - log_std - _LOG_SQRT_2_PI
        # log(1 - tanh(u)²), computed without the difference, which is 0 where tanh(u) rounds to 1.
        squashing = 2.0 * (_LOG_2 - u - softplus(-2.0 * u))
        return torch.tanh(u), (gaussian - squashing).sum(-1)

    def likeliest(self, inputs: Tensor) -> Tensor:
        """Return the tanh of the means, ``[n_rows, n]``: the median, not the mode, of each number."""
        return torch.tanh(self._mean_and_log_std(inputs)[0])

    def uniform(self, n_rows: int, generator: np.random.Generator) -> np.ndarray:
        """Return uniformly random actions in [-1, 1], float32[n_rows, n]."""
        return generator.uniform(-1.0, 1.0, (n_rows, self.n)).astype(np.float32)

    def to_environment(self, raw: np.ndarray) -> Tree:
        """Stretch ``raw``, ``[n_rows, n]``, from [-1, 1] to the spec bounds. Return a tree of ``[n_rows, *shape]``."""
        rows = np.split(raw, self._ends[:-1], axis=1)
        return build(self._spec, [part.stretched(own) for part, own in zip(self._parts, rows, strict=True)])

    def as_actions(self, raw: Tensor) -> list[Tensor]:
        """Compute the leaves of ``to_environment(raw)`` as tensors, with operations that PyTorch can export."""
        rows = raw.split([part.n for part in self._parts], dim=1)
        return [part.as_action(own) for part, own in zip(self._parts, rows, strict=True)]

    def _mean_and_log_std(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = inputs.chunk(2, dim=-1)
        return mean, log_std.clamp(*_LOG_STD)


class _Part:
    """A converter from raw actions, between -1 and 1, to the bounds, shape and dtype of one leaf of the action spec."""

    def __init__(self, spec: ArraySpec) -> None:
        is_continuous = not spec.is_object and spec.dtype.kind == "f"
        if not is_continuous or not all(np.isfinite(bound).all() for bound in bounds_of(spec)):
            advice = "give the action space finite bounds, or use PPO" if is_continuous else "use PPO or DQN"
            raise UsageError(f"SAC needs continuous actions with finite bounds, not {spec}: {advice}.")
        self._spec = spec
        self._low, self._high = bounds_of(spec)
        self._middle, self._half = (self._low + self._high) / 2, (self._high - self._low) / 2
        self.n = math.prod(spec.shape)

    def stretched(self, raw: np.ndarray) -> np.ndarray:
        shaped = raw.reshape(-1, *self._spec.shape)
        action: np.ndarray = np.clip(self._middle + self._half * shaped, self._low, self._high)
        return action.astype(self._spec.dtype)

    def as_action(self, raw: Tensor) -> Tensor:
        middle, half, low, high = (
            torch.as_tensor(np.array(bound), device=raw.device)
            for bound in (self._middle, self._half, self._low, self._high)
        )
        value = middle + half * raw.reshape(-1, *self._spec.shape)
        return torch.minimum(torch.maximum(value, low), high).to(torch.from_numpy(np.zeros(0, self._spec.dtype)).dtype)
