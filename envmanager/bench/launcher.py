"""Zygotes seen from the command: one per family, started when it is first needed, and its turns one after the other.

The rule: no turn outlives the launcher, and none takes longer than its limit. Each is a process group of its own, which
is killed whatever it has started.
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
from envmanager.bench.protocol import (
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
from envmanager.bench.roster import FAMILIES, family_of

CLOSE_S = 5.0
OUTPUT_BYTES = 4096
START_S = 120.0
"""How long a library may take to be imported."""
MORE_S = 10.0
"""How long a turn may run past its own limit, at which it ends itself with a traceback."""


class NotMeasured(Exception):
    """A contender has no result. ``kind`` is ``"missing"``, ``"unable"`` or ``"failed"``; the text says why."""

    def __init__(self, kind: str, text: str, details: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.details = details


class Launcher:
    """Runs jobs, each in a new process of its contender's interpreter. A context manager.

    ``pythons``: interpreters by family; this one for all others.
    """

    def __init__(self, pythons: Mapping[str, str]) -> None:
        self._pythons = pythons
        self._zygotes: dict[str, Zygote] = {}
        self._missing: dict[str, NotMeasured] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="envmanager-bench-")
        # A folder with this package and nothing else: another interpreter's libraries must not be shadowed by ours.
        os.symlink(Path(envmanager.__file__).parent, Path(self._folder.name, "envmanager"))
        self.versions: dict[str, dict[str, str]] = {}

    def run(self, job: Job) -> Measured:
        """What the job's turn measured; NotMeasured when it has no result."""
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
        """End all zygotes, and the turn that runs."""
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
    """One zygote: its process, and the lines that it says, which a thread reads so that each wait has a deadline."""

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
        command = [self.python, "-m", "envmanager.bench.zygote", self.family]
        own_path = os.environ.get("PYTHONPATH")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (self.folder, own_path)))},
                start_new_session=True,  # Ctrl-C is for the command, which ends the turns itself
            )
        except OSError as error:
            self._output.close()
            raise NotMeasured("missing", f"{self.python} cannot be started: {error}") from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> dict[str, str]:
        """The versions of what it has imported; NotMeasured when the library is missing."""
        said = self._next(START_S)
        if said["event"] == MISSING:
            package = FAMILIES[self.family].package
            raise NotMeasured("missing", f"{said['text']}: pip install {shlex.quote(package)}")
        versions: dict[str, str] = said["versions"]
        return versions

    def run(self, job: Job) -> Measured:
        """What the job's turn measured."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its lines will tell
            self._process.stdin.write(job_line(job))  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        self.usable = False  # unless it says that the turn has ended
        result: Measured | NotMeasured | None = None
        try:
            while (said := self._next(job.limit_s + MORE_S))["event"] != ENDED:
                if said["event"] != STARTED:
                    result = _result_of(said)
            self.usable = True
        finally:
            self._kill_turn()
        if result is None:
            reason = f"its process ended (exit code {said['exit_code']}) without a result"
            raise NotMeasured("failed", reason, self._last_output())
        if isinstance(result, NotMeasured):
            raise result
        return result

    def close(self) -> None:
        """End the zygote, and the turn that runs."""
        _kill_group(self._process.pid)
        self._process.wait()
        self._kill_turn()
        # A turn that was forked a moment ago has yet to say its pid. The lines end when nobody is left to say any.
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
            said = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise NotMeasured("failed", f"it said nothing for {timeout_s:g} s and was stopped") from None
        if said is None:
            self._lines.put(said)  # the end stays the end
            raise NotMeasured("failed", f"the process that forks its turns ended (exit code {self._process.wait()})")
        return said

    def _read(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            if not line.endswith("\n"):  # who was saying it has been killed
                break
            said = json.loads(line)
            if said["event"] == STARTED:  # noted here, where no Ctrl-C can come between hearing and noting it
                self._turn_pid = said["pid"]
            self._lines.put(said)
        self._lines.put(None)

    def _last_output(self) -> str:
        """The end of what this library's turns have printed."""
        fd = self._output.fileno()  # not by its position, which the process that writes shares
        return os.pread(fd, OUTPUT_BYTES, max(0, os.fstat(fd).st_size - OUTPUT_BYTES)).decode(errors="replace")

    def _kill_turn(self) -> None:
        """Stop what a turn has left running, or the turn itself."""
        if self._turn_pid is not None:
            _kill_group(self._turn_pid)
            self._turn_pid = None


def _result_of(said: dict[str, Any]) -> Measured | NotMeasured:
    if said["event"] == MEASURED:
        return measured_of(said)
    kind = "unable" if said["event"] == UNABLE else "failed"
    return NotMeasured(kind, said["text"], said.get("traceback", ""))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
