"""The episode log of a training run: a CSV file with one line per episode of an agent, for plots of returns.

The rule: a resumed training run keeps the episodes up to its checkpoint and drops later episodes. The kept episodes are
written to a new file, which replaces the old file when it is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from envmanager.data.steps import AGENT_BITS
from envmanager.errors import UsageError
from envmanager.observe import csv_files
from envmanager.observe.csv_files import CsvFile

_logger = logging.getLogger("envmanager")
FILE = "episodes.csv"
_COLUMNS = ("steps", "seconds", "behavior", "env_id", "agent_id", "return", "length")


@attrs.frozen
class EpisodeEnd:
    """One finished episode of one agent. ``total`` is the agent's return, ``length`` the agent's number of steps.

    ``steps`` and ``seconds`` are the training's total agent steps and total time when the episode ended.
    """

    steps: int
    seconds: float
    behavior: str
    agent_id: int
    total: float
    length: int

    @property
    def env_id(self) -> int:
        """Id of the environment in which the agent plays."""
        return self.agent_id >> AGENT_BITS


class EpisodeLog:
    """A writer that replaces ``directory/episodes.csv``. Drops old episodes except any up to agent step ``resumed_at``.

    ``seconds`` is the time of the last kept episode, or 0. The caller adds ``seconds`` to the times of new episodes.
    Raises NotWritten if the file cannot be created, and UsageError if the existing file is not an episode log.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        path = self._path = directory / FILE
        self._is_incomplete = False
        kept = [] if resumed_at is None else [end for end in read(path) if end.steps <= resumed_at]
        self.seconds = kept[-1].seconds if kept else 0.0
        if is_of_others(path):
            raise UsageError(f"{path} is not a list of episodes of a training run: move it, or train elsewhere.")
        self._file = CsvFile(path, _COLUMNS, map(_row, kept))

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(self, *_: object) -> None:
        with self._surviving():
            self._file.close()

    def write(self, end: EpisodeEnd) -> None:
        """Append an episode. An episode that cannot be written is dropped; only the first such failure is logged."""
        with self._surviving():
            self._file.write(_row(end))

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk must not end hours of training
            if not self._is_incomplete:
                self._is_incomplete = True
                _logger.warning("from now on episodes are missing from %s: %s.", self._path, error.strerror or error)


def _row(end: EpisodeEnd) -> tuple[object, ...]:
    return end.steps, f"{end.seconds:.3f}", end.behavior, end.env_id, end.agent_id, f"{end.total:.6g}", end.length


def read(path: Path) -> list[EpisodeEnd]:
    """Return the episodes of a file in order, or an empty list if there is no file. Skips incomplete lines.

    Raises UsageError if the file cannot be read, or if a number in a complete line is invalid.
    """
    rows = csv_files.rows_of(path, _COLUMNS)
    try:
        return [
            EpisodeEnd(
                int(row["steps"]),
                float(row["seconds"]),
                row["behavior"],
                int(row["agent_id"]),
                float(row["return"]),
                int(row["length"]),
            )
            for row in rows
            if row["length"]  # empty in an incomplete last line
        ]
    except ValueError as error:
        raise UsageError(f"{path} cannot be read as a list of episodes: {error}.") from error


def is_of_others(path: Path) -> bool:
    """Return whether ``path`` exists and was not written by an EpisodeLog. True for every symbolic link and folder."""
    return csv_files.is_of_others(path, _COLUMNS)


def holds_episodes(path: Path) -> bool:
    """Return whether the file ``path`` exists and has at least one line below its header."""
    return csv_files.holds_rows(path)
