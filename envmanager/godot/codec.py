"""Encoding of actions as the body of a step frame, and decoding of the body of a steps frame to AgentSteps.

::

    {behavior: tree of [n, …]} ── encode_step ──▶ body of step      u32 sections | behavior, n, every action array | …
    {behavior: AgentSteps} ◀── StepsDecoder ── body of steps        busy, sections | rows, observations, … | … | infos

In most steps no agent joins or leaves, no episode ends, and all agents act. ``PlainFrame`` reads the frames of such
steps, which differ only in the time, observations and rewards. Any other frame is read block by block.

The rule: a body is checked completely before any part of it is returned. Returned arrays may be views of the body, so
each body needs its own buffer at an address that is a multiple of 8. ``FrameReader`` allocates such buffers.

An engine sends rows in the order in which its agents joined. The returned rows are sorted by environment, as in the
steps of a Python worker. If the two orders differ, rows are copied.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, SpecMismatch, check_values, describe_value, matched
from envmanager.data.steps import AGENT_BITS, AgentSteps, Steps, only_agents
from envmanager.data.trees import Tree, leaves, leaves_like
from envmanager.godot.frames import BadFrame, parse_json
from envmanager.godot.messages import MAX_AGENTS, MAX_NUMBERS, ArrayLayout, BehaviorLayout, EngineSpecs, listed

SAME_ROWS, SOME_ENDED, ALL_ACT = 1, 2, 4  # flags of a section: same rows, some episodes ended, all agents need actions
TERMINATED, TRUNCATED, ACTING = 1, 2, 4  # bits of a row; ACTING: the agent needs an action

COUNT = struct.Struct("<I")
STEP_SECTION = struct.Struct("<HHI")  # head of a section of a step frame: number of the behavior, 0, number of rows
STEPS_HEAD = struct.Struct("<II")  # head of a steps frame: time in µs that the engine took, number of sections
STEPS_SECTION = struct.Struct("<HBBI")  # number of the behavior, flags, 0, number of rows

_REWARD = ArrayLayout("reward", np.dtype(np.float32), (), 1)
_REWARD_SPEC = ArraySpec()
_BITS = ArrayLayout("bits", np.dtype(np.uint8), (), 1)
_ROW = ArrayLayout("row", np.dtype(np.uint32), (2,), 2)
_ALL_ACTING = bytes([ACTING]) * MAX_AGENTS
_ZEROS = tuple(bytes(n) for n in range(4))


class Acting(NamedTuple):
    """The number ``n`` of a behavior's agents that need an action, and the order in which the engine expects actions.

    ``order`` is an index array that puts the trainer's rows into the engine's order; None if both orders are equal.
    """

    n: int
    order: np.ndarray | None = None


def encode_step(specs: EngineSpecs, actions: Mapping[str, Tree], acting: Mapping[str, Acting]) -> bytes:
    """Return the body of a step frame with ``actions``. ``acting`` is the attribute ``acting`` of the StepsDecoder.

    A behavior without actions plays by its heuristic. Raises ValueError if an array of actions has the wrong shape, or
    if there are actions for a behavior that is not in ``acting``. Arrays without rows are no actions.
    """
    unknown = actions.keys() - acting.keys()
    if unknown:
        actions = {name: own for name, own in actions.items() if name in acting or any(map(len, leaves(own)))}
        unknown = actions.keys() - acting.keys()
    if unknown:
        raise ValueError(f"actions for behavior {min(unknown)!r}, of which the engine has shown no agent")
    parts = [COUNT.pack(len(actions))]
    for behavior in specs.behaviors:
        if behavior.name not in actions:
            continue
        n, order = acting[behavior.name]
        parts.append(STEP_SECTION.pack(behavior.number, 0, n))
        given = leaves_like(behavior.spec.action, actions[behavior.name])
        for layout, leaf in zip(behavior.actions, given, strict=True):
            array = np.asarray(leaf, layout.dtype)
            if array.shape != (n, *layout.shape):
                raise ValueError(f"action {layout.name!r} should be {[n, *layout.shape]}, but is {list(array.shape)}")
            if order is not None:
                array = array[order]
            parts += (array.tobytes(), _ZEROS[-array.nbytes % 4])
    return b"".join(parts)


class Decoded(NamedTuple):
    """The decoded steps of a frame, by behavior, and the time in µs that the engine took to compute them."""

    steps: dict[str, AgentSteps]
    busy_us: int


class StepsDecoder:
    """A decoder of one engine's steps frames. It keeps each behavior's rows, because later frames may refer to them.

    Arena i of the engine is environment ``env_ids[i]``. ``infos``: whether infos were requested from the engine. If so,
    each row gets a dict, which may be empty.
    """

    def __init__(self, specs: EngineSpecs, env_ids: Sequence[int], *, infos: bool = False) -> None:
        self.acting: dict[str, Acting] = {}
        """Agents that need an action after the last frame, by behavior. The next step frame has a row for each."""
        self.specs = specs
        self._first_ids = only_agents(env_ids)
        self._infos = infos
        self._rows: dict[int, _Rows] = {}  # rows of the last section of each behavior, by the behavior's number
        self._distinct: list[_Rows] = []
        """Rows of each section of the last frame, which passed the check that no agent occurs twice."""
        self._plain: PlainFrame | None = None
        """Fast reader of frames with the last frame's rows; None until a plain frame with these rows was decoded."""

    def decode(self, body: Any, *, after_reset: bool = False) -> Decoded:
        """Decode the body of a steps frame. Raises BadFrame for an invalid body, which leaves the decoder unchanged.

        ``after_reset``: whether the frame answers a reset, so that no episode may have ended and no section may reuse
        earlier rows. The returned arrays may be views of ``body``.
        """
        if self._plain is not None and not after_reset:
            plain = self._plain.read(body)
            if plain is not None:
                self.acting = self._plain.acting
                return Decoded(plain, *COUNT.unpack_from(body))
        cursor = Cursor(body)
        busy_us, n_sections = cursor.unpack(STEPS_HEAD, "its head")
        sections: dict[int, _Section] = {}
        for _ in range(n_sections):
            section = self._section(cursor, after_reset=after_reset)
            if section.behavior.number in sections:
                raise BadFrame(f"two sections of behavior {section.behavior.name!r}")
            sections[section.behavior.number] = section
        self._add_infos(cursor, sections.values())
        cursor.finish()
        rows = [section.rows for section in sections.values()]
        if len(rows) != len(self._distinct) or not all(map(is_, rows, self._distinct)):
            self._check_distinct(rows)
            self._plain = None
        if self._plain is None and not self._infos and all(section.is_plain for section in sections.values()):
            self._plain = PlainFrame(body, list(sections.values()), cursor.arrays_read)
        self._distinct = rows
        self._rows.update(zip(sections, rows, strict=True))
        self.acting = {section.behavior.name: section.acting for section in sections.values()}
        return Decoded({section.behavior.name: section.sorted_steps() for section in sections.values()}, busy_us)

    def _section(self, cursor: Cursor, *, after_reset: bool) -> _Section:
        number, flags, zero, n = cursor.unpack(STEPS_SECTION, "the head of a section")
        if number >= len(self.specs.behaviors):
            raise BadFrame(f"behavior number {number}, where there are {len(self.specs.behaviors)}")
        behavior = self.specs.behaviors[number]
        cursor.where = f" of behavior {behavior.name!r}"
        if zero or flags > 7:
            raise BadFrame(f"reserved bits that are not 0{cursor.where} (flags {flags}, then {zero})")
        if n > MAX_AGENTS:
            raise BadFrame(f"{n} rows{cursor.where}, where {MAX_AGENTS} are the most")
        if after_reset and flags & (SAME_ROWS | SOME_ENDED):
            raise BadFrame(f"flags {flags}{cursor.where} after a reset, which has rows of its own and ends nothing")
        rows = self._rows.get(number) if flags & SAME_ROWS else self._read_rows(cursor, n)
        if rows is None:
            raise BadFrame(f"the same rows as before{cursor.where}, which had none before")
        if len(rows.agent_id) != n:
            raise BadFrame(f"the same rows as before{cursor.where}, but {n} where there were {len(rows.agent_id)}")
        obs = cursor.arrays(behavior.observations, n, "observation")
        reward = cursor.array(_REWARD, n, "the rewards")
        terminated, truncated, acting = _read_bits(cursor.array(_BITS, n, "the bits"), flags, cursor.where)
        final_obs = None
        if flags & SOME_ENDED:
            n_ended = int(np.count_nonzero(terminated | truncated))
            final_obs = cursor.arrays(behavior.observations, n_ended, "final observation")
        cursor.where = ""
        # The agent ids are copied, because the trainer may write into its array.
        steps = AgentSteps(rows.agent_id.copy(), obs, reward, terminated, truncated, final_obs, acting)
        return _Section(behavior, flags, rows, steps)

    def _read_rows(self, cursor: Cursor, n: int) -> _Rows:
        rows = cursor.array(_ROW, n, "the rows")
        arenas = rows[:, 0]
        if n and arenas.max() >= len(self._first_ids):
            raise BadFrame(f"arena {arenas.max()}{cursor.where}, where there are {len(self._first_ids)}")
        is_sorted = n < 2 or bool((arenas[1:] >= arenas[:-1]).all())
        order = None if is_sorted else np.argsort(self._first_ids[arenas], kind="stable")
        return _Rows(self._first_ids[arenas] + rows[:, 1], order)

    def _check_distinct(self, rows: list[_Rows]) -> None:
        """Raise BadFrame if two rows have the same agent, or if there are more than ``MAX_AGENTS`` rows in total."""
        together = np.sort(np.concatenate([own.agent_id for own in rows])) if rows else np.zeros(0, np.int64)
        if len(together) > MAX_AGENTS:
            raise BadFrame(f"{len(together)} rows, where {MAX_AGENTS} are the most")
        twice = together[1:][together[1:] == together[:-1]]
        if len(twice):
            arena = int(np.flatnonzero(self._first_ids == twice[0] >> AGENT_BITS << AGENT_BITS)[0])
            raise BadFrame(f"agent {twice[0] & (1 << AGENT_BITS) - 1} of arena {arena} twice")

    def _add_infos(self, cursor: Cursor, sections: Collection[_Section]) -> None:
        """Read the infos, and add them to the sections' steps. Raises BadFrame for invalid or unrequested infos."""
        (n_bytes,) = cursor.unpack(COUNT, "the length of the infos")
        if n_bytes and not self._infos:
            raise BadFrame(f"{n_bytes} bytes of infos, which nobody asked for")
        if not self._infos:
            return
        infos = parse_json(cursor.block(n_bytes, "the infos")) if n_bytes else {}
        unknown = infos.keys() - {section.behavior.name for section in sections}
        if unknown:
            raise BadFrame(f"infos of behavior {min(unknown)!r}, which has no rows in the frame")
        for section in sections:
            steps, where = section.steps, f"behavior {section.behavior.name!r}"
            own, n_ended = infos.get(section.behavior.name, {}), int(np.count_nonzero(steps.ended))
            if not isinstance(own, dict):
                raise BadFrame(f"infos of {where} that are {describe_value(own)}")
            steps.info = _dicts(own.get("info"), len(steps), f"info of {where}")
            if n_ended or own.get("reset_info"):
                steps.reset_info = _dicts(own.get("reset_info"), n_ended, f"reset_info of {where}")


@attrs.frozen(eq=False)
class _Rows:
    """The agent ids of a section's rows, and the index array ``order`` that sorts them by env_id (None if sorted)."""

    agent_id: np.ndarray
    order: np.ndarray | None


@attrs.frozen(eq=False)
class _Section:
    """The section of a steps frame for one behavior. Its ``steps`` are in the engine's order."""

    behavior: BehaviorLayout
    flags: int
    rows: _Rows
    steps: AgentSteps

    @property
    def is_plain(self) -> bool:
        """Whether PlainFrame can read later sections that have the same rows and flags as this one."""
        is_aligned = all(layout.dtype.itemsize <= 4 for layout in self.behavior.observations)
        return self.flags == SAME_ROWS | ALL_ACT and self.rows.order is None and is_aligned

    @property
    def acting(self) -> Acting:
        """The number of agents that need an action, and the order in which the engine expects the actions."""
        order, acting = self.rows.order, self.steps.acting
        if order is None:
            return Acting(len(self.steps.acting_rows))
        order = order if acting is None else order[acting[order]]
        return Acting(len(order), np.argsort(order))

    def sorted_steps(self) -> AgentSteps:
        return self.steps if self.rows.order is None else self.steps.take(self.rows.order)


def _read_bits(bits: np.ndarray, flags: int, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return ``terminated``, ``truncated`` and ``acting`` (None if all act) of a section. ``bits`` has a byte per row.

    Raises BadFrame if a reserved bit is set, or if the bits contradict the section's flags.
    """
    n = len(bits)
    if not flags & SOME_ENDED and bits.tobytes() == _ALL_ACTING[:n]:  # nearly always
        return np.zeros(n, np.bool_), np.zeros(n, np.bool_), None
    if bits.max(initial=0) > 7:
        raise BadFrame(f"reserved bits that are not 0 in the bits{where}")
    acting = (bits >> 2).view(np.bool_)
    n_ended, n_idle = np.count_nonzero(bits & (TERMINATED | TRUNCATED)), n - np.count_nonzero(acting)
    if bool(n_ended) != bool(flags & SOME_ENDED):
        raise BadFrame(f"{n_ended} rows that ended{where}, but flags {flags}")
    if n_idle and flags & ALL_ACT:
        raise BadFrame(f"{n_idle} rows that want no action{where}, but flags {flags}")
    return (bits & TERMINATED).view(np.bool_), (bits >> 1 & 1).view(np.bool_), acting if n_idle else None


def _dicts(given: Any, n: int, where: str) -> list[dict[str, Any]]:
    found = listed([None] * n if given is None else given, n, where)
    for each in found:
        if each is not None and not isinstance(each, dict):
            raise BadFrame(f"{where} has {describe_value(each)}, which is no object")
    return [each or {} for each in found]


_Place = tuple[str, tuple[int, ...], np.dtype[Any], int]  # name, shape and dtype of an array, and its offset in a body


class Cursor:
    """A sequential reader of the blocks in a frame's body. Each block is padded with zeros to a multiple of 4 bytes.

    The methods that read raise BadFrame for missing bytes, nonzero padding, or an array that is too large.
    """

    def __init__(self, body: Any) -> None:
        self.where = ""  # clause for error messages that names the behavior being read; empty outside of sections
        self.arrays_read: list[_Place] = []
        self._body = memoryview(body)
        self._at = 0

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        """Read the next block as the struct ``layout`` and return the values. ``what`` names the block in errors."""
        at = self._advance(layout.size, what)
        return layout.unpack_from(self._body, at)

    def arrays(self, layouts: tuple[ArrayLayout, ...], n: int, what: str) -> Tree:
        """Read one array ``[n, …]`` per layout. Return a dict of arrays by name, or the array if there is only one."""
        if len(layouts) == 1:
            return self.array(layouts[0], n, what)
        return {layout.name: self.array(layout, n, what) for layout in layouts}

    def array(self, layout: ArrayLayout, n: int, what: str) -> np.ndarray:
        """Return the next block as an array ``[n, …]``: a view, or a copy if 8-byte numbers are unaligned in memory."""
        n_numbers = n * layout.n_numbers
        if n_numbers > MAX_NUMBERS:
            raise BadFrame(
                f"{n_numbers} numbers in {what} {layout.name!r}{self.where}, where {MAX_NUMBERS} are the most"
            )
        itemsize = layout.dtype.itemsize
        at = self._advance(n_numbers * itemsize, what)
        self.arrays_read.append((layout.name, (n, *layout.shape), layout.dtype, at))
        flat = np.frombuffer(self._body, layout.dtype, n_numbers, at) if n_numbers else np.empty(0, layout.dtype)
        if itemsize > 4 and not flat.flags.aligned:
            flat = flat.copy()
        return flat.reshape(n, *layout.shape) if layout.shape else flat

    def block(self, n_bytes: int, what: str) -> memoryview:
        at = self._advance(n_bytes, what)
        return self._body[at : at + n_bytes]

    def finish(self) -> None:
        """Raise BadFrame unless the whole body was read."""
        if self._at != len(self._body):
            raise BadFrame(f"{len(self._body) - self._at} bytes left over after the infos")

    def _advance(self, n_bytes: int, what: str) -> int:
        """Skip a block of ``n_bytes`` bytes and its padding. Return the block's offset in the body."""
        at = self._at
        self._at = end = at + n_bytes + (-n_bytes % 4)
        if end > len(self._body):
            have = len(self._body) - at
            raise BadFrame(f"bytes missing: {what}{self.where} should have {end - at}, but {have} are left")
        if n_bytes % 4 and self._body[at + n_bytes : end] != _ZEROS[-n_bytes % 4]:
            raise BadFrame(f"padding that is not 0 after {what}{self.where}")
        return at


class PlainFrame:
    """A fast reader of steps frames that have the same rows and flags as an earlier frame.

    The rule: a frame is read only if all bytes except the time, observations and rewards equal the earlier frame's.
    """

    def __init__(self, body: Any, sections: Sequence[_Section], arrays_read: Sequence[_Place]) -> None:
        self.acting = {section.behavior.name: Acting(len(section.steps)) for section in sections}
        self._size = len(body)
        self._known: list[tuple[int, bytes]] = []
        """Offsets and contents of the byte ranges that must be the same in each frame that is read."""
        self._sections: list[tuple[str, np.ndarray, list[_Place], _Place]] = []
        """Behavior, agent ids, places of the observations, place of the rewards."""
        arrays, at = iter(arrays_read), COUNT.size  # busy_us comes first and may differ
        for section in sections:
            observations = [next(arrays) for _ in section.behavior.observations]
            reward, _ = next(arrays), next(arrays)  # the second one has the bits, which must be equal
            self._sections.append((section.behavior.name, section.rows.agent_id, observations, reward))
            for _, shape, dtype, start in (*observations, reward):
                if at < start:
                    self._known.append((at, bytes(body[at:start])))
                at = start + math.prod(shape) * dtype.itemsize
        self._known.append((at, bytes(body[at:])))

    def read(self, body: Any) -> dict[str, AgentSteps] | None:
        """Return the steps in ``body`` by behavior; None if ``body`` does not match the earlier frame."""
        if len(body) != self._size:
            return None
        for start, known in self._known:
            if bytes(body[start : start + len(known)]) != known:
                return None
        found = {}
        for behavior, agent_id, observations, (_, shape, dtype, at) in self._sections:
            arrays: dict[str, np.ndarray] = {
                name: np.ndarray(own_shape, own_dtype, body, start)
                for name, own_shape, own_dtype, start in observations
            }
            found[behavior] = AgentSteps(
                agent_id.copy(),  # the trainer may write into its array
                arrays if len(arrays) > 1 else next(iter(arrays.values())),
                np.ndarray(shape, dtype, body, at),
                np.zeros(len(agent_id), np.bool_),
                np.zeros(len(agent_id), np.bool_),
            )
        return found


def bad_numbers(specs: EngineSpecs, steps: Steps) -> tuple[tuple[int, ...], SpecMismatch] | None:
    """Search for an array with invalid numbers (NaN, infinite or out of bounds). Return None if there is none.

    For the first such array, return the env_ids of its invalid rows, and the mismatch.
    """
    for name, own in steps.items():
        spec, env_id = specs.behavior_specs[name].observation, own.env_id
        parts = [(*each, env_id) for each in (*matched(spec, own.obs, "obs"), (_REWARD_SPEC, own.reward, "reward"))]
        if own.final_obs is not None:
            parts += [(*each, env_id[own.ended]) for each in matched(spec, own.final_obs, "final_obs")]
        for leaf_spec, leaf, path, env_ids in parts:
            mismatch = _mistake(leaf_spec, leaf, path)
            if mismatch is not None:
                bad = [_mistake(leaf_spec, row, path) is not None for row in leaf]
                return tuple(sorted(set(env_ids[bad].tolist()))), mismatch
    return None


def _mistake(spec: ArraySpec, values: Any, path: str) -> SpecMismatch | None:
    try:
        check_values(spec, values, path)
    except SpecMismatch as mismatch:
        return mismatch
    return None
