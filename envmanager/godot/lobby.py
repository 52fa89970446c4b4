"""A listener on this machine for one engine, and the connections that have not sent their hello yet.

The rule: only an engine that knows the token is accepted. Any program on the machine may connect and send nothing or
something else; it is refused, and the engine may still come. A game that is played in the editor has no token: when one
is awaited, any proper hello is accepted.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
from typing import NamedTuple

from envmanager.godot.frames import BadFrame, FrameReader, Kind
from envmanager.godot.messages import Hello, read_hello
from envmanager.hosts import descriptors

_MOST_PENDING = 16
"""Number of connections without a hello; beyond it the oldest is closed."""


class Arrival(NamedTuple):
    """An engine that has connected: our end of its connection, registered and non-blocking, and its hello."""

    fd: int
    hello: Hello


class Lobby:
    """Accepts connections until an engine has sent its hello. ``fd`` can be read when ``look`` has something to do."""

    def __init__(self, address: tuple[str, int], *, wants_token: bool = True) -> None:
        """Raises OSError if the address is taken."""
        self.token = secrets.token_hex(16)
        self._wants_token = wants_token
        self._listener = socket.socket()
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen(_MOST_PENDING)
            self._listener.setblocking(False)
            self._epoll = select.epoll()
        except BaseException:
            self._listener.close()
            raise
        descriptors.register(self._listener.fileno())
        self.fd = descriptors.register(self._epoll.fileno())
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._pending: dict[int, tuple[socket.socket, FrameReader]] = {}

    @property
    def address(self) -> str:
        """Host and port that the engine must connect to."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def look(self) -> Arrival | None:
        """Return the engine once it has sent its hello, else None; does not wait."""
        while True:
            events = self._epoll.poll(0)
            if not events:
                return None
            for fd, _ in events:
                if fd == self._listener.fileno():
                    self._accept()
                    continue
                hello = self._read_hello_of(fd)
                if hello is not None:
                    return self._arrival(fd, hello)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may have left again
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._pending) == _MOST_PENDING:
                self._refuse(next(iter(self._pending)))
            self._pending[connection.fileno()] = connection, FrameReader(frozenset({Kind.HELLO}))
            descriptors.register(connection.fileno())
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read_hello_of(self, fd: int) -> Hello | None:
        """Return the hello of a connection once it is complete; close the connection if it is refused."""
        connection, reader = self._pending[fd]
        try:
            n_bytes = connection.recv_into(reader.space())
            reader.received(n_bytes)
            frame = reader.next()
            if frame is None and n_bytes:
                return None
            hello = None if frame is None else read_hello(frame.body)
        except BlockingIOError:
            return None
        except (OSError, BadFrame):
            hello = None
        if hello is not None and (
            not self._wants_token or hmac.compare_digest(hello.token.encode(), self.token.encode())
        ):
            return hello
        self._refuse(fd)
        return None

    def _arrival(self, fd: int, hello: Hello) -> Arrival:
        connection, _ = self._pending.pop(fd)
        self._epoll.unregister(fd)
        return Arrival(connection.detach(), hello)

    def _refuse(self, fd: int) -> None:
        connection, _ = self._pending.pop(fd)
        self._epoll.unregister(fd)
        descriptors.forget(fd)
        connection.close()

    def close(self) -> None:
        """Close the listener and all connections. A second call does nothing."""
        for fd in list(self._pending):
            self._refuse(fd)
        if self._listener.fileno() >= 0:
            descriptors.forget(self._listener.fileno())
            self._listener.close()
            descriptors.forget(self.fd)
            self._epoll.close()
            self.fd = descriptors.CLOSED
