"""The trainer's end of one worker's connection, a stream socket that does not block: whole messages go out and come in.

``Channel`` frames them as ``wire`` says; a worker that speaks another protocol has a subclass with its own ``pump``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import attrs

from envmanager.hosts import descriptors
from envmanager.hosts.wire import MESSAGE
from envmanager.system.interrupts import begin_held, end_held

_READ_SIZE = 1 << 20


@attrs.define(eq=False)
class Message:
    """A message of a worker. It repeats the ticket of the command that it responds to."""

    ticket: int
    code: int
    flags: int
    data: Any
    """bytes, or a memoryview with a buffer of its own."""
    busy_ns: int
    ended_ns: int
    """Monotonic ns of its end; the time of its arrival if the worker's clock is not the trainer's."""
    n_ended: int = 0
    """Number of final rows, for a step whose rows are in a block."""


def _not_watched(_: int, __: int) -> None:
    """Ignore the move: no poller watches the channel yet."""


class Channel:
    """Writes commands and reads messages."""

    def __init__(self) -> None:
        self.fd = descriptors.CLOSED
        self.pidfd = descriptors.CLOSED
        self.messages: list[Message] = []
        """The messages that were read and not taken, oldest first."""
        self.hung_up = False
        """Set when the worker has closed its end, which could be read from for ever."""
        self.broken = ""
        """The part of the protocol that the worker has broken, in words, else empty; nothing is read after that."""
        self.on_moved: Callable[[int, int], None] = _not_watched
        """Called with the old and the new descriptor before ``fd`` changes."""
        self._inbox = bytearray()

    def open(self, fd: int, pidfd: int) -> None:
        """Use this socket, non-blocking, whose other end the process behind ``pidfd`` has."""
        self.fd, self.pidfd = fd, pidfd

    def close(self) -> None:
        """Close the socket. A second time does nothing."""
        self.fd = descriptors.close(self.fd)

    def watched_fds(self) -> list[int]:
        """Return the descriptors that become readable when the worker sends something or ends."""
        return [self.pidfd] if self.hung_up else [self.pidfd, self.fd]

    # Out.

    def push(self, message: Any, deadline: float) -> None:
        """Write a whole message. Give up at the deadline or when the worker is gone, which a later wait reports.

        ``deadline`` is in monotonic seconds; what there is room for is written at once, also after it.
        """
        begin_held()  # half a message would leave the worker waiting for the rest for ever
        try:
            self._write(message, deadline)
        finally:
            end_held()

    def _write(self, message: bytes, deadline: float) -> None:
        """Do that where interrupts are held.

        Both ways may be full, so what the worker writes meanwhile is read. Another thread may close the channel
        between any two system calls.
        """
        left = memoryview(message)
        while left and self.fd != descriptors.CLOSED:
            try:
                left = left[os.write(self.fd, left) :]
            except BlockingIOError:
                pass
            except OSError:  # it is gone
                return
            if not left:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            ready = descriptors.wait_for(self.watched_fds(), left_s + 0.001, writable=[self.fd])
            self.pump()
            if self.pidfd in ready:
                return

    # In.

    def pump(self) -> bool:
        """Read what has come into ``messages``, without waiting; return whether there was anything."""
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
        while len(self._inbox) >= MESSAGE.size:
            ticket, code, flags, _, n_ended, length, busy_ns, ended_ns = MESSAGE.unpack_from(self._inbox)
            if len(self._inbox) < MESSAGE.size + length:
                break
            data = bytes(memoryview(self._inbox)[MESSAGE.size : MESSAGE.size + length])
            del self._inbox[: MESSAGE.size + length]
            ended_ns = ended_ns or time.monotonic_ns()
            self.messages.append(Message(ticket, code, flags, data, busy_ns, ended_ns, n_ended))
        return n_new > 0
