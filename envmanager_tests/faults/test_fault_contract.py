"""The fault contract, over every manager and start method.

What an environment returns takes the same way whatever started its process, so the cases about data run with one start
method only.
"""

from __future__ import annotations

from typing import Any

import pytest

from envmanager import EnvManager, SimpleEnvManager, SubprocessEnvManager
from envmanager.options import StartMethod, Transport
from envmanager.testing import FaultContract
from envmanager.testing.fault_contract import CodeFaults, UsageFaults
from envmanager.testing.fault_contract_restarts import RestartsAfterFaults
from envmanager_tests.faults.kernel_faults import KernelFaults
from envmanager_tests.faults.process_faults import ProcessFaults
from envmanager_tests.start_methods import FIRST_START_METHOD, IS_PORTABLE


class TestSimpleEnvManager(KernelFaults, ProcessFaults, FaultContract):
    has_processes = False

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SimpleEnvManager(env_factory, n_envs, **options)


class InProcesses:
    start_method: StartMethod
    transport: Transport | None = None

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        own = {"start_method": self.start_method, "transport": self.transport}
        return SubprocessEnvManager(env_factory, n_envs, **own, **options)


class TestForkserver(InProcesses, KernelFaults, ProcessFaults, FaultContract):
    start_method = FIRST_START_METHOD
    start_s = 20.0 if IS_PORTABLE else 12.0  # each worker imports all it needs by itself


@pytest.mark.start_methods
class TestSpawn(InProcesses, CodeFaults, ProcessFaults, RestartsAfterFaults, UsageFaults, KernelFaults):
    start_method = "spawn"
    start_s = 20.0  # each worker imports all it needs by itself


@pytest.mark.start_methods
class TestPortable(InProcesses, ProcessFaults):
    """Deaths and hangs over the portable transport; `make test-portable` runs the whole contract over it."""

    start_method = "spawn"
    transport = "portable"
    start_s = 20.0
