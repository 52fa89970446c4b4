"""The sources of responses: a list of the responses that have arrived, or a wait for the next.

The rule: ``queue.Empty`` stays in this module. Queues of the library are sources; any other step queue, of a test or
another manager, is read through a ``QueueSource``.
"""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from envmanager.data.steps import EnvironmentResponse


class StepQueue(Protocol):
    """The queue of all workers' responses to "step". ``get_nowait`` and ``get`` raise ``queue.Empty``.

    The first observations of a replaced worker come out of it too, as the response to a "reset".
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

        ``n_wanted``: number of responses for which the caller is going to wait. A source may wait for all of them at
        once if waking is dear, as long as they are steps: a failure is reported at once.
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
    """Return a source that reads ``step_queue``; itself if it is a source."""
    return step_queue if isinstance(step_queue, ResponseSource) else QueueSource(step_queue)
