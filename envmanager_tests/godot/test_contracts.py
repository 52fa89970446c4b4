"""What every manager promises, promised by a GodotEnvManager too, with the fake engine in the place of Godot.

The exceptions are named, each with its reason; all of them follow from engines that are no Python.
"""

from __future__ import annotations

from typing import Any

import pytest

from envmanager import EnvManager
from envmanager.testing import FaultContract, ManagerContract
from envmanager_tests.contract.kernel_contract import KernelContract
from envmanager_tests.faults.kernel_faults import KernelFaults
from envmanager_tests.faults.process_faults import ProcessFaults
from envmanager_tests.godot.fake_engine_manager import FakeEngineManager
from envmanager_tests.start_methods import SAMPLE_OF_DEATHS, SAMPLE_OF_STEPS

_OBJECTS = "an engine says what JSON and arrays can say: no objects of Python"
_LIMITS = "an array of an engine has a limit, and a frame too"
NOT_FOR_ENGINES = {
    "test_spaces_that_are_empty_work": "a behavior of an engine has an observation and an action",
    "test_a_function_is_called_with_each_environment": "a function cannot travel into an engine",
    "test_a_factory_without_a_return_is_named": "an engine has no factory",
    "test_send_takes_some_environments_and_leaves": "the arenas of an engine move together",
    "test_case_06": "an engine says what it raised in words, so there is nothing that could fail to travel",
    "test_case_15_a_segmentation_fault_brings": "Python's report of a crash; an engine's is in its output",
    "test_case_16_a_worker_killed_while_it_sends": _LIMITS,
    "test_case_20_a_new_generation_has_seeds": _OBJECTS,
    "test_case_23_a_new_generation_has_slot": _OBJECTS,
    "test_case_25_a_worker_stopped_while_it_sends": _LIMITS,
    "test_case_32": _OBJECTS,
    "test_case_34": _LIMITS,
    "test_case_36_a_factory": "an engine has no factory",
}
"""Tests of the contracts that cannot apply, by the beginning of their names."""
OF_THE_KERNEL = (
    "bad_actions_are_refused",
    "a_contradictory_reset",
    "a_sequence_of_another_length",
    "a_value_that_is_no_sequence.*(2|0.5|True)-?",
    "calls_before_reset",
    "step_without_a_policy",
    "recv_with_nothing",
    "step_and_send_do_not_mix",
    "an_environment_instead",
    "errors_are_all",
    "stats_count",
    "max_ready",
    "a_second_send",
    "a_policy",
    "a_refused_call",
    "before_the_first_action",
    "previous_is",
    "the_policys_outputs",
)
"""Tests whose calls end in the trainer's process, before anything is sent, or after it was received."""


def _skip_what_cannot_apply(request: pytest.FixtureRequest) -> None:
    for beginning, reason in NOT_FOR_ENGINES.items():
        if request.node.originalname.startswith(beginning):
            pytest.skip(reason)


class _OfEngines:
    exceptions_travel = takes_actions = False

    @pytest.fixture(autouse=True)
    def _applies(self, request: pytest.FixtureRequest) -> None:
        _skip_what_cannot_apply(request)

    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        options.pop("zero_copy", None)  # each answer of an engine has arrays of its own
        return FakeEngineManager(env_factory, n_envs, **options)


@pytest.mark.sample(f"^test_(?!{'|'.join(OF_THE_KERNEL)})", everywhere=True)
class TestSeveralArenasPerEngine(_OfEngines, ManagerContract, KernelContract):
    def make_manager(self, env_factory: Any, n_envs: int, **options: Any) -> EnvManager:
        return super().make_manager(env_factory, n_envs, n_workers=max(1, n_envs // 2), **options)


@pytest.mark.start_methods
@pytest.mark.sample(SAMPLE_OF_STEPS)
class TestAnEnginePerEnvironment(_OfEngines, ManagerContract, KernelContract):
    pass


@pytest.mark.start_methods
@pytest.mark.sample(SAMPLE_OF_DEATHS + "|test_case_05|test_case_30_.*obs: rows")
class TestEnginesUnderFaults(_OfEngines, KernelFaults, ProcessFaults, FaultContract):
    has_processes = True
