"""The manager contract, over every manager and start method.

What becomes of values is tried in this process and over one wire, in which several environments share memory. Over the
portable transport `make test` tries a sample, and `make test-portable` all of TestSeveralEnvsPerWorker.
"""

from __future__ import annotations

from typing import Any

import pytest

from envmanager import AsyncioEnvManager, EnvManager, SimpleEnvManager, SubprocessEnvManager
from envmanager.testing import ManagerContract
from envmanager.testing.contract_data import LateSpecsContract
from envmanager_tests.awaiting import awaiting
from envmanager_tests.contract.kernel_contract import CallContract, CastContract, KernelContract
from envmanager_tests.start_methods import FIRST_START_METHOD, MARKED_START_METHODS, SAMPLE_OF_STEPS


class TestSimpleEnvManager(ManagerContract, KernelContract, LateSpecsContract, CastContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SimpleEnvManager(env_factory, n_envs, **options)


class TestAsyncioEnvManager(ManagerContract, CallContract, LateSpecsContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return AsyncioEnvManager(env_factory, n_envs, **options)


class TestCoroutines(ManagerContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return AsyncioEnvManager(awaiting(env_factory, n_envs), n_envs, **options)


@pytest.mark.parametrize("start_method", [FIRST_START_METHOD], scope="class")
class TestOneEnvPerWorker(ManagerContract, CallContract, LateSpecsContract):
    @pytest.fixture(autouse=True)
    def _method(self, start_method: str) -> None:
        self.start_method = start_method

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SubprocessEnvManager(env_factory, n_envs, start_method=self.start_method, **options)


@pytest.mark.parametrize("start_method", MARKED_START_METHODS, scope="class")
@pytest.mark.sample(SAMPLE_OF_STEPS)
class TestSeveralEnvsPerWorker(ManagerContract, KernelContract, LateSpecsContract, CastContract):
    @pytest.fixture(autouse=True)
    def _method(self, start_method: str) -> None:
        self.start_method = start_method

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        n_workers = max(1, n_envs // 2)
        return SubprocessEnvManager(env_factory, n_envs, n_workers=n_workers, start_method=self.start_method, **options)


class TestShareOfTheTrainer(ManagerContract, CallContract, LateSpecsContract):
    """The last environment in this process, the others in workers; a single one has nobody to share with."""

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SubprocessEnvManager(env_factory, n_envs, local_envs=min(1, n_envs - 1), **options)


@pytest.mark.sample(SAMPLE_OF_STEPS, everywhere=True)
class TestPortableTransport(ManagerContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SubprocessEnvManager(env_factory, n_envs, n_workers=max(1, n_envs // 2), transport="portable", **options)
