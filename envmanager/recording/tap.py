"""The tap between a kernel and its host, through which all passes by which the kernel decides.

::

    kernel ── send, take, get ───────────────▶ Tap ──▶ the host of the manager's kind, its workers and its source
           ── launch, recv, is_gone, now, … ──▶      ◀── answers, which the tap returns, records, holds back or makes

There are three: a Recorder writes down what passes, a Tape answers in place of a host, and an Ordered waits until the
answers come in the order of a tape. A manager without one has its host itself, and pays nothing.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from envmanager.data.steps import EnvironmentResponse, StartReport
from envmanager.kernel.host import EnvWorker, HostContext, QueueSource, ResponseSource, WorkerHost
from envmanager.options import ResetConfig


class Tap(ResponseSource):
    """The base class of taps. The kernel takes the responses to steps from it, as it would from ``source``."""

    source: ResponseSource
    """The source of the manager's kind."""

    def open(self, context: HostContext, source: ResponseSource) -> None:
        """Store ``source``. Called before the first launch."""
        self.source, self.steps_when_asked = source, source.steps_when_asked

    @abstractmethod
    def send(self, worker_id: int, name: str, payload: Any, do: Callable[[str, Any], None]) -> None:
        """Pass a command on. ``do`` sends it to the worker."""

    @abstractmethod
    def call(self, what: str, worker_id: int, asked: Any, do: Callable[[], Any]) -> Any:
        """Return what ``do`` returns, or what was recorded of it, or raise that.

        ``what`` is the name of a method of the host, or ``"recv"`` of a worker (-1: none), ``asked`` what it was given.
        """

    def lost(self, worker_id: int, error: Exception, env_ids: Sequence[int] | None = None) -> None:
        """Take note that the episodes of a worker, or only those of ``env_ids``, are lost."""

    def wake(self) -> None:
        """Unblock any thread that waits for the tap, because the manager is closed."""

    @abstractmethod
    def close(self) -> None:
        """Release the file. Called when the manager closes, and when it is garbage."""

    def listen(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> Callable[[], None]:
        return self.source.listen(loop, ring)


class _Tapped:
    """The base class of objects seen through a tap, which have the attributes of ``inner`` in addition to their own."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.inner, name)


class TappedWorker(_Tapped):
    """A worker as its kernel sees it."""

    def __init__(self, worker_id: int, worker: EnvWorker, tap: Tap) -> None:
        self.worker_id, self.inner, self._tap = worker_id, worker, tap

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command; see ``EnvWorker``."""
        self._tap.send(self.worker_id, name, payload, self.inner.send)

    def recv(self) -> EnvironmentResponse:
        """Return the response to the last command; see ``EnvWorker``."""
        response: EnvironmentResponse = self._tap.call("recv", self.worker_id, None, self.inner.recv)
        return response


class TappedHost(_Tapped):
    """A host as its kernel sees it. What decides nothing, such as ``describe``, is asked without the tap."""

    def __init__(self, host: WorkerHost, tap: Tap) -> None:
        self.inner, self.tap = host, tap
        self.workers: list[TappedWorker] = []
        self.lost = tap.lost
        weakref.finalize(self, tap.close)

    def open(self, context: HostContext) -> None:
        self.inner.open(context)
        source = self.inner.step_queue
        self.tap.open(context, source if isinstance(source, ResponseSource) else QueueSource(source, context.calls))
        self.step_queue = self.tap

    def launch(self, worker_id: int, generation: int) -> TappedWorker:
        self.tap.call("launch", worker_id, generation, partial(self._launch, worker_id, generation))
        return TappedWorker(worker_id, self.inner.workers[worker_id], self.tap)

    def _launch(self, worker_id: int, generation: int) -> None:
        self.inner.workers[worker_id : worker_id + 1] = [self.inner.launch(worker_id, generation)]

    def await_start(self) -> dict[int, StartReport]:
        reports, told = self.tap.call("await_start", -1, None, self._await_start)
        self.accepts_device_arrays, self.steps_some_rows, self.moves_all, *more = told
        self.start_at_most, self.tells_memory, self.is_asked = more
        return reports  # type: ignore[no-any-return]

    def _await_start(self) -> tuple[dict[int, StartReport], tuple[Any, ...]]:
        host = self.inner
        reports = host.await_start()
        told = host.accepts_device_arrays, host.steps_some_rows, host.moves_all
        return reports, (*told, host.start_at_most, host.tells_memory, host.is_asked)

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        do = partial(self.inner.begin_again, worker_id, config)
        return self.tap.call("begin_again", worker_id, config, do)  # type: ignore[no-any-return]

    def is_gone(self, worker_id: int) -> bool:
        return self.tap.call("is_gone", worker_id, None, partial(self.inner.is_gone, worker_id))  # type: ignore[no-any-return]

    def why_due(self, worker_id: int) -> str:
        return self.tap.call("why_due", worker_id, None, partial(self.inner.why_due, worker_id))  # type: ignore[no-any-return]

    def check_can_travel(self, payload: Any) -> None:
        self.tap.call("check_can_travel", -1, None, partial(self.inner.check_can_travel, payload))

    def now(self) -> float:
        return self.tap.call("now", -1, None, self.inner.now)  # type: ignore[no-any-return]

    def wake(self) -> None:
        self.tap.wake()
        self.inner.wake()

    def hurry(self) -> None:
        self.inner.hurry()

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            self.tap.close()
