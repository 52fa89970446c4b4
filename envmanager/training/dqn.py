"""Deep Q-learning (Mnih et al. 2015): double (van Hasselt et al. 2016), duelling (Wang et al. 2016), n-step returns
(Sutton 1988) and prioritized replay (Schaul et al. 2016), each a switch.

::

    StepStore (every observation once) ── Replay: rows, n steps along their chain ──▶ batches ──▶ new version

The rule: the replay holds whatever agents did, in whichever order it came; what follows a row is found by its links.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps, StepInfo
from envmanager.errors import UsageError
from envmanager.extras import needed_by
from envmanager.options import one_of
from envmanager.policy import Policy
from envmanager.training.actions import ActionHeads, Discrete
from envmanager.training.networks import CONVOLUTIONS, Encoder, mlp, pick_device, to_tensor
from envmanager.training.replay import Replay
from envmanager.training.states import anneal, learner_state, load_learner, load_module, means, named, of_part
from envmanager.training.trainer import Arrays, Trainer

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn


@attrs.frozen(kw_only=True)
class DQNOptions:
    """The usual names. Steps are those of agents, not frames."""

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
    double: bool = True
    duelling: bool = True
    prioritized: bool = False
    priority_exponent: float = 0.6
    importance_exponent: float = 0.4
    """Of the weights that make up for the priorities; grows to 1 over the training."""
    target_every: int = 1_000
    """How many batches the target network is left alone for."""
    epsilon: float = 1.0
    final_epsilon: float = 0.05
    exploration_steps: int = 10_000
    """How many steps epsilon takes to fall to its final value."""
    hidden: Sequence[int] = (256, 256)
    """The layers behind the encoder; images usually want none."""
    convolutions: str = attrs.field(default="nature", validator=one_of(*CONVOLUTIONS))
    """Of images: those of Mnih et al. 2015, or ``small`` ones."""
    reward_clip: float | None = None
    """Rewards are cut to between minus this and this."""
    max_grad_norm: float = 10.0
    pinned_copies: bool = True
    """Copy batches to a GPU from pinned memory, without waiting for them; nothing on the CPU."""

    def __attrs_post_init__(self) -> None:
        for name in ("capacity", "train_every", "updates", "batch", "n_step", "target_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.capacity < self.learning_starts:
            raise UsageError(f"capacity={self.capacity} is less than learning_starts={self.learning_starts}.")


class QNetwork(nn.Module):
    """An encoder, and behind it the value of every action."""

    def __init__(self, spec: BehaviorSpec, n_actions: int, options: DQNOptions) -> None:
        super().__init__()
        self.encoder = Encoder(spec.observation, convolutions=options.convolutions)
        self.duelling = options.duelling
        n_out = n_actions + 1 if options.duelling else n_actions
        self.last = mlp(self.encoder.n_features, options.hidden, n_out, last_gain=1.0, activation=nn.ReLU)

    def forward(self, obs: Sequence[Tensor]) -> Tensor:
        """``[n, n_actions]``."""
        out: Tensor = self.last(self.encoder(obs))
        if not self.duelling:
            return out
        value, advantage = out[:, :1], out[:, 1:]
        return value + advantage - advantage.mean(1, keepdim=True)


class EpsilonGreedyPolicy:
    """The action of the highest value, or with probability ``epsilon`` any."""

    def __init__(
        self, model: QNetwork, heads: ActionHeads, n_actions: int, device: torch.device, seed: int, epsilon: float
    ) -> None:
        self.version = 0
        self.epsilon = epsilon
        self.generator = np.random.default_rng(seed)
        self._model = model
        self._heads = heads
        self._n_actions = n_actions
        self._device = device

    @torch.inference_mode()
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Actions for the environment; in the outputs their numbers."""
        n = len(steps)
        explores = self.generator.random(n) < self.epsilon
        chosen = self.generator.integers(0, self._n_actions, n)
        if not explores.all():
            obs = self._model.encoder.tensors(steps.obs, self._device)
            chosen = np.where(explores, chosen, self._model(obs).argmax(1).cpu().numpy())
        raws = {"raw0": chosen[:, None]}
        return ActionInfo(self._heads.to_environment(raws), raws, self.version)


class BestAction(nn.Module):
    """What the greedy policy does, from the leaves of an observation to the action."""

    def __init__(self, model: QNetwork, heads: ActionHeads) -> None:
        super().__init__()
        self.model, self.heads = model, heads

    def forward(self, *obs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.heads.as_actions({"raw0": self.model(obs).argmax(1, keepdim=True)}))


class DQN(Trainer):
    """Deep Q-learning, for one discrete action and any observations."""

    max_policy_lag = math.inf

    def __init__(
        self,
        behavior: str,
        spec: BehaviorSpec,
        options: DQNOptions | None = None,
        *,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.behavior = behavior
        self.options = options = DQNOptions() if options is None else options
        self._device = pick_device(device)
        self._heads = ActionHeads(spec.action)
        self._n_actions = _n_actions(self._heads)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = QNetwork(spec, self._n_actions, options).to(self._device)
        self.target = copy.deepcopy(self.model)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=options.learning_rate, eps=1.5e-4, fused=True)
        self.replay = Replay(
            spec.observation,
            self._heads.raw_columns,
            capacity=options.capacity,
            seed=seed,
            n_step=options.n_step,
            gamma=options.gamma,
            priority_exponent=options.priority_exponent if options.prioritized else None,
            share_frames=options.share_frames,
        )
        self.policy: EpsilonGreedyPolicy = self._policy(seed, options.epsilon)
        self._n_steps = 0
        self._n_since_update = 0
        self._n_batches = 0

    def _policy(self, seed: int, epsilon: float) -> EpsilonGreedyPolicy:
        return EpsilonGreedyPolicy(self.model, self._heads, self._n_actions, self._device, seed, epsilon)

    def add(self, info: StepInfo) -> int:
        n = self.replay.add(info, self.behavior)
        self._n_steps += n
        options = self.options
        if self._n_steps >= options.learning_starts:  # what was only collected is not caught up with
            self._n_since_update += n
        done = min(1.0, self._n_steps / max(1, options.exploration_steps))
        self.policy.epsilon = options.epsilon + done * (options.final_epsilon - options.epsilon)
        return n

    def is_ready(self) -> bool:
        return self._n_since_update >= self.options.train_every

    def greedy_policy(self) -> Policy:
        return self._policy(0, 0.0)

    def greedy_module(self) -> nn.Module:
        return BestAction(self.model, self._heads)

    def environments_were_reset(self) -> None:
        self.replay.store.abandon_all()

    def update(self, progress: float) -> dict[str, float]:
        self._n_since_update = max(0, self._n_since_update - self.options.train_every)
        if self.options.anneal:
            anneal(self._optimizer, self.options.learning_rate, progress)
        figures = means([self._learn(progress) for _ in range(self.options.updates)])
        self.version += 1
        self.policy.version = self.version
        return {**figures, "epsilon": self.policy.epsilon}

    def _learn(self, progress: float) -> dict[str, Tensor]:
        options = self.options
        exponent = options.importance_exponent + progress * (1.0 - options.importance_exponent)
        drawn = self.replay.sample(options.batch, importance_exponent=exponent, reward_clip=options.reward_clip)
        to_device = functools.partial(to_tensor, device=self._device, pinned=options.pinned_copies)
        obs, next_obs = list(map(to_device, drawn.obs)), list(map(to_device, drawn.next_obs))
        action = to_device(drawn.columns["raw0"])
        with torch.no_grad():
            after = self.target(next_obs)
            best = self.model(next_obs).argmax(1, keepdim=True) if options.double else after.argmax(1, keepdim=True)
            goal = to_device(drawn.reward) + to_device(drawn.discount) * after.gather(1, best).squeeze(1)
        value = self.model(obs).gather(1, action).squeeze(1)
        losses = nn.functional.smooth_l1_loss(value, goal, reduction="none")
        loss = (losses * to_device(drawn.weight)).mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), options.max_grad_norm)
        self._optimizer.step()
        if options.prioritized:  # else a GPU need not be waited for
            self.replay.was_wrong_by(drawn.rows, (value.detach() - goal).abs().cpu().numpy())
        self._n_batches += 1
        if self._n_batches % options.target_every == 0:
            self.target.load_state_dict(self.model.state_dict())
        return {"loss": loss.detach(), "value": value.detach().mean()}

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays, facts = learner_state(self._optimizer, model=self.model, target=self.target)
        replay_arrays, replay_facts = self.replay.state()
        return {**arrays, **named("replay", replay_arrays)}, {
            **facts,
            "version": self.version,
            "n_steps": self._n_steps,
            "n_since_update": self._n_since_update,
            "n_batches": self._n_batches,
            "generator": self.policy.generator.bit_generator.state,
            "replay": replay_facts,
        }

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        load_learner(arrays, facts, self._optimizer, model=self.model, target=self.target)
        self.replay.restore(of_part("replay", arrays), facts["replay"])
        self.version = self.policy.version = int(facts["version"])
        self._n_steps, self._n_since_update = int(facts["n_steps"]), int(facts["n_since_update"])
        self._n_batches = int(facts["n_batches"])
        self.policy.generator.bit_generator.state = facts["generator"]

    def restore_policy(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        load_module(self.model, of_part("model", arrays))
        self.version = self.policy.version = int(facts["version"])


def _n_actions(heads: ActionHeads) -> int:
    head = heads.heads[0]
    if len(heads.heads) != 1 or not isinstance(head, Discrete) or len(head.counts) != 1:
        raise UsageError("DQN needs one discrete action; for several, or for continuous ones, use PPO.")
    return int(head.counts[0])
