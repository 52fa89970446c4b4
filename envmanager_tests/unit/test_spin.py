"""When to look again before going to sleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pytest_mock import MockerFixture

from envmanager.hosts import spin
from envmanager.hosts.spin import MANY, REST, SPIN_NS, Spinner, spin_ns

YIELD_NS = 1_000
YIELDS = SPIN_NS // YIELD_NS


class Clock:
    """Time goes by in yields and in sleeps, as long as the test says."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.yield_ns = YIELD_NS
        self.n_yields = self.n_sleeps = 0

    def sched_yield(self) -> None:
        self.n_yields += 1
        self.now_ns += self.yield_ns

    def wait(self, spinner: Spinner, ready: Callable[[], bool], sleep_ns: int) -> None:
        """Wait as a user of the spinner does: if there is nothing after the spin, sleep once."""
        if not spinner.spin(ready):
            self.n_sleeps += 1
            self.now_ns += sleep_ns
            spinner.slept()


@pytest.fixture
def clock(mocker: MockerFixture) -> Any:
    clock = Clock()
    mocker.patch.object(spin.os, "sched_yield", clock.sched_yield)
    mocker.patch.object(spin.time, "perf_counter_ns", side_effect=lambda: clock.now_ns)
    return clock


def never() -> bool:
    return False


def test_a_wait_looks_again_a_few_times_and_then_sleeps(clock: Clock) -> None:
    clock.wait(Spinner(SPIN_NS), never, 1)
    assert (clock.n_yields, clock.n_sleeps) == (YIELDS, 1)


def test_what_comes_while_it_looks_needs_no_sleep(clock: Clock) -> None:
    clock.wait(Spinner(SPIN_NS), lambda: clock.n_yields == 3, 1)
    assert (clock.n_yields, clock.n_sleeps) == (3, 0)


def test_after_a_long_wait_the_next_one_sleeps_at_once_and_after_a_short_one_looks_again(clock: Clock) -> None:
    spinner = Spinner(SPIN_NS)
    clock.wait(spinner, never, SPIN_NS)
    clock.n_yields = 0
    clock.wait(spinner, never, 1)
    assert clock.n_yields == 0
    clock.wait(spinner, never, 1)
    assert clock.n_yields == YIELDS


@pytest.mark.parametrize("found", [False, True])
def test_when_another_program_keeps_the_core_waits_sleep_at_once_for_a_while(clock: Clock, found: bool) -> None:
    spinner = Spinner(SPIN_NS)
    clock.yield_ns = 4_000_000
    clock.wait(spinner, lambda: found, 1)
    clock.wait(spinner, never, 1)
    clock.n_yields, clock.yield_ns = 0, YIELD_NS
    for _ in range(REST - 1):
        clock.wait(spinner, never, 1)
    assert clock.n_yields == 0
    clock.wait(spinner, never, 1)
    assert clock.n_yields == YIELDS


def test_a_wait_that_may_not_look_again_always_sleeps(clock: Clock) -> None:
    spinner = Spinner(0)
    for _ in range(3):
        clock.wait(spinner, never, 1)
    assert (clock.n_yields, clock.n_sleeps) == (0, 3)


def test_among_more_workers_per_core_than_many_nobody_spins(mocker: MockerFixture) -> None:
    mocker.patch.object(spin, "count_cores", return_value=2)
    assert spin_ns(2 * MANY) == SPIN_NS
    assert spin_ns(2 * MANY + 1) == 0
