"""The common base of the off-policy trainers, DQN and SAC, which learn from a replay of old steps.

::

    add ── StepStore, Replay ── draw ──▶ Batch ── the trainer's _learn ──▶ new version
                  raw                rewards normalized, if wanted

The rule: the replay holds raw observations and rewards. They are normalized only when they are drawn or used, so that
old and new steps are normalized by the same scale.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import StepInfo
from envmanager.data.trees import leaves
from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.options import at_least, plain_numbers, within
from envmanager.policy import Policy
from envmanager.training.algorithms.networks import (
    Encoder,
    NetworkOptions,
    anneal,
    learner_state,
    load_learner,
    load_module,
    means,
    pick_device,
    to_tensor,
)
from envmanager.training.algorithms.replay import Drawn, Replay, ReplayState
from envmanager.training.algorithms.states import LIMIT, ReturnSpread, SpreadState, from_plain, to_plain
from envmanager.training.trainer import Arrays, Trainer, named, of_part

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class ReplayOptions(NetworkOptions):
    """The options of all trainers with a replay. Step counts are in agent steps."""

    capacity: int = attrs.field(default=100_000, validator=at_least(1))
    share_frames: bool = False
    """Whether to store each frame only once; images must be stacks of the last k frames, ``[k, height, width]``."""
    learning_starts: int = attrs.field(default=1_000, validator=at_least(0))
    """Number of agent steps before updates begin. The first update is at the next multiple of ``train_every``."""
    train_every: int = attrs.field(default=4, validator=at_least(1))
    """Number of agent steps between updates."""
    updates: int = attrs.field(default=1, validator=at_least(1))
    """Number of batches per update."""
    batch: int = attrs.field(default=32, validator=at_least(1))
    n_step: int = attrs.field(default=1, validator=at_least(1))
    reward_clip: float | None = attrs.field(default=None, validator=within(0, above=True, optional=True))
    """Absolute bound to which rewards are clipped; None for no bound. The bound of normalized rewards is at most 10."""
    pinned_copies: bool = True
    """Whether to copy batches to a GPU asynchronously, from pinned memory. No effect on the CPU."""

    def __attrs_post_init__(self) -> None:
        if self.capacity < self.learning_starts:
            raise UsageError(f"capacity={self.capacity} is less than learning_starts={self.learning_starts}.")


class ExploringPolicy(Policy, Protocol):
    """The interface of an off-policy trainer's exploring policy, which uses the weights being trained."""

    version: int
    generator: np.random.Generator


class OffPolicyTrainer(Trainer):
    """The base class of trainers that learn from batches of a replay. Subclasses create the networks and the policy.

    ``encoder``: the encoder in ``model`` whose normalization all other encoders in ``model`` and ``target`` share.
    """

    max_policy_lag = math.inf
    options: ReplayOptions
    model: nn.Module
    target: nn.Module
    encoder: Encoder
    policy: ExploringPolicy
    _optimizer: torch.optim.Optimizer

    def __init__(
        self,
        behavior: str,
        spec: BehaviorSpec,
        options: ReplayOptions,
        columns: Mapping[str, ArraySpec],
        *,
        seed: int,
        device: str,
        priority_exponent: float | None = None,
    ) -> None:
        self.behavior = behavior
        self.options = options
        self.n_before_update = max(options.learning_starts, options.train_every)
        self._device = pick_device(device)
        self.replay = Replay(
            spec.observation,
            columns,
            capacity=options.capacity,
            seed=seed,
            n_step=options.n_step,
            gamma=options.gamma,
            priority_exponent=priority_exponent,
            share_frames=options.share_frames,
        )
        self._return_spread = ReturnSpread(options.gamma, enabled=options.normalize_rewards)
        self._n_steps = 0
        self._n_since_update = 0
        self._n_batches = 0
        self._n_in_scale = 0
        """Value of the store's ``n_rows`` at the last update of the normalization of observations."""

    @abstractmethod
    def _learn(self, batch: Drawn[Tensor]) -> dict[str, Tensor]:
        """Update the weights with one batch. Return figures such as losses, by name, as tensors on the device."""

    def add(self, info: StepInfo) -> int:
        n = self.replay.add(info, self.behavior)
        self._return_spread.add(info, self.behavior)
        self._n_steps += n
        self._n_since_update += n
        if self._n_steps < self.options.learning_starts:  # the steps so far lead to no update
            self._n_since_update %= self.options.train_every
        self.collected(self._n_steps)
        return n

    def is_ready(self) -> bool:
        return self._n_since_update >= self.options.train_every and self.replay.can_draw()

    def environments_were_reset(self) -> None:
        self.replay.store.abandon_all()
        self._return_spread.environments_were_reset()

    def update(self, progress: float) -> dict[str, float]:
        options = self.options
        self._n_since_update = max(0, self._n_since_update - options.train_every)
        if options.anneal:
            anneal(self._optimizer, options.learning_rate, progress)
        if self.encoder.is_normalized:
            self._learn_scale()
        figures = []
        for _ in range(options.updates):
            self._n_batches += 1
            figures.append(self._learn(self._draw(progress)))
        self.version += 1
        self.policy.version = self.version
        return means(figures)

    def _importance_exponent(self, progress: float) -> float:
        """Return the exponent of the importance-sampling weights. 0 by default, for a replay without priorities."""
        return 0.0

    def _draw(self, progress: float) -> Drawn[Tensor]:
        options, spread = self.options, self._return_spread
        clip = options.reward_clip
        if spread.enabled:
            clip = LIMIT if clip is None else min(clip, LIMIT)
        drawn = self.replay.sample(
            options.batch,
            importance_exponent=self._importance_exponent(progress),
            reward_factor=spread.factor if spread.enabled else 1.0,
            reward_clip=clip,
        )
        to_device = functools.partial(to_tensor, device=self._device, pinned=options.pinned_copies)
        return drawn.map(to_device)

    def _learn_scale(self) -> None:
        """Update the observations' normalization with the rows added since the last call, if they are still stored."""
        store = self.replay.store
        rows = np.arange(max(self._n_in_scale, store.first), store.n_rows)
        self._n_in_scale = store.n_rows
        if len(rows):
            places = store.places(rows)
            self.encoder.learn_scale([to_tensor(leaf[places], self._device) for leaf in leaves(store.obs)])

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays = learner_state(self._optimizer, model=self.model, target=self.target)
        replay_arrays, replay = self.replay.state()
        facts = _Facts(
            version=self.version,
            n_steps=self._n_steps,
            n_since_update=self._n_since_update,
            n_batches=self._n_batches,
            n_in_scale=self._n_in_scale,
            return_spread=self._return_spread.state(),
            generator=dict(self.policy.generator.bit_generator.state),
            replay=replay,
        )
        return {**arrays, **named("replay", replay_arrays)}, to_plain(facts)

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        own = from_plain(_Facts, facts)
        self._return_spread.restore(own.return_spread)
        load_learner(arrays, self._optimizer, model=self.model, target=self.target)
        self.replay.restore(of_part("replay", arrays), own.replay)
        self.version = self.policy.version = own.version
        self._n_steps, self._n_since_update = own.n_steps, own.n_since_update
        self._n_batches, self._n_in_scale = own.n_batches, own.n_in_scale
        self.policy.generator.bit_generator.state = own.generator
        self.collected(self._n_steps)

    def restore_policy(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        load_module(self.model, of_part("model", arrays))
        self.version = self.policy.version = from_plain(_Facts, facts).version


@attrs.frozen(kw_only=True)
class _Facts:
    """The part of an off-policy trainer's state that a checkpoint holds beside the arrays."""

    version: int = attrs.field(validator=at_least(0))
    n_steps: int = attrs.field(validator=at_least(0))
    n_since_update: int = attrs.field(validator=at_least(0))
    n_batches: int = attrs.field(validator=at_least(0))
    n_in_scale: int = attrs.field(default=0, validator=at_least(0))
    return_spread: SpreadState | None = None
    generator: dict[str, Any]
    replay: ReplayState

    def __attrs_post_init__(self) -> None:
        if self.n_since_update > self.n_steps:
            raise UsageError(f"n_since_update={self.n_since_update} is more than n_steps={self.n_steps}.")
