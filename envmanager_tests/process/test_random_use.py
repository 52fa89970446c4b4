"""Whatever a trainer does, every row is that of its environment and of its action."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from envmanager_tests.random_use import RandomUse

TestRandomUse = RandomUse.TestCase
TestRandomUse.settings = settings(
    max_examples=8,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
