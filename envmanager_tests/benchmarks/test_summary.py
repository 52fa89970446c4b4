"""From turns to figures: ratios within a round, medians over the rounds."""

from __future__ import annotations

import pytest

from benchmarks.protocol import Measured
from benchmarks.schedule import Turn
from benchmarks.summary import CellSummary
from envmanager_tests.benchmarks.turns import turn


def test_ratios_are_taken_within_a_round():
    """The machine is ten times as slow in the second round, and nobody's ratio changes."""
    turns = [turn("bare", 100), turn("ours-simple", 400), turn("gymnasium-sync", 200)]
    turns += [turn("bare", 10, round=1), turn("ours-simple", 40, round=1), turn("gymnasium-sync", 20, round=1)]

    summary = CellSummary.of(turns)

    assert summary.line("ours-simple").to_bare == 4
    assert summary.ratio("ours-simple", "gymnasium-sync") == 2


def test_the_bare_environment_of_a_round_is_the_mean_of_its_runs():
    summary = CellSummary.of([turn("bare", 100), turn("ours-simple", 300), turn("bare", 200)])

    assert summary.line("ours-simple").to_bare == 2
    assert summary.bare_rate == 150


def test_over_rounds_goes_the_median():
    turns = [turn("bare", 100, round=number) for number in range(3)]
    turns += [turn("ours-simple", rate, round=number) for number, rate in enumerate((100, 900, 200))]

    assert CellSummary.of(turns).line("ours-simple").to_bare == 2
    assert CellSummary.of(turns).line("ours-simple").rate == 200


def test_a_ratio_uses_only_rounds_in_which_both_ran():
    turns = [turn("bare", 1), turn("ours-simple", 10), turn("gymnasium-sync", 5)]
    turns += [turn("bare", 1, round=1), turn("ours-simple", 1000, round=1)]

    assert CellSummary.of(turns).ratio("ours-simple", "gymnasium-sync") == 2
    assert CellSummary.of(turns).ratio("ours-simple", "sb3-dummy") is None


def test_sleeping_environments_are_measured_by_what_sleep_allows():
    turns = [turn("bare", 100, workload="straggler"), turn("ours-any", 760, workload="straggler")]

    assert CellSummary.of(turns).line("ours-any").to_limit == pytest.approx(0.95)


def test_a_bad_environment_counts_with_its_own_step_time():
    turns = [turn("bare", 100, workload="badworker"), turn("ours-any", 720, workload="badworker")]

    assert CellSummary.of(turns).line("ours-any").to_limit == pytest.approx(1.0)  # 7 * 100 and 20


def test_computing_environments_have_no_limit():
    assert CellSummary.of([turn("bare", 100), turn("ours-simple", 50)]).line("ours-simple").to_limit is None


def test_the_best_of_ours_is_the_fastest_of_ours():
    turns = [turn("bare", 1), turn("ours-simple", 3), turn("ours-any", 4), turn("gymnasium-sync", 9)]

    assert CellSummary.of(turns).best_of_ours == "ours-any"
    assert CellSummary.of(turns[:1]).best_of_ours is None


def test_a_workload_without_steps_has_its_start_times():
    turns = [
        Turn("start", 8, 0, name, Measured(0, 0.0, 0.0, 0.0, start_s))
        for name, start_s in (("bare", 0), ("ours-spawn", 2))
    ]

    assert CellSummary.of(turns).line("ours-spawn").start_s == 2


def test_cores_are_cpu_time_through_wall_time():
    turns = [turn("bare", 1), Turn("noop", 8, 0, "ours-any", Measured(10, 2.0, 0.5, 1.5, 0.0))]

    assert CellSummary.of(turns).line("ours-any").cores == 0.25
    assert CellSummary.of(turns).line("ours-any").all_cores == 0.75
