"""The measurement of a contender.

The rule: the clock is read only after chunks of calls of some milliseconds, so that the time to read it is negligible.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envmanager.system.machine import descendants

if TYPE_CHECKING:
    from benchmarks.contender import Contender

CHUNK_S = 0.005


def cpu_of_descendants() -> float:
    """Return the CPU seconds of all living descendants, each with a resolution of 0.01 s; 0 without /proc."""
    ticks = 0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            fields = stat.read().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime and stime: fields 14 and 15 in proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Clocks:
    """The clocks of a measurement. Tests replace them."""

    wall: Callable[[], float] = time.monotonic
    cpu: Callable[[], float] = time.process_time
    cpu_of_descendants: Callable[[], float] = cpu_of_descendants


def warm_up(contender: Contender, seconds: float, clocks: Clocks) -> int:
    """Step for ``seconds``; return the number of calls that take CHUNK_S."""
    n_calls = 1
    now = clocks.wall()
    deadline = now + seconds
    while True:
        started = now
        contender.run(n_calls)
        now = clocks.wall()
        if now - started < CHUNK_S:
            n_calls *= 2
        elif now >= deadline:
            return n_calls


def measure(contender: Contender, *, n_calls: int, seconds: float, clocks: Clocks) -> tuple[int, float, float, float]:
    """Step for ``seconds``; return environment steps, wall seconds, and CPU seconds without and with the workers'."""
    n_steps = 0
    workers_cpu = clocks.cpu_of_descendants()
    cpu = clocks.cpu()
    started = now = clocks.wall()
    while now < started + seconds:
        n_steps += contender.run(n_calls)
        now = clocks.wall()
    cpu_s = clocks.cpu() - cpu
    return n_steps, now - started, cpu_s, cpu_s + clocks.cpu_of_descendants() - workers_cpu
