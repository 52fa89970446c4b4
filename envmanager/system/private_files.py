"""Opens files that only their owner can read, in the place of which no symbolic link is followed."""

from __future__ import annotations

import errno
import os
import stat

_ONLY_OWNER = 0o600
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags with which no link is followed, no child inherits the file, and a pipe without a reader does not block.

Windows has none of them, and no modes: there the rights of the folder decide who may read.
"""


def open_privately(path: str, flags: int) -> int:
    """Return a descriptor of the file ``path`` with mode 0600. It fits ``open(path, mode, opener=open_privately)``.

    Raises OSError, whose ``strerror`` is for people, also for a symbolic link.
    """
    try:
        fd = os.open(path, flags | _SAFELY, _ONLY_OWNER)
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
