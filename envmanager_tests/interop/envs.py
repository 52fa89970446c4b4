"""Gymnasium environments for the tests of the bridges."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

GO_ON, END, TRUNCATE, RAISE, DIE = range(5)


class Obedient(gymnasium.Env):
    """Does what its action says, as above. Observes env_id, generation, episode and the count of steps."""

    observation_space = spaces.Box(-1, 99, (4,), np.float32)
    action_space = spaces.Discrete(5)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}
    render_mode = "rgb_array"

    def __init__(self, context: Any) -> None:
        self.env_id, self.generation, self.episode = context.env_id, context.generation, -1
        self.options: Any = None
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.count, self.options = self.episode + 1, 0, options
        return self._obs(), {"episode_number": self.episode}

    def step(self, action: Any) -> Any:
        self.count += 1
        if action == DIE:
            os._exit(3)
        if action == RAISE:
            raise ArithmeticError("as told")
        return self._obs(), 0.5, action == END, action == TRUNCATE, {"count": self.count}

    def render(self) -> Any:
        return np.full((2, 3, 3), self.count, np.uint8)

    def add(self, number: int, times: int = 1) -> int:
        return self.env_id + number * times

    def not_a_function(self) -> Any:
        return self.count()

    def _obs(self) -> Any:
        return np.array([self.env_id, self.generation, self.episode, self.count], np.float32)


class Talker(gymnasium.Env):
    """Dict observations with a text, box actions, random episodes, and infos of every kind, some only now and then."""

    observation_space = spaces.Dict(
        {"place": spaces.Box(-100, 100, (2,), np.float64), "kind": spaces.Discrete(5), "text": spaces.Text(9)}
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        return self._obs(), {"begins": True, "options": options}

    def step(self, action: Any) -> Any:
        self.place = self.place + action
        dice = float(self.np_random.random())
        info = {"dice": dice, "place": self.place, "nested": {"norm": 1.5, "name": f"{dice:.1f}"}, "whole": 3}
        if dice < 0.5:
            info["small"] = "yes"
        return self._obs(), round(dice * 8) / 4, dice < 0.15, dice > 0.9, info

    def _obs(self) -> Any:
        return {"place": self.place, "kind": np.int64(self.np_random.integers(5)), "text": f"{self.place[0]:.2f}"}


class Tupled(gymnasium.Env):
    """Observations and actions are tuples of a small Discrete, a MultiDiscrete and a MultiBinary; episodes of three."""

    action_space = observation_space = spaces.Tuple(
        [spaces.Discrete(4, start=-1, dtype=np.int8), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(2)]
    )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return (np.int8(-1), np.array([0, 0]), np.array([0, 1], np.int8)), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        self.count += 1
        return action, float(action[0]), False, self.count == 3, {}


class Arm(gymnasium.Env):
    """Images within a Dict and box actions, without objects, for libraries that know no texts."""

    observation_space = spaces.Dict({"camera": spaces.Box(0, 255, (4, 4, 1), np.uint8), "kind": spaces.Discrete(5)})
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._obs(), {"options": options}

    def step(self, action: Any) -> Any:
        dice = float(self.np_random.random())
        return self._obs(), float(np.float32(dice)), dice < 0.15, dice > 0.8, {"dice": dice}

    def _obs(self) -> Any:
        image = self.np_random.integers(0, 256, (4, 4, 1), dtype=np.uint8)
        return {"camera": image, "kind": np.int64(self.np_random.integers(5))}


def cart_pole() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=15)


def frozen_lake() -> Any:
    return gymnasium.make("FrozenLake-v1")  # its observations are Python ints
