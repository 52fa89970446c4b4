"""Atomic replacement of files, opening of files for appending, folders for logs, and data that JSON can hold.

::

    path ◀── rename ── .path.3f9c21d0.part, newly created

The rule: ``replacing`` writes a file under a new name and then renames it, so ``path`` never holds a half-written
file. A symbolic link at ``path`` is replaced and not followed. The umask sets the mode of the new file.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import attrs

from envmanager.errors import NotWritten
from envmanager.system.machine import SAFELY

UNLOGGED = ("asyncio", "ray", "replay", "simple")
"""Kinds of managers that write no log files. Their environments print where the trainer prints, or on a cluster."""
_Options = TypeVar("_Options", bound=Any)


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Convert an OSError raised in the block to NotWritten, whose message names ``path``."""
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        raise NotWritten(f"{path} cannot be written: {error.strerror or error}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces ``path`` if the block ends without an error. Turns OSErrors into NotWritten."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with reporting(path):
        # O_EXCL fails if there is a file or link of this name. The new file gets the mode that the umask leaves.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o666)
        file = os.fdopen(descriptor, "wb")
        try:
            yield file
            file.flush()
            os.fsync(descriptor)
            file.close()  # Windows cannot rename an open file
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # on a full disk the flush fails again
                file.close()
            temporary.unlink(missing_ok=True)
            raise


def append_to(path: Path) -> BinaryIO:
    """Open an existing file for appending and return it. A symbolic link raises OSError, except on Windows."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | SAFELY), "ab")


def write_atomically(path: Path, text: str) -> None:
    """Atomically replace ``path`` with a file that contains ``text``. Raises NotWritten if it cannot be written."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def logged(options: _Options, folder: Path | None) -> Iterator[_Options]:
    """Return a context with ManagerOptions whose workers print into files in ``folder``, unless ``options`` say where.

    If there is such a folder, the files are in ``folder.2``, and so on. If ``folder`` is None or cannot be made, they
    are in a temporary folder.
    """
    if options.log_dir is not None or options.kind in UNLOGGED:
        yield options
        return
    made = None if folder is None else _new_folder(folder)
    if made is not None:
        with tidied(made):
            yield attrs.evolve(options, log_dir=str(made))
        return
    with tempfile.TemporaryDirectory(prefix="envmanager-", ignore_cleanup_errors=True) as temporary:
        yield attrs.evolve(options, log_dir=temporary)


def _new_folder(folder: Path) -> Path | None:
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = folder if number == 1 else folder.with_name(f"{folder.name}.{number}")
            with contextlib.suppress(FileExistsError):  # another command may be writing there
                path.mkdir()
                return path
    return None


@contextmanager
def tidied(folder: Path) -> Iterator[None]:
    """Return a context at whose end empty log files below ``folder`` are removed, and it and its parent if empty."""
    try:
        yield
    finally:
        for log in folder.rglob("*.log"):
            with contextlib.suppress(OSError):
                if not log.stat().st_size:
                    log.unlink()
        inner = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
        for empty in (*inner, folder, folder.parent):
            with contextlib.suppress(OSError):  # it is not empty
                empty.rmdir()


def json_safe(data: Any) -> Any:
    """Return a copy of ``data`` with None for NaN and infinite numbers, which JSON does not have."""
    if isinstance(data, dict):
        return {key: json_safe(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [json_safe(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
