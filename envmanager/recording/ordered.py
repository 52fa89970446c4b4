"""Live environments in the order of a recording: each response is delivered when it was, however fast it comes.

::

    source of the kind ──▶ held back ── in the order of run.emrec ──▶ manager

So a fault that needs a certain order comes again, with a debugger in the environment. What differs from the recording
is an error: an action, an observation, a failure that was none. A worker that had failed is failed again.
"""

from __future__ import annotations

import math
from asyncio import AbstractEventLoop
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from envmanager.data.steps import CommandName, EnvironmentResponse, StartReport
from envmanager.errors import BadObservation, EnvRaised, UsageError
from envmanager.kernel.host import EnvWorker, ResponseSource, WorkerHost
from envmanager.options import ResetConfig
from envmanager.recording.codec import thawed_response, unpickled
from envmanager.recording.recorder import HostAround
from envmanager.recording.tape import Tape

_FAILED = CommandName.FAILED


class OrderedWorker:
    """A worker whose commands are compared with the recorded ones."""

    def __init__(self, worker: EnvWorker, tape: Tape) -> None:
        self.worker_id, self._worker, self._tape = worker.worker_id, worker, tape

    def send(self, name: str, payload: Any = None) -> None:
        """Compare a command with the recorded one, and send it."""
        self._tape.compare(self.worker_id, CommandName(name).value, payload)
        self._worker.send(name, payload)

    def recv(self) -> EnvironmentResponse:
        """Return the answer to the last command, or the failure that it was."""
        return self._tape.agreed(self._worker.recv(), self._tape.next("recv", self.worker_id))

    def __getattr__(self, name: str) -> Any:
        if name == "_worker":
            raise AttributeError(name)
        return getattr(self._worker, name)


class OrderedSource(ResponseSource):
    """A source that returns responses in the recorded order."""

    def __init__(self, source: ResponseSource, tape: Tape) -> None:
        self._source, self._tape = source, tape
        self.held: defaultdict[int, deque[EnvironmentResponse]] = defaultdict(deque)
        """Responses that have arrived before their turn, by worker_id."""

    @property
    def steps_when_asked(self) -> bool:  # type: ignore[override]
        return self._source.steps_when_asked

    def take(self) -> Sequence[EnvironmentResponse]:
        return self._in_turn("take")

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        return self._in_turn("get")

    def _in_turn(self, call: str) -> Sequence[EnvironmentResponse]:
        in_turn = []
        for form in self._tape.arrived(call):
            response = self.response_to(form)
            if response is None:
                break
            in_turn.append(response)
        return in_turn

    def response_to(self, form: tuple[Any, ...]) -> EnvironmentResponse | None:
        """Wait for the live response in place of a recorded one. Return None when the manager was closed."""
        name, worker_id, *_ = form
        held = self.held[worker_id]
        if name == _FAILED and not held:
            failure = thawed_response(form)
            if not isinstance(failure.payload, EnvRaised | BadObservation):
                return failure  # it may not fail this time, and is replaced
        while not held:
            arrived = self._source.take() or self._source.get(1, math.inf)
            if not arrived:
                return None
            for response in arrived:
                self.held[response.worker_id].append(response)
        return self._tape.agreed(held.popleft(), form)

    def listen(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> Callable[[], None]:
        return self._source.listen(loop, ring)


class OrderedHost(HostAround):
    """A host whose workers respond in the order of a recording."""

    def __init__(self, host: WorkerHost, tape: Tape) -> None:
        super().__init__(host)
        self._tape = tape
        self._source: OrderedSource

    def around_source(self, source: ResponseSource) -> ResponseSource:
        self._source = OrderedSource(source, self._tape)
        return self._source

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        _, error = self._tape.next("launch", worker_id)
        if error is not None:
            raise unpickled(error)
        self._source.held.pop(worker_id, None)
        return OrderedWorker(super().launch(worker_id, generation), self._tape)

    def await_start(self) -> dict[int, StartReport]:
        reports = super().await_start()
        self._tape.next("started")
        return reports

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        response = super().begin_again(worker_id, config)
        if response is not None:  # within this process at once, though perhaps not in the recorded run
            self._source.held[worker_id].append(response)
        _, form = self._tape.next("begin_again", worker_id)
        return None if form is None else self._source.response_to(form)

    def is_gone(self, worker_id: int) -> bool:
        was_gone = self._tape.next("is_gone", worker_id)
        return was_gone or super().is_gone(worker_id)

    def check_can_travel(self, payload: Any) -> None:
        self._tape.raise_refused()
        super().check_can_travel(payload)

    def now(self) -> float:
        return self._tape.next("now")  # type: ignore[no-any-return]

    def close(self) -> None:
        super().close()
        self._tape.close()


def ordered(host: WorkerHost, path: str, workers: list[list[int]]) -> WorkerHost:
    """Return a host that delivers what ``host`` does in the order of a recording.

    ``workers``: the environments of each. Raises UsageError if the recording has others, and the errors of ``Tape``.
    """
    tape = Tape(path)
    recorded = tape.about["env_ids"]
    if recorded != workers:
        tape.close()
        raise UsageError(
            f"{path} was recorded with the environments {recorded} in its workers, and this manager has {workers}: "
            "take the same n_envs and n_workers, or the kind simple, which takes those of the recording."
        )
    return OrderedHost(host, tape)
