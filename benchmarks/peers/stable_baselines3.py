"""Stable-Baselines3's VecEnvs.

SubprocVecEnv is started by fork. With its default, forkserver, every worker imports PyTorch, which slows the start and
makes no step faster.
"""

from __future__ import annotations

from typing import Any

from stable_baselines3.common import vec_env

from benchmarks.contender import Together, env_fns


class Vector(Together):
    """A VecEnv. ``kind``: DummyVecEnv, or SubprocVecEnv with a process per environment."""

    def __init__(self, env: str, n_envs: int, *, kind: str, **options: Any) -> None:
        super().__init__(getattr(vec_env, kind)(env_fns(env, n_envs), **options), env, n_envs)
        self._envs.seed(0)
        self._envs.reset()
