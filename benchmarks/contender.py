"""The contenders: each is one way to run many environments.

The constructor of a contender returns when it has received the first observations. Its loop has only what a trainer's
loop needs. Actions are drawn beforehand and are the same for all contenders.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from benchmarks.envs import make_env

N_BATCHES = 256
"""Number of batches of actions that are drawn and then repeated."""

COUNT_FOR_S = 0.5

N_ACTIONS = {"pong": 6}
"""Number of discrete actions of each environment that does not have two."""


class Contender(ABC):
    """Base class of contenders. The constructor starts ``n_envs`` environments of one workload."""

    def get_ready(self) -> None:  # noqa: B027  (most contenders need nothing)
        """Prepare for the measurement, such as by counting restarts."""

    @abstractmethod
    def run(self, n_calls: int) -> int:
        """Step ``n_calls`` times; return the number of environment steps."""

    @abstractmethod
    def close(self) -> None:
        """Stop all processes."""


class Together(Contender):
    """A vector environment of any library, whose ``step`` steps all environments. Subclasses reset it."""

    def __init__(self, envs: Any, env: str, n_envs: int) -> None:
        self._envs = envs
        self._n_envs = n_envs
        self._actions = repeated(env, n_envs)

    def run(self, n_calls: int) -> int:
        step = self._envs.step
        for actions in islice(self._actions, n_calls):
            step(actions)
        return n_calls * self._n_envs

    def close(self) -> None:
        self._envs.close()


class Bare(Contender):
    """One environment in a ``for`` loop, without any library."""

    def __init__(self, env: str, n_envs: int) -> None:
        self._env = make_env(env, n_envs - 1)  # not environment 0, which is slow in the workload badworker
        self._env.reset(seed=0)
        self._actions = cycle(random_actions(env, 1)[:, 0].tolist())

    def run(self, n_calls: int) -> int:
        step = self._env.step
        for action in islice(self._actions, n_calls):
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                self._env.reset()
        return n_calls

    def close(self) -> None:
        self._env.close()


def share_of_steps(n_restarting: Callable[[], int], n_rows: int) -> float:
    """Return the share of a library's rows that are environment steps, if restarts of episodes have rows of their own.

    ``n_restarting()`` steps once, which returns ``n_rows`` rows, and returns how many episodes ended. For each of these
    the library later returns a row that is no environment step. Counting happens before the measurement, because it
    would slow that down.
    """
    deadline, n_calls, n_restarts = time.monotonic() + COUNT_FOR_S, 0, 0
    while n_calls < N_BATCHES and (time.monotonic() < deadline or not n_calls):
        n_restarts += n_restarting()
        n_calls += 1
    return 1 - n_restarts / (n_calls * n_rows)


def env_fns(env: str, n_envs: int) -> list[Any]:
    """Return one factory per environment. Any process can unpickle it."""
    return [partial(make_env, env, env_id) for env_id in range(n_envs)]


def random_actions(env: str, n_envs: int) -> Any:
    """Return random actions, int64 ``[N_BATCHES, n_envs]``."""
    return np.random.default_rng(0).integers(0, N_ACTIONS.get(env, 2), (N_BATCHES, n_envs))


def random_pushes(n_envs: int) -> Any:
    """Return random actions of the Godot workloads, float32 ``[N_BATCHES, n_envs, 2]``."""
    return np.random.default_rng(0).uniform(-1, 1, (N_BATCHES, n_envs, 2)).astype(np.float32)


def repeated(env: str, n_envs: int) -> Any:
    """Return an endless iterator over batches of random actions, int64 ``[n_envs]`` each."""
    return cycle(list(random_actions(env, n_envs)))
