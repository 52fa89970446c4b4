"""Keeps where every worker of a manager stands: one entry each, one enum, one function that changes it.

::

    IDLE ── a step is sent ──▶ IN_FLIGHT ── its response is here ──▶ READY ── handed out ──▶ IDLE
      └── failed ──┐               └── failed ──┐                      └─────┐
                   ▼                            ▼                            ▼
              REPLACING ── first observations of the next generation ──▶  READY (or FAILED, DROPPED)

The rule: a response waits in the entry of its worker and nowhere else, until all that is made of it exists. What comes
after it (a failure, the first observations of the next generation) waits behind it, in ``following``. Where a worker of
which nothing waits stands is in its entry too: being replaced, given up, or idle.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

import attrs

from envmanager.data.specs import BehaviorSpec, BehaviorSpecs, SpecConflict, merge_specs
from envmanager.data.steps import Actions, Batch, CommandName, EnvironmentResponse, StepInfo, phase_of
from envmanager.errors import BadObservation, WorkerError
from envmanager.observe.stats import WorkerStats
from envmanager.observe.timing import WorkerTimes


class WorkerState(enum.IntEnum):
    """Where a worker stands, as its manager sees it."""

    IDLE = 0
    """Its last response was handed out: it wants actions."""
    IN_FLIGHT = 1
    """It was sent a step."""
    READY = 2
    """Its response is here and was not handed out; a failure is one too, which is handed out by being raised."""
    REPLACING = 3
    """It failed, or is being recycled: the first observations of its next generation are to come."""
    FAILED = 4
    """It was given up, which has been raised; until the next reset."""
    DROPPED = 5
    """It was given up for good."""


_S = WorkerState
_MOVES = (
    {_S.IN_FLIGHT, _S.READY, _S.REPLACING, _S.DROPPED},  # from IDLE
    {_S.READY, _S.REPLACING, _S.DROPPED},  # from IN_FLIGHT
    {_S.IDLE, _S.READY, _S.REPLACING, _S.FAILED, _S.DROPPED},  # from READY
    {_S.READY, _S.REPLACING, _S.DROPPED},  # from REPLACING
    {_S.IDLE, _S.REPLACING},  # from FAILED
    set[_S](),  # from DROPPED
)
_WAITING = {_S.IN_FLIGHT, _S.READY, _S.REPLACING}
_IDLE, _IN_FLIGHT, _READY, _STEP = _S.IDLE, _S.IN_FLIGHT, _S.READY, CommandName.STEP


@attrs.define(eq=False)
class Replacement:
    """A worker's next generation, from the decision until its first observations are delivered.

    ``cause`` is why episodes are cut; None at a reset. ``first`` brings the first observations, once they are there.
    """

    generation: int
    cause: WorkerError | None
    start_at: float
    is_started: bool = False
    first: EnvironmentResponse | None = None


@attrs.define(eq=False)
class Entry:
    """All that a manager knows of one worker, whichever process is its present generation."""

    worker_id: int
    env_ids: tuple[int, ...]
    state: WorkerState = WorkerState.IDLE
    response: EnvironmentResponse | None = None
    """The one place where a response waits; set while READY."""
    following: EnvironmentResponse | None = None
    """What is handed out after ``response``."""
    error: Exception | None = None
    """What the worker was given up for."""
    is_dropped: bool = False
    """Whether it was given up for good."""
    replacement: Replacement | None = None
    ignores_action: bool = False
    """It failed after its observation was handed out: one action for that may still come, and is discarded."""
    generation: int = 0
    steps_of_generation: int = 0
    restarts: int = 0
    previous_step: StepInfo | None = None
    """The StepInfo that was handed out last; since a reset the first one, when steps go by send and recv."""
    actions: Actions | None = None
    n_envs_in_flight: int = 0
    batches: Sequence[Batch] = ()
    """The batches that hold the rows handed out last by ``recv``, oldest first: references, looked up when it fails."""
    steps: int = 0
    """Steps handed out."""
    steps_at_reset: int = 0
    times: WorkerTimes = attrs.field(factory=WorkerTimes)

    def move(self, to: WorkerState) -> None:
        """Change the state; RuntimeError for a move that makes no sense.

        Nobody else changes it but the table, where many workers make the same ordinary move at once.
        """
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"worker {self.worker_id} cannot go from {self.state.name} to {to.name}")
        self.state = to

    @property
    def steps_since_reset(self) -> int:
        """How far it is; what ``max_lead`` compares."""
        return self.steps - self.steps_at_reset

    @property
    def waiting(self) -> bool:
        """Whether something of it is still to be handed out."""
        return self.state in _WAITING

    def require_alive(self) -> None:
        """Raise what it was given up for, if it was."""
        if self.error is not None:
            # Without the traceback of the last time, which would grow with every time.
            raise self.error.with_traceback(None)

    @property
    def is_given_up(self) -> bool:
        """Whether it failed and is not replaced, also while that is still to be raised."""
        return self.error is not None

    @property
    def is_ordinary(self) -> bool:
        """Whether nothing rare is the matter with it."""
        return self.error is None and self.replacement is None and not self.ignores_action

    @property
    def is_first_of_generation(self) -> bool:
        """Whether its response brings the first observations of a replacement."""
        return self.replacement is not None and self.response is self.replacement.first and self.response is not None

    @property
    def state_at_rest(self) -> WorkerState:
        """Its state once nothing of it waits to be delivered."""
        if self.replacement is not None:
            return _S.REPLACING
        if self.is_dropped:
            return _S.DROPPED
        return _IDLE if self.error is None else _S.FAILED

    def stats(self) -> WorkerStats:
        """What can be reported of it."""
        known = WorkerStats(
            self.worker_id,
            self.env_ids,
            waiting=self.waiting,
            replacing=self.state is WorkerState.REPLACING,
            failed=self.is_given_up,
            dropped=self.is_dropped,
            generation=self.generation,
            restarts=self.restarts,
            steps=self.steps,
        )
        return known.with_times(self.times)


class WorkerTable:
    """The entries of one manager's workers, and the specs that these have reported."""

    def __init__(self, blocks: Sequence[Sequence[int]]) -> None:
        self.entries = [Entry(worker_id, tuple(env_ids)) for worker_id, env_ids in enumerate(blocks)]
        self.ready: list[Entry] = []
        """Those that are READY, in the order in which they became so."""
        self.is_ordinary = True
        """Whether nothing rare is the matter with any worker, so that nobody needs to ask."""
        self.n_waiting = 0
        """Of how many workers something is still to be handed out: counted, because every wait asks."""
        self.env_steps = 0
        """Steps of environments handed out."""
        self.specs: dict[str, BehaviorSpec] = {}
        """Specs of all behaviors so far."""
        self.has_objects = False
        """Whether some action or observation is an object, so that sending it may fail."""

    def learn(self, specs: BehaviorSpecs, worker_id: int) -> None:
        """Add a worker's specs; raise SpecConflict when a behavior has two."""
        merge_specs(self.specs, specs, seen_in="a worker before it", now_in=f"worker {worker_id}")
        self.has_objects = any(spec.has_objects for spec in self.specs.values())

    def with_specs_learned(self, response: EnvironmentResponse) -> EnvironmentResponse:
        """Learn the specs that came with a response. Return it, or a "failed" one when a behavior has two specs."""
        if response.specs is None:
            return response
        try:
            self.learn(response.specs, response.worker_id)
        except SpecConflict as error:
            failure = BadObservation(
                worker_id=response.worker_id,
                env_ids=self.entries[response.worker_id].env_ids,
                phase=phase_of(response.name),
                path=error.path,
                expected=error.expected,
                got=error.got,
            )
            return EnvironmentResponse(CommandName.FAILED, response.worker_id, failure)
        return response

    def _move(self, entry: Entry, to: WorkerState) -> None:
        if entry.state is _S.READY:
            self.ready.remove(entry)
        entry.move(to)
        if to is _S.READY:
            self.ready.append(entry)

    # The ordinary way: one loop each over all that moves.

    def sent(self, entry: Entry, n_envs: int) -> None:
        """A step of ``n_envs`` environments is on its way to an idle worker."""
        if entry.state is not _IDLE:
            entry.move(_IN_FLIGHT)
        entry.n_envs_in_flight = n_envs
        self.n_waiting += 1
        entry.state = _IN_FLIGHT

    def arrived(self, responses: Sequence[EnvironmentResponse], start: int = 0) -> int:
        """Steps that are here, from place ``start`` on, up to the first that is rare; return its place.

        Rare is another response, one that nobody waits for, and one that brings specs.
        """
        entries, ready = self.entries, self.ready
        for place in range(start, len(responses)):
            response = responses[place]
            entry = entries[response.worker_id]
            if entry.state is not _IN_FLIGHT or response.name is not _STEP or response.specs is not None:
                return place
            ready.append(entry)
            entry.response = response
            entry.state = _READY
        return len(responses)

    def offered(self, entry: Entry, response: EnvironmentResponse) -> None:
        """There is something to hand out of a worker that is idle."""
        self.n_waiting += not entry.waiting
        entry.move(_READY)
        entry.response = response
        self.ready.append(entry)

    def handed_out(self, entries: Sequence[Entry]) -> None:
        """All that is made of the responses of these entries exists, and is with the trainer now."""
        now_ns = time.monotonic_ns()
        is_ordinary = self.is_ordinary
        if is_ordinary:
            gone = set(entries)  # a list would be searched for each
            self.ready = [] if len(gone) == len(self.ready) else [each for each in self.ready if each not in gone]
            self.n_waiting -= len(entries)
        for entry in entries:
            if entry.response is not None and entry.response.name is _STEP:
                entry.steps += 1
                self.env_steps += entry.n_envs_in_flight
                if entry.times.ended_ns:
                    entry.times.queued_ns += now_ns - entry.times.ended_ns
            if is_ordinary:
                entry.response = None
                entry.state = _IDLE
        if not is_ordinary:
            for entry in entries:
                self._advance(entry)
            self.note_exceptions()

    # What is rare.

    def _advance(self, entry: Entry) -> None:
        """Its response was handed out; what follows it is next."""
        if entry.is_first_of_generation:
            entry.replacement, entry.ignores_action = None, False
        elif entry.response is not None and entry.response.name is CommandName.FAILED:
            pass  # who sends to it gets the error
        elif entry.replacement is not None or entry.is_dropped:
            entry.ignores_action = True  # the trainer cannot know that the worker has gone
        self._move(entry, entry.state_at_rest if entry.following is None else _READY)
        entry.response, entry.following = entry.following, None

    def expect(self, entry: Entry, *responses: EnvironmentResponse) -> None:
        """Set the responses (two at most) that are delivered of a worker next, in this order; then it is at rest."""
        first, following = (*responses, None, None)[:2]
        if first is None or first is not entry.response:  # else it keeps its turn
            self._move(entry, entry.state_at_rest if first is None else _READY)
        entry.response, entry.following = first, following
        self.note_exceptions()

    def note_exceptions(self) -> None:
        """Something rare has begun or ended."""
        self.is_ordinary = all(entry.is_ordinary for entry in self.entries)
        self.n_waiting = sum(entry.waiting for entry in self.entries)

    def slowest(self) -> int:
        """The fewest steps delivered since the reset by any worker that was not given up."""
        return min((entry.steps_since_reset for entry in self.entries if entry.error is None), default=0)

    def clear(self) -> None:
        """Nothing that waits is wanted any more, and the arrays that were handed out are let go."""
        self.ready.clear()
        for entry in self.entries:
            entry.response = entry.following = entry.previous_step = entry.actions = None
            entry.batches = ()
