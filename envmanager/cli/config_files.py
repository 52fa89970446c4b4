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
_NAME = re.compile(r"""(?:"[^"]*"|'[^']*'|[^."'=]+)""")
"""Pattern of one name in a path of ``--set``; a name that contains a dot is quoted."""
_ASSIGNMENT = re.compile(rf"({_NAME.pattern}(?:\.{_NAME.pattern})*)=(.*)", re.DOTALL)
_OPTIONS = {"manager": ManagerOptions, "run": RunOptions, "training": TrainingOptions}


def load_config(path: Path, tables: Sequence[str] = RUN_TABLES) -> dict[str, dict[str, Any]]:
    """Return the tables of a config file by name. ``tables``: the allowed names. A table that the file lacks is empty.

    Raises ConfigError for a missing or invalid file, or MissingExtra if the library for its format is not installed.
    """
    form = FORMS.get(path.suffix.lower())
    if form is None:
        module = ".".join((path.stem,) if path.is_absolute() else path.with_suffix("").parts)
        for_training = "run" not in tables
        env = f"{module}:NAME" if path.suffix == ".py" else str(path)
        raise ConfigError(
            f"{path} is not a config file: its name should end in {', '.join(FORMS)}. "
            f"{'A Godot game is named by its folder. ' if for_training else ''}To name an environment"
            + (f", write a config with manager: {{env: {env}}}" if for_training else f": --env {env}")
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


def options_of(text: str | None) -> dict[str, Any] | None:
    """Return the mapping that the option ``--options`` has as YAML. Raises ConfigError if it is none."""
    options = None if text is None else parse(text, "YAML", f"the value in --options {text!r}")
    if text is not None and not isinstance(options, dict):
        raise ConfigError(f"--options takes a mapping such as '{{level: 3}}', not {describe_value(options)}.")
    return options


_FLOAT = re.compile(r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$")
"""Pattern of a number with a point or an exponent, as in YAML 1.2."""


LONGEST_NUMBER = 1000
"""Maximum number of digits of a whole number in a config. Python neither reads nor prints more than 4,300."""
_LONG_NUMBER = re.compile(rf"(?<!\w)[0-9][\w:]{{{LONGEST_NUMBER}}}")


def _toml() -> Any:
    name = "tomllib" if importlib.util.find_spec("tomllib") else "tomli"  # Python 3.10 has no tomllib
    return importlib.import_module(name).loads


def _yaml() -> Callable[[str], Any]:
    """Return a function like PyYAML's ``safe_load``, but ``1e5`` is a number, and a key that comes twice an error."""
    yaml = importlib.import_module("yaml")

    def compose(self: Any, anchor: Any) -> Any:
        node = yaml.SafeLoader.compose_mapping_node(self, anchor)  # a merge, <<, has not added its keys yet
        places: dict[Any, Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                first = places.setdefault(self.construct_object(key), key.start_mark)
                if first is not key.start_mark:
                    problem = f"the key {key.value!r} is in line {first.line + 1} already"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node

    loader: Any = type("Loader", (yaml.SafeLoader,), {"compose_mapping_node": compose})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return functools.partial(yaml.load, Loader=loader)


def load_json(text: str) -> Any:
    """Return the value of a text in JSON. Raises ConfigError if a key comes twice, and ValueError for other text."""
    return json.loads(text, object_pairs_hook=_distinct)


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ConfigError(f"the key {next(name for name in names if names.count(name) > 1)!r} comes twice")
    return table


LOADERS: dict[str, Callable[[], Callable[[str], Any]]] = {"TOML": _toml, "YAML": _yaml, "JSON": lambda: load_json}
FORMS = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".json": "JSON"}
"""Form of a config file, by the suffix of its name."""


def run_folder_of(config: Path) -> Path:
    """Return a run's default folder: the folder of ``config`` if a run wrote it, or ``runs/NAME`` for ``NAME.toml``.

    For a game, NAME is that of its folder, its .pck, or the demo.
    """
    if config.name.startswith(DEMO) or config.is_dir():
        return Path("runs") / config.resolve().name.removeprefix(DEMO)
    return config.parent if is_record(config) else Path("runs") / config.stem


def is_record(config: Path) -> bool:
    """Return whether a training run wrote ``config``, which then has all its options."""
    return config.name == records.CONFIG and records.read(config.parent) is not None


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
    return nearest(name, {**places_in(tables), **{table: table for table in tables}})


def places_in(tables: Iterable[str]) -> dict[str, str]:
    """Return the path of each option in ``tables``, such as ``manager.n_envs``, by the option's name."""
    fields = ((table, field.alias) for table in tables if table in _OPTIONS for field in attrs.fields(_OPTIONS[table]))
    return {name: f"{table}.{name}" for table, name in fields}


def override(tables: Mapping[str, dict[str, Any]], assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a copy of ``tables`` with the ``--set`` assignments applied. Raises ConfigError if one is invalid."""
    changed: dict[str, dict[str, Any]] = copy.deepcopy(dict(tables))
    for text in assignments:
        found = _ASSIGNMENT.fullmatch(text)
        path = [] if found is None else _NAME.findall(found[1])
        path = [name[1:-1] if name[0] in "\"'" else name for name in path]
        if found is None or (len(path) == 1 and path[0] in tables):
            raise ConfigError(f"--set {text}: it should be TABLE.NAME=VALUE, such as --set manager.n_envs=16.")
        value = parse(found[2], "YAML", f"the value in --set {text}")
        if path[0] == "trainers" and "trainers" in tables:
            _check_behavior(path, changed["trainers"], text)
        _table_for(path, changed, text)[path[-1]] = value
    return changed


def _table_for(path: Sequence[str], tables: dict[str, dict[str, Any]], text: str) -> dict[str, Any]:
    """Return the table holding ``path``. Create missing inner tables. A ConfigError for a bad path quotes ``text``."""
    if path[0] not in tables:
        near = nearest_place(path[0], tables)
        raise ConfigError(f"--set {text}: there is no table {path[0]}{near} Known tables: {', '.join(tables)}.")
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


def _check_behavior(path: Sequence[str], trainers: Mapping[str, Any], text: str) -> None:
    """Raise ConfigError for an option of an unknown trainer, unless ``path`` adds it by its table or its kind."""
    behavior = path[1]
    if behavior not in trainers and len(path) > 2 and path[2] != "kind":
        raise ConfigError(
            f"--set {text}: the config has no trainers.{behavior}{nearest(behavior, [*trainers], prefix='trainers')} "
            f"It has: {', '.join(trainers) or 'none'}. A new one begins with its kind: --set "
            f"trainers.{behavior}.kind=ppo."
        )
