"""Look again for a moment before going to sleep, when that pays.

Waking a core that sleeps costs tens of microseconds, looking again after ``sched_yield`` a few. So a wait that was
short last time spins first; one that was long sleeps at once. Where a yield gave the core to a program that kept it, a
spin is what takes long, and waits sleep for a while. The rule: a spin always yields and is bounded, so it never keeps a
core from others, and a wait on slow environments costs nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

YIELDS = 30
SHORT_NS = 200_000
"""A wait of at most this long pays a spin next time: about twice what waking up costs on a slow machine."""
REST = 200
"""How many waits sleep at once after a spin that took longer than a short wait."""


class Spinner:
    """Remembers how long the last wait took."""

    def __init__(self) -> None:
        self._pays = True
        self._rest = 0

    def wait(self, ready: Callable[[], bool], sleep: Callable[[], None]) -> None:
        """Return once ``ready()``, or after one ``sleep()``."""
        started_ns = time.monotonic_ns()
        if self._rest:
            self._rest -= 1
        elif self._pays:
            found = self._spin(ready)
            if time.monotonic_ns() - started_ns > SHORT_NS:
                self._rest = REST
            if found:
                return
        sleep()
        self._pays = time.monotonic_ns() - started_ns < SHORT_NS

    def _spin(self, ready: Callable[[], bool]) -> bool:
        for _ in range(YIELDS):
            os.sched_yield()
            if ready():
                return True
        return False
