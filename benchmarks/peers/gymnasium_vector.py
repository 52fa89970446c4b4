"""Gymnasium's vector environments. By default, the row after the end of an episode is a reset, not a step."""

from __future__ import annotations

from typing import Any

import gymnasium

from benchmarks.contender import Together, env_fns, share_of_steps


class Vector(Together):
    """A vector environment. ``kind``: SyncVectorEnv, or AsyncVectorEnv with a process per environment."""

    def __init__(self, env: str, n_envs: int, *, kind: str, **options: Any) -> None:
        super().__init__(getattr(gymnasium.vector, kind)(env_fns(env, n_envs), **options), env, n_envs)
        self._envs.reset(seed=0)
        self._share_of_steps = 1.0

    def get_ready(self) -> None:
        self._share_of_steps = share_of_steps(self._n_restarting, self._n_envs)

    def run(self, n_calls: int) -> int:
        return round(super().run(n_calls) * self._share_of_steps)

    def _n_restarting(self) -> int:
        _, _, terminated, truncated, _ = self._envs.step(next(self._actions))
        return int((terminated | truncated).sum())
