"""Worker output that error messages quote: the end of a log file, and Python's report of a crash in native code.

With ``log_dir`` each generation of a worker has a log file. With the native transport, a manager's workers share one
memfd for crash reports, in which each has a part. A report there outlives the process, and writing it cannot block.

The trainer opens a log, so that a log that cannot be written is reported before the worker starts. Errors do not quote
text that was in the log file before the process started.
"""

from __future__ import annotations

import faulthandler
import os

import attrs

from envmanager.errors import UsageError
from envmanager.system.machine import SAFELY, advice, open_privately

_TAIL_BYTES = 2000
_PART_BYTES = 1 << 20
"""Size of a worker's part in bytes, enough for faulthandler's report of a hundred threads. The file is sparse."""
_READ_BYTES = 1 << 16
_SHOWN_CHARACTERS = 4000
_STDERR = 2


@attrs.frozen
class OutputLog:
    """The log file of one worker process, and the offset in the file at which the process's output begins."""

    path: str
    start: int
    file_id: tuple[int, int]

    @classmethod
    def open(cls, log_dir: str, worker_id: int, generation: int) -> tuple[OutputLog, int]:
        """Open a worker's log (mode 0600). Return an OutputLog and a descriptor for appending, or raise UsageError."""
        path = os.path.join(log_dir, f"worker-{worker_id}-{generation}.log")
        try:
            os.makedirs(log_dir, exist_ok=True)
            fd = open_privately(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise UsageError(
                f"the output of worker {worker_id} cannot be written to {path!r}: {error.strerror}. "
                + (advice(error) or "Choose a log_dir that only you can write to.")
            ) from error
        found = os.fstat(fd)
        return cls(path, found.st_size, (found.st_dev, found.st_ino)), fd

    def tail(self) -> str:
        """Return the end of the worker process's output, or "" if its log was removed or replaced, or is unreadable."""
        try:
            fd = os.open(self.path, os.O_RDONLY | SAFELY | getattr(os, "O_NONBLOCK", 0))
        except OSError:
            return ""
        try:
            found = os.fstat(fd)
            return read_tail(fd, self.start) if (found.st_dev, found.st_ino) == self.file_id else ""
        finally:
            os.close(fd)


def read_tail(fd: int, start: int) -> str:
    """Return the end of the text that follows offset ``start`` in a file, without the module list of a crash report."""
    size = os.fstat(fd).st_size
    start = max(start if size >= start else 0, size - _READ_BYTES)  # below ``start`` if the file was truncated
    os.lseek(fd, start, os.SEEK_SET)  # Windows has no pread
    return _without_list(os.read(fd, _READ_BYTES))[-_TAIL_BYTES:].decode(errors="replace").strip()


def enable_crash_report(fd: int | None, worker_id: int) -> int:
    """Make faulthandler write to this worker's part of the file ``fd``. Return the descriptor that faulthandler uses.

    Without ``fd`` or /proc, crashes are reported on stderr.
    """
    try:
        # Opened again, because each worker needs a file position of its own.
        own_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # no /proc, so crashes are reported on stderr
        own_fd = os.dup(_STDERR)
    else:
        os.lseek(own_fd, worker_id * _PART_BYTES, os.SEEK_SET)
    faulthandler.enable(file=own_fd, all_threads=True)
    return own_fd


def leave_crash_report(own_fd: int) -> None:
    """Redirect crash reports to stderr and close ``own_fd``. Call this in a process forked from a worker."""
    faulthandler.enable(file=_STDERR, all_threads=True)
    os.close(own_fd)


def take_crash_report(fd: int, worker_id: int) -> str:
    """Return the crash report of a worker that has ended, and erase it from ``fd``. Return "" if there is none."""
    start = worker_id * _PART_BYTES
    data = os.pread(fd, _READ_BYTES, start)
    written = data[: data.find(b"\0")] if b"\0" in data else data
    if not written:
        return ""
    os.pwrite(fd, bytes(len(data)), start)
    return _without_list(written).decode(errors="replace")[:_SHOWN_CHARACTERS].strip()


def _without_list(text: bytes) -> bytes:
    """Return ``text`` without the long last line of a crash report, which lists extension modules."""
    report, found, names = text.rpartition(b"\nExtension modules:")
    return report if found and b"\n" not in names.strip() else text
