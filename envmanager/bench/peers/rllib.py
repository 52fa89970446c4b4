"""RLlib's environment runner, in this process: Gymnasium's vector environments, and episodes made of their steps."""

from __future__ import annotations

from functools import partial
from typing import Any

from envmanager.bench.contender import Contender
from envmanager.bench.envs import make_env
from envmanager.extras import needed_by

with needed_by("the contender rllib", extra=None):
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner


class Runner(Contender):
    """``mode``: ``"sync"``, or ``"async"`` with a process per environment. All environments are number 0's like."""

    def __init__(self, env: str, n_envs: int, *, mode: str) -> None:
        config = PPOConfig().environment(partial(_made, env))
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=n_envs, gym_env_vectorize_mode=mode)
        self._runner = SingleAgentEnvRunner(config=config)
        self._n_envs = n_envs
        self.run(1)

    def run(self, n_calls: int) -> int:
        episodes = self._runner.sample(num_timesteps=n_calls * self._n_envs, random_actions=True)
        return sum(len(episode) for episode in episodes)

    def close(self) -> None:
        self._runner.stop()


def _made(env: str, _: Any) -> Any:
    return make_env(env, 0)
