"""Values of a config that are given on the command line: ``--set manager.n_envs=16``.

::

    manager.timeouts.step_s=5      the tables, then the name, with dots between them
    trainers."team.red".gamma=0.9  a name that has a dot in it, in quotes
    manager.env_kwargs={size: 4}   the value is read as YAML: numbers, texts, lists, mappings

This module only checks that the tables exist. The values are checked together with the rest of the config.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envmanager.cli.config_files import nearest_place, read_yaml
from envmanager.data.specs import describe_value
from envmanager.errors import ConfigError
from envmanager.importing import nearest

_NAME = re.compile(r'"([^"]*)"|\'([^\']*)\'|([^."\'=]+)')


def override(tables: Mapping[str, dict[str, Any]], assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the tables with every assignment carried out, in order. Raises ConfigError for an unknown table."""
    changed: dict[str, dict[str, Any]] = copy.deepcopy(dict(tables))
    added: set[str] = set()
    for text in assignments:
        path, value = _read(text)
        table = _table_for(path, changed, text)
        if path[0] == "trainers":
            _check_behavior(path, tables["trainers"], added, text)
        table[path[-1]] = value
    return changed


def _read(text: str) -> tuple[list[str], Any]:
    """Return the path and the value of ``a.b.c=value``."""
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
            return path, read_yaml(text[place + 1 :], f"the value in --set {text}")
        if sign != ".":
            raise _no_assignment(text)
        place += 1


def _no_assignment(text: str) -> ConfigError:
    return ConfigError(f"--set {text}: it should be TABLE.NAME=VALUE, such as --set manager.n_envs=16.")


def _table_for(path: Sequence[str], tables: dict[str, dict[str, Any]], text: str) -> dict[str, Any]:
    """Return the table in which the path's last name is set; create missing tables."""
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
    """Raise ConfigError for a trainer that the config does not have, unless its kind is set first."""
    behavior = path[1]
    if len(path) == 2 or path[2] == "kind":
        added.add(behavior)
    elif behavior not in trainers and behavior not in added:
        known = [*trainers, *sorted(added)]
        raise ConfigError(
            f"--set {text}: the config has no trainers.{behavior}{nearest(behavior, known, prefix='trainers')} It has: "
            f"{', '.join(known) or 'none'}. A new one begins with its kind: --set trainers.{behavior}.kind=ppo."
        )
