"""Turns of a measurement that never took place, for the tests of what is made of them."""

from __future__ import annotations

from benchmarks.protocol import Measured
from benchmarks.schedule import Turn


def turn(contender, rate, *, round=0, workload="noop", n_envs=8, cores=0.5, start_s=0.1):
    """A turn of one second with so many steps."""
    return Turn(workload, n_envs, round, contender, Measured(rate, 1.0, cores, 2 * cores, start_s))
