"""The engine's end of protocol 1.0 in Python: encoding of specs and steps, decoding and checks of requests.

It is written from the protocol and not from the trainer's end, so that a mistake in either of them is detected. It
checks the trainer's requests, as a Godot engine does.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpecs, describe_spec
from envmanager.data.steps import AGENT_BITS, AgentSteps, Begin, Steps
from envmanager.data.trees import Tree, leaves_like
from envmanager.errors import UsageError
from envmanager.godot.frames import BadFrame, dump_json, parse_json
from envmanager.godot.messages import DTYPES, BehaviorLayout, EngineSpecs

Body = bytes | bytearray | memoryview


def specs_body(specs: BehaviorSpecs, max_agents: Mapping[str, int], *, begins_on_demand: bool = False) -> bytes:
    """Return the body of a specs frame; raise UsageError for objects, nested trees and dtypes that it cannot hold."""
    behaviors = [
        {
            "name": name,
            "observations": _described(spec.observation, "obs", name),
            "actions": _described(spec.action, "action", name),
        }
        for name, spec in specs.items()
    ]
    most = {name: int(max_agents[name]) for name in specs}
    return dump_json({"behaviors": behaviors, "max_agents": most, "begins_on_demand": begins_on_demand})


def _described(tree: Tree, plain_name: str, behavior: str) -> list[dict[str, Any]]:
    named = tree if isinstance(tree, dict) and len(tree) > 1 else {plain_name: tree}
    for leaf in named.values():
        if not isinstance(leaf, ArraySpec) or leaf.dtype.name not in DTYPES or 0 in leaf.shape:
            raise UsageError(
                f"behavior {behavior!r} has {describe_spec(tree)}, which the protocol cannot hold: it takes one array, "
                f"or a dict of several, of {', '.join(DTYPES)}."
            )
    return [
        {
            "name": name,
            "shape": list(leaf.shape),
            "dtype": leaf.dtype.name,
            "low": _bound(leaf, leaf.minimum),
            "high": _bound(leaf, leaf.maximum),
        }
        for name, leaf in named.items()
    ]


def _bound(leaf: ArraySpec, bound: np.ndarray | None) -> Any:
    """Return a bound as one number, as a list, or as None if it is infinite, which JSON does not have."""
    if bound is None or (leaf.dtype.kind == "f" and np.isinf(bound).all()):
        return None
    if leaf.dtype.kind == "f":
        limits = np.finfo(leaf.dtype)
        bound = np.clip(bound, limits.min, limits.max)
    return bound.item() if bound.ndim == 0 else np.broadcast_to(bound, leaf.shape).ravel().tolist()


class StepsEncoder:
    """An encoder of the steps frames of an engine whose arena i is environment ``env_ids[i]``."""

    def __init__(self, specs: EngineSpecs, env_ids: Sequence[int]) -> None:
        self.acting: dict[str, int] = {}
        """Number of agents of each behavior in the last frame that need an action."""
        self._behaviors = {behavior.name: behavior for behavior in specs.behaviors}
        self._arena_of = {env_id: arena for arena, env_id in enumerate(env_ids)}
        self._rows: dict[str, bytes] = {}

    def encode(self, steps: Steps, *, busy_us: int = 0, after_reset: bool = False) -> bytes:
        """Return the body of the frame of ``steps``."""
        unknown = steps.keys() - self._behaviors.keys()
        if unknown:
            raise UsageError(f"behavior {min(unknown)!r} was not among the specs, which an engine sends only once.")
        parts = [struct.pack("<II", busy_us & 0xFFFFFFFF, len(steps))]
        rows: dict[str, bytes] = {}
        for name, own in steps.items():
            rows[name] = self._rows_of(own)
            is_new = after_reset or self._rows.get(name) != rows[name]
            parts += _section(self._behaviors[name], own, rows[name] if is_new else None)
        infos = {name: _infos(own) for name, own in steps.items() if own.info is not None}
        encoded = dump_json(infos) if infos else b""
        parts += [struct.pack("<I", len(encoded)), *_padded(encoded)]
        self._rows.update(rows)  # last, when nothing can raise any more
        self.acting = {name: len(own.acting_rows) for name, own in steps.items()}
        return b"".join(parts)

    def _rows_of(self, steps: AgentSteps) -> bytes:
        pairs = np.empty((len(steps), 2), "<u4")
        pairs[:, 0] = [self._arena_of[env_id] for env_id in steps.env_id.tolist()]
        pairs[:, 1] = steps.agent_id & (1 << AGENT_BITS) - 1
        return pairs.tobytes()


def _section(behavior: BehaviorLayout, steps: AgentSteps, rows: bytes | None) -> list[bytes]:
    """Return the parts of one behavior. ``rows`` is None if they are unchanged since the last frame."""
    acting = np.ones(len(steps), np.bool_) if steps.acting is None else steps.acting
    flags = 1 * (rows is None) | 2 * bool(steps.ended.any()) | 4 * bool(acting.all())
    parts = [struct.pack("<HBBI", behavior.number, flags, 0, len(steps)), rows or b""]
    structure = behavior.spec.observation
    for leaf in leaves_like(structure, steps.obs):
        parts += _padded(leaf.tobytes())
    parts.append(steps.reward.astype("<f4").tobytes())
    parts += _padded((1 * steps.terminated + 2 * steps.truncated + 4 * acting).astype(np.uint8).tobytes())
    if flags & 2:
        for leaf in leaves_like(structure, steps.final_obs):
            parts += _padded(leaf.tobytes())
    return parts


def _infos(steps: AgentSteps) -> dict[str, Any]:
    """Return infos as a frame has them, with null for an empty one."""
    said: dict[str, Any] = {"info": [plain(info) or None for info in steps.info or ()]}
    if steps.reset_info is not None:
        said["reset_info"] = [plain(info) or None for info in steps.reset_info]
    return said


def _padded(block: bytes) -> tuple[bytes, bytes]:
    return block, bytes(-len(block) % 4)


def plain(value: Any) -> Any:
    """Return ``value`` as JSON data, with lists and numbers in place of NumPy's arrays and numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def read_step(specs: EngineSpecs, body: Body, acting: Mapping[str, int]) -> dict[str, Tree]:
    """Return the actions in a step frame's body; raise BadFrame unless there is a row per agent in ``acting``."""
    view = memoryview(body)
    n_sections, at = _unpack("<I", view, 0)[0], 4
    actions: dict[str, Tree] = {}
    for _ in range(n_sections):
        number, zero, n = _unpack("<HHI", view, at)
        at += 8
        if number >= len(specs.behaviors) or zero:
            raise BadFrame(f"actions of behavior number {number}, then {zero}")
        behavior = specs.behaviors[number]
        n_acting = acting.get(behavior.name, 0)
        if behavior.name in actions or n != n_acting:
            raise BadFrame(f"{n} rows of actions of behavior {behavior.name!r}, for {n_acting} agents")
        found = {}
        for layout in behavior.actions:
            n_bytes = n * layout.n_numbers * layout.dtype.itemsize
            if at + n_bytes > len(view):
                raise BadFrame(f"bytes missing in the actions of behavior {behavior.name!r}")
            # Copied, since an environment may keep or change its action.
            own = bytearray(view[at : at + n_bytes])
            found[layout.name] = np.ndarray((n, *layout.shape), layout.dtype, own)
            at += n_bytes + -n_bytes % 4
        actions[behavior.name] = found if isinstance(behavior.spec.action, dict) else next(iter(found.values()))
    if at != len(view):
        raise BadFrame(f"{len(view) - at} bytes left over after the actions")
    return actions


def _unpack(layout: str, view: memoryview, at: int) -> tuple[Any, ...]:
    if at + struct.calcsize(layout) > len(view):
        raise BadFrame("bytes missing in the actions")
    return struct.unpack_from(layout, view, at)


@attrs.frozen
class Configure:
    """The configuration that a trainer sends to an engine."""

    arenas: int
    ticks_per_action: int
    seed: int
    isolate: bool
    shown: int
    infos: bool
    scene: str | None
    may_spin: bool


def read_configure(body: Body) -> Configure:
    """Decode the body of a configure frame."""
    message = parse_json(body)
    if message.get("protocol", [0])[0] != 1:
        raise BadFrame(f"a configure frame of protocol {message.get('protocol')}")
    try:
        return Configure(**{field.name: message[field.name] for field in attrs.fields(Configure)})
    except KeyError as missing:
        raise BadFrame(f"a configure frame without {missing}") from None


@attrs.frozen
class Reset:
    """A trainer's reset request: a seed or None for each arena of ``arenas``, or for all arenas."""

    seeds: list[int | None]
    options: dict[str, Any]
    arenas: list[int] | None


def read_reset(body: Body, n_arenas: int) -> Reset:
    """Decode the body of a reset frame."""
    message = parse_json(body)
    arenas = message.get("arenas")
    seeds = message.get("seeds")
    if not isinstance(seeds, list) or len(seeds) != (n_arenas if arenas is None else len(arenas)):
        raise BadFrame("a reset whose seeds are not one per arena")
    return Reset(seeds, message.get("options") or {}, arenas)


def read_begins(begins: Any, n_arenas: int) -> list[Begin]:
    """Decode the begins of a reset or of a begin frame."""
    if not isinstance(begins, list) or any(not isinstance(each, list) or len(each) != 4 for each in begins):
        raise BadFrame("begins that are no lists of arena, at once, seed and options")
    if any(not 0 <= arena < n_arenas for arena, *_ in begins):
        raise BadFrame("a begin of an arena that is not there")
    return [Begin(arena, at_once, seed, options or None) for arena, at_once, seed, options in begins]


@attrs.frozen
class Call:
    """A trainer's call into some arenas: ``what`` is "method", "get", "set" or "render"."""

    what: str
    name: str | None
    args: list[Any]
    kwargs: dict[str, Any]
    arenas: list[int]


def read_call(body: Body, n_arenas: int) -> Call:
    """Decode the body of a call frame."""
    message = parse_json(body)
    asked = [what for what in ("method", "get", "set", "render") if what in message]
    arenas = message.get("arenas")
    if len(asked) != 1 or not isinstance(arenas, list) or not set(arenas) <= set(range(n_arenas)):
        raise BadFrame(f"a call that asks for {asked} of arenas {arenas}")
    name = None if asked == ["render"] else message[asked[0]]
    return Call(asked[0], name, message.get("args", []), message.get("kwargs", {}), arenas)
