"""Ends the workers and what they started when the trainer dies, however it dies.

::

    trainer ── write end ──▶ life pipe ◀── lifelines: one in each worker, and two copies of it in the guardian

The trainer holds the write end of one pipe. A *lifeline* is its read end, opened anew (through /proc/self/fd, so that
it has an open file description, and so an owner, of its own), for which the kernel was asked to send SIGKILL to its
owner when something happens on the pipe: the last writer is gone, or it has written a byte. This needs no thread and no
GIL, and works while the worker sits in native code, ignores SIGTERM or is stopped. PR_SET_PDEATHSIG does not do: it
fires when the *thread* that started the worker ends, and not at all in children of a server.

A lifeline lasts as long as somebody holds it. A worker that crashes takes its own along, and its simulators would be
tied to nothing; an environment may close all descriptors, or go into another group. So each worker leaves two more with
the guardian, a process that does nothing but hold them: one for the worker's group, one for the worker. The kernel
remembers whom they are for by identity, not by number: nobody who gets the number later is meant.

Where the kernel refuses (no /proc, a sandbox without signal-driven input), a thread in the worker waits for the same
event. It needs the GIL: an environment that holds it in native code then outlives its trainer until it lets go. There
the guardian holds nothing.

The rule: the write end is closed only after the last worker has gone, because closing it kills.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import threading

VARIABLE = "ENVMANAGER_LIFELINE"
"""Set to "thread" in the environment, it chooses the thread without asking the kernel."""
NAME = struct.Struct("<QQ")
"""worker_id, generation: what the guardian knows a worker's lifelines by."""
GUARDIAN = NAME.pack(2**64 - 1, 0)
"""The name of its own, which the trainer sends before anything else."""
_ROOM_WITHIN_S = 5.0
"""How long a guardian that has much to read, or has just been started, is waited for."""

_own_group: int | None = None
"""The group that this worker leads; its environment may have taken the worker itself into another one."""


def arm(life_fd: int, guardian_fd: int | None = None, name: bytes = b"") -> None:
    """Tie this process, the leader of its group, and its group to the pipe behind ``life_fd``.

    A worker leaves copies with the guardian, under ``name``.
    """
    global _own_group
    _own_group = os.getpgrp()
    try:
        tie(life_fd, -_own_group)
        if guardian_fd is not None:
            leave_copies(life_fd, guardian_fd, name, os.getpid())
    except OSError:
        threading.Thread(target=_watch, args=(life_fd,), name="envmanager-lifeline", daemon=True).start()
    finally:
        if guardian_fd is not None:
            os.close(guardian_fd)


def tie(life_fd: int, owner: int) -> None:
    """Tie a process, or a group by its negative number, to the pipe, as long as this process lives."""
    line = line_for(life_fd, owner)
    if _is_cut(line):  # the trainer went before the signal was armed
        end_group()


def line_for(life_fd: int, owner: int) -> int:
    """A lifeline for a process, or a group by its negative number; OSError when the kernel refuses."""
    line = open_line(life_fd)
    try:
        aim(line, owner)
    except OSError:
        os.close(line)
        raise
    return line


def open_line(life_fd: int) -> int:
    """A lifeline that is for nobody yet, so that a program which is not ours can inherit it; OSError when refused."""
    if os.environ.get(VARIABLE) == "thread":
        raise OSError(f"{VARIABLE}=thread")
    return os.open(f"/proc/self/fd/{life_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def aim(line: int, owner: int) -> None:
    """Have an open line be for this process, or group by its negative number, whoever holds it."""
    import fcntl  # Windows has none

    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETOWN, owner)
    fcntl.fcntl(line, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def _is_cut(line: int, timeout_ms: int | None = 0) -> bool:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def leave_copies(life_fd: int, guardian_fd: int, name: bytes, pid: int) -> None:
    """A guardian that has been killed, or is stopped and full, takes none; the worker's own lifeline must do then."""
    copies = [line_for(life_fd, -pid), line_for(life_fd, pid)]
    poll = select.poll()
    poll.register(guardian_fd, select.POLLOUT)
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(guardian_fd)) as guardian:
        if poll.poll(_ROOM_WITHIN_S * 1000):
            socket.send_fds(guardian, [name], copies, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    for copy in copies:
        os.close(copy)


def _watch(life_fd: int) -> None:
    _is_cut(life_fd, timeout_ms=None)
    end_group()


def end_others() -> None:
    """End what this process has started, at its own orderly end.

    The trainer would do it; but a trainer that dies while it closes does nothing more.
    """
    own_pid = os.getpid()
    try:
        entries = os.listdir("/proc")
    except FileNotFoundError:  # it is left to the trainer
        return
    for pid in map(int, filter(str.isdigit, entries)):
        if pid != own_pid:
            with contextlib.suppress(OSError):
                _end_if_in_own_group(pid)


def _end_if_in_own_group(pid: int) -> None:
    if os.getpgid(pid) != _own_group:
        return
    pidfd = os.pidfd_open(pid)
    try:
        if os.getpgid(pid) == _own_group:  # else the number has just become another's
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def end_group() -> None:
    """End this process and what it started, at once."""
    if _own_group is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_own_group, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)  # it leads no group, or has left it
