"""The managers that every bridge is tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from envmanager import SimpleEnvManager, SubprocessEnvManager

MakeManager = Callable[..., Any]


@pytest.fixture(params=["simple", "subprocess", "two workers"])
def make_manager(request: pytest.FixtureRequest) -> Iterator[MakeManager]:
    """``make_manager(factory, n_envs, …)``; the managers are closed at the end."""
    made: list[Any] = []

    def make(factory: Any, n_envs: int = 3, **options: Any) -> Any:
        if request.param == "simple":
            made.append(SimpleEnvManager(factory, n_envs, **options))
        else:
            n_workers = 2 if request.param == "two workers" else None
            made.append(SubprocessEnvManager(factory, n_envs, n_workers=n_workers, **options))
        return made[-1]

    yield make
    for manager in made:
        manager.close()
