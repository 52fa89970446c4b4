"""Decides which responses are handed out, and when: the rules of Wait.

::

    source ──▶ receive ──▶ the worker's entry ──▶ collect ──▶ (what is made of them) ──▶ handed out

The rule: what arrived stays in its entry until all that is made of it exists; so an error, an interrupt or a time-out
loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from envmanager.core.calls import Calls
from envmanager.core.recovery import Recovery
from envmanager.core.sources import ResponseSource
from envmanager.core.table import Entry, WorkerState, WorkerTable
from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError, ManagerClosed, UsageError
from envmanager.observe.timing import WaitTimes
from envmanager.options import Wait


class Collector:
    """Collects responses for one manager."""

    def __init__(self, table: WorkerTable, recovery: Recovery, calls: Calls) -> None:
        self._table = table
        self._recovery = recovery
        self._calls = calls
        self.source: ResponseSource
        self._left: Sequence[EnvironmentResponse] = ()
        """What was taken from the source and did not get into its entries, because an error came: it is the next."""
        self.holds_back = False
        """Whether max_lead keeps responses back (send/recv), because nobody else keeps the actions back."""
        self.waits = WaitTimes()

    def collect(self, wait: Wait) -> list[Entry]:
        """Whose responses are to be handed out, by the rules of ``wait``. Raises a WorkerError that is among them."""
        deadline = None if wait.timeout_s is None else time.monotonic() + wait.timeout_s
        table = self._table
        if not table.is_ordinary:
            self._recovery.start_due()
        self.receive(self.source.take())
        n_ready = len(table.ready)
        if (n_ready < wait.min_ready and n_ready < len(table.entries)) or wait.max_lead is not None:
            self._wait_for_more(wait, deadline)
        if table.is_ordinary and wait.max_lead is None:
            return table.ready[: wait.max_ready]
        chosen = self._offered(wait)[: wait.max_ready]
        self._raise_failure(chosen)
        return chosen

    def receive(self, responses: Sequence[EnvironmentResponse]) -> None:
        """Put responses into the entries of their workers."""
        if self._left:
            responses, self._left = [*self._left, *responses], ()
        n_taken, n_responses = 0, len(responses)
        try:
            while n_taken < n_responses:
                if not (self._recovery.recycles or self._calls.closed):
                    n_taken = self._table.arrived(responses, n_taken)
                if n_taken < n_responses:
                    n_taken += 1
                    self.arrive(responses[n_taken - 1])
        except BaseException:  # a Ctrl-C while a replacement was launched, for one
            self._left = responses[n_taken:]
            raise

    def arrive(self, response: EnvironmentResponse) -> None:
        """Put one response, of whatever kind, into the entry of its worker."""
        self._require_open()
        response = self._table.with_specs_learned(response)
        entry = self._table.entries[response.worker_id]
        if response.name is CommandName.FAILED:
            self._recovery.fail(entry, response.payload)
        elif entry.replacement is not None:
            self._recovery.begin(entry, response)
        elif entry.state is WorkerState.IN_FLIGHT:
            self._table.offered(entry, response)
            if self._recovery.recycles:
                self._recovery.recycle_if_old(entry)
        else:
            raise RuntimeError(
                f"worker {entry.worker_id} responded to a {response.name} that nobody waits for: it is "
                f"{entry.state.name}."
            )

    def _wait_for_more(self, wait: Wait, deadline: float | None) -> None:
        table = self._table
        n_waiting = table.n_waiting
        if not n_waiting:
            raise UsageError(self._nothing_in_flight())
        if table.is_ordinary and wait.max_lead is None and deadline is None:
            n_wanted = min(wait.min_ready, n_waiting)
            while len(table.ready) < n_wanted and table.is_ordinary:
                responses = self.waits.wait(self.source, None, n_wanted - len(table.ready))
                if not responses:
                    self._note_nothing_came(None)
                self.receive(responses)
            if table.is_ordinary:
                return
        while not self._enough(wait):
            if not self._wait_once(deadline):
                return

    def _wait_once(self, deadline: float | None) -> bool:
        """Wait until something comes, or a replacement is due; False when the time is up instead."""
        wake_at = min((at for at in (deadline, self._recovery.next_start_at()) if at is not None), default=None)
        timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        responses = self.waits.wait(self.source, timeout, 1)
        if not responses:
            self._note_nothing_came(timeout)
            if wake_at == deadline:
                return False
        self.receive(responses)
        self._recovery.start_due()
        return True

    def _note_nothing_came(self, timeout: float | None) -> None:
        self._require_open()
        if timeout is None:
            raise RuntimeError("a step queue gave up without a timeout")

    def _require_open(self) -> None:
        self._calls.require_open("a call that waits")  # another thread may have closed it, while this one waited

    def await_replacement(self, entry: Entry) -> None:
        """Wait until a worker that is being replaced is there again, or given up; what arrives meanwhile is kept."""
        self.receive(())
        while entry.replacement is not None and entry.replacement.first is None:
            self._recovery.start_due()
            replacement = entry.replacement
            if replacement is None or replacement.first is not None:
                return
            start_at = self._recovery.next_start_at()
            responses = self.source.wait(None if start_at is None else max(0.0, start_at - time.monotonic()))
            if not responses:
                self._require_open()
            self.receive(responses)

    def _enough(self, wait: Wait) -> bool:
        n_offered = len(self._offered(wait))
        if n_offered >= wait.min_ready:
            return True
        n_held_back = len(self._table.ready) - n_offered
        if n_held_back and n_held_back == self._table.n_waiting:
            slowest = min(self._table.entries, key=lambda each: (each.is_given_up, each.steps_since_reset))
            raise UsageError(
                f"every worker in flight is max_lead={wait.max_lead} steps ahead of the slowest: send actions to "
                f"the environments of worker {slowest.worker_id}."
            )
        return n_offered >= self._table.n_waiting - n_held_back

    def _offered(self, wait: Wait) -> list[Entry]:
        """The ready entries that max_lead does not hold back; it holds back steps, not failures."""
        if wait.max_lead is None or not self.holds_back:
            return self._table.ready
        limit = self._table.slowest() + wait.max_lead  # once: asking for each entry would be quadratic
        return [
            entry
            for entry in self._table.ready
            if entry.steps_since_reset < limit or entry.response is None or entry.response.name is not CommandName.STEP
        ]

    def _raise_failure(self, chosen: list[Entry]) -> None:
        """A failure among what would be handed out is raised, once; the rest stays ready."""
        for entry in chosen:
            assert entry.response is not None
            if entry.response.name is CommandName.FAILED:
                error = entry.response.payload
                self._table.handed_out([entry])
                raise error

    def drain(self) -> tuple[dict[int, EnvironmentResponse], EnvManagerError | None]:
        """Wait for all that is in flight, failures too: the last responses by worker, and the first failure."""
        responses: dict[int, EnvironmentResponse] = {}
        failure: EnvManagerError | None = None
        while self._table.n_waiting:
            try:
                chosen = self.collect(Wait.all())
            except ManagerClosed:
                raise
            except EnvManagerError as error:
                failure = failure or error
                continue
            responses.update({entry.worker_id: entry.response for entry in chosen if entry.response is not None})
            self._table.handed_out(chosen)
        return responses, failure

    def restart_counting(self) -> None:
        """After a reset nobody is ahead of anybody."""
        for entry in self._table.entries:
            entry.steps_at_reset = entry.steps
        self.holds_back = False

    def _nothing_in_flight(self) -> str:
        errors = [entry.error for entry in self._table.entries if entry.error is not None]
        if len(errors) == len(self._table.entries):
            first_line = str(errors[0]).partition("\n")[0]
            return f"every worker has failed; call reset() to start them afresh. The first failure was: {first_line}"
        return "nothing is in flight: send() actions first."
