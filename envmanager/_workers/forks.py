"""Deals with processes that an environment forks: each is a process of its own, and none is the worker.

::

    worker ─── step ───▶ environment ─── os.fork() ───▶ goes on as the worker
                                             └────────▶ the fork: what it holds of the transport leads nowhere;
                                                        when it leaves the environment's code, it ends

A fork may live on (a simulator), or end itself (``os._exit``, ``multiprocessing``, another program). If it returns,
raises or calls ``sys.exit`` where the worker does the same, it would take commands and respond to them too.

A fork that another thread of the worker made never comes back to the worker's code. When its last thread had ended, the
C library would do what is registered for the end of a program, such as destructors of libraries; but Python has no
thread left by then, and those that need one (PyTorch's) abort in Python 3.11 and 3.12: "thread state already
initialized". So the fork ends before that, as part of the end of the thread that made it.

The rule: a fork ends like a script, but without what was registered to be done at the worker's end: ``atexit``,
finalizers, destructors of libraries, ``close`` of the environments.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from envmanager.system.forking import after_fork_in_child

is_fork = False
"""Whether this process was forked by an environment."""

_STDERR = 2
_cut_off: Callable[[], None] | None = None
_workers_thread: int | None = None
_of_thread = threading.local()


def watch(cut_off: Callable[[], None]) -> None:
    """Be a worker from now on. ``cut_off`` is called in each process that is forked from it, before anything else.

    The thread that calls this is the one whose forks call ``end``.
    """
    global _cut_off, _workers_thread
    _cut_off, _workers_thread = cut_off, threading.get_ident()


def _after_fork_in_child() -> None:
    global is_fork, _cut_off
    try:
        if _cut_off is not None:
            is_fork, cut_off, _cut_off = True, _cut_off, None
            cut_off()
        if is_fork and threading.get_ident() != _workers_thread and not hasattr(_of_thread, "end"):
            _of_thread.end = _EndOfThread()  # in a fork of a fork it is there already
    except BaseException as error:  # Python would print it and go on, as a second worker
        end(error)


after_fork_in_child(_after_fork_in_child)


class _EndOfThread:
    """Ends a fork that a thread made: it goes with what else is that thread's own, when the thread ends."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if is_fork and threading.get_ident() == self._thread:  # else it goes in a fork that another thread made
            os._exit(0)  # without a flush: another thread may have held a stream's lock at the fork


def end(error: BaseException | None) -> NoReturn:
    """End this process, which was forked, as a script ends that comes to its end or raises ``error``."""
    code = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        code, last_words = _exit(error)
        os.write(_STDERR, last_words.encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def _exit(error: BaseException | None) -> tuple[int, str]:
    """The exit code, and what is said on stderr."""
    if error is None:
        return 0, ""
    if not isinstance(error, SystemExit):
        return 1, "".join(traceback.format_exception(error))
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0) & 0xFF, ""
    return 1, f"{error.code}\n"
