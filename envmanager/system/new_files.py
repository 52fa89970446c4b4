"""Writes files that take the place of others, which somebody may be reading, or may have prepared.

::

    path ◀── rename ── .path.3f9c21d0.part, made anew

The rule: what is written goes into a file that was not there before, and that then takes the name. So the name stands
for the old file or the new one, each whole; what the name was a link to is not touched; and the mode of the old file
does not stay. The new mode is what the umask leaves: these are results, for whomever the user lets read them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from envmanager.errors import NotWritten

_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags with which no link is followed and no child inherits the file; Windows has neither, and needs neither."""


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Raise NotWritten, which names ``path``, in place of an OSError."""
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        raise NotWritten(f"{path} cannot be written: {error.strerror or error}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of ``path`` when the context ends; when it fails, nothing has changed.

    It is closed then: Windows renames no open file. Raises NotWritten.
    """
    with reporting(path), _replacing(path) as file:
        yield file


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    # O_EXCL: nobody has put a file or a link there. What it makes gets the mode that the umask leaves.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666)
    file = os.fdopen(descriptor, "wb")
    try:
        yield file
        file.flush()
        os.fsync(descriptor)
        file.close()
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # a disk that is full refuses the rest again
            file.close()
        temporary.unlink(missing_ok=True)
        raise


def append_to(path: Path) -> BinaryIO:
    """Open a file that ``replacing`` has made, to write after its end. Raises OSError, also for a link in its place."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | _SAFELY), "ab")


def write_anew(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, wholly or not at all. Raises NotWritten."""
    with replacing(path) as file:
        file.write(text.encode())
