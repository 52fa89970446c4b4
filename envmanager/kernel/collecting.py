"""Collection of responses under the rules of ``options.Wait``: how many to wait for, and which ones to deliver.

::

    source ──▶ receive ──▶ outbox of the worker's entry ──▶ collect ──▶ StepInfos or a batch ──▶ delivered

The rule: a step that has arrived stays in its entry's outbox until the StepInfo or batch made from it exists, or a
reset discards it. So another worker's error, an interrupt or a timeout loses no step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError, ManagerClosed, UsageError
from envmanager.kernel.calls import Calls
from envmanager.kernel.host import ResponseSource
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.table import Entry, WorkerState, WorkerTable
from envmanager.observe.timing import WaitTimes
from envmanager.options import Wait

_IN_FLIGHT, _READY, _STEP, _FAILED = WorkerState.IN_FLIGHT, WorkerState.READY, CommandName.STEP, CommandName.FAILED
_ALL = Wait.all()


class Collector:
    """The part of a manager that receives the workers' responses and chooses which to deliver to the trainer."""

    def __init__(self, table: WorkerTable, recovery: Recovery, calls: Calls) -> None:
        self.source: ResponseSource
        self.waits = WaitTimes()
        self._table = table
        self._recovery = recovery
        self._calls = calls

    def collect(self, wait: Wait, *, max_lead: int | None = None) -> list[Entry]:
        """Wait for responses as ``wait`` specifies. Return the entries whose next response is to be delivered now.

        Raises the first failure among those responses, and UsageError if no response can arrive. With ``max_lead``, the
        steps of workers at least that many steps ahead of the slowest worker stay queued for a later call.
        """
        deadline = None if wait.timeout_s is None else time.monotonic() + wait.timeout_s
        table = self._table
        self.receive(self.source.take())
        n_ready = len(table.ready)
        if (n_ready < wait.min_ready and n_ready < len(table.entries)) or max_lead is not None:
            self._wait_for_more(wait, deadline, max_lead)
        if max_lead is None:
            chosen = table.ready[: wait.max_ready]
        else:
            limit = table.slowest() + max_lead
            chosen = []
            for entry in table.ready:  # only steps are held back
                if entry.steps_since_reset < limit or entry.outbox[0].name is not _STEP:
                    chosen.append(entry)
            chosen = chosen[: wait.max_ready]
        if not table.all_nominal:
            for entry in chosen:
                if entry.outbox[0].name is _FAILED:
                    error = entry.outbox[0].payload
                    table.delivered([entry])  # so it is raised only once; the others stay ready
                    raise error
        return chosen

    def receive(self, responses: Sequence[EnvironmentResponse]) -> None:
        """Queue ``responses`` in their workers' outboxes, or record failures. Then start replacements that are due."""
        table, entries, recycles = self._table, self._table.entries, self._recovery.recycles
        arrived: list[Entry] = []
        for response in responses:
            entry = entries[response.worker_id]
            is_plain = entry.state is _IN_FLIGHT and response.name is _STEP and response.specs is None
            if is_plain and not entry.outbox and not recycles:
                entry.outbox = (response,)
                arrived.append(entry)
                continue
            table.move(arrived, _READY)
            arrived = []
            self._require_open()
            self._recovery.arrive(response)
        if arrived:
            table.move(arrived, _READY)
        if table.replacing:
            self._require_open()
            self._recovery.start_due()

    def _wait_for_more(self, wait: Wait, deadline: float | None, max_lead: int | None) -> None:
        """Wait for as many responses as ``wait`` needs, or until ``deadline``. Raises UsageError if none can arrive."""
        table = self._table
        if not table.n_waiting:
            errors = [entry.error for entry in table.entries if entry.error is not None]
            if len(errors) < len(table.entries):
                raise UsageError("nothing is in flight: send() actions first.")
            cause = str(errors[0]).partition("\n")[0]
            raise UsageError(
                f"every worker has failed; call reset() to start them afresh. The first failure was: {cause}"
            )
        n_changes = -1
        while True:
            if n_changes != table.n_changes:  # else the slowest worker is still the same
                n_changes, n_seen, n_offered = table.n_changes, 0, 0
                limit = math.inf if max_lead is None else table.slowest() + max_lead
            ready = table.ready
            if max_lead is None:
                n_offered = len(ready)
            else:
                for entry in ready[n_seen:]:
                    n_offered += entry.steps_since_reset < limit or entry.outbox[0].name is not _STEP
            n_seen = len(ready)
            n_held_back = n_seen - n_offered
            if n_held_back and n_held_back == table.n_waiting:
                slowest = min(table.entries, key=lambda each: (each.is_given_up, each.steps_since_reset))
                raise UsageError(
                    f"every worker in flight is max_lead={max_lead} steps ahead of the slowest: send actions to "
                    f"the environments of worker {slowest.worker_id}."
                )
            n_wanted = min(wait.min_ready, table.n_waiting - n_held_back) - n_offered
            if n_wanted <= 0:
                return
            wake_at = self._wake_at(deadline)
            timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
            responses = self.waits.wait(self.source, timeout, 1 if table.replacing or wake_at is not None else n_wanted)
            if not responses:
                self._require_open()
                if timeout is None:
                    raise RuntimeError("a step queue gave up without a timeout")
                if wake_at == deadline:
                    return
            self.receive(responses)

    def _wake_at(self, deadline: float | None) -> float | None:
        """Return the earlier of ``deadline`` and the start time of the next replacement, or None if neither exists."""
        start_at = self._recovery.next_start_at() if self._table.replacing else None
        if start_at is None or deadline is None:
            return deadline if start_at is None else start_at
        return min(start_at, deadline)

    def await_replacement(self, entry: Entry) -> None:
        """If the worker is being replaced, wait until its replacement sends its first observations or is given up."""
        self.receive(())
        while entry.replacement is not None and not entry.replacement.has_begun:
            wake_at = self._wake_at(None)
            responses = self.source.wait(None if wake_at is None else max(0.0, wake_at - time.monotonic()))
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
