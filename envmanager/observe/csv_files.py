"""CSV files to which a run appends rows. A resumed run can keep earlier rows.

The rule: the rows to keep are written to a new file. When complete, the new file replaces the old one. Each new row is
flushed at once. A file counts as written by this library if its first line is the expected header or the start of it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from envmanager.errors import UsageError
from envmanager.observe.files import append_to, replacing, reporting

_LONGEST_HEADER = 1000


class CsvFile:
    """A CSV file with a header and the rows ``kept``, replacing any file at ``path``. Raises NotWritten on failure."""

    def __init__(self, path: Path, columns: Sequence[str], kept: Iterable[Sequence[Any]] = ()) -> None:
        with reporting(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                text = _text(file)
                csv.writer(text).writerows([columns, *kept])
                text.detach()
            self._file = _text(append_to(path))
            self._writer = csv.writer(self._file)

    def write(self, row: Sequence[Any]) -> None:
        """Append a row and flush it. Raises OSError if the row cannot be written."""
        self._writer.writerow(row)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()


def _text(file: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, encoding="utf-8", newline="", line_buffering=True)


def rows_of(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows below the header of ``path`` as dicts by column name, or [] if the file does not exist.

    Rows with missing or extra values are skipped. Raises UsageError if the file cannot be read.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    return [dict(zip(columns, row, strict=True)) for row in rows[1:] if len(row) == len(columns)]


def is_of_others(path: Path, columns: Sequence[str]) -> bool:
    """Return True for a link, a folder, or a file whose first line is neither the header ``columns`` nor its start."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return True
    if not path.exists():
        return False
    header = (",".join(columns) + "\r\n").encode()
    with path.open("rb") as file:
        return not header.startswith(file.readline(len(header)))  # a run killed at its start may leave half a header


def holds_rows(path: Path) -> bool:
    """Return whether ``path`` is a file with at least one row below its header."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(file.readline(_LONGEST_HEADER) and file.read(1))
