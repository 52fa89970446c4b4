"""Handling of Ctrl-C while a command imports its libraries, which may take seconds.

No worker runs yet, so Ctrl-C ends the process at once, without a traceback. KeyboardInterrupt is not raised, because
a library that is being imported might catch it.
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
    """Return a context in which Ctrl-C exits with code 130, if the main thread enters it with the default handler."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # keep the calling program's handler, or SIG_IGN set by the shell
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
