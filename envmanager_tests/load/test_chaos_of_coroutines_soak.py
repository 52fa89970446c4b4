"""A million steps of coroutines under chaos: nothing is mixed up, and nothing grows."""

from __future__ import annotations

import faulthandler
import logging

import pytest

from envmanager_tests.coroutines.chaos import PoolTrainer, Trainer, run_chaos

pytestmark = pytest.mark.load

N_STEPS = 1_000_000


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [Trainer, PoolTrainer])
def test_a_million_steps_under_chaos_mix_nothing_up_and_leave_nothing_behind(
    kind: type[Trainer | PoolTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="envmanager")  # each fault is a warning or two
    faulthandler.cancel_dump_traceback_later()  # it is meant to take that long

    outcome = run_chaos(kind(), N_STEPS)
    print(outcome.table())

    outcome.check()
    assert outcome.restarts > 1000
    early, late = outcome.early, outcome.late
    assert late.rss_mb - early.rss_mb < 5
    assert (late.descriptors, late.threads) == (early.descriptors, early.threads)
