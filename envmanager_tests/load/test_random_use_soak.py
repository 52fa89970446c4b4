"""Two thousand trainers that do anything at all; see ``random_use``."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from envmanager_tests.random_use import RandomUse

N_RUNS = 2000


@pytest.mark.load
@pytest.mark.timeout(3600)
class TestRandomUseForLong(RandomUse.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=N_RUNS,
        stateful_step_count=30,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
