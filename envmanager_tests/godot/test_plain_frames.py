"""Frames that are read by place: they say what careful reading says, whichever of their bytes is another."""

from __future__ import annotations

import numpy as np
import pytest

from envmanager.godot.codec import Acting, PlainFrame, StepsDecoder
from envmanager.godot.frames import BadFrame
from envmanager_tests.godot.test_codec import Ends, assert_same, steps_of

IDS = (4 << 32, 4 << 32 | 1, 5 << 32)


def both(base, **options):
    """Steps of agents of both behaviors, three of one and two of the other."""
    own = steps_of(IDS, base=base, **options)
    heroes = steps_of((4 << 32 | 7, 5 << 32 | 7), behavior="hero", base=base)
    return {"hero": heroes, "coin": own}


def careful(ends):
    """A decoder that remembers the same, and reads nothing by place."""
    other = StepsDecoder(ends.specs, (4, 5))
    vars(other).update(vars(ends.decoder))
    other._plain = None
    return other


def outcome(decoder, body):
    """What a decoder makes of a body, or why it refuses it."""
    try:
        return decoder.decode(body), None
    except BadFrame as error:
        return None, str(error)


@pytest.fixture
def ends():
    found = Ends()
    found.travel(both(0.0), after_reset=True)
    found.travel(both(0.5))  # from which is learned what all of them look like
    return found


def test_a_frame_like_the_last_is_read_by_place_and_says_the_same(ends, mocker):
    body = ends.body(both(3.0), busy_us=17)
    by_place = mocker.spy(PlainFrame, "read")

    decoded = ends.decoder.decode(body)

    assert by_place.spy_return is not None
    assert decoded.busy_us == 17
    assert_same(decoded.steps, careful(ends).decode(body).steps)
    assert_same(decoded.steps, both(3.0))


def test_any_other_byte_makes_what_it_makes_when_read_with_care(ends):
    body = bytes(ends.body(both(3.0)))
    for place in range(len(body)):
        spoiled = np.frombuffer(body, np.uint8).copy()
        spoiled[place] ^= 0x81
        with_care, reason = outcome(careful(ends), spoiled.data)
        by_place, refused = outcome(ends.decoder, spoiled.data)
        assert refused == reason
        if by_place is not None:
            assert [steps.reward.tobytes() for steps in by_place.steps.values()] == [
                steps.reward.tobytes() for steps in with_care.steps.values()
            ]


@pytest.mark.parametrize("options", [{"ended": IDS[1:2]}, {"acting": IDS[::2]}])
def test_after_a_frame_of_another_kind_with_the_same_rows_all_act_again(ends, options):
    ends.travel(both(1.0, **options))

    assert_same(ends.travel(both(2.0)).steps, both(2.0))
    assert ends.decoder.acting == {"hero": Acting(2), "coin": Acting(3)}


def test_what_a_trainer_does_to_the_arrays_does_not_reach_the_next_frame(ends):
    for base in (1.0, 2.0):
        steps = ends.travel(both(base)).steps["coin"]
        assert_same({"coin": steps}, {"coin": both(base)["coin"]})
        for array in (steps.agent_id, steps.obs, steps.reward, steps.terminated):
            array[:] = 1


def test_rows_that_must_be_sorted_and_infos_are_read_with_care(mocker):
    by_place = mocker.spy(PlainFrame, "read")
    for ends, steps in ((Ends(), steps_of(IDS[::-1])), (Ends(infos=True), steps_of(IDS))):
        ends.travel({"coin": steps}, after_reset=True)
        for _ in range(3):
            ends.travel({"coin": steps})

    assert by_place.call_count == 0
