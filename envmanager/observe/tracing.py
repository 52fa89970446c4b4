"""Traces: files that show where the time of a run goes, in https://ui.perfetto.dev or chrome://tracing.

::

    trainer    step( policy ─ wait for workers )   step( policy ─ wait …      one track for the trainer, and
    worker 0   start ─ reset ─ idle ─ step ─ idle ─ step ─ idle ─ step …      one per worker, for all its generations
    worker 1   start ─ reset ─ idle ─ step ─ Died      start ─ reset ─ …

The format is the array form of the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), whose closing bracket may be missing.

The rule: a span that ends a second or more after the last write starts another write, and each write leaves a file that
the viewers can read. If the trace can no longer be written, it ends, and the run goes on.
"""

from __future__ import annotations

import errno
import json
import logging
import operator
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.errors import UsageError
from envmanager.observe.events import Died, Event, LateReplyDiscarded, NotStarted, ProtocolBroken, Started, TimedOut
from envmanager.policy import Policy
from envmanager.system.interrupts import defer_interrupts
from envmanager.system.machine import absolute, advice, open_privately

_EVERY_NS = 1_000_000_000
_AT_ONCE = 1024
"""Number of pending records that triggers a write before a second has passed."""
_TRAINER = 0
_LONGEST_TEXT = 300
_UNMARKED = (Started, LateReplyDiscarded)
"""Events without a mark: a start has a span already, and there may be many late responses."""
_DEATHS = tuple(kind.__name__ for kind in (Died, TimedOut, ProtocolBroken, NotStarted))

_began_ns = operator.itemgetter(0)
_logger = logging.getLogger("envmanager")

Record = tuple[int, int | None, int, str, str]
"""Tuple (begin, end or None for a mark, number of the track, name, further members). The last two are JSON text."""


class SpanTrack:
    """One track of a trace, for the trainer or a worker. Each span of a worker carries its generation and tasks."""

    __slots__ = ("_more", "_number", "_tracer")

    def __init__(self, tracer: Tracer, number: int) -> None:
        self._tracer = tracer
        self._number = number
        self._more = ""

    def begin(self, generation: int, tasks: Mapping[int, int] = MappingProxyType({})) -> None:
        """Set the worker's generation (0 for its first start) and tasks, by env_id, for the spans that follow."""
        of_tasks = f',"tasks":{json.dumps(tasks)}' if tasks else ""
        self._more = f',"args":{{"generation":{generation}{of_tasks}}}'

    def span(self, name: str, began_ns: int, ended_ns: int) -> None:
        """Add a span, and write the file if a write is due. ``name`` must already be escaped for JSON."""
        tracer = self._tracer
        tracer.records.append((began_ns, ended_ns, self._number, name, self._more))
        if ended_ns >= tracer.write_at_ns or len(tracer.records) >= _AT_ONCE:
            tracer.write()

    def mark(self, name: str, at_ns: int, **arguments: Any) -> None:
        """Add a mark at the time ``at_ns``, with ``arguments`` as details for the viewer to show."""
        more = json.dumps(arguments, ensure_ascii=False)
        self._tracer.records.append((at_ns, None, self._number, name, f',"s":"t","args":{more}'))


_being_written: set[str] = set()


class Tracer:
    """A writer of one trace file. Times are from ``time.perf_counter_ns``, which all processes of a machine share."""

    def __init__(self, path: str, env_ids_of_workers: Sequence[Sequence[int]]) -> None:
        """Create ``path``. Only the user can read the file, because it contains the texts of errors.

        What the file holds already is kept until ``started``. Raises UsageError if ``path`` cannot be written, or if
        another manager of this process is writing it.
        """
        self._path = absolute(path)  # the trainer may change its directory
        if self._path in _being_written:
            raise UsageError(f"the trace {path!r} is being written by another manager: name a file for each.")
        self._owner_pid = os.getpid()
        self._zero_ns = time.perf_counter_ns()
        self._lock = threading.RLock()
        self._is_open = True
        self._is_closed = False
        self._ended_ns: dict[int, int] = {}
        """Time at which each worker's last span ended, by track; the worker is idle from then on."""
        self.records: list[Record] = []
        self.write_at_ns = self._zero_ns + _EVERY_NS
        self.trainer = SpanTrack(self, _TRAINER)
        self.workers = [SpanTrack(self, 1 + worker_id) for worker_id in range(len(env_ids_of_workers))]
        self._head = "[\n" + ",\n".join(self._names(env_ids_of_workers))
        self._size: int | None = None
        """Number of bytes written, by which the file is known; None before the first."""
        try:
            with open(self._path, "ab", opener=open_privately) as file:
                is_empty = not os.fstat(file.fileno()).st_size
        except OSError as error:
            raise UsageError(
                f"the trace {path!r} cannot be written: {error.strerror}. {advice(error)}".rstrip()
            ) from error
        _being_written.add(self._path)
        if is_empty:
            self.started()

    def started(self) -> None:
        """Replace what the file holds, now that the workers have started."""
        if self._size is None:
            self._size = 0
            self._append(self._head, os.O_TRUNC)

    def _names(self, env_ids_of_workers: Sequence[Sequence[int]]) -> Iterator[str]:
        yield self._name("process_name", _TRAINER, "envmanager")
        yield self._name("thread_name", _TRAINER, "trainer")
        for worker_id, env_ids in enumerate(env_ids_of_workers):
            envs = f"env {env_ids[0]}" if len(env_ids) == 1 else f"envs {env_ids[0]}-{env_ids[-1]}"
            yield self._name("thread_name", 1 + worker_id, f"worker {worker_id} ({envs})")

    def _name(self, of: str, number: int, name: str) -> str:
        return json.dumps({"ph": "M", "pid": self._owner_pid, "tid": number, "name": of, "args": {"name": name}})

    def policy(self, behavior: str, policy: Policy) -> Policy:
        """Return a policy that calls ``policy`` and adds a span for each call."""
        name = json.dumps(_readable(f"policy {behavior}"), ensure_ascii=False)[1:-1]
        return _TracedPolicy(policy, self.trainer, name)

    def happened(self, event: Event) -> None:
        """Add a mark for an event of a worker, except for a start or a late response."""
        if not isinstance(event, _UNMARKED):
            text = _readable(str(event).partition("\n")[0][:_LONGEST_TEXT])
            track = self.workers[event.worker_id]
            track.mark(type(event).__name__, int(event.at_s * 1e9), generation=event.generation, text=text)

    def write(self) -> None:
        """Append the pending spans and marks to the file. In a forked process, only discard them."""
        if os.getpid() != self._owner_pid:  # a forked process; the trainer writes the trace
            self.records.clear()
            return
        if self._is_open and self._size is None:  # the workers have not started
            return
        with defer_interrupts(), self._lock:
            began_ns = time.perf_counter_ns()
            self.write_at_ns = began_ns + _EVERY_NS
            records = self.records[:]
            del self.records[: len(records)]  # not all: another thread may have added more
            records.sort(key=_began_ns)
            self._append("".join(self._lines_of(records)))
            self.trainer.span("write the trace", began_ns, time.perf_counter_ns())

    def _lines_of(self, records: list[Record]) -> list[str]:
        """Return JSON lines for ``records`` (already sorted by begin), and for idle times between a worker's spans."""
        zero_ns, head = self._zero_ns, f'"pid":{self._owner_pid},"tid":'
        last_ended_ns = self._ended_ns
        lines = []
        for began_ns, ended_ns, number, name, more in records:
            at_ns = began_ns - zero_ns  # written with the exponent e-3, because the format has µs
            if ended_ns is None:
                lines.append(f',\n{{"ph":"i",{head}{number},"ts":{at_ns}e-3,"name":"{name}"{more}}}')
                if name in _DEATHS:  # also during a step, so the time until the next start is not idle
                    last_ended_ns.pop(number, None)
                continue
            if number != _TRAINER:
                idle_ns = began_ns - last_ended_ns.get(number, began_ns)
                if idle_ns >= 0:  # negative for a span that was recorded after later ones had been written
                    last_ended_ns[number] = ended_ns
                if idle_ns > 0:
                    idle = f'{at_ns - idle_ns}e-3,"dur":{idle_ns}e-3,"name":"idle"'
                    lines.append(f',\n{{"ph":"X",{head}{number},"ts":{idle}{more}}}')
            lines.append(
                f',\n{{"ph":"X",{head}{number},"ts":{at_ns}e-3,"dur":{ended_ns - began_ns}e-3,"name":"{name}"{more}}}'
            )
        return lines

    def _append(self, text: str, flags: int = 0) -> None:
        if not self._is_open or self._size is None:
            return
        try:
            # Opened each time, so that no descriptor leaks into other processes.
            with open(
                self._path, "ab", opener=lambda path, mode: open_privately(path, (mode | flags) & ~os.O_CREAT)
            ) as file:
                found = os.fstat(file.fileno())
                if stat.S_ISREG(found.st_mode) and found.st_size != self._size:
                    raise OSError(errno.EBUSY, "another process has written into it")
                self._size += file.write(text.encode())
        except OSError as error:
            self._is_open = False
            _logger.warning("the trace %s ends here, because it cannot be written: %s", self._path, error.strerror)

    def close(self) -> None:
        """Write the remaining spans and the closing bracket. A second call does nothing."""
        self.write()
        if os.getpid() == self._owner_pid:
            self._append("\n]\n")
            if not self._is_closed:
                self._is_closed = True
                _being_written.discard(self._path)
            self._is_open = False


def _readable(text: str) -> str:
    """Return ``text`` without the parts that Perfetto cannot read: surrogates, and backslashes at the end."""
    return text.encode(errors="replace").decode().rstrip("\\")


class _TracedPolicy:
    """A policy that calls another policy and adds a span to the trace for each call."""

    def __init__(self, policy: Policy, track: SpanTrack, name: str) -> None:
        self.is_random = getattr(policy, "is_random", False)
        self._policy = policy
        self._track = track
        self._name = name

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        began_ns = time.perf_counter_ns()
        try:
            return self._policy.get_action(steps)
        finally:
            self._track.span(self._name, began_ns, time.perf_counter_ns())
