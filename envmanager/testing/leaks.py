"""Leak detection for tests: processes (including orphans), file descriptors, threads and shared memory.

The checks ask the operating system and Python. They do not rely on this library's own records. On macOS orphans,
descriptors and shared memory are not checked. On Windows only threads are checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from envmanager.system import machine

SLACK_S = float(os.environ.get("ENVMANAGER_SLACK_S", "20"))
"""Seconds by which a call may miss its deadline. The documentation promises 2 s on an idle machine.

The default is ten times as long, because tests often run on a busy machine. ``ENVMANAGER_SLACK_S`` overrides it.
"""
SOON_S = 60.0
"""Timeout in seconds for events that have no deadline of their own, long enough for a busy machine."""

_PR_SET_CHILD_SUBREAPER = 36
_SETTLE_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")
_LASTING = ("envmanager.processes.helper", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Modules whose processes run until the program ends: this library's helper, and the servers of multiprocessing."""


def adopt_orphans() -> None:
    """Make this process a subreaper, which adopts its orphaned descendants as children. Outside Linux, do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int | None = None) -> dict[int, str]:
    """Return ``{pid: command line}`` of all descendants of ``pid`` (default: this process). On Windows return {}."""
    pid = os.getpid() if pid is None else pid
    if sys.platform != "linux":
        table, pids = _process_table(), [pid]
        for each in pids:  # the loop itself extends the list
            pids += [child for child, (parent, _, _) in table.items() if parent == each]
        return {child: table[child][2] for child in pids[1:]}
    found: dict[int, str] = {}
    for child in machine.descendants(pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found[child] = command or Path(f"/proc/{child}/comm").read_text(encoding="utf-8").strip()
    return found


def state_of(pid: int) -> str:
    """Return a process's state letter, such as "Z" for a zombie, or "" if it is gone. On Windows the letter is "?"."""
    if sys.platform == "linux":
        return machine.state_of(pid)
    if sys.platform != "win32":
        _, state, _ = _process_table().get(pid, (0, "", ""))
        return state[:1]
    kernel32, synchronize, timed_out = ctypes.WinDLL("kernel32"), 0x100000, 0x102
    handle = kernel32.OpenProcess(synchronize, False, pid)
    runs = handle and kernel32.WaitForSingleObject(handle, 0) == timed_out
    kernel32.CloseHandle(handle)
    return "?" if runs else ""


def _process_table() -> dict[int, tuple[int, str, str]]:
    """Return ``{pid: (parent's pid, state, command line)}`` of all processes. On Windows, return ``{}``."""
    if sys.platform == "win32":
        return {}
    command = ["ps", "-axo", "pid=,ppid=,stat=,command="]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace") as ps:
        lines, _ = ps.communicate()
    rows = ([*line.split(None, 3), ""] for line in lines.splitlines())
    return {int(row[0]): (int(row[1]), row[2], row[3]) for row in rows if int(row[0]) != ps.pid}


def _workers_and_orphans() -> dict[int, str]:
    everything = descendants()
    lasting = {pid for pid, command in everything.items() if any(name in command for name in _LASTING)}
    forked = {child for pid in lasting for child in machine.children_of(pid)}  # these show the server's command line
    return {pid: command for pid, command in everything.items() if pid not in lasting or pid in forked}


def _open_descriptors() -> Counter[str]:
    targets: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if not target.startswith("/proc/"):
                targets[target] += 1
    return targets


def _shared_memory() -> frozenset[str]:
    return frozenset(os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else ())


@attrs.frozen
class Traces:
    """A snapshot of this process's descendants, file descriptors and threads, and the names of shared-memory blocks.

    Helper processes that run until the program ends are left out.
    """

    processes: dict[int, str]
    descriptors: Counter[str]
    threads: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Traces:
        """Return a snapshot of the current state."""
        threads = frozenset(thread.name for thread in threading.enumerate())
        return cls(_workers_and_orphans(), _open_descriptors(), threads, _shared_memory())

    def left_since(self, before: Traces) -> dict[str, list[str]]:
        """Return resources in this snapshot that are not in ``before``, as ``{kind: names}`` without empty kinds."""
        left = {
            "processes": [f"{pid}: {cmd}" for pid, cmd in self.processes.items() if pid not in before.processes],
            "descriptors": sorted((self.descriptors - before.descriptors).elements()),
            "threads": sorted(self.threads - before.threads),
            "shared memory": sorted(self.shared_memory - before.shared_memory),
        }
        return {kind: names for kind, names in left.items() if names}


def settle(before: Traces, *, within_s: float = _SETTLE_S) -> dict[str, list[str]]:
    """Reap ended children, and wait up to ``within_s`` seconds until all resources newer than ``before`` are released.

    Return the resources that remain, as ``{kind: names}``. The kernel does not record which process created a
    shared-memory block. So a block is reported only if this user owns it, no unrelated process has it mapped, and it is
    in every snapshot taken. The last condition excludes other programs' semaphores, which exist only for microseconds.
    """
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    lasting = _shared_memory() - before.shared_memory
    while True:
        _reap()
        now = Traces.now()
        lasting &= now.shared_memory
        left = attrs.evolve(now, shared_memory=frozenset(_not_of_strangers(lasting))).left_since(before)
        if not left or time.monotonic() > deadline:
            return left
        pause.wait(0.02)


def _reap() -> None:
    """Reap all children that have ended, including adopted orphans."""
    for pid in machine.children_of(os.getpid()):
        if machine.state_of(pid) == "Z":
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def _not_of_strangers(names: Iterable[str]) -> set[str]:
    """Return the shared-memory blocks in ``names`` that this user owns and that no unrelated process has mapped."""
    found = set()
    for name in names:
        with contextlib.suppress(OSError):  # it has just been removed
            if (_SHARED_MEMORY / name).stat().st_uid == os.geteuid():
                found.add(name)
    if found:
        own = {os.getpid(), *descendants()}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            if int(maps.parent.name) not in own:
                with contextlib.suppress(OSError):
                    mapped = (
                        line
                        for line in maps.read_text(encoding="utf-8", errors="replace").splitlines()
                        if str(_SHARED_MEMORY) in line
                    )
                    found -= {Path(line.split()[-1]).name for line in mapped}
    return found


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Raise AssertionError if processes, descriptors, threads or shared memory of a ``with`` block remain after 5 s."""
    adopt_orphans()
    before = Traces.now()
    yield
    left = settle(before)
    assert not left, f"left behind: {left}"
