"""Tasks from the command line: lists of seeds, and files with a row per task.

A row may have a ``seed``, an ``id``, and either ``options`` as JSON or a column per option::

    seed,id,level,speed          {"seed": 7, "id": "easy", "level": 3, "speed": 0.5}
    7,easy,3,0.5                 {"id": "hard", "options": {"level": 9}}
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from envmanager.data.specs import describe_value
from envmanager.errors import UsageError
from envmanager.tasks import Task

_SEEDS = re.compile(r"([0-9]{1,18})(?::([0-9]{1,18}))?")


def tasks_of_seeds(text: str) -> list[Task]:
    """Return a task per seed of a list such as ``"3,7,9"`` or ``"0:50"``, which ends with 49. Raises UsageError."""
    seeds: list[int] = []
    for part in text.split(","):
        found = _SEEDS.fullmatch(part.strip())
        chosen = range(int(found[1]), int(found[2] or int(found[1]) + 1)) if found else ()
        if not chosen:
            raise UsageError(f"--seeds {text}: {part!r} is neither a seed nor a range of seeds, such as 0:50.")
        seeds.extend(chosen)
    return [Task(seed=seed) for seed in seeds]


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks in a .csv or .jsonl file. Raises UsageError, which names the file, the line and the column."""
    read = {".csv": _read_csv, ".jsonl": _read_jsonl}.get(path.suffix.lower())
    if read is None:
        raise UsageError(f"--tasks {path}: a file of tasks has a name that ends in .csv or .jsonl.")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            tasks = [_task(where, row) for where, row in read(file, path)]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tasks {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not tasks:
        raise UsageError(f"--tasks {path} has no tasks.")
    return tasks


def _read_csv(file: Iterable[str], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the values of each row, without empty cells. A cell that is not JSON is text."""
    lines = csv.reader(file, strict=True)
    names: list[str] = []
    try:
        for cells in lines:
            where = f"--tasks {path}, line {lines.line_num}"
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if not names:
                names = cells
                for column, name in enumerate(names, 1):
                    if not name or names.count(name) > 1 or ";" in name:
                        raise UsageError(
                            f"{where}, column {column}: each column needs a name of its own, unlike {name!r}; commas "
                            "separate columns."
                        )
            elif len(cells) != len(names):
                raise UsageError(f"{where} has {len(cells)} cells, but there are {len(names)} columns.")
            else:
                given = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
                yield where, {name: cell if name == "id" else _json_or_text(cell) for name, cell in given.items()}
    except csv.Error as error:
        raise UsageError(f"--tasks {path}, line {lines.line_num}: {error}.") from error


def _read_jsonl(file: Iterable[str], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the values of each row."""
    for number, line in enumerate(file, 1):
        where = f"--tasks {path}, line {number}"
        if line.strip():
            try:
                row = json.loads(line, parse_constant=_refuse)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where}, column {getattr(error, 'colno', 1)}: this is not JSON: {error}.") from error
            if not isinstance(row, dict):
                raise UsageError(f"{where} should be an object with seed, id and options, not {describe_value(row)}.")
            yield where, row


def _task(where: str, row: dict[str, Any]) -> Task:
    options = {name: value for name, value in row.items() if name not in ("seed", "id", "options")}
    if row.get("options") is not None:
        if options:
            raise UsageError(f"{where}, column {next(iter(options))}: options are in the column options already.")
        options = row["options"]
    for name, value in (("seed", row.get("seed")), ("options", options)):
        try:
            Task(**{name: value})
        except UsageError as error:
            raise UsageError(f"{where}, column {name}: {error}") from error
    return Task(row.get("seed"), options or None, row.get("id"))


def _json_or_text(cell: str) -> Any:
    try:
        return json.loads(cell, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return cell


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not in JSON")
