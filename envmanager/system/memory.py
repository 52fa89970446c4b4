"""Limits on the memory of worker processes, and what the kernel says of processes that it has killed for lack of it.

::

    limit ── a cgroup of its own, where one may be made ──▶ the kernel kills what exceeds it
         └── else a thread that looks at all of them ─────▶ kills what exceeds it, or has lost a child to the kernel

A cgroup counts what the kernel charges to its processes: resident memory, files in memory, parts of shared memory. The
thread counts resident memory, with what processes share, and may come late for one that takes memory very quickly.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from envmanager.errors import UsageError
from envmanager.system import machine
from envmanager.system.machine import memory_bytes, words_of

MIB = 2**20
_LOOK_EVERY_S = 0.1
_MOST_BYTES = 1 << 60
_NAME = "envmanager"
_numbers = itertools.count()


class Group:
    """A cgroup with one process and its descendants, in version 1 or 2 of cgroups."""

    def __init__(self, parent: Path, pid: int, limit_bytes: int) -> None:
        """Make the group below ``parent`` and move the process into it. Raises OSError where that is not allowed."""
        self._folder = parent / f"{_NAME}-{os.getpid()}-{next(_numbers)}"
        self.is_old = not (parent / "cgroup.controllers").exists()
        """Whether the kernel kills one process of the group, which need not be the worker, instead of all."""
        os.mkdir(self._folder)
        try:
            self._write("memory.limit_in_bytes" if self.is_old else "memory.max", min(limit_bytes, _MOST_BYTES))
            for name, value in () if self.is_old else (("memory.oom.group", 1), ("memory.swap.max", 0)):
                with contextlib.suppress(OSError):  # a kernel without it
                    self._write(name, value)
            self._write("cgroup.procs", pid)
        except OSError:
            self.remove()
            raise

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(f"{value}\n", encoding="utf-8")

    @property
    def n_killed(self) -> int:
        """Number of processes of the group that the kernel has killed for lack of memory."""
        return _oom_kills(self._folder) or 0

    @property
    def most_bytes(self) -> int:
        """The most memory that the group has had; 0 if the kernel does not say."""
        words = words_of(self._folder / ("memory.max_usage_in_bytes" if self.is_old else "memory.peak"))
        return int(words[0]) if words else 0

    def remove(self) -> bool:
        """Remove the group, and return whether that was possible: none of its processes is left."""
        with contextlib.suppress(FileNotFoundError):
            try:
                os.rmdir(self._folder)
            except OSError:
                return False
        return True


def _parents() -> Iterator[Path]:
    """Yield the folders in which a group with a limit of memory may be made, if this user may."""
    for version, folder in machine.own_cgroups("memory"):
        if version == 1:
            yield folder
        else:  # a group with processes can have no groups with limits in it, but the group in which it is may
            for parent in (folder, folder.parent):
                if "memory" in words_of(parent / "cgroup.subtree_control"):
                    yield parent


def _remove_left(parent: Path) -> None:
    """Remove the groups of trainers that were killed and could not."""
    for folder in parent.glob(f"{_NAME}-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):  # one of its processes is still there
                os.rmdir(folder)


def _oom_kills(folder: Path, files: Sequence[str] = ("memory.events", "memory.oom_control")) -> int | None:
    """Return the count in the first of ``files`` that has one (by default, of a cgroup of version 2 and 1), or None."""
    for words in (words_of(folder / file) for file in files):
        if "oom_kill" in words[:-1]:
            return int(words[words.index("oom_kill") + 1])
    return None


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory: of this cgroup, or else of the machine."""
    counts = [_oom_kills(folder) for _, folder in machine.own_cgroups("memory")]
    return max((n for n in counts if n is not None), default=_oom_kills(Path("/proc"), ["vmstat"]) or 0)


class MemoryLimits:
    """The limits on the memory of the processes of one manager. Its methods may be called from any thread."""

    def __init__(self, limit_mb: float | None) -> None:
        """``limit_mb``: MiB for each; None for no limit. Raises UsageError if memory cannot be read here."""
        if limit_mb is not None and not memory_bytes(os.getpid()):
            raise UsageError("memory_limit_mb needs Linux, where the memory of processes can be read: leave it out.")
        self.limit_mb = limit_mb
        self.n_kills = oom_kills()
        """Number of kills by the kernel that are older than this object, or that explain an end already."""
        self._groups: dict[int, Group] = {}
        self._left: list[Group] = []
        """Groups of processes that have ended, whose descendants have not."""
        self._watched: dict[int, Callable[[], object]] = {}
        self._found_bytes: dict[int, int] = {}
        """Memory at which the thread has killed a process, by pid."""
        for parent in _parents() if limit_mb is not None else ():
            _remove_left(parent)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pid: int | None, kill: Callable[[], object]) -> None:
        """Limit a process that has just been started, and its descendants to come."""
        if self.limit_mb is None or pid is None:
            return
        for parent in _parents():
            with contextlib.suppress(OSError):
                group = self._groups[pid] = Group(parent, pid, int(self.limit_mb * MIB))
                if not group.is_old:
                    return
                break
        with self._lock:
            self._watched[pid] = kill
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="envmanager-memory", daemon=True)
                self._thread.start()

    def remove(self, pid: int | None) -> None:
        """Forget a process that has ended, or is about to."""
        with self._lock:
            self._watched.pop(pid or 0, None)
            self._found_bytes.pop(pid or 0, None)
        group = self._groups.pop(pid or 0, None)
        self._left = [each for each in (*self._left, *([group] if group else [])) if not each.remove()]

    def why_killed(self, pid: int | None) -> tuple[float, str] | None:
        """Return the memory (MiB, 0 if unknown) for which a process was killed by SIGKILL, and by what; None if not."""
        group, found = self._groups.get(pid or 0), self._found_bytes.get(pid or 0)
        if group is not None and group.n_killed:
            return group.most_bytes / MIB, f"the kernel, by the limit of its cgroup, {self.limit_mb:,.0f} MiB"
        if found is not None:
            return found / MIB, f"its manager, above {self.limit_mb:,.0f} MiB"
        if group is None and oom_kills() > self.n_kills:
            self.n_kills += 1
            return 0.0, "the kernel, as the machine or its cgroup was out of memory"
        return None

    def close(self) -> None:
        """Remove the groups, and end the thread."""
        self._over.set()
        for pid in list(self._groups):
            self.remove(pid)
        self.remove(None)

    def _watch(self) -> None:
        assert self.limit_mb is not None
        while not self._over.wait(_LOOK_EVERY_S):
            for pid, kill in list(self._watched.items()):
                group = self._groups.get(pid)
                in_use = memory_bytes(pid) if group is None else 0
                has_exceeded = in_use > self.limit_mb * MIB or (group is not None and group.n_killed > 0)
                with self._lock:
                    if has_exceeded and self._watched.pop(pid, None) is not None:
                        self._found_bytes[pid] = in_use
                        kill()
