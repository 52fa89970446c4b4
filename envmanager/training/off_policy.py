"""What trainers have in common that learn from whatever was done, again and again: DQN and SAC.

::

    add ── StepStore, Replay ── draw ──▶ Batch ── _learn, of each trainer ──▶ new version
                  raw                normalized by all that was seen until now

The rule: the replay holds observations and rewards as they came, and they are normalized when they are drawn; so what
was stored long ago is seen as what came just now.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import StepInfo
from envmanager.data.trees import leaves
from envmanager.errors import UsageError
from envmanager.extras import needed_by
from envmanager.options import one_of
from envmanager.policy import Policy
from envmanager.training.networks import CONVOLUTIONS, Encoder, pick_device, to_tensor
from envmanager.training.replay import Replay
from envmanager.training.return_spread import LIMIT, ReturnSpread
from envmanager.training.states import anneal, learner_state, load_learner, load_module, means, named, of_part
from envmanager.training.trainer import Arrays, Trainer

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn


@attrs.frozen(kw_only=True)
class ReplayOptions:
    """What the options of trainers with a replay have in common; some change a default. Steps are those of agents."""

    capacity: int = 100_000
    share_frames: bool = False
    """Images are stacks of the last frames, ``[k, height, width]``: keep each frame once, a k-th of the memory."""
    learning_starts: int = 1_000
    train_every: int = 4
    """How many steps an update comes after."""
    updates: int = 1
    """How many batches an update learns from."""
    batch: int = 32
    learning_rate: float = 1e-4
    anneal: bool = False
    """Let the learning rate fall to zero over the training."""
    gamma: float = 0.99
    n_step: int = 1
    hidden: Sequence[int] = (256, 256)
    """The layers behind the encoder; images usually want none."""
    convolutions: str = attrs.field(default="nature", validator=one_of(*CONVOLUTIONS))
    """Of images: those of Mnih et al. 2015, or ``small`` ones."""
    normalize_observations: bool = False
    """By the mean and the spread of all that was seen; images and one-hot numbers stay as they are."""
    normalize_rewards: bool = False
    """By the spread of the discounted return of all agents so far."""
    reward_clip: float | None = None
    """Rewards, once they are normalized, are cut to between minus this and this."""
    pinned_copies: bool = True
    """Copy batches to a GPU from pinned memory, without waiting for them; nothing on the CPU."""

    def __attrs_post_init__(self) -> None:
        for name in ("capacity", "train_every", "updates", "batch", "n_step"):
            require_at_least_one(self, name)
        if self.capacity < self.learning_starts:
            raise UsageError(f"capacity={self.capacity} is less than learning_starts={self.learning_starts}.")


def require_at_least_one(options: Any, name: str) -> None:
    """UsageError when an option is less."""
    if getattr(options, name) < 1:
        raise UsageError(f"{name} must be at least 1, not {getattr(options, name)}.")


class Batch(NamedTuple):
    """Rows of the replay on the device, as ``Drawn`` has them; ``rows`` are their numbers."""

    rows: np.ndarray
    obs: list[Tensor]
    columns: dict[str, Tensor]
    reward: Tensor
    next_obs: list[Tensor]
    discount: Tensor
    weight: Tensor


class ExploringPolicy(Policy, Protocol):
    """A policy that acts with the weights that are trained."""

    version: int
    generator: np.random.Generator


class OffPolicyTrainer(Trainer):
    """Keeps steps in a replay, and learns from batches of them. A subclass makes ``model``, ``target``, ``policy``.

    ``encoder``, a part of the model: the one whose scale all its encoders share.
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
        """How many rows of the replay the scale of observations knows."""

    @abstractmethod
    def _learn(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from one batch; figures by name, which stay on the device."""

    def add(self, info: StepInfo) -> int:
        n = self.replay.add(info, self.behavior)
        self._return_spread.add(info, self.behavior)
        self._n_steps += n
        if self._n_steps >= self.options.learning_starts:  # what was only collected is not caught up with
            self._n_since_update += n
        self.collected(self._n_steps)
        return n

    def is_ready(self) -> bool:
        return self._n_since_update >= self.options.train_every

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
        figures = means([self._learn_once(progress) for _ in range(options.updates)])
        self.version += 1
        self.policy.version = self.version
        return figures

    def _learn_once(self, progress: float) -> dict[str, Tensor]:
        self._n_batches += 1
        return self._learn(self._draw(progress))

    def _importance_exponent(self, progress: float) -> float:
        """Of the weights that make up for priorities, where there are any."""
        return 0.0

    def _draw(self, progress: float) -> Batch:
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
        return Batch(
            drawn.rows,
            list(map(to_device, drawn.obs)),
            {name: to_device(column) for name, column in drawn.columns.items()},
            to_device(drawn.reward),
            list(map(to_device, drawn.next_obs)),
            to_device(drawn.discount),
            to_device(drawn.weight),
        )

    def _learn_scale(self) -> None:
        """Take the observations that came since the last update into the scale, each once."""
        store = self.replay.store
        rows = np.arange(max(self._n_in_scale, store.first), store.n_rows)
        self._n_in_scale = store.n_rows
        if len(rows):
            places = store.places(rows)
            self.encoder.learn_scale([to_tensor(leaf[places], self._device) for leaf in leaves(store.obs)])

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays, facts = learner_state(self._optimizer, model=self.model, target=self.target)
        replay_arrays, replay_facts = self.replay.state()
        return {**arrays, **named("replay", replay_arrays)}, {
            **facts,
            "version": self.version,
            "n_steps": self._n_steps,
            "n_since_update": self._n_since_update,
            "n_batches": self._n_batches,
            "n_in_scale": self._n_in_scale,
            "return_spread": self._return_spread.state(),
            "generator": self.policy.generator.bit_generator.state,
            "replay": replay_facts,
        }

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        self._return_spread.restore(facts.get("return_spread"))
        load_learner(arrays, facts, self._optimizer, model=self.model, target=self.target)
        self.replay.restore(of_part("replay", arrays), facts["replay"])
        self.version = self.policy.version = int(facts["version"])
        self._n_steps, self._n_since_update = int(facts["n_steps"]), int(facts["n_since_update"])
        self._n_batches, self._n_in_scale = int(facts["n_batches"]), int(facts.get("n_in_scale", 0))
        self.policy.generator.bit_generator.state = facts["generator"]
        self.collected(self._n_steps)

    def restore_policy(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Take over only what its greedy policy needs of what ``state`` told; nothing is learned afterwards."""
        load_module(self.model, of_part("model", arrays))
        self.version = self.policy.version = int(facts["version"])
