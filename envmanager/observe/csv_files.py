"""Tables as CSV files that grow while something runs, and that a run which goes on may go on with.

The rule: a file is made anew, with the rows that are kept, and takes the place of the old one when it holds them all. A
row is on its way to the disk as soon as it is written. A file is ours when its first line is.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from envmanager.errors import UsageError
from envmanager.system.new_files import append_to, replacing, reporting

_LONGEST_HEADER = 1000


class CsvFile:
    """Writes rows into a new file at ``path``, after those of ``kept``. Raises NotWritten."""

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
        """Add a row. Raises OSError."""
        self._writer.writerow(row)

    def close(self) -> None:
        """Nothing more comes. Any number of times."""
        self._file.close()


def _text(file: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, encoding="utf-8", newline="", line_buffering=True)


def rows_of(path: Path, *tables: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a file, by column; none where there is no file. A last line that was cut short is left out.

    ``tables``: the columns that it may have. Raises UsageError for a file that cannot be read.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    columns = rows[0] if rows and tuple(rows[0]) in {tuple(table) for table in tables} else tables[0]
    return [dict(zip(columns, row, strict=True)) for row in rows[1:] if len(row) == len(columns)]


def is_of_others(path: Path, *tables: Sequence[str]) -> bool:
    """Whether something is there that is no table with these columns; a link is none of ours."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return True
    if not path.exists():
        return False
    headers = [_header(table) for table in tables]
    with path.open("rb") as file:
        first = file.readline(max(map(len, headers)))
    return not any(header.startswith(first) for header in headers)  # cut short when a run was killed at its beginning


def holds_rows(path: Path) -> bool:
    """Whether there is a row in it."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(file.readline(_LONGEST_HEADER) and file.read(1))


def _header(columns: Sequence[str]) -> bytes:
    return (",".join(columns) + "\r\n").encode()
