"""PufferLib's vector environments. The row after the end of an episode is a reset, not a step."""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from pufferlib import vector
from pufferlib.emulation import GymnasiumPufferEnv

from benchmarks.contender import Contender, env_fns, random_actions, share_of_steps
from benchmarks.roster import CannotTakePart
from envmanager.system.machine import count_cores

MOST_PER_CORE = 8
"""Maximum number of workers per core. They do not sleep while they wait, so with more each would run too seldom."""


class Vector(Contender):
    """A vector environment. ``kind``: Serial or Multiprocessing. ``wait``: for all, half or any of the environments.

    ``per_core``: one process per core, which PufferLib recommends, instead of one per environment.
    """

    def __init__(self, env: str, n_envs: int, *, kind: str, wait: str = "all", per_core: bool = False) -> None:
        batch_size = {"all": n_envs, "half": max(1, n_envs // 2), "any": 1}[wait]
        options: dict[str, Any] = {}
        if kind == "Multiprocessing":
            n_workers = min(n_envs, count_cores()) if per_core else n_envs
            _check(n_envs, n_workers)
            options = {"num_workers": n_workers, "batch_size": batch_size, "overwork": True}
        if wait != "all":
            options |= {"zero_copy": False, "sync_traj": False}
        makers = [partial(_wrapped, make) for make in env_fns(env, n_envs)]
        arguments = {"env_args": [[]] * n_envs, "env_kwargs": [{}] * n_envs}
        self._envs = vector.make(makers, backend=kind, num_envs=n_envs, **arguments, **options)
        batches = random_actions(env, n_envs)[:, :batch_size].astype(np.int32)
        self._actions = cycle([np.ascontiguousarray(batch) for batch in batches])
        self._batch_size = batch_size
        self._envs.async_reset(0)
        self._envs.recv()
        self._share_of_steps = 1.0

    def get_ready(self) -> None:
        self._share_of_steps = share_of_steps(self._n_restarting, self._batch_size)

    def run(self, n_calls: int) -> int:
        send, recv = self._envs.send, self._envs.recv
        for actions in islice(self._actions, n_calls):
            send(actions)
            recv()
        return round(n_calls * self._batch_size * self._share_of_steps)

    def _n_restarting(self) -> int:
        self._envs.send(next(self._actions))
        _, _, terminated, truncated, *_ = self._envs.recv()
        return int((terminated | truncated).sum())

    def close(self) -> None:
        self._envs.close()


def _check(n_envs: int, n_workers: int) -> None:
    if n_workers > MOST_PER_CORE * count_cores():
        raise CannotTakePart(f"{n_workers} processes that wait without sleeping are too many for {count_cores()} cores")
    if n_envs % n_workers:
        raise CannotTakePart(f"it cannot split {n_envs} environments evenly over {n_workers} processes")


def _wrapped(make: Any, buf: Any = None, seed: int = 0) -> Any:
    return GymnasiumPufferEnv(env_creator=make, buf=buf, seed=seed)
