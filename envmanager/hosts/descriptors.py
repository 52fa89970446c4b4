"""File descriptors: waiting for them, and closing those that a forked child should not have.

The rule: every descriptor the library opens in the trainer is registered here. A child that the user's code forks
closes all of them, so that it can neither keep workers alive nor stop them. None of them is 0, 1 or 2: those are for
what programs read and print.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Sequence

from envmanager.errors import UsageError
from envmanager.system.machine import after_fork_in_child

CLOSED = -1
"""Placeholder for the number of a closed descriptor; another file may have the number now."""
_registered: set[int] = set()
_LONGEST_WAIT_S = 3600.0
_STDERR = 2


def register(fd: int) -> int:
    """Remember ``fd`` as the library's."""
    _registered.add(fd)
    return fd


def is_registered(fd: int) -> bool:
    """Whether ``fd`` is the library's, and open."""
    return fd in _registered


def wait_for(readable: Iterable[int], timeout_s: float, *, writable: Iterable[int] = ()) -> set[int]:
    """Return the descriptors that can be read or written, or whose other end is gone, after ``timeout_s`` or an hour.

    (``select`` ends at descriptor 1024, and ``poll`` at waits of 24 days.)
    """
    wanted = dict.fromkeys(readable, select.POLLIN)
    for fd in writable:
        wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
    poll = select.poll()
    for fd, mask in wanted.items():
        poll.register(fd, mask)
    return {fd for fd, _ in poll.poll(min(max(0.0, timeout_s), _LONGEST_WAIT_S) * 1000)}


def require_room(n_more: int) -> None:
    """Raise UsageError when this process may not open ``n_more`` descriptors, before the first is opened.

    Without /proc nobody tells how many are open; then the kernel refuses the first that is too many.
    """
    import resource  # Windows has none

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

    Otherwise a pipe of the library may get such a number, and what an environment prints goes into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:  # the lowest that is free
        os.set_inheritable(fd, True)
    os.close(fd)


def lead_nowhere(fds: Sequence[int]) -> None:
    """Let descriptors lead to /dev/null, so that code that still uses them does no harm and no file gets a number."""
    with contextlib.suppress(OSError):
        os.close(fds[0])  # there is room for one more then
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        if fd != null:
            os.dup2(null, fd, inheritable=False)
    if null not in fds:
        os.close(null)


def forget(fd: int) -> None:
    """``fd`` is closed by another object."""
    _registered.discard(fd)


def create_memory(name: str) -> int:
    """A registered descriptor of a nameless file in memory, which only its owner may open (0600)."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return register(fd)


def close(fd: int) -> int:
    """Close a registered descriptor; CLOSED, to be remembered in its place."""
    if fd in _registered:
        _registered.discard(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
    return CLOSED


def _after_fork_in_child() -> None:
    """Close what belongs to the trainer."""
    for fd in list(_registered):
        close(fd)


after_fork_in_child(_after_fork_in_child)
