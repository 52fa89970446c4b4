"""Gymnasium's vector environments. An episode restarts in the step after its end, which is their default."""

from __future__ import annotations

from typing import Any

from envmanager.bench.contender import Together, env_fns
from envmanager.extras import needed_by

with needed_by("the contender gymnasium", extra="gymnasium"):
    import gymnasium


class Vector(Together):
    """``kind``: SyncVectorEnv, or AsyncVectorEnv with a process per environment."""

    def __init__(self, env: str, n_envs: int, *, kind: str, **options: Any) -> None:
        super().__init__(getattr(gymnasium.vector, kind)(env_fns(env, n_envs), **options), env, n_envs)
        self._envs.reset(seed=0)
