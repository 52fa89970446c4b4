"""The interface between a manager and its host, which starts and ends workers. Each kind of manager has its own host.

::

    EnvManager ── a step, a reset, a call ──▶ host.workers[i].send / recv
               ── worker i is replaced ──────▶ host.launch(i)
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
    """A queue of all workers' responses to "step", and of replacements' responses to "reset".

    ``get_nowait`` and ``get`` raise ``queue.Empty``.
    """

    def get_nowait(self) -> EnvironmentResponse: ...

    def get(self, *, timeout: float | None = None) -> EnvironmentResponse: ...


class ResponseSource(ABC):
    """A source of the responses of all workers, in order of completion."""

    @abstractmethod
    def take(self) -> Sequence[EnvironmentResponse]:
        """Remove the responses that have arrived and return them. There may be none."""

    @abstractmethod
    def wait(self, timeout: float | None, n_wanted: int = 1) -> Sequence[EnvironmentResponse]:
        """Wait for at least one response; return none after ``timeout`` seconds or if the manager was closed.

        ``n_wanted`` is the number of responses that the caller needs. A source with expensive wake-ups may wait until
        that many steps have arrived, but must return a failure at once.
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


class EnvWorker(Protocol):
    """The interface of a worker, as its manager uses it."""

    worker_id: int

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command, without blocking.

        The response to "step" arrives in the step queue. ``recv`` returns the responses to all other commands.
        """

    def recv(self) -> EnvironmentResponse:
        """Return the response to the last command, or a "failed" response if none arrives before the deadline."""


@attrs.frozen
class HostContext:
    """The parts of a manager that its host uses."""

    entries: Sequence[Entry]
    calls: Calls
    events: EventLog
    create: Callable[[int], EnvWorker]
    """Function that makes a worker from its worker_id. It calls ``EnvManager.create_worker``, which tests replace."""


class WorkerHost(ABC):
    """The owner of a manager's workers. ``launch`` and ``close`` are abstract; the other methods have defaults."""

    step_queue: StepQueue | ResponseSource
    """Queue of all workers' responses to "step"."""
    rewrites_arrays = True
    """Whether a worker writes its next step into the same arrays, so that the manager must copy them."""

    env_factory: Any = None
    """Factory of environments, as the user gave it."""
    steps_some_rows = True
    """Whether a worker can step some of its environments without the others."""
    hands_on_foreign = False
    """Whether actions reach the environments as arrays of PyTorch or JAX, if they are such."""

    context: HostContext

    def __init__(self) -> None:
        self.workers: list[Any] = []
        """Workers in order of worker_id."""

    def open(self, context: HostContext) -> None:
        """Acquire the resources that the workers share. Called once, before the first launch."""
        self.context = context

    @abstractmethod
    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        """Start and return a worker, without waiting until its predecessor has ended. Generation 0 is the first.

        Raises OSError if the worker cannot be started. The manager counts this as a failure of the worker.
        """

    def make_worker(self, worker_id: int) -> EnvWorker:
        """Start and return a worker. Only hosts whose ``launch`` calls ``context.create`` implement this method."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Release everything. Called when no call is in progress, and again if the first time was interrupted."""

    def await_start(self) -> dict[int, StartReport]:
        """Wait until the first workers have made their environments. Return their reports by worker_id.

        Raises the error of the first worker that failed to make its environments.
        """
        for worker in self.workers:
            worker.send(CommandName.START)
        return {worker.worker_id: start_report(worker.recv()) for worker in self.workers}

    def have_started(self, specs: BehaviorSpecs, reports: Mapping[int, StartReport]) -> None:  # noqa: B027
        """Prepare for the first step. All workers have started, and ``specs`` has all behaviors."""

    def stop(self) -> None:  # noqa: B027  (workers may end with close)
        """End the workers while a call is in progress, in another thread or further up the stack. ``close`` follows."""

    def wake(self) -> None:  # noqa: B027  (a host without waits needs none)
        """Unblock a thread that waits on the step queue, because the manager was closed. It receives no response."""

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        """Reset a replacement that was just launched.

        Return its response, or None if the response will arrive in the step queue.
        """
        self.workers[worker_id].send(CommandName.RESET, config)
        return self.workers[worker_id].recv()  # type: ignore[no-any-return]

    def is_gone(self, worker_id: int) -> bool:
        """Return whether a worker that failed must be replaced before it can be reset."""
        return False

    def check_can_travel(self, payload: Any) -> None:  # noqa: B027  (within one process it can)
        """Raise UsageError if ``payload`` cannot be sent to a worker. Called before anything is sent."""

    def whole(self, behavior: str, parts: Sequence[AgentSteps]) -> AgentSteps | None:
        """Return one view of all ``parts`` (one per worker, in order), without ``final_obs`` and infos.

        Return None unless the parts are adjacent in memory.
        """
        return None

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        """Return ``known`` with the fields filled in that only the host knows, for one worker."""
        return known

    def describe_all(self, known: ManagerStats) -> ManagerStats:
        """Return ``known`` with the fields filled in that only the host knows, for all workers."""
        return known

    def copy_if_shared(self, steps: Steps) -> Steps:
        """Return ``steps``, or a copy if a worker may write into the arrays."""
        if not self.rewrites_arrays:
            return steps
        own = {}
        for name, each in steps.items():
            own[name] = each.copy()
        return own


def start_report(response: EnvironmentResponse) -> StartReport:
    """Return the report in a response to "start". Raise the error in a "failed" response."""
    if response.name is CommandName.FAILED:
        raise response.payload
    return response.payload  # type: ignore[no-any-return]
