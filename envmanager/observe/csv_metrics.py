"""The scalars of a training as a table: a line per value, in ``metrics.csv`` in its folder.

The rule: a training that is resumed goes on with the same table, without what came after its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envmanager.errors import UsageError
from envmanager.observe import csv_files
from envmanager.observe.csv_files import CsvFile
from envmanager.observe.metrics_writer import RunFacts

FILE = "metrics.csv"
_COLUMNS = ("steps", "name", "value")


class CsvMetrics:
    """Writes ``metrics.csv``. Raises UsageError for a file of that name that is somebody else's."""

    def __init__(self, facts: RunFacts) -> None:
        path = facts.directory / FILE
        if is_of_others(path):
            raise UsageError(f"{path} is no table of metrics that a training wrote: move it, or train elsewhere.")
        self._file = CsvFile(path, _COLUMNS, () if facts.resumed_at is None else _until(facts.resumed_at, path))

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._file.write((step, name, f"{value:.6g}"))

    def close(self) -> None:
        self._file.close()


def _until(steps: int, path: Path) -> list[tuple[str, ...]]:
    rows = csv_files.rows_of(path, _COLUMNS)
    return [tuple(row.values()) for row in rows if row["steps"].isdigit() and int(row["steps"]) <= steps]


def is_of_others(path: Path) -> bool:
    """Whether something is there that no training has written; a link is none of ours."""
    return csv_files.is_of_others(path, _COLUMNS)
