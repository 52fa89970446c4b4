"""Recording of all that a manager learns from its workers, in the order in which it learns it.

::

    kernel ── send, recv, launch, now ──▶ RecordingHost ──▶ the host of the manager's kind
                  take, get            ◀──     │
                                               └── what was asked and answered ──▶ Recorder ── a thread ──▶ file

The kernel decides by nothing but what this host tells it: responses, the results of calls, and the time. So a manager
whose host tells the same, and whose trainer does the same, makes the same run; see ``recording.replay``.

A *moment* is all that was asked and answered up to the arrival of responses. It is one record of the file.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
import zlib
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import STEPPING, AgentSteps, CommandName, EnvironmentResponse, StartReport
from envmanager.data.trees import Tree, map_tree, snapshot
from envmanager.errors import UsageError
from envmanager.kernel.host import EnvWorker, HostContext, QueueSource, ResponseSource, WorkerHost
from envmanager.observe.events import Event, EventLog
from envmanager.observe.stats import ManagerStats, WorkerStats
from envmanager.options import ResetConfig
from envmanager.recording.file import FORMAT, RecordWriter, packed
from envmanager.system.interrupts import defer_interrupts

_MOST_PENDING_BYTES = 64 << 20
"""Size of the records that wait to be written above which the trainer waits."""
_logger = logging.getLogger("envmanager")


class Fact(NamedTuple):
    """Something that was asked or answered: ``what``, the worker (-1: all), and its content."""

    what: str
    worker_id: int
    content: Any


class Checksum(NamedTuple):
    """What is kept of an array of observations that is not recorded."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int

    @classmethod
    def of(cls, array: Any) -> Checksum:
        """Return the checksum of an array. Objects have none but their number."""
        values = np.ascontiguousarray(array)
        crc = 0 if values.dtype.hasobject else zlib.crc32(values.reshape(-1).view(np.uint8).data)
        return cls(str(values.dtype), values.shape, crc)


@attrs.frozen(kw_only=True)
class RecordingFailed(Event):
    """Event: the recording has ended early, because of ``error``; the run goes on."""

    LEVEL = logging.WARNING

    path: str
    error: Exception

    def __str__(self) -> str:
        return f"the recording {self.path} ends here, and the run goes on without it: {self.error}"


class Recorder:
    """A thread that writes records to a file."""

    def __init__(self, path: str, *, observations: bool = True) -> None:
        """Create the file. Raises UsageError if that is impossible."""
        self.path, self.observations = path, observations
        self.is_over = False
        """Whether nothing more is recorded: it was closed, or has failed."""
        self.error: Exception | None = None
        """The error with which it has failed, if it has."""
        try:
            self._writer = RecordWriter(path)
        except OSError as error:
            raise UsageError(f"the recording {path} cannot be written: {error}.") from error
        self._moment: list[Fact] = []
        self._pending: deque[tuple[str, int, list[bytes]] | None] = deque()
        self._n_pending_bytes = 0
        self._changed = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._write, name="envmanager-recorder", daemon=True)
        self._thread.start()

    # In the trainer's thread.

    def add(self, what: str, worker_id: int, content: Any) -> None:
        """Add a fact to the present moment."""
        if not self.is_over:
            self._moment.append(Fact(what, worker_id, content))

    def count(self, what: str) -> None:
        """Add a fact that nothing had arrived. Many in a row are one fact with their number."""
        moment = self._moment
        if moment and moment[-1].what == what:
            moment[-1] = Fact(what, -1, moment[-1].content + 1)
        else:
            self.add(what, -1, 1)

    def end_moment(self) -> None:
        """Hand the present moment to the thread, as one record."""
        moment, self._moment = self._moment, []
        if moment and not self.is_over:
            self.put("moment", [tuple(fact) for fact in moment])

    def put(self, kind: str, content: Any) -> None:
        """Hand a record to the thread. Waits while very much is to be written."""
        if self.is_over:
            return
        parts = packed(content)
        size = sum(map(len, parts))
        with defer_interrupts(), self._changed:
            while self._n_pending_bytes > _MOST_PENDING_BYTES and not self.is_over:
                self._changed.wait(1.0)
            self._n_pending_bytes += size
            self._pending.append((kind, time.time_ns(), parts))
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is left and the end of the file."""
        with defer_interrupts():
            self.end_moment()
            with self._changed:
                self._pending.append(None)
                self._changed.notify_all()
            self._thread.join()
            self.is_over = True

    # In its thread.

    def _write(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._pending:
                        self._changed.wait()
                    record = self._pending.popleft()
                if record is None:
                    break
                self._writer.write(*record)
                with self._changed:
                    self._n_pending_bytes -= sum(map(len, record[2]))
                    self._changed.notify_all()
            self._writer.close()
        except Exception as error:  # the disk is full, say
            with self._changed:
                self.error, self.is_over = error, True
                self._pending.clear()
                self._changed.notify_all()


class RecordedWorker:
    """A worker whose commands and answers are recorded."""

    def __init__(self, worker: EnvWorker, host: RecordingHost) -> None:
        self.worker_id = worker.worker_id
        self._worker, self._host = worker, host

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command, and record it."""
        self._worker.send(name, payload)
        name = CommandName(name)
        versions = None
        if name in STEPPING:
            actions = self._host.context.entries[self.worker_id].actions or {}
            versions = {behavior: each.version for behavior, each in actions.items()}
        self._host.recorder.add("send", self.worker_id, (name.value, snapshot(payload), versions))

    def recv(self) -> EnvironmentResponse:
        """Return the answer to the last command, and record it."""
        response = self._worker.recv()
        self._host.recorder.add("recv", self.worker_id, self._host.kept(response))
        self._host.recorder.end_moment()  # before the worker writes into the same arrays again
        return response

    def __getattr__(self, name: str) -> Any:
        if name == "_worker":
            raise AttributeError(name)
        return getattr(self._worker, name)


class RecordedSource(ResponseSource):
    """A source whose responses are recorded, with the calls that returned them."""

    def __init__(self, source: ResponseSource, host: RecordingHost) -> None:
        self._source, self._host = source, weakref.proxy(host)

    @property
    def steps_when_asked(self) -> bool:  # type: ignore[override]
        return self._source.steps_when_asked

    def take(self) -> Sequence[EnvironmentResponse]:
        return self._recorded("take", self._source.take())

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        return self._recorded("get", self._source.get(n_wanted, deadline))

    def _recorded(self, call: str, responses: Sequence[EnvironmentResponse]) -> Sequence[EnvironmentResponse]:
        recorder = self._host.recorder
        if not responses:
            recorder.count(f"no {call}")
            return responses
        recorder.add(call, -1, [self._host.kept(response) for response in responses])
        recorder.end_moment()
        if recorder.error is not None:
            self._host.tell()
        return responses

    def listen(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> Callable[[], None]:
        return self._source.listen(loop, ring)

    def due_at(self) -> float:
        return self._source.due_at()


class RecordingHost(WorkerHost):
    """A host that records what the host of a manager's kind does."""

    def __init__(self, host: WorkerHost, recorder: Recorder, about: Mapping[str, Any]) -> None:
        """``about``: what is to be known of the manager, by name."""
        super().__init__()
        self.recorder = recorder
        self._inner = host
        self._about = dict(about)
        self.env_factory, self.factories = host.env_factory, host.factories
        self._finalizer = weakref.finalize(self, recorder.close)

    def open(self, context: HostContext) -> None:
        super().open(context)
        self._inner.open(context)
        source = self._inner.step_queue
        if not isinstance(source, ResponseSource):
            source = QueueSource(source, context.calls)
        self.step_queue = RecordedSource(source, self)

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        try:
            worker = self._inner.launch(worker_id, generation)
        except Exception as error:
            self.recorder.add("launch", worker_id, (generation, error))
            raise
        self.recorder.add("launch", worker_id, (generation, None))
        if worker_id < len(self._inner.workers):
            self._inner.workers[worker_id] = worker
        else:
            self._inner.workers.append(worker)
        return RecordedWorker(worker, self)

    def await_start(self) -> dict[int, StartReport]:
        reports = self._inner.await_start()
        inner = self._inner
        self.rewrites_arrays, self.accepts_device_arrays = inner.rewrites_arrays, inner.accepts_device_arrays
        self.steps_some_rows = inner.steps_some_rows
        names = ("rewrites_arrays", "accepts_device_arrays", "steps_some_rows")
        host = {name: getattr(inner, name) for name in names}
        blocks = [list(entry.env_ids) for entry in self.context.entries]
        observations = self.recorder.observations
        self.recorder.put(
            "about", {**self._about, "format": FORMAT, "env_ids": blocks, "host": host, "observations": observations}
        )
        self.recorder.add("started", -1, reports)
        self.recorder.end_moment()
        return reports

    def have_started(self, specs: BehaviorSpecs, reports: Mapping[int, StartReport]) -> None:
        self._inner.have_started(specs, reports)

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        response = self._inner.begin_again(worker_id, config)
        kept = None if response is None else self.kept(response)
        self.recorder.add("begin_again", worker_id, (snapshot(config), kept))
        self.recorder.end_moment()
        return response

    def is_gone(self, worker_id: int) -> bool:
        is_gone = self._inner.is_gone(worker_id)
        self.recorder.add("is_gone", worker_id, is_gone)
        return is_gone

    def now(self) -> float:
        now = self._inner.now()
        self.recorder.add("now", -1, now)
        return now

    def check_can_travel(self, payload: Any) -> None:
        self._inner.check_can_travel(payload)

    def whole(self, behavior: str, parts: Sequence[AgentSteps]) -> AgentSteps | None:
        return self._inner.whole(behavior, parts)

    def describe(self, entry: Any, known: WorkerStats) -> WorkerStats:
        return self._inner.describe(entry, known)

    def describe_all(self, known: ManagerStats) -> ManagerStats:
        return self._inner.describe_all(known)

    def wake(self) -> None:
        self._inner.wake()

    def stop(self) -> None:
        self._inner.stop()

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._finalizer()
            self.tell()

    def tell(self) -> None:
        """Add an event if the recording has failed."""
        error, self.recorder.error = self.recorder.error, None
        if error is not None:
            self.context.events.add(
                RecordingFailed(worker_id=-1, generation=0, path=self.recorder.path, error=error)
            )

    def kept(self, response: EnvironmentResponse) -> EnvironmentResponse:
        """Return what is recorded of a response: without its observations, if they are not."""
        if self.recorder.observations or not isinstance(response.payload, Mapping):
            return response
        payload = {
            behavior: attrs.evolve(steps, obs=_checksums(steps.obs), final_obs=_checksums(steps.final_obs))
            if isinstance(steps, AgentSteps)
            else steps
            for behavior, steps in response.payload.items()
        }
        return EnvironmentResponse(response.name, response.worker_id, payload, response.specs)


def _checksums(tree: Tree) -> Tree:
    return None if tree is None else map_tree(Checksum.of, tree)

