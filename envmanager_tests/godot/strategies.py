"""Random specs, steps and frames, and how often hypothesis tries them.

``ENVMANAGER_FUZZ_EXAMPLES=100000 pytest envmanager_tests/godot/test_frames.py`` has the parsers try so many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.godot.frames import FROM_ENGINE, WITHOUT_TICKET, Frame, FrameReader, limit_of, pack

# What is found is repeated by the seed that hypothesis prints; a run of so many keeps no examples.
fuzzing = hypothesis.settings(
    max_examples=int(os.environ.get("ENVMANAGER_FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)

MAX_FRAME_BYTES = 3000
"""Of a steps frame in the tests of the parser."""

_NAMES = st.text("abc_ü", min_size=1, max_size=4)
_SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def frames(draw: Any) -> tuple[Any, int, bytes]:
    """Kind, ticket and body of one frame that an engine may send."""
    kind = draw(st.sampled_from(sorted(FROM_ENGINE)))
    ticket = 0 if kind in WITHOUT_TICKET else draw(st.integers(0, 2**32 - 1))
    length = draw(st.integers(0, min(limit_of(kind, MAX_FRAME_BYTES), MAX_FRAME_BYTES)))
    return kind, ticket, bytes([draw(st.integers(0, 255))]) * length


streams = st.lists(frames(), max_size=5)


def bytes_of(stream: list[tuple[Any, int, bytes]]) -> bytes:
    """The frames, one after the other."""
    return b"".join(pack(*frame) for frame in stream)


def feed(reader: FrameReader, data: bytes) -> Iterator[Frame]:
    """The frames that ``data`` completes; BadFrame in the place of the first that is none."""
    left = memoryview(data)
    while left:
        space = reader.space()
        n_bytes = min(len(space), len(left))
        space[:n_bytes] = left[:n_bytes]
        reader.received(n_bytes)
        left = left[n_bytes:]
        while (frame := reader.next()) is not None:
            yield frame


@st.composite
def cuts_of(draw: Any, data: bytes) -> list[bytes]:
    """``data`` in any pieces."""
    places = draw(st.lists(st.integers(0, len(data)), max_size=12).map(sorted))
    return [data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)]


@st.composite
def mutated(draw: Any, data: bytes) -> bytes:
    """``data`` with some bytes changed, left out or put in."""
    spoiled = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(spoiled)))
        what = draw(st.sampled_from(["change", "leave out", "put in"]))
        new = draw(st.binary(min_size=1, max_size=4))
        spoiled[at : at + (0 if what == "put in" else len(new))] = b"" if what == "leave out" else new
    return bytes(spoiled)


@st.composite
def array_specs(draw: Any) -> ArraySpec:
    """One array, with bounds or without."""
    dtype = np.dtype(draw(st.sampled_from(["float32", "int32", "uint8", "int64", "float64"])))
    shape = draw(_SHAPES)
    low, high = draw(st.sampled_from([(None, None), (0, None), (None, 7), (0, 7)]))
    each = draw(st.booleans())
    bounds = [
        None if bound is None else np.full(shape if each else (), bound, dtype)  # one for all, or one for each number
        for bound in (low, high)
    ]
    return ArraySpec(shape, dtype, *bounds)


@st.composite
def _trees(draw: Any) -> Any:
    names = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
    return draw(array_specs()) if len(names) == 1 else {name: draw(array_specs()) for name in names}


@st.composite
def behavior_specs(draw: Any) -> dict[str, BehaviorSpec]:
    """One to three behaviors."""
    names = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
    return {name: BehaviorSpec(draw(_trees()), draw(_trees())) for name in names}
