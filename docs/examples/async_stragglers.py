"""Train on slow, uneven environments, waiting for all workers or for any: the time until the same return.

    python docs/examples/async_stragglers.py

Each step of CartPole sleeps 1 to 20 ms here, and those of one environment 50 ms, as a simulator would. Waiting for all,
every step takes as long as the slowest; waiting for any, the policy acts for whoever is ready.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import gymnasium
import torch

from envmanager import EnvContext, SubprocessEnvManager, Wait
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.controller import TrainerController
from envmanager.training.evaluation import evaluate

OPTIONS = PPOOptions(rollout=1024, epochs=10, minibatch=128, learning_rate=1e-3, anneal=False)


class Slow(gymnasium.Wrapper):
    """Sleeps before each step."""

    def __init__(self, env: gymnasium.Env, shortest_s: float, longest_s: float, seed: int) -> None:
        super().__init__(env)
        self._chance = random.Random(seed)
        self._range = (shortest_s, longest_s)

    def step(self, action: Any) -> Any:
        time.sleep(self._chance.uniform(*self._range))
        return super().step(action)


def make_env(context: EnvContext) -> gymnasium.Env:
    """CartPole, slow; environment 0 is the slowest."""
    shortest_s, longest_s = (0.05, 0.05) if context.env_id == 0 else (0.001, 0.02)
    return Slow(gymnasium.make("CartPole-v1"), shortest_s, longest_s, seed=context.env_id)


def train(wait: Wait, seed: int, goal: float, n_envs: int, most_steps: int) -> tuple[float, float, int]:
    """Seconds until the last 30 episodes returned ``goal`` on average, the greedy policy's return, and the steps."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    with SubprocessEnvManager(make_env, n_envs, wait=wait, seed=seed) as manager:
        trainer = PPO("default", manager.behavior_specs["default"], OPTIONS, seed=seed)
        controller = TrainerController(manager, {"default": trainer})

        def is_good() -> bool:
            returns = list(controller.episodes.recent)[-30:]
            return len(returns) == 30 and sum(returns) / 30 >= goal

        began = time.monotonic()
        controller.train(most_steps, until=is_good)
        seconds = time.monotonic() - began
    with SubprocessEnvManager("CartPole-v1", 8, n_workers=2, wait=Wait.all(), seed=seed + 1000) as manager:
        evaluation = evaluate(manager, {"default": trainer.greedy_policy()}, episodes_per_env=3)
    return seconds, evaluation.mean, controller.n_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--n-envs", type=int, default=16)
    parser.add_argument("--goal", type=float, default=400.0, help="the mean return of 30 episodes to reach")
    parser.add_argument("--most-steps", type=int, default=200_000)
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        seconds = {}
        for wait in ("all", "any"):
            seconds[wait], mean, n_steps = train(
                Wait.parse(wait), seed, arguments.goal, arguments.n_envs, arguments.most_steps
            )
            print(f"seed {seed}, wait {wait}: {seconds[wait]:.1f} s, {n_steps:,} steps, greedy return {mean:.0f}")
        print(f"seed {seed}: waiting for any is {seconds['all'] / seconds['any']:.1f} times as fast", flush=True)


if __name__ == "__main__":
    main()
