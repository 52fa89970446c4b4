"""Start methods as parameters of tests: in `make test` the first one, in `make faults` all of them.

A start method decides how a process comes to be, what it inherits and how it dies. What becomes of a value, and which
exception a policy meets, it does not decide: of the contracts, `make test-start-methods` runs a sample.

The portable transport has only "spawn", so `make test-portable` runs these tests once.
"""

from __future__ import annotations

import os

import pytest

from envmanager.options import START_METHODS

IS_PORTABLE = os.environ.get("ENVMANAGER_TRANSPORT") == "portable"
"""Whether managers of the tests use the portable transport unless a test chooses one."""
MEMORY = "memfd:envmanager (deleted)"
"""Part of the name of the shared memory under /proc."""
FIRST_START_METHOD, *_others = ("spawn",) if IS_PORTABLE else START_METHODS
MARKED_START_METHODS = [FIRST_START_METHOD, *(pytest.param(each, marks=pytest.mark.start_methods) for each in _others)]


SAMPLE_OF_STEPS = "|".join(
    (
        "test_every_step_belongs_to_its_environment_and_its_action",
        "test_send_and_recv_pair",
        "test_earlier_steps_stay_unchanged",
        "test_a_manager_without_references_is_freed",
        "test_a_reset_waits_out",
        "test_recv_gives_each_task_once_and_its_rows_name_it.None-any",
        "test_call_get_attr",
        "test_a_function_is_called_with_each_environment_where",
        "test_an_exception_in_the_factory",
        "test_close_works",
    )
)
"""Names of the tests of ManagerContract that every start method and every kind of connection runs."""
SAMPLE_OF_DEATHS = "|".join(
    (
        "test_case_02",
        "test_case_08.*GIL",
        "test_case_09_the_end",
        "test_case_1[17].*(dies|reported)",
        "test_case_14_.*noticed",
        "test_case_13.*0",
        "test_case_15.*(SEGV|traceback)",
        "test_case_16",
        "test_case_18_a_(death|response)",
        "test_case_20_a_worker_that_fails.*(killed|hangs)",
        "test_case_21_replacements_that_cannot_start.*dies",
        "test_case_24.*(go_on|reset)",
        "test_case_25.*(GIL|simulator|while_it_sends)",
        "test_case_26",
        "test_case_42.*interrupt",
    )
)
"""Names of the tests of the fault contracts about deaths, hangs, kills and replacements of processes."""
SAMPLE_OF_STARTS = "|".join(
    (
        "test_case_0[13]",
        "test_case_09_closing",
        "test_case_10",
        "test_case_15.*KILL",
        "test_case_18_a_worker_that_fails_in_reset.*dies",
        "test_case_19",
        "test_case_20_(a_worker_that_fails|no_worker_waits)",
        "test_case_25.*stopped",
        "test_case_36_(lambdas|a_factory_that_holds)",
        "test_case_42",
        "test_a_fault_in_a_call.*dies",
        "test_a_fault_during_the_first_start.*dies",
    )
)
"""Names of those about what a process inherits, gets and is asked when it starts."""
native_only = pytest.mark.skipif(IS_PORTABLE, reason="about the native transport: its helper, pipe or memory")
loses = pytest.mark.skipif(IS_PORTABLE, reason="what the portable transport cannot do, see docs/choosing-a-manager.md")
