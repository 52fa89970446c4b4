"""A trainer of your own in the controller: REINFORCE (Williams 1992), with episodes kept per agent.

    python docs/examples/own_trainer.py

The controller owns the loop, the manager decides who is ready; the trainer only says what it keeps of a step, when that
is enough, and how it learns.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from envmanager import ActionInfo, AgentSteps, BehaviorSpec, Policy, StepInfo, make_manager
from envmanager.training.controller import TrainerController
from envmanager.training.evaluation import evaluate
from envmanager.training.trainer import Trainer

GAMMA = 0.99


class SoftmaxPolicy:
    """Draws actions from a network's probabilities; ``greedy``: takes the likeliest."""

    def __init__(self, model: nn.Module, *, greedy: bool = False) -> None:
        self.version = 0
        self._model = model
        self._greedy = greedy

    @torch.inference_mode()
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        logits = self._model(torch.from_numpy(steps.obs))
        action = logits.argmax(1) if self._greedy else Categorical(logits=logits).sample()
        return ActionInfo(action.numpy(), version=self.version)


class Reinforce(Trainer):
    """Learns from whole episodes, ``n_episodes`` at a time."""

    def __init__(self, behavior: str, spec: BehaviorSpec, *, n_episodes: int = 16) -> None:
        self.behavior = behavior
        n_obs, n_actions = spec.observation.shape[0], spec.action.whole_bounds[1] + 1
        self.model = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, n_actions))
        self.policy = SoftmaxPolicy(self.model)
        self._optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self._n_episodes = n_episodes
        self.environments_were_reset()

    def environments_were_reset(self) -> None:
        self._running: dict[int, list[Any]] = defaultdict(list)  # per agent: its episode so far
        self._ended: list[list[Any]] = []

    def add(self, info: StepInfo) -> int:
        if info.lost is not None:  # what these agents had begun will not end
            for agent_id in info.lost.agents(list(self._running)):
                del self._running[agent_id]
        obs, action, reward, _, terminated, truncated, agent_ids = info.transitions(self.behavior)
        for row, agent_id in enumerate(agent_ids.tolist()):
            self._running[agent_id].append((obs[row].copy(), int(action[row]), float(reward[row])))
            if terminated[row] or truncated[row]:
                self._ended.append(self._running.pop(agent_id))
        return len(agent_ids)

    def is_ready(self) -> bool:
        return len(self._ended) >= self._n_episodes

    def update(self, progress: float) -> dict[str, float]:
        obs, action, _ = zip(*(step for episode in self._ended for step in episode), strict=True)
        weights = np.concatenate([returns_to_go([reward for *_, reward in episode]) for episode in self._ended])
        weight = torch.from_numpy((weights - weights.mean()) / (weights.std() + 1e-8))
        policy = Categorical(logits=self.model(torch.from_numpy(np.stack(obs))))
        loss = -(policy.log_prob(torch.tensor(action)) * weight).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._ended = []
        self.version += 1
        self.policy.version = self.version
        return {"loss": float(loss.detach()), "entropy": float(policy.entropy().mean().detach())}

    def greedy_policy(self) -> Policy:
        return SoftmaxPolicy(self.model, greedy=True)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}, {"version": self.version}

    def restore(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
        self.version = self.policy.version = facts["version"]


def returns_to_go(rewards: list[float]) -> np.ndarray:
    """The discounted sum of what is still to come, float32[n]."""
    returns = np.zeros(len(rewards), np.float32)
    total = 0.0
    for step in reversed(range(len(rewards))):
        total = rewards[step] + GAMMA * total
        returns[step] = total
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--manager", default="subprocess", choices=["simple", "subprocess"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    options = {"kind": arguments.manager, "env": "CartPole-v1", "n_envs": 8, "seed": arguments.seed}
    with make_manager(options) as manager:
        trainer = Reinforce("default", manager.behavior_specs["default"])
        controller = TrainerController(manager, {"default": trainer})
        controller.train(arguments.steps)
        print(f"{trainer.version} updates, mean return while training {controller.episodes.mean_of_recent():.0f}")
        evaluation = evaluate(manager, {"default": trainer.greedy_policy()}, episodes_per_env=4)
        print(f"greedy: {evaluation.mean:.0f} ± {evaluation.spread:.0f}")


if __name__ == "__main__":
    main()
