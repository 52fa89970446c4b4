"""Targets: which figure of whom counts, and whether it is enough."""

from __future__ import annotations

import pytest

from benchmarks.roster import ROSTER
from benchmarks.summary import CellSummary
from benchmarks.targets import FIGURES, TARGETS, outcomes
from benchmarks.workloads import ALL
from envmanager_tests.benchmarks.turns import turn


def outcome(*turns, about):
    """The outcome of the target that is ``about`` something in the cell of these turns."""
    reached = outcomes([CellSummary.of(turns)])
    cell = (turns[0].workload, turns[0].n_envs)
    return next(o for o in reached if (o.target.workload, o.target.n_envs) == cell and o.target.about == about)


def test_the_best_of_several_of_ours_counts():
    found = outcome(
        *(turn("bare", 9), turn("gymnasium-async", 100)),
        *(turn("ours-processes", 200), turn("ours-processes-view", 300)),
        about="a worker each",
    )

    assert (found.value, found.by, found.against, found.met) == (3.0, "ours-processes-view", "gymnasium-async", True)


def test_the_fastest_of_several_peers_counts():
    turns = [turn(name, rate, workload="badworker") for name, rate in (("gymnasium-async", 10), ("sb3-subproc", 20))]
    found = outcome(
        turn("bare", 100, workload="badworker"),
        turn("ours-any", 400, workload="badworker"),
        *turns,
        about="any synchronous peer",
    )

    assert (found.value, found.against, found.met) == (20.0, "sb3-subproc", False)


def test_of_cores_and_seconds_less_is_better():
    turns = [turn("bare", 20, workload="waiting"), turn("ours-any", 160, workload="waiting", cores=0.04)]

    assert outcome(*turns, about="cores used by the trainer").met is True
    assert (
        outcome(
            *turns[:1],
            turn("ours-any", 160, workload="waiting", cores=0.06),
            about="cores used by the trainer",
        ).met
        is False
    )


def test_what_step_costs_is_the_difference_per_worker_step():
    found = outcome(
        *(turn("bare", 1), turn("ours-processes", 100_000), turn("ours-step", 50_000)),
        about="step() above send/recv, µs per worker step",
    )

    assert (found.value, found.met) == (pytest.approx(10.0), True)


def test_a_cost_below_nothing_says_nothing():
    found = outcome(
        *(turn("bare", 1), turn("ours-processes", 50_000), turn("ours-step", 100_000)),
        about="step() above send/recv, µs per worker step",
    )

    assert (found.value, found.met, found.is_lost_in_noise) == (pytest.approx(-10.0), None, True)


def test_cores_that_no_clock_has_seen_are_no_target_met():
    turns = [turn("bare", 20, workload="waiting"), turn("ours-any", 160, workload="waiting", cores=0.0)]

    assert outcome(*turns, about="cores used by the trainer").met is None


def test_what_was_not_measured_is_neither_met_nor_not():
    found = outcome(turn("bare", 9), turn("ours-simple", 100), about="in process")

    assert (found.value, found.met) == (None, None)
    assert all(each.met is None for each in outcomes([]))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.workload} {target.n_envs} {target.about}")
def test_every_target_can_be_measured_by_default(target):
    workload = ALL[target.workload]

    assert target.n_envs in workload.sizes
    assert target.figure in FIGURES
    assert set(target.ours) & set(workload.contenders)
    assert set(target.peers) <= set(workload.contenders) <= set(ROSTER)
