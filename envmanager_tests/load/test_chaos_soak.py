"""Ten minutes of chaos: nothing is mixed up, every fault is told once, and nothing grows."""

from __future__ import annotations

import faulthandler
import logging

import pytest

from envmanager_tests.chaos_runs import Stepping, run_under_chaos

pytestmark = pytest.mark.load

MINUTES = 10


@pytest.mark.timeout(MINUTES * 60 + 120)
def test_ten_minutes_of_chaos_mix_nothing_up_and_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="envmanager")  # each fault is a warning or two
    faulthandler.cancel_dump_traceback_later()  # it is meant to take that long

    outcome = run_under_chaos(Stepping, MINUTES * 60)
    early, late = outcome.medians(120, 180), outcome.medians(MINUTES * 60 - 60, MINUTES * 60)
    print(outcome.table(early, late))

    outcome.check_books()
    assert outcome.report.faults > 100
    assert outcome.report.pauses > 50
    assert abs(late.descriptors - early.descriptors) <= 4
    assert late.threads == early.threads
    assert late.rss_mb - early.rss_mb < 5
