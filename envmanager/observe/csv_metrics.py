"""Metrics writer for the CSV file ``metrics.csv`` in the training's folder, with one line per value.

The rule: a resumed training run keeps the lines up to its checkpoint and drops later ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from envmanager.errors import UsageError
from envmanager.observe import csv_files
from envmanager.observe.csv_files import CsvFile
from envmanager.observe.metrics_writer import RunFacts

FILE = "metrics.csv"
_COLUMNS = ("steps", "name", "value")
_NUMBER = re.compile("[0-9]{1,18}")


class CsvMetrics:
    """A metrics writer for ``metrics.csv``. Raises UsageError if the file exists and no training run wrote it."""

    def __init__(self, facts: RunFacts) -> None:
        path = facts.directory / FILE
        if is_of_others(path):
            raise UsageError(f"{path} is not a table of metrics of a training run: move it, or train elsewhere.")
        self._file = CsvFile(path, _COLUMNS, () if facts.resumed_at is None else _until(facts.resumed_at, path))

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._file.write((step, name, f"{value:.6g}"))

    def close(self) -> None:
        self._file.close()


def _until(steps: int, path: Path) -> list[tuple[str, ...]]:
    rows = csv_files.rows_of(path, _COLUMNS)
    return [tuple(row.values()) for row in rows if _NUMBER.fullmatch(row["steps"]) and int(row["steps"]) <= steps]


def is_of_others(path: Path) -> bool:
    """Return whether ``path`` exists and no training run wrote it. True for every symbolic link and folder."""
    return csv_files.is_of_others(path, _COLUMNS)
