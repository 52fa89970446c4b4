"""How long steps take: the histogram beside NumPy's percentiles, and the sums."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager.observe.timing import Histogram, WaitTimes, WorkerTimes

TIMES_NS = st.lists(
    st.one_of(st.integers(0, 40), st.integers(0, 10**6), st.integers(0, 2**53)), min_size=1, max_size=300
)


class Drawn:
    """A track that remembers what was drawn."""

    def __init__(self):
        self.generation = None
        self.spans = []

    def begin(self, generation, tasks=()):
        self.generation = generation

    def span(self, name, began_ns, ended_ns):
        self.spans.append((name, began_ns, ended_ns))


def histogram_of(times_ns):
    histogram = Histogram()
    for time_ns in times_ns:
        histogram.add(time_ns)
    return histogram


@given(TIMES_NS)
def test_percentiles_are_those_of_numpy_within_a_sixteenth(times_ns):
    found = histogram_of(times_ns).percentiles(50, 95, 99)

    exact = np.percentile(np.array(times_ns, float), [50, 95, 99], method="inverted_cdf")
    assert found == pytest.approx(exact, rel=1 / 16, abs=0.0)


@given(TIMES_NS)
def test_percentiles_rise(times_ns):
    found = histogram_of(times_ns).percentiles(1, 50, 95, 99, 100)

    assert found == sorted(found)


@given(st.integers(0, 2**50), st.integers(1, 3000))
def test_the_percentiles_of_equal_times_are_exact(time_ns, n):
    assert histogram_of([time_ns] * n).percentiles(1, 50, 99) == [float(time_ns)] * 3


def test_the_longest_time_that_a_record_can_hold_is_counted():
    assert histogram_of([2**64 - 1]).percentiles(99) == pytest.approx([2**64], rel=1 / 16)


def test_without_times_all_percentiles_are_zero():
    assert Histogram().percentiles(50, 99) == [0.0, 0.0]


def test_the_times_of_steps_are_summed_and_drawn():
    times = WorkerTimes()
    times.stepped(300, 10_300)
    times.stepped(300, 10_650)
    times.track = track = Drawn()
    times.started(20_000, 20_700, generation=2)
    times.responded("reset", 100, 20_900)
    times.stepped(500, 21_500)

    assert (times.steps, times.busy_ns, times.idle_ns, times.start_s) == (3, 1100, 150, 7e-7)
    assert track.generation == 2
    assert track.spans == [("start", 20_000, 20_700), ("reset", 20_800, 20_900), ("step", 21_000, 21_500)]


def test_waits_are_summed_and_drawn(mocker):
    mocker.patch("time.perf_counter_ns", side_effect=[1700])
    waits = WaitTimes()
    waits.track = track = Drawn()
    waits.add(1000)

    assert waits.waited_ns == 700
    assert track.spans == [("wait for workers", 1000, 1700)]


@pytest.mark.parametrize(("n_steps", "limit_bytes"), [(0, 1000), (2000, 4000)])
def test_the_times_of_a_worker_take_little_memory(n_steps, limit_bytes):
    generator = np.random.default_rng(3)
    steps_ns = (1e8 * 100 ** generator.random(n_steps)).astype(int).tolist()
    tracemalloc.start()
    try:
        kept = [WorkerTimes(count_after=127) for _ in range(100)]
        for times in kept:
            times.started(0, 1, generation=0)
            for step_ns in steps_ns:
                times.stepped(step_ns, step_ns)
            times.shares(0)
        n_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_bytes / len(kept) < limit_bytes
