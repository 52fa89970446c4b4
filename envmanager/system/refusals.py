"""Advice about errors of the operating system, chosen by the error's number alone."""

from __future__ import annotations

import errno
import os

from envmanager.errors import UsageError

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
    if number == errno.ENOENT and not _has_working_directory():
        return "The working directory of this process has been removed: change to one that exists (os.chdir)."
    return _ADVICE.get(number, "")


def absolute(path: str) -> str:
    """Return ``path`` as an absolute one; UsageError when it needs a working directory that has been removed."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path!r} cannot be used: {advice(error)}") from error


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
