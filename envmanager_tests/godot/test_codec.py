"""Specs, actions and steps: what one end writes the other reads, and whatever else comes is refused with its reason."""

from __future__ import annotations

import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AgentSteps, only_agents
from envmanager.data.trees import leaves, leaves_like
from envmanager.godot.codec import Acting, StepsDecoder, bad_numbers, encode_step
from envmanager.godot.frames import BadFrame, FrameReader, Kind, dump_json, pack
from envmanager.godot.messages import (
    MAX_AGENTS,
    MAX_NUMBERS,
    EngineError,
    Hello,
    call_body,
    configure_body,
    read_error,
    read_hello,
    read_note,
    read_specs,
    read_values,
    reset_body,
)
from envmanager.godot.options import GodotOptions
from envmanager_tests.godot.engine_codec import (
    Call,
    Configure,
    Reset,
    StepsEncoder,
    read_call,
    read_configure,
    read_reset,
    read_step,
    specs_body,
)
from envmanager_tests.godot.hosted import Population
from envmanager_tests.godot.strategies import behavior_specs, feed, fuzzing, mutated

HERO = BehaviorSpec(
    {"rays": ArraySpec((3,), np.float32, 0, 1), "seen": ArraySpec((5,), np.uint8)}, ArraySpec((), np.int32, 0, 4)
)
COIN = BehaviorSpec(ArraySpec((2,), np.float32), {"push": ArraySpec((2,), np.float32), "jump": ArraySpec((), np.int32)})
SPECS = {"hero": HERO, "coin": COIN}


def same_arrays(one, other):
    """Whether two trees have the same keys, dtypes, shapes and numbers."""
    if one is None or other is None:
        return one is other
    assert type(one) is type(other)
    pairs = zip(leaves(one), leaves_like(one, other), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b) for a, b in pairs)


def assert_same(got, sent):
    """Both say the same of every agent."""
    assert list(got) == list(sent)
    for name, own in got.items():
        other = sent[name]
        for field in ("agent_id", "obs", "reward", "terminated", "truncated", "final_obs"):
            assert same_arrays(getattr(own, field), getattr(other, field)), (name, field)
        assert own.acting_rows.tolist() == other.acting_rows.tolist()
        assert (own.info, own.reset_info) == (other.info, other.reset_info)


class Ends:
    """Both ends of one connection, and the bytes between them."""

    def __init__(self, specs=SPECS, env_ids=(4, 5), *, infos=False, max_agents=None):
        said = specs_body(specs, max_agents or dict.fromkeys(specs, 8))
        self.specs = read_specs(said)
        self.encoder = StepsEncoder(self.specs, env_ids)
        self.decoder = StepsDecoder(self.specs, env_ids, infos=infos)
        self.infos = infos

    def body(self, steps, **options):
        """The steps as they come out of a FrameReader."""
        (frame,) = feed(FrameReader(), pack(Kind.STEPS, 1, self.encoder.encode(steps, **options)))
        return frame.body

    def travel(self, steps, *, busy_us=0, after_reset=False):
        body = self.body(steps, busy_us=busy_us, after_reset=after_reset)
        return self.decoder.decode(body, after_reset=after_reset)


# Both ends.


@given(behavior_specs(), st.integers(0, 100))
def test_specs_are_read_as_they_were_written(specs, n_agents):
    max_agents = {name: n_agents + place for place, name in enumerate(specs)}

    got = read_specs(specs_body(specs, max_agents))

    assert got.behavior_specs == specs
    assert got.max_agents == max_agents
    for behavior in got.behaviors:
        assert list(leaves(behavior.spec.observation)) == list(leaves(specs[behavior.name].observation))


@fuzzing
@given(behavior_specs(), st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 3), st.integers(1, 6))
def test_steps_and_actions_are_read_as_they_were_written(specs, seed, infos, n_arenas, n_steps):
    env_ids = list(range(6, 6 + n_arenas))
    ends = Ends(specs, env_ids, infos=infos, max_agents=dict.fromkeys(specs, 64))
    people = Population(specs, env_ids, seed, infos=infos)
    sent = people.reset()
    got = ends.travel(sent, after_reset=True).steps
    assert_same(got, by_environment(sent))
    for step in range(n_steps):
        actions = people.actions(got)
        body = encode_step(ends.specs, actions, ends.decoder.acting)
        read = read_step(ends.specs, body, ends.encoder.acting)
        assert set(read) == set(actions)
        for name in actions:
            assert acts_of(sent[name], read[name]) == acts_of(got[name], actions[name])
        sent = people.step()
        got, busy_us = ends.travel(sent, busy_us=step * 1000)
        assert_same(got, by_environment(sent))
        assert busy_us == step * 1000


def by_environment(steps):
    """In the order of the environments, as a Python worker has them; an engine has new agents last."""
    return {name: own.take(np.argsort(own.env_id, kind="stable")) for name, own in steps.items()}


def acts_of(steps, tree):
    """What each agent does."""
    ids = steps.agent_id[steps.acting_rows].tolist()
    return dict(zip(ids, zip(*(leaf.tolist() for leaf in leaves_like(tree, tree)), strict=True), strict=True))


def steps_of(ids, *, behavior="coin", ended=(), acting=None, base=0.0, **fields):
    """Steps of agents with these ids, whose numbers depend on the id."""
    ids = np.array(ids, np.int64)
    over = np.isin(ids, list(ended))
    low = ids % 7
    obs = np.stack([low, low + base], axis=1).astype(np.float32)
    if behavior == "hero":
        obs = {
            "rays": np.repeat(obs, 2, axis=1)[:, :3].copy(),
            "seen": np.repeat(low, 5).reshape(-1, 5).astype(np.uint8),
        }
    final = None
    if over.any():
        final = {name: leaf[over] + 1 for name, leaf in obs.items()} if behavior == "hero" else -obs[over]
    wants = None if acting is None else np.isin(ids, list(acting))
    return AgentSteps(ids, obs, low.astype(np.float32), over, np.zeros(len(ids), np.bool_), final, wants, **fields)


A, B, C = 4 << 32, 5 << 32, 5 << 32 | 1


def test_one_agent_in_each_arena_has_the_ids_of_an_environment_with_one_agent():
    ends = Ends()

    got = ends.travel({"coin": steps_of([A, B])}, after_reset=True).steps["coin"]

    assert np.array_equal(got.agent_id, only_agents([4, 5]))
    assert (got.agent_id.dtype, got.env_id.tolist(), got.acting) == (np.int64, [4, 5], None)


def test_rows_that_stay_are_not_sent_again():
    ends = Ends()
    first = ends.body({"coin": steps_of([A, B])}, after_reset=True)
    second = ends.body({"coin": steps_of([A, B])})

    ends.decoder.decode(first, after_reset=True)
    assert len(first) - len(second) == 2 * 8
    assert ends.decoder.decode(second).steps["coin"].agent_id.tolist() == [A, B]


def test_rows_that_stay_are_those_of_the_last_frame_that_had_any():
    ends = Ends()
    ends.travel({"coin": steps_of([A, B]), "hero": steps_of([C], behavior="hero")}, after_reset=True)
    ends.travel({"hero": steps_of([C], behavior="hero")})
    assert ends.decoder.acting == {"hero": Acting(1)}

    got = ends.travel({"coin": steps_of([A, B])}).steps

    assert got["coin"].agent_id.tolist() == [A, B]
    assert ends.decoder.acting == {"coin": Acting(2)}


def test_the_arrays_are_views_of_the_frame_and_can_be_written_to():
    ends = Ends()
    body = ends.body({"coin": steps_of([A, B])}, after_reset=True)

    got = ends.decoder.decode(body, after_reset=True).steps["coin"]

    assert np.shares_memory(got.obs, np.asarray(body))
    assert np.shares_memory(got.reward, np.asarray(body))
    for array in (got.agent_id, got.obs, got.reward, got.terminated, got.truncated):
        array[...] = 1


def test_what_a_trainer_does_to_agent_ids_does_not_reach_the_next_step():
    ends = Ends()
    ends.travel({"coin": steps_of([A, B])}, after_reset=True).steps["coin"].agent_id[:] = 0

    assert ends.travel({"coin": steps_of([A, B])}).steps["coin"].agent_id.tolist() == [A, B]


def test_arrays_of_eight_bytes_are_aligned_wherever_they_lie():
    spec = {"default": BehaviorSpec(ArraySpec((3,), np.int64), ArraySpec((), np.int64))}
    ends = Ends(spec)
    n = 3
    obs = np.arange(3 * n).reshape(n, 3)
    rows = [A, B, C]
    flags = np.zeros(n, np.float32), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    body = ends.body({"default": AgentSteps(np.array(rows), obs, *flags)}, after_reset=True)
    odd = memoryview(bytearray(4) + body)[4:]  # one of the two is not where int64 should be

    for each in (body, odd):
        got = ends.decoder.decode(each, after_reset=True).steps["default"].obs
        assert got.flags.aligned
        assert np.array_equal(got, obs)


def test_an_agent_that_ends_and_plays_on_has_one_row_with_both_observations():
    ends = Ends(infos=True)
    ends.travel({"coin": steps_of([A, B], info=[{}, {}])}, after_reset=True)

    got = ends.travel({"coin": steps_of([A, B], ended=[B], info=[{}, {"won": True}], reset_info=[{"level": 2}])})

    steps = got.steps["coin"]
    assert (steps.ended.tolist(), steps.acting, len(steps.final_obs)) == ([False, True], None, 1)
    assert (steps.info, steps.reset_info) == ([{}, {"won": True}], [{"level": 2}])


def test_an_agent_that_leaves_has_a_last_row_that_wants_no_action():
    ends = Ends()
    ends.travel({"coin": steps_of([A, B, C])}, after_reset=True)
    ends.travel({"coin": steps_of([A, B, C], ended=[C], acting=[A, B])})

    assert ends.decoder.acting == {"coin": Acting(2)}
    assert ends.travel({"coin": steps_of([A, B])}).steps["coin"].agent_id.tolist() == [A, B]


def test_rows_are_handed_out_by_environment_and_actions_sent_in_the_engines_order():
    ends = Ends(infos=True)
    who, infos = [C, A, B], [{"who": "C"}, {"who": "A"}, {"who": "B"}]
    first = ends.travel({"coin": steps_of(who, info=infos)}, after_reset=True).steps["coin"]
    ended = steps_of(who, ended=[C, B], acting=[C, A], info=infos, reset_info=[{"new": "C"}, {"new": "B"}])

    got = ends.travel({"coin": ended}).steps["coin"]

    assert first.agent_id.tolist() == got.agent_id.tolist() == [A, C, B]
    assert [info["who"] for info in got.info] == ["A", "C", "B"]
    assert [info["new"] for info in got.reset_info] == ["C", "B"]
    assert got.acting.tolist() == [True, True, False]
    jump, push = np.array([1, 3], np.int32), np.zeros((2, 2), np.float32)  # of A and of C
    body = encode_step(ends.specs, {"coin": {"push": push, "jump": jump}}, ends.decoder.acting)
    assert read_step(ends.specs, body, ends.encoder.acting)["coin"]["jump"].tolist() == [3, 1]


@pytest.mark.parametrize("infos", [{}, {"coin": {}}, {"coin": {"info": [None, None]}}])
def test_with_infos_every_row_has_one_whatever_the_engine_leaves_out(infos):
    ends = Ends(infos=True)
    body = bytearray(ends.body({"coin": steps_of([A, B])}, after_reset=True))[:-4] + infos_block(infos)

    got = ends.decoder.decode(body, after_reset=True).steps["coin"]

    assert (got.info, got.reset_info) == ([{}, {}], None)


def infos_block(infos):
    said = json.dumps(infos).encode() if infos else b""
    return struct.pack("<I", len(said)) + said + bytes(-len(said) % 4)


# Malformed steps. A body is built by hand, so that any part of it can be wrong.

ROWS = struct.pack("<4I", 0, 0, 1, 0)
OBS = np.zeros((2, 2), np.float32).tobytes()
REWARD = np.zeros(2, np.float32).tobytes()
ACT = bytes([4, 4, 0, 0])


def section(number=1, flags=4, zero=0, n=2, rows=ROWS, obs=OBS, reward=REWARD, bits=ACT, final=b""):
    return struct.pack("<HBBI", number, flags, zero, n) + rows + obs + reward + bits + final


def steps_body(*sections, n=None, busy_us=0, infos=bytes(4)):
    return struct.pack("<II", busy_us, len(sections) if n is None else n) + b"".join(sections) + infos


HERO_SECTION = section(0, n=1, rows=struct.pack("<II", 1, 0), obs=bytes(12 + 8), reward=bytes(4), bits=b"\4\0\0\0")
FINAL = bytes(8)
MALFORMED = {
    "empty": (b"", "bytes missing: its head should have 8, but 0 are left"),
    "half a head": (b"\0\0\0\0\1\0", "bytes missing: its head"),
    "no infos": (steps_body(section(), infos=b""), "bytes missing: the length of the infos should have 4, but 0"),
    "one byte missing": (steps_body(section())[:-1], "bytes missing: the length of the infos should have 4, but 3"),
    "left over": (steps_body(section()) + bytes(4), "4 bytes left over"),
    "too few sections": (steps_body(section(), HERO_SECTION, n=1), "infos"),
    "too many sections": (steps_body(section(), n=2), "bytes missing: the head of a section"),
    "more sections than behaviors": (steps_body(section(), HERO_SECTION, section()), "two sections of behavior 'coin'"),
    "many sections": (steps_body(n=2**32 - 1), "bytes missing: the head of a section"),
    "a section twice": (steps_body(section(), section()), "two sections of behavior 'coin'"),
    "unknown behavior": (steps_body(section(2)), "behavior number 2, where there are 2"),
    "reserved byte": (steps_body(section(zero=1)), "reserved bits that are not 0 of behavior 'coin' (flags 4, then 1)"),
    "reserved flag": (
        steps_body(section(flags=12)),
        "reserved bits that are not 0 of behavior 'coin' (flags 12, then 0)",
    ),
    "too many rows": (steps_body(section(n=MAX_AGENTS + 1)), "65537 rows of behavior 'coin', where 65536"),
    "more rows than sent": (
        steps_body(section(n=3)),
        "bytes missing: the rewards of behavior 'coin' should have 12, but 0",
    ),
    "many more rows than sent": (
        steps_body(section(n=9)),
        "bytes missing: the rows of behavior 'coin' should have 72",
    ),
    "fewer rows than sent": (steps_body(section(n=1)), "1 rows that want no action of behavior 'coin', but flags 4"),
    "unknown arena": (
        steps_body(section(rows=struct.pack("<4I", 0, 0, 2, 0))),
        "arena 2 of behavior 'coin', where there are 2",
    ),
    "far arena": (steps_body(section(rows=struct.pack("<4I", 0, 0, 2**32 - 1, 0))), "arena 4294967295"),
    "agent twice": (steps_body(section(rows=struct.pack("<4I", 1, 3, 1, 3))), "agent 3 of arena 1 twice"),
    "agent in two behaviors": (steps_body(section(), HERO_SECTION), "agent 0 of arena 1 twice"),
    "same as nothing": (
        steps_body(section(flags=5, rows=b"")),
        "the same rows as before of behavior 'coin', which had none",
    ),
    "unknown bit": (steps_body(section(flags=0, bits=b"\4\x0c\0\0")), "reserved bits that are not 0 in the bits"),
    "padding": (steps_body(section(bits=b"\4\4\0\1")), "padding that is not 0 after the bits of behavior 'coin'"),
    "padding of an array": (
        steps_body(HERO_SECTION[:34] + b"\1" + HERO_SECTION[35:]),
        "padding that is not 0 after observation of behavior 'hero'",
    ),
    "acts, says the flag": (
        steps_body(section(bits=b"\4\0\0\0")),
        "1 rows that want no action of behavior 'coin', but flags 4",
    ),
    "ended, says no flag": (steps_body(section(bits=b"\4\5\0\0")), "1 rows that ended of behavior 'coin', but flags 4"),
    "ended, says only the flag": (steps_body(section(flags=6)), "0 rows that ended of behavior 'coin', but flags 6"),
    "final observation missing": (
        steps_body(section(flags=6, bits=b"\4\5\0\0")),
        "bytes missing: final observation of behavior 'coin' should have 8, but 4",
    ),
    "two final observations for one": (
        steps_body(section(flags=6, bits=b"\4\5\0\0", final=FINAL + bytes([1]) * 8)),
        "16843009 bytes of infos, which nobody asked for",
    ),
    "infos that nobody asked for": (
        steps_body(section(), infos=infos_block({"coin": {}})),
        "infos, which nobody asked for",
    ),
}


@pytest.mark.parametrize(("body", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_body_is_refused_with_its_reason(body, reason):
    decoder = Ends().decoder

    with pytest.raises(BadFrame) as refused:
        decoder.decode(body)

    assert reason in str(refused.value)


def test_the_bodies_above_are_right_but_for_what_is_wrong_with_them():
    decoder = Ends().decoder

    got = decoder.decode(steps_body(section(), section(0, n=0, rows=b"", obs=b"", reward=b"", bits=b""))).steps
    ended = decoder.decode(steps_body(section(flags=6, bits=b"\4\5\0\0", final=FINAL))).steps

    assert [len(own) for own in got.values()] == [2, 0]
    assert ended["coin"].terminated.tolist() == [False, True]
    assert decoder.decode(steps_body(section(flags=5, rows=b""))).steps["coin"].agent_id.tolist() == [A, B]


INFOS = {
    "other behavior": ({"hero": {}}, "infos of behavior 'hero', which has no rows in the frame"),
    "unknown behavior": ({"x": {}}, "infos of behavior 'x'"),
    "no object": ({"coin": [1]}, "infos of behavior 'coin' that are a list"),
    "too few": ({"coin": {"info": [{}]}}, "info of behavior 'coin' should be a list of 2, but is a list of 1"),
    "no list": ({"coin": {"info": {}}}, "should be a list of 2, but is a dict"),
    "a number": ({"coin": {"info": [{}, 3]}}, "info of behavior 'coin' has int 3, which is no object"),
    "of no reset": ({"coin": {"reset_info": [{}]}}, "reset_info of behavior 'coin' should be a list of 0"),
}


@pytest.mark.parametrize(("infos", "reason"), INFOS.values(), ids=INFOS)
def test_malformed_infos_are_refused_with_their_reason(infos, reason):
    decoder = Ends(infos=True).decoder

    with pytest.raises(BadFrame) as refused:
        decoder.decode(steps_body(section(), infos=infos_block(infos)))

    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "bits", "final", "reason"),
    [(5, ACT, b"", "flags 5"), (6, b"\4\5\0\0", FINAL, "flags 6"), (4, b"\4\5\0\0", b"", "1 rows that ended")],
)
def test_after_a_reset_nothing_ends_and_no_rows_are_the_same(flags, bits, final, reason):
    decoder = Ends().decoder
    decoder.decode(steps_body(section()), after_reset=True)
    rows = b"" if flags & 1 else ROWS

    with pytest.raises(BadFrame) as refused:
        decoder.decode(steps_body(section(flags=flags, bits=bits, final=final, rows=rows)), after_reset=True)

    assert reason in str(refused.value)


def test_of_a_refused_body_nothing_is_remembered():
    decoder = Ends().decoder
    decoder.decode(steps_body(section()), after_reset=True)

    with pytest.raises(BadFrame):
        decoder.decode(steps_body(section(rows=struct.pack("<4I", 0, 7, 1, 7))) + bytes(4))

    assert decoder.decode(steps_body(section(flags=5, rows=b""))).steps["coin"].agent_id.tolist() == [A, B]
    assert decoder.acting == {"coin": Acting(2)}


def test_the_same_rows_must_be_as_many_as_before():
    decoder = Ends().decoder
    decoder.decode(steps_body(section()), after_reset=True)

    with pytest.raises(BadFrame, match="but 3 where there were 2"):
        decoder.decode(steps_body(section(flags=5, n=3, rows=b"")))


def test_rows_that_are_the_same_in_each_behavior_may_not_be_those_of_one_agent():
    decoder = Ends().decoder
    decoder.decode(steps_body(section()))
    decoder.decode(steps_body(HERO_SECTION))
    same_hero = section(0, flags=5, n=1, rows=b"", obs=bytes(20), reward=bytes(4), bits=b"\4\0\0\0")

    with pytest.raises(BadFrame, match="agent 0 of arena 1 twice"):
        decoder.decode(steps_body(section(flags=5, rows=b""), same_hero))


def test_an_array_of_too_many_numbers_is_refused_before_anything_is_made_of_it():
    spec = {"wide": BehaviorSpec(ArraySpec((4096,), np.uint8), ArraySpec((), np.int32))}
    decoder = Ends(spec, max_agents={"wide": 1}).decoder
    n = MAX_NUMBERS // 4096 + 1
    rows = np.zeros((n, 2), np.uint32)
    rows[:, 1] = np.arange(n)

    with pytest.raises(BadFrame, match=f"{n * 4096} numbers in observation 'obs'"):
        decoder.decode(steps_body(section(0, n=n, rows=rows.tobytes(), obs=b"", reward=b"", bits=b"")))


@fuzzing
@given(st.binary(max_size=300))
def test_any_bytes_are_steps_or_refused(body):
    decoder = Ends(infos=True).decoder
    decoder.decode(steps_body(section()))
    with contextlib.suppress(BadFrame):
        decoder.decode(body)


@fuzzing
@given(st.data(), st.integers(0, 2**32 - 1))
def test_mutated_steps_are_steps_or_refused(data, seed):
    ends = Ends(infos=True)
    people = Population(SPECS, [4, 5], seed, infos=True)
    ends.travel(people.reset(), after_reset=True)
    body = data.draw(mutated(bytes(ends.body(people.step()))))
    try:
        steps = ends.decoder.decode(body).steps
    except BadFrame:
        return
    for name, own in steps.items():
        n = len(own)
        assert all(len(leaf) == n for leaf in leaves(own.obs))
        assert (len(own.reward), len(own.ended), len(own.info)) == (n, n, n)
        m = 0 if own.final_obs is None else len(leaves(own.final_obs)[0])
        assert m == np.count_nonzero(own.ended)
        assert set(own.env_id.tolist()) <= {4, 5}
        assert ends.decoder.acting[name].n == len(own.acting_rows)


@fuzzing
@given(st.data(), behavior_specs())
def test_mutated_specs_are_specs_or_refused(data, specs):
    body = data.draw(mutated(specs_body(specs, dict.fromkeys(specs, 3))))
    try:
        got = read_specs(body)
    except BadFrame:
        return
    for behavior in got.behaviors:
        for layout in behavior.observations + behavior.actions:
            assert 1 <= layout.n_numbers <= MAX_NUMBERS


# Actions.


def test_a_behavior_that_is_left_out_has_no_section():
    ends = Ends()
    ends.travel({"coin": steps_of([A, B]), "hero": steps_of([C], behavior="hero")}, after_reset=True)

    body = encode_step(ends.specs, {"hero": np.array([3], np.int32)}, ends.decoder.acting)

    assert body == struct.pack("<IHHIi", 1, 0, 0, 1, 3)


def test_actions_are_in_the_order_of_the_specs_whatever_their_own():
    ends = Ends()
    ends.travel({"coin": steps_of([A])}, after_reset=True)
    push, jump = np.array([[1, 2]], np.float32), np.array([7], np.int32)

    body = encode_step(ends.specs, {"coin": {"jump": jump, "push": push}}, ends.decoder.acting)

    assert body == struct.pack("<IHHIffi", 1, 1, 0, 1, 1.0, 2.0, 7)


def test_actions_that_are_not_contiguous_are_sent_row_by_row():
    ends = Ends()
    ends.travel({"coin": steps_of([A, B])}, after_reset=True)
    push = np.array([[1, 2], [3, 4]], np.float32).T

    body = encode_step(ends.specs, {"coin": {"push": push, "jump": np.zeros(4, np.int32)[::2]}}, ends.decoder.acting)

    assert read_step(ends.specs, body, ends.encoder.acting)["coin"]["push"].tolist() == push.tolist()


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ({"coin": {"push": np.zeros((1, 2), np.float32), "jump": np.zeros(1, np.int32)}}, "'push' should be"),
        ({"hero": np.zeros(1, np.int32)}, "has shown no agent"),
    ],
)
def test_actions_for_other_rows_than_the_engine_has_are_refused(actions, reason):
    ends = Ends()
    ends.travel({"coin": steps_of([A, B])}, after_reset=True)

    with pytest.raises(ValueError, match=reason):
        encode_step(ends.specs, actions, ends.decoder.acting)


# Numbers.


@pytest.mark.parametrize(
    ("field", "value", "env_ids", "path"),
    [("rays", 2.0, (5,), "obs['rays']"), ("rays", np.nan, (5,), "obs['rays']"), ("reward", np.inf, (5,), "reward")],
)
def test_bad_numbers_are_found_with_their_environment(field, value, env_ids, path):
    ends = Ends()
    steps = steps_of([A, B], behavior="hero")
    steps.obs["rays"][:] = 0.5
    assert bad_numbers(ends.specs, {"hero": steps}) is None
    (steps.reward if field == "reward" else steps.obs[field])[1] = value

    found, mismatch = bad_numbers(ends.specs, {"hero": steps})

    assert (found, mismatch.path) == (env_ids, path)


def test_bad_numbers_of_a_final_observation_are_those_of_the_environment_that_ended():
    ends = Ends()
    steps = steps_of([A, B], ended=[B])
    steps.final_obs[0, 0] = np.nan

    found, mismatch = bad_numbers(ends.specs, {"coin": steps})

    assert (found, mismatch.path) == ((5,), "final_obs")


# Specs.


def array(**changed):
    return {"name": "a", "shape": [2], "dtype": "float32", "low": None, "high": None} | changed


def specs_with(observation=None, *, behaviors=None, max_agents=None, **changed):
    behavior = {"name": "b", "observations": [observation or array()], "actions": [array()]} | changed
    return {
        "behaviors": [behavior] if behaviors is None else behaviors,
        "max_agents": {"b": 1} if max_agents is None else max_agents,
    }


def many(n):
    return [specs_with(name=f"b{number}")["behaviors"][0] for number in range(n)]


BAD_SPECS = {
    "no behaviors": (specs_with(behaviors=[]), "specs of 0 behaviors, where 1 to 64 may be"),
    "too many behaviors": (specs_with(behaviors=many(65)), "specs of 65 behaviors"),
    "behaviors is no list": (specs_with(behaviors={}), "behaviors of the specs should be a list"),
    "behavior is no object": (specs_with(behaviors=[3]), "behavior 0 of the specs is no object but int 3"),
    "behavior twice": (specs_with(behaviors=many(1) * 2, max_agents={"b0": 1}), "'b0' twice"),
    "no name": (specs_with(name=""), "the name of behavior 0 of the specs should be a text"),
    "name is a number": (specs_with(array(name=3)), "the name of observations[0] of behavior 'b' should be a text"),
    "no observations": (specs_with(observations=[]), "behavior 'b' has no observations"),
    "no actions": (specs_with(actions=[]), "behavior 'b' has no actions"),
    "array twice": (specs_with(actions=[array(), array()]), "actions of behavior 'b' has the name 'a' twice"),
    "array is no object": (specs_with(actions=[3]), "actions[0] of behavior 'b' is no object"),
    "unknown dtype": (specs_with(array(dtype="float16")), "has dtype str 'float16', which is none of float32"),
    "dtype is a list": (specs_with(array(dtype=[])), "has dtype a list"),
    "no shape": (specs_with(array(shape=None)), "shape of observations[0] of behavior 'b' ('a') should be a list"),
    "size 0": (specs_with(array(shape=[0])), "a size in the shape of observations[0] of behavior 'b' ('a') should be"),
    "size -1": (specs_with(array(shape=[-1])), "should be a whole number from 1 on, but is int -1"),
    "size 1.5": (specs_with(array(shape=[1.5])), "should be a whole number from 1 on, but is float 1.5"),
    "size true": (specs_with(array(shape=[True])), "should be a whole number from 1 on, but is bool True"),
    "too many numbers": (specs_with(array(shape=[4096, 4097])), "16781312 numbers; 16 and 16777216 are the most"),
    "overflow": (specs_with(array(shape=[2**31, 2**31, 2**31])), "are the most"),
    "too many dimensions": (specs_with(array(shape=[1] * 17)), "has 17 dimensions"),
    "low above high": (specs_with(array(low=1, high=0)), "has a low above its high"),
    "bounds too few": (specs_with(array(low=[1])), "is a list of 1, where the array has 2 numbers"),
    "bound is a text": (specs_with(array(low="0")), "low of observations[0] of behavior 'b' ('a') should be a number"),
    "bound is true": (specs_with(array(high=True)), "should be a number, a list of numbers or null, but has bool True"),
    "bound no float32": (specs_with(array(high=1e39)), "has a number that is no float32"),
    "bound infinite": (None, "has a number that is no float32"),
    "bound no int32": (specs_with(array(dtype="int32", high=2**31)), "has a number that is no int32"),
    "bound no whole number": (specs_with(array(dtype="int32", high=1.5)), "has a number that is no int32"),
    "bound no uint8": (specs_with(array(dtype="uint8", low=-1)), "has a number that is no uint8"),
    "no max_agents": (specs_with(max_agents=[]), "max_agents should have one number for each behavior"),
    "max_agents of another": (specs_with(max_agents={"b": 1, "c": 1}), "max_agents should have one number for each"),
    "max_agents -1": (specs_with(max_agents={"b": -1}), "max_agents of behavior 'b' should be a whole number from 0"),
    "too many agents": (specs_with(max_agents={"b": 65_537}), "max_agents adds up to 65537 agents"),
    "too many numbers of all agents": (
        specs_with(array(shape=[1024]), max_agents={"b": 16_385}),
        "16385 agents of behavior 'b' have 16778240 numbers in array 'a'",
    ),
}


@pytest.mark.parametrize(("specs", "reason"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_specs_that_break_a_limit_are_refused_with_their_reason(specs, reason):
    infinite = dump_json(specs_with(array(high=123))).replace(b"123", b"1e999")

    with pytest.raises(BadFrame) as refused:
        read_specs(infinite if specs is None else dump_json(specs))

    assert reason in str(refused.value)


def test_whole_numbers_may_be_written_as_floats_as_godot_does():
    body = dump_json(specs_with(array(shape=[2.0], dtype="int32", low=0.0, high=[3.0, 4.0]), max_agents={"b": 5.0}))

    specs = read_specs(body)

    spec = specs.behavior_specs["b"].observation
    assert (spec, spec.minimum.dtype, specs.max_agents) == (ArraySpec((2,), np.int32, 0, [3, 4]), np.int32, {"b": 5})


def test_a_whole_number_with_bounds_is_a_choice():
    body = dump_json(specs_with(actions=[array(shape=[], dtype="int32", low=0, high=4)]))

    assert read_specs(body).behavior_specs["b"].action.whole_bounds == (0, 4)


# The other messages.


def test_a_trainers_messages_are_read_by_an_engine():
    of_the_engine = {"ticks_per_action": 2, "isolate": True, "shown": 3, "scene": "res://a.tscn"}
    others = {"arenas": 4, "seed": 7, "may_spin": True}

    configured = configure_body(GodotOptions(engine=of_the_engine, infos=True), **others)

    assert read_configure(configured) == Configure(**of_the_engine, **others, infos=True)
    assert read_reset(reset_body([1, None], {"level": 2}), 2) == Reset([1, None], {"level": 2}, None)
    assert read_reset(reset_body([3], None), 1) == Reset([3], {}, None)
    assert read_call(call_body("method", "f", [0, 1], [1], {"x": 2}), 2) == Call("method", "f", [1], {"x": 2}, [0, 1])
    assert read_call(call_body("set", "speed", [1], [3]), 2) == Call("set", "speed", [3], {}, [1])
    assert read_call(call_body("render", None, [0]), 2) == Call("render", None, [], {}, [0])


@pytest.mark.parametrize("options", [{"x": np.zeros(1)}, {"x": float("nan")}, {"x": object()}])
def test_what_json_cannot_say_is_refused_by_whoever_writes_it(options):
    with pytest.raises((TypeError, ValueError)):
        reset_body([1], options)


HELLO = {"protocol": [1, 3], "token": "ab", "engine": "4.6.3", "addon": "1.0.0", "ticks_per_second": 60, "new": 1}


def test_a_hello_is_read_and_what_is_new_in_it_is_ignored():
    assert read_hello(dump_json(HELLO)) == Hello((1, 3), "ab")


def test_of_another_major_version_only_what_names_it_is_read():
    assert read_hello(dump_json({"protocol": [2, 0], "token": "ab"})) == Hello((2, 0), "ab")


@pytest.mark.parametrize("changed", [{"protocol": 1}, {"protocol": [1]}, {"protocol": ["1", 0]}, {"token": 3}])
def test_a_hello_without_what_it_needs_is_refused(changed):
    with pytest.raises(BadFrame):
        read_hello(dump_json(HELLO | changed))


def test_an_error_says_where_as_far_as_the_engine_knows():
    said = {"message": "Null", "script": "res://hero.gd", "line": 12.0, "function": "observe", "arena": 1}

    full = read_error(dump_json(said), 2)
    bare = read_error(dump_json({"message": "Null", "script": None}), 2)

    assert full == EngineError("Null", "res://hero.gd", 12, "observe", 1)
    assert (str(full), str(bare)) == ("Null (res://hero.gd:12 in observe)", "Null")


@pytest.mark.parametrize("changed", [{"message": None}, {"script": 3}, {"line": "12"}, {"arena": 2}, {"arena": -1}])
def test_an_error_that_is_not_as_it_should_be_is_refused(changed):
    with pytest.raises(BadFrame):
        read_error(dump_json({"message": "Null"} | changed), 2)


def test_values_are_one_per_arena():
    assert read_values(b'{"values":[1,null]}', 2) == [1, None]
    with pytest.raises(BadFrame, match="list of 3"):
        read_values(b'{"values":[1,null]}', 3)
    with pytest.raises(BadFrame, match="None"):
        read_values(b"{}", 3)


def test_a_note_has_a_name():
    assert read_note(b'{"name":"wave","height":3}') == ("wave", {"height": 3})
    with pytest.raises(BadFrame, match="name"):
        read_note(b'{"height":3}')


@fuzzing
@given(
    st.dictionaries(
        st.sampled_from([*HELLO, "message", "script", "line", "arena", "values", "name", "behaviors", "max_agents"]),
        st.none() | st.integers() | st.floats() | st.text() | st.lists(st.integers(0, 3), max_size=3),
    )
)
def test_any_object_is_a_message_or_refused(message):
    try:
        body = dump_json(message)
    except ValueError:
        return
    for read in (read_hello, read_specs, lambda b: read_error(b, 2), lambda b: read_values(b, 2), read_note):
        with contextlib.suppress(BadFrame):
            read(body)
