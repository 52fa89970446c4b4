"""The output of the commands, a pair of classes: ``PlainOutput`` prints lines, ``LiveOutput`` also draws progress.

The caller's thread draws. There is no drawing thread, so an output costs nothing between two calls. Long lines of text
are wrapped in a terminal, but not in a file or a pipe.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

import attrs
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from envmanager.observe.files import logged
from envmanager.registry import ManagerOptions

NAMES = 12
"""Width in characters of the column of names that ``print_pairs`` prints."""


@attrs.frozen
class Table:
    """A table of text. ``style_of`` returns a cell's style. Columns other than ``left`` are right-aligned.

    In a narrow terminal, the columns ``spare`` are left out, one after the other. Without ``spare``, rows and columns
    are exchanged.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    style_of: Callable[[str], str] = lambda _: ""
    left: str = ""
    spare: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        yield self.drawn(options.max_width)

    def drawn(self, width: int) -> RichTable:
        """Return the table as drawn in ``width`` characters."""
        columns = [(name, *cells) for name, *cells in zip(self.columns, *self.rows, strict=True)]
        spare = [column for name in self.spare for column in columns if column[0] == name]
        while spare and sum(map(_width, columns)) + len(columns) > width:
            columns.remove(spare.pop(0))
        if not self.spare and sum(map(_width, columns)) + len(columns) > width:
            columns = min(
                columns, list(zip(*columns, strict=True)), key=lambda each: sum(map(_width, each)) + len(each)
            )
        widths = list(map(_width, columns))
        gap = 2 if sum(widths) + 2 * len(widths) <= width else 1
        made = RichTable(box=None, header_style="dim", padding=(0, gap, 0, 0))
        for place, (name, *_) in enumerate(columns):
            if sum(widths) + gap * len(widths) + len(name) - widths[place] <= width:
                widths[place] = max(len(name), widths[place])  # a heading in one line
            made.add_column(name, justify="left" if name == self.left else "right", width=widths[place])
        for cells in list(zip(*columns, strict=True))[1:]:
            made.add_row(*(Text(cell, style=self.style_of(cell)) for cell in cells))
        return made


def _width(column: Sequence[str]) -> int:
    """Return the least width of a column, whose heading may be broken between words."""
    name, *cells = column
    return max(map(len, (*name.split(), *cells)), default=0)


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

    def echoing(self, options: ManagerOptions) -> AbstractContextManager[ManagerOptions]:
        """Return a context with ``options`` by which what workers print does not get into what is drawn."""
        return nullcontext(options)

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
        self._printed: NewLines | None = None

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
        self._console.print(table)

    @contextmanager
    def echoing(self, options: ManagerOptions) -> Iterator[ManagerOptions]:
        with nullcontext(options) if options.kind == "godot" else logged(options, None) as own:  # its log is in memory
            self._printed = None if own is options or own.log_dir is None else NewLines(Path(own.log_dir))
            try:
                yield own
            finally:
                self._echo(is_over=True)

    def _echo(self, *, is_over: bool = False) -> None:
        if self._printed is not None and (lines := self._printed.take(is_over=is_over)):
            self._console.print(Text.from_ansi("\n".join(lines)))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield

    def progress(self, line: str, draw: Callable[[int], Iterable[RenderableType]]) -> None:
        self._echo()
        self._live.update(Group(*draw(self._console.height)), refresh=True)


class LibraryLog(logging.Handler):
    """A logging handler and context manager, which receives the library's records from its level on in the context."""

    def __enter__(self) -> None:
        logger = logging.getLogger("envmanager")
        self._level_before = logger.level
        if self.level < min(logging.WARNING, logger.getEffectiveLevel()):
            logger.setLevel(self.level)
        logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("envmanager")
        logger.removeHandler(self)
        logger.setLevel(self._level_before)


class NewLines:
    """The lines in the log files below ``folder`` that are new since the last call of ``take``."""

    MOST = 20
    """Maximum number of lines that ``take`` returns. More could not be read in a terminal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[Path, int] = {}

    def take(self, *, is_over: bool = False) -> list[str]:
        """Return the new lines, or the first of many and how many more there are. ``is_over``: with incomplete ones."""
        lines: list[str] = []
        for path in sorted(self._folder.rglob("*.log")):
            with open(path, "rb") as file:
                file.seek(self._ends.get(path, 0))
                *complete, rest = file.read().split(b"\n")
                self._ends[path] = file.tell() - len(rest)
            lines += (line.decode(errors="replace") for line in (*complete, *([rest] if is_over and rest else [])))
        n_more = len(lines) - self.MOST
        return (
            lines if n_more <= 0 else [*lines[: self.MOST], f"({n_more:,} more lines; manager.log_dir keeps them all)"]
        )


@contextmanager
def prints_on_stderr() -> Iterator[None]:
    """Return a context in which this process, native code in it and its children print to stderr in place of stdout."""
    with ExitStack() as stack:
        if sys.stdout is not None:  # it is None, and descriptor 1 closed, if the program was started so
            sys.stdout.flush()
            stack.enter_context(redirect_stdout(sys.stderr))
        with suppress(OSError):
            kept = os.dup(1)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
        yield


def output_for(*, plain: bool) -> PlainOutput:
    """Return a PlainOutput if ``plain`` is true or nothing can be drawn on stdout, else a LiveOutput."""
    console = Console(highlight=False)
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
        wrapper = textwrap.TextWrapper(
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * indent,
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = "\n".join(map(wrapper.fill, text.splitlines()))
    print(text, file=file, flush=True)


def print_pairs(pairs: Iterable[tuple[str, str]], width: int = NAMES) -> None:
    """Print the name and the text of each pair, with the texts aligned in a column after ``width`` characters."""
    for name, text in pairs:
        print_text(f"{name:<{width}}{text}", indent=width)


def describe_notice(level: str, text: str) -> str:
    """Return a notice as one string, such as ``"Warning: …"``, without trailing whitespace."""
    return f"{level.capitalize()}: {text}".rstrip()
