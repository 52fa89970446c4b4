"""Ends processes and what they started when the trainer dies, however it dies.

::

    trainer ── write end ──▶ life pipe ◀── lifelines: one in each process, and two for each in the helper

The trainer holds the write end of one pipe for as long as it lives. A *lifeline* is its read end, opened again (through
/proc/self/fd, so that it has an open file description, and so an owner, of its own), for which the kernel was asked to
send SIGKILL to its owner when the last writer is gone. This needs no thread and no GIL, and works while the process
sits in native code, ignores SIGTERM or is stopped. PR_SET_PDEATHSIG does not do: it fires when the *thread* that
started the process ends, and not at all in children of the helper.

A lifeline lasts as long as a process holds it. A worker that crashes loses its own, and its simulators would be tied to
nothing; an environment may close all descriptors, or join another group. So the helper holds two more for each process
that it starts: one for its group, one for itself. The kernel keeps the owner by identity, not by number: no process
that gets the number later is meant.

Where the kernel refuses (no /proc, a sandbox without signal-driven input), the helper kills the groups itself, and a
thread in each worker waits for the same event. That thread needs the GIL.

The rule: the helper's own line is older than all that it holds. The kernel sends signals in the order from the newest
line to the oldest, and a helper that had to end first would drop the others.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

VARIABLE = "ENVMANAGER_LIFELINE"
"""Set to "thread" in the environment, it chooses the thread without asking the kernel."""


def line_for(life_fd: int, owner: int) -> int:
    """Open a lifeline for a process, or for a group by its negative number; OSError when the kernel refuses."""
    import fcntl  # Windows has none

    if os.environ.get(VARIABLE) == "thread":
        raise OSError(f"{VARIABLE}=thread")
    line = os.open(f"/proc/self/fd/{life_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(line, fcntl.F_SETOWN, owner)
        fcntl.fcntl(line, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except OSError:
        os.close(line)
        raise
    return line


def is_cut(fd: int, timeout_ms: int | None = 0) -> bool:
    """Return whether the trainer is gone, after a wait of at most ``timeout_ms``; None: for ever."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def watch(life_fd: int) -> None:
    """Start a thread that ends this process and its group when the trainer is gone."""

    def wait_and_end() -> None:
        is_cut(life_fd, timeout_ms=None)
        end_group()

    threading.Thread(target=wait_and_end, name="envmanager-lifeline", daemon=True).start()


def end_group() -> None:
    """Kill this process and what it has started, at once."""
    with contextlib.suppress(ProcessLookupError):  # a fork of a worker leads no group
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
