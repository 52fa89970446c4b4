"""Functions that read config files (TOML, YAML or JSON) and the option ``--set``, which overrides their values.

::

    [manager]                  manager:
    kind = "subprocess"          kind: subprocess
    env = "CartPole-v1"          env: CartPole-v1
    n_envs = 8                   n_envs: 8

    [run]                      run:
    steps = 100000               steps: 100000

In ``--set manager.n_envs=16`` the value is YAML. Dots separate the names of the path; a name that contains a dot is
quoted. This module checks the names of tables and, in ``--set``, of trainers. Other modules check the options.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from envmanager.cli.plan import RunOptions
from envmanager.data.specs import describe_value
from envmanager.errors import ConfigError
from envmanager.godot.games import DEMO
from envmanager.importing import nearest, needed_by
from envmanager.registry import ManagerOptions
from envmanager.training.runs import records
from envmanager.training.runs.plan import TrainingOptions

RUN_TABLES = ("manager", "run")
TRAINING_TABLES = ("manager", "training", "trainers")
TABLES_OF = {"run": RUN_TABLES, "train": TRAINING_TABLES}
"""Tables that a config may hold, by command."""
OF_ML_AGENTS = ("behaviors", "default_settings", "env_settings", "engine_settings", "environment_parameters")
"""Tables of an ML-Agents config."""
_NAME = re.compile(r'"([^"]*)"|\'([^\']*)\'|([^."\'=]+)')
"""Pattern of one name in a path of ``--set``; a name that contains a dot is quoted."""
_OPTIONS = {"manager": ManagerOptions, "run": RunOptions, "training": TrainingOptions}


def load_config(path: Path, tables: Sequence[str] = RUN_TABLES) -> dict[str, dict[str, Any]]:
    """Return the tables of a config file by name. ``tables``: the allowed names. A table that the file lacks is empty.

    Raises ConfigError for a missing or invalid file, or MissingExtra if the library for its format is not installed.
    """
    form = FORMS.get(path.suffix.lower())
    if form is None:
        suffixes = ", ".join(FORMS)
        game = " A Godot game is named by its folder." if "training" in tables else ""
        raise ConfigError(
            f"{path} is not a config file: its name should end in {suffixes}.{game} "
            f"To name an environment: --env {path}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"There is no config file {path}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} cannot be read: {error}.") from error
    document = parse(text, form, str(path))
    if form == "JSON" and isinstance(document, dict):
        document.pop(records.OURS, None)
    return _tables(document, path, tables)


def parse(text: str, form: str, what: str) -> Any:
    """Parse a text in TOML, YAML or JSON and return its value. Raises ConfigError, or MissingExtra without the library.

    Error messages refer to the text as ``what``. As in YAML 1.2, ``1e-3``, ``3e5`` and ``.5`` are numbers. As in YAML
    1.1, ``yes``, ``no``, ``on`` and ``off`` are true and false, because many configs use them.
    """
    with needed_by(what, extra="cli"):
        load = LOADERS[form]()
    try:
        if _LONG_NUMBER.search(text):
            raise ValueError(f"a number has more than {LONGEST_NUMBER:,} digits")
        return load(text)
    except Exception as error:  # `!!bool x` is a KeyError, `2024-13-45` a ValueError, "[" * 3000 a RecursionError
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{what} is not valid {form}{place}: {' '.join(str(problem).split())}.") from error


_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$")
"""Pattern of a number with a point or an exponent, as in YAML 1.2."""


LONGEST_NUMBER = 1000
"""Maximum number of digits of a whole number in a config. Python neither reads nor prints more than 4,300."""
_LONG_NUMBER = re.compile(rf"(?<!\w)[0-9][\w:]{{{LONGEST_NUMBER}}}")


def _toml() -> Callable[[str], Any]:
    name = "tomllib" if importlib.util.find_spec("tomllib") else "tomli"  # Python 3.10 has no tomllib
    loads: Callable[[str], Any] = importlib.import_module(name).loads
    return loads


def _yaml() -> Callable[[str], Any]:
    """Return a function like PyYAML's ``safe_load``, but one that reads ``1e5`` and ``1e-5`` as numbers."""
    yaml = importlib.import_module("yaml")
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return functools.partial(yaml.load, Loader=loader)


LOADERS: dict[str, Callable[[], Callable[[str], Any]]] = {"TOML": _toml, "YAML": _yaml, "JSON": lambda: json.loads}
FORMS = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".json": "JSON"}
"""Form of a config file, by the suffix of its name."""


def run_folder_of(config: Path) -> Path:
    """Return a run's default folder: the folder of ``config`` if a run wrote it, or ``runs/NAME`` for ``NAME.toml``.

    For a game, NAME is that of its folder, its .pck, or the demo.
    """
    if config.name.startswith(DEMO) or config.is_dir():
        return Path("runs") / config.resolve().name.removeprefix(DEMO)
    is_record = config.name == records.CONFIG and records.read(config.parent) is not None
    return config.parent if is_record else Path("runs") / config.stem


def is_game(path: Path) -> bool:
    """Return whether ``path``, in the place of a config, names a Godot game: a folder, a .pck or a demo."""
    return str(path).startswith(DEMO) or path.suffix == ".pck" or path.is_dir()


def _tables(document: Any, path: Path, tables: Sequence[str]) -> dict[str, dict[str, Any]]:
    document = {} if document is None else document
    known = f"{', '.join(tables[:-1])} and {tables[-1]}"
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path} should hold the tables {known}, but is {describe_value(document)}.")
    for name, table in document.items():
        if name not in tables:
            raise ConfigError(_unknown_table(str(name), path, tables))
        if table is not None and not isinstance(table, Mapping):
            raise ConfigError(f"{path}: {name} should be a table, but is {describe_value(table)}.")
    return {name: dict(document.get(name) or {}) for name in tables}


def _unknown_table(name: str, path: Path, tables: Sequence[str]) -> str:
    """Return the error text for an unknown table. If another command uses the table, the text names the command."""
    if name in OF_ML_AGENTS:
        return (
            f"{path} looks like a config of ML-Agents: it has the table {name}. To train here, it needs the tables "
            f"{', '.join(TRAINING_TABLES)}, in which most options have other names: see docs/coming-from.md. To keep "
            "ML-Agents' own trainers, see docs/mlagents.md."
        )
    for command, others in TABLES_OF.items():
        if name in others:
            what = "training run" if command == "train" else command
            return f"{path} is the config of a {what}: it has the table {name}. Use: envmanager {command} {path}"
    return f"{path}: there is no table {name}{nearest_place(name, tables)} Known tables: {', '.join(tables)}."


def nearest_place(name: str, tables: Iterable[str]) -> str:
    """Return the end of an error message: ``; did you mean …?`` with the most similar table or option, else ``.``"""
    places = {}
    for table in tables:
        options = attrs.fields(_OPTIONS[table]) if table in _OPTIONS else ()
        places.update({field.alias: f"{table}.{field.alias}" for field in options})
    places.update({table: table for table in tables})
    return nearest(name, places)


def override(tables: Mapping[str, dict[str, Any]], assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a copy of ``tables`` with the ``--set`` assignments applied. Raises ConfigError if one is invalid."""
    changed: dict[str, dict[str, Any]] = copy.deepcopy(dict(tables))
    added: set[str] = set()
    for text in assignments:
        path, value = _parse_assignment(text)
        table = _table_for(path, changed, text)
        if path[0] == "trainers":
            _check_behavior(path, tables["trainers"], added, text)
        table[path[-1]] = value
    return changed


def _parse_assignment(text: str) -> tuple[list[str], Any]:
    """Split ``a.b.c=value`` into names and a YAML value. Raises ConfigError if invalid, MissingExtra without PyYAML."""
    path: list[str] = []
    place = 0
    while True:
        found = _NAME.match(text, place)
        if found is None:
            raise _no_assignment(text)
        path.append(next(part for part in found.groups() if part is not None))
        place = found.end()
        sign = text[place : place + 1]
        if sign == "=":
            return path, parse(text[place + 1 :], "YAML", f"the value in --set {text}")
        if sign != ".":
            raise _no_assignment(text)
        place += 1


def _no_assignment(text: str) -> ConfigError:
    return ConfigError(f"--set {text}: it should be TABLE.NAME=VALUE, such as --set manager.n_envs=16.")


def _table_for(path: Sequence[str], tables: dict[str, dict[str, Any]], text: str) -> dict[str, Any]:
    """Return the table holding ``path``. Create missing inner tables. A ConfigError for a bad path quotes ``text``."""
    if path[0] not in tables:
        near = nearest_place(path[0], tables)
        raise ConfigError(f"--set {text}: there is no table {path[0]}{near} Known tables: {', '.join(tables)}.")
    if len(path) == 1:
        raise _no_assignment(text)
    table: dict[str, Any] = tables[path[0]]
    for depth, name in enumerate(path[1:-1], start=2):
        inner = table.get(name)
        if inner is None:
            inner = table[name] = {}
        if not isinstance(inner, dict):
            where = ".".join(path[:depth])
            raise ConfigError(
                f"--set {text}: {where} is {describe_value(inner)}, not a table, so nothing can be set in it. Set "
                f"{where} itself."
            )
        table = inner
    return table


def _check_behavior(path: Sequence[str], trainers: Mapping[str, Any], added: set[str], text: str) -> None:
    """Raise ConfigError for an unknown trainer. If ``path`` sets its table or kind, add it to ``added`` instead."""
    behavior = path[1]
    if len(path) == 2 or path[2] == "kind":
        added.add(behavior)
    elif behavior not in trainers and behavior not in added:
        known = [*trainers, *sorted(added)]
        raise ConfigError(
            f"--set {text}: the config has no trainers.{behavior}{nearest(behavior, known, prefix='trainers')} It has: "
            f"{', '.join(known) or 'none'}. A new one begins with its kind: --set trainers.{behavior}.kind=ppo."
        )
