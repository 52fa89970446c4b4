"""A game that somebody plays in the editor, in the place of a process that was started here.

::

    manager listens at engine.attach ◀── the game connects ──▶ it trains ── its connection ends ──▶ it has ended

The rule: nothing is done to it. It is asked to close, and whoever gives it up waits for it no longer.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal

from envmanager.errors import UsageError
from envmanager.godot.lobby import Lobby
from envmanager.hosts import descriptors

_logger = logging.getLogger("envmanager")


class AttachedGame:
    """Stands for the game's process, of which nothing is known but its connection."""

    pid = None

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.pidfd = descriptors.register(self._epoll.fileno())
        """Readable when the game has hung up, or was given up."""
        self._given_up_fd = descriptors.register(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._epoll.register(self._given_up_fd, select.EPOLLIN)
        self._has_come = False

    def arrived(self, fd: int) -> None:
        """The game is here; ``fd`` is our end of its connection."""
        self._has_come = True
        self._epoll.register(fd, select.EPOLLRDHUP)

    def asked_to_close(self) -> None:
        """The game ends by itself now; if it never came, there is nobody to wait for."""
        if not self._has_come:
            self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Give the game up instead of sending a signal: it notices that the connection is closed."""
        if self._given_up_fd != descriptors.CLOSED:
            os.eventfd_write(self._given_up_fd, 1)

    def core_wait_ns(self) -> int:
        """Return 0: the game's process is unknown."""
        return 0

    def exit_name(self) -> str:
        """Return the reason of the end: the connection was closed."""
        return "EOF"

    def release(self) -> None:
        """Give back its descriptors. A second time does nothing."""
        self._given_up_fd = descriptors.close(self._given_up_fd)
        if not self._epoll.closed:
            descriptors.forget(self.pidfd)
            self._epoll.close()


def open_lobby(address: tuple[str, int]) -> Lobby:
    """Return a lobby that awaits the game with any token: a game started from the editor has none.

    Logs what to do, through the logger ``envmanager``. Raises UsageError if the port is taken.
    """
    host, port = address
    try:
        lobby = Lobby(address, wants_token=False)
    except OSError as error:
        taken = "Another program listens there: name" if error.errno == errno.EADDRINUSE else "Name"
        raise UsageError(
            f"cannot listen for a game at {host}:{port}: {error.strerror}. {taken} another address as engine.attach."
        ) from error
    where = lobby.address
    _logger.warning("waiting for a game at %s: play it in the editor with ENVMANAGER_ADDRESS=%s", where, where)
    return lobby
