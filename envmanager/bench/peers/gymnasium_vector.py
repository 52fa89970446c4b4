"""Gymnasium's vector environments. An episode restarts in the step after its end, which is their default."""

from __future__ import annotations

from itertools import islice
from typing import Any

import gymnasium

from envmanager.bench.contender import Contender, env_fns, repeated


class Vector(Contender):
    """``kind``: SyncVectorEnv, or AsyncVectorEnv with a process per environment."""

    def __init__(self, env: str, n_envs: int, *, kind: str, **options: Any) -> None:
        self._envs = getattr(gymnasium.vector, kind)(env_fns(env, n_envs), **options)
        self._n_envs = n_envs
        self._actions = repeated(env, n_envs)
        self._envs.reset(seed=0)

    def run(self, n_calls: int) -> int:
        step = self._envs.step
        for actions in islice(self._actions, n_calls):
            step(actions)
        return n_calls * self._n_envs

    def close(self) -> None:
        self._envs.close()
