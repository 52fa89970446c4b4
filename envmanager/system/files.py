"""Files that only their owner can read; and advice about what the operating system refuses."""

from __future__ import annotations

import errno
import os
import stat

from envmanager.errors import UsageError

SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags with which no link is followed and no child inherits the file; Windows has neither, and needs neither."""


_ONLY_OWNER = 0o600
"""Mode of private files. Windows has no modes: there the rights of the folder decide who may read."""


def open_privately(path: str, flags: int) -> int:
    """Return a descriptor of the file ``path`` with mode 0600. It fits ``open(path, mode, opener=open_privately)``.

    Raises OSError, whose ``strerror`` is for people, also for a symbolic link.
    """
    try:
        # O_NONBLOCK: opening a pipe without a reader must not block.
        fd = os.open(path, flags | SAFELY | getattr(os, "O_NONBLOCK", 0), _ONLY_OWNER)
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
