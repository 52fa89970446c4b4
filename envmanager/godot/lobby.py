"""Where an engine arrives: a listener on this machine, and whoever has connected and not yet said who it is.

The rule: only who knows the token gets in. Anybody on the machine may connect, say nothing, or say something else, and
is left outside; the engine may come after them.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
from typing import NamedTuple

from envmanager._workers import descriptors
from envmanager.godot.frames import BadFrame, FrameReader, Kind
from envmanager.godot.messages import Hello, read_hello

_MOST_GUESTS = 16
"""Who has been silent for longest leaves when more come."""


class Arrival(NamedTuple):
    """The engine: our end of its connection, registered and non-blocking, and what it said."""

    fd: int
    hello: Hello


class Lobby:
    """Waits for one engine. ``fd`` can be read when there is something to look at."""

    def __init__(self, address: tuple[str, int]) -> None:
        """OSError when nobody can listen there."""
        self.token = secrets.token_hex(16)
        self._listener = socket.socket()
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen(_MOST_GUESTS)
            self._listener.setblocking(False)
            self._epoll = select.epoll()
        except BaseException:
            self._listener.close()
            raise
        descriptors.register(self._listener.fileno())
        self.fd = descriptors.register(self._epoll.fileno())
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._guests: dict[int, tuple[socket.socket, FrameReader]] = {}

    @property
    def address(self) -> str:
        """Where the engine must connect to: host and port."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def look(self) -> Arrival | None:
        """The engine, once it has said the token; without waiting."""
        while True:
            events = self._epoll.poll(0)
            if not events:
                return None
            for fd, _ in events:
                if fd == self._listener.fileno():
                    self._let_in()
                    continue
                hello = self._listen_to(fd)
                if hello is not None:
                    return self._hand_over(fd, hello)

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # it may have left again
            guest, _ = self._listener.accept()
            guest.setblocking(False)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._guests) == _MOST_GUESTS:
                self._turn_away(next(iter(self._guests)))
            self._guests[guest.fileno()] = guest, FrameReader(frozenset({Kind.HELLO}))
            descriptors.register(guest.fileno())
            self._epoll.register(guest.fileno(), select.EPOLLIN)

    def _listen_to(self, fd: int) -> Hello | None:
        """What a guest says, if it is all there and has the token; who says something else is turned away."""
        guest, reader = self._guests[fd]
        try:
            n_bytes = guest.recv_into(reader.space())
            reader.received(n_bytes)
            frame = reader.next()
            if frame is None and n_bytes:
                return None
            hello = None if frame is None else read_hello(frame.body)
        except BlockingIOError:
            return None
        except (OSError, BadFrame):
            hello = None
        if hello is not None and hmac.compare_digest(hello.token.encode(), self.token.encode()):
            return hello
        self._turn_away(fd)
        return None

    def _hand_over(self, fd: int, hello: Hello) -> Arrival:
        guest, _ = self._guests.pop(fd)
        self._epoll.unregister(fd)
        return Arrival(guest.detach(), hello)

    def _turn_away(self, fd: int) -> None:
        guest, _ = self._guests.pop(fd)
        self._epoll.unregister(fd)
        descriptors.forget(fd)
        guest.close()

    def close(self) -> None:
        """Nobody is waited for any more. A second time does nothing."""
        for fd in list(self._guests):
            self._turn_away(fd)
        if self._listener.fileno() >= 0:
            descriptors.forget(self._listener.fileno())
            self._listener.close()
            descriptors.forget(self.fd)
            self._epoll.close()
            self.fd = descriptors.CLOSED
