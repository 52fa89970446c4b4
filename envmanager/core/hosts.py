"""The interface of what makes, keeps and ends a manager's workers: the part that differs between kinds of managers.

::

    EnvManager ── a step, a reset, a call ──▶ host.workers[i].send / recv
               ── worker i is to begin anew ─▶ host.launch(i)
               ◀── responses ── host.step_queue

The rule: the manager asks, the host never calls back, so a host can be read and tested alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from envmanager.core.calls import Calls
from envmanager.core.sources import ResponseSource, StepQueue
from envmanager.core.table import Entry
from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import AgentSteps, CommandName, EnvironmentResponse, StartReport, Steps
from envmanager.observe.events import EventLog
from envmanager.observe.stats import ManagerStats, WorkerStats
from envmanager.options import ResetConfig


class EnvWorker(Protocol):
    """A worker as its manager sees it."""

    worker_id: int

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command, without blocking.

        The response to "step" comes out of the step queue, every other out of ``recv``.
        """
        ...

    def recv(self) -> EnvironmentResponse:
        """The response to the last command, within its deadline; a "failed" response when there is none."""
        ...


@attrs.frozen
class HostContext:
    """The parts of a manager that its host works with."""

    entries: Sequence[Entry]
    calls: Calls
    events: EventLog
    create: Callable[[int], EnvWorker]
    """Makes a worker by the manager's ``create_worker``, which tests replace."""


class WorkerHost(ABC):
    """Implement ``launch`` and ``close``; the other methods have defaults for workers that can always be reset."""

    step_queue: StepQueue | ResponseSource
    """Where all workers put their responses to "step"."""
    rewrites_arrays = True
    """Whether a worker writes its next step into the same arrays: they are then copied before they are handed out."""

    env_factory: Any = None
    """What environments are made of, as the user gave it."""
    steps_some_rows = True
    """Whether a worker can step a part of its environments; else those of one worker move together."""

    context: HostContext

    def __init__(self) -> None:
        self.workers: list[Any] = []
        """By worker_id."""

    def open(self, context: HostContext) -> None:
        """Acquire what the workers share. Called once, before the first launch."""
        self.context = context

    @abstractmethod
    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        """A new worker, also in the place of one that failed or is to be recycled, which must not be waited for.

        Generation 0 is the first. OSError says that it cannot be started, which counts as one more failure.
        """

    def make_worker(self, worker_id: int) -> EnvWorker:
        """Make a worker. Only hosts whose ``launch`` goes through ``context.create`` have this."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Give everything back, when no call is on its way any more. Called again when it was interrupted."""

    def await_start(self) -> dict[int, StartReport]:
        """Wait until the first workers have made their environments; what they report of them, by worker_id.

        Raises the error of the first that could not.
        """
        for worker in self.workers:
            worker.send(CommandName.START)
        return {worker.worker_id: start_report(worker.recv()) for worker in self.workers}

    def have_started(self, specs: BehaviorSpecs, reports: Mapping[int, StartReport]) -> None:  # noqa: B027
        """All have started; ``specs`` are those of all their environments."""

    def stop(self) -> None:  # noqa: B027  (workers may end with close)
        """End the workers, although a call is on its way, in another thread or around this one; ``close`` follows."""

    def wake(self) -> None:  # noqa: B027  (a host whose queue nobody waits for needs none)
        """Have a wait in another thread for the step queue end with nothing, because the manager is closed."""

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        """Have a worker that was launched in another's place reset.

        The response, or None when it comes out of the step queue, as that to "reset".
        """
        self.workers[worker_id].send(CommandName.RESET, config)
        return self.workers[worker_id].recv()  # type: ignore[no-any-return]

    def is_gone(self, worker_id: int) -> bool:
        """Whether a worker that failed must be replaced before it can be reset."""
        return False

    def check_can_travel(self, payload: Any) -> None:  # noqa: B027  (within one process it can)
        """Raise UsageError, before anything is sent, when ``payload`` cannot reach a worker."""

    def whole(self, behavior: str, parts: Sequence[AgentSteps]) -> AgentSteps | None:
        """``parts``, those of all workers in order, as one, if they lie together; views, without ends and infos."""
        return None

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        """``known``, with what only the host knows of the worker."""
        return known

    def describe_all(self, known: ManagerStats) -> ManagerStats:
        """``known``, with what only the host knows of all of them."""
        return known

    def own(self, steps: Steps) -> Steps:
        """``steps`` in arrays that stay as they are."""
        if not self.rewrites_arrays:
            return steps
        own = {}
        for name, each in steps.items():
            own[name] = each.copy()
        return own


def start_report(response: EnvironmentResponse) -> StartReport:
    """The report in a response to "start"; raises its error when it is a failure."""
    if response.name is CommandName.FAILED:
        raise response.payload
    return response.payload  # type: ignore[no-any-return]
