"""Files: replaced as a whole, or opened so that only their owner can read them; and advice about what refuses them.

::

    path ◀── rename ── .path.3f9c21d0.part, made new

The rule: a file that replaces another is written under a new name and then renamed. So its name stands for the old file
or the new one, each whole; a link of that name is not followed; and its mode is what the umask leaves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from envmanager.errors import NotWritten, UsageError

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

    Raises NotWritten.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with reporting(path):
        # O_EXCL: there was no file or link of this name. The new file gets the mode that the umask leaves.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666)
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
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | _SAFELY), "ab")


def write_anew(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, wholly or not at all. Raises NotWritten."""
    with replacing(path) as file:
        file.write(text.encode())


_ONLY_OWNER = 0o600
"""Mode of private files. Windows has no modes: there the rights of the folder decide who may read."""


def open_privately(path: str, flags: int) -> int:
    """Return a descriptor of the file ``path`` with mode 0600. It fits ``open(path, mode, opener=open_privately)``.

    Raises OSError, whose ``strerror`` is for people, also for a symbolic link.
    """
    try:
        # O_NONBLOCK: opening a pipe without a reader must not block.
        fd = os.open(path, flags | _SAFELY | getattr(os, "O_NONBLOCK", 0), _ONLY_OWNER)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            reason = "it is a symbolic link, which is not followed: name the file itself"
            raise OSError(errno.ELOOP, reason, path) from None
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) and mode & 0o777 & ~_ONLY_OWNER and hasattr(os, "fchmod"):  # not of a device
        try:
            os.fchmod(fd, _ONLY_OWNER)
        except OSError:  # another user's
            os.close(fd)
            raise
    return fd


_FEWER = "or run fewer processes, each with more environments"
_ADVICE = {
    errno.EAGAIN: f"No more processes are allowed: raise `ulimit -u`, or the container's limit of pids, {_FEWER}.",
    errno.ENOMEM: f"The machine, or the cgroup of this process, is out of memory: free some, {_FEWER}.",
    errno.EMFILE: f"This process may open no more files: raise `ulimit -n`, {_FEWER}.",
    errno.ENFILE: f"The machine may open no more files: raise the sysctl fs.file-max, {_FEWER}.",
    errno.EFBIG: "This process may write no longer files, and shared memory counts as one: raise `ulimit -f`.",
    errno.ENOSPC: "The disk is full, or the memory for shared files is: free some.",
    errno.ENOTDIR: "There is a file where a folder should be: name another path.",
    errno.EEXIST: "There is a file already where a new one or a folder should be: name another path.",
    errno.EROFS: "The file system is read-only: name another folder.",
}


def advice(error: BaseException) -> str:
    """Return what to do about an OSError; an empty text where its number does not tell the reason."""
    number = getattr(error, "errno", None) or 0
    if number == errno.ENOENT:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "The working directory of this process has been removed: change to one that exists (os.chdir)."
    return _ADVICE.get(number, "")


def absolute(path: str) -> str:
    """Return ``path`` as an absolute one; UsageError when it needs a working directory that has been removed."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path!r} cannot be used: {advice(error)}") from error
