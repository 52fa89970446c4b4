"""The command's side of the zygotes. Each runs the turns of one family in sequence, and is started when first needed.

The rule: no turn outlives the launcher or runs longer than its limit. Each turn is a process group, which is killed as
a whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import attrs

import envmanager
from benchmarks.protocol import (
    ENDED,
    MEASURED,
    MISSING,
    STARTED,
    UNABLE,
    Job,
    Measured,
    job_line,
    measured_of,
)
from benchmarks.roster import FAMILIES, family_of

CLOSE_S = 5.0
OUTPUT_BYTES = 4096
START_S = 120.0
"""Timeout in seconds for the import of a library."""
MORE_S = 10.0
"""Seconds added to the limit of a turn, at which the turn itself prints a traceback and exits."""


class NotMeasured(Exception):
    """Raised if a contender has no result. ``kind`` is ``"missing"``, ``"unable"`` or ``"failed"``."""

    def __init__(self, kind: str, text: str, details: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.details = details


class Launcher:
    """A launcher of jobs, each in a new process of its contender's interpreter. A context manager.

    ``pythons``: interpreters by family; other families use the current interpreter.
    """

    def __init__(self, pythons: Mapping[str, str]) -> None:
        self._pythons = pythons
        self._zygotes: dict[str, Zygote] = {}
        self._missing: dict[str, NotMeasured] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="envmanager-bench-")
        # A folder with these packages alone, so that no library beside them shadows one of another interpreter.
        for package in (Path(__file__).parent, Path(envmanager.__file__).parent):
            os.symlink(package, Path(self._folder.name, package.name))
        self.versions: dict[str, dict[str, str]] = {}

    def run(self, job: Job) -> Measured:
        """Run a job and return its result; raise NotMeasured if it has none."""
        family = family_of(job.contender)
        zygote = self._zygote(family)
        try:
            return zygote.run(job)
        finally:
            if not zygote.usable:
                zygote.close()
                del self._zygotes[family]

    def _zygote(self, family: str) -> Zygote:
        if family in self._missing:
            raise self._missing[family].with_traceback(None)
        if family not in self._zygotes:
            try:
                zygote = Zygote(self._pythons.get(family, sys.executable), family, self._folder.name)
                self._zygotes[family] = zygote
                self.versions[family] = zygote.wait_until_ready()
            except NotMeasured as reason:
                self._missing[family] = reason
                raise
        return self._zygotes[family]

    def close(self) -> None:
        """Kill all zygotes and the running turn."""
        for zygote in self._zygotes.values():
            zygote.close()
        self._folder.cleanup()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@attrs.define
class Zygote:
    """A zygote's process, and a thread that reads its lines, so that each wait for a line has a deadline."""

    python: str
    family: str
    folder: str
    _output: IO[bytes] = attrs.field(factory=tempfile.TemporaryFile, init=False)
    _process: subprocess.Popen[str] = attrs.field(init=False)
    _reader: threading.Thread = attrs.field(init=False)
    _lines: queue.SimpleQueue[dict[str, Any] | None] = attrs.field(factory=queue.SimpleQueue, init=False)
    _turn_pid: int | None = attrs.field(default=None, init=False)
    usable: bool = attrs.field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        command = [self.python, "-m", "benchmarks.zygote", self.family]
        own_path = os.environ.get("PYTHONPATH")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (self.folder, own_path)))},
                start_new_session=True,  # Ctrl-C must reach only the command, which kills the turns itself
            )
        except OSError as error:
            self._output.close()
            raise NotMeasured("missing", f"{self.python} cannot be started: {error}") from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> dict[str, str]:
        """Wait for the import, and return the versions of the packages; raise NotMeasured if the library is missing."""
        message = self._next(START_S)
        if message["event"] == MISSING:
            package = FAMILIES[self.family].package
            raise NotMeasured("missing", f"{message['text']}: pip install {shlex.quote(package)}")
        versions: dict[str, str] = message["versions"]
        return versions

    def run(self, job: Job) -> Measured:
        """Run a job and return its result; raise NotMeasured if it has none."""
        with contextlib.suppress(BrokenPipeError):  # the zygote has ended, which is noticed below
            self._process.stdin.write(job_line(job))  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        self.usable = False  # until the zygote reports the end of the turn
        result: Measured | NotMeasured | None = None
        try:
            while (message := self._next(job.limit_s + MORE_S))["event"] != ENDED:
                if message["event"] != STARTED:
                    result = _result_of(message)
            self.usable = True
        finally:
            self._kill_turn()
        if result is None:
            reason = f"its process ended (exit code {message['exit_code']}) without a result"
            raise NotMeasured("failed", reason, self._last_output())
        if isinstance(result, NotMeasured):
            raise result
        return result

    def close(self) -> None:
        """Kill the zygote and the running turn."""
        _kill_group(self._process.pid)
        self._process.wait()
        self._kill_turn()
        # A turn that was just forked may not have sent its pid yet. Read until no process can write any more.
        with contextlib.suppress(queue.Empty):
            while self._lines.get(timeout=CLOSE_S):
                self._kill_turn()
            self._reader.join()
            self._process.stdout.close()  # type: ignore[union-attr]
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._output.close()

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            message = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise NotMeasured("failed", f"it did not respond for {timeout_s:g} s and was killed") from None
        if message is None:
            self._lines.put(message)  # for the next call
            raise NotMeasured("failed", f"the process that forks its turns ended (exit code {self._process.wait()})")
        return message

    def _read(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            if not line.endswith("\n"):  # the process that wrote it was killed
                break
            message = json.loads(line)
            if message["event"] == STARTED:  # stored by this thread, which Ctrl-C does not interrupt
                self._turn_pid = message["pid"]
            self._lines.put(message)
        self._lines.put(None)

    def _last_output(self) -> str:
        """Return the end of the output of this zygote's turns."""
        fd = self._output.fileno()  # pread, since the writing process shares the file's position
        return os.pread(fd, OUTPUT_BYTES, max(0, os.fstat(fd).st_size - OUTPUT_BYTES)).decode(errors="replace")

    def _kill_turn(self) -> None:
        """Kill the turn, and all processes that it started."""
        if self._turn_pid is not None:
            _kill_group(self._turn_pid)
            self._turn_pid = None


def _result_of(message: dict[str, Any]) -> Measured | NotMeasured:
    if message["event"] == MEASURED:
        return measured_of(message)
    kind = "unable" if message["event"] == UNABLE else "failed"
    return NotMeasured(kind, message["text"], message.get("traceback", ""))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
