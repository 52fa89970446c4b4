"""Waits by looking again for a moment before going to sleep, when that pays.

Waking a core that sleeps costs tens of microseconds, looking again after ``sched_yield`` a few. So a wait that was
short last time spins first; one that was long sleeps at once. Where a yield gave the core to a program that kept it, a
spin is what takes long, and waits sleep for a while.

The rule: a spin always yields and is bounded, so it never keeps a core from others, and a wait on slow environments
costs nothing. Among many workers nobody spins: each spin would take a core that another worker wants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from envmanager.system.processes import count_cores

SPIN_NS = 200_000
"""Four times what waking costs."""
TAKEN_NS = 1_500_000
"""A yield that took so long gave the core to another program, for a whole slice; workers take less."""
REST = 200
"""How many waits sleep at once after that."""
MANY = 4
"""Workers per core: of more than that too many spin at once, and what they win they take from each other.
Responses of so many come so often that the trainer would never sleep.
"""


def spin_ns(n_workers: int) -> int:
    """How long so many workers, and the trainer that waits for them, may spin on this machine; 0: they sleep."""
    return SPIN_NS if n_workers <= MANY * count_cores() else 0


class Spinner:
    """Remembers how long the last wait took."""

    def __init__(self, limit_ns: int) -> None:
        """``limit_ns``: a wait spins for at most so long, and one that was shorter pays a spin next time."""
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
