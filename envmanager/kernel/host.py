"""The interface between a manager and its host, which starts, keeps and ends workers. Each kind has its own host.

::

    EnvManager ── a step, a reset, a call ──▶ host.workers[i].send / recv
               ── worker i begins again ─────▶ host.launch(i)
               ◀── responses ── host.step_queue

The rule: the manager calls the host, never the other way round, so a host can be read and tested alone.
"""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import AgentSteps, CommandName, EnvironmentResponse, StartReport, Steps
from envmanager.kernel.calls import Calls
from envmanager.kernel.table import Entry
from envmanager.observe.events import EventLog
from envmanager.observe.stats import ManagerStats, WorkerStats
from envmanager.options import ResetConfig


class StepQueue(Protocol):
    """The queue of all workers' responses to "step". ``get_nowait`` and ``get`` raise ``queue.Empty``.

    The queue also delivers the first observations of a replacement, as the response to "reset".
    """

    def get_nowait(self) -> EnvironmentResponse: ...

    def get(self, *, timeout: float | None = None) -> EnvironmentResponse: ...


class ResponseSource(ABC):
    """The responses of all workers, in order of completion."""

    @abstractmethod
    def take(self) -> Sequence[EnvironmentResponse]:
        """Return and remove the responses that have arrived; perhaps none."""

    @abstractmethod
    def wait(self, timeout: float | None, n_wanted: int = 1) -> Sequence[EnvironmentResponse]:
        """Wait for at least one response; return none after ``timeout`` seconds or if the manager was closed.

        ``n_wanted``: number of responses that the caller needs. A source whose wake-ups are expensive may wait until it
        has this many steps, but it must return a failure at once.
        """


class QueueSource(ResponseSource):
    """A source that reads a step queue."""

    def __init__(self, step_queue: StepQueue) -> None:
        self._queue = step_queue

    def take(self) -> Sequence[EnvironmentResponse]:
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._queue.get_nowait())
        return taken

    def wait(self, timeout: float | None, n_wanted: int = 1) -> Sequence[EnvironmentResponse]:
        try:
            first = self._queue.get(timeout=timeout)
        except queue.Empty:
            return ()
        return [first, *self.take()]


def as_source(step_queue: Any) -> ResponseSource:
    """Return a source that reads ``step_queue``, or ``step_queue`` if it is a source."""
    return step_queue if isinstance(step_queue, ResponseSource) else QueueSource(step_queue)


class EnvWorker(Protocol):
    """The interface of a worker, as its manager uses it."""

    worker_id: int

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command, without blocking.

        The response to "step" arrives in the step queue; ``recv`` returns every other.
        """

    def recv(self) -> EnvironmentResponse:
        """Return the response to the last command; a "failed" response if none comes before its deadline."""


@attrs.frozen
class HostContext:
    """The parts of a manager that its host uses."""

    entries: Sequence[Entry]
    calls: Calls
    events: EventLog
    create: Callable[[int], EnvWorker]
    """Function that makes the worker of a worker_id with the manager's ``create_worker``, which tests replace."""


class WorkerHost(ABC):
    """The owner of a manager's workers. ``launch`` and ``close`` are abstract; the other methods have defaults."""

    step_queue: StepQueue | ResponseSource
    """Queue of all workers' responses to "step"."""
    rewrites_arrays = True
    """Whether a worker writes its next step into the same arrays. They are then copied before they are returned."""

    env_factory: Any = None
    """Factory of environments, as the user gave it."""
    steps_some_rows = True
    """Whether a worker can step some of its environments without the others."""

    context: HostContext

    def __init__(self) -> None:
        self.workers: list[Any] = []
        """Workers in order of worker_id."""

    def open(self, context: HostContext) -> None:
        """Acquire what the workers share. Called once, before the first launch."""
        self.context = context

    @abstractmethod
    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        """Start and return a worker, without waiting for the end of its predecessor. Generation 0 is the first.

        Raises OSError if the worker cannot be started, which counts as a failure.
        """

    def make_worker(self, worker_id: int) -> EnvWorker:
        """Make a worker. Only hosts whose ``launch`` calls ``context.create`` define this."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Release everything. No call is in progress. Called again if it was interrupted."""

    def await_start(self) -> dict[int, StartReport]:
        """Wait until the first workers have made their environments; return their reports by worker_id.

        Raises the error of the first worker that could not.
        """
        for worker in self.workers:
            worker.send(CommandName.START)
        return {worker.worker_id: start_report(worker.recv()) for worker in self.workers}

    def have_started(self, specs: BehaviorSpecs, reports: Mapping[int, StartReport]) -> None:  # noqa: B027
        """Prepare for the first step, after all workers have started. ``specs`` has all behaviors."""

    def stop(self) -> None:  # noqa: B027  (workers may end with close)
        """End the workers while a call is in progress (in another thread, or around the caller). ``close`` follows."""

    def wake(self) -> None:  # noqa: B027  (a host without waits needs none)
        """Unblock a thread that waits on the step queue; it gets no response. The manager is closed."""

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        """Reset a replacement that was just launched.

        Return its response; None if that will arrive in the step queue, as the response to "reset".
        """
        self.workers[worker_id].send(CommandName.RESET, config)
        return self.workers[worker_id].recv()  # type: ignore[no-any-return]

    def is_gone(self, worker_id: int) -> bool:
        """Return whether a worker that failed must be replaced before it can be reset."""
        return False

    def check_can_travel(self, payload: Any) -> None:  # noqa: B027  (within one process it can)
        """Raise UsageError, before anything is sent, if ``payload`` cannot be sent to a worker."""

    def whole(self, behavior: str, parts: Sequence[AgentSteps]) -> AgentSteps | None:
        """Return one view of all ``parts`` (one per worker, in order), without ``final_obs`` and infos.

        None unless they are adjacent in memory.
        """
        return None

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        """Return ``known`` with what only the host knows about this worker."""
        return known

    def describe_all(self, known: ManagerStats) -> ManagerStats:
        """Return ``known`` with what only the host knows about all workers."""
        return known

    def copy_if_shared(self, steps: Steps) -> Steps:
        """Return ``steps``, copied if a worker may write into the arrays."""
        if not self.rewrites_arrays:
            return steps
        own = {}
        for name, each in steps.items():
            own[name] = each.copy()
        return own


def start_report(response: EnvironmentResponse) -> StartReport:
    """Return the report in a response to "start"; raise its error if it failed."""
    if response.name is CommandName.FAILED:
        raise response.payload
    return response.payload  # type: ignore[no-any-return]
