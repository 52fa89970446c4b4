"""Every episode of a training as a line of a CSV file, for plots of returns.

The rule: a training that is resumed goes on in the same file, without the episodes that came after the checkpoint.
"""

from __future__ import annotations

import csv
from pathlib import Path
from types import TracebackType
from typing import TextIO

import attrs

FILE = "episodes.csv"
_COLUMNS = ("steps", "seconds", "behavior", "agent_id", "return")


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
    soon as it is written.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE
        kept = [] if resumed_at is None else [end for end in read(path) if end.steps <= resumed_at]
        self.seconds = kept[-1].seconds if kept else 0.0
        self._file: TextIO = path.open("w", newline="", buffering=1)
        self._writer = csv.writer(self._file)
        self._writer.writerow(_COLUMNS)
        for end in kept:
            self.write(end)

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
    """The episodes in a file, in order; none where there is no file. A last line that was cut short is left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    whole = [row for row in rows if len(row) == len(_COLUMNS)]
    return [
        EpisodeEnd(int(steps), float(seconds), name, int(agent), float(total))
        for steps, seconds, name, agent, total in whole
    ]
