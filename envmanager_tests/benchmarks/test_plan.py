"""What ``python -m benchmarks`` is going to measure, from what was said."""

from __future__ import annotations

import sys

import pytest

from benchmarks import plan as plan_module
from benchmarks.plan import plan_bench
from benchmarks.roster import FAMILIES, ROSTER, family_of
from benchmarks.workloads import ALL
from envmanager.errors import MissingExtra, UsageError
from envmanager_tests.other_systems import SYSTEMS, run_on


def contenders_of(**words):
    (cell,) = plan_bench(workloads=["noop"], n_envs=[8], **words).cells
    return cell.contenders


def test_every_workload_has_its_own_sizes_and_contenders():
    plan = plan_bench(workloads=["noop", "straggler"])

    cells = [(cell.workload, cell.n_envs) for cell in plan.cells]
    assert cells == [("noop", 8), ("noop", 64), ("straggler", 8), ("straggler", 32)]
    assert plan.cells[0].contenders == ("bare", *(name for name in ALL["noop"].contenders if family_of(name) == "ours"))
    assert plan.pace.rounds == 5


@pytest.mark.parametrize("words", [{}, {"quick": True}])
def test_no_library_takes_part_that_was_not_asked_for(words):
    families = {family_of(name) for cell in plan_bench(**words).cells for name in cell.contenders}

    assert families == {"bare", "ours"}
    asked = plan_bench(workloads=["noop"], pythons=[f"sb3={sys.executable}"]).cells[0].contenders
    assert {family_of(name) for name in asked} == {"bare", "ours", "sb3"}


def test_names_may_be_separated_by_commas():
    plan = plan_bench(workloads=["noop,straggler", "badworker"], n_envs=[4])

    assert [(cell.workload, cell.n_envs) for cell in plan.cells] == [("noop", 4), ("straggler", 4), ("badworker", 4)]


def test_a_family_brings_those_that_suit_the_workload():
    assert contenders_of(contenders=["gymnasium"]) == ("bare", "gymnasium-sync", "gymnasium-async")


def test_a_contender_named_in_full_takes_part_in_any_workload():
    assert contenders_of(contenders=["ours-spawn,gymnasium-sync"]) == ("bare", "ours-spawn", "gymnasium-sync")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"workloads": ["nop"]}, "did you mean 'noop'"),
        ({"workloads": ["noop"], "contenders": ["tianshu"]}, "did you mean 'tianshou'"),
        ({"workloads": ["noop"], "contenders": ["mlagents"]}, "Unity builds"),
        ({"workloads": ["noop"], "contenders": ["envpool"]}, "No contender takes part"),
        ({"pythons": ["gymnasium"]}, "PEER=/path/to/python"),
        ({"pythons": ["ours=/bin/sh"]}, "PEER=/path/to/python"),
        ({"pythons": ["gymnasium=/no/such/python"]}, "cannot be run"),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(words, message):
    with pytest.raises(UsageError, match=message):
        plan_bench(**words)


def test_an_interpreter_is_given_per_peer():
    assert plan_bench(pythons=[f"gymnasium={sys.executable}"]).pythons == {"gymnasium": sys.executable}


def test_a_workload_whose_library_is_missing_is_skipped_and_said(mocker):
    mocker.patch.object(plan_module, "find_spec", lambda name: None if name == "ale_py" else object())

    plan = plan_bench(workloads=["pong", "noop"])

    assert {cell.workload for cell in plan.cells} == {"noop"}
    assert "pip install 'envmanager[bench]'" in plan.left_out[0].reason
    with pytest.raises(UsageError, match=r"pong needs ale_py.*pip install 'envmanager\[bench\]'"):
        plan_bench(workloads=["pong"])


@pytest.mark.parametrize(("library", "words"), [("gymnasium", {}), ("matplotlib", {"plot": "somewhere"})])
def test_what_the_command_itself_needs_is_said(mocker, library, words):
    mocker.patch.object(plan_module, "find_spec", lambda name: None if name == library else object())

    with pytest.raises(MissingExtra, match=rf"{library}.*pip install 'envmanager\[bench\]'"):
        plan_bench(**words)


@pytest.mark.parametrize("system", SYSTEMS)
def test_on_another_system_it_is_said_that_the_command_needs_linux(system):
    script = """
import benchmarks.command
from benchmarks.plan import plan_bench
try:
    plan_bench()
except Exception as error:
    print(error)
"""
    assert "needs Linux" in run_on(system, script, preloaded=["rich", "typer", "yaml"])


def test_a_folder_for_plots_is_made_before_anything_is_measured(tmp_path):
    plan_bench(quick=True, plot=tmp_path / "a" / "b")
    (tmp_path / "file").touch()

    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(UsageError, match="cannot be made"):
        plan_bench(quick=True, plot=tmp_path / "file")


def test_quick_is_one_round_of_one_workload():
    plan = plan_bench(quick=True)

    assert [(cell.workload, cell.n_envs) for cell in plan.cells] == [("noop", 8)]
    assert plan.pace.rounds == 1
    assert plan_bench(quick=True, rounds=3).pace.rounds == 3


def test_the_tables_fit_together():
    assert {family_of(name) for name in ROSTER} == set(FAMILIES)
    assert all(set(workload.contenders) <= set(ROSTER) for workload in ALL.values())
