"""The loop that measures, with a clock that a fake contender turns."""

from __future__ import annotations

import pytest

from benchmarks.measure import CHUNK_S, Clocks, measure, warm_up
from benchmarks.protocol import Job, Measured, job_line, job_of, line_of, measured_of


class Ticking:
    """Eight environment steps per call; a call takes ``call_s``, and a quarter of it is CPU time."""

    def __init__(self, call_s):
        self.call_s = call_s
        self.now = 100.0
        self.chunks = []
        self.clocks = Clocks(wall=lambda: self.now, cpu=lambda: self.now / 4, cpu_of_descendants=lambda: self.now / 2)

    def run(self, n_calls):
        self.now += n_calls * self.call_s
        self.chunks.append(n_calls)
        return 8 * n_calls


@pytest.mark.parametrize("call_s", [1e-7, 1e-5, 1e-3, 1.0])
def test_a_chunk_takes_long_enough_and_no_longer_than_needed(call_s):
    contender = Ticking(call_s)

    n_calls = warm_up(contender, 0.1, contender.clocks)

    assert n_calls * call_s >= CHUNK_S
    assert n_calls == 1 or n_calls * call_s < 2 * CHUNK_S


def test_the_warm_up_takes_the_time_it_was_given():
    contender = Ticking(0.01)

    warm_up(contender, 0.5, contender.clocks)

    assert contender.now - 100.0 == pytest.approx(0.5, abs=0.011)


def test_steps_wall_time_and_cpu_time_are_of_the_same_span():
    contender = Ticking(2**-6)

    n_steps, wall_s, cpu_s, all_cpu_s = measure(contender, n_calls=8, seconds=0.9, clocks=contender.clocks)

    assert (n_steps, wall_s, cpu_s, all_cpu_s) == (512, 1.0, 0.25, 0.75)
    assert contender.chunks == [8] * 8


def test_no_seconds_are_no_steps():
    contender = Ticking(0.01)

    assert measure(contender, n_calls=1, seconds=0.0, clocks=contender.clocks) == (0, 0.0, 0.0, 0.0)


def test_jobs_and_results_survive_the_journey():
    job = Job("ours-simple", "noop", 8, 1.0, 0.5, 60.0)
    measured = Measured(10, 1.0, 0.5, 0.75, 0.1)

    assert job_of(job_line(job)) == job
    assert line_of("ended", exit_code=0) == '{"event": "ended", "exit_code": 0}\n'
    assert (
        measured_of(
            {"event": "measured", "n_steps": 10, "wall_s": 1.0, "cpu_s": 0.5, "all_cpu_s": 0.75, "start_s": 0.1}
        )
        == measured
    )
