"""Ctrl-C while a command imports its libraries, which takes up to seconds.

Nothing has been started then, so the process exits at once and silently. A KeyboardInterrupt would do so only if no
library on the way caught it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def loading() -> Iterator[None]:
    """Return a context in which Ctrl-C ends the process with exit code 130."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # a shell that ignores Ctrl-C, or a program that calls this one, has a handler of its own
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)
