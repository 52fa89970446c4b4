"""TorchRL's batched environments."""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torchrl.envs

from benchmarks.contender import Contender, env_fns, random_actions


class Vector(Contender):
    """A batched environment. ``kind``: SerialEnv, or ParallelEnv with a process per environment."""

    def __init__(self, env: str, n_envs: int, *, kind: str) -> None:
        makers = [partial(_wrapped, make) for make in env_fns(env, n_envs)]
        self._envs = getattr(torchrl.envs, kind)(n_envs, makers)
        self._n_envs = n_envs
        self._actions = cycle([torch.from_numpy(batch) for batch in random_actions(env, n_envs)])
        self._steps = self._envs.reset()

    def run(self, n_calls: int) -> int:
        steps, advance = self._steps, self._envs.step_and_maybe_reset
        for actions in islice(self._actions, n_calls):
            steps["action"] = actions
            _, steps = advance(steps)
        self._steps = steps
        return n_calls * self._n_envs

    def close(self) -> None:
        self._envs.close()


def _wrapped(make: Any) -> Any:
    return torchrl.envs.GymWrapper(make(), categorical_action_encoding=True)
