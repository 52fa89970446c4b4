"""EnvPool: runs its own C++ environments, such as Pong and CartPole, in threads of the trainer's process."""

from __future__ import annotations

from itertools import islice
from typing import Any

import envpool

from benchmarks.contender import Contender, Together, repeated
from benchmarks.roster import CannotTakePart

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "pong": ("Pong-v5", {"use_fire_reset": False}),
    "cartpole": ("CartPole-v1", {}),
}


def _make(env: str, n_envs: int, batch_size: int) -> Any:
    if env not in TASKS:
        raise CannotTakePart(f"it has no environment {env!r}: it runs only its own, in C++")
    task, options = TASKS[env]
    return envpool.make(task, env_type="gymnasium", num_envs=n_envs, batch_size=batch_size, **options)


class Synchronous(Together):
    """EnvPool that waits for all environments."""

    def __init__(self, env: str, n_envs: int) -> None:
        super().__init__(_make(env, n_envs, n_envs), env, n_envs)
        self._envs.reset()


class Asynchronous(Contender):
    """EnvPool that waits for the first half of the environments to be ready."""

    def __init__(self, env: str, n_envs: int) -> None:
        self._batch_size = max(1, n_envs // 2)
        self._envs = _make(env, n_envs, self._batch_size)
        self._actions = repeated(env, self._batch_size)
        self._envs.async_reset()
        self._env_ids = self._envs.recv()[-1]["env_id"]

    def run(self, n_calls: int) -> int:
        envs, env_ids = self._envs, self._env_ids
        for actions in islice(self._actions, n_calls):
            envs.send(actions, env_ids)
            env_ids = envs.recv()[-1]["env_id"]
        self._env_ids = env_ids
        return n_calls * self._batch_size

    def close(self) -> None:
        self._envs.close()
