"""The measurement of episodes that are kept."""

from __future__ import annotations

import pytest

from benchmarks.kept import CELLS, rows_of
from benchmarks.kept_ledger import kinds, play


@pytest.mark.parametrize("name", ["CartPole", "PettingZoo"])
def test_rows_are_compared_with_those_of_a_run_in_which_workers_are_killed(name: str) -> None:
    plain, _, n_kills, _ = rows_of(CELLS[name], 600, 0)
    assert n_kills == 0
    with_kills, stats, n_kills, _ = rows_of(CELLS[name], 600, 20)
    assert n_kills > 0
    assert stats.episodes_kept > 0
    assert with_kills == plain


@pytest.mark.parametrize(("name", "fault"), [("tasks laid ready", "kill"), ("in process", "exception")])
def test_each_stream_of_the_ledger_is_compared_with_that_of_a_run_without_faults(name: str, fault: str) -> None:
    expected, *_ = play(kinds()[name], "", 150)
    streams, n_lost, stats, n_faults = play(kinds()[name], fault, 150)
    assert n_faults > 0
    assert stats.episodes_kept > 0
    assert (n_lost, streams) == (0, expected)
