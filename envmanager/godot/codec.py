"""The trainer's end of steps: actions into the body of a step frame, the body of a steps frame into AgentSteps.

::

    {behavior: tree of [n, …]} ── encode_step ──▶ body of step      u32 sections | behavior, n, every action array | …
    {behavior: AgentSteps} ◀── StepsDecoder ── body of steps        busy | rows, observations, reward, bits | … | infos

The rule: nothing of a body is handed out before all of it has been checked, and the arrays handed out are views of it.
So a body must have a buffer of its own, whose address is a multiple of 8 (``FrameReader`` gives such).

An engine's rows are in the order in which its agents joined; those handed out are in that of their environments, as
those of a Python worker. Where the two differ, rows are copied.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from envmanager.data.specs import describe_value
from envmanager.data.steps import AGENT_BITS, AgentSteps, only_agents
from envmanager.data.trees import Tree, leaves_like
from envmanager.godot.cursor import Cursor
from envmanager.godot.engine_specs import MAX_AGENTS, ArrayLayout, BehaviorLayout, EngineSpecs
from envmanager.godot.frames import BadFrame, parse_json
from envmanager.godot.plain_frames import (
    ACTING,
    ALL_ACT,
    COUNT,
    SAME_ROWS,
    SOME_ENDED,
    STEPS_HEAD,
    STEPS_SECTION,
    TERMINATED,
    TRUNCATED,
    PlainFrame,
)

STEP_SECTION = struct.Struct("<HHI")
"""Behavior, 0, n."""


def padding(n_bytes: int) -> bytes:
    """The zeros after a block of so many bytes."""
    return bytes(-n_bytes % 4)


class Acting(NamedTuple):
    """Who of a behavior wants an action: so many agents. ``order`` sorts their rows, as they were handed out, into the
    engine's order; None where that is the same.
    """

    n: int
    order: np.ndarray | None = None


def encode_step(specs: EngineSpecs, actions: Mapping[str, Tree], acting: Mapping[str, Acting]) -> bytes:
    """The body of a step frame. ``acting`` says who wants an action (``StepsDecoder.acting``).

    ``actions`` fit their specs: the manager has checked that. A behavior left out plays by itself. ValueError when the
    number of rows is another, or a behavior unknown.
    """
    unknown = actions.keys() - acting.keys()
    if unknown:
        raise ValueError(f"actions for behavior {min(unknown)!r}, of which the engine has shown no agent")
    parts = [COUNT.pack(len(actions))]
    for behavior in specs.behaviors:
        if behavior.name in actions:
            wanted = acting[behavior.name]
            parts.append(STEP_SECTION.pack(behavior.number, 0, wanted.n))
            given = leaves_like(behavior.spec.action, actions[behavior.name])
            for layout, leaf in zip(behavior.actions, given, strict=True):
                parts += _block(layout, leaf, wanted)
    return b"".join(parts)


def _block(layout: ArrayLayout, leaf: Any, wanted: Acting) -> tuple[bytes, bytes]:
    array = np.asarray(leaf, layout.dtype)
    if array.shape != (wanted.n, *layout.shape):
        raise ValueError(f"action {layout.name!r} should be {[wanted.n, *layout.shape]}, but is {list(array.shape)}")
    if wanted.order is not None:
        array = array[wanted.order]
    return array.tobytes(), padding(array.nbytes)


class Decoded(NamedTuple):
    """What a steps frame says: the steps, and how long the engine was busy with them."""

    steps: dict[str, AgentSteps]
    busy_us: int


class StepsDecoder:
    """Makes AgentSteps of the bodies of one engine's steps frames, and remembers what later ones refer to.

    Arena i of the engine is environment ``env_ids[i]``. ``infos``: the engine was asked for infos, so every row has
    one, be it empty.
    """

    def __init__(self, specs: EngineSpecs, env_ids: Sequence[int], *, infos: bool = False) -> None:
        self.acting: dict[str, Acting] = {}
        """Who in the last frame wants an action, by behavior. Theirs are the rows of the next step."""
        self._specs = specs
        self._first_ids = only_agents(env_ids)
        self._infos = infos
        self._rows: dict[int, _Rows] = {}
        """By behavior, those of the last frame that had a section for it."""
        self._distinct: list[_Rows] = []
        """The rows of the sections of the last frame, of which no agent is in two."""
        self._plain: PlainFrame | None = None
        """The frame with these rows that needs no care; None when there can be none."""
        self._all_act: dict[str, Acting] = {}
        """Who wants an action after that."""

    def decode(self, body: Any, *, after_reset: bool = False) -> Decoded:
        """What a steps frame says; BadFrame, and nothing remembered of it, when it is not as it should be.

        ``after_reset``: it answers a reset, so there are no ends and no rows to refer to. The arrays are views of
        ``body``, but those that would not be aligned.
        """
        if self._plain is not None and not after_reset:
            plain = self._plain.read(body)
            if plain is not None:
                self.acting = self._all_act
                return Decoded(plain, *COUNT.unpack_from(body))
        cursor = Cursor(body)
        busy_us, n_sections = cursor.unpack(STEPS_HEAD, "its head")
        if n_sections > len(self._specs.behaviors):
            raise BadFrame(f"{n_sections} sections, where there are {len(self._specs.behaviors)} behaviors")
        sections: dict[int, _Section] = {}
        for _ in range(n_sections):
            section = self._section(cursor, after_reset=after_reset)
            if section.behavior.number in sections:
                raise BadFrame(f"two sections of behavior {section.behavior.name!r}")
            sections[section.behavior.number] = section
        infos = self._read_infos(cursor, sections)
        cursor.finish()
        rows = [section.rows for section in sections.values()]
        self._check_distinct(rows)
        steps = {section.behavior.name: section.steps(infos) for section in sections.values()}
        if not self._are_distinct(rows):
            self._expect_plain(list(sections.values()))
        self._distinct = rows
        self._rows.update(zip(sections, rows, strict=True))
        self.acting = {section.behavior.name: section.who_acts() for section in sections.values()}
        return Decoded(steps, busy_us)

    def _expect_plain(self, sections: Sequence[_Section]) -> None:
        """Prepare for frames with the same rows. Those that are sorted or copied, or have infos, are never plain."""
        self._plain = None
        if not self._infos and all(map(_Section.may_be_plain, sections)):
            self._plain = PlainFrame([(section.behavior, section.rows.agent_id) for section in sections])
            self._all_act = {section.behavior.name: Acting(len(section.reward)) for section in sections}

    def _section(self, cursor: Cursor, *, after_reset: bool) -> _Section:
        number, flags, zero, n = cursor.unpack(STEPS_SECTION, "the head of a section")
        if number >= len(self._specs.behaviors):
            raise BadFrame(f"behavior number {number}, where there are {len(self._specs.behaviors)}")
        behavior = self._specs.behaviors[number]
        cursor.where = f" of behavior {behavior.name!r}"
        if zero or flags > 7:
            raise BadFrame(f"reserved bits that are not 0{cursor.where} (flags {flags}, then {zero})")
        if n > MAX_AGENTS:
            raise BadFrame(f"{n} rows{cursor.where}, where {MAX_AGENTS} are the most")
        if after_reset and flags & (SAME_ROWS | SOME_ENDED):
            raise BadFrame(f"flags {flags}{cursor.where} after a reset, which has rows of its own and ends nothing")
        rows = self._same_rows(number, n, cursor) if flags & SAME_ROWS else self._read_rows(cursor, n)
        obs = cursor.arrays(behavior.observations, n, "observation")
        reward = cursor.array(_REWARD, n, "the rewards")
        bits = cursor.array(_BITS, n, "the bits")
        section = _Section(behavior, rows, obs, reward, flags)
        section.read_bits(bits, cursor.where)
        if flags & SOME_ENDED:
            section.final_obs = cursor.arrays(behavior.observations, section.n_ended, "final observation")
        cursor.where = ""
        return section

    def _same_rows(self, number: int, n: int, cursor: Cursor) -> _Rows:
        known = self._rows.get(number)
        if known is None:
            raise BadFrame(f"the same rows as before{cursor.where}, which had none before")
        if len(known.agent_id) != n:
            raise BadFrame(f"the same rows as before{cursor.where}, but {n} where there were {len(known.agent_id)}")
        return known

    def _read_rows(self, cursor: Cursor, n: int) -> _Rows:
        rows = cursor.array(_ROW, n, "the rows")
        arenas = rows[:, 0]
        if n and arenas.max() >= len(self._first_ids):
            raise BadFrame(f"arena {arenas.max()}{cursor.where}, where there are {len(self._first_ids)}")
        is_sorted = n < 2 or bool((arenas[1:] >= arenas[:-1]).all())
        order = None if is_sorted else np.argsort(self._first_ids[arenas], kind="stable")
        return _Rows(self._first_ids[arenas] + rows[:, 1], order)

    def _check_distinct(self, rows: list[_Rows]) -> None:
        """BadFrame when an agent is there twice, in one behavior or in two."""
        if self._are_distinct(rows):
            return
        together = np.sort(np.concatenate([own.agent_id for own in rows])) if rows else np.zeros(0, np.int64)
        if len(together) > MAX_AGENTS:
            raise BadFrame(f"{len(together)} rows, where {MAX_AGENTS} are the most")
        twice = together[1:][together[1:] == together[:-1]]
        if len(twice):
            arena = int(np.flatnonzero(self._first_ids == twice[0] >> AGENT_BITS << AGENT_BITS)[0])
            raise BadFrame(f"agent {twice[0] & (1 << AGENT_BITS) - 1} of arena {arena} twice")

    def _are_distinct(self, rows: list[_Rows]) -> bool:
        """Whether they are those of the last frame."""
        return len(rows) == len(self._distinct) and all(map(_is, rows, self._distinct))

    def _read_infos(self, cursor: Cursor, sections: Mapping[int, _Section]) -> dict[str, Any] | None:
        """The infos by behavior, {} when the engine has none to tell; None when it was not asked."""
        (n_bytes,) = cursor.unpack(COUNT, "the length of the infos")
        if n_bytes and not self._infos:
            raise BadFrame(f"{n_bytes} bytes of infos, which nobody asked for")
        if not n_bytes:
            return {} if self._infos else None
        infos = parse_json(cursor.block(n_bytes, "the infos"))
        unknown = infos.keys() - {section.behavior.name for section in sections.values()}
        if unknown:
            raise BadFrame(f"infos of behavior {min(unknown)!r}, which has no rows in the frame")
        return infos


def _is(one: object, other: object) -> bool:
    return one is other


@attrs.frozen(eq=False)
class _Rows:
    """Whose the rows of a section are: ``agent_id`` int64[n]. ``order`` sorts them by environment; None: they are."""

    agent_id: np.ndarray
    order: np.ndarray | None


@attrs.define(eq=False)
class _Section:
    """What a frame says of one behavior."""

    behavior: BehaviorLayout
    rows: _Rows
    obs: Tree
    reward: np.ndarray
    flags: int
    terminated: np.ndarray = attrs.field(init=False)
    truncated: np.ndarray = attrs.field(init=False)
    acting: np.ndarray | None = attrs.field(init=False, default=None)
    final_obs: Tree = attrs.field(init=False, default=None)
    n_ended: int = attrs.field(init=False, default=0)
    n_acting: int = attrs.field(init=False)

    def read_bits(self, bits: np.ndarray, where: str) -> None:
        """Sort the bits into arrays; BadFrame when the flags say otherwise."""
        n = self.n_acting = len(bits)
        if not self.flags & SOME_ENDED and bits.tobytes() == _ALL_ACTING[:n]:  # nearly always
            self.terminated, self.truncated = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
            return
        if bits.max(initial=0) > 7:
            raise BadFrame(f"reserved bits that are not 0 in the bits{where}")
        self.terminated = (bits & TERMINATED).view(np.bool_)
        self.truncated = (bits >> 1 & 1).view(np.bool_)
        acting = (bits >> 2).view(np.bool_)
        self.n_ended = int(np.count_nonzero(bits & (TERMINATED | TRUNCATED)))
        self.n_acting = int(np.count_nonzero(acting))
        if bool(self.n_ended) != bool(self.flags & SOME_ENDED):
            raise BadFrame(f"{self.n_ended} rows that ended{where}, but flags {self.flags}")
        if self.n_acting < n:
            if self.flags & ALL_ACT:
                raise BadFrame(f"{n - self.n_acting} rows that want no action{where}, but flags {self.flags}")
            self.acting = acting

    def steps(self, infos: Mapping[str, Any] | None) -> AgentSteps:
        """All of it, with the infos, in the order of the environments."""
        info, reset_info = (None, None) if infos is None else self._own(infos.get(self.behavior.name, {}))
        steps = AgentSteps(
            self.rows.agent_id.copy(),  # the decoder's own must not change with what a trainer does
            self.obs,
            self.reward,
            self.terminated,
            self.truncated,
            self.final_obs,
            self.acting,
            info,
            reset_info,
        )
        return steps if self.rows.order is None else steps.take(self.rows.order)

    def may_be_plain(self) -> bool:
        """Whether a frame with the same rows may be read by place."""
        return self.rows.order is None and all(layout.dtype.itemsize <= 4 for layout in self.behavior.observations)

    def who_acts(self) -> Acting:
        """Who wants an action, in which order."""
        order = self.rows.order
        if order is None:
            return Acting(self.n_acting)
        return Acting(self.n_acting, np.argsort(order if self.acting is None else order[self.acting[order]]))

    def _own(self, infos: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        if not isinstance(infos, dict):
            raise BadFrame(f"infos of behavior {self.behavior.name!r} that are {describe_value(infos)}")
        return self._dicts(infos, "info", len(self.reward)), (
            self._dicts(infos, "reset_info", self.n_ended) if self.n_ended or infos.get("reset_info") else None
        )

    def _dicts(self, infos: dict[str, Any], key: str, n: int) -> list[dict[str, Any]]:
        given = infos.get(key)
        if given is None:
            return [{} for _ in range(n)]
        if not isinstance(given, list) or len(given) != n:
            got = f"a list of {len(given)}" if isinstance(given, list) else describe_value(given)
            raise BadFrame(f"{key} of behavior {self.behavior.name!r} should be a list of {n}, but is {got}")
        found: list[dict[str, Any]] = []
        for each in given:
            if each is not None and not isinstance(each, dict):
                raise BadFrame(
                    f"{key} of behavior {self.behavior.name!r} has {describe_value(each)}, which is no object"
                )
            found.append({} if each is None else each)
        return found


_ALL_ACTING = bytes([ACTING]) * MAX_AGENTS
_REWARD = ArrayLayout("reward", np.dtype(np.float32), (), 1)
_BITS = ArrayLayout("bits", np.dtype(np.uint8), (), 1)
_ROW = ArrayLayout("row", np.dtype(np.uint32), (2,), 2)
