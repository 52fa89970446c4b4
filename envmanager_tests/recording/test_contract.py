"""The manager contract, over managers that record, and over those that deliver in the order of what they record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envmanager import AsyncioEnvManager, EnvManager, SimpleEnvManager, SubprocessEnvManager
from envmanager.recording import episodes
from envmanager.testing import ManagerContract
from envmanager.testing.contract_data import LateSpecsContract
from envmanager_tests.contract.kernel_contract import CastContract, KernelContract


class RecordedContract(ManagerContract, KernelContract, LateSpecsContract, CastContract):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path) -> Any:
        self.path = str(tmp_path / "run.emrec")
        yield
        if Path(self.path).exists():
            list(episodes(self.path))


class TestSimpleThatRecords(RecordedContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SimpleEnvManager(env_factory, n_envs, record=self.path, **options)


class TestAsyncioThatRecords(RecordedContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return AsyncioEnvManager(env_factory, n_envs, record=self.path, **options)


class TestProcessesThatRecord(RecordedContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        n_workers = max(1, n_envs // 2)
        return SubprocessEnvManager(env_factory, n_envs, n_workers=n_workers, record=self.path, **options)
