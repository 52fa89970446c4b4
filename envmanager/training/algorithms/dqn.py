"""Deep Q-learning (Mnih et al. 2015), with optional double Q-learning (van Hasselt et al. 2016), duelling networks
(Wang et al. 2016), n-step returns (Sutton 1988) and prioritized replay (Schaul et al. 2016).

::

    StepStore (each observation once) ── Replay: drawn rows and the n steps after each ──▶ batches ──▶ new version

The replay holds one agent step per row, in order of arrival. Each row links to the agent's next row, once that exists.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import attrs
import numpy as np

from envmanager.data.specs import BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.options import at_least, plain_numbers, within
from envmanager.policy import Policy
from envmanager.training.algorithms.actions import FORBIDDEN, ActionHeads, ActionMask, Discrete, forbid
from envmanager.training.algorithms.networks import DenseLayer, Encoder, mlp
from envmanager.training.algorithms.off_policy import OffPolicyTrainer, ReplayOptions
from envmanager.training.algorithms.replay import Drawn

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class DQNOptions(ReplayOptions):
    """The options of the trainer ``DQN``. Step counts are in agent steps, not frames."""

    double: bool = True
    duelling: bool = True
    prioritized: bool = False
    priority_exponent: float = attrs.field(default=0.6, validator=within(0))
    importance_exponent: float = attrs.field(default=0.4, validator=within(0, 1))
    """Exponent of the importance-sampling weights; grows to 1 over the training."""
    target_every: int = attrs.field(default=1_000, validator=at_least(1))
    """Number of batches between two updates of the target network."""
    epsilon: float = attrs.field(default=1.0, validator=within(0, 1))
    final_epsilon: float = attrs.field(default=0.05, validator=within(0, 1))
    exploration_steps: int = attrs.field(default=10_000, validator=at_least(0))
    """Number of agent steps over which epsilon falls to its final value."""
    max_grad_norm: float = attrs.field(default=10.0, validator=within(0, math.inf, above=True))
    adam_epsilon: float = attrs.field(default=1e-8, validator=within(0))
    """Summand in the denominator of Adam's steps. Hessel et al. 2018 use 1.5e-4 for Atari."""
    action_mask: bool = True
    """Whether to apply the action masks in the observations (key ``action_mask``), if there are any."""


class QNetwork(nn.Module):
    """A network that returns the value of each action, or ``FORBIDDEN`` if the action mask forbids the action."""

    def __init__(self, behavior: str, spec: BehaviorSpec, n_actions: int, options: DQNOptions) -> None:
        super().__init__()
        self.mask = ActionMask(behavior, spec, [n_actions], enabled=options.action_mask)
        self.encoder = Encoder.of(spec, options, unseen=self.mask.place)
        self.duelling = options.duelling
        n_out = n_actions + 1 if options.duelling else n_actions
        self.last = mlp(self.encoder.n_features, options.hidden, n_out, activation=nn.ReLU)

    def forward(self, obs: Sequence[Tensor]) -> Tensor:
        """Return the action values as ``[n, n_actions]``. ``obs`` has one tensor of n rows per observation leaf."""
        out: Tensor = self.last(self.encoder(obs))
        if self.duelling:
            value, advantage = out[:, :1], out[:, 1:]
            out = value + advantage - advantage.mean(1, keepdim=True)
        return forbid(out, self.mask.of(obs))


class EpsilonGreedyPolicy:
    """A policy that takes the best allowed action, or with probability ``epsilon`` a random allowed action."""

    def __init__(
        self, model: QNetwork, heads: ActionHeads, device: torch.device, *, seed: int = 0, epsilon: float = 0.0
    ) -> None:
        self.version = 0
        self.epsilon = epsilon
        self.generator = np.random.default_rng(seed)
        self._model = model
        self._heads = heads
        self._device = device

    @torch.inference_mode()
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return actions for the environment, with the indices of the chosen actions in ``outputs``.

        Raises NothingAllowed if the mask of an agent forbids all actions.
        """
        allowed = self._model.mask.allowed(steps)
        explores = self.generator.random(len(steps)) < self.epsilon
        if allowed is None:
            chosen = self.generator.integers(0, self._heads.counts[0], len(steps))
        else:
            chosen = np.where(allowed, self.generator.random(allowed.shape), -1.0).argmax(1)
        if not explores.all():
            obs = self._model.encoder.tensors(steps.obs, self._device)
            chosen = np.where(explores, chosen, self._model(obs).argmax(1).cpu().numpy())
        raws = {"raw0": chosen[:, None]}
        return ActionInfo(self._heads.to_environment(raws), raws, self.version)


class BestAction(nn.Module):
    """The greedy policy of a Q-network as a PyTorch module, for export. It maps observation leaves to action leaves."""

    def __init__(self, model: QNetwork, heads: ActionHeads) -> None:
        super().__init__()
        self.model, self.heads = model, heads

    def forward(self, *obs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.heads.as_actions({"raw0": self.model(obs).argmax(1, keepdim=True)}))

    def dense(self) -> tuple[Encoder, list[DenseLayer]]:
        """Return the encoder, and the layers that map its features to an output for each action, which are compared."""
        *layers, last = DenseLayer.of_mlp(self.model.last)
        first = int(self.model.duelling)  # without the state's value, which is the same for all actions
        return self.model.encoder, [
            *layers,
            attrs.evolve(last, weights=last.weights[first:], biases=last.biases[first:]),
        ]


class DQN(OffPolicyTrainer):
    """A deep Q-learning trainer, for behaviors with one discrete action and numeric observations."""

    options: DQNOptions
    model: QNetwork
    target: QNetwork
    policy: EpsilonGreedyPolicy

    def __init__(
        self,
        behavior: str,
        spec: BehaviorSpec,
        options: DQNOptions | None = None,
        *,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        options = DQNOptions() if options is None else options
        self._heads = ActionHeads(spec.action)
        n_actions = _n_actions(self._heads)
        exponent = options.priority_exponent if options.prioritized else None
        super().__init__(
            behavior, spec, options, self._heads.raw_columns, seed=seed, device=device, priority_exponent=exponent
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = QNetwork(behavior, spec, n_actions, options).to(self._device)
        self.encoder = self.model.encoder
        self.target = copy.deepcopy(self.model)
        self.target.encoder.share_scale(self.encoder)
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=options.learning_rate, eps=options.adam_epsilon, fused=True
        )
        self.policy = EpsilonGreedyPolicy(self.model, self._heads, self._device, seed=seed, epsilon=options.epsilon)

    def collected(self, n_steps: int) -> None:
        options = self.options
        done = min(1.0, n_steps / max(1, options.exploration_steps))
        self.policy.epsilon = options.epsilon + done * (options.final_epsilon - options.epsilon)

    def greedy_policy(self) -> Policy:
        return EpsilonGreedyPolicy(self.model, self._heads, self._device)

    def greedy_module(self) -> nn.Module:
        return BestAction(self.model, self._heads)

    def update(self, progress: float) -> dict[str, float]:
        return {**super().update(progress), "epsilon": self.policy.epsilon}

    def _importance_exponent(self, progress: float) -> float:
        return self.options.importance_exponent + progress * (1.0 - self.options.importance_exponent)

    def _learn(self, batch: Drawn[Tensor]) -> dict[str, Tensor]:
        options = self.options
        goal = self._goal(batch)
        value = self.model(batch.obs).gather(1, batch.columns["raw0"]).squeeze(1)
        losses = nn.functional.smooth_l1_loss(value, goal, reduction="none")
        loss = (losses * batch.weight).mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), options.max_grad_norm)
        self._optimizer.step()
        if options.prioritized:  # not otherwise, because the copy to the CPU waits for the GPU
            self.replay.update_priorities(batch.rows, (value.detach() - goal).abs().cpu().numpy())
        if self._n_batches % options.target_every == 0:
            self.target.load_state_dict(self.model.state_dict())
        return {"loss": loss.detach(), "value": value.detach().mean()}

    @torch.no_grad()
    def _goal(self, batch: Drawn[Tensor]) -> Tensor:
        """Return the TD targets of the actions taken, ``[n]``."""
        after = self.target(batch.next_obs)
        judge = self.model(batch.next_obs) if self.options.double else after
        best = after.gather(1, judge.argmax(1, keepdim=True)).squeeze(1)
        best = best.masked_fill(best == FORBIDDEN, 0.0)  # an observation with no allowed action has no future reward
        return batch.reward + batch.discount * best


def _n_actions(heads: ActionHeads) -> int:
    head = heads.heads[0]
    if len(heads.heads) != 1 or not isinstance(head, Discrete) or len(head.counts) != 1:
        raise UsageError("DQN needs one discrete action; for several use PPO, for continuous ones SAC or PPO.")
    return int(head.counts[0])
