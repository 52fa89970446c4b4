"""Frames of JSON: the bodies that the trainer sends, and the meaning of those that an engine sends.

The rule: a key that is not known is ignored, so that a later minor version may say more. One that is missing, or is not
what it should be, is a ``BadFrame``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from envmanager.data.specs import describe_value
from envmanager.godot.engine_specs import whole_number
from envmanager.godot.frames import PROTOCOL, BadFrame, dump_json, parse_json

Body = bytes | bytearray | memoryview


@attrs.frozen
class Hello:
    """The first message of an engine. ``protocol`` is (major, minor); with another major, no ticks are known."""

    protocol: tuple[int, int]
    token: str
    engine: str = ""
    addon: str = ""
    ticks_per_second: int = 0


def read_hello(body: Body) -> Hello:
    """Return the message in the body of a hello frame. Raises BadFrame."""
    message = parse_json(body)
    given = message.get("protocol")
    if not isinstance(given, list) or len(given) != 2:
        raise BadFrame(f"a hello whose protocol should be [major, minor], but is {describe_value(given)}")
    major, minor = (whole_number(number, "protocol of the hello", 0) for number in given)
    token, engine, addon = (message.get(key, "") for key in ("token", "engine", "addon"))
    if not all(isinstance(text, str) for text in (token, engine, addon)):
        raise BadFrame("a hello whose token, engine and addon are not all texts")
    if major != PROTOCOL[0]:
        return Hello((major, minor), token, engine, addon)
    ticks = whole_number(message.get("ticks_per_second"), "ticks_per_second of the hello", 1)
    return Hello((major, minor), token, engine, addon, ticks)


def configure_body(
    *,
    arenas: int,
    ticks_per_action: int,
    seed: int,
    isolate: bool,
    shown: int,
    infos: bool,
    scene: str | None,
    may_spin: bool,
) -> bytes:
    """Return the body of a configure frame; ``scene`` is a res:// path, or None for the project's main scene.

    ``may_spin``: the engine may keep a core busy for a moment while it waits for the next request.
    """
    return dump_json(
        {
            "protocol": list(PROTOCOL),
            "arenas": arenas,
            "ticks_per_action": ticks_per_action,
            "seed": seed,
            "isolate": isolate,
            "shown": shown,
            "infos": infos,
            "scene": scene,
            "may_spin": may_spin,
        }
    )


def reset_body(
    seeds: Sequence[int | None], options: Mapping[str, Any] | None, arenas: Sequence[int] | None = None
) -> bytes:
    """Return the body of a reset frame: one seed for each arena, or for each of ``arenas``.

    Raises ValueError or TypeError for options that JSON cannot say.
    """
    return dump_json(
        {
            "seeds": list(seeds),
            "options": dict(options or {}),
            "arenas": None if arenas is None else list(arenas),
        }
    )


def call_body(
    what: Literal["method", "get", "set", "render"],
    name: str | None,
    arenas: Sequence[int],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the body of a call frame. For "set", ``args`` has one value per arena; "render" needs no ``name``.

    Raises ValueError or TypeError for arguments that JSON cannot say.
    """
    message: dict[str, Any] = {what: True if what == "render" else name, "args": list(args), "arenas": list(arenas)}
    if kwargs:
        message["kwargs"] = dict(kwargs)
    return dump_json(message)


def read_values(body: Body, n: int) -> list[Any]:
    """Return the values in the answer to a call of n arenas. Raises BadFrame."""
    values = parse_json(body).get("values")
    if not isinstance(values, list) or len(values) != n:
        got = f"a list of {len(values)}" if isinstance(values, list) else describe_value(values)
        raise BadFrame(f"values that should be a list of {n}, one per arena, but are {got}")
    return values


@attrs.frozen
class EngineError:
    """An error in an engine, and its place, as far as the engine knows.

    ``type``, ``traceback`` and ``broken`` (path, expected, got of a value that breaks its spec) come from engines other
    than Godot, whose languages have exceptions.
    """

    message: str
    script: str | None = None
    line: int | None = None
    function: str | None = None
    arena: int | None = None
    type: str = "ScriptError"
    traceback: str = ""
    broken: tuple[str, str, str] | None = None

    @property
    def where(self) -> str:
        """The place, such as ``res://hero.gd:12 in observe``; empty when it is not known."""
        place = f"{self.script or '?'}:{self.line or '?'}" if self.script or self.line else ""
        return " in ".join(part for part in (place, self.function) if part)

    def __str__(self) -> str:
        return f"{self.message} ({self.where})" if self.where else self.message


def read_error(body: Body, n_arenas: int) -> EngineError:
    """Return the error in the body of an error frame. Raises BadFrame."""
    message = parse_json(body)
    if not isinstance(message.get("message"), str):
        raise BadFrame(f"an error whose message should be a text, but is {describe_value(message.get('message'))}")
    texts = {key: message.get(key) for key in ("message", "script", "function", "type", "traceback")}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise BadFrame(f"an error whose {name} should be a text or null, but is {describe_value(value)}")
    line, arena = (
        None if message.get(key) is None else whole_number(message[key], f"{key} of the error", 0)
        for key in ("line", "arena")
    )
    if arena is not None and arena >= n_arenas:
        raise BadFrame(f"an error of arena {arena}, where there are {n_arenas}")
    given = {key: value for key, value in texts.items() if value is not None}
    return EngineError(**given, line=line, arena=arena, broken=_broken(message.get("broken")))


def _broken(value: Any) -> tuple[str, str, str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(text, str) for text in value):
        raise BadFrame(f"an error whose broken should be [path, expected, got], but is {describe_value(value)}")
    return value[0], value[1], value[2]


def read_note(body: Body) -> tuple[str, dict[str, Any]]:
    """Return the name of a note and its other keys. Raises BadFrame."""
    message = parse_json(body)
    name = message.pop("name", None)
    if not isinstance(name, str) or not name:
        raise BadFrame(f"a note whose name should be a text, but is {describe_value(name)}")
    return name, message
