"""Reads an engine's description of its behaviors: the specs for the trainer, and the layouts of arrays in frames.

The rule: everything is checked here, once. The decoding of steps relies on sizes that cannot overflow and on names that
exist once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec, BehaviorSpecs, describe_value
from envmanager.data.trees import Tree
from envmanager.godot.frames import BadFrame, parse_json

MAX_BEHAVIORS = 64
MAX_AGENTS = 65_536
MAX_NUMBERS = 2**24
"""Most numbers in one array."""
MAX_DIMENSIONS = 16
"""Most dimensions of the array of one agent; NumPy has 32."""

DTYPES = {name: np.dtype(name) for name in ("float32", "int32", "uint8", "int64", "float64")}
"""Dtypes of arrays. The last two are for engines other than Godot."""


@attrs.frozen
class ArrayLayout:
    """The layout of the array of n agents in a frame: ``[n, *shape]`` in C order, padded with zeros to 4 bytes."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    n_numbers: int
    """Number of numbers of one agent."""


@attrs.frozen
class BehaviorLayout:
    """A behavior: its ``number`` on the wire, its spec, and its arrays in their order in frames.

    In the trees of the trainer one array is a leaf, several are a dict by name.
    """

    number: int
    name: str
    spec: BehaviorSpec
    observations: tuple[ArrayLayout, ...]
    actions: tuple[ArrayLayout, ...]


@attrs.frozen
class EngineSpecs:
    """All behaviors of an engine, by number, and the most agents that it has of each at once."""

    behaviors: tuple[BehaviorLayout, ...]
    max_agents: Mapping[str, int]

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        """The specs by behavior."""
        return {behavior.name: behavior.spec for behavior in self.behaviors}


def read_specs(body: bytes | bytearray | memoryview) -> EngineSpecs:
    """Return the specs in the body of a specs frame. Raises BadFrame."""
    message = parse_json(body)
    entries = _list(message, "behaviors", "the specs")
    if not 1 <= len(entries) <= MAX_BEHAVIORS:
        raise BadFrame(f"specs of {len(entries)} behaviors, where 1 to {MAX_BEHAVIORS} may be")
    behaviors = tuple(_behavior(number, entry) for number, entry in enumerate(entries))
    _check_unique([behavior.name for behavior in behaviors], "behaviors", "the specs")
    return EngineSpecs(behaviors, _max_agents(message, behaviors))


def _behavior(number: int, entry: Any) -> BehaviorLayout:
    if not isinstance(entry, dict):
        raise BadFrame(f"behavior {number} of the specs is no object but {describe_value(entry)}")
    name = _name(entry, f"behavior {number} of the specs")
    where = f"behavior {name!r}"
    observations, observation = _arrays(entry, "observations", where)
    actions, action = _arrays(entry, "actions", where)
    return BehaviorLayout(number, name, BehaviorSpec(observation, action), observations, actions)


def _arrays(entry: dict[str, Any], key: str, where: str) -> tuple[tuple[ArrayLayout, ...], Tree]:
    """Return the layouts of the arrays, and their specs as a tree."""
    described = _list(entry, key, where)
    if not described:
        raise BadFrame(f"{where} has no {key}")
    pairs = [_array(each, f"{key}[{index}] of {where}") for index, each in enumerate(described)]
    layouts = tuple(layout for layout, _ in pairs)
    _check_unique([layout.name for layout in layouts], key, where)
    tree = pairs[0][1] if len(pairs) == 1 else {layout.name: spec for layout, spec in pairs}
    return layouts, tree


def _array(entry: Any, where: str) -> tuple[ArrayLayout, ArraySpec]:
    if not isinstance(entry, dict):
        raise BadFrame(f"{where} is no object but {describe_value(entry)}")
    name = _name(entry, where)
    where = f"{where} ({name!r})"
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if dtype is None:
        raise BadFrame(f"{where} has dtype {describe_value(entry.get('dtype'))}, which is none of {', '.join(DTYPES)}")
    shape = tuple(whole_number(size, f"a size in the shape of {where}", 1) for size in _list(entry, "shape", where))
    n_numbers = math.prod(shape)
    if len(shape) > MAX_DIMENSIONS or n_numbers > MAX_NUMBERS:
        raise BadFrame(
            f"{where} has {len(shape)} dimensions and {n_numbers} numbers; 16 and {MAX_NUMBERS} are the most"
        )
    low, high = (_bound(entry.get(key), dtype, shape, f"{key} of {where}") for key in ("low", "high"))
    if low is not None and high is not None and not (low <= high).all():
        raise BadFrame(f"{where} has a low above its high")
    return ArrayLayout(name, dtype, shape, n_numbers), ArraySpec(shape, dtype, low, high)


def _bound(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> np.ndarray | None:
    """Return a bound as an array of the dtype: without dimensions if it is one number for all, else of the shape."""
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


def _max_agents(message: dict[str, Any], behaviors: tuple[BehaviorLayout, ...]) -> dict[str, int]:
    given = message.get("max_agents")
    if not isinstance(given, dict) or given.keys() != {behavior.name for behavior in behaviors}:
        raise BadFrame(f"max_agents should have one number for each behavior, but is {describe_value(given)}")
    found = {}
    for behavior in behaviors:
        n_agents = whole_number(given[behavior.name], f"max_agents of behavior {behavior.name!r}", 0)
        for layout in behavior.observations + behavior.actions:
            if n_agents * layout.n_numbers > MAX_NUMBERS:
                raise BadFrame(
                    f"{n_agents} agents of behavior {behavior.name!r} have {n_agents * layout.n_numbers} numbers in "
                    f"array {layout.name!r}, where {MAX_NUMBERS} are the most"
                )
        found[behavior.name] = n_agents
    if sum(found.values()) > MAX_AGENTS:
        raise BadFrame(f"max_agents adds up to {sum(found.values())} agents, where {MAX_AGENTS} are the most")
    return found


def _check_unique(names: list[str], what: str, where: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadFrame(f"{what} of {where} has the name {twice!r} twice")


def _list(entry: dict[str, Any], key: str, where: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list):
        raise BadFrame(f"{key} of {where} should be a list, but is {describe_value(value)}")
    return value


def _name(entry: dict[str, Any], where: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise BadFrame(f"the name of {where} should be a text, but is {describe_value(name)}")
    return name


def whole_number(value: Any, where: str, at_least: int) -> int:
    """Return ``value`` as an int. Raises BadFrame. 4.0 is 4: Godot writes numbers that it has read as doubles."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or not at_least <= value < 2**53:
        raise BadFrame(f"{where} should be a whole number from {at_least} on, but is {describe_value(value)}")
    return int(value)
