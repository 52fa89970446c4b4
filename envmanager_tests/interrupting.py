"""A Ctrl-C at a moment of the test's choice, or at many by chance."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SENDER = """
import os, random, signal, sys, time
trainer, least_s, most_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
random.seed(3)
while True:
    time.sleep(random.uniform(least_s, most_s))
    try:
        os.kill(trainer, signal.SIGINT)
    except OSError:
        break
"""


@contextmanager
def interrupts_from_outside(handler: Callable[[int, Any], None], least_s: float, most_s: float) -> Iterator[None]:
    """Another process sends a SIGINT after a time between these, again and again; ``handler`` handles them."""
    gc.collect()
    gc.disable()  # what is raised in the collector, which ends what other tests have left, is swallowed
    before = signal.signal(signal.SIGINT, handler)
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(os.getpid()), str(least_s), str(most_s)])
    try:
        yield
    finally:
        sender.kill()
        sender.wait()
        signal.signal(signal.SIGINT, before)
        gc.enable()


def interrupted(function: Callable[[], Any], nth: int) -> bool:
    """Call ``function`` and send this process a SIGINT when the n-th call in it begins, of a Python or a C function.

    False when it makes fewer calls. Otherwise KeyboardInterrupt must come out of it.
    """
    n_calls, is_inside = 0, True

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal n_calls
        if is_inside and event in ("call", "c_call"):
            n_calls += 1
            if n_calls == nth:
                signal.raise_signal(signal.SIGINT)

    gc.disable()  # what is raised in a callback of the collector, as hypothesis has one, is swallowed
    sys.setprofile(count)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        is_inside = False  # an error may come out of it too, and the next line is a call
        sys.setprofile(None)
        gc.enable()
    assert n_calls < nth, f"the interrupt at call {nth} was not raised"
    return False
