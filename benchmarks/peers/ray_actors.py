"""Ray: this library's manager on a cluster of this machine, and actors written by hand.

An actor written by hand steps its environments one after the other and returns a tuple of arrays. In each call the
trainer sends actions to all actors, and receives the results one by one, in the order of ``ray.wait``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import ray

from benchmarks.contender import Contender, env_fns, repeated
from benchmarks.ours import Managed
from benchmarks.peers.ray_alone import EACH, start_ray
from envmanager.ray_cluster.manager import RayEnvManager


class Actors(Managed):
    """A RayEnvManager with ``n_workers`` actors, by default one per environment."""

    def __init__(self, env: str, n_envs: int, *, n_workers: int | None = None) -> None:
        start_ray()
        manager = RayEnvManager(
            env_fns(env, n_envs), n_envs, n_workers=n_workers, wait="all", resources={"num_cpus": EACH}
        )
        super().__init__(manager, env, n_envs)

    def close(self) -> None:
        super().close()
        ray.shutdown()


class ByHand(Contender):
    """Actors written by hand, with ``ray.wait``."""

    def __init__(self, env: str, n_envs: int, *, n_workers: int | None = None) -> None:
        start_ray()
        self._n_envs = n_envs
        self._actions = repeated(env, n_envs)
        self._blocks = np.array_split(np.arange(n_envs), n_workers or n_envs)
        fns = env_fns(env, n_envs)
        self._actors = [
            ray.remote(_Envs).options(num_cpus=EACH).remote([fns[row] for row in block]) for block in self._blocks
        ]
        ray.get([actor.reset.remote() for actor in self._actors])

    def run(self, n_calls: int) -> int:
        for actions in islice(self._actions, n_calls):
            waiting = [
                actor.step.remote(actions[block]) for actor, block in zip(self._actors, self._blocks, strict=True)
            ]
            while waiting:
                done, waiting = ray.wait(waiting)
                ray.get(done)
        return n_calls * self._n_envs

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()


class _Envs:
    def __init__(self, env_fns: Sequence[Any]) -> None:
        self._envs = [make() for make in env_fns]

    def reset(self) -> list[Any]:
        return [env.reset(seed=0)[0] for env in self._envs]

    def step(self, actions: Any) -> Any:
        obs, rewards, terminations, truncations = [], [], [], []
        for env, action in zip(self._envs, actions, strict=True):
            seen, reward, terminated, truncated, _ = env.step(int(action))
            if terminated or truncated:
                seen, _ = env.reset()
            obs.append(seen)
            rewards.append(reward)
            terminations.append(terminated)
            truncations.append(truncated)
        return np.stack(obs), np.array(rewards), np.array(terminations), np.array(truncations)
