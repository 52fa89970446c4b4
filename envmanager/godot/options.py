"""Options of Godot engines (``engine:`` in a config) and of GodotEnvManager, validated on construction."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.converters import optional as optional_converter
from attrs.validators import optional

from envmanager.errors import UsageError
from envmanager.godot.frames import dump_json
from envmanager.options import KindOptions, at_least, flag, must_be, one_of, plain_numbers
from envmanager.structuring import structure

Protocol = Literal["envmanager", "godot_rl"]  # of this library's addon, or of godot_rl_agents
DEFAULT_TICKS_PER_ACTION = 4
_ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):(?P<port>\d{1,5})")
_optional_text = must_be("a text or None", lambda value: value is None or (isinstance(value, str) and value != ""))


def _json_object(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise UsageError(f"{attribute.name} must be a mapping, not {type(value).__name__}.")
    check_json(dict(value), attribute.name)


def check_json(value: Any, what: str) -> None:
    """Raise UsageError, which begins with ``what``, unless ``value`` can be sent as JSON."""
    try:
        dump_json({"value": value})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} cannot travel into an engine: {error}. Only what JSON can say does: numbers, texts, true, false, "
            "None, lists and dicts of these."
        ) from error


def _is_address(value: Any) -> bool:
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return found is not None and 0 < int(found["port"]) < 2**16


_address = must_be('"127.0.0.1:PORT", where the game is told to connect', _is_address)


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class EngineOptions:
    """Options for starting and driving engines.

    ``scene``: a res:// path; None is the project's main scene. ``binary``: the engine; None finds one, see
    ``envmanager.godot.games``. ``protocol``: "godot_rl" for a game made for godot_rl_agents; None detects it.
    ``ticks_per_action``: physics ticks per step; None is 4, or with godot_rl the game's own number. ``speed``: "max" or
    "realtime", with equal results. ``fixed_fps``: frames per simulated second with "max"; None is the project's number
    of ticks, or 60 if unknown or with godot_rl. ``shown``: number of arenas visible in the window. ``isolate``: whether
    each arena has its own physics world, so that results do not depend on the number of arenas. ``pin``: whether each
    engine is bound to one core. ``user_data``: "private" is a temporary ``user://`` per engine. ``parameters``:
    defaults of reset options; with godot_rl, command-line arguments. ``max_frame_mb``: maximum size of a step in MiB.
    ``attach``: address (127.0.0.1:PORT) at which to wait for a game that the user plays in the editor; no engine is
    started then. ``script_errors``: "warn" logs script errors after which Godot goes on, once per line of a script.
    """

    scene: str | None = attrs.field(default=None, validator=_optional_text)
    binary: str | None = attrs.field(default=None, converter=optional_converter(os.fspath), validator=_optional_text)
    protocol: Protocol | None = attrs.field(default=None, validator=optional(one_of("envmanager", "godot_rl")))
    ticks_per_action: int | None = attrs.field(default=None, validator=optional(at_least(1)))
    speed: Literal["max", "realtime"] = attrs.field(default="max", validator=one_of("max", "realtime"))
    fixed_fps: int | None = attrs.field(default=None, validator=optional(at_least(1)))
    window: bool = attrs.field(default=False, validator=flag)
    shown: int = attrs.field(default=3, validator=at_least(0))
    isolate: bool = attrs.field(default=False, validator=flag)
    pin: bool = attrs.field(default=True, validator=flag)
    user_data: Literal["private", "shared"] = attrs.field(default="private", validator=one_of("private", "shared"))
    parameters: Mapping[str, Any] = attrs.field(factory=dict, validator=_json_object)
    max_frame_mb: int = attrs.field(default=64, validator=at_least(1))
    script_errors: Literal["raise", "warn"] = attrs.field(default="raise", validator=one_of("raise", "warn"))
    attach: str | None = attrs.field(default=None, validator=optional(_address))


def _engine(value: EngineOptions | Mapping[str, Any] | None) -> EngineOptions:
    if isinstance(value, EngineOptions):
        return value
    return structure(EngineOptions, {} if value is None else value, where="engine")


@attrs.frozen(kw_only=True)
class GodotOptions(KindOptions):
    """The options of GodotEnvManager: ``engine``, and the options that all kinds of managers have in common."""

    engine: EngineOptions = attrs.field(default=None, converter=_engine)

    @property
    def forgives(self) -> Literal["", "start", "all"]:
        """When script errors are only logged. Another start would print the same errors, so none is tried."""
        at_start: Literal["start", ""] = "start" if self.restarts.on_exception == "restart" else ""
        return "all" if self.engine.script_errors == "warn" else at_start
