"""What takes part: one way to run many environments.

The rule: a contender that is made has handed out its first observations, and its loop contains what a trainer's would
and nothing else. Actions are drawn beforehand and are the same for all.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from envmanager.bench.envs import make_env

N_BATCHES = 256
"""So many batches of actions are drawn, and then come again."""

COUNT_FOR_S = 0.5

N_ACTIONS = {"pong": 6}
"""How many actions an environment knows, where it is not two."""


class Contender(ABC):
    """``n_envs`` environments of one workload, running."""

    def get_ready(self) -> None:  # noqa: B027  (most are)
        """Find out what has to be known before it is timed."""

    @abstractmethod
    def run(self, n_calls: int) -> int:
        """Ask for steps ``n_calls`` times; how many environment steps came back."""

    @abstractmethod
    def close(self) -> None:
        """Stop whatever runs."""


class Together(Contender):
    """``envs`` of any library that steps all of them at once by ``step``; whoever makes one resets them."""

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
        self._env = make_env(env, n_envs - 1)  # not environment 0, which in one workload is a bad one
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
    """Which share of the rows that a library hands out are steps, where an episode restarts in a row of its own.

    ``n_restarting()``: asks for ``n_rows`` rows once more, and says how many episodes ended in them. Such a row of a
    library is no step of an environment; counting them while it is timed would slow it down.
    """
    deadline, n_calls, n_restarts = time.monotonic() + COUNT_FOR_S, 0, 0
    while n_calls < N_BATCHES and (time.monotonic() < deadline or not n_calls):
        n_restarts += n_restarting()
        n_calls += 1
    return 1 - n_restarts / (n_calls * n_rows)


def env_fns(env: str, n_envs: int) -> list[Any]:
    """One callable per environment, which any process can unpickle."""
    return [partial(make_env, env, env_id) for env_id in range(n_envs)]


def random_actions(env: str, n_envs: int) -> Any:
    """Random actions, int64 ``[N_BATCHES, n_envs]``."""
    return np.random.default_rng(0).integers(0, N_ACTIONS.get(env, 2), (N_BATCHES, n_envs))


def random_pushes(n_envs: int) -> Any:
    """Random actions of the Godot workloads, float32 ``[N_BATCHES, n_envs, 2]``."""
    return np.random.default_rng(0).uniform(-1, 1, (N_BATCHES, n_envs, 2)).astype(np.float32)


def repeated(env: str, n_envs: int) -> Any:
    """An endless iterator over batches of random actions, int64 ``[n_envs]`` each."""
    return cycle(list(random_actions(env, n_envs)))
