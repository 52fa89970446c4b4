"""Shared memory without a name.

The rule: the memory has no name (memfd), so nobody else can open it and nothing is left behind; and it is allocated in
full before it is used, so that a full machine is an error here and not a SIGBUS in an environment.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

from envmanager.errors import UsageError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10


def map_memory(fd: int, size_bytes: int) -> Any:
    """A buffer over the memory behind ``fd``, unmapped when the last array over it is gone.

    Python's own mmap keeps a copy of the descriptor (up to 3.12), so that a trainer that holds on to one zero-copy
    array, or to the traceback of an error, would hold on to a descriptor too.
    """
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise UsageError(
            f"{size_bytes / 2**20:.0f} MiB of shared memory cannot be mapped into this process: "
            f"{os.strerror(ctypes.get_errno())}. Is its address space limited (`ulimit -v`)?"
        )
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size_bytes).atexit = False
    return memory


def make_private(memory: Any, fd: int) -> None:
    """In a forked process: keep a copy of what is in ``memory``, in its place, and share no more of it."""
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    address = ctypes.addressof(memory)
    if _libc.mmap(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "the shared memory cannot be replaced by a copy")


def allocate(fd: int, size_bytes: int) -> None:
    """Give the memory its size; UsageError when the machine or its cgroup has less."""
    available = available_bytes()
    if size_bytes > available:
        raise UsageError(_does_not_fit(size_bytes, available))
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        raise UsageError(_does_not_fit(size_bytes, available)) from error


def _does_not_fit(size_bytes: int, available: int) -> str:
    return (
        f"the environments' observations and actions need {size_bytes / 2**20:.0f} MiB of shared memory, but only "
        f"{available / 2**20:.0f} MiB are free. Run fewer environments, make observations smaller, or leave out "
        "zero_copy (which needs three times as much)."
    )


def available_bytes() -> int:
    """How much memory may still be taken: the least of the machine's and the cgroup's."""
    limits = [_mem_available()]
    for root in ("/sys/fs/cgroup", f"/sys/fs/cgroup{_cgroup_path()}"):
        limit, used = _read_number(f"{root}/memory.max"), _read_number(f"{root}/memory.current")
        if limit is not None and used is not None:
            limits.append(max(0, limit - used))
    return min(limits)


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _cgroup_path() -> str:
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()[0].rpartition(":")[2].rstrip("/")
    except (OSError, IndexError):
        return ""


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # "max" means no limit
        return None
