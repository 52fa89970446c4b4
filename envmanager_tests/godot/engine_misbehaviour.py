"""Faults of a fake engine: ways in which it breaks the protocol on purpose, and moments.

::

    garbage          in the answer to the first step        busy=3@configure     in the answer to configure
    half@3           in the answer to the third             wrong_token          at the start; has no moment

Before that moment the engine keeps the protocol, and after it too if it can go on.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping

import attrs

from envmanager.errors import UsageError
from envmanager.godot.frames import HEADER, Kind, pack

AT_START = ("stranger", "silent_stranger", "silent", "wrong_token", "other_major")
"""Modes that strike before the first request."""

_FOREVER_S = 600
"""Time after which a hanging engine ends by itself, in case the process that should kill it was killed."""


def _header(frame: bytes) -> list[int]:
    return list(HEADER.unpack_from(frame))


def _with_header(frame: bytes, **changed: int) -> bytes:
    names = ("length", "kind", "zero", "zeros", "ticket")
    fields = dict(zip(names, _header(frame), strict=True)) | changed
    return HEADER.pack(*fields.values()) + frame[HEADER.size :]


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda _: b"garbage! " * 500,
    "oversize": lambda frame: _with_header(frame, length=0xFFFFFFF0),
    "bytes_too_many": lambda frame: _with_header(frame, length=_header(frame)[0] + 4) + b"more",
    "bytes_missing": lambda frame: _with_header(frame, length=_header(frame)[0] - 4)[:-4],
    "unknown_kind": lambda frame: _with_header(frame, kind=63),
    "reserved": lambda frame: _with_header(frame, zeros=1),
    "empty": lambda frame: _with_header(frame, length=0)[: HEADER.size],
}
"""Functions from the right answer to the one sent in its place, by mode."""


@attrs.define
class Misbehaviour:
    """A fault of a fake engine, written ``mode``, or ``mode=3`` to repeat it, and ``@moment``.

    The moment is the number of a step, the first being 1, or the request to which the answer is wrong every time:
    "configure", "reset" or "call". ``pause_s`` is the time between two bytes or two busy frames.
    """

    mode: str = ""
    times: int = 1
    moment: str = "1"
    pause_s: float = 0.0

    @classmethod
    def of(cls, text: str, *, pause_s: float = 0.0) -> Misbehaviour:
        """Parse ``mode[=times][@moment]``; raise UsageError for an unknown mode."""
        left, _, moment = text.partition("@")
        mode, _, times = left.partition("=")
        if mode and mode not in MODES:
            raise UsageError(f"there is no misbehaviour {mode!r}; there are {', '.join(MODES)}.")
        return cls(mode, int(times or 1), moment or "1", pause_s)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Misbehaviour:
        """Read the variables ENVMANAGER_FAKE_MODE, _PAUSE_S and _ONCE.

        ONCE is the path of a file that does not exist yet: only the engine that creates it misbehaves.
        """
        chosen = cls.of(
            environ.get("ENVMANAGER_FAKE_MODE", ""), pause_s=float(environ.get("ENVMANAGER_FAKE_PAUSE_S", 0))
        )
        once = environ.get("ENVMANAGER_FAKE_ONCE")
        if once is not None and chosen.mode:
            try:
                os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                return cls()
        return chosen

    def is_at_start(self, mode: str) -> bool:
        """Return whether this is the fault's mode and one that strikes at the start."""
        return self.mode == mode and mode in AT_START

    def strikes(self, asked: Kind, step: int) -> bool:
        """Return whether the answer to ``asked`` is to be wrong; ``step`` is the number of the last step requested."""
        if not self.mode or self.mode in AT_START:
            return False
        if asked is Kind.STEP:
            goes_on = self.mode in _FROM_THEN_ON and self.moment.isdecimal() and int(self.moment) <= step
            return goes_on or self.moment == str(step)
        return self.moment == asked.name.lower()

    def send(self, connection: socket.socket, frame: bytes) -> None:
        """Send the answer ``frame`` in the wrong way. May not return."""
        if self.mode in SPOILED:
            connection.sendall(SPOILED[self.mode](frame))
        else:
            _SENDS[self.mode](self, connection, frame)

    def pause(self) -> None:
        """Sleep for ``pause_s``."""
        if self.pause_s:
            time.sleep(self.pause_s)

    def _bytewise(self, connection: socket.socket, frame: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(frame)):
            connection.sendall(frame[at : at + 1])
            self.pause()

    def _half(self, connection: socket.socket, frame: bytes) -> None:
        connection.sendall(frame[: len(frame) // 2])
        _wait_for_the_end(connection)

    def _half_and_die(self, connection: socket.socket, frame: bytes) -> None:
        connection.sendall(frame[: len(frame) // 2])
        os._exit(3)

    def _silent(self, connection: socket.socket, frame: bytes) -> None:
        _wait_for_the_end(connection)

    def _quits(self, connection: socket.socket, frame: bytes) -> None:
        sys.stdout.flush()
        os._exit(0)

    def _hangs(self, connection: socket.socket, frame: bytes) -> None:
        time.sleep(_FOREVER_S)

    def _busy(self, connection: socket.socket, frame: bytes) -> None:
        ticket = _header(frame)[-1]
        for _ in range(self.times):
            connection.sendall(pack(Kind.BUSY, ticket))
            self.pause()
        connection.sendall(frame)

    def _old_ticket(self, connection: socket.socket, frame: bytes) -> None:
        connection.sendall(_with_header(frame, ticket=_header(frame)[-1] - 1) + frame)

    def _note(self, connection: socket.socket, frame: bytes) -> None:
        connection.sendall(pack(Kind.NOTE, 0, b'{"name":"wave","height":3}') + frame)


_SENDS: dict[str, Callable[[Misbehaviour, socket.socket, bytes], None]] = {
    "bytewise": Misbehaviour._bytewise,
    "half": Misbehaviour._half,
    "half_and_die": Misbehaviour._half_and_die,
    "mute": Misbehaviour._silent,
    "quits": Misbehaviour._quits,
    "hangs": Misbehaviour._hangs,
    "busy": Misbehaviour._busy,
    "old_ticket": Misbehaviour._old_ticket,
    "note": Misbehaviour._note,
}
_FROM_THEN_ON = ("bytewise",)
MODES = (*AT_START, *SPOILED, *_SENDS)


def _wait_for_the_end(connection: socket.socket) -> None:
    """Send nothing more until the trainer closes the connection, then exit."""
    connection.settimeout(_FOREVER_S)
    while connection.recv(1 << 16):
        pass
    os._exit(0)
