"""A listener on the loopback address that accepts the connection of one engine, whose first message is its hello.

The hello of an engine that the trainer starts must have the listener's token, else its connection is closed. A game
that the user plays in the editor has no token, so a listener that waits for such a game accepts any valid hello.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import logging
import os
import secrets
import socket
from typing import NamedTuple

from envmanager.errors import UsageError
from envmanager.godot.frames import BadFrame, FrameReader, Kind
from envmanager.godot.messages import Hello, read_hello
from envmanager.hosts import descriptors

_MOST_PENDING = 16  # connections without a hello; one more closes the oldest
_IN_MODIFY = 2
_logger = logging.getLogger("envmanager")


class Arrival(NamedTuple):
    """An engine that has connected. ``fd`` is the trainer's end of the connection, which is non-blocking."""

    fd: int
    hello: Hello


class Lobby:
    """A listener that accepts connections until an engine has sent its hello. Call ``look`` when ``fd`` is readable."""

    how_to_play = "play it in the editor with ENVMANAGER_ADDRESS set to that"
    """Advice for the user on how to make a game in the editor connect to the listener."""

    def __init__(self, attach: str | None = None) -> None:
        """Listen for one engine. If the user starts the game, ``attach`` is the address to listen at; otherwise None.

        With ``attach``, logs how to start the game, and raises UsageError if the port cannot be used.
        """
        port = 0 if attach is None else int(attach.rpartition(":")[2])
        try:
            listener = socket.create_server(("127.0.0.1", port), backlog=_MOST_PENDING)
        except OSError as error:
            if attach is None:
                raise
            reason = os.strerror(error.errno or 0)
            taken = "Another program listens there: name" if error.errno == errno.EADDRINUSE else "Name"
            raise UsageError(
                f"cannot listen for a game at 127.0.0.1:{port}: {reason}. {taken} another address as engine.attach."
            ) from error
        listener.setblocking(False)
        self.address = "{}:{}".format(*listener.getsockname())  # host and port that the engine must connect to
        self.token = secrets.token_hex(16)
        self._wants_token = attach is None
        self._listener = listener
        self._notices = descriptors.CLOSED
        self._pending: dict[int, FrameReader] = {}  # readers of the connections without a hello, by descriptor
        self._epoll = descriptors.make_waiter()
        self._epoll.register(descriptors.register(listener.fileno()), descriptors.READABLE)
        self.fd = self._epoll.fileno()
        if attach is not None:
            _logger.warning("waiting for a game at %s: %s", self.address, self.how_to_play)

    def watch_writes(self, fd: int) -> None:
        """Make ``self.fd`` readable after each write to the file ``fd`` too, if the system has an inotify to spare."""
        libc = ctypes.CDLL(None)
        notices = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if notices >= 0:
            self._notices = descriptors.register(notices)
            libc.inotify_add_watch(notices, f"/proc/self/fd/{fd}".encode(), _IN_MODIFY)
            self._epoll.register(notices, descriptors.READABLE)

    def look(self) -> Arrival | None:
        """Accept connections and read hellos, without blocking. Return the engine, or None until its hello arrives."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._notices:
                os.read(fd, 1 << 16)
            elif fd in self._pending:
                hello = self._read_hello(fd)
                if hello is not None:
                    return Arrival(fd, hello)
        return None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client may have disconnected
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._pending) == _MOST_PENDING:
                oldest = next(iter(self._pending))
                self._forget(oldest)
                descriptors.close(oldest)
            fd = descriptors.register(connection.detach())
            self._pending[fd] = FrameReader(frozenset({Kind.HELLO}))
            self._epoll.register(fd, descriptors.READABLE)

    def _read_hello(self, fd: int) -> Hello | None:
        """Return the hello of connection ``fd``, or None if it is incomplete or refused. Close a refused connection."""
        reader, hello = self._pending[fd], None
        try:
            n_bytes = os.readv(fd, [reader.space()])
            reader.received(n_bytes)
            frame = reader.next()
            if frame is not None:
                hello = read_hello(frame.body)
            elif n_bytes:
                return None
        except BlockingIOError:
            return None
        except (OSError, BadFrame):
            pass
        self._forget(fd)
        if hello is None or (self._wants_token and not hmac.compare_digest(hello.token.encode(), self.token.encode())):
            descriptors.close(fd)
            return None
        return hello

    def _forget(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._pending[fd]

    def close(self) -> None:
        """Close the listener and the connections that have sent no hello. A second call does nothing."""
        if self.fd != descriptors.CLOSED:
            for fd in (*self._pending, self._listener.detach(), self._notices):
                descriptors.close(fd)
            descriptors.forget(self.fd)
            self._epoll.close()
            self.fd = descriptors.CLOSED
