"""Files that replace others as a whole.

::

    path ◀── rename ── .path.3f9c21d0.part, made new

The rule: a file that replaces another is written under a new name and then renamed. So its name stands for the old file
or the new one, each whole; a link of that name is not followed; and its mode is what the umask leaves.
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
from envmanager.system.machine import SAFELY


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

    Raises NotWritten.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with reporting(path):
        # O_EXCL: there was no file or link of this name. The new file gets the mode that the umask leaves.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o666)
        file = os.fdopen(descriptor, "wb")
        try:
            yield file
            file.flush()
            os.fsync(descriptor)
            file.close()  # Windows renames no open file
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # a disk that is full refuses the rest again
                file.close()
            temporary.unlink(missing_ok=True)
            raise


def append_to(path: Path) -> BinaryIO:
    """Open a file that ``replacing`` has made, to write after its end. Raises OSError, also for a link in its place."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | SAFELY), "ab")


def write_anew(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, wholly or not at all. Raises NotWritten."""
    with replacing(path) as file:
        file.write(text.encode())
