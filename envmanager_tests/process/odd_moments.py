"""Trainers that ``test_odd_moments`` runs as programs of their own, because they change what their process may do."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from envmanager import ActionInfo, AgentSteps, EnvManager, SimpleEnvManager, SubprocessEnvManager, Wait
from envmanager_tests.faults.scripts import announce

N_BYTES = 96 * 2**20
ROOM_BYTES = 48 * 2**20
"""Enough for all but the copy of an observation."""


class Counts(gymnasium.Env):  # type: ignore[misc]
    """The first numbers of a large observation are how many steps there were, and the last action."""

    action_space = gymnasium.spaces.Discrete(200)

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (N_BYTES,), np.uint8)
        self._obs = np.zeros(N_BYTES, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        self._obs[0] += 1
        self._obs[1] = action
        return self._obs, float(action), False, False, {}


class Trainer:
    """Acts with 101, 102, … and shows what comes."""

    def __init__(self, manager: EnvManager, use: str) -> None:
        self._manager = manager
        self._use = use
        self._action = 100
        manager.set_policy("default", self)
        manager.reset()
        if use == "recv":
            manager.recv()

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(self._next_actions())

    def _next_actions(self) -> np.ndarray:
        self._action += 1
        return np.array([self._action])

    def act(self) -> None:
        if self._use == "recv":
            self._manager.send(self._next_actions(), [0])

    def receive(self) -> tuple[int, bool]:
        """How many steps the environment has taken, and whether the action that it shows is the last."""
        if self._use == "recv":
            obs = self._manager.recv(Wait.all()).obs
        else:
            (info,) = self._manager.step(Wait.all())
            obs = info.current["default"].obs
        return int(obs[0, 0]), int(obs[0, 1]) == self._action


def step_without_memory(kind: str, use: str) -> None:
    make = SimpleEnvManager if kind == "simple" else SubprocessEnvManager
    with make(Counts, 1) as manager:
        trainer = Trainer(manager, use)
        trainer.act()
        trainer.receive()
        trainer.act()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, limits[1]))
        try:
            trainer.receive()
        except MemoryError as error:
            announce("refused", type(error).__name__)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        announce("delivered", *trainer.receive())
        trainer.act()
        announce("continued", *trainer.receive())
