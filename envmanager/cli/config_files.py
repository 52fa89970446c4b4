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

import difflib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envmanager.data.specs import describe_value
from envmanager.errors import ConfigError, MissingExtra

RUN_TABLES = ("manager", "run")
TRAINING_TABLES = ("manager", "training", "trainers")
RECORD = "config.json"
"""What a training leaves in its folder: the whole config that it ran with."""
_WROTE = "envmanager"
"""The table in it that says who wrote it."""


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
        toml = _import_or_say("tomli", path)
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _parse_yaml(text: str, path: Path) -> Any:
    yaml = _import_or_say("yaml", path)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}.") from error


def _parse_json(text: str, path: Path) -> Any:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if isinstance(document, dict):
        document.pop(_WROTE, None)
    return document


PARSERS: dict[str, Callable[[str, Path], Any]] = {
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json,
}


def run_folder_of(config: Path) -> Path:
    """Where a training of this config goes: the folder that a training has left it in, or ``runs/NAME``."""
    return config.parent if _is_record(config) else Path("runs") / config.stem


def _is_record(path: Path) -> bool:
    if path.name != RECORD:
        return False
    document = json.loads(path.read_text(encoding="utf-8"))
    return isinstance(document, dict) and _WROTE in document


def _import_or_say(library: str, path: Path) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError:
        raise MissingExtra(f"the config file {path}", library=library, extra="cli") from None


def _tables(document: Any, path: Path, tables: Sequence[str]) -> dict[str, dict[str, Any]]:
    document = {} if document is None else document
    known = f"{', '.join(tables[:-1])} and {tables[-1]}"
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path} should hold the tables {known}, but is {describe_value(document)}.")
    for name, table in document.items():
        if name not in tables:
            near = difflib.get_close_matches(str(name), tables, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"{path}: there is no table {name}{hint} Known tables: {', '.join(tables)}.")
        if table is not None and not isinstance(table, Mapping):
            raise ConfigError(f"{path}: {name} should be a table, but is {describe_value(table)}.")
    return {name: dict(document.get(name) or {}) for name in tables}
