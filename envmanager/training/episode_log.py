"""Every episode of a training as a line of a CSV file, for plots of returns.

The rule: a training that is resumed goes on with the same episodes, without those that came after the checkpoint. They
are written into a new file, which takes the place of the old one when it holds them all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import attrs

from envmanager.data.steps import AGENT_BITS
from envmanager.errors import UsageError
from envmanager.observe import csv_files
from envmanager.observe.csv_files import CsvFile

_logger = logging.getLogger("envmanager")
FILE = "episodes.csv"
_COLUMNS = ("steps", "seconds", "behavior", "env_id", "agent_id", "return", "length")
_BEFORE_LENGTHS = ("steps", "seconds", "behavior", "agent_id", "return")
"""Of trainings that did not note lengths: such a file is read, and goes on with the columns of now."""


@attrs.frozen
class EpisodeEnd:
    """``steps`` and ``seconds`` since the training began, for all agents; ``total`` is the return.

    ``length``: how many actions the agent took; None where an earlier version did not note it.
    """

    steps: int
    seconds: float
    behavior: str
    agent_id: int
    total: float
    length: int | None = None

    @property
    def env_id(self) -> int:
        """The environment that the agent plays in."""
        return self.agent_id >> AGENT_BITS


class EpisodeLog:
    """Writes ``directory/episodes.csv`` anew. ``resumed_at``: keeps the episodes up to so many steps instead.

    ``seconds`` is the time that those took: add it to the times of what is written. A line is on its way to the disk as
    soon as it is written. Raises NotWritten where no file can be made, UsageError for one that no training wrote.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        path = self._path = directory / FILE
        self._is_incomplete = False
        kept = [] if resumed_at is None else [end for end in read(path) if end.steps <= resumed_at]
        self.seconds = kept[-1].seconds if kept else 0.0
        if is_of_others(path):
            raise UsageError(f"{path} is no list of episodes that a training wrote: move it, or train elsewhere.")
        self._file = CsvFile(path, _COLUMNS, map(_row, kept))

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._surviving():
            self._file.close()

    def write(self, end: EpisodeEnd) -> None:
        """Add an episode. A row that cannot be written is missing, which is logged once."""
        with self._surviving():
            self._file.write(_row(end))

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk must not end hours of training
            if not self._is_incomplete:
                self._is_incomplete = True
                _logger.warning("%s misses episodes from here on: %s.", self._path, error.strerror or error)


def _row(end: EpisodeEnd) -> tuple[object, ...]:
    length = "" if end.length is None else end.length
    return end.steps, f"{end.seconds:.3f}", end.behavior, end.env_id, end.agent_id, f"{end.total:.6g}", length


def read(path: Path) -> list[EpisodeEnd]:
    """The episodes in a file, in order; none where there is no file. A last line that was cut short is left out.

    Raises UsageError for a file that holds something else.
    """
    rows = csv_files.rows_of(path, _COLUMNS, _BEFORE_LENGTHS)
    try:
        return [
            EpisodeEnd(
                int(row["steps"]),
                float(row["seconds"]),
                row["behavior"],
                int(row["agent_id"]),
                float(row["return"]),
                int(row["length"]) if row.get("length") else None,
            )
            for row in rows
        ]
    except ValueError as error:
        raise UsageError(f"{path} cannot be read as a list of episodes: {error}.") from error


def is_of_others(path: Path) -> bool:
    """Whether something is there that no EpisodeLog has written; a link is none of ours."""
    return csv_files.is_of_others(path, _COLUMNS, _BEFORE_LENGTHS)


def holds_episodes(path: Path) -> bool:
    """Whether a training has written any episode there."""
    return csv_files.holds_rows(path)
