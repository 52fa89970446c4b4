"""The output of an engine. It is kept for error messages and searched for script errors.

After a script error, Godot prints the error, and the game continues with null as the result. The error is printed
before the addon answers the request, so an error that is new when an answer arrives is attributed to that request.

The output goes to a file, because a full pipe would block the game. Without a log_dir the file is in memory and is
truncated when it gets long.
"""

from __future__ import annotations

import os
import re

from envmanager.godot.messages import EngineError
from envmanager.hosts import descriptors
from envmanager.processes.output import OutputLog, read_tail

_MOST_BYTES = 16 << 20
_MARK = b"SCRIPT ERROR:"
_GODOT_4 = re.compile(r"SCRIPT ERROR: (?P<text>.*)\n\s*at: (?P<function>.+?) \((?P<script>[^()]*):(?P<line>\d{1,9})\)")
_GODOT_3 = re.compile(
    r"SCRIPT ERROR: (?:(?P<function>[\w.@<>]+): )?(?P<text>.*)\n\s*At: (?P<script>.*?):(?P<line>\d{1,9})"
)


class EngineLog:
    """A log of one engine's output. Call ``started`` after the engine has inherited ``write_fd``."""

    def __init__(self, log_dir: str | None, worker_id: int, generation: int) -> None:
        """Open a log file in ``log_dir`` (None: in memory). Raises UsageError if the file cannot be opened."""
        if log_dir is None:
            self._fd = descriptors.create_memory(f"envmanager-engine-{worker_id}")
            # Opened again in append mode, so that after a truncation the engine writes at the new end, without a hole.
            write_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._read_to = 0
        else:
            log, write_fd = OutputLog.open(log_dir, worker_id, generation)
            self._fd = descriptors.register(os.open(log.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
            self._read_to = log.start
        self.write_fd = descriptors.register(write_fd)
        self._start = self._read_to
        self._may_cut = log_dir is None

    def started(self) -> None:
        """Close ``write_fd`` in this process, after the engine has inherited the descriptor."""
        self.write_fd = descriptors.close(self.write_fd)

    def new_error(self) -> EngineError | None:
        """Return the first script error printed since the last call; None if there is none."""
        if self._fd == descriptors.CLOSED:
            return None
        size = os.fstat(self._fd).st_size
        if size == self._read_to:
            return None
        new = os.pread(self._fd, size - self._read_to, self._read_to) if size > self._read_to else b""
        self._read_to = size
        if size > _MOST_BYTES and self._may_cut:
            os.ftruncate(self._fd, 0)
            self._read_to = self._start = 0
        at = new.find(_MARK)
        return None if at < 0 else _parsed(new[at:].decode(errors="replace"))

    def tail(self) -> str:
        """Return the end of the engine's output; an empty string after ``close``."""
        return "" if self._fd == descriptors.CLOSED else read_tail(self._fd, self._start)

    def close(self) -> None:
        """Close the output file and ``write_fd``. A second call does nothing."""
        self.started()
        self._fd = descriptors.close(self._fd)


def _parsed(text: str) -> EngineError:
    for pattern in (_GODOT_4, _GODOT_3):
        found = pattern.match(text)
        if found is not None:
            return EngineError(
                found["text"].strip(), found["script"].strip(), int(found["line"]), (found["function"] or "").strip()
            )
    return EngineError(text.partition("\n")[0].removeprefix(_MARK.decode()).strip())
