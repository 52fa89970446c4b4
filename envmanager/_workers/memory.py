"""Shared memory without a name.

The rule: the memory has no name (memfd), so no other program can open it and nothing is left behind; and all of
it is allocated before it is used, so that a full machine is an error here and not a SIGBUS in an environment.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

from envmanager.errors import UsageError
from envmanager.system.refusals import advice

_MAP_FIXED = 0x10


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library; Windows has none by this name, so it is loaded when it is needed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def map_memory(fd: int, size_bytes: int) -> Any:
    """Return a buffer over the memory behind ``fd``, unmapped when the last array over it is gone.

    It is the C library's, because ``make_private`` needs that, and because Python's own mmap keeps a descriptor (up to
    3.12) as long as a trainer keeps one zero-copy array, or the traceback of an error.
    """
    address = _libc().mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        limit = " The limit of its address space (`ulimit -v`) may be too low." if number == errno.ENOMEM else ""
        raise UsageError(
            f"{_readable(size_bytes)} of shared memory cannot be mapped into this process: {os.strerror(number)}."
            f"{limit}"
        )
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, size_bytes).atexit = False
    return memory


def make_private(memory: Any, fd: int) -> None:
    """Replace ``memory`` by a private copy at the same address, in a forked process; the rest is no longer shared."""
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    address = ctypes.addressof(memory)
    if _libc().mmap(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "the shared memory cannot be replaced by a copy")


def allocate(fd: int, size_bytes: int) -> None:
    """Allocate the memory; UsageError when the machine has less, or the kernel refuses."""
    needed = f"the environments' observations and actions need {_readable(size_bytes)} of shared memory"
    available = available_bytes()
    if size_bytes > available:
        raise UsageError(
            f"{needed}, but only {_readable(available)} are free on this machine. Run fewer environments, make "
            "observations smaller, or leave out zero_copy (which needs three times as much)."
        )
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        raise UsageError(f"{needed}, which the kernel refuses: {error.strerror}. {advice(error)}".rstrip()) from error


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes:,} bytes"


def available_bytes() -> int:
    """Return how much memory the machine has left."""
    try:
        words = Path("/proc/meminfo").read_text().split()
    except OSError:
        words = []
    if "MemAvailable:" in words:
        return int(words[words.index("MemAvailable:") + 1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # the used part is not reported here
