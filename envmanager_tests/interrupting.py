"""A Ctrl-C at a moment of the test's choice."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from typing import Any


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
        is_inside = False
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    assert n_calls < nth, f"the interrupt at call {nth} was not raised"
    return False
