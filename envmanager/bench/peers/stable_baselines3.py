"""Stable-Baselines3's VecEnvs.

SubprocVecEnv is started by fork: its default, forkserver, has every worker import PyTorch, which takes long and makes
no step faster.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from stable_baselines3.common import vec_env

from envmanager.bench.contender import Contender, env_fns, repeated


class Vector(Contender):
    """``kind``: DummyVecEnv, or SubprocVecEnv with a process per environment."""

    def __init__(self, env: str, n_envs: int, *, kind: str, **options: Any) -> None:
        self._envs = getattr(vec_env, kind)(env_fns(env, n_envs), **options)
        self._n_envs = n_envs
        self._actions = repeated(env, n_envs)
        self._envs.seed(0)
        self._envs.reset()

    def run(self, n_calls: int) -> int:
        step = self._envs.step
        for actions in islice(self._actions, n_calls):
            step(actions)
        return n_calls * self._n_envs

    def close(self) -> None:
        self._envs.close()
