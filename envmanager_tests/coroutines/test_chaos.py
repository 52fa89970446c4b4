"""Under chaos nothing is mixed up, and each fault costs one restart."""

from __future__ import annotations

import pytest

from envmanager_tests.coroutines.chaos import PoolTrainer, Trainer, run_chaos


@pytest.mark.parametrize("kind", [Trainer, PoolTrainer])
def test_under_chaos_no_row_is_mispaired_and_all_that_is_lost_is_accounted_for(
    kind: type[Trainer | PoolTrainer],
) -> None:
    outcome = run_chaos(kind(), 10_000, 32)
    print(outcome.table())
    outcome.check()
    assert outcome.restarts > 10
