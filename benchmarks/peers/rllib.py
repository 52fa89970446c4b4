"""RLlib's environment runners, which step Gymnasium's vector environments and collect the steps into episodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from benchmarks.contender import Contender
from benchmarks.envs import make_env
from benchmarks.peers.ray_alone import EACH, start_ray
from benchmarks.roster import CannotTakePart


class Runner(Contender):
    """One runner in this process. ``mode``: ``"sync"``, or ``"async"`` with a process per environment.

    All environments are made as environment 0.
    """

    def __init__(self, env: str, n_envs: int, *, mode: str) -> None:
        config = _config(env, num_env_runners=0, num_envs_per_env_runner=n_envs, gym_env_vectorize_mode=mode)
        self._runner = SingleAgentEnvRunner(config=config)
        self._n_envs = n_envs
        self.run(1)

    def run(self, n_calls: int) -> int:
        episodes = self._runner.sample(num_timesteps=n_calls * self._n_envs, random_actions=True)
        return sum(len(episode) for episode in episodes)

    def close(self) -> None:
        self._runner.stop()


MOST = 16


class Runners(Contender):
    """Runners in actors, by default one per environment. Each call steps every environment once."""

    def __init__(self, env: str, n_envs: int, *, n_workers: int | None = None) -> None:
        start_ray()
        n_actors = n_workers or n_envs
        if n_actors > MOST:
            raise CannotTakePart(f"{n_actors} actors, each of which imports PyTorch, are too many")
        self._each = n_envs // n_actors
        config = _config(
            env, num_env_runners=n_actors, num_envs_per_env_runner=self._each, num_cpus_per_env_runner=EACH
        )
        self._group = EnvRunnerGroup(config=config, local_env_runner=False)
        self.run(1)

    def run(self, n_calls: int) -> int:
        sample = partial(_sample, n_steps=self._each)
        n_steps = 0
        for _ in range(n_calls):
            n_steps += sum(self._group.foreach_env_runner(sample, local_env_runner=False))
        return n_steps

    def close(self) -> None:
        self._group.stop()
        ray.shutdown()


def _sample(runner: Any, n_steps: int) -> int:
    """Sample in the actor; return only the number of steps, so that sending the episodes is not measured."""
    return sum(len(episode) for episode in runner.sample(num_timesteps=n_steps, random_actions=True))


def _config(env: str, **options: Any) -> Any:
    config = PPOConfig().environment(partial(_made, env))
    config.env_runners(**options)
    return config


def _made(env: str, _: Any) -> Any:
    return make_env(env, 0)
