"""Let a Ctrl-C wait while something is half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, also between "the answer was read" and
"the answer was kept". Blocking the signal for the thread does not help: the kernel then hands it to any other thread, and
Python still runs the handler in the main one. So the handler itself is replaced by one that takes note.

The rule: ``held`` is around whatever must be done wholly or not at all; ``let_through`` is around every wait and every
call of a user's code inside it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

# signal.signal spends most of its time turning numbers into enums and back.
_set_handler: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)


class _State:
    """What the main thread is in; other threads get no signals."""

    depth = 0
    noted = False
    handler: Any = None


def _note(_: int, __: Any) -> None:
    _State.noted = True


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _begin() -> None:
    _State.handler = _set_handler(signal.SIGINT, _note)


def _end() -> None:
    """Put the user's handler back, and tell it what came meanwhile."""
    handler, _State.handler = _State.handler, None
    noted, _State.noted = _State.noted, False
    _set_handler(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
    if noted:
        if callable(handler):
            handler(signal.SIGINT, None)
        else:
            signal.raise_signal(signal.SIGINT)


class _Held:
    """``with held:`` a Ctrl-C in the block is raised at its end. May be nested."""

    def __enter__(self) -> None:
        if _in_main_thread():
            if _State.depth == 0:
                _begin()
            _State.depth += 1

    def __exit__(self, *_: object) -> None:
        if _in_main_thread():
            _State.depth -= 1
            if _State.depth == 0:
                _end()


class _LetThrough:
    """``with let_through:`` inside ``held``: here a Ctrl-C is raised at once, also one that came before."""

    def __init__(self) -> None:
        self._depths: list[int] = []

    def __enter__(self) -> None:
        if _in_main_thread():
            depth, _State.depth = _State.depth, 0
            self._depths.append(depth)
            if depth:
                try:
                    _end()
                except BaseException:
                    self._resume()
                    raise

    def __exit__(self, *_: object) -> None:
        if _in_main_thread():
            self._resume()

    def _resume(self) -> None:
        depth = self._depths.pop()
        if depth:
            _begin()
        _State.depth = depth


held = _Held()
let_through = _LetThrough()
