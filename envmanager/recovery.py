"""What becomes of workers that fail.

::

    failure ── judge ──▶ replaced   counts as waiting until the first observations of its next generation are handed out
                    ──▶ out         raised once, then left alone until the next reset
                    ──▶ dropped     left alone for good, loudly

The rule: a worker is in one of these three, or it is well; the others never notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from envmanager import cut_episodes, events
from envmanager.errors import EnvManagerError, WorkerDied, WorkerError, WorkerTimedOut
from envmanager.options import RestartPolicy
from envmanager.restarts import GiveUp, Replace, Supervisor
from envmanager.steps import CommandName, EnvironmentResponse, Lost, Steps


@attrs.define(eq=False)
class Replacement:
    """A worker's next generation, from the decision until its first observations are handed out.

    ``cause`` is why an episode is cut; None at a reset, and when a healthy worker is recycled: ``held`` is then the
    step to hand out with the new generation's first observations. ``response`` brings these, once they are there.
    """

    generation: int
    cause: WorkerError | None
    start_at: float
    held: EnvironmentResponse | None = None
    is_started: bool = False
    response: EnvironmentResponse | None = None


@attrs.frozen
class Cut:
    """What a trainer gets of the first response of a worker's new generation.

    ``lost``: why the steps in flight are lost, if they are. ``unstepped``: int64, the agents that took no step; their
    rows only say that their episode was cut.
    """

    payload: Steps
    lost: Lost | None
    unstepped: np.ndarray


class Recovery:
    """The fate of every worker of one manager."""

    def __init__(
        self,
        policy: RestartPolicy,
        workers: list[Any],
        n_workers: int,
        *,
        replace: Callable[[int], None],
        last_steps: Callable[[int], Steps],
    ) -> None:
        """``replace(worker_id)`` starts the next generation; ``last_steps(worker_id)`` are those last handed out."""
        self._policy = policy
        self._supervisor = Supervisor(policy, n_workers)
        self._workers = workers
        self._replace = replace
        self._last_steps = last_steps
        self._steps_of_generation = [0] * n_workers
        self.events = events.EventLog()
        self.generations = [0] * n_workers
        self.restarts = [0] * n_workers
        self.out: dict[int, Exception] = {}
        self.dropped: set[int] = set()
        self.replacements: dict[int, Replacement] = {}
        self.unanswered: set[int] = set()
        """Failed workers whose last observation is with the user: one action for it may still come, and is dropped."""
        self.steps_lost = 0

    # Failures.

    def failed(self, response: EnvironmentResponse, *, is_answered: bool) -> list[EnvironmentResponse]:
        """A worker failed: what of it is to be handed out. ``is_answered``: its last step waits to be handed out."""
        return self._decide(response, is_answered=is_answered) or self._start_if_due(response.worker_id)

    def _decide(self, response: EnvironmentResponse, *, is_answered: bool) -> list[EnvironmentResponse]:
        worker_id, error = response.worker_id, response.payload
        worker = self._workers[worker_id]
        replacement = self.replacements.get(worker_id)
        self._tell(worker_id, error)
        if not worker.waiting:
            self.unanswered.add(worker_id)
        elif replacement is None and not is_answered:
            self.steps_lost += 1
        verdict = self._supervisor.judge(worker_id, error, time.monotonic())
        if not isinstance(verdict, Replace):
            return self._give_up(response, verdict)
        self._plan(worker_id, error, verdict.delay_s)
        return []

    def _tell(self, worker_id: int, error: Exception) -> None:
        kinds = {WorkerDied: events.Died, WorkerTimedOut: events.TimedOut}
        kind = kinds.get(type(error), events.Raised)
        self.events.add(kind(worker_id=worker_id, generation=self.generations[worker_id], error=error))

    def _plan(self, worker_id: int, error: WorkerError, delay_s: float) -> None:
        before = self.replacements.get(worker_id)
        generation = self.generations[worker_id] + 1
        replacement = Replacement(generation, error, time.monotonic() + delay_s)
        if before is not None:  # the replacement failed in its turn: what it was for is still to be told
            replacement.cause, replacement.held = before.cause, before.held
        self.replacements[worker_id] = replacement
        self.restarts[worker_id] += 1
        self._workers[worker_id].waiting = True
        self.events.add(events.Restarted(worker_id=worker_id, generation=generation, cause=error, delay_s=delay_s))

    def _give_up(self, response: EnvironmentResponse, verdict: GiveUp) -> list[EnvironmentResponse]:
        worker_id, error = response.worker_id, verdict.error
        self.out[worker_id] = error
        replacement = self.replacements.pop(worker_id, None)
        held = [] if replacement is None or replacement.held is None else [replacement.held]
        if verdict.drop:
            self.dropped.add(worker_id)
            self._workers[worker_id].waiting = bool(held)
            self.events.add(events.Dropped(worker_id=worker_id, generation=self.generations[worker_id], error=error))
            if len(self.dropped) < len(self._workers):
                return held
        self.unanswered.discard(worker_id)  # who sends to it gets the error
        return [*held, attrs.evolve(response, payload=error)]

    # Replacing.

    def _start_if_due(self, worker_id: int) -> list[EnvironmentResponse]:
        while (replacement := self._due(worker_id)) is not None:
            replacement.is_started = True
            self.generations[worker_id] = replacement.generation
            self._steps_of_generation[worker_id] = 0
            try:
                self._replace(worker_id)
            except (OSError, EnvManagerError) as error:
                failure = error if isinstance(error, WorkerError) else _could_not_start(worker_id, error)
                refusal = EnvironmentResponse(CommandName.FAILED, worker_id, failure)
                said = self._decide(refusal, is_answered=False)
                if said:
                    return said
            except BaseException:  # a Ctrl-C meanwhile: the next call begins anew
                replacement.is_started = False
                replacement.generation += 1
                raise
        return []

    def _due(self, worker_id: int) -> Replacement | None:
        replacement = self.replacements.get(worker_id)
        if replacement is None or replacement.is_started or replacement.start_at > time.monotonic():
            return None
        return replacement

    def start_due(self) -> list[EnvironmentResponse]:
        """Start the replacements whose time has come; what is to be handed out because that failed."""
        return [response for worker_id in list(self.replacements) for response in self._start_if_due(worker_id)]

    def next_start_at(self) -> float | None:
        """When (monotonic seconds) the next replacement is to be started; None when there is none to start."""
        return min((each.start_at for each in self.replacements.values() if not each.is_started), default=None)

    def begun(self, response: EnvironmentResponse) -> EnvironmentResponse:
        """The first observations of a replacement are there; what is to be handed out with them."""
        replacement = self.replacements[response.worker_id]
        held = replacement.held
        replacement.response = response if held is None else attrs.evolve(held, payload=response.payload)
        return replacement.response

    def cut(self, response: EnvironmentResponse) -> Cut | None:
        """What a trainer gets of this response, when it is the first of a new generation that cuts episodes."""
        replacement = self.replacements.get(response.worker_id)
        if replacement is None or replacement.response is not response:
            return None
        last = self._last_steps(response.worker_id)
        if replacement.held is not None:
            stepped: Steps = replacement.held.payload
            old, lost = cut_episodes.truncated(stepped, last), None
        elif replacement.cause is not None:
            stepped = {}
            old, lost = cut_episodes.lost(last), Lost(replacement.cause, replacement.generation)
        else:  # a reset: no episode was cut
            return None
        payload = cut_episodes.followed_by(old, response.payload)
        return Cut(payload, lost, np.setdiff1d(_agent_ids(old), _agent_ids(stepped)))

    def handed_out(self, response: EnvironmentResponse) -> Replacement | None:
        """A trainer has a response of a worker that is replaced; the replacement, unless it has begun with that."""
        replacement = self.replacements[response.worker_id]
        if replacement.response is not response:
            return replacement
        del self.replacements[response.worker_id]
        self.unanswered.discard(response.worker_id)
        return None

    # Recycling.

    def recycles(self, response: EnvironmentResponse) -> bool:
        """Whether the worker is replaced now because of its age; then its step is held back until that is done."""
        limit = self._policy.recycle_after_steps
        if limit is None or response.name is not CommandName.STEP:
            return False
        worker_id = response.worker_id
        steps = self._steps_of_generation[worker_id] + 1
        if steps < limit or not any(map(_begins_anew, response.payload.values())):
            self._steps_of_generation[worker_id] = steps
            return False
        held = attrs.evolve(response, payload={name: own.copy() for name, own in response.payload.items()})
        generation = self.generations[worker_id] + 1
        self.replacements[worker_id] = Replacement(generation, None, time.monotonic(), held)
        self.events.add(events.Recycled(worker_id=worker_id, generation=generation, steps=steps))
        return True

    # What the user does.

    def drop_action(self, worker_id: int) -> None:
        """An action came for the last observation of a worker that has failed."""
        self.unanswered.discard(worker_id)
        self.steps_lost += 1

    def take_back(self, worker_id: int) -> None:
        """A worker that was given up is asked to reset: it has all its restarts again."""
        if self.out.pop(worker_id, None) is not None:
            self._supervisor.forgive(worker_id)

    def revive(self, worker_id: int) -> None:
        """Replace a worker that was given up, because the user has asked for a reset."""
        self.take_back(worker_id)
        self._workers[worker_id].waiting = True
        self.replacements[worker_id] = Replacement(self.generations[worker_id] + 1, None, time.monotonic())


def _agent_ids(steps: Steps) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(own.agent_id for own in steps.values())])


def _begins_anew(steps: Any) -> bool:
    """Whether some episode ended and its environment plays on."""
    return bool(steps.ended.any() if steps.acting is None else (steps.ended & steps.acting).any())


def _could_not_start(worker_id: int, error: Exception) -> WorkerError:
    text = f"worker {worker_id} could not be started again: {error}"
    return WorkerError(text, worker_id=worker_id, env_ids=(), phase="start", cause=str(error))
