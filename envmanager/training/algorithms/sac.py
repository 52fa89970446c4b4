"""Soft actor-critic (Haarnoja et al. 2018b): a policy that is also rewarded for its entropy, two critics whose lower
estimate is used, and a learned or fixed temperature that weights the entropy.

::

    batch ──▶ goal = reward + discount · (lower of two target values - temperature · log-probability of the next action)
         ├──▶ critics   towards the goal
         ├──▶ actor     towards a high value (the lower of two), and a high entropy
         ├──▶ temperature   towards the value at which the policy has the target entropy
         └──▶ targets   a step of ``tau`` towards the critics (Polyak averages)

Each batch is learned with the temperature from before the batch. The actor is updated after the critics.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import numpy as np

from envmanager.data.specs import BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.importing import needed_by
from envmanager.options import at_least, plain_numbers, within
from envmanager.policy import Policy
from envmanager.training.algorithms.actions import COLUMN, SquashedGaussian
from envmanager.training.algorithms.networks import DenseLayer, Encoder, mlp
from envmanager.training.algorithms.off_policy import OffPolicyTrainer, ReplayOptions
from envmanager.training.algorithms.replay import Drawn

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class SACOptions(ReplayOptions):
    """Options of the SAC trainer. All step counts are in agent steps, not frames."""

    capacity: int = attrs.field(default=1_000_000, validator=at_least(1))
    learning_starts: int = attrs.field(default=100, validator=at_least(0))
    """Number of agent steps with uniformly random actions, before learning begins."""
    train_every: int = attrs.field(default=1, validator=at_least(1))
    batch: int = attrs.field(default=256, validator=at_least(1))
    learning_rate: float = attrs.field(default=3e-4, validator=within(0))
    """Learning rate of the actor, the critics and the temperature."""
    tau: float = attrs.field(default=0.005, validator=within(0, 1, above=True))
    """Fraction of the distance to the critics by which the targets move in one update."""
    target_every: int = attrs.field(default=1, validator=at_least(1))
    """Number of batches between two updates of the targets."""
    temperature: float | None = attrs.field(default=None, validator=within(0, above=True, optional=True))
    """Weight of the entropy; None to learn it."""
    initial_temperature: float = attrs.field(default=1.0, validator=within(0, above=True))
    target_entropy: float | None = None
    """Target entropy of the policy if the temperature is learned; None: minus the number of floats in an action."""


class Actor(nn.Module):
    """An encoder followed by a network for the mean and the log standard deviation of each float in an action."""

    def __init__(self, spec: BehaviorSpec, n_numbers: int, options: SACOptions) -> None:
        super().__init__()
        self.encoder = Encoder.of(spec, options)
        n = self.encoder.n_features
        self.last = mlp(n, options.hidden, 2 * n_numbers, activation=nn.ReLU)

    def forward(self, obs: Sequence[Tensor]) -> Tensor:
        """Return means and log standard deviations, ``[n, 2 n_numbers]``: the ``inputs`` of SquashedGaussian."""
        inputs: Tensor = self.last(self.encoder(obs))
        return inputs


class Critics(nn.Module):
    """An encoder followed by two networks, each of which estimates the value of an action."""

    def __init__(self, spec: BehaviorSpec, n_numbers: int, options: SACOptions) -> None:
        super().__init__()
        self.encoder = Encoder.of(spec, options)
        n = self.encoder.n_features + n_numbers
        self.values = nn.ModuleList([mlp(n, options.hidden, 1, activation=nn.ReLU) for _ in range(2)])

    def forward(self, obs: Sequence[Tensor], action: Tensor) -> Tensor:
        """Return the two networks' estimates of the value of each action, ``[2, n]``."""
        seen = torch.cat([self.encoder(obs), action], dim=-1)
        return torch.stack([value(seen).squeeze(-1) for value in self.values])


class SACModel(nn.Module):
    """The actor, the critics and the temperature, which share one optimizer."""

    def __init__(self, spec: BehaviorSpec, n_numbers: int, options: SACOptions) -> None:
        super().__init__()
        self.actor = Actor(spec, n_numbers, options)
        self.critics = Critics(spec, n_numbers, options)
        self.critics.encoder.share_scale(self.actor.encoder)
        fixed = options.temperature
        begin = torch.tensor(math.log(options.initial_temperature if fixed is None else fixed))
        self.log_temperature = nn.Parameter(begin, requires_grad=fixed is None)


class SquashedPolicy:
    """A policy that samples a SquashedGaussian, takes its median if ``greedy``, or acts at random if ``is_blind``."""

    def __init__(
        self, actor: Actor, squashed: SquashedGaussian, device: torch.device, *, seed: int = 0, greedy: bool = False
    ) -> None:
        self.version = 0
        self.is_blind = False
        self.generator = np.random.default_rng(seed)
        self._actor = actor
        self._squashed = squashed
        self._device = device
        self._greedy = greedy

    @torch.inference_mode()
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return an ActionInfo with actions for the environment and, as outputs, the raw actions between -1 and 1."""
        if self.is_blind:
            raw = self._squashed.uniform(len(steps), self.generator)
        else:
            inputs = self._actor(self._actor.encoder.tensors(steps.obs, self._device))
            raw = (self._squashed.likeliest(inputs) if self._greedy else self._squashed.sample(inputs)[0]).cpu().numpy()
        return ActionInfo(self._squashed.to_environment(raw), {COLUMN: raw}, self.version)


class MiddleAction(nn.Module):
    """The greedy policy as a module that maps the leaves of an observation to the leaves of an action."""

    def __init__(self, actor: Actor, squashed: SquashedGaussian) -> None:
        super().__init__()
        self.actor, self._squashed = actor, squashed

    def forward(self, *obs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._squashed.as_actions(self._squashed.likeliest(self.actor(obs))))

    def dense(self) -> tuple[Encoder, list[DenseLayer]]:
        """Return the encoder, and the layers that map its features to the tanh of the means."""
        *layers, last = DenseLayer.of_mlp(self.actor.last)
        n = self._squashed.n
        return self.actor.encoder, [*layers, DenseLayer(last.weights[:n], last.biases[:n], "tanh")]


class SAC(OffPolicyTrainer):
    """A soft actor-critic trainer for bounded continuous actions and numeric observations, each an array or a tree."""

    options: SACOptions
    model: SACModel
    target: Critics
    policy: SquashedPolicy

    def __init__(
        self,
        behavior: str,
        spec: BehaviorSpec,
        options: SACOptions | None = None,
        *,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        options = SACOptions() if options is None else options
        self._squashed = squashed = SquashedGaussian(spec.action)
        super().__init__(behavior, spec, options, squashed.columns, seed=seed, device=device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = SACModel(spec, squashed.n, options).to(self._device)
        self.encoder = self.model.actor.encoder
        self.target = copy.deepcopy(self.model.critics).requires_grad_(False)
        self.target.encoder.share_scale(self.encoder)
        self._followers = list(self.target.parameters())
        self._leaders = list(self.model.critics.parameters())
        # One optimizer for all weights is enough, because a step skips weights without gradients.
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=options.learning_rate, fused=True)
        self._target_entropy = -float(squashed.n) if options.target_entropy is None else options.target_entropy
        self.policy = SquashedPolicy(self.model.actor, squashed, self._device, seed=seed)
        self.collected(0)

    def collected(self, n_steps: int) -> None:
        self.policy.is_blind = n_steps < self.options.learning_starts

    def greedy_policy(self) -> Policy:
        return SquashedPolicy(self.model.actor, self._squashed, self._device, greedy=True)

    def greedy_module(self) -> nn.Module:
        return MiddleAction(self.model.actor, self._squashed)

    def _learn(self, batch: Drawn[Tensor]) -> dict[str, Tensor]:
        model, squashed = self.model, self._squashed
        temperature = model.log_temperature.detach().exp()
        goal = self._goal(batch, temperature)
        values = model.critics(batch.obs, batch.columns[COLUMN])
        critic_loss = 0.5 * (values - goal).square().mean(1).sum()
        self._descend(critic_loss)
        action, log_prob = squashed.sample(model.actor(batch.obs))
        with _held(model.critics):
            actor_loss = (temperature * log_prob - model.critics(batch.obs, action).amin(0)).mean()
            entropy = -log_prob.detach().mean()
            self._descend(actor_loss + model.log_temperature * (entropy - self._target_entropy))
        if self._n_batches % self.options.target_every == 0:
            with torch.no_grad():
                torch._foreach_lerp_(self._followers, self._leaders, self.options.tau)
        losses = {"critic_loss": critic_loss.detach(), "actor_loss": actor_loss.detach()}
        return {**losses, "value": values.detach().mean(), "entropy": entropy, "temperature": temperature}

    @torch.no_grad()
    def _goal(self, batch: Drawn[Tensor], temperature: Tensor) -> Tensor:
        """Return the TD targets of the actions in ``batch``, ``[n]``."""
        action, log_prob = self._squashed.sample(self.model.actor(batch.next_obs))
        after: Tensor = self.target(batch.next_obs, action).amin(0) - temperature * log_prob
        return batch.reward + batch.discount * after

    def _descend(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


@contextmanager
def _held(module: nn.Module) -> Iterator[None]:
    """Return a context in which the module's weights get no gradients."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)
