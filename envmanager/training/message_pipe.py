"""Messages between a training run and its learner, over a socket pair.

::

    send(message) ── queue ── exchange ──▶ socket ──▶ exchange ── inbox ──▶ receive()

The rule: only ``exchange`` waits, for ``timeout_s`` at most. An interrupt never cuts a message short. Unsent bytes
stay queued, and bytes that were read are kept.
"""

from __future__ import annotations

import io
import pickle
import struct
import threading
import time
from typing import Any

from envmanager.hosts import descriptors
from envmanager.system.interrupts import allow_interrupts, defer_interrupts

_LENGTH = struct.Struct("<Q")
_READ_SIZE = 1 << 20


class MessagePipe:
    """One end of a pipe for pickled messages. Takes ownership of the socket ``fd``, and makes it non-blocking."""

    def __init__(self, fd: int) -> None:
        descriptors.set_blocking(fd, False)
        self._fd = descriptors.register(fd)
        self._unsent: list[memoryview] = []
        self._inbox = bytearray()
        self.hung_up = False
        """Whether either end is known to be closed. Messages that were already read can still be received."""
        self._lock = threading.RLock()
        """Lock held while the socket is used and while ``close`` closes it, perhaps in another thread."""

    @property
    def has_unsent(self) -> bool:
        """Whether bytes of a message are still queued. Always False once ``hung_up`` is True."""
        return bool(self._unsent)

    def send(self, message: Any) -> None:
        """Queue a message, and write as much as possible to the socket without blocking."""
        buffer = io.BytesIO()
        buffer.write(bytes(_LENGTH.size))
        pickle.dump(message, buffer, protocol=5)
        view = buffer.getbuffer()
        _LENGTH.pack_into(view, 0, len(view) - _LENGTH.size)
        with defer_interrupts(), self._lock:
            self._unsent.append(view)
            self._write()

    def exchange(self, timeout_s: float) -> bool:
        """Wait until the socket is ready, then write queued bytes and read new ones. Return False only on timeout."""
        deadline = time.monotonic() + timeout_s
        with defer_interrupts():
            while (fd := self._fd) != descriptors.CLOSED and not self.hung_up:
                with allow_interrupts():
                    writable = [fd] if self._unsent else []
                    ready = descriptors.wait_for([fd], deadline - time.monotonic(), writable=writable)
                if ready:
                    with self._lock:
                        self._write()
                        self._read()
                    break
                if time.monotonic() >= deadline:
                    return False
        return True

    def receive(self) -> Any:
        """Return the next message, or None if none has arrived. Raises EOFError if no more messages can arrive."""
        with defer_interrupts():
            message = self._take()
            if message is None and not self.hung_up:
                with self._lock:
                    self._read()
                message = self._take()
        if message is None and self.hung_up:
            raise EOFError
        return message

    def close(self) -> None:
        """Close the socket and discard unsent bytes."""
        with self._lock:
            self._fd = descriptors.close(self._fd)
            self._hang_up()

    def _write(self) -> None:
        while self._unsent:
            try:
                n_written = descriptors.write(self._fd, self._unsent[0])
            except BlockingIOError:
                return
            except OSError:  # the other end is closed, which the next read reports
                self._unsent.clear()
                return
            if n_written < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][n_written:]
            else:
                del self._unsent[0]

    def _read(self) -> None:
        while not self.hung_up:
            try:
                part = descriptors.read(self._fd, _READ_SIZE)
            except BlockingIOError:
                return
            except OSError:  # the other end closed without reading all of our bytes
                part = b""
            if part:
                self._inbox += part
            else:
                self._hang_up()

    def _hang_up(self) -> None:
        self.hung_up = True
        self._unsent.clear()

    def _take(self) -> Any:
        if len(self._inbox) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._inbox)[0]
        if len(self._inbox) < end:
            return None
        with memoryview(self._inbox)[_LENGTH.size : end] as data:
            message = pickle.loads(data)
        del self._inbox[:end]
        return message
