"""Rounds: their order, and who is in them."""

from __future__ import annotations

import random

import pytest

from benchmarks.launcher import NotMeasured
from benchmarks.protocol import Measured
from benchmarks.schedule import Cell, Pace, Results, order_of_round, run_cell

CELL = Cell("noop", 8, ("bare", "ours-simple", "gymnasium-sync", "tianshou-dummy"))
MEASURED = Measured(10, 1.0, 0.5, 0.75, 0.1)


def run_all(run, *, rounds=2, cell=CELL):
    results = Results()
    came = list(run_cell(cell, Pace(rounds=rounds), results, run=run, chance=random.Random(0)))
    return results, came


def test_the_bare_environment_is_first_and_last_and_the_others_are_shuffled():
    chance = random.Random(0)
    orders = [order_of_round(CELL.contenders, chance) for _ in range(20)]

    assert all(order[0] == order[-1] == "bare" and len(order) == 5 for order in orders)
    assert len({tuple(order) for order in orders}) == 6


def test_every_round_has_everyone():
    results, came = run_all(lambda job: MEASURED)

    assert came == results.turns
    assert [turn.round for turn in came] == [0] * 5 + [1] * 5
    assert sorted(turn.contender for turn in came[:5]) == sorted([*CELL.contenders, "bare"])


def test_who_has_no_result_is_left_out_of_the_rounds_after():
    asked = []

    def run(job):
        asked.append(job.contender)
        if job.contender == "gymnasium-sync":
            raise NotMeasured("failed", "it fell over", "a traceback")
        return MEASURED

    results, _ = run_all(run)

    assert asked.count("gymnasium-sync") == 1
    (out,) = results.left_out
    assert (out.contender, out.kind, out.reason, out.details) == (
        "gymnasium-sync",
        "failed",
        "it fell over",
        "a traceback",
    )
    assert asked.count("ours-simple") == 2


def test_one_that_fails_in_one_cell_takes_part_in_the_next():
    results = Results()

    def run(job):
        if job.n_envs == 8:
            raise NotMeasured("failed", "it fell over")
        return MEASURED

    for n_envs in (8, 64):
        list(run_cell(Cell("noop", n_envs, ("bare",)), Pace(rounds=1), results, run=run, chance=random.Random(0)))

    assert [turn.n_envs for turn in results.turns] == [64, 64]


def test_what_was_measured_before_an_interrupt_is_kept():
    def run(job):
        if job.contender == "tianshou-dummy":
            raise KeyboardInterrupt
        return MEASURED

    results = Results()
    with pytest.raises(KeyboardInterrupt):
        list(run_cell(CELL, Pace(), results, run=run, chance=random.Random(0)))

    assert results.of(CELL)


def test_a_start_is_measured_without_steps():
    jobs = []

    def run(job):
        jobs.append(job)
        return MEASURED

    run_all(run, cell=Cell("start", 8, ("bare", "ours-spawn")))

    assert {(job.seconds, job.warm_up_s) for job in jobs} == {(0.0, 0.0)}
