"""Finds what a test left behind: processes (orphans too), descriptors, threads, shared memory.

The rule: what is compared is what the kernel says under /proc, not what this library remembers. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs

from envmanager.system import process_tree

_PR_SET_CHILD_SUBREAPER = 36
_SETTLE_S = 5.0
_LASTING = ("envmanager._workers.server", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Servers that stay until the program ends: ours, and multiprocessing's."""


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose parent ends, so that they show. Lasts as long as this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int | None = None) -> dict[int, str]:
    """All processes below ``pid`` (this process), by pid, with their command lines; zombies too."""
    found: dict[int, str] = {}
    for child in process_tree.descendants(os.getpid() if pid is None else pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found[child] = command or Path(f"/proc/{child}/comm").read_text().strip()
    return found


def _is_lasting(command: str) -> bool:
    return any(name in command for name in _LASTING)


def _workers_and_orphans() -> dict[int, str]:
    everything = descendants()
    lasting = {pid for pid, command in everything.items() if _is_lasting(command)}
    forked = {
        child for pid in lasting for child in process_tree.children_of(pid)
    }  # they have the server's command line
    return {pid: command for pid, command in everything.items() if pid not in lasting or pid in forked}


def _open_descriptors() -> Counter[str]:
    targets: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if not target.startswith("/proc/"):
                targets[target] += 1
    return targets


@attrs.frozen
class Traces:
    """What this process has at one moment."""

    processes: dict[int, str]
    descriptors: Counter[str]
    threads: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Traces:
        """Look."""
        return cls(
            _workers_and_orphans(),
            _open_descriptors(),
            frozenset(thread.name for thread in threading.enumerate()),
            frozenset(os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ()),
        )

    def left_since(self, before: Traces) -> dict[str, list[str]]:
        """What is here now and was not before, by kind; empty when nothing is."""
        left = {
            "processes": [f"{pid}: {cmd}" for pid, cmd in self.processes.items() if pid not in before.processes],
            "descriptors": sorted((self.descriptors - before.descriptors).elements()),
            "threads": sorted(self.threads - before.threads),
            "shared memory": sorted(self.shared_memory - before.shared_memory),
        }
        return {kind: names for kind, names in left.items() if names}


def _reap() -> None:
    """Bury adopted orphans; children that somebody still waits for are left alone as long as they live."""
    for pid in process_tree.children_of(os.getpid()):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "Z":
                os.waitpid(pid, os.WNOHANG)


def settle(before: Traces, *, within_s: float = _SETTLE_S) -> dict[str, list[str]]:
    """What is left behind once everything that is ending has had time to end."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        _reap()
        left = Traces.now().left_since(before)
        if not left or time.monotonic() > deadline:
            return _but_for_strangers_memory(left)
        pause.wait(0.02)


def _but_for_strangers_memory(left: dict[str, list[str]]) -> dict[str, list[str]]:
    """``left`` without the shared memory that programs beside this one have in use."""
    names = set(left.get("shared memory", []))
    if names:
        own = {os.getpid(), *descendants()}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            if int(maps.parent.name) not in own:
                with contextlib.suppress(OSError):
                    names -= {
                        Path(line.split()[-1]).name for line in maps.read_text().splitlines() if "/dev/shm/" in line
                    }
    others = {kind: texts for kind, texts in left.items() if kind != "shared memory"}
    return {**others, "shared memory": sorted(names)} if names else others


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fail with AssertionError when the block leaves a process, descriptor, thread or shared memory behind."""
    adopt_orphans()
    before = Traces.now()
    yield
    left = settle(before)
    assert not left, f"left behind: {left}"
