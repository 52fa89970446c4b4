"""Which answers are handed out, and when: the rules of Wait.

::

    step queue ──▶ arrive ──▶ ready ──▶ collect ──▶ hand_out     failures go through Recovery first

The rule: what arrived stays in ``ready``, at most one answer per worker and perhaps its failure after it, until all
that is made of it exists; so an error, an interrupt or a time-out loses nothing.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from envmanager.errors import EnvManagerError, ManagerClosed, UsageError
from envmanager.options import Wait
from envmanager.recovery import Recovery
from envmanager.steps import CommandName, EnvironmentResponse
from envmanager.timing import WaitTimes


class StepQueue(Protocol):
    """The one queue onto which all workers push the answers to "step". ``get_nowait`` and ``get`` raise queue.Empty.

    The first observations of a worker that replaces another come out of it too, as the answer to a "reset".
    """

    def get_nowait(self) -> EnvironmentResponse: ...

    def get(self, *, timeout: float | None = None) -> EnvironmentResponse: ...

    def empty(self) -> bool: ...


class Gathering:
    """Collects answers for one manager."""

    def __init__(self, workers: list[Any], n_workers: int, recovery: Recovery) -> None:
        self._workers = workers
        self._recovery = recovery
        self.ready: list[EnvironmentResponse] = []
        self.handed_out = [0] * n_workers
        """Steps handed out since the reset, by worker: what max_lead compares."""
        self.holds_back = False
        """Whether max_lead keeps answers back (send/recv), because nobody else keeps the actions back."""
        self.closed = False
        self.waits = WaitTimes()
        self._arrived: deque[EnvironmentResponse] = deque()
        self._is_arriving = False
        self._in_flight = 0

    def collect(self, step_queue: StepQueue, wait: Wait) -> list[EnvironmentResponse]:
        """What is ready, by the rules of ``wait``; it stays ready until ``hand_out``. Raises a WorkerError among it."""
        deadline = None if wait.timeout_s is None else time.monotonic() + wait.timeout_s
        self._take_arrived(step_queue)
        if len(self._offered(wait)) < wait.min_ready:
            self._wait_for_more(step_queue, wait, deadline)
        return self._chosen(wait)

    def _wait_for_more(self, step_queue: StepQueue, wait: Wait, deadline: float | None) -> None:
        self._count_in_flight()
        if not self.ready and not self._in_flight:
            raise UsageError(self._nothing_in_flight())
        while not self._enough(wait):
            start_at = self._recovery.next_start_at()
            wake_at = min((at for at in (deadline, start_at) if at is not None), default=None)
            try:
                timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
                self.arrive(self.waits.get(step_queue, timeout=timeout))
            except queue.Empty:
                self._require_open()
                if wake_at is None:
                    raise RuntimeError("a step queue gave up without a timeout") from None
                if wake_at == deadline:
                    return
            self._take_arrived(step_queue)

    def _take_arrived(self, step_queue: StepQueue) -> None:
        if self._recovery.replacements:
            self._start_due()
        if self._arrived:
            self.arrive(self._arrived.popleft())
        try:
            while True:
                self.arrive(step_queue.get_nowait())
        except queue.Empty:
            pass

    def _require_open(self) -> None:
        if self.closed:  # by another thread, while this one waited
            raise ManagerClosed("a call that waits")

    def _start_due(self) -> None:
        # Not `+=`: starting a replacement may change what is ready.
        failed = self._recovery.start_due()
        self.ready.extend(failed)
        self._count_in_flight()

    def arrive(self, response: EnvironmentResponse) -> None:
        """Take an answer; one that comes of dealing with another has its turn after that."""
        if self.closed:
            self._require_open()
        if self._is_arriving:
            self._arrived.append(response)
            return
        self._is_arriving = True
        try:
            self._take(response)
            while self._arrived:
                self._take(self._arrived.popleft())
        finally:
            self._is_arriving = False

    def _take(self, response: EnvironmentResponse) -> None:
        if response.name is CommandName.STEP:
            try:
                is_recycled = self._recovery.recycles(response)
            except BaseException:  # no memory for the copy that it takes: the answer has its turn again
                self._arrived.append(response)
                raise
            if is_recycled:
                self._start_due()
            else:
                self.ready.append(response)
        elif response.name is CommandName.FAILED:
            self.fail(response)
        elif response.worker_id in self._recovery.replacements:
            self._begin(response)
        else:
            self.ready.append(response)

    def _count_in_flight(self) -> None:
        self._in_flight = sum([worker.waiting for worker in self._workers])

    def fail(self, response: EnvironmentResponse) -> None:
        """A worker failed: it is replaced, or what is to be said of it is ready."""
        replacement = self._recovery.replacements.get(response.worker_id)
        if replacement is not None and replacement.response is not None:
            self.ready = [other for other in self.ready if other is not replacement.response]
        is_answered = self._answer_of(response.worker_id) is not None
        said = self._recovery.failed(response, is_answered=is_answered)
        self.ready.extend(said)
        self._count_in_flight()

    def fail_quietly(self, response: EnvironmentResponse) -> Exception:
        """A worker failed in a call, which raises the error that is returned here; it is not raised again."""
        self.fail(response)
        error = self._recovery.out.get(response.worker_id)
        if error is None:
            return response.payload  # type: ignore[no-any-return]
        self.ready = [other for other in self.ready if other.payload is not error]
        self._workers[response.worker_id].waiting = self._answer_of(response.worker_id) is not None
        return error

    def await_replacement(self, step_queue: StepQueue, worker_id: int) -> None:
        """Wait until a worker that is being replaced is there again, or given up; what arrives meanwhile is kept."""
        while True:
            self._start_due()
            replacement = self._recovery.replacements.get(worker_id)
            if replacement is None or replacement.response is not None:
                return
            start_at = self._recovery.next_start_at()
            timeout = None if start_at is None else max(0.0, start_at - time.monotonic())
            try:
                self.arrive(step_queue.get(timeout=timeout))
            except queue.Empty:
                self._require_open()

    def _answer_of(self, worker_id: int) -> EnvironmentResponse | None:
        return next((response for response in self.ready if response.worker_id == worker_id), None)

    def _begin(self, response: EnvironmentResponse) -> None:
        """A replacement's first observations: handed out once the last answer of the worker before it has been."""
        is_answered = self._answer_of(response.worker_id) is not None
        first = self._recovery.begun(response)
        if not is_answered:
            self.ready.append(first)

    def _enough(self, wait: Wait) -> bool:
        in_flight = self._in_flight  # within one call only failures change it, those of replacements too
        n_offered = len(self._offered(wait))
        if wait.max_lead is None:
            return bool(n_offered >= min(wait.min_ready, in_flight))
        n_held = sum(self._is_held_back(response, wait) for response in self.ready)
        if n_held and n_held == in_flight:
            raise UsageError(
                f"every worker in flight is max_lead={wait.max_lead} steps ahead of the slowest: send actions to "
                f"the environments of worker {self.handed_out.index(self.slowest())}."
            )
        return bool(n_offered >= min(wait.min_ready, in_flight - n_held))

    def _offered(self, wait: Wait) -> list[EnvironmentResponse]:
        """What may be handed out of ``ready``: no answers held back, and a failure only after its worker's answer."""
        if wait.max_lead is None and not self._recovery.out:
            return self.ready
        offered = [response for response in self.ready if not self._is_held_back(response, wait)]
        return [
            each for each in offered if each.name is not CommandName.FAILED or self._answer_of(each.worker_id) is each
        ]

    def _chosen(self, wait: Wait) -> list[EnvironmentResponse]:
        """What may be handed out of ``ready``; a failure among it is raised, once, and the rest stays."""
        chosen = self._offered(wait)[: wait.max_ready]
        for response in chosen:
            if response.name is CommandName.FAILED:
                self.ready = [other for other in self.ready if other is not response]
                self._workers[response.worker_id].waiting = False
                raise response.payload
        return chosen

    def hand_out(self, responses: Sequence[EnvironmentResponse]) -> None:
        """All that is made of these responses exists: they are handed out."""
        taken = {id(response) for response in responses}
        self.ready = [response for response in self.ready if id(response) not in taken]
        for response in responses:
            self._hand_out(response)

    def _hand_out(self, response: EnvironmentResponse) -> None:
        """The worker is not waiting any more, unless it was replaced meanwhile: then that is told next."""
        worker_id = response.worker_id
        replacement = self._recovery.replacements.get(worker_id)
        if replacement is not None:
            replacement = self._recovery.handed_out(response)
        self._workers[worker_id].waiting = replacement is not None
        if replacement is not None or worker_id in self._recovery.dropped:
            self._recovery.unanswered.add(worker_id)
        if replacement is not None and replacement.response is not None:
            self.ready.append(replacement.response)
        if response.name is CommandName.STEP:
            self.handed_out[worker_id] += 1

    def drain(
        self, collect: Callable[[Wait], list[EnvironmentResponse]]
    ) -> tuple[dict[int, EnvironmentResponse], EnvManagerError | None]:
        """Wait for all that is in flight, failures too: the answers by worker, and the first failure."""
        answers: dict[int, EnvironmentResponse] = {}
        failure: EnvManagerError | None = None
        while self.ready or any(worker.waiting for worker in self._workers):
            try:
                responses = collect(Wait.all())
            except ManagerClosed:
                raise
            except EnvManagerError as error:
                failure = failure or error
                continue
            self.hand_out(responses)
            answers.update({response.worker_id: response for response in responses})
        return answers, failure

    def _is_held_back(self, response: EnvironmentResponse, wait: Wait) -> bool:
        if wait.max_lead is None or not self.holds_back or response.name is not CommandName.STEP:
            return False
        return self.handed_out[response.worker_id] - self.slowest() >= wait.max_lead

    def restart_counting(self) -> None:
        """After a reset nobody is ahead of anybody."""
        self.handed_out[:] = [0] * len(self.handed_out)
        self.holds_back = False

    def slowest(self) -> int:
        """The fewest steps handed out by any worker that takes part."""
        counts = [count for worker_id, count in enumerate(self.handed_out) if worker_id not in self._recovery.out]
        return min(counts, default=0)

    def _nothing_in_flight(self) -> str:
        out = self._recovery.out
        if len(out) == len(self._workers):
            first_line = str(next(iter(out.values()))).partition("\n")[0]
            return f"every worker has failed; call reset() to start them afresh. The first failure was: {first_line}"
        return "nothing is in flight: send() actions first."
