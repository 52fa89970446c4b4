"""Base class and policy for ManagerContract's tests, and tests of arguments of ``reset`` and ``call``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from envmanager.data.steps import ActionInfo, AgentSteps, Steps
from envmanager.env_manager import EnvManager
from envmanager.environment import EnvContext
from envmanager.errors import EnvRaised
from envmanager.options import Wait
from envmanager.testing.fakes import EchoEnvironment, FakeEnvironment


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


class AskingContract(OwnManagers):
    """Tests of keyword arguments for ``reset`` and ``call``."""

    def test_seed_and_options_of_a_reset_may_be_given_by_name(self) -> None:
        with self.make_manager(Remembers, 3) as manager:
            manager.reset({"seed": 4})
            manager.reset(seed=4)
            manager.reset(seed=[7, 8, 9], options={"level": 2})
            manager.reset(options={"level": 3})

            seeds = manager.get_attr("seeds")
            assert all(first == again for first, again, *_ in seeds)
            assert len({first for first, *_ in seeds}) == 3
            assert [own[2:] for own in seeds] == [[7, None], [8, None], [9, None]]
            assert manager.get_attr("levels") == [[None, None, 2, 3]] * 3

    def test_arguments_of_a_call_may_be_given_by_name(self) -> None:
        with self.make_manager(_Talks, 3) as manager:
            manager.reset()
            assert manager.call("greet", "hello", sign="?", name="you") == [f"hello you? {i}" for i in range(3)]
            assert manager.call("greet", word="bye", env_ids=[2, 0]) == ["bye nobody. 2", "bye nobody. 0"]
            with pytest.raises(EnvRaised, match="no_such_argument"):
                manager.call("greet", "hello", no_such_argument=1)
            assert manager.call("greet", "hello", env_ids=[1]) == ["hello nobody. 1"]

    def test_env_ids_is_never_an_argument_of_the_environments_method(self) -> None:
        with self.make_manager(_Talks, 2) as manager:
            manager.reset()
            assert manager.call("gather", [5, 6], env_ids=[1]) == [[5, 6]]
            with pytest.raises(EnvRaised, match="env_ids"):  # the manager takes env_ids, so the method lacks it
                manager.call("gather", env_ids=[1])

    def test_a_function_is_called_with_each_environment_and_with_arguments_by_name(self) -> None:
        with self.make_manager(EchoEnvironment, 2) as manager:
            manager.reset()
            assert manager.call(lambda env, word, *, sign: f"{word}, {env.label}{sign}", "hello", sign="!") == [
                "hello, env 0!",
                "hello, env 1!",
            ]


class Remembers(FakeEnvironment):
    """A FakeEnvironment that records the level of each reset."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[Any] = []

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self.levels.append((options or {}).get("level"))
        return super().reset(seeds=seeds, options=options)


class _Talks(EchoEnvironment):
    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self._number = context.env_id

    def greet(self, word: str, *, sign: str = ".", name: str = "nobody") -> str:
        """Return a greeting. ``call`` has a parameter ``name`` too, which must cause no conflict."""
        return f"{word} {name}{sign} {self._number}"

    def gather(self, env_ids: list[int]) -> list[int]:
        """Return ``env_ids``. Pass them to ``call`` by position, because ``call`` has a keyword ``env_ids`` too."""
        return env_ids
