"""The trainer's end of the connection to one engine. An answer has the ticket of its command, modulo 2**32.

::

    Lobby ── the engine has sent hello ──▶ connection ── configure, reset, step, call, close ──▶
                                                       ◀── specs, steps, value, error, busy, note ──

The Lobby is a listener that accepts the engine's connection. A command that is sent before the engine has connected is
queued. After a frame that breaks the protocol, the channel reads nothing more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import ClassVar

from envmanager.godot.frames import FROM_ENGINE, PROTOCOL, TICKETS, BadFrame, Frame, FrameReader, Kind
from envmanager.godot.lobby import Lobby
from envmanager.godot.messages import Hello
from envmanager.hosts import descriptors
from envmanager.hosts.wire import Channel, Message


class EngineChannel(Channel):
    """A channel that exchanges frames with one engine. It queues commands until the engine has connected."""

    reader_class: ClassVar[type[FrameReader]] = FrameReader

    def __init__(self, *, max_frame_bytes: int) -> None:
        super().__init__()
        self.hello: Hello | None = None  # hello message of the engine; None until the engine has connected
        self.last_ticket = 0
        """Ticket of the last command, used to compute the full tickets of frames, which arrive modulo 2**32."""
        self.on_aside: Callable[[Frame, int], None]
        """Callback for note and busy frames, which answer no command. It receives the frame and the full ticket."""
        self.on_hung_up: Callable[[], None] = lambda: None
        """Callback that runs when the engine has closed the connection."""
        self.fails_to_start: Callable[[], bool] = lambda: False
        """Callback that runs while no engine has connected, and returns whether the engine is not worth waiting for."""
        self._lobby: Lobby | None = None
        self._waiting: list[bytes] = []  # commands to send once the engine has connected
        self._reader = self.reader_class(FROM_ENGINE - {Kind.HELLO}, max_frame_bytes=max_frame_bytes)

    def await_engine(self, lobby: Lobby, pidfd: int) -> None:
        """Start waiting for an engine to connect to ``lobby``. ``pidfd`` becomes readable when the engine ends."""
        self._lobby, self.fd, self.pidfd = lobby, lobby.fd, pidfd

    def refuse(self, reason: str) -> None:
        """Stop reading, because the engine has broken the protocol; ``reason`` says how."""
        self.broken, self.hung_up = reason, True

    def close(self) -> None:
        """Close the connection, or the listener if no engine has connected yet. A second call does nothing."""
        if self._lobby is not None:
            self._lobby.close()
            self._lobby, self.fd = None, descriptors.CLOSED
        super().close()

    def push(self, message: bytes, deadline: float) -> None:
        if self._lobby is not None:
            self._waiting.append(message)
        else:
            super().push(message, deadline)

    def pump(self) -> bool:
        if self.broken or (self._lobby is not None and not self._meet(self._lobby)):
            return False
        has_read = False
        try:
            while self.fd != descriptors.CLOSED:
                space = self._reader.space()
                try:
                    n_bytes = os.readv(self.fd, [space])
                except BlockingIOError:
                    break
                except OSError:  # the engine ended before it had read all our bytes
                    n_bytes = 0
                if not n_bytes:
                    self.hung_up = True
                    self.on_hung_up()
                    break
                has_read = True
                self._reader.received(n_bytes)
                while (frame := self._reader.next()) is not None:
                    self._take(frame)
                if n_bytes < len(space):  # the socket is empty
                    break
        except BadFrame as error:
            self.refuse(str(error))
        return has_read

    def _meet(self, lobby: Lobby) -> bool:
        """Accept the engine if it has connected, and send the queued commands. Return whether it was accepted."""
        arrival = lobby.look()
        if arrival is None:
            if self.fails_to_start():
                self.refuse("a script error before the engine had connected")
            return False
        self.on_moved(self.fd, arrival.fd)
        self.fd, self.hello = arrival
        self._lobby = None
        lobby.close()
        if self.hello.protocol[0] != PROTOCOL[0]:
            ours, theirs = (".".join(map(str, version)) for version in (PROTOCOL, self.hello.protocol))
            self.refuse(f"a hello in protocol {theirs}, where this library speaks {ours}")
            return False
        for message in self._waiting:
            self.push(message, time.monotonic() + 1.0)  # does not block: these few bytes fit into the socket's buffer
        return True

    def _ticket_of(self, frame: Frame) -> int:
        """Return the ticket of the command that ``frame`` answers. Raises BadFrame if there is no such command."""
        return self.last_ticket - (self.last_ticket - frame.ticket) % TICKETS

    def _take(self, frame: Frame) -> None:
        ticket = self._ticket_of(frame)
        if frame.kind in (Kind.NOTE, Kind.BUSY):  # they answer no command
            self.on_aside(frame, ticket)
        else:
            self.messages.append(Message(ticket, int(frame.kind), 0, frame.body, 0, time.perf_counter_ns()))
