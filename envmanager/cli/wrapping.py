"""Printing of text and tables. Long lines of text are wrapped in a terminal, but not in a file or a pipe."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

NAMES = 12
"""Width in characters of the column of names that ``print_pairs`` prints."""


def show(console: Console, text: str | Text, style: str = "") -> None:
    """Print ``text`` on a Rich console. Long lines are wrapped only if the console is a terminal."""
    console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=not console.is_terminal)


def print_text(text: str, file: TextIO | None = None, *, indent: int = 0) -> None:
    """Print ``text`` to ``file`` (default: stdout). In a terminal, wrap long lines and indent their continuations."""
    file = sys.stdout if file is None else file
    if file.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, width, indent) for line in text.splitlines())
    print(text, file=file, flush=True)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print the name and the text of each pair, with the texts aligned in a column."""
    for name, text in pairs:
        print_text(f"{name:<{NAMES}}{text}", indent=NAMES)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells as a table with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def show_notice(console: Console, errors: Console, level: str, text: str) -> None:
    """Print a notice on ``errors``. If that is a terminal, use ``console`` instead, to keep its live table intact."""
    style = {"note": "dim", "warning": "yellow", "error": "red"}[level]
    show(console if errors.is_terminal else errors, describe_notice(level, text), style=style)


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
