"""Collection of responses under the rules of ``options.Wait``: how many to wait for, and which ones to deliver.

::

    source ──▶ receive ──▶ outbox of the worker's entry ──▶ collect ──▶ StepInfos or a batch ──▶ delivered

The rule: a step that has arrived stays in its entry's outbox until the StepInfo or batch made from it exists, or a
reset discards it. So another worker's error, an interrupt or a timeout loses no step.
"""

from __future__ import annotations

import itertools
import math
import pkgutil
import time
from collections.abc import Sequence
from typing import Any

from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import CallStopped, EnvManagerError, ManagerClosed, UsageError
from envmanager.kernel.calls import Calls
from envmanager.kernel.host import ResponseSource, WorkerHost
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.table import RECYCLED, Entry, WorkerState, WorkerTable
from envmanager.observe.timing import WaitTimes
from envmanager.options import Wait

_STEP, _IN_FLIGHT, _READY = CommandName.STEP, WorkerState.IN_FLIGHT, WorkerState.READY
_ALL = Wait.all()
_STOPPING_EVERY_S = 0.001


class Collector:
    """The part of a manager that receives the workers' responses and chooses which to deliver to the trainer."""

    def __init__(self, table: WorkerTable, recovery: Recovery, calls: Calls) -> None:
        self.source: ResponseSource
        self.host: WorkerHost
        self.waits = WaitTimes()
        self.stops_at = math.inf
        """Time (monotonic seconds, not of a recording) from which a wait for steps raises CallStopped."""
        self.is_recorded = False
        """Whether deliveries are to depend on nothing but what a recording has."""
        self.shares: Any = None
        """What each kind of environments has had since the reset, if the last wait gave them shares."""
        self._table = table
        self._recovery = recovery
        self._calls = calls

    def collect(self, wait: Wait, *, max_lead: int | None = None, one_kind: bool = False) -> list[Entry]:
        """Wait for responses as ``wait`` specifies. Return the entries whose next response is to be delivered now.

        If a failure has arrived, raises the first one instead. Raises UsageError if no response can arrive. With
        ``max_lead``, the steps of workers at least that many steps ahead of the slowest stay queued for a later call;
        so do those of kinds that are ahead of their share and, if only ``one_kind`` is to be delivered, of the others.
        """
        deadline = math.inf if wait.timeout_s is None else self.host.now() + wait.timeout_s
        table = self._table
        if wait.shares is not None and (self.shares is None or not self.shares.are_of(wait)):
            if self.is_recorded and wait.shares_of == "time":
                raise UsageError('no recording repeats the time that steps take: with record or order, share "steps".')
            shares = pkgutil.resolve_name("envmanager.kernel.shares:Shares")  # which few managers need
            self.shares = shares(wait, table, self._recovery.events)
        is_limited = max_lead is not None or wait.shares is not None
        self.receive(self.source.take())
        n_ready = len(table.ready)
        if (n_ready < wait.min_ready and n_ready < len(table.entries)) or is_limited:
            self._wait_for_more(wait, deadline, max_lead)
        if table.failures:
            entry = next(iter(table.failures))
            error = entry.outbox[0].payload
            table.delivered([entry])  # so it is raised only once; the others stay ready
            raise error
        offered = self._offered(wait, max_lead) if is_limited else table.ready
        if one_kind and offered:
            kind = next(iter(offered)).kind
            offered = [entry for entry in offered if entry.kind == kind]
        chosen = list(offered if wait.max_ready is None else itertools.islice(offered, wait.max_ready))
        if self.shares is not None:
            self.shares.count(chosen)
        return chosen

    def receive(self, responses: Sequence[EnvironmentResponse]) -> None:
        """Queue ``responses`` in their workers' outboxes, or record failures. Then start replacements that are due."""
        entries, ready = self._table.entries, self._table.ready
        usual = None if self._table.counts_each else _STEP
        for response in responses:
            entry = entries[response.worker_id]
            is_usual = response.name is usual and entry.state is _IN_FLIGHT and response.specs is None
            if is_usual and entry.restore is None:
                entry.state, entry.outbox = _READY, (response,)
                ready[entry] = None
            else:
                self._require_open()
                self._recovery.arrive(response)
        if self._recovery.scheduled:
            self._require_open()
            self._recovery.start_due()

    def _offered(self, wait: Wait, max_lead: int | None) -> list[Entry]:
        """Return the ready entries whose step neither shares nor ``max_lead`` hold back, in the order of arrival.

        Raises UsageError if ``max_lead`` holds all workers in flight back, so that no other can become ready.
        """
        table = self._table
        if max_lead is None:
            held = () if wait.shares is None else self.shares.held_back()
            return [entry for entry in table.ready if entry.kind not in held or entry.outbox[0].name is not _STEP]
        limit = table.slowest() + max_lead
        offered = [
            entry for entry in table.ready if entry.steps_since_reset < limit or entry.outbox[0].name is not _STEP
        ]
        if not offered and table.ready and len(table.ready) == table.n_waiting:
            slowest = min(table.entries, key=lambda each: (not table.is_compared(each), each.steps_since_reset))
            raise UsageError(
                f"every worker in flight is max_lead={max_lead} steps ahead of the slowest: send actions to the "
                f"environments of worker {slowest.worker_id}."
            )
        return offered

    def _wait_for_more(self, wait: Wait, deadline: float, max_lead: int | None) -> None:
        """Wait for as many responses as ``wait`` needs, or until ``deadline``. Raises UsageError if none can arrive."""
        table = self._table
        if not table.n_waiting:
            if table.book.rests:
                return
            errors = [entry.error for entry in table.entries if entry.error is not None]
            if len(errors) < len(table.entries):
                if max_lead is None and wait.max_lead is not None and table.n_dropped:
                    return  # a worker that was dropped has held the others back; the next step() sends them actions
                raise UsageError("nothing is in flight: send() actions first.")
            cause = str(errors[0]).partition("\n")[0]
            raise UsageError(
                f"every worker has failed; call reset() to start them afresh. The first failure was: {cause}"
            )
        while True:
            is_limited = max_lead is not None or wait.shares is not None
            n_held_back = len(table.ready) - len(self._offered(wait, max_lead)) if is_limited else 0
            n_wanted = min(wait.min_ready, table.n_waiting - n_held_back) - (len(table.ready) - n_held_back)
            if n_wanted <= 0:
                return
            wake_at = min(deadline, self._recovery.next_start_at()) if self._recovery.scheduled else deadline
            began_ns = time.perf_counter_ns()
            try:
                responses = self.source.get(n_wanted if wake_at == math.inf else 1, wake_at)
            finally:
                self.waits.add(began_ns)
            if not responses:
                self._require_open()
                if self.stops_at < math.inf:  # the source has been woken, and does not block any more
                    if time.monotonic() >= self.stops_at:
                        raise CallStopped("the wait for steps was stopped. The steps in flight come later.")
                    time.sleep(_STOPPING_EVERY_S)
                elif wake_at == math.inf:
                    raise RuntimeError("a step queue gave up without a timeout")
                elif wake_at == deadline:
                    return
            self.receive(responses)

    def await_replacements(self, entries: Sequence[Entry]) -> None:
        """Wait until none of these workers is being replaced: each has sent first observations, or was given up.

        If episodes are kept, also wait for steps in flight, so that what is called comes after them. Then one that
        failed after a step that was not delivered cannot be made again before: its error is raised.
        """
        self.receive(())
        while True:
            held = [entry for entry in entries if entry.is_kept and entry.outbox]
            for entry in held:
                cause = None if entry.replacement is None else entry.replacement.cause
                if cause is not None and cause.phase != RECYCLED:  # else the old one is still there
                    raise cause.with_traceback(None)
            replaced = [each for each in entries if each.replacement is not None and not each.replacement.has_begun]
            in_flight = [each for each in entries if each.log is not None and each.state is _IN_FLIGHT]
            if {*replaced, *in_flight} <= {*held}:
                return
            responses = self.source.get(1, self._recovery.next_start_at())
            if not responses:
                self._require_open()
            self.receive(responses)

    def drain(self) -> tuple[dict[int, EnvironmentResponse], EnvManagerError | None]:
        """Await all outstanding responses. Return the workers' last responses by id, and the first failure or None."""
        responses: dict[int, EnvironmentResponse] = {}
        failure: EnvManagerError | None = None
        while self._table.n_waiting:
            try:
                chosen = self.collect(_ALL)
            except ManagerClosed:
                raise
            except EnvManagerError as error:
                failure = failure or error
                continue
            responses.update({entry.worker_id: entry.outbox[0] for entry in chosen})
            self._table.delivered(chosen)
        return responses, failure

    def _require_open(self) -> None:
        self._calls.require_open("a call that waits")  # another thread may have closed the manager meanwhile
