"""Tianshou's vector environments.

These do not restart episodes; the caller does, here as in Tianshou's collectors.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from tianshou import env as venvs

from benchmarks.contender import Contender, env_fns, repeated


class Vector(Contender):
    """A vector environment. ``kind``: Dummy-, Subproc- or ShmemVectorEnv. ``wait``: for all, half or any of them."""

    def __init__(self, env: str, n_envs: int, *, kind: str, wait: str = "all") -> None:
        wait_num = {"all": None, "half": max(1, n_envs // 2), "any": 1}[wait]
        self._envs = getattr(venvs, kind)(env_fns(env, n_envs), wait_num=wait_num)
        self._actions = repeated(env, n_envs)
        self._envs.reset(seed=0)
        self._env_ids = np.arange(n_envs)

    def run(self, n_calls: int) -> int:
        envs, env_ids, n_steps = self._envs, self._env_ids, 0
        for actions in islice(self._actions, n_calls):
            _, _, terminated, truncated, infos = envs.step(actions[: len(env_ids)], env_ids)
            env_ids = np.array([info["env_id"] for info in infos])
            n_steps += len(env_ids)
            ended = terminated | truncated
            if ended.any():
                envs.reset(env_ids[ended])
        self._env_ids = env_ids
        return n_steps

    def close(self) -> None:
        self._envs.close()
