"""How a running contender is measured.

The rule: the clock is read between chunks of calls that take some milliseconds, so that reading it costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envmanager.bench.contender import Contender

CHUNK_S = 0.005


@dataclass(frozen=True)
class Clocks:
    """Where time is read; tests put their own in."""

    wall: Callable[[], float] = time.monotonic
    cpu: Callable[[], float] = time.process_time


def warm_up(contender: Contender, seconds: float, clocks: Clocks) -> int:
    """Step for ``seconds``; how many calls make a chunk of CHUNK_S."""
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


def measure(contender: Contender, *, n_calls: int, seconds: float, clocks: Clocks) -> tuple[int, float, float]:
    """Environment steps, wall seconds and CPU seconds of chunks of ``n_calls`` for at least ``seconds``."""
    n_steps = 0
    cpu = clocks.cpu()
    started = now = clocks.wall()
    while now < started + seconds:
        n_steps += contender.run(n_calls)
        now = clocks.wall()
    return n_steps, now - started, clocks.cpu() - cpu
