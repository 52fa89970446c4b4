"""Worker states: the enum WorkerState, an Entry per worker, and the WorkerTable of all entries, which changes states.

::

    IDLE ── a step is sent ──▶ IN_FLIGHT ── its response arrives ──▶ READY ── delivered ──▶ IDLE
    a failure ── its episodes are kept ──▶ the same state, while they are made again; then the step in flight is sent
    a failure ── the worker is replaced ──▶ REPLACING ── first observations of the next generation ──▶ READY
              ── the worker is given up ──▶ READY ── the error is raised ──▶ FAILED ── reset ──▶ IDLE or REPLACING
              ── the worker is dropped ───▶ DROPPED

The rule: a step stays in the outbox of its entry until the StepInfo or batch made from it exists, or a reset discards
it. Of two responses in an outbox, the second is a failure or has the first observations of the next generation.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.data.specs import BehaviorSpec, BehaviorSpecs, SpecConflict, merge_specs
from envmanager.data.steps import Actions, Batch, Begin, CommandName, EnvironmentResponse, StepInfo, Steps, phase_of
from envmanager.data.trees import snapshot
from envmanager.errors import BadObservation, WorkerError
from envmanager.observe.stats import WorkerStats
from envmanager.observe.timing import WorkerTimes

if TYPE_CHECKING:
    from envmanager.keeping.log import EpisodeLog


class WorkerState(enum.IntEnum):
    """The state of a worker, as its manager sees it."""

    IDLE = 0
    """Ready for actions, because no response is outstanding."""
    IN_FLIGHT = 1
    """Has not yet responded to a step."""
    READY = 2
    """Has a response that was not delivered to the trainer. Failures are responses too; they are raised."""
    REPLACING = 3
    """Failed or is being recycled, and the first observations of its next generation have not arrived."""
    FAILED = 4
    """Failed, and the error was raised. Not used until the next reset."""
    DROPPED = 5
    """Failed, and is never used again."""


RECYCLED = "recycled"
"""``phase`` of the error that is stored as the cause of a recycled worker's replacement."""
CANCELLED = "cancelled"
"""``phase`` of that of a worker in which a cancelled step of a pool went on."""
_S = WorkerState
_MOVES = (
    {_S.IN_FLIGHT, _S.READY, _S.REPLACING, _S.DROPPED},  # from IDLE
    {_S.READY, _S.REPLACING, _S.DROPPED},  # from IN_FLIGHT
    {_S.IDLE, _S.READY, _S.REPLACING, _S.FAILED, _S.DROPPED},  # from READY
    {_S.READY, _S.REPLACING, _S.DROPPED},  # from REPLACING
    {_S.IDLE, _S.REPLACING},  # from FAILED
    set[_S](),  # from DROPPED
)
_IS_WAITING = (0, 1, 1, 1, 0, 0)
"""``Entry.waiting`` in each state, as 1 or 0."""
_IDLE, _IN_FLIGHT, _READY, _STEP = _S.IDLE, _S.IN_FLIGHT, _S.READY, CommandName.STEP


@attrs.define(eq=False)
class Replacement:
    """A scheduled or started replacement of a worker. It ends when its first observations are delivered."""

    cause: WorkerError | None
    """Error that cut the episodes. None for a replacement at a reset, which cuts no episodes."""
    is_started: bool = False
    has_begun: bool = False
    """Whether the generation's first observations have arrived, as the last response in the outbox."""
    keeps: bool = False
    """Whether it makes the episodes of its predecessor again. Then it ends when they stand where they were."""


@attrs.define(eq=False)
class Restore:
    """What is made again of a worker that failed, until all that it could not make is told to the trainer."""

    cause: WorkerError
    began_at: float
    lost: dict[int, WorkerError] = attrs.field(factory=dict)
    """Causes of the losses, by row of the environment, that the next step with an action for it tells."""
    is_sent: bool = False
    """Whether the step in flight was sent. If it is sent again, its rows are written to the same place."""
    told: tuple[int, ...] = ()
    """The rows whose loss the response in the outbox tells."""
    last: Steps = attrs.field(factory=dict)
    """The rows of its environments that were delivered last."""
    counts: dict[int, Mapping[int, tuple[float, int]]] = attrs.field(factory=dict)
    """By env_id, the return and the length of each agent, by agent_id, as counted when these rows were delivered."""
    begins: Sequence[Begin] = ()
    """The episodes that the present generation was asked to begin with their actions."""
    held: list[Begin] = attrs.field(factory=list)
    """Episodes of which the worker is to be told before the next step."""
    is_alone: bool = False
    """Whether the step in flight is taken by one environment after the other, as it has killed the worker twice."""
    left: list[int] = attrs.field(factory=list)
    """Rows of the environments that have yet to take it. The first does now. Last is -1 if others are to begin."""
    parts: list[Steps] = attrs.field(factory=list)
    """What the others have returned."""

    def send(self, name: str, payload: Any = None) -> None:
        """Hold what a worker is to begin, in its place. A step is in the log."""
        if name is CommandName.BEGIN:
            self.held += payload


@attrs.define(eq=False)
class Entry:
    """The state, undelivered responses and counters of one worker. An Entry outlives the worker's process."""

    worker_id: int
    env_ids: tuple[int, ...]
    kind: str = ""
    """Kind of its environments, which is the first part of the names of their behaviors; "" without kinds."""
    state: WorkerState = WorkerState.IDLE
    outbox: tuple[EnvironmentResponse, ...] = ()
    """Responses to deliver, in order. One or two while READY, else none."""
    error: Exception | None = None
    """Error for which the worker was given up."""
    is_dropped: bool = False
    replacement: Replacement | None = None
    log: EpisodeLog | None = None
    """The actions of its episodes since the last reset, if they are kept."""
    restore: Restore | None = None
    blame: tuple[int, tuple[int, ...], int] = (-1, (), 0)
    """Step of the log at which the worker last failed, the environment (by row; -1 if unknown) of each failure in that
    step, and the number of its failures while it repeated those before."""
    ignores_action: bool = False
    """Whether to discard the next action, because the worker failed or was recycled after its last observation."""
    generation: int = 0
    generation_of_seeds: int = 0
    """Generation of which the environments have their seeds; an older one if episodes are kept."""
    began_at: float = 0.0
    """Time (monotonic seconds) at which the first observations of a replacement arrived."""
    keeps_seed: bool = False
    """Whether the next generation gets the seed of the last reset unchanged, because a reset found the worker dead."""
    steps_of_generation: int = 0
    is_due: str = ""
    """Reason why the generation is to be replaced although it is healthy, or empty."""
    asked_at: float = -math.inf
    """Time (monotonic seconds) at which the host was last asked whether the worker is due."""
    is_old: bool = False
    """Whether the generation has taken ``recycle_after_steps``, and is to be replaced when its environments rest."""
    restarts: int = 0
    n_lost_tasks: int = 0
    """Number of tasks that were given up in the worker since one has ended there, or since the last reset."""
    previous_step: StepInfo | None = None
    """Last StepInfo delivered. With ``send`` and ``recv``, the StepInfo that the reset returned."""
    actions: Actions | None = None
    """Actions of the step in flight, if ``step()`` sent them."""
    usual_ids: Any = None
    """The ``agent_id`` array with which ``recv`` last found one agent for each environment. Steps often share it."""
    n_envs_in_flight: int = 0
    batch_size: int = 0
    """Number of rows per response of a worker that does not wait for all its environments; 0 for other workers."""
    rows_in_flight: frozenset[int] = frozenset()
    """Rows in flight of a worker with a ``batch_size``. A row is removed when a response with it is delivered."""
    attributes: dict[tuple[str, tuple[int, ...]], tuple[str, Any, Sequence[int]]] = attrs.field(factory=dict)
    """Arguments of the ``set_attr`` calls that a replacement repeats, by name and rows, in the order of the calls."""
    has_attributes: bool = True
    """Whether the environments have these values. False while a replacement sets them, and if that has failed."""
    batches: Sequence[Batch] = ()
    """Batches that hold the worker's last delivered rows, oldest first. They are needed if the worker is replaced."""
    steps: int = 0
    steps_since_reset: int = 0
    """Number of steps delivered since the last reset. ``max_lead`` limits the differences between workers."""
    times: WorkerTimes = attrs.field(factory=WorkerTimes)

    @property
    def waiting(self) -> bool:
        """Whether the trainer has yet to receive a response from the worker. The response may have arrived already."""
        return bool(_IS_WAITING[self.state])

    def remember(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Store the arguments of a ``set_attr`` call. Values for the same rows take the place of those set before."""
        before, self.attributes = self.attributes, {}
        for key, (each, old, own) in before.items():
            left = [row for row in own if row not in rows]
            if each != name or key[1] == tuple(rows):
                self.attributes[key] = each, old, own
            elif left:  # the others are hidden by the new values
                own_values = [value for row, value in zip(own, old, strict=True) if row in left]
                self.attributes[name, tuple(left)] = name, own_values, left
        self.attributes[name, tuple(rows)] = name, snapshot(values), rows

    def require_alive(self) -> None:
        """Raise the error for which the worker was given up. If the worker was not given up, do nothing."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # else each raise would make the kept traceback longer

    @property
    def is_given_up(self) -> bool:
        """Whether the worker failed and is out of use, at least until a reset. True even before its error is raised."""
        return self.error is not None

    @property
    def is_nominal(self) -> bool:
        """Whether nothing is wrong: it has no error, no action to discard, no replacement but one that keeps all."""
        return self.error is None and (self.replacement is None or self.is_kept) and not self.ignores_action

    @property
    def is_kept(self) -> bool:
        """Whether the worker is being replaced by one that goes on with its episodes."""
        return self.replacement is not None and self.replacement.keeps

    @property
    def is_starting(self) -> bool:
        """Whether the worker is being replaced, and its replacement has yet to respond for the first time."""
        return self.replacement is not None and self.replacement.is_started and not self.replacement.has_begun

    @property
    def is_first_of_generation(self) -> bool:
        """Whether the next response holds the first observations of a replacement."""
        return self.replacement is not None and self.replacement.has_begun and len(self.outbox) == 1

    @property
    def last_responses(self) -> tuple[EnvironmentResponse, ...]:
        """Responses in the outbox, without the first observations of a replacement."""
        return self.outbox[:-1] if self.replacement is not None and self.replacement.has_begun else self.outbox

    def stats(self) -> WorkerStats:
        """Return the counters and times of this worker."""
        return WorkerStats(
            self.worker_id,
            self.env_ids,
            kind=self.kind,
            waiting=self.waiting,
            replacing=self.state is WorkerState.REPLACING or self.is_kept,
            failed=self.is_given_up,
            dropped=self.is_dropped,
            generation=self.generation,
            restarts=self.restarts,
            steps=self.steps,
            **self.times.shares(self.steps),
        )


class WorkerTable:
    """The entries of one manager's workers, and the specs that their environments have reported."""

    def __init__(self, blocks: Sequence[Sequence[int]], kinds: Sequence[str] = ()) -> None:
        """``kinds``: the kind of each worker, if there are several."""
        named = zip(blocks, kinds or [""] * len(blocks), strict=True)
        self.entries = [Entry(worker_id, tuple(env_ids), kind) for worker_id, (env_ids, kind) in enumerate(named)]
        self.kinds = tuple(dict.fromkeys(kinds))
        """Kinds of environments, in the order of their environments. Empty if they are all alike."""
        self.ready: dict[Entry, None] = {}
        """READY entries, in the order of arrival."""
        self.failures: dict[Entry, None] = {}
        """READY entries whose next response is a failure, in the order of arrival. They are in ``ready`` too."""
        self.unusual: set[Entry] = set()
        """Entries whose ``is_nominal`` is false."""
        self.book: Any = None
        """The TaskBook since the last reset. Its module imports this one."""
        self.undelivered: Any = None
        """Result or error that ``step()`` or ``recv()`` has not yet returned or raised. If a Ctrl-C comes first, the
        next call returns the result or raises the error."""
        self.counts_each = False
        """Whether the steps of each generation are counted, to recycle old workers."""
        self.n_waiting = 0
        self.n_dropped = 0
        self.env_steps = 0
        self.specs: dict[str, BehaviorSpec] = {}
        self.has_objects = False
        """Whether the specs contain Python objects, which may not be picklable."""
        self.takes_actions = False
        """Whether all workers obey ``Begin.actions``."""
        self.has_several_agents = False
        """Whether an environment of a worker may have more than one."""
        self.resting: set[int] = set()
        """Workers, by worker_id, whose environments rest and whose steps are delivered. ``slowest`` leaves them out."""
        self._slowest = 0
        self._n_slowest = 0
        """Number of workers with ``_slowest`` steps since the reset, or 0 or less if they must be counted again."""

    def learn(self, specs: BehaviorSpecs, worker_id: int) -> None:
        """Add the specs of a worker's behaviors. Raise SpecConflict if a behavior already has a different spec."""
        merge_specs(self.specs, specs, seen_in="a worker before it", now_in=f"worker {worker_id}")
        self.has_objects = any(spec.has_objects for spec in self.specs.values())

    def specs_of(self, kind: str) -> Mapping[str, BehaviorSpec]:
        """Return the specs of a kind of environment, by behavior; without kinds all specs."""
        if not self.kinds:
            return self.specs
        return {name: spec for name, spec in self.specs.items() if name.partition("/")[0] == kind}

    def with_specs_learned(self, response: EnvironmentResponse) -> EnvironmentResponse:
        """Add the specs of ``response`` and return it. If a spec contradicts a known spec, return a FAILED response."""
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

    # States.

    def move(self, entries: Sequence[Entry], to: WorkerState, outbox: tuple[EnvironmentResponse, ...]) -> None:
        """Set the state of ``entries`` to ``to``, and the outbox of each to ``outbox``: empty unless ``to`` is READY.

        For an invalid transition, raise RuntimeError and change nothing.
        """
        for entry in entries:
            if to not in _MOVES[entry.state]:
                raise RuntimeError(f"worker {entry.worker_id} cannot go from {entry.state.name} to {to.name}")
        for entry in entries:
            if entry.state is _READY:
                del self.ready[entry]
                self.failures.pop(entry, None)
            self.n_waiting += _IS_WAITING[to] - _IS_WAITING[entry.state]
            entry.state, entry.outbox = to, outbox
            if outbox:
                self.ready[entry] = None
                if outbox[0].name is CommandName.FAILED:
                    self.failures[entry] = None

    def set_pending(self, entry: Entry, *responses: EnvironmentResponse) -> None:
        """Replace the outbox of ``entry`` with ``responses`` (at most two, in order). Update the state of the entry.

        The entry keeps its place in ``ready`` if the first response is unchanged. Also updates ``unusual``.
        """
        if responses and entry.outbox and responses[0] is entry.outbox[0]:
            entry.outbox = responses
        elif responses:
            self.move([entry], _READY, responses)
        elif entry.replacement is not None and not entry.is_kept:
            self.move([entry], _S.REPLACING, ())
        elif entry.is_dropped:
            self.move([entry], _S.DROPPED, ())
        else:
            self.move([entry], _IDLE if entry.error is None else _S.FAILED, ())
        self.note(entry)

    def give_up(self, entry: Entry, error: Exception, *, drop: bool) -> None:
        """Store the error for which a worker is out of use, with ``drop`` for good. ``set_pending`` must follow."""
        if entry.steps_since_reset == self._slowest:
            self._n_slowest -= 1
        entry.error, entry.replacement, entry.is_dropped = error, None, drop
        self.n_dropped += drop

    def delivered(self, entries: Sequence[Entry]) -> None:
        """Remove each entry's next response, which the caller returns or raises. Count steps and update the states."""
        now_ns, ready, n_usual = time.perf_counter_ns(), self.ready, 0
        for entry in entries:
            if entry.outbox[0].name is _STEP:
                if entry.steps_since_reset == self._slowest:
                    self._n_slowest -= 1
                entry.steps_since_reset += 1
                entry.steps += 1
                self.env_steps += entry.n_envs_in_flight
                times = entry.times
                if times.ended_ns:
                    times.queued_ns += now_ns - times.ended_ns
            if self.unusual and entry in self.unusual:
                if entry.is_first_of_generation:
                    entry.replacement, entry.ignores_action = None, False
                elif entry.outbox[0].name is CommandName.FAILED:
                    pass  # a later send() raises the error
                elif entry.replacement is not None or entry.is_dropped:
                    entry.ignores_action = True  # the trainer does not know of the failure, and will send an action
                self.set_pending(entry, *entry.outbox[1:])
            else:
                del ready[entry]
                entry.state, entry.outbox = _IDLE, ()
                n_usual += 1
        self.n_waiting -= n_usual

    def note(self, entry: Entry) -> None:
        """Update ``unusual`` after a change of ``entry`` that may have made it nominal, or not nominal."""
        if entry.is_nominal:
            self.unusual.discard(entry)
        else:
            self.unusual.add(entry)

    def slowest(self) -> int:
        """Return the least ``steps_since_reset`` of the workers that neither rest nor were given up, 0 if all do."""
        if self._n_slowest <= 0:
            steps = [each.steps_since_reset for each in self.entries if self.is_compared(each)]
            self._slowest = min(steps, default=0)
            self._n_slowest = steps.count(self._slowest)
        return self._slowest

    def is_compared(self, entry: Entry) -> bool:
        """Whether ``max_lead`` compares the worker with the others."""
        return entry.error is None and entry.worker_id not in self.resting

    def find_resting(self) -> None:
        """Find the workers that rest. One that rests no more counts as having kept up with the others meanwhile."""
        rests_in = self.book.seats.rests_in
        resting = {each.worker_id for each in self.entries if each.state is _IDLE and rests_in(each.worker_id)}
        if resting != self.resting:
            resumed, self.resting = self.resting - resting, self.resting | resting
            self._n_slowest = 0
            least = self.slowest()
            for worker_id in resumed:
                entry = self.entries[worker_id]
                entry.steps_since_reset = max(entry.steps_since_reset, least)
            self.resting, self._n_slowest = resting, 0

    def begin_counting(self) -> None:
        """Set ``steps_since_reset`` of every worker to 0."""
        self.resting = set()
        for entry in self.entries:
            entry.steps_since_reset = entry.n_lost_tasks = 0
        self._n_slowest = 0

    def clear(self) -> None:
        """Remove all steps, batches and responses, so that their memory can be freed."""
        self.undelivered = None
        self.ready.clear()
        self.failures.clear()
        for entry in self.entries:
            entry.outbox, entry.batches, entry.log = (), (), None
            entry.previous_step = entry.actions = None
