"""Ends processes that an environment forks where they would go on as a second worker.

::

    worker ─── step ───▶ environment ─── os.fork() ───▶ goes on as the worker
                                             └────────▶ the fork: what it holds of the transport leads nowhere;
                                                        when it leaves the environment's code, it ends

A fork may live on (a simulator), or end itself (``os._exit``, ``multiprocessing``, another program). If it returns,
raises or calls ``sys.exit`` where the worker does the same, it would take commands and respond to them too.

The rule: a fork ends like a script, but without what was registered to be done at the worker's end: ``atexit``,
finalizers, ``close`` of the environments.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from envmanager.system.processes import after_fork_in_child

is_fork = False
"""Whether this process was forked by an environment."""

_STDERR = 2
_cut_off: Callable[[], None] | None = None


def watch(cut_off: Callable[[], None]) -> None:
    """Call ``cut_off`` in each process that is forked from this worker, before anything else."""
    global _cut_off
    _cut_off = cut_off


def _after_fork_in_child() -> None:
    global is_fork, _cut_off
    if _cut_off is None:  # no worker, or a fork of a fork
        return
    is_fork, cut_off, _cut_off = True, _cut_off, None
    try:
        cut_off()
    except BaseException as error:  # Python would print it and go on, as a second worker
        end(error)


after_fork_in_child(_after_fork_in_child)


def end(error: BaseException | None) -> NoReturn:
    """End this process, which was forked, as a script ends that comes to its end or raises ``error``."""
    code = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        code, text = _exit(error)
        os.write(_STDERR, text.encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def _exit(error: BaseException | None) -> tuple[int, str]:
    """Return the exit code, and the text for stderr."""
    if error is None:
        return 0, ""
    if not isinstance(error, SystemExit):
        return 1, "".join(traceback.format_exception(error))
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0) & 0xFF, ""
    return 1, f"{error.code}\n"
