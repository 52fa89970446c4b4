"""Action distributions, parametrized by a network's outputs, and conversion of raw (sampled) actions for environments.

Log-probabilities refer to the *raw* action. For the environment, raw integers are shifted by the lower bounds of the
spec, and raw floats are scaled and clipped to its bounds. SAC's actions are the tanh of a Gaussian (Haarnoja et al.
2018b, appendix C): SAC learns from actions between -1 and 1, and only the environment receives stretched ones::

    network ── mean, log of the spread ──▶ u ~ Gaussian ──▶ tanh(u), -1 to 1 ──▶ stretched to the action bounds

Masks of allowed actions come under the key ``action_mask`` of an observation, as in PettingZoo::

    {"observation": …, "action_mask": [1, 0, 1]}     network ── logits ──▶ [0.3, forbidden, -1.2] ──▶ draw, likeliest, …

The rule: unless the option ``action_mask`` is false, a mask is applied to the network's outputs and is not an input of
the network, so that no policy chooses a forbidden action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from envmanager.data.specs import ACTION_MASK as KEY
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AGENT_BITS, AgentSteps
from envmanager.data.trees import Tree, build, leaves
from envmanager.errors import EnvManagerError, UsageError
from envmanager.importing import needed_by
from envmanager.training.algorithms.networks import to_tensor

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn
    from torch.distributions import Categorical, Distribution, Normal
    from torch.nn.functional import softplus


class Discrete(nn.Module):
    """The distribution of a discrete, multi-discrete or multi-binary action: one Categorical for each integer."""

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self.spec = spec
        low, high = _whole_bounds(spec)
        self._low = low
        self.counts = (high - low + 1).reshape(-1).tolist()
        self.n_inputs = sum(self.counts)
        self.raw = ArraySpec((len(self.counts),), np.int64)

    def distributions(self, inputs: Tensor) -> list[Distribution]:
        """Return one distribution per integer in the action. ``inputs`` are the logits, ``[n, n_inputs]``."""
        return [Categorical(logits=part, validate_args=False) for part in inputs.split(self.counts, dim=-1)]

    def split(self, raw: Tensor) -> list[Tensor]:
        """Return the k columns of raw actions ``[n, k]`` as tensors ``[n]``, one for each distribution."""
        return list(raw.unbind(-1))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return raw actions ``[n, k]`` whose columns are the tensors in ``parts``. This inverts ``split``."""
        return torch.stack(list(parts), dim=-1)

    def likeliest(self, inputs: Tensor) -> Tensor:
        """Return the most probable raw actions, ``[n, k]``, for the logits ``inputs``."""
        return self.join([part.argmax(-1) for part in inputs.split(self.counts, dim=-1)])

    def to_environment(self, raw: np.ndarray) -> np.ndarray:
        """Add the lower bounds to raw actions. Return the result as ``[n, *shape]``, in the spec's dtype."""
        action: np.ndarray = raw.reshape(-1, *self.spec.shape) + self._low
        return action.astype(self.spec.dtype)

    def as_action(self, raw: Tensor) -> Tensor:
        """Return the same actions as ``to_environment``, computed with tensor operations only, for export."""
        return (raw.reshape(-1, *self.spec.shape) + _constant(self._low, raw)).to(_dtype_of(self.spec))


class Stretched(nn.Module):
    """A converter from raw floats to one leaf of an action. -1 and 1 become its bounds, where both are finite."""

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self.spec = spec
        self.n_inputs = math.prod(spec.shape)
        low, high = bounds_of(spec)
        is_bounded = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore"):  # infinite bounds give NaN, which np.where replaces
            self._middle = np.where(is_bounded, (low + high) / 2, 0.0)
            self._half = np.where(is_bounded, (high - low) / 2, 1.0)
        self._low, self._high = low, high

    def to_environment(self, raw: np.ndarray) -> np.ndarray:
        """Scale raw actions and clip them to the bounds. Return the result as ``[n, *shape]``, in the spec's dtype."""
        shaped = raw.reshape(-1, *self.spec.shape)
        action: np.ndarray = np.clip(self._middle + self._half * shaped, self._low, self._high)
        return action.astype(self.spec.dtype)

    def as_action(self, raw: Tensor) -> Tensor:
        """Return the same actions as ``to_environment``, computed with tensor operations only, for export."""
        shaped = raw.reshape(-1, *self.spec.shape)
        value = _constant(self._middle, raw) + _constant(self._half, raw) * shaped
        low, high = (_constant(bound, raw).to(value.dtype) for bound in (self._low, self._high))
        return value.clamp(low, high).to(_dtype_of(self.spec))


class Continuous(Stretched):
    """The distribution of an action's floats: Gaussians whose standard deviations do not depend on the observation."""

    def __init__(self, spec: ArraySpec, log_std_init: float) -> None:
        super().__init__(spec)
        self.raw = ArraySpec((self.n_inputs,), np.float32)
        self.log_std = nn.Parameter(torch.full((self.n_inputs,), log_std_init))

    def distributions(self, inputs: Tensor) -> list[Distribution]:
        """Return a list of one distribution, over all floats in the action. ``inputs`` are the means, ``[n, k]``."""
        return [Normal(inputs, self.log_std.exp().expand_as(inputs), validate_args=False)]

    def split(self, raw: Tensor) -> list[Tensor]:
        """Return ``[raw]``, because there is only one distribution."""
        return [raw]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the only element of ``parts``. This inverts ``split``."""
        return parts[0]

    def likeliest(self, inputs: Tensor) -> Tensor:
        """Return ``inputs``, the means, which are the raw actions of highest density."""
        return inputs


class ActionHeads(nn.Module):
    """The joint distribution of all leaves of an action, parametrized by ``n_inputs`` outputs of a network.

    ``log_std_init`` is the logarithm of the initial standard deviations of raw floats.
    """

    def __init__(self, spec: Tree, log_std_init: float = 0.0) -> None:
        super().__init__()
        self.spec = spec
        self.heads = nn.ModuleList([_head(leaf, log_std_init) for leaf in leaves(spec)])
        self._sizes = [head.n_inputs for head in self._all]
        self.n_inputs = sum(self._sizes)
        self.raw_columns: dict[str, ArraySpec] = {f"raw{index}": head.raw for index, head in enumerate(self._all)}
        self.counts: list[int] = [count for head in self._all for count in getattr(head, "counts", ())]
        """Number of choices for each integer in the action; floats have no entry."""
        kinds = [isinstance(head, Discrete) for head in self._all for _ in range(head.n_inputs)]
        self._choices = [place for place, is_choice in enumerate(kinds) if is_choice]

    @property
    def _all(self) -> list[Any]:
        return list(self.heads)

    def masked(self, inputs: Tensor, allowed: Tensor | None) -> Tensor:
        """Return ``inputs`` with logit FORBIDDEN for choices not ``allowed``, bool[n, sum(counts)]. None allows all."""
        if allowed is None or len(self._choices) == self.n_inputs:
            return forbid(inputs, allowed)
        everything = torch.ones_like(inputs, dtype=torch.bool)
        everything[:, self._choices] = allowed
        return forbid(inputs, everything)

    def sample(self, inputs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return a dict of sampled raw actions (keys ``raw0``, ``raw1``, …) and joint log-probabilities ``[n]``."""
        raws, log_prob = {}, torch.zeros(len(inputs), device=inputs.device)
        for name, head, part in self._parts(inputs):
            distributions = head.distributions(part)
            drawn = [each.sample() for each in distributions]
            log_prob = log_prob + _summed([each.log_prob(one) for each, one in zip(distributions, drawn, strict=True)])
            raws[name] = head.join(drawn)
        return raws, log_prob

    def likeliest(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the most probable raw actions as a dict with the same keys as in ``sample``."""
        return {name: head.likeliest(part) for name, head, part in self._parts(inputs)}

    def evaluate(self, inputs: Tensor, raws: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of raw actions and the entropies of the distributions, each ``[n]``."""
        log_prob = entropy = torch.zeros(len(inputs), device=inputs.device)
        for name, head, part in self._parts(inputs):
            distributions = head.distributions(part)
            given = head.split(raws[name])
            log_prob = log_prob + _summed([each.log_prob(one) for each, one in zip(distributions, given, strict=True)])
            entropy = entropy + _summed([each.entropy() for each in distributions])
        return log_prob, entropy

    def to_environment(self, raws: dict[str, np.ndarray]) -> Tree:
        """Return a tree of actions for the environment. ``raws`` has the keys of the dict that ``sample`` returns."""
        return build(self.spec, [head.to_environment(raws[f"raw{index}"]) for index, head in enumerate(self._all)])

    def as_actions(self, raws: dict[str, Tensor]) -> list[Tensor]:
        """Return the leaves of the tree from ``to_environment``, computed with tensor operations only, for export."""
        return [head.as_action(raws[f"raw{index}"]) for index, head in enumerate(self._all)]

    def _parts(self, inputs: Tensor) -> Any:
        parts = inputs.split(self._sizes, dim=-1)
        return zip(self.raw_columns, self._all, parts, strict=True)


def _constant(array: np.ndarray, beside: Tensor) -> Tensor:
    return torch.tensor(array, device=beside.device)


def _dtype_of(spec: ArraySpec) -> torch.dtype:
    """Return the tensor dtype that matches the spec's dtype. For uint16, uint32 and uint64, return int64."""
    return to_tensor(np.zeros(0, spec.dtype), torch.device("cpu")).dtype


def _summed(values: list[Tensor]) -> Tensor:
    """Return the sum of ``values``, a tensor ``[n]``. Values of shape ``[n, k]`` are also summed over k."""
    flat = [value if value.ndim == 1 else value.sum(-1) for value in values]
    total = flat[0]
    for value in flat[1:]:
        total = total + value
    return total


def _head(spec: ArraySpec, log_std_init: float) -> nn.Module:
    if spec.is_object:
        raise UsageError(
            "actions that are texts or other objects cannot be learned by this trainer. Make them of numbers in a "
            "wrapper of the environment (gymnasium.ActionWrapper)."
        )
    return Continuous(spec, log_std_init) if spec.dtype.kind == "f" else Discrete(spec)


def bounds_of(spec: ArraySpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper bounds, each in the spec's shape. A missing bound is infinite."""
    low = np.broadcast_to(-np.inf if spec.minimum is None else spec.minimum, spec.shape)
    high = np.broadcast_to(np.inf if spec.maximum is None else spec.maximum, spec.shape)
    return low, high


_MOST_CHOICES = 100_000


def _whole_bounds(spec: ArraySpec) -> tuple[np.ndarray, np.ndarray]:
    if spec.dtype.kind == "b":
        return np.zeros(spec.shape, np.int64), np.ones(spec.shape, np.int64)
    if spec.minimum is None or spec.maximum is None:
        raise UsageError(f"whole numbers without bounds cannot be learned by this trainer: {spec}.")
    low, high = (bound.astype(np.int64) for bound in bounds_of(spec))
    if (high - low >= _MOST_CHOICES).any():
        raise UsageError(
            f"an action with more than {_MOST_CHOICES:,} choices cannot be learned by this trainer: {spec}."
        )
    return low, high


FORBIDDEN: float = float(np.finfo(np.float32).min)
"""Network output for a forbidden action. It is finite because 0 * -inf, as in an entropy, is NaN."""


class NothingAllowed(EnvManagerError):
    """Error raised when agents have to act but their masks allow no action. ``agent_ids`` has these agents' ids."""

    def __init__(self, *, behavior: str, agent_ids: Sequence[int]) -> None:
        self.behavior = behavior
        self.agent_ids = tuple(int(agent_id) for agent_id in agent_ids)
        self.env_ids = tuple(agent_id >> AGENT_BITS for agent_id in self.agent_ids)
        numbers = [agent_id - (agent_id >> AGENT_BITS << AGENT_BITS) for agent_id in self.agent_ids]
        whose = ", ".join(f"agent {k} of env {env_id}" for k, env_id in zip(numbers, self.env_ids, strict=True))
        super().__init__(
            f"the {KEY} of {whose} (behavior {behavior!r}) allows no action, but the agent has to act. The environment "
            "should allow an action that does nothing, end the episode, or mark the agent as not acting. With "
            f"{KEY}=false the trainer treats masks as observations."
        )


class ActionMask:
    """The action mask of a behavior. ``place`` is its index among an observation's leaves, or None if no mask applies.

    A mask is an array under the key ``action_mask`` at the top level of a dict observation. A zero forbids a choice.
    ``counts`` has the number of choices for each integer in the action. Unless ``enabled`` is False, raises UsageError
    for a mask that is not one row of numbers with an entry for each choice, or that is an observation's only leaf.
    """

    def __init__(self, behavior: str, spec: BehaviorSpec, counts: Sequence[int], *, enabled: bool = True) -> None:
        self._behavior = behavior
        self._starts = np.cumsum([0, *counts])[:-1]
        self.place: int | None = None
        observation = spec.observation
        if enabled and isinstance(observation, dict) and isinstance(observation.get(KEY), ArraySpec):
            _check(behavior, observation, counts)
            before = list(observation)[: list(observation).index(KEY)]
            self.place = sum(len(leaves(observation[key])) for key in before)

    def allowed(self, steps: AgentSteps) -> np.ndarray | None:
        """Return which choices the masks in ``steps`` allow, as bool ``[n, choices]``, or None without a mask.

        Raises NothingAllowed if a mask forbids all choices for one of the integers in an action.
        """
        if self.place is None:
            return None
        allowed: np.ndarray = steps.obs[KEY].reshape(len(steps), -1) != 0
        if len(steps):
            stuck = ~np.logical_or.reduceat(allowed, self._starts, axis=1).all(1)
            if stuck.any():
                raise NothingAllowed(behavior=self._behavior, agent_ids=steps.agent_id[stuck].tolist())
        return allowed

    def of(self, obs: Sequence[Tensor]) -> Tensor | None:
        """Return which choices the mask leaf in ``obs`` allows, as bool ``[n, choices]``, or None without a mask."""
        return None if self.place is None else obs[self.place].flatten(1) != 0


def forbid(outputs: Tensor, allowed: Tensor | None) -> Tensor:
    """Return ``outputs``, ``[n, choices]``, with ``FORBIDDEN`` where ``allowed`` is False. None allows all choices."""
    return outputs if allowed is None else torch.where(allowed, outputs, FORBIDDEN)


def _check(behavior: str, observation: Any, counts: Sequence[int]) -> None:
    mask: ArraySpec = observation[KEY]
    n = sum(counts)
    if mask.shape != (n,) or n == 0 or mask.dtype.kind not in "biuf":
        wanted = f"it should be one row of {n} numbers" if n else "but none of its actions is a choice"
        raise UsageError(
            f"the observations of behavior {behavior!r} have an {KEY} that does not fit its actions: it is {mask}; "
            f"{wanted}. Fix the environment, or set {KEY}=false: then it is an observation like any other."
        )
    if len(leaves(observation)) == 1:
        raise UsageError(
            f"the observations of behavior {behavior!r} have nothing but an {KEY}: the network would see nothing."
        )


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
        self._parts = [_squashable(leaf) for leaf in leaves(spec)]
        self._ends = np.cumsum([part.n_inputs for part in self._parts])
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
        return build(self._spec, [part.to_environment(own) for part, own in zip(self._parts, rows, strict=True)])

    def as_actions(self, raw: Tensor) -> list[Tensor]:
        """Compute the leaves of ``to_environment(raw)`` as tensors, with operations that PyTorch can export."""
        rows = raw.split([part.n_inputs for part in self._parts], dim=1)
        return [part.as_action(own) for part, own in zip(self._parts, rows, strict=True)]

    def _mean_and_log_std(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = inputs.chunk(2, dim=-1)
        return mean, log_std.clamp(*_LOG_STD)


def _squashable(spec: ArraySpec) -> Stretched:
    is_continuous = not spec.is_object and spec.dtype.kind == "f"
    if not is_continuous or not all(np.isfinite(bound).all() for bound in bounds_of(spec)):
        advice = "give the action space finite bounds, or use PPO" if is_continuous else "use PPO or DQN"
        raise UsageError(f"SAC needs continuous actions with finite bounds, not {spec}: {advice}.")
    return Stretched(spec)
