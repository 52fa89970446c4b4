"""Gymnasium environments for the tests."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

from envmanager import EnvContext


class EchoGym(gymnasium.Env):  # type: ignore[misc]
    """As EchoEnvironment, but a Gymnasium env, so that it takes the way by which rows are written in place."""

    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (5,), np.int64)
    action_space = gymnasium.spaces.Box(0, 2**62, (), np.int64)

    def __init__(self, context: EnvContext, sleep_s: float = 0.0) -> None:
        self._env_id = context.env_id
        self._sleep_s = sleep_s
        self._episode = -1
        self._n_steps = self._in_episode = 0
        self._obs = np.zeros(5, np.int64)  # the same array each time: whoever keeps it sees it change

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._episode += 1
        self._in_episode = 0
        self._obs[2], self._obs[4] = self._n_steps, self._episode
        self._obs[0] = self._env_id
        return self._obs, {"env_id": self._env_id, "episode": self._episode}

    def step(self, action: Any) -> Any:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._n_steps += 1
        self._in_episode += 1
        self._obs[:] = self._env_id, 0, self._n_steps, action, self._episode
        ended = self._in_episode == 7 + self._env_id
        return self._obs, float(action % 1000), ended, False, {"env_id": self._env_id, "action": int(action)}


class CountsSteps(gymnasium.Env):  # type: ignore[misc]
    """Observes how many steps it has taken; the reward is the action."""

    observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.int64)
    action_space = gymnasium.spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._n_steps = 0
        return np.zeros(2, np.int64), {}

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        return np.full(2, self._n_steps), float(action), False, False, {}
