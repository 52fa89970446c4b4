"""Text for people: in a terminal lines are broken between words; in a file or a pipe they stay whole."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.text import Text

NAMES = 12
"""Width of the names in front of texts."""


def show(console: Console, text: str | Text, style: str = "") -> None:
    """Print a text of one or more lines."""
    console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=not console.is_terminal)


def print_text(text: str, file: TextIO | None = None, *, indent: int = 0) -> None:
    """Print a text of one or more lines; the rest of a line that was broken is indented."""
    file = sys.stdout if file is None else file
    if file.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, width, indent) for line in text.splitlines())
    print(text, file=file, flush=True)


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names, and beside each its text."""
    for name, text in pairs:
        print_text(f"{name:<{NAMES}}{text}", indent=NAMES)


def _broken(line: str, width: int, indent: int) -> str:
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
