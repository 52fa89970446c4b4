"""When the trainer dies, however it dies, its workers and what they started die too.

The trainer holds the write end of one pipe; nobody writes. Each worker opens the read end anew (through /proc/self/fd,
so that it has an open file description, and so an owner, of its own) and asks the kernel for SIGKILL to its process
group when something happens on it. The only thing that can happen is that the last writer is gone. This needs no
thread and no GIL, and works while the worker sits in native code or ignores SIGTERM. PR_SET_PDEATHSIG does not do: it
fires when the *thread* that started the worker ends, and not at all under forkserver.

Where the kernel refuses (no /proc, a sandbox without signal-driven input), a thread in the worker waits for the same
event. It needs the GIL: an environment that holds it in native code then outlives its trainer until it lets go.

The rule: the write end is closed only after the last worker has gone, because closing it kills.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import threading

VARIABLE = "ENVMANAGER_LIFELINE"
"""Set to "thread" in the environment, it chooses the thread without asking the kernel."""


def arm(read_fd: int) -> None:
    """Tie this process group to the pipe behind ``read_fd``."""
    try:
        if os.environ.get(VARIABLE) == "thread":
            raise OSError(f"{VARIABLE}=thread")
        _arm_kernel(read_fd)
    except OSError:
        threading.Thread(target=_watch, args=(read_fd,), name="envmanager-lifeline", daemon=True).start()


def _arm_kernel(read_fd: int) -> None:
    """The descriptor made here stays open until the process ends."""
    own_fd = os.open(f"/proc/self/fd/{read_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own_fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    poll = select.poll()
    poll.register(own_fd, select.POLLHUP)
    if poll.poll(0):  # the trainer went before the signal was armed
        end_group()


def _watch(read_fd: int) -> None:
    poll = select.poll()
    poll.register(read_fd, select.POLLHUP)
    poll.poll()
    end_group()


def end_others() -> None:
    """End what this process has started, at its own orderly end.

    The trainer would do it; but a trainer that dies while it closes does nothing more, and who has ended is tied to no
    life pipe.
    """
    own_pid, own_group = os.getpid(), os.getpgrp()
    try:
        entries = os.listdir("/proc")
    except FileNotFoundError:  # it is left to the trainer
        return
    for pid in map(int, filter(str.isdigit, entries)):
        if pid != own_pid:
            with contextlib.suppress(OSError):
                if os.getpgid(pid) == own_group:
                    os.kill(pid, signal.SIGKILL)


def end_group() -> None:
    """End this process and what it started, at once."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
