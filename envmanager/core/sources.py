"""The sources of responses, as the core reads them: a list of those that are there, or a wait for the next.

The rule: ``queue.Empty`` stays at this edge. Queues of the library are sources; any other step queue, as a test
or another manager brings it, is read through a ``QueueSource``.
"""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from envmanager.data.steps import EnvironmentResponse


class StepQueue(Protocol):
    """The one queue onto which all workers push their responses to "step". ``get_nowait`` and ``get`` raise Empty.

    The first observations of a worker that replaces another come out of it too, as the response to a "reset".
    """

    def get_nowait(self) -> EnvironmentResponse: ...

    def get(self, *, timeout: float | None = None) -> EnvironmentResponse: ...


class ResponseSource(ABC):
    """The responses of all workers, in order of completion."""

    @abstractmethod
    def take(self) -> Sequence[EnvironmentResponse]:
        """Those that are there; perhaps none. What is returned is out of the source."""

    @abstractmethod
    def wait(self, timeout: float | None, n_wanted: int = 1) -> Sequence[EnvironmentResponse]:
        """At least one, waiting for it; none when the time (in seconds) is up or the manager was closed.

        ``n_wanted``: so many will be waited for, one call after the other. Where it costs much to be woken, a source
        may wait for that many at once, as long as they are steps: a failure is to be known at once.
        """


class QueueSource(ResponseSource):
    """A step queue as a source."""

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
    """``step_queue`` itself if it is a source already."""
    return step_queue if isinstance(step_queue, ResponseSource) else QueueSource(step_queue)
