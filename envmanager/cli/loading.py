"""While a command's libraries are imported, which takes up to seconds.

The rule: nothing has been begun then that would have to be ended, so Ctrl-C leaves at once and without a word. An
exception would do so only when no library on the way catches it.
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
    """Within this context Ctrl-C ends the process with exit code 130."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else decides what Ctrl-C does: a shell that had it ignored, a program that calls this one
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)
