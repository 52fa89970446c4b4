"""The settings that a Godot scene declares: the tables of a training's config, and the node and file of each.

::

    EnvManagerTraining of the arena    ┐                  ┌▶ manager: {n_envs: 64, …}
    EnvManagerBehavior of an agent     ├─ specs ─ parse ──┼▶ training: {steps: 600000, parameters: {…}, …}
    EnvManagerParameter, …Lesson       ┘                  └▶ trainers: {hero: {kind: ppo, …}, …}

The engine sends only fields that the user has set. A config that says something else wins, key by key. This module does
not check values: the classes of options do, and ``located`` adds to their errors where in the game the value is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import attrs

from envmanager.errors import ConfigError, UsageError
from envmanager.godot.games import protocol_of
from envmanager.godot.manager import GodotEnvManager
from envmanager.options import RestartPolicy

_logger = logging.getLogger("envmanager")
Tables = dict[str, dict[str, Any]]
Path = tuple[str, ...]

TRAINER = "ppo"  # kind of trainer of a behavior that declares none
_OF_TRAINING: dict[str, Path] = {
    "random_seed": ("training", "seed"),
    "environments": ("manager", "n_envs"),
    "engines": ("manager", "n_workers"),
    "wait": ("manager", "wait"),
    "infos": ("manager", "infos"),
    "ticks_per_action": ("manager", "engine", "ticks_per_action"),
    "round_steps": ("training", "rounds", "steps"),
    "round_learners": ("training", "rounds", "train"),
    "more": ("training",),
    "manager": ("manager",),
}  # place in a config of each field of EnvManagerTraining, if not ``training.FIELD``
_OF_SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {"min": ("minimum", 0.0), "max": ("maximum", 1.0)},
    "log_uniform": {"min": ("minimum", 0.0), "max": ("maximum", 1.0)},
    "normal": {"mean": ("mean", 0.0), "std": ("std", 1.0)},
    "choice": {"values": ("values", [])},
    "multi_range_uniform": {"ranges": ("values", [])},
}  # options of each sampler, with the field of EnvManagerLesson that has it, and its default


@attrs.frozen
class Declaration:
    """The settings of a scene. ``behaviors``: names of all behaviors of the game, declared or not."""

    behaviors: tuple[str, ...]
    tables: Tables
    """Tables ``manager``, ``training`` and ``trainers`` of a config, with what the scene declares."""
    places: Mapping[Path, str]
    """Text that says where in the game each value is, by its place in the tables, such as ``("training", "steps")``."""

    def under(self, config: Mapping[str, Mapping[str, Any]]) -> Tables:
        """Return the tables of ``config`` with the scene's values where it says nothing.

        A config's trainer ``"*"`` counts for behaviors that have none of their own there. The trainer options of the
        scene are left out if the config has another kind of trainer. Without any trainers in ``config``, behaviors that
        declare none get ``ppo``.
        """
        given = config.get("trainers") or {}
        trainers = {name: dict(table) if isinstance(table, Mapping) else table for name, table in given.items()}
        for name in self.behaviors:
            own, over = self.tables["trainers"].get(name), given.get(name, given.get("*", {}))
            if not isinstance(over, Mapping) or (own is None and given):
                continue
            own = {"kind": TRAINER, **(own or {})}
            if over.get("kind", own["kind"]) != own["kind"]:
                own = {key: value for key, value in own.items() if key == "frozen"}
            trainers[name] = {**own, **over}
        others = {table: _laid_under(self.tables[table], config.get(table) or {}) for table in ("manager", "training")}
        return {**{name: dict(table) for name, table in config.items()}, **others, "trainers": trainers}

    def describe(self) -> Iterator[tuple[str, str]]:
        """Yield what the scene sets, as text: where, which is a behavior with its place or a table, and the options."""
        for behavior, table in self.tables["trainers"].items():
            yield f"{behavior}, {self.places['trainers', behavior]}", _listed(table)
        others = {name: _listed(self.tables[name]) for name in ("training", "manager") if self.tables[name]}
        yield from others.items()

    @contextmanager
    def located(self, tables: Mapping[str, Any]) -> Iterator[None]:
        """Return a context whose ConfigErrors name the node and file of a wrong value in ``tables``.

        Values that differ from those of the scene are not its own.
        """
        try:
            yield
        except ConfigError as error:
            text = str(error)
            kept = [path for path in self.places if _at(self.tables, path) == _at(tables, path)]
            for path in sorted(kept, key=len, reverse=True):
                key = re.escape(".".join(path))
                if path[:2] == ("manager", "engine") and len(path) > 2:  # the manager names these without the table
                    key = rf"(?:manager\.)?{re.escape('.'.join(path[1:]))}"
                name = rf"(?<![\w.]){key}(?!\w)(?:\.(?P<rest>\w[\w.\[\]]*\w\]?))?"
                text = re.sub(name, lambda found, path=path: self._place_of(path, found["rest"]), text)  # type: ignore[misc]
            raise ConfigError(text) from error

    def _place_of(self, path: Path, rest: str | None) -> str:
        return f"{rest} of {self.places[path]}" if rest else self.places[path]


def _listed(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in table.items()) or "all as the trainer has it"


def _at(tables: Any, path: Path) -> Any:
    for name in path:
        tables = tables.get(name) if isinstance(tables, Mapping) else None
    return tables


def declared(env: str, engine: Mapping[str, Any]) -> Declaration:
    """Start an engine with the game ``env``, and return what its scene declares.

    ``engine``: fields of EngineOptions, by name. Raises UsageError if there is no such game or engine, and WorkerError
    if the game does not start, for example if agents of one behavior refer to different settings.
    """
    folder = FilePath(env)
    is_project = (folder / "project.godot").is_file() and protocol_of(env) == "envmanager"
    if is_project and not (folder / "addons" / "envmanager" / "bridge.gd").is_file():
        raise UsageError(f"{env} has no addons/envmanager: run `envmanager godot install-addon {env}`.")
    if is_project and not (folder / "addons" / "envmanager" / "declared.gd").is_file():
        _logger.warning(
            "the addon in %s is older than this library, which does not learn from it what the scene says about its "
            "training: `envmanager godot install-addon %s` updates it.", env, env,
        )  # fmt: skip
    alone = {**engine, "window": False, "attach": None, "isolate": False}
    with GodotEnvManager(env, 1, engine=alone, restarts=RestartPolicy(0)) as manager:
        return parse(manager.declared, tuple(manager.behavior_specs))


def parse(told: Mapping[str, Any], behaviors: tuple[str, ...]) -> Declaration:
    """Return the Declaration in an engine's specs. ``behaviors``: names of all behaviors of the game."""
    tables: Tables = {"manager": {}, "training": {}, "trainers": {}}
    places: dict[Path, str] = {}
    for behavior, own in (told.get("behaviors") or {}).items():
        table = tables["trainers"][behavior] = {}
        where = _where(own)
        places["trainers", behavior] = where
        for field, value in own["fields"].items():
            options = value if field == "more" else {_OPTION.get(field, field): value}
            for name, option in options.items():
                table[name] = not option if field == "learns" else option
                places["trainers", behavior, name] = f"{field if field != 'more' else name} of {where}"
    training = told.get("training")
    if training is not None:
        _add_training(training, tables, places)
    return Declaration(behaviors, tables, places)


_OPTION = {"trainer": "kind", "learns": "frozen"}  # fields of EnvManagerBehavior with another name


def _where(told: Mapping[str, Any]) -> str:
    return f"{told['file'] or 'the scene'} (node {told['node']})"


def _add_training(told: Mapping[str, Any], tables: Tables, places: dict[Path, str]) -> None:
    where = _where(told)
    names = [(each or {}).get("name", "") for each in told["fields"].get("parameters", ())]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"parameters of {where}: each needs a name of its own, but they have {names}.")
    for field, value in told["fields"].items():
        path = _OF_TRAINING.get(field, ("training", field))
        if field in ("more", "manager"):
            for name, option in value.items():
                inner = (*path, name)
                _put(tables, inner, option)
                places[inner] = f"{name} of {where}"
                if isinstance(option, Mapping):
                    places |= {(*inner, each): f"{name}.{each} of {where}" for each in option}
            continue
        if field == "round_learners":
            value = [[name.strip() for name in entry.split(",")] for entry in value]
        elif field == "parameters":
            varied = (each for each in value if each.get("sampler") or each.get("lessons"))  # the game has the others
            drawn = {each["name"]: _values(each) for each in varied}
            places |= {(*path, name): f"parameter {name!r} of {where}" for name in drawn}
            value = drawn
        _put(tables, path, value)
        places[path] = f"{field} of {where}"
    if "rounds" in tables["training"]:
        places.setdefault(("training", "rounds", "steps"), f"rounds.steps of {where}")


def _put(tables: Tables, path: Path, value: Any) -> None:
    for name in reversed(path):
        value = {name: value}
    tables |= _laid_under(tables, value)


def _values(parameter: Mapping[str, Any]) -> Any:
    """Return a parameter or a lesson as a value of the table ``training.parameters``."""
    if parameter.get("lessons"):
        return {"lessons": [_lesson(each) for each in parameter["lessons"]]}
    sampler = parameter.get("sampler")
    if not sampler:
        return parameter.get("value", 0.0)
    options = {name: parameter.get(field, default) for name, (field, default) in _OF_SAMPLERS.get(sampler, {}).items()}
    if "ranges" in options:
        flat = options["ranges"]
        options["ranges"] = [flat[at : at + 2] for at in range(0, len(flat), 2)]
    return {"sampler": sampler, **options}


def _lesson(told: Mapping[str, Any] | None) -> Any:
    if told is None:  # an entry of the list that was left empty; the check of lessons refuses it
        return None
    lesson = {"value": _values(told), **({"name": told["name"]} if told.get("name") else {})}
    if told.get("measure"):
        lesson["until"] = {"measure": told["measure"], "threshold": told.get("threshold", 0.0)}
        lesson["until"] |= {name: told[name] for name in ("episodes", "behavior") if told.get(name)}
    return lesson


def _laid_under(own: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``own`` updated with ``over``; tables within tables are merged too."""
    merged = dict(own)
    for name, value in over.items():
        inner = merged.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = _laid_under(inner, value) if both else value  # type: ignore[arg-type]
    return merged
