"""The interface between a manager and its host, which starts and ends workers. Each kind of manager has its own host.

::

    EnvManager ── a step, a reset, a call ──▶ host.workers[i].send / recv
               ── worker i is replaced ──────▶ host.launch(i)
               ◀── responses ── host.step_queue

A host reaches the manager only through its HostContext, so that it can be read and tested alone.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import AgentSteps, CommandName, EnvironmentResponse, StartReport
from envmanager.errors import WorkerError
from envmanager.kernel.calls import Calls
from envmanager.kernel.table import Entry
from envmanager.observe.events import EventLog
from envmanager.observe.stats import ManagerStats, WorkerStats
from envmanager.options import ResetConfig
from envmanager.system.interrupts import allow_interrupts

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from envmanager.kernel.seats import Seats

_LOOK_EVERY_S = 0.1
"""Interval in seconds at which a wait on a StepQueue looks for a Ctrl-C, and for a close() in another thread."""

_LISTEN_EVERY_S = 0.01
"""Interval at which a pool looks for responses in a source that does not ring."""


class StepQueue(Protocol):
    """The interface of a queue of responses to "step" and "step_rows", and to the first "reset" of a replacement.

    ``get_nowait`` raises ``queue.Empty`` if there is no response, and ``get`` if none arrives in ``timeout`` seconds.
    """

    def get_nowait(self) -> EnvironmentResponse: ...

    def get(self, *, timeout: float | None = None) -> EnvironmentResponse: ...


class ResponseSource(ABC):
    """The base class of the objects from which a manager takes its workers' responses to steps."""

    returns_full = False
    """Whether an episode that finds its server full is not begun, so that the pool can begin it elsewhere."""

    start_s = math.inf
    """Time (s) for which a full server is waited for."""

    steps_when_asked = False
    """Whether ``take`` or ``get`` carries out steps that have been sent, in a worker in this process."""

    @abstractmethod
    def take(self) -> Sequence[EnvironmentResponse]:
        """Remove and return the responses that have arrived so far. The result may be empty."""

    @abstractmethod
    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        """Wait for responses and return them. Return an empty sequence at the deadline or when the manager is closed.

        ``n_wanted`` is the number of responses that the caller needs. The method may save wake-ups by returning only
        when ``n_wanted`` steps have arrived, but must return a failure at once. ``deadline`` is a time of
        ``time.monotonic()``, or ``math.inf``.
        """

    def listen(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> Callable[[], None]:
        """Call ``ring`` in an event loop when responses arrive (by default never) until the returned one is called."""
        return lambda: None

    def due_at(self) -> float:
        """Return the time (monotonic seconds) at which ``take`` may have something new although nothing has rung."""
        return time.monotonic() + _LISTEN_EVERY_S


class QueueSource(ResponseSource):
    """An adapter from a StepQueue, such as a ``queue.Queue`` in a test, to a ResponseSource."""

    def __init__(self, step_queue: StepQueue, calls: Calls) -> None:
        """``calls`` says whether the manager is closed. Another thread that closes it cannot unblock the queue."""
        self._queue = step_queue
        self._calls = calls

    def take(self) -> Sequence[EnvironmentResponse]:
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._queue.get_nowait())
        return taken

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        left_s = max(0.0, deadline - time.monotonic())
        while True:
            with allow_interrupts():  # not around get(), where an interrupt could discard the response it has removed
                pass
            own_s, began = min(left_s, _LOOK_EVERY_S), time.monotonic()
            with contextlib.suppress(queue.Empty):
                return [self._queue.get(timeout=own_s), *self.take()]
            left_s -= own_s
            gives_up_at_once = time.monotonic() < began + own_s / 2  # as the queue of a test may
            if left_s <= 0 or gives_up_at_once or self._calls.closed:
                return ()


class EnvWorker(Protocol):
    """The interface through which a manager sends commands to a worker and receives the responses."""

    worker_id: int

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command, without waiting for its response.

        Responses to "step", "step_rows" and some "reset" commands arrive in the step queue. ``recv`` returns the rest.
        "begin" has no response.
        """

    def recv(self) -> EnvironmentResponse:
        """Await and return the response to the last command, or a "failed" response if the worker fails or is late."""


@attrs.frozen
class HostContext:
    """The parts of a manager that its host can access. The manager passes them to ``WorkerHost.open``."""

    entries: Sequence[Entry]
    calls: Calls
    events: EventLog
    seats: Callable[[], Seats]
    """Returns the seats since the last reset."""
    starts_again: Callable[[WorkerError], bool]
    """Returns whether to start a worker again that has failed with this error while it started for the first time."""


class WorkerHost(ABC):
    """The base class of hosts, which start, replace and end workers. Subclasses define ``launch`` and ``close``."""

    step_queue: StepQueue | ResponseSource
    """Queue of responses to steps, and of a replacement's first response if ``begin_again`` returns None."""
    rewrites_arrays = True
    """Whether a worker writes its next step into the same arrays, so that the manager must copy them."""

    env_factory: Any = None
    factories: Sequence[Any] = ()
    """Factories of all environments, for hosts whose workers run Python environments."""
    steps_some_rows = True
    """Whether a worker can step some of its environments without the others."""
    repeats_one = False
    """Whether a worker of one environment can begin a kept episode again, though it takes no other actions."""
    moves_all = False
    """Whether every step moves all environments of a worker, also those without an action."""
    start_at_most: float = math.inf
    """Number of workers that may make their environments at the same time."""
    tells_memory = False
    """Whether the memory of workers is known, so that ``recycle_above_mb`` can be obeyed."""
    is_asked = False
    """Whether ``why_due`` may return anything."""
    accepts_device_arrays = False
    """Whether PyTorch and JAX arrays of actions reach the environments without conversion to NumPy."""

    context: HostContext

    def __init__(self) -> None:
        self.workers: list[Any] = []
        """Workers in order of worker_id."""

    def open(self, context: HostContext) -> None:
        """Store ``context``. Subclasses also acquire the workers' shared resources. Called before the first launch."""
        self.context = context

    @abstractmethod
    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        """Start and return a worker. For a ``generation`` above 0, do not wait for the end of the previous worker.

        Raises OSError or EnvManagerError if the worker cannot start. A replacement's error counts as a worker failure.
        """

    @abstractmethod
    def close(self) -> None:
        """End the workers and release all resources. Called when no call is in progress, and again if interrupted."""

    def await_start(self) -> dict[int, StartReport]:
        """Wait until the workers of generation 0 have made their environments. Return their reports by worker_id.

        Raises the error of the first worker that failed to make its environments.
        """
        for worker in self.workers:
            worker.send(CommandName.START)
        return {worker.worker_id: start_report(worker.recv()) for worker in self.workers}

    def have_started(self, specs: BehaviorSpecs, reports: Mapping[int, StartReport]) -> None:  # noqa: B027
        """Prepare for steps, once all workers have sent their ``reports`` (by worker_id). Does nothing by default."""

    def stop(self) -> None:  # noqa: B027  (workers may end with close)
        """End the workers when a manager closes during a call; ``close`` follows the call. Does nothing by default."""

    def wake(self) -> None:  # noqa: B027  (a host without waits needs none)
        """Unblock any thread that waits on the step queue of a closed manager. That thread gets no response."""

    def hurry(self) -> None:
        """Unblock a thread as ``wake`` does, and let ``close`` wait for no worker longer than a moment."""
        self.wake()

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        """Repeat the ``set_attr`` calls of a replacement that was just launched, and reset it with ``config``.

        Return the response to the reset, or the first failure, or None if these will arrive in the step queue.
        """
        worker: EnvWorker = self.workers[worker_id]
        for payload in self.context.entries[worker_id].attributes.values():
            worker.send(CommandName.SET_ATTR, payload)
            response = worker.recv()
            if response.name is CommandName.FAILED:
                return response
        worker.send(CommandName.RESET, config)
        return worker.recv()

    def reuse_rows(self, worker_id: int) -> None:  # noqa: B027  (only shared rows have a place)
        """Let a worker write its next step where its last one is, or was to be, because that is not delivered."""

    def is_gone(self, worker_id: int) -> bool:
        """Return whether a worker that failed cannot be reset, for instance because its process has ended."""
        return False

    def why_due(self, worker_id: int) -> str:
        """Return why a healthy worker is to be replaced, such as ``"at 312 MiB"``, or "". Asked once a second."""
        return ""

    def lost(  # noqa: B027  (only recordings need it)
        self, worker_id: int, error: Exception, env_ids: Sequence[int] | None = None
    ) -> None:
        """Take note that the episodes in a worker, or only those of ``env_ids``, are lost, because of ``error``.

        Does nothing by default. Called when the manager decides so, before it asks anything else because of it.
        """

    def now(self) -> float:
        """Return the time (monotonic seconds) by which the manager decides about replacements and timeouts of calls."""
        return time.monotonic()

    def check_can_travel(self, payload: Any) -> None:  # noqa: B027  (within one process it can)
        """Raise UsageError if ``payload`` cannot be sent to a worker. Called before anything is sent."""

    def whole(self, behavior: str, parts: Sequence[AgentSteps]) -> AgentSteps | None:
        """Return a view of all ``parts`` (one per worker, in order) as one AgentSteps, without ``final_obs`` and infos.

        Return None unless the arrays of the parts are adjacent in memory.
        """
        return None

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        """Return ``known``, the stats of one worker, plus the values that only the host knows, such as ``pid``."""
        return known

    def describe_all(self, known: ManagerStats) -> ManagerStats:
        """Return ``known``, the stats of the whole manager, plus the values that only the host knows."""
        return known


class FakeHost(WorkerHost):
    """The host of a manager whose ``create_worker`` is replaced, by a test. It sends no command before the reset."""

    rewrites_arrays = False

    def __init__(self, manager: Any, replaced: WorkerHost) -> None:
        """Take the factory of ``replaced``, the host of real workers, which is not opened."""
        super().__init__()
        self.step_queue = queue.Queue()
        self.env_factory, self.steps_some_rows = replaced.env_factory, replaced.steps_some_rows
        self.moves_all, self.tells_memory = replaced.moves_all, replaced.tells_memory
        self._manager = manager

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        worker: EnvWorker = self._manager.create_worker(worker_id, self.step_queue, self.env_factory)
        return worker

    def await_start(self) -> dict[int, StartReport]:
        reports = {worker.worker_id: getattr(worker, "report", None) for worker in self.workers}
        return {worker_id: report for worker_id, report in reports.items() if isinstance(report, StartReport)}

    def close(self) -> None:
        pass


def start_report(response: EnvironmentResponse) -> StartReport:
    """Return the report in a response to "start". If the response is "failed", raise its error instead."""
    if response.name is CommandName.FAILED:
        raise response.payload
    return response.payload  # type: ignore[no-any-return]
