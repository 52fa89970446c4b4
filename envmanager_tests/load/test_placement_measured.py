"""What a probe finds where the cost of a step is known, and what is chosen by it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from envmanager import SimpleEnvManager, SubprocessEnvManager, make_manager
from envmanager.system.machine import count_cores
from envmanager_tests.process.test_placement import N_ENVS, Noop
from envmanager_tests.unit.test_placement import probe_of

pytestmark = pytest.mark.load


class Computing(Noop):
    def step(self, action: Any) -> Any:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return super().step(action)


class Sleeping(Noop):
    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


def test_a_step_that_sleeps_hardly_computes() -> None:
    assert probe_of(Sleeping()).busy_share < 0.5


def test_a_step_that_computes_does_little_else() -> None:
    assert probe_of(Computing()).busy_share > 0.5


def test_cheap_environments_run_in_this_process() -> None:
    with make_manager({"kind": "auto", "n_envs": 2}, Noop) as manager:
        assert isinstance(manager, SimpleEnvManager)


def test_environments_that_compute_get_a_worker_per_core() -> None:
    with make_manager({"kind": "auto", "n_envs": N_ENVS}, Computing) as manager:
        assert manager.n_workers == count_cores()


def test_environments_that_sleep_get_a_worker_each() -> None:
    with make_manager({"kind": "auto", "n_envs": 5}, Sleeping) as manager:
        assert manager.n_workers == 5


def test_cheap_environments_share_workers() -> None:
    with SubprocessEnvManager(Noop, n_envs=4, n_workers="auto") as manager:
        assert manager.n_workers < 4
