"""PPO in one file, with a loop of its own around ``send`` and ``recv``.

    python docs/examples/ppo_send_recv.py

No controller and no trainer: a batch holds whichever environments are ready, so each environment has its own place in
the rollout. One whose rollout is full is not sent an action until the others have filled theirs.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from envmanager import Batch, SubprocessEnvManager, Wait

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


class Rollout:
    """``[n_envs, ROLLOUT]`` steps; ``place`` says how many each environment has."""

    def __init__(self, n_envs: int, n_obs: int) -> None:
        self.obs = np.zeros((n_envs, ROLLOUT, n_obs), np.float32)
        self.next_value = np.zeros((n_envs, ROLLOUT), np.float32)
        self.reward, self.value, self.log_prob = np.zeros((3, n_envs, ROLLOUT), np.float32)
        self.ended = np.zeros((n_envs, ROLLOUT), bool)
        self.action = np.zeros((n_envs, ROLLOUT), np.int64)
        self.place = np.zeros(n_envs, np.int64)

    def advantages(self) -> np.ndarray:
        """Generalized advantages: nothing comes after the end of an episode."""
        advantages = np.zeros_like(self.reward)
        following = np.zeros(len(self.place), np.float32)
        errors = self.reward + GAMMA * self.next_value - self.value
        for step in reversed(range(ROLLOUT)):
            following = errors[:, step] + GAMMA * LAMBDA * following * ~self.ended[:, step]
            advantages[:, step] = following
        return advantages


def finish_steps(rollout: Rollout, agent: Agent, batch: Batch) -> None:
    """Write what the actions before brought, and how much what comes next is worth."""
    ended = batch.terminated | batch.truncated
    next_obs = batch.obs.copy()
    if ended.any():
        next_obs[ended] = batch.final_obs
    envs, places = batch.env_ids, rollout.place[batch.env_ids]
    rollout.reward[envs, places] = batch.reward
    rollout.ended[envs, places] = ended
    rollout.next_value[envs, places] = agent.values(next_obs) * ~batch.terminated
    # What was lost with a worker is taken again; what came before belongs to an episode that is over.
    rollout.place[envs] += ~batch.lost
    cut = batch.lost & (places > 0)
    rollout.ended[envs[cut], places[cut] - 1] = True


@torch.inference_mode()
def act(rollout: Rollout, agent: Agent, envs: np.ndarray, obs: np.ndarray) -> np.ndarray:
    """Actions for these environments, noted in the rollout."""
    tensor = torch.from_numpy(obs)
    policy = agent.policy(tensor)
    action = policy.sample()
    places = rollout.place[envs]
    rollout.obs[envs, places] = obs
    rollout.action[envs, places] = action.numpy()
    rollout.log_prob[envs, places] = policy.log_prob(action).numpy()
    rollout.value[envs, places] = agent.critic(tensor).squeeze(-1).numpy()
    return action.numpy()


def learn(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout) -> None:
    advantages = rollout.advantages()
    returns = torch.from_numpy((advantages + rollout.value).ravel())
    advantage = torch.from_numpy(advantages.ravel())
    obs = torch.from_numpy(rollout.obs.reshape(len(returns), -1))
    action, log_prob = torch.from_numpy(rollout.action.ravel()), torch.from_numpy(rollout.log_prob.ravel())
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
    n_envs, began = arguments.n_envs, time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    agent, rollout = Agent(4, 2), Rollout(n_envs, 4)
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE)
    returns, running = [], np.zeros(n_envs)
    with SubprocessEnvManager("CartPole-v1", n_envs, n_workers=2, wait=Wait.any(), seed=arguments.seed) as manager:
        manager.reset()
        batch = manager.recv()  # the first observations
        obs, ready = np.empty((n_envs, 4), np.float32), batch.env_ids
        obs[ready] = batch.obs
        n_steps = 0
        while n_steps < arguments.steps:
            if len(ready):
                manager.send(act(rollout, agent, ready, obs[ready]), ready)
            batch = manager.recv()
            n_steps += len(batch)
            finish_steps(rollout, agent, batch)
            obs[batch.env_ids] = batch.obs
            running[batch.env_ids] += batch.reward
            done = batch.env_ids[batch.terminated | batch.truncated]
            returns += running[done].tolist()
            running[done] = 0.0
            ready = batch.env_ids[rollout.place[batch.env_ids] < ROLLOUT]
            if (rollout.place == ROLLOUT).all():
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - n_steps / arguments.steps)
                learn(agent, optimizer, rollout)
                rollout.place[:] = 0
                ready = np.arange(n_envs)
    print(f"{n_steps:,} steps in {time.monotonic() - began:.0f} s, mean return {np.mean(returns[-50:]):.0f}")


if __name__ == "__main__":
    main()
