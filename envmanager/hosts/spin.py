"""Waits that poll for a moment before they sleep, when that pays.

Waking a core that sleeps takes tens of microseconds, polling after ``sched_yield`` a few. So after a short wait the
next one spins first; after a long one it sleeps at once. When a yield gives the core to a program that keeps it, spins
are slow, and the next waits sleep at once.

The rule: a spin always yields and is bounded, so it never keeps a core from others, and a wait on slow environments
costs nothing. Among many workers no wait spins: each spin would take a core that another worker wants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from envmanager.system.machine import count_cores

SPIN_NS = 200_000
"""Longest spin in nanoseconds: four times as long as it takes to wake a core."""
TAKEN_NS = 1_500_000
"""Nanoseconds above which a yield gave the core to another program for a whole time slice. Workers take less."""
REST = 200
"""Number of waits that sleep at once after a yield of more than ``TAKEN_NS``."""
MANY = 4
"""Largest number of workers per core with which waits spin. More workers would take the cores from each other, and the
trainer would never sleep, because responses would arrive too often.
"""


def spin_ns(n_workers: int) -> int:
    """Return how long (ns) a wait may spin with ``n_workers`` workers on this machine; 0: it sleeps at once."""
    return SPIN_NS if n_workers <= MANY * count_cores() else 0


class Spinner:
    """A wait that spins before it sleeps, if the last wait was short."""

    def __init__(self, limit_ns: int) -> None:
        """``limit_ns``: longest spin of a wait; after a shorter wait, the next one spins."""
        self.pays = limit_ns > 0
        self._limit_ns = limit_ns
        self._rest = 0

    def wait(self, ready: Callable[[], bool], sleep: Callable[[], object]) -> None:
        """Return once ``ready()``, or after one ``sleep()``."""
        began_ns = time.monotonic_ns()
        if self._rest:
            self._rest -= 1
        elif self.pays and self._spin(ready, began_ns):
            return
        sleep()
        self.pays = time.monotonic_ns() - began_ns < self._limit_ns

    def _spin(self, ready: Callable[[], bool], began_ns: int) -> bool:
        looked_ns = began_ns
        while looked_ns - began_ns < self._limit_ns:
            os.sched_yield()
            yielded_ns = time.monotonic_ns()
            if yielded_ns - looked_ns > TAKEN_NS:
                self._rest = REST
            if ready():
                return True
            looked_ns = time.monotonic_ns()
            if self._rest:
                return False
        return False
