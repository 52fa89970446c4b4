"""Functions for processes, CPU cores and private files, and advice for the user on operating system errors.

This module needs no third-party library, so that benchmarks can import it in other virtual environments.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from envmanager.errors import UsageError


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children, including zombies. Return [] if the process or /proc is missing."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, words_of(f"/proc/{pid}/task/{task}/children"))
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of ``pid``, each after its parent."""
    found = children_of(pid)
    for child in found:  # the loop itself extends the list
        found += children_of(child)
    return found


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as R, S or Z, or "" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def core_wait_ns(pid: int) -> int:
    """Return the total time (ns) that a process's main thread has waited for a free core, or 0 if it is unknown."""
    words = words_of(f"/proc/{pid}/schedstat")  # time on a core, time waiting for one, number of time slices
    return int(words[1]) if len(words) == 3 else 0


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants, or 0 if it is unknown."""
    n_pages = sum([int(n) for each in (pid, *descendants(pid)) for n in words_of(f"/proc/{each}/statm")[1:2]])
    return n_pages * os.sysconf("SC_PAGE_SIZE") if n_pages else 0


_NAMES_ON_WINDOWS = {
    0xC0000005: "ACCESS_VIOLATION", 0xC000001D: "ILLEGAL_INSTRUCTION", 0xC00000FD: "STACK_OVERFLOW",
    0xC000013A: "CONTROL_C_EXIT", 0xC0000409: "STACK_BUFFER_OVERRUN",
}  # fmt: skip


def exit_name(code: int | None) -> str:
    """Return a name for how a process ended, such as ``SIGSEGV`` (code -11) or ``EXIT(3)``; ``EXIT(?)`` for None."""
    if code is None:
        return "EXIT(?)"
    if code >= 0:
        return _NAMES_ON_WINDOWS.get(code, f"EXIT({code})")
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"SIGNAL({-code})"


def after_fork_in_child(function: Callable[[], object]) -> Callable[[], object]:
    """Register ``function`` to be called in each child forked from this process, and return ``function``."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def count_cores() -> int:
    """Return the number of cores (at least 1) that this process and its children may use together.

    On Linux, the limits are the process's CPU affinity and the CPU quotas (rounded up) of its cgroup and the ancestors
    of the cgroup, in version 1 or 2 of cgroups. On other systems, all cores of the machine are counted.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    quotas = []
    groups = [each for _, own in own_cgroups("cpu") for each in (own, *own.parents)]  # those above limit its time too
    for folder in (each for each in groups if each.is_relative_to(CGROUPS)):
        of_version_1 = [*words_of(folder / "cpu.cfs_quota_us"), *words_of(folder / "cpu.cfs_period_us")]
        for words in (words_of(folder / "cpu.max"), of_version_1):
            # No limit is ``max`` in version 2 and -1 in version 1.
            if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
                quotas.append(int(words[0]) / int(words[1]))
    return max(1, min(allowed, *(math.ceil(quota) for quota in quotas))) if quotas else allowed


def own_cgroups(controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the version (1, 2) and the folder of each cgroup of this process that may have a ``controller``.

    Some of these folders may not exist. For example, a container may mount only its own cgroup, under another path.
    """
    try:
        lines = OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::/", f"1:{controller}:/"]  # without /proc, try the usual mounts
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mounted = [CGROUPS, CGROUPS / "unified"]
        elif controller in controllers.split(","):
            mounted = [CGROUPS / controllers, CGROUPS / controller]
        else:
            continue
        is_outside = not path.startswith("/") or ".." in path.split("/")  # of the part that this process can see
        own = PurePosixPath("/" if is_outside else path).relative_to("/")
        for root in dict.fromkeys(mounted):
            yield (1 if controllers else 2), root / own


def words_of(path: Path | str) -> list[str]:
    """Return the words of a file, or an empty list if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return []


SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags for ``os.open``: follow no symbolic link, and let no child inherit the file. Windows has neither flag."""


_ONLY_OWNER = 0o600
"""Mode of private files. Windows has no modes and applies the permissions of the folder."""


def open_privately(path: str, flags: int) -> int:
    """Open a file, set its mode to 0600, and return the descriptor. This function can be the ``opener`` of ``open``.

    Raises OSError (its ``strerror`` suits users) if this fails or, except on Windows, ``path`` is a symbolic link.
    """
    try:
        # O_NONBLOCK, because to open a pipe without a reader must not block.
        fd = os.open(path, flags | SAFELY | getattr(os, "O_NONBLOCK", 0), _ONLY_OWNER)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            reason = "it is a symbolic link, which is not followed: name the file itself"
            raise OSError(errno.ELOOP, reason, path) from None
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) and mode & 0o777 & ~_ONLY_OWNER and hasattr(os, "fchmod"):  # leave devices unchanged
        try:
            os.fchmod(fd, _ONLY_OWNER)
        except OSError:  # the file belongs to another user
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
    """Return a sentence that advises the user how to resolve an OSError, or "" if there is no advice."""
    number = getattr(error, "errno", None) or 0
    if number == errno.ENOENT:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "The working directory of this process has been removed: change to one that exists (os.chdir)."
    return _ADVICE.get(number, "")


def absolute(path: str) -> str:
    """Return ``path`` as an absolute path. Raises UsageError if it is relative to a removed working directory."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path!r} cannot be used: {advice(error)}") from error
