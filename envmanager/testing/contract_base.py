"""Base class and policy for the tests of ManagerContract and FaultContract."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.env_manager import EnvManager
from envmanager.options import Wait


class NumberedActions:
    """A policy that returns the actions 1, 2, 3, …, each once. ``given`` maps agent ids to their last actions."""

    def __init__(self) -> None:
        self._next = 1
        self.given: dict[int, int] = {}

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return the next numbers as actions, one per row, and store them in ``given``."""
        action = np.arange(self._next, self._next + len(steps), dtype=np.int64)
        self._next += len(steps)
        self.given.update(zip(steps.agent_id.tolist(), action.tolist(), strict=True))
        return ActionInfo(action, {"twice": action * 2}, version=3)


class OwnManagers:
    """Base class of ManagerContract's test classes, with an abstract ``make_manager`` and two context managers."""

    @abstractmethod
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        """Return a new manager to test. ``options`` are fields of ManagerOptions, such as ``wait`` and ``seed``."""

    @contextmanager
    def stepping(self, env_factory: Any, n_envs: int, policy: Any = None, **options: Any) -> Iterator[EnvManager]:
        """Yield a new manager that was reset and uses ``policy`` (default: NumberedActions). Close it afterwards."""
        with self.make_manager(env_factory, n_envs, **options) as manager:
            manager.set_policy("default", NumberedActions() if policy is None else policy)
            manager.reset()
            yield manager

    @contextmanager
    def receiving(self, env_factory: Any, n_envs: int, **options: Any) -> Iterator[EnvManager]:
        """Yield a new manager that is ready for ``send``, with all first observations received. Close it afterwards."""
        with self.make_manager(env_factory, n_envs, **options) as manager:
            manager.reset()
            manager.recv(Wait.all())
            yield manager
