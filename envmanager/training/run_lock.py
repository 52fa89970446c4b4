"""The lock of a training's folder: one training at a time may write there.

It is the kernel's lock on a file (``flock``), so it ends with the process, however that ends. The file stays in the
folder: two trainings could each lock one of their own if it were deleted between them.

The rule: no child process holds the lock. A child that was forked closes its copy of the descriptor at once, and any
other child never gets one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from envmanager.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows has other locks
    fcntl = None  # type: ignore[assignment]

FILE = ".training.lock"
_MARK = "envmanager train: "
_LONGEST = 500
_held: set[BinaryIO] = set()
_logger = logging.getLogger("envmanager")


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the lock of ``directory`` until the context ends; the folder is made if it does not exist.

    Raises UsageError when another training holds it, which may be one in this process. On a file system without locks
    a warning is logged, and nothing is held.
    """
    path = directory / FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        file = os.fdopen(descriptor, "r+b", buffering=0)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}. Train elsewhere (--dir).") from error
    with file:
        is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)  # else reading could block
        holder = file.read(_LONGEST).decode(errors="replace").strip() if is_file else ""
        if not is_file or not _MARK.startswith(holder[: len(_MARK)]):
            raise UsageError(f"{path} was not written by a training: move it, or train elsewhere (--dir).")
        _lock(file, directory, holder.removeprefix(_MARK))
        _held.add(file)
        try:
            _write(file, f"{_MARK}process {os.getpid()} on {platform.node()}\n")
            yield
        finally:
            if file in _held:  # else this is a forked child, which has closed it
                _write(file, "")
                _held.remove(file)
                _unlock(file)


def _lock(file: BinaryIO, directory: Path, holder: str) -> None:
    try:
        if fcntl is None:
            raise OSError("this operating system has no flock")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"a training still runs in {directory}: {holder or 'another process'}. Wait for it, stop it (Ctrl-C there, "
            "or `kill` with its number), or train elsewhere (--dir)."
        ) from error
    except OSError as error:
        _logger.warning(
            "%s cannot be locked (%s): make sure that no other training writes there.",
            directory,
            error.strerror or error,
        )


def _unlock(file: BinaryIO) -> None:
    """Release the lock also if a child that was forked just now has not closed its copy of the descriptor yet."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _write(file: BinaryIO, text: str) -> None:
    """Replace the content. It only serves the message above: on a full disk the lock holds without it."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.seek(0)
        file.write(text.encode())


def _after_fork_in_child() -> None:
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
