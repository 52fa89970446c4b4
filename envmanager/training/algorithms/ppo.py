"""Proximal policy optimization (Schulman et al. 2017) with generalized advantage estimation for each agent.

::

    StepStore ── rollout of n rows ──▶ advantages along each agent's rows ──▶ epochs of minibatches ──▶ new version

The size of a rollout is the number of its rows with an action, summed over all agents. Each agent's rows form a
separate chain, so rows of several agents may arrive in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps, StepInfo
from envmanager.data.trees import leaves
from envmanager.errors import CallStopped
from envmanager.importing import needed_by
from envmanager.options import at_least, layer_sizes, plain_numbers, within
from envmanager.policy import Policy
from envmanager.training.algorithms.actions import ActionHeads, ActionMask
from envmanager.training.algorithms.networks import (
    DenseLayer,
    Encoder,
    NetworkOptions,
    anneal,
    learner_state,
    load_learner,
    load_module,
    means,
    mlp,
    pick_device,
    to_tensor,
)
from envmanager.training.algorithms.states import ReturnSpread, SpreadState, from_plain, to_plain
from envmanager.training.algorithms.store import NOWHERE, StepStore
from envmanager.training.trainer import Arrays, Trainer, named, of_part

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class PPOOptions(NetworkOptions):
    """Options of PPO, under their usual names. ``rollout``: agent steps per update, summed over all agents."""

    rollout: int = attrs.field(default=1024, validator=at_least(1))
    epochs: int = attrs.field(default=10, validator=at_least(1))
    minibatch: int = attrs.field(default=256, validator=at_least(1))
    learning_rate: float = attrs.field(default=3e-4, validator=within(0))
    anneal: bool = True
    gae_lambda: float = attrs.field(default=0.95, validator=within(0, 1))
    clip: float = attrs.field(default=0.2, validator=within(0, above=True))
    entropy_coefficient: float = attrs.field(default=0.0, validator=within(0))
    value_coefficient: float = attrs.field(default=0.5, validator=within(0))
    max_grad_norm: float = attrs.field(default=0.5, validator=within(0, math.inf, above=True))
    target_kl: float | None = attrs.field(default=None, validator=within(0, above=True, optional=True))
    """KL divergence from the old policy above which an update skips its remaining epochs; None for no limit."""
    hidden: Sequence[int] = attrs.field(default=(64, 64), validator=layer_sizes)
    policy_gain: float = 0.01
    """Initial scale of the weights in the policy's last layer. Near 0, all actions are about equally likely at first.
    At 1 and above, some actions are likelier, which helps agents that have to learn to communicate."""
    log_std_init: float = 0.0
    """Logarithm of the initial standard deviations of continuous actions. At 0 they are half the width of the bounds,
    or 1 without bounds. Minus the logarithm of half the width makes them 1 with any bounds, as in most libraries."""
    reward_scale: float = 1.0
    action_mask: bool = True
    """Whether to apply the action masks in the observations (key ``action_mask``), if there are any."""


class ActorCritic(nn.Module):
    """An encoder followed by a policy network and a value network."""

    def __init__(self, behavior: str, spec: BehaviorSpec, options: PPOOptions) -> None:
        super().__init__()
        heads = ActionHeads(spec.action, options.log_std_init)
        self.mask = ActionMask(behavior, spec, heads.counts, enabled=options.action_mask)
        self.encoder = Encoder.of(spec, options, unseen=self.mask.place)
        self.heads = heads
        n = self.encoder.n_features
        self.actor = mlp(n, options.hidden, self.heads.n_inputs, last_gain=options.policy_gain, activation=nn.Tanh)
        self.critic = mlp(n, options.hidden, 1, last_gain=1.0, activation=nn.Tanh)

    def forward(self, obs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inputs of the action heads, ``[n, k]``, and the values of the observations, ``[n]``."""
        features = self.encoder(obs)
        return self._inputs(features, obs), self.critic(features).squeeze(-1)

    def inputs(self, obs: Sequence[Tensor]) -> Tensor:
        """Return the inputs of the action heads, ``[n, k]``, without computing the values of the observations."""
        return self._inputs(self.encoder(obs), obs)

    def _inputs(self, features: Tensor, obs: Sequence[Tensor]) -> Tensor:
        return self.heads.masked(self.actor(features), self.mask.of(obs))


class ActorCriticPolicy:
    """A policy that uses the weights being trained. If ``greedy``, it always takes the likeliest action."""

    def __init__(self, model: ActorCritic, device: torch.device, *, greedy: bool = False) -> None:
        self.version = 0
        self._model = model
        self._device = device
        self._greedy = greedy

    @torch.inference_mode()
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return actions for ``steps``, with raw actions, log-probabilities and value estimates as outputs.

        A greedy policy returns only actions. Raises NothingAllowed if masks allow no value for an integer in an action.
        """
        self._model.mask.allowed(steps)
        obs = self._model.encoder.tensors(steps.obs, self._device)
        heads = self._model.heads
        if self._greedy:
            likeliest = heads.likeliest(self._model.inputs(obs))
            return ActionInfo(heads.to_environment(_numpy(likeliest)), version=self.version)
        inputs, value = self._model(obs)
        raws, log_prob = heads.sample(inputs)
        drawn = _numpy(raws)
        outputs = {**drawn, **_numpy({"log_prob": log_prob, "value": value})}
        return ActionInfo(heads.to_environment(drawn), outputs, self.version)


def _numpy(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


class LikeliestAction(nn.Module):
    """The greedy policy as a module that maps the leaves of an observation to the leaves of an action."""

    def __init__(self, model: ActorCritic) -> None:
        super().__init__()
        self.model = model

    def forward(self, *obs: Tensor) -> tuple[Tensor, ...]:
        heads = self.model.heads
        return tuple(heads.as_actions(heads.likeliest(self.model.inputs(obs))))

    def dense(self) -> tuple[Encoder, list[DenseLayer]]:
        """Return the encoder, and the layers that map its features to means and logits, in the order of the action."""
        return self.model.encoder, DenseLayer.of_mlp(self.model.actor)


class PPO(Trainer):
    """A proximal policy optimization trainer, for discrete and continuous actions and combinations of them."""

    def __init__(
        self,
        behavior: str,
        spec: BehaviorSpec,
        options: PPOOptions | None = None,
        *,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.behavior = behavior
        self.options = PPOOptions() if options is None else options
        self.n_before_update = self.options.rollout
        self._device = pick_device(device)
        self._generator = torch.Generator().manual_seed(int(seed))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = ActorCritic(behavior, spec, self.options).to(self._device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=self.options.learning_rate, eps=1e-5, fused=True)
        self.policy: ActorCriticPolicy = ActorCriticPolicy(self.model, self._device)
        float_row = ArraySpec((), np.float32)
        columns = {**self.model.heads.raw_columns, "log_prob": float_row, "value": float_row}
        # The store also holds open rows and rows that only end an episode. It grows, as a round may need more.
        self._store = StepStore(spec.observation, columns, capacity=2 * self.options.rollout + 4096, grows=True)
        self._return_spread = ReturnSpread(self.options.gamma, enabled=self.options.normalize_rewards)
        self._n_in_rollout = 0

    def add(self, info: StepInfo) -> int:
        n = len(self._store.add(info, self.behavior))
        self._return_spread.add(info, self.behavior)
        self._n_in_rollout += n
        return n

    def is_ready(self) -> bool:
        return self._n_in_rollout >= self.options.rollout

    def can_update(self) -> bool:
        return self._n_in_rollout > 0

    def greedy_policy(self) -> Policy:
        return ActorCriticPolicy(self.model, self._device, greedy=True)

    def greedy_module(self) -> nn.Module:
        return LikeliestAction(self.model)

    def environments_were_reset(self) -> None:
        self._store.abandon_all()
        self._return_spread.environments_were_reset()

    def update(self, progress: float) -> dict[str, float]:
        options = self.options
        if options.anneal:
            anneal(self._optimizer, options.learning_rate, progress)
        before = {name: array.copy() for name, array in self._learned().items()}
        try:
            figures = self._learn(self._take_rollout())
        except CallStopped:
            self._restore_learned(before)
            raise
        self._store.clear()
        self._n_in_rollout = 0
        self.version += 1
        self.policy.version = self.version
        return {**figures, "learning_rate": self._optimizer.param_groups[0]["lr"]}

    def _take_rollout(self) -> Rollout:
        store, options = self._store, self.options
        rows = np.arange(store.first, store.n_rows)
        places = store.places(rows)
        value = store.columns["value"][places].copy()
        acted = store.acted[places]
        value[~acted] = self._values_of(places[~acted])
        successor = store.successor[places] - rows[0]
        successor[store.successor[places] == NOWHERE] = NOWHERE
        advantage = advantages(
            value,
            self._return_spread.normalized(store.reward[places]) * options.reward_scale,
            store.terminated[places],
            acted,
            successor,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
        )
        chosen = np.flatnonzero(acted & ((successor != NOWHERE) | store.terminated[places]))
        at = places[chosen]
        return Rollout(
            [to_tensor(leaf[at], self._device) for leaf in leaves(store.obs)],
            {name: to_tensor(store.columns[name][at], self._device) for name in self.model.heads.raw_columns},
            to_tensor(store.columns["log_prob"][at], self._device),
            to_tensor(value[chosen], self._device),
            to_tensor(advantage[chosen], self._device),
        )

    @torch.inference_mode()
    def _values_of(self, places: np.ndarray) -> np.ndarray:
        if not len(places):
            return np.zeros(0, np.float32)
        obs = [to_tensor(leaf[places], self._device) for leaf in leaves(self._store.obs)]
        values: np.ndarray = self.model(obs)[1].cpu().numpy()
        return values

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        options = self.options
        n = len(rollout.advantage)
        if n == 0:  # in a very short round no step has a successor yet
            return {}
        if self.model.encoder.is_normalized:
            self.model.encoder.learn_scale(rollout.obs)
            with torch.no_grad():  # so that the ratios are 1 before the first gradient step, with the new scale too
                batches = map(rollout.take, torch.arange(n, device=self._device).split(options.minibatch))
                log_probs = [self.model.heads.evaluate(self.model.inputs(each.obs), each.raws)[0] for each in batches]
            rollout = attrs.evolve(rollout, log_prob=torch.cat(log_probs))
        figures: list[dict[str, Tensor]] = []
        for _ in range(options.epochs):
            order = torch.randperm(n, generator=self._generator)
            # Minibatches of equal size; the last may be smaller.
            for chosen in order.chunk(max(1, round(n / options.minibatch))):
                if self.stops():
                    raise CallStopped("an update was stopped. It has changed nothing.")
                figures.append(self._step(rollout.take(chosen.to(self._device))))
            if options.target_kl is not None and figures[-1]["kl"] > options.target_kl:
                break
        return means(figures)

    def _step(self, batch: Rollout) -> dict[str, Tensor]:
        options = self.options
        inputs, value = self.model(batch.obs)
        log_prob, entropy = self.model.heads.evaluate(inputs, batch.raws)
        log_ratio = log_prob - batch.log_prob
        ratio = log_ratio.exp()
        advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std(correction=0) + 1e-8)
        clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value_loss = 0.5 * (value - batch.advantage - batch.value).square().mean()
        loss = policy_loss + options.value_coefficient * value_loss - options.entropy_coefficient * entropy.mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), options.max_grad_norm)
        self._optimizer.step()
        with torch.no_grad():
            kl = ((ratio - 1) - log_ratio).mean()  # http://joschu.net/blog/kl-approx.html
        figures = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy.mean(), "kl": kl}
        return {name: figure.detach() for name, figure in figures.items()}

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays = {**self._learned(), **named("rollout", self._store.state())}
        spread = self._return_spread.state()
        return arrays, to_plain(_Facts(version=self.version, n_in_rollout=self._n_in_rollout, return_spread=spread))

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        own = from_plain(_Facts, facts)
        self._return_spread.restore(own.return_spread)
        self._restore_learned(arrays)
        self._store.restore(of_part("rollout", arrays))
        self._n_in_rollout = own.n_in_rollout
        self.version = self.policy.version = own.version

    def _learned(self) -> dict[str, np.ndarray]:
        """Return what an update changes, besides the rollout. On the CPU, the arrays share the model's memory."""
        learned = learner_state(self._optimizer, model=self.model)
        return {**learned, "generator": self._generator.get_state().numpy()}

    def _restore_learned(self, arrays: Arrays) -> None:
        load_learner(arrays, self._optimizer, model=self.model)
        self._generator.set_state(torch.from_numpy(np.array(arrays["generator"])))

    def restore_policy(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        load_module(self.model, of_part("model", arrays))
        self.version = self.policy.version = from_plain(_Facts, facts).version


@attrs.frozen(kw_only=True)
class _Facts:
    """The counters and reward normalization of a PPO trainer, saved in a checkpoint beside the arrays."""

    version: int = attrs.field(validator=at_least(0))
    n_in_rollout: int = attrs.field(validator=at_least(0))
    return_spread: SpreadState | None = None


@attrs.frozen
class Rollout:
    """The rows that an update or a minibatch learns from, as tensors ``[n, …]`` on the device."""

    obs: list[Tensor]
    raws: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor
    advantage: Tensor

    def take(self, rows: Tensor) -> Rollout:
        """Return a rollout with only the rows at the indices ``rows``."""
        return Rollout(
            [leaf[rows] for leaf in self.obs],
            {name: raw[rows] for name, raw in self.raws.items()},
            self.log_prob[rows],
            self.value[rows],
            self.advantage[rows],
        )


def advantages(
    value: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    acted: np.ndarray,
    successor: np.ndarray,
    *,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Return the generalized advantage of each row (Schulman et al. 2015), as float32[n].

    ``successor[i]`` is the index of the same agent's next row, which is greater than i, or -1 if there is none. Rows
    without an action, and rows that neither terminate nor have a successor, have the advantage 0.
    """
    values, rewards, ends = value.tolist(), reward.tolist(), terminated.tolist()
    has_acted, nexts = acted.tolist(), successor.tolist()
    out = [0.0] * len(values)
    decay = gamma * gae_lambda
    for row in range(len(values) - 1, -1, -1):
        if not has_acted[row]:
            continue
        after = nexts[row]
        if ends[row]:
            out[row] = rewards[row] - values[row]
        elif after != NOWHERE:
            out[row] = rewards[row] + gamma * values[after] - values[row] + decay * out[after]
    assert not math.isnan(sum(out)), "an observation, a reward or a value is not a number"
    return np.array(out, np.float32)
