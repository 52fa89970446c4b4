"""PPO in one file, with a loop of its own around ``send`` and ``recv``.

    python docs/examples/ppo_send_recv.py

No controller and no trainer: a batch holds whichever environments are ready, and ``Rollouts`` keeps each environment's
steps in a column of its own. One whose column is full is not sent an action until the others have filled theirs.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from envmanager import Rollout, Rollouts, SubprocessEnvManager, Wait

ROLLOUT, EPOCHS, MINIBATCH = 128, 10, 128
LEARNING_RATE, GAMMA, LAMBDA, CLIP = 1e-3, 0.99, 0.95, 0.2


class Agent(nn.Module):
    def __init__(self, n_obs: int, n_actions: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, n_actions))
        self.critic = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, 1))

    def policy(self, obs: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(obs))

    @torch.inference_mode()
    def values(self, obs: np.ndarray) -> np.ndarray:
        return self.critic(torch.from_numpy(obs)).squeeze(-1).numpy()

    @torch.inference_mode()
    def act(self, obs: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions, and what is to be kept with them."""
        policy = self.policy(torch.from_numpy(obs))
        action = policy.sample()
        return action.numpy(), {"log_prob": policy.log_prob(action).numpy(), "value": self.values(obs)}


def advantages_in(rollout: Rollout, agent: Agent) -> np.ndarray:
    """Generalized advantages: an episode that ends is worth what its last observation is, unless it terminated."""
    next_value = agent.values(rollout.next_obs) * ~rollout.terminated
    errors = rollout.reward + GAMMA * next_value - rollout.outputs["value"]
    advantages, following = np.zeros_like(errors), np.zeros_like(errors[0])
    for step in reversed(range(len(errors))):
        following = errors[step] + GAMMA * LAMBDA * following * ~rollout.ended[step]
        advantages[step] = following
    return advantages


def learn(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout) -> None:
    advantages = advantages_in(rollout, agent)
    returns = torch.from_numpy((advantages + rollout.outputs["value"]).ravel())
    advantage = torch.from_numpy(advantages.ravel())
    obs = torch.from_numpy(rollout.obs.reshape(len(returns), -1))
    action, log_prob = torch.from_numpy(rollout.action.ravel()), torch.from_numpy(rollout.outputs["log_prob"].ravel())
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(returns)).split(MINIBATCH):
            ratio = (agent.policy(obs[rows]).log_prob(action[rows]) - log_prob[rows]).exp()
            normed = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
            gain = torch.min(ratio * normed, ratio.clamp(1 - CLIP, 1 + CLIP) * normed).mean()
            error = (agent.critic(obs[rows]).squeeze(-1) - returns[rows]).square().mean()
            optimizer.zero_grad()
            (0.5 * error - gain).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    n_envs, began, n_steps = arguments.n_envs, time.monotonic(), 0
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    agent = Agent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE)
    with SubprocessEnvManager("CartPole-v1", n_envs, n_workers=2, wait=Wait.any(), seed=arguments.seed) as manager:
        rollouts, episodes = Rollouts(manager, ROLLOUT), manager.episodes
        manager.reset()
        while n_steps < arguments.steps:
            rollouts.add(manager.recv())  # at first, the first observations
            if rollouts.is_full:
                rollout = rollouts.take()
                n_steps += rollout.reward.size
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * max(0, 1 - n_steps / arguments.steps)
                learn(agent, optimizer, rollout)
            if len(rollouts.ready):  # none, if those that are not full are under way
                action, kept = agent.act(rollouts.obs)
                rollouts.send(action, **kept)
    print(f"{n_steps:,} steps in {time.monotonic() - began:.0f} s, mean return {episodes.mean_of_recent():.0f}")


if __name__ == "__main__":
    main()
