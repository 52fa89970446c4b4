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

_HINTS = {
    re.compile(b"X11 Display is not available|Unable to create DisplayServer"): (
        "A window (engine.window: true) needs a display, and the engine could open none. On a machine without\n"
        "one run this program with xvfb-run (apt-get install xvfb libgl1-mesa-dri), or leave out engine.window."
    ),
    re.compile(rb"No loader found for resource: res://.*\.cs\b"): (
        "The game has scripts in C#, and this engine is one without .NET, which cannot load them: name one with .NET\n"
        '(Godot 4: the download ".NET"; Godot 3: "Mono") as engine.binary or $ENVMANAGER_GODOT.'
    ),
}


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

    def has_error(self) -> bool:
        """Return whether a script error and its place have been printed since the last call of ``new_errors``."""
        new = b"" if self._fd == descriptors.CLOSED else os.pread(self._fd, 1 << 20, self._read_to)
        return new.partition(_MARK)[2].count(b"\n") > 1

    def new_errors(self) -> list[EngineError]:
        """Return the script errors printed since the last call, at most the first 16."""
        if self._fd == descriptors.CLOSED:
            return []
        size = os.fstat(self._fd).st_size
        if size == self._read_to:
            return []
        new = os.pread(self._fd, size - self._read_to, self._read_to) if size > self._read_to else b""
        self._read_to = size
        if size > _MOST_BYTES and self._may_cut:
            os.ftruncate(self._fd, 0)
            self._read_to = self._start = 0
        return [_parsed((_MARK + each).decode(errors="replace")) for each in new.split(_MARK)[1:17]]

    def hint(self) -> str:
        """Return advice about what the engine printed first; an empty string if there is none, and after ``close``."""
        head = b"" if self._fd == descriptors.CLOSED else os.pread(self._fd, 1 << 16, self._start)
        return "\n".join(hint for pattern, hint in _HINTS.items() if pattern.search(head))

    def tail(self) -> str:
        """Return the end of the engine's output; an empty string after ``close``."""
        return "" if self._fd == descriptors.CLOSED else read_tail(self._fd, self._start)

    def close(self) -> None:
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
