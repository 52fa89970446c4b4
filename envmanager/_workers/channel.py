"""The trainer's end of one worker's connection: commands go out, messages come in.

How both lie in bytes is said by ``_packed`` and ``pump``, for workers that speak another protocol.

The rule: every message of a worker is matched by ticket. A response to an older request is discarded and counted,
so an interrupt or a time-out can never pair a response with the wrong request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import attrs

from envmanager._workers import descriptors
from envmanager._workers.wire import COMMAND, MESSAGE
from envmanager.system.interrupts import begin_held, end_held

_READ_SIZE = 1 << 20


@attrs.define
class Message:
    """What came through the connection."""

    ticket: int
    code: int
    flags: int
    data: Any
    """bytes, or a memoryview with a buffer of its own."""
    busy_ns: int
    ended_ns: int


def _unheard(_: int) -> None:
    """Nobody listens yet."""


def _not_watched(_: int, __: int) -> None:
    """Nobody watches yet."""


class Channel:
    """Writes commands and reads messages."""

    def __init__(self) -> None:
        self.fd = descriptors.CLOSED
        self.pidfd = descriptors.CLOSED
        self.ticket = 0
        """Of the last command."""
        self.step_ticket = 0
        """Of the step in flight; 0 when there is none."""
        self.asked_ticket = 0
        """Of the last other command."""
        self.hung_up = False
        """Whether the worker has closed its end, which could be read from for ever."""
        self.broken = ""
        """What it sent that its protocol does not allow; nothing is read after that."""
        self.on_late: Callable[[int], None] = _unheard
        """Called with the ticket of a response to an older request."""
        self.on_moved: Callable[[int, int], None] = _not_watched
        """Called with the old and the new descriptor, should it get another."""
        self._inbox = bytearray()
        self._messages: list[Message] = []

    def open(self, fd: int, pidfd: int) -> None:
        """Use this socket, non-blocking, whose other end the process behind ``pidfd`` has."""
        self.fd, self.pidfd = fd, pidfd

    def close(self) -> None:
        """Have no descriptor any more."""
        self.fd = descriptors.close(self.fd)

    def watched_fds(self) -> list[int]:
        """What can be read when the worker sends something or ends."""
        return [self.pidfd] if self.hung_up else [self.pidfd, self.fd]

    # Out.

    def ask(self, code: int, slot: int, data: bytes, deadline: float) -> None:
        """Send a command whose response is a message."""
        self.asked_ticket = self.ticket + 1
        self.send(code, slot, data, deadline)

    def send(self, code: int, slot: int, data: bytes, deadline: float) -> None:
        """Send a command that has no response."""
        message = self._packed(self.ticket + 1, code, slot, 0, data)
        self.ticket += 1
        self._push(message, deadline)

    def step(self, code: int, slot: int, flags: int, data: bytes, deadline: float) -> None:
        """Send a step, whose response comes out of the step queue. Only where interrupts are held."""
        ticket = self.ticket + 1
        message = self._packed(ticket, code, slot, flags, data)
        self.ticket = self.step_ticket = ticket  # not before there was memory for the message
        try:
            n_written = os.write(self.fd, message)
        except OSError:  # full, or gone
            n_written = 0
        if n_written < len(message):
            self._push(message[n_written:], deadline)

    def _packed(self, ticket: int, code: int, slot: int, flags: int, data: bytes) -> bytes:
        return COMMAND.pack(ticket, code, slot, flags, 0, len(data)) + data

    def _push(self, message: bytes, deadline: float) -> None:
        """Write all of it. Gives up at the deadline or when the worker is gone; who waits for a response notices."""
        if self.fd == descriptors.CLOSED:
            return
        begin_held()  # half a message would leave the worker waiting for the rest for ever
        try:
            n_written = _write(self.fd, message)
            if n_written < len(message):
                self._push_rest(memoryview(message)[n_written:], deadline)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            end_held()

    def _push_rest(self, left: memoryview, deadline: float) -> None:
        """Both ways may be full: what the worker writes meanwhile is read."""
        while left and self.fd != descriptors.CLOSED:
            left = left[_write(self.fd, left) :]
            if left and (time.monotonic() >= deadline or not self._wait_for_room(deadline)):
                return

    def _wait_for_room(self, deadline: float) -> bool:
        left_s = deadline - time.monotonic()
        ready = descriptors.wait_for(self.watched_fds(), left_s + 0.001, writable=[self.fd])
        self.pump()
        return self.pidfd not in ready

    # In.

    def pump(self) -> bool:
        """Read what has come, without waiting; whether there was anything."""
        n_new = 0
        while self.fd != descriptors.CLOSED:
            try:
                part = os.read(self.fd, _READ_SIZE)
            except BlockingIOError:
                break
            except OSError:  # it ended with something of ours unread
                part = b""
            if not part:
                self.hung_up = True
                break
            n_new += len(part)
            self._inbox += part
        self._split_inbox()
        return n_new > 0

    def _split_inbox(self) -> None:
        while len(self._inbox) >= MESSAGE.size:
            ticket, code, flags, _, _, length, busy_ns, ended_ns = MESSAGE.unpack_from(self._inbox)
            if len(self._inbox) < MESSAGE.size + length:
                break
            data = bytes(memoryview(self._inbox)[MESSAGE.size : MESSAGE.size + length])
            del self._inbox[: MESSAGE.size + length]
            self._sort(Message(ticket, code, flags, data, busy_ns, ended_ns))

    def _sort(self, message: Message) -> None:
        """Keep a message that somebody waits for."""
        if message.ticket in (self.step_ticket, self.asked_ticket):
            self._messages.append(message)
        else:
            self.on_late(message.ticket)

    @property
    def has_messages(self) -> bool:
        """Whether there are messages to take."""
        return bool(self._messages)

    def take(self, ticket: int) -> Message | None:
        """The message with this ticket, once all of it is here."""
        for index, message in enumerate(self._messages):
            if message.ticket == ticket:
                return self._messages.pop(index)
        return None


def _write(fd: int, data: bytes | memoryview) -> int:
    """How much of ``data`` there was room for."""
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0
