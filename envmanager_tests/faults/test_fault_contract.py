"""The fault contract, over every manager and start method.

What an environment returns takes the same way whatever started its process, so the cases about data run with one start
method only. Large observations take a way of their own only where they travel.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from envmanager import AsyncioEnvManager, EnvManager, SimpleEnvManager, SubprocessEnvManager
from envmanager.options import StartMethod, Timeouts, Transport
from envmanager.testing import FaultContract
from envmanager.testing.fakes import Sleep
from envmanager.testing.fault_checks import returns_within, unless_windows
from envmanager.testing.fault_contract import CodeFaults, UsageFaults
from envmanager.testing.fault_contract_restarts import RestartsAfterFaults, TasksUnderFaults
from envmanager.testing.faults import SendSignal, faulty
from envmanager_tests.awaiting import awaiting
from envmanager_tests.faults.kernel_faults import KernelFaults
from envmanager_tests.faults.process_faults import ProcessFaults
from envmanager_tests.start_methods import FIRST_START_METHOD, IS_PORTABLE, SAMPLE_OF_DEATHS, SAMPLE_OF_STARTS


class TestSimpleEnvManager(KernelFaults, ProcessFaults, FaultContract):
    has_processes = False
    large_observation_bytes = 1 << 20

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return SimpleEnvManager(env_factory, n_envs, **options)


class OneEnvEach:
    """Each environment is a worker, but none is a process."""

    has_processes = False

    def worker_of(self, env_id: int) -> int:
        return env_id

    def others_than(self, env_id: int, n_envs: int = 3) -> list[int]:
        return [worker_id for worker_id in range(n_envs) if worker_id != env_id]

    @unless_windows(reason="on Windows os.kill with SIGINT ends the process")
    def test_case_42_an_interrupt_during_start_stops_everything(self) -> None:
        """A factory that sleeps is abandoned: a thread cannot be stopped."""
        interrupt = [SendSignal(os.getpid()), Sleep(2)]
        with pytest.raises(KeyboardInterrupt), returns_within(1):
            self.make_manager(faulty(interrupt, at="start", only_env=1), 2, timeouts=Timeouts(close_s=1))


class TestAsyncioEnvManager(OneEnvEach, KernelFaults, ProcessFaults, FaultContract):
    """These environments run in a thread each."""

    large_observation_bytes = 1 << 20

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return AsyncioEnvManager(env_factory, n_envs, **options)


class TestCoroutines(OneEnvEach, CodeFaults, RestartsAfterFaults, TasksUnderFaults, UsageFaults):
    @pytest.fixture(autouse=True)
    def _without_servers(self, request: pytest.FixtureRequest) -> None:
        params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        if params.get("type_name") in ("BrokenPipeError", "ConnectionResetError"):
            pytest.skip("a coroutine that raises it has lost its server, as test_servers tries")

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return AsyncioEnvManager(awaiting(env_factory, n_envs), n_envs, **options)


class InProcesses:
    start_method: StartMethod
    transport: Transport | None = None
    large_observation_bytes = 32 << 20

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        own = {"start_method": self.start_method, "transport": self.transport}
        return SubprocessEnvManager(env_factory, n_envs, **own, **options)


@pytest.mark.sample(r"^(?!test_case_21_a_crash_loop_ends_if_each_task_fails\[raises)", everywhere=True)
class TestForkserver(InProcesses, KernelFaults, ProcessFaults, FaultContract):
    start_method = FIRST_START_METHOD
    start_s = 20.0 if IS_PORTABLE else 12.0  # each worker imports all it needs by itself


@pytest.mark.start_methods
@pytest.mark.sample(SAMPLE_OF_STARTS + "|" + SAMPLE_OF_DEATHS)
class TestSpawn(InProcesses, CodeFaults, ProcessFaults, RestartsAfterFaults, UsageFaults, KernelFaults):
    start_method = "spawn"
    start_s = 20.0  # each worker imports all it needs by itself


@pytest.mark.start_methods
@pytest.mark.sample(SAMPLE_OF_DEATHS)
class TestPortable(InProcesses, ProcessFaults):
    """Deaths and hangs over the portable transport; `make test-portable` runs the whole contract over it."""

    start_method = "spawn"
    transport = "portable"
    start_s = 20.0
