"""Replaces or gives up a worker that fails, and replaces one that is to be recycled, after a step that ends an episode.

::

    failure ── judge ──▶ replaced   until the first observations of its next generation are handed out
                    ──▶ failed      raised once, then left alone until the next reset
                    ──▶ dropped     left alone for good, loudly

The rule: everything that happens to an entry's generations happens here, and the other workers never notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from envmanager.core.restarts import GiveUp, Replace, Supervisor
from envmanager.core.table import Entry, Replacement, WorkerState, WorkerTable
from envmanager.data import cut_episodes
from envmanager.data.steps import CommandName, EnvironmentResponse, Lost, Steps
from envmanager.errors import EnvManagerError, NotPlaced, ProtocolError, WorkerDied, WorkerError, WorkerTimedOut
from envmanager.observe import events
from envmanager.options import RestartPolicy

_FAILURES: dict[type[Exception], type[events.Failed]] = {
    WorkerDied: events.Died,
    WorkerTimedOut: events.TimedOut,
    ProtocolError: events.ProtocolBroken,
    NotPlaced: events.NotStarted,
    WorkerError: events.NotStarted,  # a process that could not be started has no class of its own
}

_RECYCLED = "recycled"
"""Phase in the cause of a planned replacement."""


class Recovery:
    """Replaces and gives up the workers of one manager."""

    def __init__(
        self, table: WorkerTable, policy: RestartPolicy, launch_again: Callable[[Entry], EnvironmentResponse | None]
    ) -> None:
        """``launch_again(entry)`` starts the entry's generation and has it reset; it returns the response to that.

        None says that the response comes out of the step queue. OSError or an error of this library: it cannot be.
        """
        self._table = table
        self._policy = policy
        self._supervisor = Supervisor(policy, len(table.entries))
        self._launch_again = launch_again
        self.recycles = policy.recycle_after_steps is not None
        self.events = events.EventLog()
        self.steps_lost = 0

    # Failures.

    def fail(self, entry: Entry, error: Exception) -> None:
        """The worker failed: it is replaced, or what is to be reported of it is ready. Once given up, it stays so."""
        if entry.is_given_up:
            self._report(entry, error)
            return
        while not self._decide(entry, error):
            failure = self._start_if_due(entry)
            if failure is None:
                return
            error = failure

    def fail_quietly(self, entry: Entry, error: Exception) -> Exception:
        """The worker failed in a call, which raises the error that is returned here; it is not raised again."""
        self.fail(entry, error)
        if entry.error is None:
            return error
        waiting = [each for each in (entry.response, entry.following) if each is not None]
        if waiting:
            self._table.expect(entry, *(each for each in waiting if each.name is not CommandName.FAILED))
        return entry.error

    def _decide(self, entry: Entry, error: Exception) -> bool:
        """Replace it or give it up; whether that ends the matter for now."""
        self._report(entry, error)
        if entry.state is WorkerState.IDLE:
            entry.ignores_action = True
        elif entry.state is WorkerState.IN_FLIGHT:
            self.steps_lost += 1
        verdict = self._supervisor.judge(entry.worker_id, error, time.monotonic())
        if isinstance(verdict, Replace):
            assert isinstance(error, WorkerError)
            self._plan(entry, error, verdict)
            return False
        self._give_up(entry, verdict)
        return True

    def _report(self, entry: Entry, error: Exception) -> None:
        kind = _FAILURES.get(type(error), events.Raised)
        self.events.add(kind(worker_id=entry.worker_id, generation=entry.generation, error=error))

    def _plan(self, entry: Entry, error: WorkerError, verdict: Replace) -> None:
        before = entry.replacement
        responses = _last_response(entry)
        generation = entry.generation + 1
        entry.replacement = Replacement(generation, error, time.monotonic() + verdict.delay_s)
        if before is not None:  # the replacement failed in its turn: what it was for is still to be reported
            entry.replacement.cause = before.cause
        entry.restarts += 1
        self._table.expect(entry, *responses)
        self.events.add(
            events.Restarted(
                worker_id=entry.worker_id,
                generation=generation,
                cause=error,
                delay_s=verdict.delay_s,
                number=verdict.number,
                policy=self._policy,
            )
        )

    def _give_up(self, entry: Entry, verdict: GiveUp) -> None:
        responses = _last_response(entry)
        entry.error, entry.replacement = verdict.error, None
        if verdict.drop:
            self.events.add(events.Dropped(worker_id=entry.worker_id, generation=entry.generation, error=verdict.error))
        entry.is_dropped = verdict.drop
        if not verdict.drop or all(other.is_dropped for other in self._table.entries):
            entry.ignores_action = False  # who sends to it gets the error
            responses.append(EnvironmentResponse(CommandName.FAILED, entry.worker_id, verdict.error))
        self._table.expect(entry, *responses)

    # Replacing.

    def _start_if_due(self, entry: Entry) -> Exception | None:
        """Start its next generation, if the time has come; what went wrong with that."""
        replacement = entry.replacement
        if replacement is None or replacement.is_started or replacement.start_at > time.monotonic():
            return None
        replacement.is_started = True
        entry.generation, entry.steps_of_generation = replacement.generation, 0
        try:
            response = self._launch_again(entry)
        except (OSError, EnvManagerError) as error:
            return error if isinstance(error, WorkerError) else _could_not_start(entry, error)
        except BaseException:  # a Ctrl-C meanwhile: the next call begins anew
            replacement.is_started = False
            replacement.generation += 1
            raise
        if response is None:
            return None
        response = self._table.with_specs_learned(response)
        if response.name is CommandName.FAILED:
            return response.payload  # type: ignore[no-any-return]
        self.begin(entry, response)
        return None

    def start_due(self) -> None:
        """Start the replacements whose time has come."""
        for entry in self._table.entries:
            failure = self._start_if_due(entry)
            if failure is not None:
                self.fail(entry, failure)

    def next_start_at(self) -> float | None:
        """When (monotonic seconds) the next replacement is to be started; None when there is none to start."""
        planned = [entry.replacement for entry in self._table.entries if entry.replacement is not None]
        return min((each.start_at for each in planned if not each.is_started), default=None)

    def begin(self, entry: Entry, response: EnvironmentResponse) -> None:
        """The first observations of its next generation are there; they come after its last response."""
        assert entry.replacement is not None
        entry.replacement.first = response
        self._table.expect(entry, *_last_response(entry), response)

    def cut(self, entry: Entry, last: Steps) -> tuple[Steps, Lost] | None:
        """Return the steps to deliver, and why, if its response is the first of a generation that cuts episodes.

        ``last`` are the steps of it that were delivered last.
        """
        replacement = entry.replacement
        if replacement is None or not entry.is_first_of_generation or entry.response is None:
            return None
        if replacement.cause is None:  # a reset: no episode was cut
            return None
        old = cut_episodes.lost(last, with_new=replacement.cause.phase != _RECYCLED)
        payload = cut_episodes.followed_by(old, entry.response.payload)
        return payload, Lost(replacement.cause, replacement.generation)

    # Recycling.

    def recycle_if_old(self, entry: Entry) -> None:
        """Replace a healthy worker whose step has come, if it is old enough and an episode ended in the step."""
        response = entry.response
        assert response is not None
        entry.steps_of_generation += 1
        limit = self._policy.recycle_after_steps
        if limit is None or entry.steps_of_generation < limit or not any(map(_begins_anew, response.payload.values())):
            return
        steps, generation = entry.steps_of_generation, entry.generation + 1
        entry.replacement = Replacement(generation, _recycled(entry, steps), time.monotonic())
        self._table.expect(entry, response)
        self.events.add(events.Recycled(worker_id=entry.worker_id, generation=generation, steps=steps))
        failure = self._start_if_due(entry)
        if failure is not None:
            self.fail(entry, failure)

    # What the user does.

    def discard_action(self, entry: Entry) -> None:
        """An action came for the last observation of a worker that has failed."""
        entry.ignores_action = False
        self.steps_lost += 1
        self._table.note_exceptions()

    def take_back(self, entry: Entry) -> None:
        """A worker that was given up is asked to reset: it has all its restarts again."""
        if entry.error is not None:
            entry.error = None
            self._supervisor.forgive(entry.worker_id)
            self._table.expect(entry)

    def revive(self, entry: Entry) -> None:
        """Replace a worker that was given up, because the user has asked for a reset."""
        self.take_back(entry)
        entry.replacement = Replacement(entry.generation + 1, None, time.monotonic())
        self._table.expect(entry)


def _last_response(entry: Entry) -> list[EnvironmentResponse]:
    """The response of its last generation that has not been handed out; not what a replacement has brought."""
    if entry.response is None or entry.is_first_of_generation:
        return []
    return [entry.response]


def _begins_anew(steps: Any) -> bool:
    """Whether some episode ended and its environment plays on."""
    return bool(steps.ended.any() if steps.acting is None else (steps.ended & steps.acting).any())


def _recycled(entry: Entry, steps: int) -> WorkerError:
    text = f"worker {entry.worker_id} was recycled after {steps} steps"
    return WorkerError(text, worker_id=entry.worker_id, env_ids=entry.env_ids, phase=_RECYCLED, cause=f"{steps} steps")


def _could_not_start(entry: Entry, error: Exception) -> WorkerError:
    text = f"worker {entry.worker_id} could not be started again: {error}"
    return WorkerError(text, worker_id=entry.worker_id, env_ids=entry.env_ids, phase="start", cause=str(error))
