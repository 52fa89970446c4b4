"""Environments for the tests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from envmanager import AgentSteps, ArraySpec, BehaviorSpec, EnvContext
from envmanager.environment import Environment


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


class Duel(Environment):
    """One hero and two targets, who are two behaviors: a hero wants to do as the first target does, targets do not.

    All observe how many steps there were since the start, which never falls, and how many in this episode. So a
    transition from one to the next but one, or of another environment, shows.
    """

    SEEN = ArraySpec((2,), np.float32)
    SPECS = {
        "hero": BehaviorSpec(SEEN, ArraySpec((), np.int64, 0, 2)),
        "target": BehaviorSpec(SEEN, ArraySpec((), np.int64, 0, 2)),
    }
    AGENTS = {"hero": np.array([0]), "target": np.array([1, 2])}

    def __init__(self, context: EnvContext, sleep_s: float = 0.0) -> None:
        self._length = 5 + context.env_id
        self._sleep_s = sleep_s * context.env_id
        self._n_steps = self._in_episode = 0

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        return self.SPECS

    @property
    def max_agents(self) -> Mapping[str, int]:
        return {behavior: len(agents) for behavior, agents in self.AGENTS.items()}

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> dict[str, AgentSteps]:
        self._in_episode = 0
        return self._steps({}, ended=False)

    def step(self, actions: Mapping[str, Any]) -> dict[str, AgentSteps]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._n_steps += 1
        self._in_episode += 1
        same = float(actions["hero"][0] == actions["target"][0])
        ended = self._in_episode == self._length
        return self._steps({"hero": same, "target": -same}, ended=ended)

    def close(self) -> None:
        pass

    def _steps(self, rewards: Mapping[str, float], *, ended: bool) -> dict[str, AgentSteps]:
        last = np.array([self._n_steps, self._in_episode], np.float32)
        if ended:
            self._in_episode = 0
        now = np.array([self._n_steps, self._in_episode], np.float32)
        return {
            behavior: AgentSteps(
                agents,
                np.tile(now, (len(agents), 1)),
                np.full(len(agents), rewards.get(behavior, 0.0), np.float32),
                np.zeros(len(agents), np.bool_),
                np.full(len(agents), ended),
                np.tile(last, (len(agents), 1)) if ended else None,
            )
            for behavior, agents in self.AGENTS.items()
        }
