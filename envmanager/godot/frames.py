"""Frames between engine and trainer: packing, parsing, and JSON bodies.

::

    u32 length of the body | u8 kind | u8 0 | u16 0 | u32 ticket | body        all little endian

The rule: a header is checked before memory is allocated for its body. A bad header is refused as soon as its twelve
bytes are read, so no sender can make the trainer allocate a body beyond the limit of the frame's kind.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

import numpy as np

PROTOCOL = (1, 0)  # major, minor; another major is refused, unknown keys in JSON bodies are ignored

HEADER = struct.Struct("<IBBHI")  # fields of a frame's header: length of the body, kind, 0, 0, ticket

TICKETS = 2**32  # modulus of the tickets in frames: a frame carries the command's ticket modulo this number


class Kind(enum.IntEnum):
    """The kind of a frame. The trainer sends the kinds from 64 on, and the engine sends the others."""

    HELLO = 1
    SPECS = 2
    STEPS = 3
    VALUE = 4
    ERROR = 5
    BUSY = 6
    NOTE = 7
    CONFIGURE = 65
    RESET = 66
    STEP = 67
    CALL = 68
    CLOSE = 69
    BEGIN = 70


FROM_TRAINER = frozenset(kind for kind in Kind if kind >= 64)
FROM_ENGINE = frozenset(Kind) - FROM_TRAINER
WITHOUT_TICKET = frozenset({Kind.HELLO, Kind.NOTE, Kind.BEGIN})  # kinds that belong to no request, so their ticket is 0

HELLO_LIMIT = 64 << 10
JSON_LIMIT = 1 << 20
MAX_DEPTH = 32  # maximum depth of nested lists and objects in JSON
MAX_DIGITS = 20  # maximum number of digits of a whole number in JSON, enough for any 64-bit integer


class BadFrame(Exception):
    """Error raised for bytes that are not a frame of this protocol, or for a body that does not fit its frame's kind.

    Its text describes what is wrong. EngineLink reports the error, usually as a ``ProtocolError``.
    """


class TooLarge(BadFrame):
    """Error raised for specs in which an array, or the number of agents, is larger than the protocol allows."""


class Frame(NamedTuple):
    """A received frame. The body has its own buffer, which no later frame overwrites."""

    kind: Kind
    ticket: int
    body: memoryview


def limit_of(kind: Kind, max_frame_bytes: int) -> int:
    """Return the maximum body size (bytes) for a kind of frame: ``max_frame_bytes`` for the kinds that carry arrays."""
    limits = dict.fromkeys((Kind.STEPS, Kind.STEP), max_frame_bytes) | dict.fromkeys((Kind.BUSY, Kind.CLOSE), 0)
    return {**limits, Kind.HELLO: HELLO_LIMIT}.get(kind, JSON_LIMIT)


def pack(kind: Kind, ticket: int = 0, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), kind, 0, 0, ticket % TICKETS) + body


_SCRATCH_BYTES = 64 << 10
_KINDS = {int(kind): kind for kind in Kind}


class FrameReader:
    """A parser that receives bytes in pieces of any size and returns frames.

    Receive into ``space()``, which may be the body's own buffer; call ``received``, then ``next`` until there is none.
    A frame of a kind that is not in ``kinds`` raises BadFrame. The reader holds at most 64 KiB and one incomplete
    frame. It must not be used after a BadFrame.
    """

    header = HEADER
    """Layout of a header. A subclass that changes it must also override ``_read_header``."""

    def __init__(self, kinds: frozenset[Kind] = FROM_ENGINE, *, max_frame_bytes: int = 64 << 20) -> None:
        self._limits = {kind: limit_of(kind, max_frame_bytes) for kind in kinds}
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0
        self._frame: Frame | None = None  # frame whose body is incomplete
        self._filled = 0  # number of bytes of the incomplete body received so far

    def space(self) -> memoryview:
        """Return a buffer for the next received bytes. Raises RuntimeError if ``next`` must be called first."""
        space = self._scratch[self._end :] if self._frame is None else self._frame.body[self._filled :]
        if not space:  # recv_into would return 0, as at the end of the connection
            raise RuntimeError("there are frames to take: call next() until it returns None")
        return space

    def received(self, n_bytes: int) -> None:
        """Record that ``n_bytes`` bytes were written into the buffer that ``space`` returned."""
        if self._frame is None:
            self._end += n_bytes
        else:
            self._filled += n_bytes

    def next(self) -> Frame | None:
        """Return the next complete frame; None if there is none yet. Raises BadFrame for an invalid header."""
        frame = self._frame = self._frame or self._begin()
        if frame is None or self._filled < len(frame.body):
            return None
        self._frame = None
        return frame

    def _begin(self) -> Frame | None:
        """Parse a header. Return its frame, whose body may still be incomplete; None if the header is incomplete."""
        start, end = self._start, self._end
        if end - start < self.header.size:
            self._scratch[: end - start] = self._scratch[start:end]
            self._start, self._end = 0, end - start
            return None
        length, kind, ticket = self._read_header(*self.header.unpack_from(self._scratch, start))
        start += self.header.size
        self._filled = min(length, end - start)
        body = np.empty(length, np.uint8).data  # not a bytearray, which would be zeroed first
        body[: self._filled] = self._scratch[start : start + self._filled]
        self._start = start + self._filled
        if self._start == end:
            self._start = self._end = 0
        return Frame(kind, ticket, body)

    def _read_header(self, length: int, *rest: int) -> tuple[int, Kind, int]:
        """Check a header; return the length of the body, the kind and the ticket. Raises BadFrame if it is invalid."""
        number, zero, zeros, ticket = rest
        kind = _KINDS.get(number)
        if kind is None or kind not in self._limits:
            expected = ", ".join(f"{kind.name.lower()} ({kind:d})" for kind in sorted(self._limits))
            raise BadFrame(f"a frame of kind {number}, where only {expected} may come")
        if zero or zeros:
            raise BadFrame(f"a {kind.name.lower()} frame whose reserved bytes are {zero} and {zeros}, not 0")
        limit = self._limits[kind]
        if length > limit:
            option = " (engine.max_frame_mb)" if kind is Kind.STEPS else ""
            raise BadFrame(f"a {kind.name.lower()} frame of {length} bytes, where {limit} are the most{option}")
        if ticket and kind in WITHOUT_TICKET:
            raise BadFrame(f"a {kind.name.lower()} frame with ticket {ticket}, though it answers no request")
        return length, kind, ticket


def dump_json(message: dict[str, Any]) -> bytes:
    """Encode a message as a JSON body. Raises ValueError or TypeError for values that JSON lacks, such as NaN."""
    return json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def parse_json(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse a JSON body and return its top-level object. Raises BadFrame if the body is invalid."""
    try:
        text = str(body, "utf-8")
        message = json.loads(text, parse_constant=_refuse_constant, parse_int=_whole_number)
        if "\\u" in text:  # half a surrogate pair is valid JSON, but the text could not be written anywhere
            json.dumps(message, ensure_ascii=False).encode()
    except RecursionError:
        raise BadFrame("JSON that is nested too deep") from None
    except ValueError as error:  # UnicodeError and JSONDecodeError are ValueErrors
        raise BadFrame(f"a body that is no JSON in UTF-8: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame(f"JSON whose top is no object but {type(message).__name__}")
    if not _is_shallow(message):
        raise BadFrame(f"JSON that is nested deeper than {MAX_DEPTH} levels")
    return message


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:  # int() takes time quadratic in the number of digits
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _is_shallow(value: dict[str, Any] | list[Any], depth: int = MAX_DEPTH) -> bool:
    children = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(child, depth - 1) for child in children if isinstance(child, dict | list))
