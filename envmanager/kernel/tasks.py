"""The manager's book of episodes: it advances when rows are delivered, and tells the source of tasks what came of them.

::

    source ── Drawing ──▶ a seat ── a Begin, with a step of its worker ──▶ plays ── its last row is delivered ──▶ result
                 ▲                                                           │
                 └───────────────── queue ◀── the worker was replaced ───────┘   (given up after ``attempts`` losses)

The rule: the book changes only when rows are delivered to the trainer, so it needs no word from a worker. A replacement
begins no episode by itself, unless all do. When the rows that end the old episodes are delivered, their tasks go to the
queue.

A task is drawn for an environment that rests, and begins with the next step of its worker. With ``prefetch``, one is
also drawn for each environment that plays, and the worker begins it right after the end of the present episode.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from envmanager.data.casting import actions_by_behavior
from envmanager.data.seeding import derive_seeds, reseeded, task_seed
from envmanager.data.steps import AgentSteps, Batch, Begin, CommandName, StepInfo
from envmanager.errors import EnvManagerError, UsageError
from envmanager.kernel.host import EnvWorker
from envmanager.kernel.seats import Drawn, Seat, Seats, SeatState
from envmanager.kernel.table import CANCELLED, RECYCLED, Entry, WorkerState, WorkerTable
from envmanager.observe.episodes import Episodes, FinishedEpisode
from envmanager.observe.events import TaskLost
from envmanager.system.interrupts import allow_interrupts, defer_one_interrupt, state
from envmanager.tasks import Task, TaskResult, source_of

if TYPE_CHECKING:
    from envmanager.kernel.recovery import Recovery

_WORKER_ID = attrgetter("worker_id")  # no run repeats the order of arrival
_KEPT = 10_000
"""Number of results that are kept of a source whose number of tasks is not known."""


class SourceKind(enum.Enum):
    """What begins the episodes of a manager."""

    AUTOMATIC = enum.auto()
    """The environments themselves: an episode begins when another has ended, without a task."""
    TASKS = enum.auto()
    """A list of tasks, another iterable, or an object with ``next_task``."""
    ON_CALL = enum.auto()
    """``EnvManager.begin``. A reset begins an episode in each environment."""
    POOL = enum.auto()
    """The coroutines of a pool. A reset begins no episode."""


_ON_CALL, _POOL, _IDLE = SourceKind.ON_CALL, SourceKind.POOL, WorkerState.IDLE


class Drawing:
    """The tasks of one source that have not begun, and the seats that may get one.

    A task that was lost begins before the source is asked for another. One that was lost twice begins alone in its
    worker: either it kills the worker, and would take others along, or another did.
    """

    def __init__(self, tasks: Any, seats: Seats, table: WorkerTable, recovery: Recovery) -> None:
        """``tasks`` is what tasks are drawn from, or None if calls give them. ``recovery`` knows the host."""
        self.is_listed = tasks is not None
        self.source: Any
        self.source, self.is_finite = source_of(tasks) if self.is_listed else (None, False)
        self._around_source: Any = allow_interrupts if self.source is tasks else defer_one_interrupt
        """Context in which the source gives a task. It may wait for long; an interrupt would end a generator."""
        self.given: deque[Any] = deque()
        """What the source has given and is not used, because an interrupt or an error came first."""
        self.n_given = 0
        """Number of tasks that the source was asked for."""
        self.is_exhausted = not self.is_listed
        self.is_paused = False
        """Whether the source gave no task when it was last asked, and no row was delivered since."""
        self._seats, self._table, self._recovery = seats, table, recovery
        self.n_drawn = 0
        self.free: dict[Seat, None] = dict.fromkeys(seats.all if self.is_listed else ())
        """Seats that may get a task: those that rest and, with ``prefetch``, those that play."""
        self.queue: list[Drawn] = []
        """Tasks to begin again, by index."""
        self.aside: dict[str, deque[Drawn]] = {}
        """Tasks, by their kind, that the source gave when one for another kind of environment was looked for."""
        self.reserved: int | None = None
        """Worker in which nothing begins until all its environments rest, because a task is to begin alone there."""
        self.n_charged = 0
        self.attempts, self.prefetch = 1, False

    @property
    def has_tasks(self) -> bool:
        """Whether there is a task to draw, or may be."""
        return bool(not self.is_exhausted or self.given or self.queue or any(self.aside.values()))

    @property
    def may_give(self) -> bool:
        """Whether ``assign`` may find a task for a seat that is free."""
        waits = self.is_paused and self._seats.n_active and not (self.queue or self.aside)
        return bool(self.free) and self.has_tasks and not waits

    def prepare(self, attempts: int, prefetch: bool | None) -> None:
        """Take the arguments of a reset; see ``EnvManager.reset``."""
        self.attempts, self.prefetch = attempts, not self.is_finite if prefetch is None else prefetch
        self.is_paused, self.reserved = False, None

    def may_draw(self, seat: Seat) -> None:
        """Let a seat get a task, if it has none that comes and may have one."""
        if self.is_listed and seat.next is None and (self.prefetch or seat.state is SeatState.RESTS):
            self.free[seat] = None

    def assign(self, seats: Sequence[Seat]) -> None:
        """Draw the next task for each seat, if there is one that may begin there. Raises the errors of the source."""
        self.is_paused = False
        if self.n_charged or self.queue:
            for seat in seats:
                self._assign_with_care(seat)
        elif self._table.kinds:
            for seat in seats:
                drawn = self._next_for(seat)
                if drawn is not None:
                    self.come(seat, drawn)
        else:
            self._ask(seats)
            for seat in seats:
                drawn = self._next()
                if drawn is None:
                    return
                self.come(seat, drawn)

    def take_back(self, drawn: Drawn) -> None:
        """Put a task that was assigned into the queue."""
        bisect.insort(self.queue, drawn, key=lambda each: each.index)

    def checked(self, task: Task) -> Drawn:
        """Return a task that has no number yet. Raises an error for an unknown kind, and if it cannot be sent."""
        drawn, host, kinds = Drawn(-1, task), self._recovery.host, self._table.kinds
        if task.kind is not None and task.kind not in kinds:
            known = f"the kinds are {', '.join(kinds)}" if kinds else "these environments have no kinds: leave it out"
            raise UsageError(f"there is no kind of environment {task.kind!r} for a task; {known}. Nothing was begun.")
        if task.options is not None:
            host.check_can_travel(task.options)
        if task.actions is not None or task.calls:
            if not self._table.takes_actions:
                raise UsageError(
                    "these environments cannot begin with the actions of a task: a worker would have to step one of "
                    "them alone, which vector environments and game engines do not allow. It takes Gymnasium's "
                    "environments, not a vector of them, PettingZoo's, dm_env's, or an Environment with can_rest. "
                    "Nothing was begun."
                )
            if kinds and task.kind is None:
                raise UsageError(f"a task with actions needs its kind, one of {', '.join(kinds)}. Nothing was begun.")
            drawn.actions, specs = {}, self._table.specs_of(task.kind or "")
            if task.actions is not None:
                drawn.actions = actions_by_behavior(specs, task.actions, "the actions of a task")
            if self._table.has_objects or task.calls:
                host.check_can_travel((drawn.actions, task.calls))
        return drawn

    def numbered(self, drawn: Drawn) -> Drawn:
        """Number a task as the next one that was drawn. Return it."""
        drawn.index = self.n_drawn
        self.n_drawn += 1
        return drawn

    def come(self, seat: Seat, drawn: Drawn, *, at_once: bool = False) -> None:
        """Assign a task to a seat. One with actions waits for a seat that rests, because a deadline counts them."""
        if drawn.actions is not None and not at_once and seat.state is not SeatState.RESTS:
            self.take_back(drawn)
            return
        self._seats.assign(seat, drawn, at_once=at_once)
        self.free.pop(seat, None)

    def _assign_with_care(self, seat: Seat) -> None:
        """Draw the next task for a seat, after tasks were lost. Until a suspect begins, one worker begins nothing."""
        others = [other for other in self._seats.of_worker[seat.worker_id] if other is not seat]
        if any(self._is_suspect(drawn) for other in others for drawn in other.tasks):
            return
        rests = seat.state is SeatState.RESTS
        is_alone = rests and all(other.state is SeatState.RESTS for other in others)
        kind = self._table.entries[seat.worker_id].kind
        queue = [drawn for drawn in self.queue if drawn.task.kind in (None, kind)]
        suspects = [drawn for drawn in queue if self._is_suspect(drawn)]
        drawn = None
        if suspects and (is_alone or self.reserved in (None, seat.worker_id)):
            self.reserved = None if is_alone else seat.worker_id
            drawn = suspects[0] if is_alone else None
        elif queue and rests:  # what was lost begins at once, so that its next loss is charged to it
            drawn = next((each for each in queue if not self._is_suspect(each)), None)
        if drawn is not None:
            self.queue.remove(drawn)
        elif self.reserved != seat.worker_id and (not queue or (suspects and rests)):
            drawn = self._next_for(seat)
        if drawn is not None:
            self.come(seat, drawn)

    def _is_suspect(self, drawn: Drawn) -> bool:
        return 0 < min(self.attempts - 1, 2) <= len(drawn.charges)

    def _ask(self, seats: Sequence[Seat]) -> None:
        """Ask the source for a task for each seat, unless it has given enough, none now, or the last."""
        if self.is_exhausted or self.is_paused:
            return
        given = self.given
        with self._around_source():
            for seat in itertools.islice(seats, len(given), None):
                n_given = len(given)
                given.extend(map(self.source.next_task, [seat.env_id]))  # in C: no interrupt can lose the task
                self.is_exhausted = len(given) == n_given  # it has raised StopIteration
                self.n_given += len(given) - n_given
                if self.is_exhausted or given[-1] is None:
                    return

    def _next_for(self, seat: Seat) -> Drawn | None:
        """Return the next task that may begin in a seat, or None. Tasks of other kinds that come before are put aside.

        Of a source without a known end, no more are put aside than there are environments.
        """
        kind = self._table.entries[seat.worker_id].kind
        if self.aside.get(kind):
            return self.aside[kind].popleft()
        while self.is_finite or sum(map(len, self.aside.values())) < self._seats.n_envs:
            self._ask([seat])
            drawn = self._next()
            if drawn is None or drawn.task.kind in (None, kind):
                return drawn
            self.aside.setdefault(drawn.task.kind, deque()).append(drawn)
        return None

    def _next(self) -> Drawn | None:
        """Return the next of the tasks that the source has given, or None if there is none."""
        if not self.given:
            return None
        given = self.given.popleft()
        if given is None:
            self.is_paused = True
            return None
        return self.numbered(self.checked(given if given.__class__ is Task else Task.of(given)))


_OF_DRAWING = ("n_drawn", "n_given", "is_exhausted", "is_paused", "queue", "reserved", "n_charged", "attempts")
_OF_BOOK = ("_seed", "_options", "n_lost")
"""Names of the attributes that a state of a manager has."""


class TaskBook:
    """The tasks since a reset: ``EnvManager.tasks``. Its environments are those of a manager, by env_id."""

    def __init__(
        self, kind: SourceKind, tasks: Any, table: WorkerTable, recovery: Recovery, episodes: Episodes | None
    ) -> None:
        """Draw no task yet; ``prepare`` follows, unless it is automatic. ``tasks``: None unless ``kind`` is TASKS."""
        self.kind, self.given, self.episodes = kind, tasks, episodes
        self.is_automatic = kind is SourceKind.AUTOMATIC
        """Whether environments begin their next episode by themselves. Then all seats play all the time."""
        self.is_on_call = kind in (_ON_CALL, _POOL)
        """Whether each episode is given by a call."""
        self.begins_at_once = kind is _POOL
        """Whether a worker is told of an episode at once, although others play there and nobody waits for a row."""
        self.n_lost = 0
        """Number of tasks that were given up."""
        self.seats = Seats([entry.env_ids for entry in table.entries], plays=self.is_automatic)
        self._drawing = Drawing(tasks, self.seats, table, recovery)
        source = self._drawing.source
        self._is_told = hasattr(source, "ended") or hasattr(source, "lost")
        self._table, self._recovery = table, recovery
        self.is_resetting = True
        """Whether the reset has not returned its first observations."""
        self.cuts: list[tuple[Entry, EnvManagerError, Sequence[int]]] = []
        """Losses of which the batch tells that is delivered next: the worker, the cause, and the environments."""
        self.not_begun: Mapping[int, EnvManagerError] = {}
        """Errors, by env_id, of the tasks that could not begin, as what is delivered next tells."""
        self._results: deque[TaskResult] = deque(maxlen=None if self._drawing.is_finite else _KEPT)
        self.untold: deque[TaskResult] = deque()
        self._again: np.ndarray | None = None
        """Whether each environment's next row shows where a restored manager stands, by env_id; None after a reset."""
        if episodes is not None:
            episodes.of_tasks = None if self.is_automatic else self._episode_ended

    # What the user asks.

    @property
    def done(self) -> bool:
        """Whether there are no more tasks, each has ended or was given up, and the trainer and the source know it."""
        is_busy = self._drawing.has_tasks or self.seats.n_active
        return not (is_busy or self.untold or self._table.undelivered is not None)

    @property
    def results(self) -> list[TaskResult]:
        """Results of the tasks that have ended or were given up, in the order in which the source gave the tasks.

        If it did not say how many there are, the results of the last 10,000 tasks to end are kept. The options and the
        actions of those that ``begin`` or a pool gave are not: they may be large.
        """
        return sorted(self._results, key=lambda result: result.index)

    @property
    def running(self) -> dict[int, int | None]:
        """The env_id in which each task under way plays, or None if it waits to be played again, by the task's index.

        Each task that was drawn is here or in ``results``.
        """
        waiting = itertools.chain(self._drawing.queue, *self._drawing.aside.values())
        env_ids: dict[int, int | None] = dict.fromkeys([drawn.index for drawn in waiting])
        env_ids.update((drawn.index, seat.env_id) for seat in self.seats.all for drawn in seat.tasks)
        return dict(sorted(env_ids.items()))

    @property
    def seed(self) -> int | None:
        """The seed of the reset, if it was one number."""
        return self._seed if isinstance(self._seed, int) else None

    @property
    def is_restored(self) -> bool:
        """Whether it goes on from a state."""
        return self._again is not None

    @property
    def n_drawn(self) -> int:
        """Number of tasks that the source has given, and that were taken."""
        return self._drawing.n_drawn

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.n_drawn:,} drawn, {len(self.running):,} running, {self.n_lost:,} lost>"

    # Tasks to begin.

    @property
    def rests(self) -> bool:
        """Whether no environment plays or has a task coming, although tasks left have a worker. A pool may."""
        return self.begins_at_once or (
            not self.seats.n_active and (self.done or any(entry.error is None for entry in self._table.entries))
        )

    def draw(self) -> None:
        """Assign tasks to environments that may get one and whose worker is idle. Raises the errors of the source."""
        drawing, entries, unusual = self._drawing, self._table.entries, self._table.unusual
        if not (drawing.free or self.untold or unusual):
            return
        for entry in list(unusual):
            if entry.error is not None and not entry.outbox:
                self.lose(entry, entry.error)
        if self._table.kinds and (drawing.queue or drawing.aside):
            self._give_up_hopeless()
        if self.untold:
            self.tell()
        if drawing.may_give:
            free = [(seat, entries[seat.worker_id]) for seat in drawing.free]
            drawing.assign([seat for seat, own in free if own.state is _IDLE and not own.is_old and own not in unusual])

    def _give_up_hopeless(self) -> None:
        """Give up the tasks of kinds of environments of which no worker is left."""
        drawing, entries = self._drawing, self._table.entries
        alive = {None, *(entry.kind for entry in entries if entry.error is None)}
        hopeless = [drawn for drawn in drawing.queue if drawn.task.kind not in alive]
        drawing.queue = [drawn for drawn in drawing.queue if drawn.task.kind in alive]
        for kind in drawing.aside.keys() - alive:
            hopeless += drawing.aside.pop(kind)
        for drawn in hopeless:
            entry = next(each for each in entries if each.kind == drawn.task.kind)
            self._give_up(self.seats.of_worker[entry.worker_id][0], drawn, entry.error or EnvManagerError())

    def draw_first(self) -> None:
        """Assign the first tasks to all environments, before a reset. Raises the errors of the source."""
        self._drawing.assign([seat for seat in self.seats.all if not self._table.entries[seat.worker_id].is_dropped])

    def first_of(self, entry: Entry, config: Any, seed: Any, generation: int = 0, *, is_replaced: bool = False) -> Any:
        """Return what a worker is reset with: ``config``, or the episodes that it begins with.

        If ``begin`` begins the others, a reset begins one in each environment, from ``seed``. A replacement at any
        other time begins none at once; in a reset it does with kept episodes: those of its predecessor too.
        """
        keeper = self._recovery.keeper
        if self.is_automatic:
            return config if keeper is None else keeper.begins_of_series(entry)
        if self.kind is not _ON_CALL or not self.is_resetting:
            if is_replaced and (keeper is None or not self.is_resetting):
                return []
            again = [seat.told for seat in self.seats.of_worker[entry.worker_id] if seat.state is SeatState.SENT]
            return again + self._begins_of(entry.worker_id)
        if seed is None and keeper is not None:
            seed = keeper.seed_of_reset()
        seats, seeds = self.seats.of_worker[entry.worker_id], derive_seeds(seed, entry.env_ids, generation)
        self.seats.send(seats)
        for seat, own_seed in zip(seats, seeds, strict=True):
            seat.told = Begin(seat.row, True, own_seed, self._options)
        return [seat.told for seat in seats]

    def prepare(self, *, seed: Any, options: Mapping[str, Any] | None, attempts: int, prefetch: bool | None) -> None:
        """Take the arguments of a reset. If one was tried before, take back all tasks that have not ended.

        ``seed`` and ``options`` are those of the reset. ``attempts``, ``prefetch``: see ``EnvManager.reset``.
        """
        self._seed, self._options, self.is_resetting = seed, options, True
        self._drawing.prepare(attempts, prefetch)
        for seat in self.seats.all:
            for drawn in self.seats.vacate(seat)[:2]:
                if drawn is not None:
                    self._drawing.take_back(drawn)
            self._drawing.may_draw(seat)

    def add(self, env_ids: Sequence[int], tasks: Sequence[Task], *, may_cut: bool) -> None:
        """Begin a task in each environment with its worker's next step. If one plays, its episode is cut.

        ``may_cut``: whether that is possible in a worker with several environments.
        """
        seats, given = [self.seats.all[env_id] for env_id in env_ids], []
        for seat, task in zip(seats, tasks, strict=True):
            entry = self._table.entries[seat.worker_id]
            entry.require_alive()
            if entry.kind and task.kind not in (None, entry.kind):
                raise UsageError(
                    f"env {seat.env_id} is of the kind {entry.kind}, and the task of {task.kind}. Nothing was begun."
                )
            if seat.state in (SeatState.PLAYS, SeatState.CUT) and not may_cut and len(entry.env_ids) > 1:
                raise UsageError(
                    f"env {seat.env_id} plays, and the environments of its worker move together: begin an episode "
                    "there when that one has ended. Nothing was begun."
                )
            given.append(self._drawing.checked(task))
            if seat.state is SeatState.SENT:
                raise UsageError(
                    f"env {seat.env_id} has just begun an episode, and recv() has not returned its first observation: "
                    "call recv() before begin(). Nothing was begun."
                )
        for seat, drawn in zip(seats, given, strict=True):
            if seat.next is not None:
                self._finish(seat, seat.next, cut=True)
            self._drawing.come(seat, self._drawing.numbered(drawn), at_once=True)

    def withdraw(self, env_id: int) -> None:
        """Take back the episode that an environment is to begin, unless its worker knows of it. What plays goes on."""
        seat = self.seats.all[env_id]
        if seat.next is not None and seat.state is not SeatState.SENT:
            self._finish(seat, seat.next, cut=True)
            self.seats.withdraw(seat)

    def send_begins(self, worker_id: int, worker: EnvWorker, *, to_old: bool = False) -> None:
        """Send a worker the episodes that it is to begin and does not know of. A step must follow.

        Those that ``begin`` gave to an old worker wait for its replacement, unless they cut another or ``to_old``.
        """
        unsent = self.seats.untold.get(worker_id, ())
        to_old = to_old or not self.is_on_call or not self._table.entries[worker_id].is_old
        if unsent and (to_old or any(seat.state is SeatState.CUT for seat in unsent)):
            worker.send(CommandName.BEGIN, self._begins_of(worker_id))

    def _begins_of(self, worker_id: int) -> list[Begin]:
        begins, keeper = [], self._recovery.keeper
        for seat, drawn, at_once in self.seats.tell(worker_id):
            seed, options = self._arguments(seat, drawn)
            if seed is None and keeper is not None:  # what is to be begun again needs one
                seed = task_seed(keeper.seed, drawn.index)
            own = drawn.actions, None, drawn.task.calls
            seat.told = Begin(seat.row, at_once, seed, options, drawn.index, *own)
            begins.append(seat.told)
        return begins

    def _arguments(self, seat: Seat, drawn: Drawn) -> tuple[int | None, Mapping[str, Any] | None]:
        """Return the seed and options with which a task begins in an environment."""
        task, seed, options = drawn.task, drawn.task.seed, self._options
        if not task.inherits:
            if seed is None and seat.is_new:
                generation = self._table.entries[seat.worker_id].generation
                (seed,) = derive_seeds(reseeded(self._seed, generation), [seat.env_id], generation)
            return seed, task.options
        own_seed = self._seed if self._seed is None or isinstance(self._seed, int) else self._seed[seat.env_id]
        if seed is None and own_seed is not None:
            seed = task_seed(own_seed, drawn.index)
        if task.options is not None:
            options = dict(task.options) if options is None else {**options, **task.options}
        return seed, options

    # Rows that are delivered.

    def note_first(self, infos: Iterable[StepInfo]) -> None:
        """Take note of the StepInfos that a reset returns."""
        self.is_resetting = False
        self._give_up_not_begun()
        if self.episodes is not None:
            self.episodes.add_all(infos)
        for info in () if self.is_automatic else infos:
            for seat in self.seats.of_worker[info.worker_id]:
                if self.seats.first[seat.env_id]:
                    self._begin(seat)
            info.of_tasks = self.seats.tasks_in(info.worker_id), {}

    def offer_first(self, steps: AgentSteps) -> AgentSteps:
        """Take note that ``recv`` returns first observations of a reset again. Return those that it may return.

        An environment that is about to begin another episode has none.
        """
        plays = self.seats.acts[steps.env_id]
        for env_id, is_first in zip(steps.env_id.tolist(), plays.tolist(), strict=True):
            self.seats.set_first(self.seats.all[env_id], is_first)
        if self._again is not None:
            self._again[steps.env_id] = plays
        return steps if plays.all() else steps.take(np.flatnonzero(plays))

    def add_batch(self, behavior: str, batch: Batch) -> None:
        """Set the tasks of a batch that is delivered, and advance the book."""
        self._drawing.is_paused = False
        if self.not_begun:
            self._give_up_not_begun()
        seats, env_ids = self.seats, batch.env_ids
        first = again = task = final = ended = None
        if seats.n_first:
            first = seats.first[env_ids]
            for env_id in sorted(env_ids[first].tolist()):
                self._begin(seats.all[env_id])
            if self._again is not None:
                again, self._again[env_ids] = self._again[env_ids], False
                first &= ~again
        if self.episodes is not None:
            ended = self.episodes.add_batch(behavior, batch, first, again)
        if not self.is_automatic:
            task = seats.index[env_ids]
            if ended is not None:
                final = task[ended]
                if self.cuts:
                    ended = ended & ~batch.lost
                terminated = batch.terminated
                for place in sorted(np.flatnonzero(ended).tolist(), key=env_ids.__getitem__):
                    seat = seats.all[env_ids[place]]
                    if self._end(seat, terminated=bool(terminated[place])):
                        task[place] = seats.index[seat.env_id]
            for entry, cause, lost in sorted(self.cuts, key=lambda cut: cut[0].worker_id):
                self.lose(entry, cause, lost)
        batch.of_tasks = first, task, final

    def add_all(self, infos: Iterable[StepInfo]) -> None:
        """Set the tasks of StepInfos that are delivered, and advance the book."""
        self._drawing.is_paused = False
        if self.not_begun:
            self._give_up_not_begun()
        seats, episodes = self.seats, self.episodes
        assert episodes is not None
        for info in sorted(infos, key=_WORKER_ID):
            worker_id = info.worker_id
            episodes.add(info, seats.n_first_in[worker_id])
            if self.is_automatic:
                continue
            lost = () if info.lost is None else info.lost.env_ids
            if seats.n_first_in[worker_id]:
                for seat in seats.of_worker[worker_id]:
                    if seats.first[seat.env_id] and seat.env_id not in lost:
                        self._begin(seat)
            tasks = seats.tasks_in(worker_id)
            resting, acting, terminated = set(), set(), set()
            if any(steps.ended.any() for steps in info.current.values()):
                for steps in info.current.values():
                    env_ids = steps.env_id
                    acting.update(env_ids[steps.acting_rows].tolist())
                    resting.update(env_ids[steps.ended].tolist())
                    terminated.update(env_ids[steps.terminated].tolist())
            final = {env_id: tasks[env_id] for env_id in lost if env_id in tasks}
            for env_id in sorted(resting.difference(lost)):
                seat = seats.all[env_id]
                if env_id not in acting or seat.is_laid:
                    if env_id in tasks:
                        final[env_id] = tasks[env_id]
                    self._end(seat, terminated=env_id in terminated)
            info.of_tasks = {**final, **seats.tasks_in(worker_id)} if final else tasks, final
            for entry, cause, own in self.cuts if lost else ():
                if entry.worker_id == worker_id:
                    self.lose(entry, cause, own)

    def _begin(self, seat: Seat) -> None:
        """Take note of the first row of an episode that was begun at once."""
        is_new = seat.state is SeatState.SENT
        before = self.seats.begin(seat)
        if is_new:  # else its first row is delivered once more
            self._log_begin(seat)
            self._note_calls(seat)
        if before is not None:
            self._finish(seat, before, cut=True)
        self._has_changed(seat)

    def note_begins(self, worker_id: int) -> None:
        """Take note of what the calls of episodes that are begun have set, because a ``set_attr`` came after them."""
        for seat in self.seats.of_worker[worker_id]:
            if seat.state is SeatState.SENT:
                self._note_calls(seat)

    def _note_calls(self, seat: Seat) -> None:
        entry, begin = self._table.entries[seat.worker_id], seat.told
        if begin is None or not begin.calls or begin is seat.noted:
            return
        seat.noted = begin
        for call in begin.calls:
            if call.command == CommandName.SET_ATTR and call.after >= 0:
                entry.remember(str(call.name), call.args, [seat.row])
        if entry.log is not None:
            entry.log.note(seat.row, begin.calls, is_of_begin=True)

    def _log_begin(self, seat: Seat) -> None:
        log = self._table.entries[seat.worker_id].log
        if log is not None:
            log.begin(seat.row)

    def _end(self, seat: Seat, *, terminated: bool) -> bool:
        """Take note of an episode's end. Return whether the worker has begun the next one."""
        if seat.playing is not None:
            self._finish(seat, seat.playing, terminated=terminated)
            self._table.entries[seat.worker_id].n_lost_tasks = 0
        goes_on = self.seats.end(seat)
        self._log_begin(seat)
        self._has_changed(seat)
        return goes_on

    def lose(self, entry: Entry, error: Exception, env_ids: Sequence[int] | None = None) -> None:
        """Take back the tasks of a worker that was replaced or given up, or only those of ``env_ids``.

        The loss is charged to the episodes of the environments that the error names, and to nobody if the worker was
        recycled or a Ctrl-C cut its step. What was to begin after the present episode may not have begun: no charge.
        """
        if self.is_automatic:
            return
        named = getattr(error, "env_ids", entry.env_ids)
        phase = getattr(error, "phase", "")
        is_planned, is_cancelled = phase == RECYCLED, phase == CANCELLED
        is_charged = not is_planned and getattr(error, "type_name", "") != "KeyboardInterrupt"
        for seat in self.seats.of_worker[entry.worker_id]:
            if env_ids is not None and seat.env_id not in env_ids:
                continue
            is_left = self.is_on_call and (is_planned or is_cancelled or seat.state is not SeatState.PLAYS)
            playing, coming, was_begun = self.seats.vacate(seat)
            seat.is_new = True
            charge = is_charged and seat.env_id in named
            if playing is not None and is_left:
                self._finish(seat, playing, cut=True)
            elif playing is not None:
                self._take_back(seat, playing, error, charge=charge, is_lost=True)
            is_kept = entry.error is None and self.is_on_call and (is_planned or not self.begins_at_once)
            if coming is not None and is_kept:
                self._drawing.come(seat, coming)
            elif coming is not None and is_cancelled:
                self._finish(seat, coming, cut=True)
            elif coming is not None:
                self._take_back(seat, coming, error, charge=charge and was_begun, is_lost=was_begun)
            self._has_changed(seat)
        if entry.error is not None and self._drawing.reserved == entry.worker_id:
            self._drawing.reserved = None

    def _give_up_not_begun(self) -> None:
        """Give up the tasks of ``not_begun``. Nothing is charged to their workers, which go on."""
        for env_id, error in sorted(self.not_begun.items()):
            seat = self.seats.all[env_id]
            if seat.state is SeatState.SENT:
                playing, drawn, _ = self.seats.vacate(seat)
                if playing is not None:
                    self._finish(seat, playing, cut=True)
                assert drawn is not None
                self._give_up(seat, drawn, error)
                self._has_changed(seat)

    def under_way(self, worker_id: int) -> tuple[int, ...]:
        """Return the indices of the tasks that play in a worker, or whose episodes it has begun."""
        seats = self.seats.of_worker[worker_id]
        begun = [seat.next for seat in seats if seat.state is SeatState.SENT]
        return tuple(drawn.index for drawn in (*(seat.playing for seat in seats), *begun) if drawn is not None)

    def _take_back(self, seat: Seat, drawn: Drawn, error: Exception, *, charge: bool, is_lost: bool) -> None:
        """Take a task back from a worker that has failed. ``is_lost``: whether its episode had begun there."""
        drawing, entry = self._drawing, self._table.entries[seat.worker_id]
        if charge:
            drawn.charges.append(error)
            drawing.n_charged += 1
        is_given_up = self.is_on_call or len(drawn.charges) >= drawing.attempts
        if self.kind is not _ON_CALL:
            self._recovery.excuse(entry, drawn.charges[0 if is_given_up else 1 :])
        if is_given_up:
            entry.n_lost_tasks += 1
            self._give_up(seat, drawn, error)
            return
        if is_lost:
            self._tell_lost(seat, drawn, is_given_up=False)
        drawing.take_back(drawn)

    def _give_up(self, seat: Seat, drawn: Drawn, error: Exception) -> None:
        self._tell_lost(seat, drawn, is_given_up=True)
        self.n_lost += 1
        self._finish(seat, drawn, error=error)

    def _tell_lost(self, seat: Seat, drawn: Drawn, *, is_given_up: bool) -> None:
        entry, losses = self._table.entries[seat.worker_id], len(drawn.charges)
        facts = {"worker_id": entry.worker_id, "generation": entry.generation, "env_id": seat.env_id}
        self._recovery.events.add(TaskLost(**facts, index=drawn.index, losses=losses, is_given_up=is_given_up))

    def _finish(
        self, seat: Seat, drawn: Drawn, *, terminated: bool = False, error: Exception | None = None, cut: bool = False
    ) -> None:
        episodes = () if error is not None or cut else tuple(seat.ended)
        task = attrs.evolve(drawn.task, options=None, actions=None, calls=()) if self.is_on_call else drawn.task
        result = TaskResult(drawn.index, task, seat.env_id, terminated, drawn.attempts, error, cut, episodes)
        self._results.append(result)
        if self._is_told:
            self.untold.append(result)

    def state(self) -> dict[str, Any]:
        """Return what a state of the manager has, beside the seats. Raises UsageError if its place is not known."""
        drawing = self._drawing
        if self.is_automatic:
            return {}
        if self.kind is _POOL:
            raise UsageError("the state of a manager that a pool uses cannot be taken: its coroutines are not data.")
        has_place = callable(getattr(drawing.source, "state", None))
        if drawing.is_listed and not (drawing.is_finite or has_place):
            raise UsageError(
                "the state of an iterator of tasks cannot be taken, because its place is not known: pass a list, or a "
                "source of tasks with methods state() and restore(state)."
            )
        return {
            **{name: getattr(self, name) for name in _OF_BOOK},
            "untold": list(self.untold),
            "results": list(self._results) if drawing.is_finite else [],
            "drawing": {name: getattr(drawing, name) for name in _OF_DRAWING},
            "given": list(drawing.given),
            "aside": {kind: list(waiting) for kind, waiting in drawing.aside.items()},
            "prefetch": drawing.prefetch,
            "free": [seat.env_id for seat in drawing.free],
            "source": drawing.source.state() if has_place else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned, with a source that stands at its beginning. The seats are restored."""
        self.is_resetting, self._again = False, np.zeros(self.seats.n_envs, np.bool_)
        if self.is_automatic:
            return
        drawing = self._drawing
        for owner, names, values in ((self, _OF_BOOK, state), (drawing, _OF_DRAWING, state["drawing"])):
            for name in names:
                setattr(owner, name, values[name])
        self.untold.extend(state["untold"])
        self._results.extend(state["results"])
        drawing.given, drawing.prefetch = deque(state["given"]), state["prefetch"]
        drawing.aside = {kind: deque(waiting) for kind, waiting in state["aside"].items()}
        drawing.free = dict.fromkeys(self.seats.all[env_id] for env_id in state["free"])
        if state["source"] is not None:
            drawing.source.restore(state["source"])
            return
        try:
            for _ in range(drawing.n_given):  # of a list
                drawing.source.next_task(0)
        except StopIteration:
            raise UsageError(f"the state has drawn {drawing.n_given} tasks, but the list has fewer.") from None

    def tell(self) -> None:
        """Tell the source the results that it does not know, each once. Raises the errors of its methods."""
        source = self._drawing.source
        while self.untold and not state.was_interrupted:  # then the call is to end, and the next one tells the others
            result = self.untold.popleft()
            with defer_one_interrupt():
                if result.error is None and hasattr(source, "ended"):
                    source.ended(result)
                elif result.error is not None and hasattr(source, "lost"):
                    source.lost(result.task, result.error)

    def _episode_ended(self, episode: FinishedEpisode) -> None:
        seat = self.seats.all[episode.env_id]
        episode.task = -1 if seat.playing is None else seat.playing.index
        seat.ended.append(episode)

    def _has_changed(self, seat: Seat) -> None:
        """Let a seat draw if it may, and show the tasks of its worker in the trace."""
        self._drawing.may_draw(seat)
        entry = self._table.entries[seat.worker_id]
        if entry.times.track is not None:
            entry.times.track.begin(entry.generation, self.seats.tasks_in(entry.worker_id))
