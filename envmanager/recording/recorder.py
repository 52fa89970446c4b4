"""Recording of all that a manager learns from its workers, in the order in which it learns it.

::

    kernel ── send, recv, launch, now ──▶ RecordingHost ──▶ the host of the manager's kind
                  take, get            ◀──     │
                                               └── facts ──▶ Recorder ── a thread ──▶ file

The kernel decides by nothing but what its host tells it: responses, the results of calls, and the time. So a manager
whose host tells the same, and whose trainer does the same, makes the same run; see ``recording.replay``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from abc import abstractmethod
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import AgentSteps, CommandName, EnvironmentResponse, StartReport
from envmanager.errors import UsageError
from envmanager.kernel.host import EnvWorker, HostContext, QueueSource, ResponseSource, WorkerHost
from envmanager.kernel.table import Entry
from envmanager.observe.events import Event
from envmanager.observe.stats import ManagerStats, WorkerStats
from envmanager.options import ResetConfig
from envmanager.recording.codec import frozen, frozen_response, pickled
from envmanager.recording.file import FORMAT, RecordWriter
from envmanager.system.interrupts import allow_interrupts, defer_interrupts

_MOST_PENDING, _MOST_PENDING_BYTES = 10_000, 1 << 26
"""Number of facts, and about their size, above which the trainer waits until they are written."""
LONGEST_STALL_S = 10.0
"""Seconds in which nothing could be written after which a recording that is waited for has failed."""
_EVERY_S = 0.02
"""Time in which facts are gathered for one record, so that compressing and writing take little."""
_STEP, _STEP_ROWS = CommandName.STEP, CommandName.STEP_ROWS

Fact = tuple[str, int, Any]
"""What was asked or answered, by which worker (-1: by none), and its content."""


@attrs.frozen(kw_only=True)
class RecordingFailed(Event):
    """Event: the recording has ended early, because of ``error``; the run goes on."""

    LEVEL = logging.WARNING

    path: str
    error: Exception

    def __str__(self) -> str:
        return f"the recording {self.path} ends here, and the run goes on without it: {self.error}"


class Recorder:
    """A thread that writes facts to a file, all of a short time as one record."""

    def __init__(self, path: str, about: Mapping[str, Any], *, observations: bool = True) -> None:
        """Create the file. ``about``: what it says first. Raises UsageError if that is impossible."""
        self.path, self.observations = path, observations
        self.error: Exception | None = None
        """The error with which it has failed, if it has."""
        self._is_over = False
        """Whether nothing more is recorded: it was closed, or has failed."""
        self._owner_pid = os.getpid()
        try:
            self._writer = writer = RecordWriter(path)
            try:
                writer.add("about", time.time_ns(), {"format": FORMAT, "observations": observations, **about})
            except OSError:
                writer.close()
                raise
        except OSError as error:
            raise UsageError(f"the recording {path} cannot be written: {error}.") from error
        self.facts: deque[Fact] = deque()
        """Facts that wait to be written."""
        self.most_pending = _MOST_PENDING
        """Number of facts above which the trainer waits, because they are many or large."""
        self.is_waited_for = True
        """Whether the trainer waits at all; not when another thread closes the manager."""
        self._nothing: tuple[str, int] = ("", 0)
        """Call that has found nothing, and how often in a row."""
        self._closing, self._has_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="envmanager-recorder", daemon=True)
        self._thread.start()

    # In the trainer's thread.

    def add(self, what: str, worker_id: int, content: Any) -> None:
        """Add a fact. Its content must not change later."""
        if not self._is_over:
            self._tell_nothing_found()
            self.facts.append((what, worker_id, content))

    def wait_for_room(self) -> None:
        """Wait while very much is to be written. A Ctrl-C ends the wait."""
        self._wait_until(
            lambda: len(self.facts) <= self.most_pending or self._is_over or not self.is_waited_for  # by another thread
        )

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until something is written that is waited for. If the file stops growing, the recording has failed."""
        n_written, grown_s = -1, 0.0
        while not is_done():
            if self._writer.n_written != n_written:
                n_written, grown_s = self._writer.n_written, time.monotonic()
            elif time.monotonic() > grown_s + LONGEST_STALL_S:
                self._is_over = True
                self.error = TimeoutError(f"nothing could be written for {LONGEST_STALL_S:g} s")
                return
            with allow_interrupts():
                self._has_ended.wait(_EVERY_S)  # not join(): in Python 3.12 an interrupt there ends the Thread object

    def found_nothing(self, call: str) -> None:
        """Add the fact that a call has found nothing. Many in a row are one fact with their number."""
        if self._nothing[0] != call:
            self._tell_nothing_found()
        self._nothing = (call, self._nothing[1] + 1)

    def _tell_nothing_found(self) -> None:
        (call, number), self._nothing = self._nothing, ("", 0)
        if number:
            self.facts.append((f"no {call}", -1, number))

    def close(self) -> None:
        """Write what is left and the end of the file. Has no effect in a process forked from the trainer."""
        if os.getpid() == self._owner_pid:
            with defer_interrupts():
                self._tell_nothing_found()
                self._closing.set()
                self._wait_until(self._has_ended.is_set)
                if self._has_ended.is_set():
                    self._thread.join()

    # In its thread.

    def _run(self) -> None:
        facts, writer, is_last = self.facts, self._writer, False
        try:
            while not is_last and not self._is_over:
                is_last = self._closing.wait(_EVERY_S)
                if facts:
                    taken = [facts.popleft() for _ in range(len(facts))]
                    size = writer.add("facts", time.time_ns(), taken)
                    self.most_pending = min(_MOST_PENDING, _MOST_PENDING_BYTES * len(taken) // size)
            writer.finish()
        except Exception as error:  # the disk is full, say
            self.error = error
        finally:
            self._is_over = True
            facts.clear()
            writer.close()
            self._has_ended.set()


class RecordedWorker:
    """A worker whose commands and answers are recorded."""

    def __init__(self, worker: EnvWorker, host: RecordingHost) -> None:
        self.worker_id = worker.worker_id
        self._worker, self._recorder = worker, host.recorder
        self._entry = host.context.entries[self.worker_id]

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command, and record it."""
        self._worker.send(name, payload)
        if name is _STEP or name is _STEP_ROWS:
            rows = None
            if name is _STEP_ROWS:
                rows, payload = payload
                rows = frozen(rows)
            actions, taken = {behavior: frozen(each) for behavior, each in payload.items()}, self._entry.actions
            versions = {behavior: each.version for behavior, each in taken.items()} if taken else None
            self._recorder.add("step", self.worker_id, (rows, actions, versions))
        else:
            self._recorder.add("send", self.worker_id, (str(name), pickled(payload)))

    def recv(self) -> EnvironmentResponse:
        """Return the answer to the last command, and record it."""
        if len(self._recorder.facts) > self._recorder.most_pending:
            self._recorder.wait_for_room()
        response = self._worker.recv()
        form = frozen_response(response, observations=self._recorder.observations)
        self._recorder.add("recv", self.worker_id, form)
        return response

    def __getattr__(self, name: str) -> Any:
        if name == "_worker":
            raise AttributeError(name)
        return getattr(self._worker, name)


class RecordedSource(ResponseSource):
    """A source whose responses are recorded, with the calls that returned them."""

    def __init__(self, source: ResponseSource, host: RecordingHost) -> None:
        self._source, self._recorder = source, host.recorder
        self._tell = weakref.WeakMethod(host.tell)

    @property
    def steps_when_asked(self) -> bool:  # type: ignore[override]
        return self._source.steps_when_asked

    def take(self) -> Sequence[EnvironmentResponse]:
        if len(self._recorder.facts) > self._recorder.most_pending:
            self._recorder.wait_for_room()  # before a response is taken, which an interrupt would lose
        return self._recorded("take", self._source.take())

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        return self._recorded("get", self._source.get(n_wanted, deadline))

    def _recorded(self, call: str, responses: Sequence[EnvironmentResponse]) -> Sequence[EnvironmentResponse]:
        recorder = self._recorder
        if not responses:
            recorder.found_nothing(call)
            return responses
        observations = recorder.observations
        forms = [frozen_response(response, observations=observations) for response in responses]
        recorder.add(call, -1, (time.time_ns(), forms))
        if recorder.error is not None and (tell := self._tell()) is not None:
            tell()
        return responses

    def listen(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> Callable[[], None]:
        return self._source.listen(loop, ring)

    def due_at(self) -> float:
        return self._source.due_at()


class HostAround(WorkerHost):
    """The base class of hosts around the host of a manager's kind, which get to know what passes."""

    def __init__(self, host: WorkerHost) -> None:
        super().__init__()
        self.inner = host
        self.env_factory, self.factories = host.env_factory, host.factories

    def open(self, context: HostContext) -> None:
        super().open(context)
        self.inner.open(context)
        source = self.inner.step_queue
        if not isinstance(source, ResponseSource):
            source = QueueSource(source, context.calls)
        self.step_queue = self.around_source(source)

    @abstractmethod
    def around_source(self, source: ResponseSource) -> ResponseSource:
        """Return the source to use in place of ``source``."""

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        worker = self.inner.launch(worker_id, generation)
        self.inner.workers[worker_id:] = [worker, *self.inner.workers[worker_id + 1 :]]
        return worker

    def await_start(self) -> dict[int, StartReport]:
        reports, inner = self.inner.await_start(), self.inner
        self.rewrites_arrays, self.steps_some_rows = inner.rewrites_arrays, inner.steps_some_rows
        self.accepts_device_arrays, self.moves_all = inner.accepts_device_arrays, inner.moves_all
        return reports

    def have_started(self, specs: BehaviorSpecs, reports: Mapping[int, StartReport]) -> None:
        self.inner.have_started(specs, reports)

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        return self.inner.begin_again(worker_id, config)

    def is_gone(self, worker_id: int) -> bool:
        return self.inner.is_gone(worker_id)

    def now(self) -> float:
        return self.inner.now()

    def check_can_travel(self, payload: Any) -> None:
        self.inner.check_can_travel(payload)

    def whole(self, behavior: str, parts: Sequence[AgentSteps]) -> AgentSteps | None:
        return self.inner.whole(behavior, parts)

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        return self.inner.describe(entry, known)

    def describe_all(self, known: ManagerStats) -> ManagerStats:
        return self.inner.describe_all(known)

    def wake(self) -> None:
        self.inner.wake()

    def stop(self) -> None:
        self.inner.stop()

    def close(self) -> None:
        self.inner.close()


class RecordingHost(HostAround):
    """A host that records what the host of a manager's kind does."""

    def __init__(self, host: WorkerHost, recorder: Recorder) -> None:
        super().__init__(host)
        self.recorder = recorder
        self._finalizer = weakref.finalize(self, recorder.close)

    def around_source(self, source: ResponseSource) -> ResponseSource:
        return RecordedSource(source, self)

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        try:
            worker = super().launch(worker_id, generation)
        except Exception as error:
            self.recorder.add("launch", worker_id, (generation, pickled(error)))
            raise
        self.recorder.add("launch", worker_id, (generation, None))
        return RecordedWorker(worker, self)

    def await_start(self) -> dict[int, StartReport]:
        reports = super().await_start()
        told = self.accepts_device_arrays, self.steps_some_rows, self.moves_all
        self.recorder.add("started", -1, pickled((reports, told)))
        return reports

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        response = super().begin_again(worker_id, config)
        form = None if response is None else frozen_response(response, observations=self.recorder.observations)
        self.recorder.add("begin_again", worker_id, (pickled(config), form))
        return response

    def is_gone(self, worker_id: int) -> bool:
        is_gone = super().is_gone(worker_id)
        self.recorder.add("is_gone", worker_id, is_gone)
        return is_gone

    def check_can_travel(self, payload: Any) -> None:
        try:
            super().check_can_travel(payload)
        except Exception as error:
            self.recorder.add("refused", -1, pickled(error))
            raise

    def now(self) -> float:
        now = super().now()
        self.recorder.add("now", -1, now)
        return now

    def wake(self) -> None:
        self.recorder.is_waited_for = False
        super().wake()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._finalizer()
            self.tell()

    def tell(self) -> None:
        """Add an event if the recording has failed."""
        error, self.recorder.error = self.recorder.error, None
        if error is not None:
            event = RecordingFailed(worker_id=-1, generation=0, path=self.recorder.path, error=error)
            self.context.events.add(event)


def recorded(host: WorkerHost, path: str, about: Mapping[str, Any], *, observations: bool) -> WorkerHost:
    """Return a host that records ``host`` in a file. Raises UsageError if it cannot be made."""
    return RecordingHost(host, Recorder(path, about, observations=observations))
