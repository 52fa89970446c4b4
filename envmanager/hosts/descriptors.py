"""File descriptors: waiting for them, and closing those that a forked child should not have.

The rule: every descriptor the library opens in the trainer is registered here. A child that the user's code forks
closes all of them, so that it can neither keep workers alive nor stop them. None of them is 0, 1 or 2, the
numbers of the standard streams.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Sequence

from envmanager.errors import UsageError
from envmanager.system.machine import after_fork_in_child

CLOSED = -1
"""Placeholder for a closed descriptor, whose number another file may have by now."""
_registered: set[int] = set()
_LONGEST_WAIT_S = 3600.0
_STDERR = 2


def register(fd: int) -> int:
    """Register ``fd`` as one of the library's descriptors, and return it."""
    _registered.add(fd)
    return fd


def is_registered(fd: int) -> bool:
    """Return whether ``fd`` is registered and open."""
    return fd in _registered


def wait_for(readable: Iterable[int], timeout_s: float, *, writable: Iterable[int] = ()) -> set[int]:
    """Wait until some descriptors are ready or hung up, for ``timeout_s`` but at most an hour. Return them.

    ``select`` takes no descriptor above 1023, and ``poll`` no timeout above 24 days.
    """
    wanted = dict.fromkeys(readable, select.POLLIN)
    for fd in writable:
        wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
    poll = select.poll()
    for fd, mask in wanted.items():
        poll.register(fd, mask)
    return {fd for fd, _ in poll.poll(min(max(0.0, timeout_s), _LONGEST_WAIT_S) * 1000)}


def require_room(n_more: int) -> None:
    """Raise UsageError if the limit of this process does not allow ``n_more`` descriptors.

    Without /proc, the number of open descriptors is unknown and nothing is raised: the kernel refuses one too many.
    """
    import resource  # not on Windows

    limit, ceiling = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        needed = len(os.listdir("/proc/self/fd")) + n_more
    except FileNotFoundError:
        return
    if limit != resource.RLIM_INFINITY and needed > limit:
        at_most = "" if ceiling == resource.RLIM_INFINITY or ceiling >= needed else f" (at most {ceiling} here)"
        raise UsageError(
            f"this process may have {limit} open files (RLIMIT_NOFILE) and would need {needed}: raise the limit with "
            f"`ulimit -n {needed}`{at_most}, or use fewer workers (n_workers=…), each with more environments."
        )


def open_standard() -> None:
    """Open /dev/null on closed standard descriptors.

    Otherwise a pipe of the library may get such a number, and environments would print into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:  # returns the lowest free number
        os.set_inheritable(fd, True)
    os.close(fd)


def lead_nowhere(fds: Sequence[int]) -> None:
    """Redirect descriptors to /dev/null: code that still uses them does no harm, and no new file gets their numbers."""
    with contextlib.suppress(OSError):
        os.close(fds[0])  # frees a number for the next line
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        if fd != null:
            os.dup2(null, fd, inheritable=False)
    if null not in fds:
        os.close(null)


def forget(fd: int) -> None:
    """Unregister ``fd``, because another object closes it."""
    _registered.discard(fd)


def create_memory(name: str) -> int:
    """Create a memfd with mode 0600; return its registered descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return register(fd)


def close(fd: int) -> int:
    """Close a registered descriptor. Return CLOSED, to be stored instead of it."""
    if fd in _registered:
        _registered.discard(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
    return CLOSED


def _after_fork_in_child() -> None:
    """Close the trainer's descriptors."""
    for fd in list(_registered):
        close(fd)


after_fork_in_child(_after_fork_in_child)
