"""Functions to create, register, wait for and close the library's file descriptors.

Register each descriptor that the library keeps open in the trainer. In a child that the user's code forks, all
registered descriptors lead to /dev/null, so that the child can neither keep workers alive nor stop them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envmanager.errors import UsageError
from envmanager.system.machine import after_fork_in_child

if sys.platform == "win32":  # sockets have numbers there too, but only the methods of sockets take them

    def _with_socket(method: Callable[[socket.socket, Any], Any]) -> Callable[[int, Any], Any]:
        def call(fd: int, argument: Any) -> Any:
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
            try:
                return method(borrowed, argument)
            finally:
                borrowed.detach()

        return call

    read, write, _close = _with_socket(socket.socket.recv), _with_socket(socket.socket.send), socket.close
else:
    read, write, _close = os.read, os.write, os.close

READABLE = 1
"""Value of POLLIN and EPOLLIN, which not every system defines."""
CLOSED = -1
"""Sentinel that replaces a closed descriptor, because another file may reuse the number."""
_registered: set[int] = set()
LONGEST_WAIT_S = 3600.0
"""Maximum timeout (s) of one system call that waits, which has a limit. Longer waits make several calls."""
_STDERR = 2
_SLICE_S = 0.1
"""Maximum duration in seconds of one ``select`` on Windows, where a Ctrl-C does not end it."""


def register(fd: int) -> int:
    """Register ``fd``, so that a forked child of the trainer gets /dev/null instead. Return ``fd``."""
    _registered.add(fd)
    return fd


def is_registered(fd: int) -> bool:
    """Return whether ``fd`` is registered. ``close`` and ``forget`` end the registration."""
    return fd in _registered


def wait_for(readable: Iterable[int], timeout_s: float, *, writable: Iterable[int] = ()) -> set[int]:
    """Wait until a descriptor is ready or hung up. Return the ready descriptors, or an empty set after the timeout.

    A timeout above an hour counts as an hour. Uses ``poll``, because ``select`` rejects descriptors above 1023. Windows
    has no ``poll``, so ``select`` is called every 0.1 s there, and a Ctrl-C is raised between two calls.
    """
    if not hasattr(select, "poll"):
        to_read, to_write = list(readable), list(writable)
        deadline = time.monotonic() + min(timeout_s, LONGEST_WAIT_S)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            ready = select.select(to_read, to_write, [], min(left_s, _SLICE_S))
            if any(ready) or left_s <= _SLICE_S:
                return {fd for fds in ready for fd in fds}
    wanted = dict.fromkeys(readable, select.POLLIN)
    for fd in writable:
        wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
    poll = select.poll()
    for fd, mask in wanted.items():
        poll.register(fd, mask)
    return {fd for fd, _ in poll.poll(min(max(0.0, timeout_s), LONGEST_WAIT_S) * 1000)}


class Waiter:
    """A substitute for ``select.epoll`` on systems that lack it. It only waits until descriptors are readable."""

    def __init__(self) -> None:
        self._fds: dict[int, None] = {}

    def register(self, fd: int, _: int = READABLE) -> None:
        self._fds[fd] = None

    def unregister(self, fd: int) -> None:
        del self._fds[fd]

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        return [(fd, READABLE) for fd in wait_for(self._fds, timeout_s)]

    def fileno(self) -> int:
        return CLOSED

    def close(self) -> None:
        self._fds.clear()


def make_waiter() -> Any:
    """Return a new ``select.epoll``, whose descriptor is registered, or a Waiter on systems that lack epoll."""
    if not hasattr(select, "epoll"):
        return Waiter()
    epoll = select.epoll()
    register(epoll.fileno())
    return epoll


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that send without delay. The caller must register the end that it keeps."""
    pair = socket.socketpair()
    for each in pair:
        if each.family == socket.AF_INET:  # on Windows
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return pair


def socket_pair() -> tuple[int, int]:
    """Return the descriptors of two connected non-blocking sockets. Both are registered."""
    ours, theirs = connected_sockets()
    for each in (ours, theirs):
        each.setblocking(False)
    return register(ours.detach()), register(theirs.detach())


def require_room(n_more: int) -> None:
    """Raise UsageError if opening ``n_more`` descriptors would exceed the limit of this process.

    Without /proc, the number of open descriptors is unknown and nothing is raised; opening too many fails later.
    """
    try:
        import resource
    except ImportError:  # on Windows, which has no such limit
        return
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
    """Open /dev/null on every closed standard descriptor (0, 1 or 2).

    Otherwise a pipe of the library could get one of these numbers, and environments would write their output to it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:  # returns the lowest free number
        os.set_inheritable(fd, True)
    os.close(fd)


def lead_nowhere(fds: Sequence[int]) -> None:
    """Redirect open descriptors to /dev/null, so that code may still use them and no new file gets their numbers."""
    with contextlib.suppress(OSError):
        os.close(fds[0])  # frees a number for the next line
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        if fd != null:
            os.dup2(null, fd, inheritable=False)
    if null not in fds:
        os.close(null)


def forget(fd: int) -> None:
    """Remove ``fd`` from the registered descriptors without closing it, because another object closes it."""
    _registered.discard(fd)


def create_memory(name: str) -> int:
    """Create a memfd (anonymous file in memory) with mode 0600. Return its descriptor, which is registered."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return register(fd)


def close(fd: int) -> int:
    """Close ``fd`` if it is registered. Return CLOSED, for the caller to store instead of the number."""
    with contextlib.suppress(KeyError, OSError):
        _registered.remove(fd)  # one call in C, so no second thread closes a number that another file has got
        _close(fd)
    return CLOSED


@after_fork_in_child
def _after_fork_in_child() -> None:
    """Redirect the registered descriptors, which the child has inherited from the trainer, to /dev/null.

    They stay open, because an epoll closes its number when it is freed, and a file of the child could have got it.
    """
    if _registered:
        lead_nowhere(list(_registered))
        _registered.clear()
