"""What every manager promises, promised by a RayEnvManager too, on a cluster of three nodes.

The exceptions are named, each with its reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from envmanager import EnvManager
from envmanager.testing import FaultContract, ManagerContract
from envmanager.testing.contract_data import LateSpecsContract
from envmanager_tests.contract.kernel_contract import CastContract, KernelContract
from envmanager_tests.faults.kernel_faults import KernelFaults
from envmanager_tests.faults.process_faults import ProcessFaults

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

NOT_FOR_ACTORS = {
    "test_case_09_the_end_of_the_output": "what an actor prints is in Ray's log on its node",
    "test_case_15_a_segmentation_fault_brings": "Python's report of a crash is there too",
}
"""Tests of the contracts that cannot apply, by the beginning of their names."""


class _OfActors:
    @pytest.fixture(autouse=True)
    def _applies(self, request: pytest.FixtureRequest) -> None:
        for beginning, reason in NOT_FOR_ACTORS.items():
            if request.node.name.startswith(beginning):
                pytest.skip(reason)

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        from envmanager.ray_cluster.manager import RayEnvManager

        options.pop("zero_copy", None)  # no memory is shared between machines
        return RayEnvManager(env_factory, n_envs, **options)


class TestActors(_OfActors, ManagerContract, KernelContract, LateSpecsContract, CastContract):
    """An actor for each environment."""


class TestOneActor(_OfActors, ManagerContract, KernelContract, LateSpecsContract, CastContract):
    """One for all."""

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return super().make_manager(env_factory, n_envs, n_workers=1, placement="spread", **options)


class TestActorsUnderFaults(_OfActors, KernelFaults, ProcessFaults, FaultContract):
    exits_are_known = False  # Ray knows that a process has gone, and seldom how
    start_s = 25.0  # on a busy machine Ray takes ten seconds to start an actor's process
    large_observation_bytes = 16 << 20
    """What the object stores of the tests' cluster have room for."""

    @pytest.fixture(autouse=True)
    def _leaves_nothing_behind(self) -> None:
        """Ray's own processes and connections come and go; that no actor is left is looked at by the leak guard."""
