"""The lock of a training run's folder, in which only one training run at a time may write.

The kernel releases the lock on the file (``flock``, on Windows ``msvcrt.locking``) when the process ends, even if it is
killed. The file stays in the folder, because after a deletion two training runs could each lock a different file. But a
folder that was made for the lock and is otherwise empty is deleted with it. A training run that had already opened the
file then retries.

The rule: no child process holds the lock. A forked child closes its copy of the descriptor at once; other children do
not inherit it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from envmanager.errors import UsageError
from envmanager.observe.files import reporting
from envmanager.system.machine import after_fork_in_child

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

FILE = ".training.lock"
_MARK = "envmanager train: "
_LONGEST = 500
_LOCKED_AT = 1 << 30
"""Offset of the byte that is locked on Windows: after the text, because other processes cannot read locked bytes."""
_held: set[BinaryIO] = set()
_logger = logging.getLogger("envmanager")


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Return a context that holds the lock of ``directory``. A folder made for the lock is removed if it stays empty.

    Raises UsageError if another training run (even in this process) holds the lock, or if the file is not a lock file.
    Raises NotWritten if the file cannot be made. If the file system has no locks, only a warning is logged.
    """
    is_new = not directory.exists()
    with _locked(directory / FILE) as file:
        _held.add(file)
        try:
            _write(file, f"{_MARK}process {os.getpid()} on {platform.node()}\n")
            yield
        finally:
            if file in _held:  # else this is a forked child, which has closed the file
                _held.remove(file)
                _write(file, "")
                with contextlib.suppress(OSError):
                    if is_new and os.listdir(directory) == [FILE]:
                        (directory / FILE).unlink()
                        directory.rmdir()
                with contextlib.suppress(OSError):
                    _flock(file, is_held=False)  # a child forked just now may not have closed its descriptor yet


def _locked(path: Path) -> BinaryIO:
    """Open or create the lock file, lock and return it. Retry if it has been deleted. Raises the errors of ``held``."""
    while True:
        file = _opened(path)
        try:
            holder = file.read(_LONGEST).decode(errors="replace").strip()
            if not _MARK.startswith(holder[: len(_MARK)]):
                raise _of_others(path)
            _lock(file, path.parent, holder.removeprefix(_MARK))
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _opened(path: Path) -> BinaryIO:
    with reporting(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):  # pipes could block, links lead anywhere
            raise _of_others(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        return os.fdopen(descriptor, "r+b", buffering=0)


def _of_others(path: Path) -> UsageError:
    return UsageError(f"{path} was not written by a training run: move it, or train elsewhere (--dir).")


def _lock(file: BinaryIO, directory: Path, holder: str) -> None:
    try:
        _flock(file, is_held=True)
    except BlockingIOError as error:
        raise UsageError(
            f"a training run is in progress in {directory}: {holder or 'another process'}. Wait for it, stop it "
            "(Ctrl-C there, or `kill` with its number), or train elsewhere (--dir)."
        ) from error
    except OSError as error:
        _logger.warning(
            "%s cannot be locked (%s): make sure that no other training writes there.",
            directory,
            error.strerror or error,
        )


def _flock(file: BinaryIO, *, is_held: bool) -> None:
    """Lock the file if ``is_held``, otherwise unlock it. Raises BlockingIOError if another open file holds the lock."""
    if sys.platform == "win32":
        file.seek(_LOCKED_AT)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK if is_held else msvcrt.LK_UNLCK, 1)
        except OSError as error:
            if error.errno in (0, errno.EACCES):  # 0 under Wine
                raise BlockingIOError(errno.EAGAIN, str(error)) from error
            raise
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if is_held else fcntl.LOCK_UN)


def _write(file: BinaryIO, text: str) -> None:
    """Replace the file's content with ``text``. Ignores OSError, which only makes error messages less helpful."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.seek(0)
        file.write(text.encode())


@after_fork_in_child
def _after_fork_in_child() -> None:
    for file in _held:
        file.close()
    _held.clear()
