"""Functions that build the JSON bodies of frames to an engine, and parse the JSON bodies of frames from an engine.

This module checks the bodies that it parses, so the decoder of steps can rely on unique names and on sizes that do not
overflow. A wrong value, or a missing required value, raises ``BadFrame``. An unknown key is ignored, so that a later
minor version may add keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec, BehaviorSpecs, describe_value
from envmanager.data.steps import Begin
from envmanager.data.trees import Tree
from envmanager.godot.frames import PROTOCOL, BadFrame, TooLarge, dump_json, parse_json
from envmanager.godot.options import DEFAULT_TICKS_PER_ACTION, GodotOptions

Body = bytes | bytearray | memoryview

MAX_BEHAVIORS = 64
MAX_AGENTS = 65_536
MAX_NUMBERS = 2**24  # maximum number of elements of one array
MAX_DIMENSIONS = 16  # maximum number of dimensions of one agent's array; NumPy allows at least 32

DTYPES = {name: np.dtype(name) for name in ("float32", "int32", "uint8", "int64", "float64")}
"""Dtypes of arrays. This library's Godot addon does not use the last two."""


@attrs.frozen
class ArrayLayout:
    """The layout of n agents' values in a frame: ``[n, *shape]`` in C order, zero-padded to a multiple of 4 bytes."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    n_numbers: int
    """Number of elements per agent."""


@attrs.frozen
class BehaviorLayout:
    """The name and spec of a behavior, its ``number`` in frames, and its arrays' layouts in the order that frames use.

    In the trainer, an observation or action that has one array is that array; otherwise it is a dict of arrays by name.
    """

    number: int
    name: str
    spec: BehaviorSpec
    observations: tuple[ArrayLayout, ...]
    actions: tuple[ArrayLayout, ...]


@attrs.frozen
class EngineSpecs:
    """The behaviors of an engine, ordered by number, and the maximum number of agents that each has at one time."""

    behaviors: tuple[BehaviorLayout, ...]
    max_agents: Mapping[str, int]
    declared: Mapping[str, Any] = attrs.field(factory=dict)
    """What the scene declares about its training; see ``envmanager.godot.declared``."""
    begins_on_demand: bool = False

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return {behavior.name: behavior.spec for behavior in self.behaviors}


@attrs.frozen
class Hello:
    """An engine's first message. ``protocol`` is (major, minor)."""

    protocol: tuple[int, int]
    token: str


def read_hello(body: Body) -> Hello:
    """Return the Hello in the body of a hello frame. Raises BadFrame if the body is invalid."""
    message = parse_json(body)
    given = message.get("protocol")
    if not isinstance(given, list) or len(given) != 2:
        raise BadFrame(f"a hello whose protocol should be [major, minor], but is {describe_value(given)}")
    major, minor = (_whole_number(number, "protocol of the hello", 0) for number in given)
    return Hello((major, minor), _typed(message.get("token", ""), str, "the token of the hello"))


def configure_body(options: GodotOptions, *, arenas: int, seed: int, may_spin: bool) -> bytes:
    """Return the body of a configure frame, which is the first frame that an engine receives.

    ``may_spin``: whether the engine may busy-wait for a moment before it sleeps until the next request.
    """
    engine = options.engine
    return dump_json(
        {
            "protocol": list(PROTOCOL),
            "arenas": arenas,
            "ticks_per_action": engine.ticks_per_action or DEFAULT_TICKS_PER_ACTION,
            "seed": seed,
            "infos": options.infos,
            "may_spin": may_spin,
            "forgives": options.forgives,
            **{name: getattr(engine, name) for name in ("isolate", "shown", "scene")},
        }
    )


def reset_body(seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> bytes:
    """Return the body of a reset frame, which resets all arenas. ``seeds`` has one seed per arena.

    Raises ValueError or TypeError for options that are not JSON values.
    """
    return dump_json({"seeds": list(seeds), "options": dict(options or {}), "arenas": None})


def begin_body(begins: Sequence[Begin], options: Mapping[str, Any], **more: None) -> bytes:
    """Return the body of a frame with episodes to begin: a begin frame, or a reset frame with ``more`` fields.

    ``options``: defaults of the options. Raises ValueError or TypeError for options that are not JSON values.
    """
    begun = [[begin.row, begin.at_once, begin.seed, {**options, **(begin.options or {})}] for begin in begins]
    return dump_json({**more, "begins": begun})


def call_body(
    what: str, name: str | None, arenas: Sequence[int], args: Sequence[Any] = (), kwargs: Any = None
) -> bytes:
    """Return the body of a call frame. ``what`` is "method", "get", "set" (one value per arena) or "render" (no name).

    Raises ValueError or TypeError for arguments that are not JSON values.
    """
    message: dict[str, Any] = {what: True if what == "render" else name, "args": list(args), "arenas": list(arenas)}
    if kwargs:
        message["kwargs"] = dict(kwargs)
    return dump_json(message)


def read_values(body: Body, n: int) -> list[Any]:
    """Return the ``n`` values, one per arena, in the answer to a call. Raises BadFrame for any other body."""
    return listed(parse_json(body).get("values"), n, "the values of a call")


def listed(value: Any, n: int, what: str) -> list[Any]:
    """Return ``value``, a list of ``n`` entries. Raises BadFrame, which begins with ``what``, for anything else."""
    if not isinstance(value, list) or len(value) != n:
        got = f"a list of {len(value)}" if isinstance(value, list) else describe_value(value)
        raise BadFrame(f"{what} should be a list of {n}, but is {got}")
    return value


@attrs.frozen
class EngineError:
    """An error that an engine reported. Location fields that the engine did not report are None or empty.

    ``broken`` is (path, expected, got) for a value that breaks its spec. Godot does not report ``broken``, ``type`` or
    ``traceback``, but engines in languages with exceptions do.
    """

    message: str
    script: str | None = None
    line: int | None = None
    function: str | None = None
    arena: int | None = None
    type: str = "ScriptError"
    traceback: str = ""
    broken: tuple[str, str, str] | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.script, self.line) if part)
        where = " in ".join(part for part in (place, self.function) if part)
        return f"{self.message} ({where})" if where else self.message


def read_error(body: Body, n_arenas: int) -> EngineError:
    """Return the error in the body of an error frame. Raises BadFrame if the body is invalid."""
    said = {key: value for key, value in parse_json(body).items() if value is not None}
    found = {"message": _typed(said.get("message"), str, "the message of an error")}
    for key in said.keys() & {"script", "function", "type", "traceback"}:
        found[key] = _typed(said[key], str, f"the {key} of an error")
    for key in said.keys() & {"line", "arena"}:
        found[key] = _whole_number(said[key], f"{key} of the error", 0)
    if found.get("arena", 0) >= n_arenas:
        raise BadFrame(f"an error of arena {found['arena']}, where there are {n_arenas}")
    broken = said.get("broken")
    if broken is not None:
        if not isinstance(broken, list) or [type(text) for text in broken] != [str] * 3:
            raise BadFrame(f"an error whose broken should be [path, expected, got], but is {describe_value(broken)}")
        found["broken"] = tuple(broken)
    return EngineError(**found)


def read_note(body: Body) -> tuple[str, dict[str, Any]]:
    """Return the name of the note in a note frame, and its other entries. Raises BadFrame if the body is invalid."""
    message = parse_json(body)
    return _name(message, "a note"), {key: value for key, value in message.items() if key != "name"}


# Specs.


def read_specs(body: Body) -> EngineSpecs:
    """Return the specs in a specs frame. Raises BadFrame if the body is invalid, TooLarge if a size exceeds a limit."""
    message = parse_json(body)
    entries = _typed(message.get("behaviors"), list, "the behaviors of the specs")
    if not 1 <= len(entries) <= MAX_BEHAVIORS:
        raise BadFrame(f"specs of {len(entries)} behaviors, where 1 to {MAX_BEHAVIORS} may be")
    behaviors = tuple(_behavior(number, entry) for number, entry in enumerate(entries))
    _check_unique([behavior.name for behavior in behaviors], "behaviors", "the specs")
    return EngineSpecs(
        behaviors,
        _max_agents(message.get("max_agents"), behaviors),
        _typed(message.get("declared", {}), dict, "what the specs declare"),
        message.get("begins_on_demand") is True,
    )


def _behavior(number: int, entry: Any) -> BehaviorLayout:
    name = _name(entry, f"behavior {number} of the specs")
    observations, observation = _arrays(entry, "observations", f"behavior {name!r}")
    actions, action = _arrays(entry, "actions", f"behavior {name!r}")
    return BehaviorLayout(number, name, BehaviorSpec(observation, action), observations, actions)


def _arrays(entry: dict[str, Any], key: str, where: str) -> tuple[tuple[ArrayLayout, ...], Tree]:
    """Parse the arrays in ``entry[key]``. Return their layouts and a tree of their specs, or raise BadFrame."""
    described = _typed(entry.get(key), list, f"the {key} of {where}")
    if not described:
        raise BadFrame(f"{where} has no {key}")
    pairs = [_array(each, f"{key}[{index}] of {where}") for index, each in enumerate(described)]
    layouts = tuple(layout for layout, _ in pairs)
    _check_unique([layout.name for layout in layouts], key, where)
    tree = pairs[0][1] if len(pairs) == 1 else {layout.name: spec for layout, spec in pairs}
    return layouts, tree


def _array(entry: Any, where: str) -> tuple[ArrayLayout, ArraySpec]:
    name = _name(entry, where)
    where = f"{where} ({name!r})"
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if dtype is None:
        raise BadFrame(f"{where} has dtype {describe_value(entry.get('dtype'))}, which is none of {', '.join(DTYPES)}")
    sizes = _typed(entry.get("shape"), list, f"the shape of {where}")
    shape = tuple(_whole_number(size, f"a size in the shape of {where}", 1) for size in sizes)
    n_numbers = math.prod(shape)
    if len(shape) > MAX_DIMENSIONS or n_numbers > MAX_NUMBERS:
        raise TooLarge(
            f"{where} has {len(shape)} dimensions and {n_numbers} numbers; 16 and {MAX_NUMBERS} are the most"
        )
    low, high = (_bound(entry.get(key), dtype, shape, f"{key} of {where}") for key in ("low", "high"))
    if low is not None and high is not None and not (low <= high).all():
        raise BadFrame(f"{where} has a low above its high")
    return ArrayLayout(name, dtype, shape, n_numbers), ArraySpec(shape, dtype, low, high)


def _bound(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> np.ndarray | None:
    """Convert a bound to an array of ``shape``, or to a 0-d array if it is a single number. None stays None."""
    if value is None:
        return None
    numbers = value if isinstance(value, list) else [value]
    if isinstance(value, list) and len(value) != math.prod(shape):
        raise BadFrame(f"{where} is a list of {len(value)}, where the array has {math.prod(shape)} numbers")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise BadFrame(f"{where} should be a number, a list of numbers or null, but has {describe_value(number)}")
    wide = np.array(numbers, np.float64 if dtype.kind == "f" else object)
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if not ((wide >= limits.min) & (wide <= limits.max)).all() or (dtype.kind != "f" and (wide % 1 != 0).any()):
        raise BadFrame(f"{where} has a number that is no {dtype}")
    return wide.astype(dtype).reshape(shape if isinstance(value, list) else ())


def _max_agents(given: Any, behaviors: tuple[BehaviorLayout, ...]) -> dict[str, int]:
    if not isinstance(given, dict) or given.keys() != {behavior.name for behavior in behaviors}:
        raise BadFrame(f"max_agents should have one number for each behavior, but is {describe_value(given)}")
    found = {}
    for behavior in behaviors:
        n_agents = _whole_number(given[behavior.name], f"max_agents of behavior {behavior.name!r}", 0)
        for layout in behavior.observations + behavior.actions:
            if n_agents * layout.n_numbers > MAX_NUMBERS:
                raise TooLarge(
                    f"{n_agents} agents of behavior {behavior.name!r} have {n_agents * layout.n_numbers} numbers in "
                    f"array {layout.name!r}, where {MAX_NUMBERS} are the most"
                )
        found[behavior.name] = n_agents
    if sum(found.values()) > MAX_AGENTS:
        raise TooLarge(f"max_agents adds up to {sum(found.values())} agents, where {MAX_AGENTS} are the most")
    return found


def _check_unique(names: list[str], what: str, where: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadFrame(f"{what} of {where} has the name {twice!r} twice")


_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise BadFrame(f"{what} should be {_KINDS[kind]}, but is {describe_value(value)}")
    return value


def _name(entry: Any, where: str) -> str:
    if not isinstance(entry, dict):
        raise BadFrame(f"{where} is no object but {describe_value(entry)}")
    name: str = _typed(entry.get("name") or None, str, f"the name of {where}")
    return name


def _whole_number(value: Any, where: str, at_least: int) -> int:
    """Return ``value`` as an int, or raise BadFrame. Accepts 4.0, because Godot's JSON parser reads 4 as a double."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or not at_least <= value < 2**53:
        raise BadFrame(f"{where} should be a whole number from {at_least} on, but is {describe_value(value)}")
    return int(value)
