"""Keeps what Python's faulthandler writes when a worker crashes in native code, where the trainer can read it.

All workers share one nameless file, in which each has a part of its own. So a crash costs no descriptor, blocks on no
pipe, and its text is there after the process has gone.
"""

from __future__ import annotations

import faulthandler
import os

_PART_BYTES = 1 << 20
"""More than faulthandler writes for a hundred threads. The file has holes: only what is written takes memory."""
_READ_BYTES = 1 << 16
_SHOWN_CHARACTERS = 4000
_STDERR = 2


def enable(fd: int, worker_id: int) -> int:
    """Let a worker write its stacks into its part of the file when it crashes; return the descriptor for that."""
    try:
        # Opened anew, for a position of its own.
        own_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # no /proc: reported on stderr
        own_fd = os.dup(_STDERR)
    else:
        os.lseek(own_fd, worker_id * _PART_BYTES, os.SEEK_SET)
    faulthandler.enable(file=own_fd, all_threads=True)
    return own_fd


def leave(own_fd: int) -> None:
    """Let a process that was forked from a worker report its own crash on stderr."""
    faulthandler.enable(file=_STDERR, all_threads=True)
    os.close(own_fd)


def take(fd: int, worker_id: int) -> str:
    """Return and erase the report of a worker that has ended; empty when it did not crash. For the trainer."""
    start = worker_id * _PART_BYTES
    data = os.pread(fd, _READ_BYTES, start)
    written = data[: data.find(b"\0")] if b"\0" in data else data
    if not written:
        return ""
    os.pwrite(fd, bytes(len(data)), start)
    stacks, _, _ = written.decode(errors="replace").partition("\nExtension modules:")  # a list of all that is loaded
    return stacks[:_SHOWN_CHARACTERS].strip()
