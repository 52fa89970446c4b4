"""Waits that spin (poll repeatedly) for a short time before they sleep, if spinning is faster.

Waking a sleeping core takes tens of microseconds; polling after ``sched_yield`` takes a few. So after a short wait, the
next wait spins first; after a long wait, it sleeps at once. If another program keeps the core for long after a yield,
the next ``REST`` waits sleep at once.

A spin always yields and is bounded, so it keeps a core from other programs only briefly, and waits on slow environments
cost hardly any CPU time. With many workers no wait spins, because a spin would take a core that a worker needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from envmanager.system.machine import count_cores

SPIN_NS = 200_000
"""Maximum duration of a spin in nanoseconds: four times as long as it takes to wake a core."""
TAKEN_NS = 1_500_000
"""Duration of a yield (ns) above which another program must have used the core. Workers use a core more briefly."""
REST = 200
"""Number of waits that sleep at once after a yield of more than ``TAKEN_NS``."""
MANY = 4
"""Maximum number of workers per core for which waits spin. With more workers, spins would take cores from them, and
the trainer would never sleep, because responses would arrive too often.
"""


def spin_ns(n_workers: int) -> int:
    """Return the maximum time (ns) for which a wait for ``n_workers`` workers spins, or 0 if it should not spin."""
    return SPIN_NS if hasattr(os, "sched_yield") and n_workers <= MANY * count_cores() else 0


class Spinner:
    """A helper for repeated waits. A wait spins before it sleeps if the previous wait was short."""

    def __init__(self, limit_ns: int) -> None:
        """``limit_ns``: maximum duration of a spin. After a wait shorter than this, the next wait spins."""
        self.pays = limit_ns > 0
        self._limit_ns = limit_ns
        self._rest = self._began_ns = 0

    def spin(self, ready: Callable[[], bool]) -> bool:
        """Begin a wait. If the last one was short, poll ``ready()`` briefly. Return whether it has become true.

        If not, the caller must sleep, and then call ``slept``.
        """
        began_ns = looked_ns = self._began_ns = time.perf_counter_ns()
        if self._rest:
            self._rest -= 1
            return False
        while self.pays and looked_ns - began_ns < self._limit_ns:
            os.sched_yield()
            yielded_ns = time.perf_counter_ns()
            if yielded_ns - looked_ns > TAKEN_NS:
                self._rest = REST
            if ready():
                return True
            looked_ns = time.perf_counter_ns()
            if self._rest:
                break
        return False

    def slept(self) -> None:
        """Note how long the wait took. After a long one, the next does not spin."""
        self.pays = time.perf_counter_ns() - self._began_ns < self._limit_ns
