"""The output of the commands, a pair of classes: ``PlainOutput`` prints lines, ``LiveOutput`` also draws progress.

The caller's thread draws. There is no drawing thread, so an output costs nothing between two calls. Long lines of text
are wrapped in a terminal, but not in a file or a pipe.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import attrs
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

NAMES = 12
"""Width in characters of the column of names that ``print_pairs`` prints."""


@attrs.frozen
class Table:
    """A table of text. ``style_of`` returns a cell's style. Columns other than ``left`` are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    style_of: Callable[[Sequence[str], str], str]
    left: str = ""

    def drawn(self) -> RichTable:
        """Return the table as drawn in a terminal."""
        made = RichTable(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for name in self.columns:
            made.add_column(name, justify="left" if name == self.left else "right")
        for row in self.rows:
            made.add_row(*(Text(cell, style=self.style_of(row, cell)) for cell in row))
        return made


class PlainOutput:
    """The output for files, pipes and logs: lines of text without control characters."""

    FIRST_S, EVERY_S = 2.0, 2.0
    """Seconds until progress is shown for the first time, and then between two times."""

    def line(self, text: str, style: str = "", *, indent: int = 0) -> None:
        """Print ``text``. In a terminal, wrap long lines and indent their continuations by ``indent`` spaces."""
        print_text(text, indent=indent)

    def show_notice(self, level: str, text: str) -> None:
        """Print a logged message to stderr; ``level`` is ``"note"``, ``"warning"`` or ``"error"``."""
        print_text(describe_notice(level, text), sys.stderr)

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Print the name and the text of each pair, with the texts aligned in a column."""
        print_pairs(pairs, max(len(name) for name, _ in pairs) + 2)

    def table(self, table: Table) -> None:
        widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
        for row in (table.columns, *table.rows):
            print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context in which ``progress`` may be called."""
        yield

    def progress(self, line: str, draw: Callable[[int], Iterable[RenderableType]]) -> None:
        """Print ``line`` unless it is empty, or draw the progress that ``draw`` returns for the terminal's height."""
        if line:
            print_text(line, indent=10)


class LiveOutput(PlainOutput):
    """The output for terminals: progress is redrawn in place, below the lines of text.

    Notices go to ``errors``, or to ``console`` if both are terminals, because they are printed above what is drawn.
    """

    FIRST_S, EVERY_S = 0.0, 0.125

    def __init__(self, console: Console, errors: Console) -> None:
        self._console = console
        self._errors = errors

    def line(self, text: str, style: str = "", *, indent: int = 0) -> None:
        self._console.print(Text(text, style=style))

    def show_notice(self, level: str, text: str) -> None:
        style = {"note": "dim", "warning": "yellow", "error": "red"}[level]
        show(self._console if self._errors.is_terminal else self._errors, describe_notice(level, text), style=style)

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        grid = RichTable.grid(padding=(0, 2))
        for name, text in pairs:
            grid.add_row(Text(name, style="dim"), Text(text))
        self._console.print(grid)

    def table(self, table: Table) -> None:
        self._console.print(table.drawn())

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield

    def progress(self, line: str, draw: Callable[[int], Iterable[RenderableType]]) -> None:
        self._live.update(Group(*draw(self._console.height)), refresh=True)


def output_for(console: Console, *, plain: bool) -> PlainOutput:
    """Return a PlainOutput if ``plain`` is true or nothing can be drawn on ``console``, else a LiveOutput."""
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainOutput()
    return LiveOutput(console, Console(stderr=True, highlight=False))


def show(console: Console, text: str | Text, style: str = "") -> None:
    """Print ``text`` on a Rich console. Long lines are wrapped only if the console is a terminal."""
    console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=not console.is_terminal)


def print_text(text: str, file: TextIO | None = None, *, indent: int = 0) -> None:
    """Print ``text`` to ``file`` (default: stdout). In a terminal, wrap long lines and indent their continuations."""
    file = sys.stdout if file is None else file
    if file is not None and file.isatty():  # it is None if the program was started with stdout closed
        width = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, width, indent) for line in text.splitlines())
    print(text, file=file, flush=True)


def print_pairs(pairs: Iterable[tuple[str, str]], width: int = NAMES) -> None:
    """Print the name and the text of each pair, with the texts aligned in a column after ``width`` characters."""
    for name, text in pairs:
        print_text(f"{name:<{width}}{text}", indent=width)


def describe_notice(level: str, text: str) -> str:
    """Return a notice as one string, such as ``"Warning: …"``, without trailing whitespace."""
    return f"{level.capitalize()}: {text}".rstrip()


def _broken(line: str, width: int, indent: int) -> str:
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
