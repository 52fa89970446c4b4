"""Look again for a moment before going to sleep, when that pays.

Waking a core that sleeps costs tens of microseconds, looking again after ``sched_yield`` a few. So a wait that was
short last time spins first; one that was long sleeps at once. The rule: a spin always yields and is bounded, so it
never keeps a core from others, and a wait on slow environments costs nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

YIELDS = 30
SHORT_NS = 200_000
"""A wait of at most this long pays a spin next time: about twice what waking up costs on a slow machine."""


class Spinner:
    """Remembers how long the last wait took."""

    def __init__(self) -> None:
        self._pays = True
        self._started_ns = 0

    def wait(self, ready: Callable[[], bool], sleep: Callable[[], None]) -> None:
        """Return once ``ready()``, or after one ``sleep()``."""
        started_ns = time.monotonic_ns()
        if self._pays:
            for _ in range(YIELDS):
                os.sched_yield()
                if ready():
                    return
        sleep()
        self._pays = time.monotonic_ns() - started_ns < SHORT_NS
