"""Tasks from the command line: lists of seeds, and files with a row per task.

A row may have a ``seed``, an ``id``, and either ``options`` as JSON or a column per option::

    seed,id,level,speed          {"seed": 7, "id": "easy", "level": 3, "speed": 0.5}
    7,easy,3,0.5                 {"id": "hard", "options": {"level": 9}}
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from envmanager.cli.config_files import load_json, parse
from envmanager.data.specs import describe_value
from envmanager.errors import ConfigError, UsageError
from envmanager.tasks import Task


def tasks_of_seeds(text: str) -> list[Task]:
    """Return a task per seed of a list such as ``"3,7,9"`` or ``"0:50"``, which ends with 49. Raises UsageError."""
    tasks: list[Task] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,18})(?::([0-9]{1,18}))?\s*", part)
        seeds = range(int(found[1]), int(found[2] or int(found[1]) + 1)) if found else ()
        if not seeds:
            raise UsageError(f"--seeds {text}: {part!r} is neither a seed nor a range of seeds, such as 0:50.")
        tasks += [Task(seed=seed) for seed in seeds]
    return tasks


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks in a .csv or .jsonl file. Raises UsageError, which names the file, the line and the column."""
    rows = {".csv": _csv_rows, ".jsonl": _jsonl_rows}.get(path.suffix.lower())
    if rows is None:
        raise UsageError(f"--tasks {path}: a file of tasks has a name that ends in .csv or .jsonl.")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            tasks = [_task(where, row) for where, row in rows(file, f"--tasks {path}, line")]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tasks {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not tasks:
        raise UsageError(f"--tasks {path} has no tasks.")
    return tasks


def _csv_rows(file: Iterable[str], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the cells of each row, but for empty cells. A cell that is not JSON is text, as is an id."""
    lines = csv.reader(file, strict=True)
    names: list[str] = []
    try:
        for line in lines:
            cells, here = [cell.strip() for cell in line], f"{where} {lines.line_num}"
            if not any(cells):
                continue
            if names and len(cells) != len(names):
                raise UsageError(f"{here} has {len(cells)} cells, but there are {len(names)} columns.")
            if names:
                yield here, {name: _value(name, cell, here) for name, cell in zip(names, cells, strict=True) if cell}
                continue
            names = cells
            for column, name in enumerate(names, 1):
                if not name or names.count(name) > 1 or ";" in name:
                    told = f"{here}, column {column}: {name!r} is no name of a column of its own"
                    raise UsageError(f"{told}. Commas separate columns.")
    except csv.Error as error:
        raise UsageError(f"{where} {lines.line_num}: {error}.") from error


def _value(name: str, cell: str, where: str) -> Any:
    try:
        return cell if name == "id" else load_json(cell)
    except ConfigError as error:
        raise ConfigError(f"{where}, column {name}: {error}.") from error
    except (ValueError, RecursionError):
        return cell


def _jsonl_rows(file: Iterable[str], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            row = parse(line, "JSON", f"{where} {number}")
            if not isinstance(row, dict):
                raise UsageError(f"{where} {number} should be an object, not {describe_value(row)}.")
            yield f"{where} {number}", row


def _task(where: str, row: dict[str, Any]) -> Task:
    options = {name: value for name, value in row.items() if name not in ("seed", "id", "options")}
    if options and row.get("options") is not None:
        raise UsageError(f"{where}, column {next(iter(options))}: the column options has the options already.")
    for column, value in (("seed", row.get("seed")), ("options", row.get("options"))):
        try:
            Task(**{column: value})
        except UsageError as error:
            raise UsageError(f"{where}, column {column}: {error}") from error
    return Task(row.get("seed"), row.get("options") or options or None, row.get("id"))
