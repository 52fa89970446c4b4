"""Frames: whatever comes in whatever pieces gives frames or a BadFrame, and little memory is needed for that."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envmanager.godot.frames import (
    FROM_ENGINE,
    FROM_TRAINER,
    HEADER,
    HELLO_LIMIT,
    JSON_LIMIT,
    MAX_DEPTH,
    BadFrame,
    FrameReader,
    Kind,
    dump_json,
    pack,
    parse_json,
)
from envmanager_tests.godot.strategies import MAX_FRAME_BYTES, bytes_of, cuts_of, feed, fuzzing, mutated, streams


def reader(kinds=FROM_ENGINE):
    return FrameReader(kinds, max_frame_bytes=MAX_FRAME_BYTES)


def read(pieces, kinds=FROM_ENGINE):
    """The frames in ``pieces``, and the reason of the BadFrame that ended it, or None."""
    own, found = reader(kinds), []
    try:
        for piece in pieces:
            for frame in feed(own, piece):
                found.append((frame.kind, frame.ticket, bytes(frame.body)))
            assert len(own.space()) <= JSON_LIMIT  # what is kept is 64 KiB, and one frame within its limit
    except BadFrame as bad:
        return found, str(bad)
    return found, None


def refusal_of(*pieces, kinds=FROM_ENGINE):
    found, reason = read(pieces, kinds)
    assert found == []
    return reason


@fuzzing
@given(st.data(), streams)
def test_frames_are_the_same_however_their_bytes_are_cut(data, stream):
    whole = bytes_of(stream)

    assert read(data.draw(cuts_of(whole))) == (stream, None)


@fuzzing
@given(st.data(), streams)
def test_mutated_frames_are_frames_or_refused_the_same_way_however_they_are_cut(data, stream):
    spoiled = data.draw(mutated(bytes_of(stream)))

    assert read(data.draw(cuts_of(spoiled))) == read([spoiled])


@fuzzing
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_give_frames_or_a_refusal(pieces):
    read(pieces)


@fuzzing
@given(st.binary(max_size=300))
def test_any_bytes_are_an_object_of_json_or_refused(body):
    with contextlib.suppress(BadFrame):
        assert isinstance(parse_json(body), dict)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), _JSON, max_size=4))
def test_what_is_written_as_json_is_read_as_the_same(message):
    try:
        body = dump_json(message)
    except ValueError:  # an infinite float, or half a surrogate pair
        return

    assert parse_json(body) == message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[]", "top is no object but list"),
        (b"3", "top is no object but int"),
        (b"", "no JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper than 32"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested"),
        (b'\xef\xbb\xbf{"a": 1}', "no JSON"),
        (b'{"a": 1} x', "no JSON"),
    ],
)
def test_what_is_no_json_of_ours_is_refused(body, reason):
    with pytest.raises(BadFrame, match=reason):
        parse_json(body)


def test_json_may_be_nested_as_deep_as_is_allowed():
    body = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"

    assert parse_json(body) == json.loads(body)


def header(length=0, kind=Kind.BUSY, zero=0, zeros=0, ticket=0):
    return HEADER.pack(length, kind, zero, zeros, ticket)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (header(kind=0), "kind 0, where only hello"),
        (header(kind=8), "kind 8"),
        (header(kind=Kind.STEP), "kind 67"),
        (header(kind=255), "kind 255"),
        (header(zero=1), "reserved bytes are 1 and 0"),
        (header(zeros=256), "reserved bytes are 0 and 256"),
        (header(1), "busy frame of 1 bytes, where 0"),
        (header(HELLO_LIMIT + 1, Kind.HELLO), "hello frame of 65537 bytes, where 65536"),
        (header(JSON_LIMIT + 1, Kind.SPECS), "specs frame of 1048577 bytes"),
        (header(MAX_FRAME_BYTES + 1, Kind.STEPS), "steps frame of 3001 bytes, where 3000"),
        (header(2**32 - 1, Kind.STEPS), "steps frame of 4294967295 bytes"),
        (header(kind=Kind.NOTE, ticket=1), "note frame with ticket 1"),
        (header(kind=Kind.HELLO, ticket=7), "hello frame with ticket 7"),
    ],
)
def test_a_header_that_is_not_as_it_should_be_is_refused_before_its_body_comes(bad, reason):
    assert reason in refusal_of(bad)


def test_a_trainers_frame_is_refused_by_a_trainer_and_read_by_an_engine():
    frame = pack(Kind.CLOSE, 3)

    assert "kind 69" in refusal_of(frame)
    assert read([frame], FROM_TRAINER) == ([(Kind.CLOSE, 3, b"")], None)


def test_before_a_hello_nothing_else_is_read():
    assert "where only hello (1) may come" in refusal_of(pack(Kind.STEPS, 1, b"1234"), kinds=frozenset({Kind.HELLO}))


def test_frames_before_a_bad_one_are_handed_out():
    own = reader()
    good_and_bad = feed(own, pack(Kind.BUSY, 1) + pack(Kind.BUSY, 2) + b"garbage! and more")

    assert [next(good_and_bad).ticket, next(good_and_bad).ticket] == [1, 2]
    with pytest.raises(BadFrame):
        next(good_and_bad)


def test_each_body_has_a_buffer_of_its_own_that_can_be_written_to():
    first, second = feed(reader(), pack(Kind.VALUE, 1, b"one") + pack(Kind.VALUE, 2, b"two"))
    first.body[0] = 0

    assert bytes(second.body) == b"two"
    assert (first.body.readonly, second.body.readonly) == (False, False)


def test_a_body_larger_than_the_scratch_is_received_in_place():
    own = FrameReader(max_frame_bytes=1 << 20)
    body = bytes(range(256)) * 4000
    frame = pack(Kind.STEPS, 5, body)
    n_reads, left, found = 0, memoryview(frame), []
    while left:
        space = own.space()
        n = min(len(space), len(left))
        space[:n] = left[:n]
        own.received(n)
        left, n_reads = left[n:], n_reads + 1
        while (got := own.next()) is not None:
            found.append(got)

    assert (n_reads, [bytes(got.body) for got in found]) == (2, [body])


def test_space_is_refused_while_there_are_frames_to_take():
    own, frame = reader(), pack(Kind.STEPS, 1, b"x" * 3000)
    assert list(feed(own, frame[:1000])) == []
    rest = own.space()
    rest[:] = frame[1000:]
    own.received(len(rest))

    with pytest.raises(RuntimeError, match="next"):
        own.space()


def test_no_room_is_made_for_a_body_that_is_too_long():
    own = FrameReader(max_frame_bytes=64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            list(feed(own, header((64 << 20) + 1, Kind.STEPS)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
