"""Config files: TOML, YAML or JSON with the tables ``manager`` (how environments are run) and ``run`` (for how long).

::

    [manager]                  manager:
    kind = "subprocess"          kind: subprocess
    env = "CartPole-v1"          env: CartPole-v1
    n_envs = 8                   n_envs: 8

    [run]                      run:
    steps = 100000               steps: 100000

The rule: a file only becomes plain tables here; what is in them is checked where it is used.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envmanager.data.specs import describe_value
from envmanager.errors import ConfigError, MissingExtra
from envmanager.structuring import nearest
from envmanager.training import records

RUN_TABLES = ("manager", "run")
TRAINING_TABLES = ("manager", "training", "trainers")
TABLES_OF = {"run": RUN_TABLES, "train": TRAINING_TABLES}
"""What a config of each command may hold."""


def load_config(path: Path, tables: Sequence[str] = RUN_TABLES) -> dict[str, dict[str, Any]]:
    """The tables of a config file, all of them always there.

    Raises ConfigError, or MissingExtra for YAML without PyYAML.
    """
    parse = PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{path} is not a config file: its name should end in {', '.join(PARSERS)}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} cannot be read: {error}.") from error
    return _tables(parse(text, path), path, tables)


def _parse_toml(text: str, path: Path) -> Any:
    try:
        toml = importlib.import_module("tomllib")
    except ImportError:  # Python 3.10
        toml = _import_or_say("tomli", str(path))
    try:
        return toml.loads(text)
    except (ValueError, RecursionError) as error:  # the parser raises these itself: too many digits, nested too deep
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _parse_yaml(text: str, path: Path) -> Any:
    return read_yaml(text, str(path))


def read_yaml(text: str, what: str) -> Any:
    """What a text in YAML says; ``what`` is its name in errors. ConfigError, or MissingExtra without PyYAML.

    Numbers are those of YAML 1.2, which people expect: ``1e-3``, ``3e5`` and ``.5`` are numbers. ``yes``, ``no``,
    ``on`` and ``off`` stay what they are in YAML 1.1, true and false: configs have them, and where a text was meant the
    option says so.
    """
    yaml = _import_or_say("yaml", what)
    try:
        return yaml.load(text, Loader=_loader(yaml))
    except Exception as error:  # `!!bool x` is a KeyError, `2024-13-45` a ValueError, "[" * 3000 a RecursionError
        raise ConfigError(f"{what} is not valid YAML: {error}.") from error


_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$")
"""A number of YAML 1.2 with a point or an exponent."""


@functools.cache
def _loader(yaml: Any) -> Any:
    """PyYAML's safe loader, which by itself takes a number without a point or a sign in its exponent for a text."""
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return loader


def _parse_json(text: str, path: Path) -> Any:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if isinstance(document, dict):
        document.pop(records.OURS, None)
    return document


PARSERS: dict[str, Callable[[str, Path], Any]] = {
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json,
}


def run_folder_of(config: Path) -> Path:
    """Where a training of this config goes: the folder that a training has left it in, or ``runs/NAME``."""
    is_record = config.name == records.CONFIG and records.read(config.parent) is not None
    return config.parent if is_record else Path("runs") / config.stem


def _import_or_say(library: str, what: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError:
        raise MissingExtra(what, library=library, extra="cli") from None


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
    """What is wrong with it: perhaps it is the config of another command."""
    for command, others in TABLES_OF.items():
        if name in others:
            what = "training" if command == "train" else command
            return f"{path} is the config of a {what}: it has the table {name}. Use: envmanager {command} {path}"
    return f"{path}: there is no table {name}{nearest(name, tables)} Known tables: {', '.join(tables)}."
