"""The trainer's end of one engine's connection: frames both ways, matched by ticket as everywhere.

::

    Lobby ── the engine has said hello ──▶ connection ── configure, reset, step, call ──▶
                                                       ◀── specs, steps, value, error ──

The rule: a command that is asked before the engine has connected waits here. After a frame that the protocol does not
allow nothing is read any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from envmanager.godot.frames import FROM_ENGINE, PROTOCOL, BadFrame, Frame, FrameReader, Kind
from envmanager.godot.lobby import Lobby
from envmanager.godot.messages import Hello, read_note
from envmanager.hosts import descriptors
from envmanager.hosts.wire import Channel, Message

TICKETS = 2**32
"""A frame has the ticket of a command modulo this."""
_MOST_BUSY = 10
"""Most messages in which an engine may say that it is still busy with one request."""


def _nothing(*_: Any) -> None:
    """Do nothing: the default of a callback."""


class EngineChannel(Channel):
    """Writes commands and reads answers; before that, awaits the engine in a lobby."""

    def __init__(self, *, max_frame_bytes: int) -> None:
        super().__init__()
        self.hello: Hello | None = None
        """The engine's hello; None until it has connected."""
        self.last_ticket = 0
        """The ticket of the last command."""
        self.on_busy: Callable[[int], None] = _nothing
        """Called with a ticket when the engine asks for more time for its response."""
        self.on_note: Callable[[str, dict[str, Any]], None] = _nothing
        """Called with what the engine reports by itself."""
        self.on_arrived: Callable[[int], None] = _nothing
        """Called with our end of the connection when the engine is here."""
        self._lobby: Lobby | None = None
        self._waiting: list[bytes] = []
        """Commands that are sent when the engine is here."""
        self._reader = FrameReader(FROM_ENGINE - {Kind.HELLO}, max_frame_bytes=max_frame_bytes)
        self._n_busy = 0

    def await_engine(self, lobby: Lobby, pidfd: int) -> None:
        """Begin to wait for an engine; ``pidfd`` is readable when its process has ended."""
        self._lobby, self.fd, self.pidfd = lobby, lobby.fd, pidfd

    def close(self) -> None:
        """Close all descriptors."""
        if self._lobby is not None:
            self._lobby.close()
            self._lobby, self.fd = None, descriptors.CLOSED
        super().close()

    # Out.

    def push(self, message: bytes, deadline: float) -> None:
        if self._lobby is not None:
            self._waiting.append(message)
        else:
            super().push(message, deadline)

    # In.

    def pump(self) -> bool:
        """Read what has come, without waiting; whether a frame, or the beginning of one, was among it.

        Whoever sends a frame byte by byte gains no time with that.
        """
        if self.broken or (self._lobby is not None and not self._meet(self._lobby)):
            return False
        try:
            return self._read()
        except BadFrame as error:
            self.broken, self.hung_up = error.reason, True
            return True

    def _meet(self, lobby: Lobby) -> bool:
        """Whether the engine is here now."""
        arrival = lobby.look()
        if arrival is None:
            return False
        self.on_moved(self.fd, arrival.fd)
        self.fd, self.hello = arrival.fd, arrival.hello
        self._lobby = None
        lobby.close()
        self.on_arrived(arrival.fd)
        if arrival.hello.protocol[0] != PROTOCOL[0]:
            ours, theirs = (".".join(map(str, version)) for version in (PROTOCOL, arrival.hello.protocol))
            self.broken, self.hung_up = f"a hello in protocol {theirs}, where this library speaks {ours}", True
            return False
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.push(message, time.monotonic() + 1.0)  # nothing fills so small a pipe
        return True

    def _read(self) -> bool:
        was_midway, any_frame, any_byte = self._reader.is_midway, False, False
        while self.fd != descriptors.CLOSED:
            space = self._reader.space()
            try:
                n_bytes = os.readv(self.fd, [space])
            except BlockingIOError:
                break
            except OSError:  # it ended with something of ours unread
                n_bytes = 0
            if not n_bytes:
                self.hung_up = True
                break
            any_byte = True
            self._reader.received(n_bytes)
            while (frame := self._reader.next()) is not None:
                any_frame = True
                self._note(frame)
            if n_bytes < len(space):  # there was no more
                break
        return any_frame or (any_byte and not was_midway)

    def _note(self, frame: Frame) -> None:
        if frame.kind is Kind.NOTE:
            self.on_note(*read_note(frame.body))
            return
        ticket = self.last_ticket - (self.last_ticket - frame.ticket) % TICKETS
        if frame.kind is Kind.BUSY:
            if self._n_busy < _MOST_BUSY:
                self._n_busy += 1
                self.on_busy(ticket)
            return
        self._n_busy = 0
        self.messages.append(Message(ticket, int(frame.kind), 0, frame.body, 0, time.monotonic_ns()))
