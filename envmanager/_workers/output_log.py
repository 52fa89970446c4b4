"""Opens the files that workers' output goes to with ``log_dir``, one per generation; their ends go into errors.

The rule: the trainer opens the file, so that one which cannot be used is refused before a process starts; and what was
in it before is nobody's last words.
"""

from __future__ import annotations

import os

import attrs

from envmanager.errors import UsageError
from envmanager.system.files import advice, open_privately

_TAIL_BYTES = 2000


@attrs.frozen
class OutputLog:
    """The log of one worker process: where it is, and where this process's output begins."""

    path: str
    start: int
    file_id: tuple[int, int]

    @classmethod
    def open(cls, log_dir: str, worker_id: int, generation: int) -> tuple[OutputLog, int]:
        """The log, and a descriptor to append to it; UsageError when it cannot be written, or not by us alone."""
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
        """The end of what this process wrote; empty when the file is gone or another is in its place."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return ""
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != self.file_id:
                return ""
            start = self.start if found.st_size >= self.start else 0  # else somebody has cut it short
            start = max(start, found.st_size - _TAIL_BYTES)
            return os.pread(fd, _TAIL_BYTES, start).decode(errors="replace").strip()
        finally:
            os.close(fd)
