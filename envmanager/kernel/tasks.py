"""The manager's book of episodes that begin on demand: which task each environment plays, and which it plays next.

::

    source ── draw ──▶ coming ── a Begin, with a step of its worker ──▶ playing ── its last row is delivered ──▶ result
              ▲                                                            │
              └───────────────── queue ◀── the worker was replaced ────────┘   (given up after ``attempts`` losses)

The rule: the book changes only when rows are delivered to the trainer, so it needs no word from a worker. A replacement
begins no episode by itself. When the rows that end the old episodes are delivered, their tasks go to the queue.

A task is drawn for an environment that rests, and begins with the next step of its worker. With ``prefetch``, one is
also drawn for each environment that plays, and the worker begins it right after the end of the present episode.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.seeding import derive_seeds, reseeded, task_seed
from envmanager.data.steps import Batch, Begin, CommandName, StepInfo
from envmanager.errors import EnvManagerError, UsageError
from envmanager.kernel.host import EnvWorker
from envmanager.kernel.table import RECYCLED, Entry, WorkerState, WorkerTable
from envmanager.observe.episodes import Episode, Episodes
from envmanager.observe.events import EventLog, TaskLost
from envmanager.system.interrupts import allow_interrupts
from envmanager.tasks import Task, TaskResult, source_of

_KEPT = 10_000
"""Number of results that are kept of a source whose number of tasks is not known."""


@attrs.define(eq=False)
class _Drawn:
    """A task that was drawn."""

    index: int
    task: Task
    attempts: int = 0
    """Number of times that it was begun."""
    charges: list[Exception] = attrs.field(factory=list)
    """Errors of the attempts whose loss is charged to it."""


@attrs.define(eq=False)
class _Seat:
    """One environment, as the trainer knows it from the rows that were delivered."""

    env_id: int
    row: int
    entry: Entry
    plays: bool = False
    playing: _Drawn | None = None
    """Task of the episode that plays; None if a reset has begun it without tasks."""
    coming: _Drawn | None = None
    """Task of the next episode."""
    is_sent: bool = False
    """Whether the worker knows ``coming``."""
    cuts: bool = False
    """Whether ``coming`` begins at once though the environment plays."""
    is_new: bool = False
    """Whether no episode has begun in it since its worker was replaced."""
    ended: list[Episode] = attrs.field(factory=list)
    """Episodes of agents that ended in the episode that it plays."""


class TaskBook:
    """The tasks since a reset: ``EnvManager.tasks``. Its environments are those of a manager, by env_id."""

    def __init__(
        self,
        tasks: Any,
        table: WorkerTable,
        events: EventLog,
        episodes: Episodes,
        check: Callable[[Any], None],
        has_undelivered: Callable[[], Any],
        excuse: Callable[[Entry, Sequence[Exception]], Any],
        *,
        seed: Any,
        options: Mapping[str, Any] | None,
        attempts: int,
        prefetch: bool | None,
        is_pooled: bool = False,
    ) -> None:
        """Draw no task yet. ``tasks`` is None if only ``add`` gives tasks. ``check`` raises if options cannot be sent.
        ``has_undelivered`` says whether rows that this book has noted are yet to be returned to the trainer. ``excuse``
        is called with a worker and the failures for which the task that was lost there accounts.

        ``seed`` and ``options`` are those of the reset. ``attempts``, ``prefetch``: see ``EnvManager.reset``.
        """
        self.given = tasks
        self.n_lost = 0
        """Number of tasks that were given up."""
        self.is_pooled = is_pooled
        """Whether a pool begins all episodes: not even a reset begins one, none is begun again after a loss, and none
        waits for an action to another environment of its worker."""
        self._source: Any
        self._source, self._is_finite = (None, False) if tasks is None else source_of(tasks)
        self._around_source: Any = allow_interrupts if self._source is tasks else contextlib.nullcontext
        """Context in which the source gives a task. It may wait for long; an interrupt would end a generator."""
        self._given: deque[Any] = deque()
        """What the source has given and is not used, because an interrupt or an error came first."""
        self._is_told = hasattr(self._source, "ended") or hasattr(self._source, "lost")
        """Whether the source has methods to be told of results."""
        self._is_exhausted = tasks is None
        self._is_paused = False
        """Whether the source gave no task when it was last asked, and no row was delivered since."""
        self._prefetch = not self._is_finite if prefetch is None else prefetch
        self._attempts = attempts
        self._seed, self._options = seed, options
        self._table, self._events, self._episodes, self._check = table, events, episodes, check
        self._has_undelivered, self._excuse = has_undelivered, excuse
        episodes.of_tasks = self._episode_ended
        self.n_drawn = 0
        """Number of tasks that the source has given so far."""
        self._is_resetting = True
        self._of_worker = [
            [_Seat(env_id, row, entry) for row, env_id in enumerate(entry.env_ids)] for entry in table.entries
        ]
        self._seats = [seat for seats in self._of_worker for seat in seats]
        n_envs, n_workers = len(self._seats), len(table.entries)
        self._free: dict[int, None] = {} if tasks is None else dict.fromkeys(range(n_envs))
        """Environments that may get a task, by env_id: those that rest and, with ``prefetch``, those that play."""
        self._queue: list[_Drawn] = []
        """Tasks to begin again, by index."""
        self._reserved: int | None = None
        """Worker in which nothing begins until all its environments rest, because a task is to begin alone there."""
        self.cuts: list[tuple[Entry, EnvManagerError]] = []
        """Workers whose replacement the batch tells of that is delivered next, and the causes."""
        self.has_unsent: dict[int, list[_Seat]] = {}
        """By worker_id, the environments that have got a task since their worker was last told what to begin."""
        self._n_charged = 0
        """Number of losses charged to any task."""
        self._n_active = 0
        """Number of environments that play or have a task coming."""
        self._begun = np.zeros(n_envs, np.bool_)
        """Whether the next row of each environment is the first of an episode."""
        self.acts = np.zeros(n_envs, np.bool_)
        """Whether each environment takes an action, or has taken one and the result was not delivered: bool[n_envs]."""
        self.n_begun = [0] * n_workers
        """Sums of ``_begun`` by worker_id."""
        self.n_acting = self._n_begun = 0
        """Sums of ``acts`` and ``_begun``."""
        self._index = np.full(n_envs, -1, np.int64)
        """Index of the task that each environment plays."""
        self._tasks_of: list[Mapping[int, int] | None] = [None] * n_workers
        """The same by worker_id and env_id, or None after a change. StepInfos hold these mappings."""
        self._results: deque[TaskResult] = deque(maxlen=None if self._is_finite else _KEPT)
        self.untold: deque[TaskResult] = deque()
        """Results that the source is yet to be told."""

    # What the user asks.

    @property
    def done(self) -> bool:
        """Whether there are no more tasks, each has ended or was given up, and the trainer and the source know it."""
        has_tasks = not self._is_exhausted or self._given or self._queue or self._n_active
        return not (has_tasks or self.untold or self._has_undelivered())

    @property
    def results(self) -> list[TaskResult]:
        """Results of the tasks that have ended or were given up, in the order in which the source gave the tasks.

        If it did not say how many there are, the results of the last 10,000 tasks to end are kept.
        """
        return sorted(self._results, key=lambda result: result.index)

    @property
    def running(self) -> dict[int, int | None]:
        """The env_id in which each task under way plays, or None if it waits to be played again, by the task's index.

        Each task that was drawn is here or in ``results``.
        """
        env_ids: dict[int, int | None] = dict.fromkeys([drawn.index for drawn in self._queue])
        for seat in self._seats:
            env_ids.update((drawn.index, seat.env_id) for drawn in (seat.playing, seat.coming) if drawn is not None)
        return dict(sorted(env_ids.items()))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.n_drawn:,} drawn, {len(self.running):,} running, {self.n_lost:,} lost>"

    # Tasks to begin.

    @property
    def rests(self) -> bool:
        """Whether no environment plays or has a task coming, although tasks that are left have a worker. Of a pool,
        whether there is nothing to wait for, which is no mistake of its.
        """
        return self.is_pooled or (
            not self._n_active and (self.done or any(entry.error is None for entry in self._table.entries))
        )

    def draw(self) -> None:
        """Assign tasks to environments that may get one and whose worker is idle. Raises the errors of the source."""
        if not (self._free or self.untold or self._table.unusual):
            return
        if self.untold:
            self.tell()
        if self._table.unusual:
            for entry in [each for each in self._table.unusual if not each.outbox]:
                if entry.error is not None:
                    self.lose(entry, entry.error)
        gives_none = (self._is_exhausted and not self._given) or (self._is_paused and self._n_active)
        if not self._free or (gives_none and not self._queue):
            return
        self._is_paused = False
        seats = [seat for seat in (self._seats[env_id] for env_id in self._free) if not seat.entry.is_old]
        self._assign_all(
            [seat for seat in seats if seat.entry.state is WorkerState.IDLE and seat.entry not in self._table.unusual]
        )

    def draw_first(self) -> None:
        """Assign the first tasks to all environments, before a reset. Raises the errors of the source."""
        if self._source is not None:
            self._assign_all([seat for seat in self._seats if not seat.entry.is_dropped])

    def first(self, entries: Iterable[Entry], seed: Any, generation: int = 0) -> dict[int, list[Begin]]:
        """Return what workers begin in a reset, by worker_id: tasks or, without a source, an episode from ``seed``."""
        if self._source is not None or self.is_pooled:
            return {entry.worker_id: self._begins_of(entry.worker_id) for entry in entries}
        begins = {}
        for entry in entries:
            seats = self._of_worker[entry.worker_id]
            seeds = derive_seeds(seed, entry.env_ids, generation)
            begins[entry.worker_id] = [
                Begin(seat.row, True, seed, self._options) for seat, seed in zip(seats, seeds, strict=True)
            ]
            for seat in seats:
                self._n_active += not self._begun[seat.env_id]
                self._set_begun(seat, True)
        return begins

    def first_of_replacement(self, entry: Entry, generation: int) -> list[Begin]:
        """Return what a replacement begins at once: nothing, unless a reset without a source replaces the worker.

        ``generation``: that from which its seeds are derived.
        """
        if self._source is not None or not self._is_resetting or self.is_pooled:
            return []
        return self.first([entry], reseeded(self._seed, generation), generation)[entry.worker_id]

    def again(self, *, seed: Any, options: Mapping[str, Any] | None, attempts: int, prefetch: bool | None) -> TaskBook:
        """Take back all tasks that have not ended, for another try of a reset that has failed. Return the book."""
        self._seed, self._options, self._attempts = seed, options, attempts
        self._prefetch = not self._is_finite if prefetch is None else prefetch
        self._is_paused, self._reserved = False, None
        self.has_unsent.clear()
        for seat in self._seats:
            for drawn in self._vacate(seat)[:2]:
                if drawn is not None:
                    bisect.insort(self._queue, drawn, key=lambda each: each.index)
            self._free[seat.env_id] = None
        return self

    def add(self, env_ids: Sequence[int], tasks: Sequence[Task], *, may_cut: bool) -> None:
        """Begin a task in each environment with its worker's next step. If one plays, its episode is cut.

        ``may_cut``: whether that is possible in a worker with several environments.
        """
        seats = [self._seats[env_id] for env_id in env_ids]
        for seat, task in zip(seats, tasks, strict=True):
            seat.entry.require_alive()
            if seat.plays and not may_cut and len(seat.entry.env_ids) > 1:
                raise UsageError(
                    f"env {seat.env_id} plays, and the environments of its worker move together: begin an episode "
                    "there when that one has ended. Nothing was begun."
                )
            self._check(task.options)
            if seat.is_sent:
                raise UsageError(
                    f"env {seat.env_id} has just begun an episode, and recv() has not returned its first observation: "
                    "call recv() before begin(). Nothing was begun."
                )
        for seat, task in zip(seats, tasks, strict=True):
            if seat.coming is not None:
                self._finish(seat, seat.coming, cut=True)
                self._n_active -= not seat.plays
            self._come(seat, self._numbered(task))
            seat.cuts = seat.plays
            self._set_acts(seat, False)

    def withdraw(self, env_id: int) -> bool:
        """Take back the episode that an environment is to begin, unless its worker knows of it. Return whether it was.

        The episode that plays there, if any, goes on.
        """
        seat = self._seats[env_id]
        if seat.coming is None or seat.is_sent:
            return False
        self._finish(seat, seat.coming, cut=True)
        seat.coming, seat.cuts = None, False
        self._n_active -= not seat.plays
        self._set_acts(seat, seat.plays)
        unsent = self.has_unsent[seat.entry.worker_id]
        unsent.remove(seat)
        if not unsent:
            del self.has_unsent[seat.entry.worker_id]
        return True

    def send_begins(self, worker_id: int, worker: EnvWorker) -> None:
        """Send a worker the episodes that it is to begin and does not know of. A step must follow."""
        if worker_id in self.has_unsent:
            worker.send(CommandName.BEGIN, self._begins_of(worker_id))

    def _begins_of(self, worker_id: int) -> list[Begin]:
        begins = []
        for seat in self.has_unsent.pop(worker_id, ()):
            drawn = seat.coming
            if drawn is not None and not seat.is_sent:
                seat.is_sent, at_once = True, not seat.plays or seat.cuts
                begins.append(Begin(seat.row, at_once, *self._arguments(seat, drawn), drawn.index))
                if at_once:
                    drawn.attempts += 1
                    self._set_begun(seat, True)
        return begins

    def resting_workers(self) -> set[int]:
        """Return the worker_ids of workers that have nothing to do, and no step that was not delivered."""
        entries = self._table.entries
        return {each.worker_id for each in entries if each.state is WorkerState.IDLE and self.rests_in(each.worker_id)}

    def require_source(self) -> None:
        """Raise UsageError if only ``begin`` gives tasks, which ``step`` has no moment for."""
        if self._source is None:
            raise UsageError(
                'with episodes="on_demand", step() needs tasks to begin episodes with: call reset(tasks=…), or use '
                "send(), recv() and begin()."
            )

    def rests_in(self, worker_id: int) -> bool:
        """Whether a worker has nothing to do: no environment that takes an action, and no episode to begin."""
        return not self._table.entries[worker_id].n_acting and worker_id not in self.has_unsent

    def _assign_all(self, seats: Sequence[_Seat]) -> None:
        """Draw the next task for each environment, if there is one that may begin there."""
        if self._n_charged or self._queue:
            for seat in seats:
                self._assign_with_care(seat)
        else:
            self._ask(seats)
            for seat in seats:
                drawn = self._next()
                if drawn is None:
                    return
                self._come(seat, drawn)

    def _assign_with_care(self, seat: _Seat) -> None:
        """Draw the next task for an environment, after tasks were lost.

        A task that was lost twice begins alone in its worker: either it kills the worker, and would take others along,
        or another did. Until there is room for it, nothing else begins in one worker.
        """
        others = [other for other in self._of_worker[seat.entry.worker_id] if other is not seat]
        if any(self._is_suspect(drawn) for other in others for drawn in (other.playing, other.coming)):
            return
        is_alone = not seat.plays and not any(other.plays or other.coming is not None for other in others)
        suspects = [drawn for drawn in self._queue if self._is_suspect(drawn)]
        drawn = None
        if suspects and (is_alone or self._reserved in (None, seat.entry.worker_id)):
            self._reserved = None if is_alone else seat.entry.worker_id
            drawn = suspects[0] if is_alone else None
        elif self._queue and not seat.plays:  # what was lost begins at once, so that its next loss is charged to it
            drawn = next((each for each in self._queue if not self._is_suspect(each)), None)
        if drawn is not None:
            self._queue.remove(drawn)
        elif self._reserved != seat.entry.worker_id and (not self._queue or (suspects and not seat.plays)):
            self._ask([seat])
            drawn = self._next()
        if drawn is not None:
            self._come(seat, drawn)

    def _is_suspect(self, drawn: _Drawn | None) -> bool:
        return drawn is not None and 0 < min(self._attempts - 1, 2) <= len(drawn.charges)

    def _ask(self, seats: Sequence[_Seat]) -> None:
        """Ask the source for a task for each environment, unless it has given enough, none now, or the last."""
        if self._is_exhausted or self._is_paused:
            return
        given = self._given
        with contextlib.suppress(StopIteration), self._around_source():
            for seat in itertools.islice(seats, len(given), None):
                given.append(self._source.next_task(seat.env_id))
                if given[-1] is None:
                    return
            return
        self._is_exhausted = True

    def _next(self) -> _Drawn | None:
        """Return the next of the tasks that the source has given, or None if there is none."""
        if not self._given:
            return None
        given = self._given.popleft()
        if given is None:
            self._is_paused = True
            return None
        return self._numbered(given if given.__class__ is Task else Task.of(given))

    def _numbered(self, task: Task) -> _Drawn:
        drawn = _Drawn(self.n_drawn, task)
        if task.options is not None:
            self._check(task.options)
        self.n_drawn += 1
        return drawn

    def _come(self, seat: _Seat, drawn: _Drawn) -> None:
        seat.coming, seat.is_sent = drawn, False
        self._n_active += not seat.plays
        self._free.pop(seat.env_id, None)
        self.has_unsent.setdefault(seat.entry.worker_id, []).append(seat)

    def _arguments(self, seat: _Seat, drawn: _Drawn) -> tuple[int | None, Mapping[str, Any] | None]:
        """Return the seed and options with which a task begins in an environment."""
        task, seed, options = drawn.task, drawn.task.seed, self._options
        if not task.inherits:
            if seed is None and seat.is_new:
                generation = seat.entry.generation
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
        self._is_resetting = False
        self._episodes.add_all(infos)
        for info in infos:
            for seat in self._of_worker[info.worker_id]:
                if self._begun[seat.env_id]:
                    self._begin(seat)
            info.of_tasks = self._tasks(info.worker_id), {}

    def offer_first(self, entry: Entry, env_ids: np.ndarray) -> np.ndarray:
        """Take note that ``recv`` returns first observations of a reset again. Return the rows that it may return.

        An environment that is about to begin another episode has none.
        """
        seats = [self._seats[env_id] for env_id in env_ids.tolist()]
        for seat in seats:
            self._set_begun(seat, not seat.cuts)
        return np.flatnonzero([not seat.cuts for seat in seats])

    def add_batch(self, behavior: str, batch: Batch) -> None:
        """Set the tasks of a batch that is delivered, and advance the book."""
        self._is_paused = False
        env_ids = batch.env_ids
        first = final = None
        if self._n_begun:
            first = self._begun[env_ids]
            for env_id in env_ids[first].tolist():
                self._begin(self._seats[env_id])
        task = self._index[env_ids]
        ended = self._episodes.add_batch(behavior, batch, first)
        if ended is not None:
            final = task[ended]
            if self.cuts:
                ended = ended & ~batch.lost
            terminated = batch.terminated
            for place in np.flatnonzero(ended).tolist():
                seat = self._seats[env_ids[place]]
                if self._end(seat, terminated=bool(terminated[place])):
                    assert seat.playing is not None
                    task[place] = seat.playing.index
        batch.of_tasks = first, task, final
        if self.cuts:
            for entry, cause in self.cuts:
                self.lose(entry, cause)

    def add_all(self, infos: Iterable[StepInfo]) -> None:
        """Set the tasks of StepInfos that are delivered, and advance the book."""
        self._is_paused = False
        for info in infos:
            self._episodes.add(info)
            worker_id = info.worker_id
            tasks = self._tasks(worker_id)
            if info.lost is not None:
                info.of_tasks = tasks, tasks
                self.lose(self._table.entries[worker_id], info.lost.cause)
                continue
            if self.n_begun[worker_id]:
                self._episodes.env_steps -= self.n_begun[worker_id]  # first observations are no steps
                for seat in self._of_worker[worker_id]:
                    if self._begun[seat.env_id]:
                        self._begin(seat)
                tasks = self._tasks(worker_id)
            resting, acting, terminated = set(), set(), set()
            if any(steps.ended.any() for steps in info.current.values()):
                for steps in info.current.values():
                    env_ids = steps.env_id
                    acting.update(env_ids[steps.acting_rows].tolist())
                    resting.update(env_ids[steps.ended].tolist())
                    terminated.update(env_ids[steps.terminated].tolist())
            final: dict[int, int] = {}
            for env_id in sorted(resting):
                seat = self._seats[env_id]
                is_laid = seat.is_sent and seat.coming is not None
                if env_id not in acting or is_laid:
                    if env_id in tasks:
                        final[env_id] = tasks[env_id]
                    self._end(seat, terminated=env_id in terminated)
            info.of_tasks = {**final, **self._tasks(worker_id)} if final else tasks, final

    def _begin(self, seat: _Seat) -> None:
        """Take note of the first row of an episode that was begun at once."""
        self._set_begun(seat, False)
        if seat.coming is not None and seat.is_sent:
            if seat.plays and seat.playing is not None:
                self._finish(seat, seat.playing, cut=True)
            seat.playing, seat.coming, seat.is_sent, seat.cuts = seat.coming, None, False, False
        seat.plays, seat.is_new = True, False
        self._may_draw(seat)
        self._set_acts(seat, not seat.cuts)
        self._set_index(seat)

    def _end(self, seat: _Seat, *, terminated: bool) -> bool:
        """Take note of an episode's end. Return whether the worker has begun the next one."""
        if seat.playing is not None:
            self._finish(seat, seat.playing, terminated=terminated)
            seat.entry.n_lost_tasks = 0
        seat.ended.clear()
        coming, goes_on = seat.coming, seat.is_sent
        if goes_on:
            assert coming is not None
            coming.attempts += 1
            seat.playing, seat.coming, seat.is_sent = coming, None, False
        else:
            seat.playing, seat.plays, seat.cuts = None, False, False
            self._n_active -= coming is None
            self._set_acts(seat, False)
        self._may_draw(seat)
        self._set_index(seat)
        return goes_on

    def lose(self, entry: Entry, error: Exception) -> None:
        """Take back the tasks of a worker that was replaced or given up.

        The loss is charged to the episodes of the environments that the error names, and to nobody if the worker was
        recycled or a Ctrl-C cut its step. What was to begin after the present episode may not have begun: no charge.
        """
        named = getattr(error, "env_ids", entry.env_ids)
        is_charged = getattr(error, "phase", "") != RECYCLED and getattr(error, "type_name", "") != "KeyboardInterrupt"
        for seat in self._of_worker[entry.worker_id]:
            playing, coming, was_begun = self._vacate(seat)
            seat.is_new = True
            charge = is_charged and seat.env_id in named
            if playing is not None:
                self._take_back(seat, playing, error, charge=charge)
            if coming is not None and self._source is None and entry.error is None and not self.is_pooled:
                self._come(seat, coming)
            elif coming is not None:
                self._take_back(seat, coming, error, charge=charge and was_begun)
            if seat.coming is None:
                self._free[seat.env_id] = None
        if entry.error is not None:
            self.has_unsent.pop(entry.worker_id, None)
            for env_id in entry.env_ids:
                self._free.pop(env_id, None)
            if self._reserved == entry.worker_id:
                self._reserved = None

    def under_way(self, worker_id: int) -> tuple[int, ...]:
        """Return the indices of the tasks that play in a worker, or whose episodes it has begun."""
        seats = self._of_worker[worker_id]
        begun = [seat.coming for seat in seats if seat.is_sent and self._begun[seat.env_id]]
        return tuple(drawn.index for drawn in (*(seat.playing for seat in seats), *begun) if drawn is not None)

    def _vacate(self, seat: _Seat) -> tuple[_Drawn | None, _Drawn | None, bool]:
        """Let an environment rest. Return the tasks that were playing and coming, and whether the latter was begun."""
        playing, coming, was_begun = seat.playing, seat.coming, bool(self._begun[seat.env_id])
        self._n_active -= seat.plays or coming is not None or was_begun
        seat.ended.clear()
        seat.plays, seat.playing, seat.coming, seat.is_sent, seat.cuts = False, None, None, False, False
        self._set_begun(seat, False)
        self._set_acts(seat, False)
        self._set_index(seat)
        return playing, coming, was_begun

    def _take_back(self, seat: _Seat, drawn: _Drawn, error: Exception, *, charge: bool) -> None:
        if charge:
            drawn.charges.append(error)
            self._n_charged += 1
        losses = len(drawn.charges)
        is_given_up = self._source is None or losses >= self._attempts
        facts = {"worker_id": seat.entry.worker_id, "generation": seat.entry.generation, "env_id": seat.env_id}
        if self._source is not None or self.is_pooled:
            self._excuse(seat.entry, drawn.charges[0 if is_given_up else 1 :])
        self._events.add(TaskLost(**facts, index=drawn.index, losses=losses, is_given_up=is_given_up))
        if is_given_up:
            self.n_lost += 1
            seat.entry.n_lost_tasks += 1
            self._finish(seat, drawn, error=error)
        else:
            bisect.insort(self._queue, drawn, key=lambda each: each.index)

    def _finish(
        self, seat: _Seat, drawn: _Drawn, *, terminated: bool = False, error: Exception | None = None, cut: bool = False
    ) -> None:
        episodes = () if error is not None or cut else tuple(seat.ended)
        result = TaskResult(drawn.index, drawn.task, seat.env_id, terminated, drawn.attempts, error, cut, episodes)
        self._results.append(result)
        if self._is_told:
            self.untold.append(result)

    def tell(self) -> None:
        """Tell the source the results that it does not know. Raises the errors of its methods."""
        with allow_interrupts():
            while self.untold:
                result = self.untold.popleft()
                if result.error is None and hasattr(self._source, "ended"):
                    self._source.ended(result)
                elif result.error is not None and hasattr(self._source, "lost"):
                    self._source.lost(result.task, result.error)

    def _episode_ended(self, episode: Episode) -> None:
        seat = self._seats[episode.env_id]
        episode.task = -1 if seat.playing is None else seat.playing.index
        seat.ended.append(episode)

    # What changes together.

    def _may_draw(self, seat: _Seat) -> None:
        if seat.coming is None and self._source is not None and (self._prefetch or not seat.plays):
            self._free[seat.env_id] = None

    def _set_begun(self, seat: _Seat, begun: bool) -> None:
        more = begun - int(self._begun[seat.env_id])
        self._begun[seat.env_id] = begun
        self.n_begun[seat.entry.worker_id] += more
        self._n_begun += more

    def _set_acts(self, seat: _Seat, acts: bool) -> None:
        more = acts - int(self.acts[seat.env_id])
        self.acts[seat.env_id] = acts
        seat.entry.n_acting += more
        self.n_acting += more

    def _set_index(self, seat: _Seat) -> None:
        self._index[seat.env_id] = -1 if seat.playing is None else seat.playing.index
        self._tasks_of[seat.entry.worker_id] = None
        if seat.entry.times.track is not None:
            seat.entry.times.track.begin(seat.entry.generation, self._tasks(seat.entry.worker_id))

    def _tasks(self, worker_id: int) -> Mapping[int, int]:
        tasks = self._tasks_of[worker_id]
        if tasks is None:
            seats = self._of_worker[worker_id]
            tasks = {seat.env_id: seat.playing.index for seat in seats if seat.playing is not None}
            self._tasks_of[worker_id] = tasks
        return tasks
