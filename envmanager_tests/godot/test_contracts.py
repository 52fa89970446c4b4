"""What every manager promises, promised by a GodotEnvManager too, with the fake engine in the place of Godot.

The exceptions are named, each with its reason; all of them follow from engines that are no Python.
"""

from __future__ import annotations

from typing import Any

import pytest

from envmanager import EnvManager
from envmanager.testing import FaultContract, ManagerContract
from envmanager.testing.fake_engine_manager import FakeEngineManager

NOT_FOR_ENGINES: dict[str, str] = {}
"""Tests of the contracts that cannot apply, by the beginning of their names."""


def _skip_what_cannot_apply(request: pytest.FixtureRequest) -> None:
    for beginning, reason in NOT_FOR_ENGINES.items():
        if request.node.originalname.startswith(beginning):
            pytest.skip(reason)


class _OfEngines:
    @pytest.fixture(autouse=True)
    def _applies(self, request: pytest.FixtureRequest) -> None:
        _skip_what_cannot_apply(request)

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        options.pop("zero_copy", None)  # each answer of an engine has arrays of its own
        return FakeEngineManager(env_factory, n_envs, **options)


class TestEngines(_OfEngines, ManagerContract):
    """An engine for each environment."""


class TestSeveralArenasPerEngine(_OfEngines, ManagerContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return super().make_manager(env_factory, n_envs, n_workers=max(1, n_envs // 2), **options)


class TestEnginesUnderFaults(_OfEngines, FaultContract):
    has_processes = True
