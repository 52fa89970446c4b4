"""Opens files that only their owner can read, and that nobody can have written elsewhere.

Where others may write to a directory, they can put something in the place of a file that is about to be made: a
symbolic link, another name of a file of ours, a pipe, or a file of theirs that they read later.

The rule: a file is looked at through its descriptor, after it was opened and before anything is changed.
"""

from __future__ import annotations

import errno
import os
import stat

_ONLY_OWNER = 0o600
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags with which no link is followed, no child inherits the file, and a pipe that nobody reads does not block.

Windows has none of them, and no modes: there the rights of the folder decide who may read.
"""


def open_privately(path: str, flags: int) -> int:
    """A descriptor of the file ``path`` with mode 0600: a new one, or one that is there and was ours alone.

    It fits ``open(path, mode, opener=open_privately)``, for any mode; a file that is there is emptied only after it was
    looked at. Raises OSError, whose ``strerror`` is for people: what is there is a symbolic link, no regular file,
    another user's, or has a second name.
    """
    flags |= _SAFELY
    if flags & os.O_CREAT:
        try:
            return os.open(path, flags | os.O_EXCL, _ONLY_OWNER)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
    fd = _open_existing(path, flags & ~(os.O_CREAT | os.O_TRUNC))
    try:
        _make_private(fd, path)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_existing(path: str, flags: int) -> int:
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            reason = "it is a symbolic link, which is not followed: name the file itself"
            raise _refusal(errno.ELOOP, reason, path) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise _refusal(errno.ENXIO, "it is no regular file", path) from None
        raise


def _make_private(fd: int, path: str) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(errno.EINVAL, "it is no regular file", path)
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise _refusal(errno.EPERM, "it belongs to another user: remove it, or name another", path)
    if found.st_nlink > 1:
        raise _refusal(errno.EMLINK, "the file has a second name (a hard link): remove it, or name another", path)
    if hasattr(os, "fchmod") and stat.S_IMODE(found.st_mode) & ~_ONLY_OWNER:
        os.fchmod(fd, _ONLY_OWNER)


def _refusal(number: int, reason: str, path: str) -> OSError:
    return OSError(number, reason, path)
