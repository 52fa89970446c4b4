"""Every episode of a training as a line of a CSV file, for plots of returns.

The rule: a training that is resumed goes on with the same episodes, without those that came after the checkpoint. They
are written into a new file, which takes the place of the old one when it holds them all.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import TracebackType

import attrs

from envmanager.errors import UsageError
from envmanager.system.new_files import replacing

FILE = "episodes.csv"
_COLUMNS = ("steps", "seconds", "behavior", "agent_id", "return")
_HEADER = (",".join(_COLUMNS) + "\r\n").encode()


@attrs.frozen
class EpisodeEnd:
    """``steps`` and ``seconds`` since the training began, for all agents; ``total`` is the return."""

    steps: int
    seconds: float
    behavior: str
    agent_id: int
    total: float


class EpisodeLog:
    """Writes ``directory/episodes.csv`` anew. ``resumed_at``: keeps the episodes up to so many steps instead.

    ``seconds`` is the time that those took: add it to the times of what is written. A line is on its way to the disk as
    soon as it is written. Raises UsageError where no such file can be made, or one of somebody else's is.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        path = directory / FILE
        kept = [] if resumed_at is None else [end for end in read(path) if end.steps <= resumed_at]
        self.seconds = kept[-1].seconds if kept else 0.0
        if is_of_others(path):
            raise UsageError(f"{path} is no list of episodes that a training wrote: move it, or train elsewhere.")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                self._file = io.TextIOWrapper(file, encoding="utf-8", newline="", line_buffering=True)
                self._writer = csv.writer(self._file)
                self._writer.writerow(_COLUMNS)
                for end in kept:
                    self.write(end)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror or error}.") from error

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, end: EpisodeEnd) -> None:
        """Add an episode."""
        self._writer.writerow((end.steps, f"{end.seconds:.3f}", end.behavior, end.agent_id, f"{end.total:.6g}"))


def read(path: Path) -> list[EpisodeEnd]:
    """The episodes in a file, in order; none where there is no file. A last line that was cut short is left out.

    Raises UsageError for a file that holds something else.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        return [
            EpisodeEnd(int(steps), float(seconds), name, int(agent), float(total))
            for steps, seconds, name, agent, total in (row for row in rows if len(row) == len(_COLUMNS))
        ]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as a list of episodes: {error}.") from error


def is_of_others(path: Path) -> bool:
    """Whether something is there that no EpisodeLog has written; a link is none of ours."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return True
    if not path.exists():
        return False
    with path.open("rb") as file:
        first = file.readline(len(_HEADER))
    return not _HEADER.startswith(first)  # cut short when a run was killed at its very beginning


def holds_episodes(path: Path) -> bool:
    """Whether a training has written any episode there."""
    return path.is_file() and path.stat().st_size > len(_HEADER)
