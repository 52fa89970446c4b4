"""Replacement of failed workers, and recycling of old workers after a step that ends an episode.

::

    failure ── Supervisor.judge ──▶ Replace(delay_s)     the worker is REPLACING until its next generation has begun
                                ──▶ GiveUp(error)        FAILED: each call to it raises the error; unused until a reset
                                ──▶ GiveUp(error, drop)  DROPPED: never used again; an event is logged

The rule: a replacement affects no other worker, and a Ctrl-C while a worker starts loses no response. Therefore a
failure is only recorded when it arrives. Replacements are started when all arrived responses are in their entries.
Only this module changes an entry's generation. An episode of one generation never continues in the next: the first step
after a replacement, made by the functions at the end, has one row for each agent whose episode is cut, in which the
episode ends with its last observation. Observations to act on come from the new generation.

With kept episodes, the next generation begins those of its predecessor again, repeats their actions, and is sent the
step in flight once more; see ``Keeper``. For the trainer it was a slow step.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.seeding import reseeded
from envmanager.data.steps import (
    AgentSteps,
    Batch,
    CommandName,
    EnvironmentResponse,
    Lost,
    Steps,
    concat_steps,
    only_agents,
)
from envmanager.data.trees import copy_tree, take_rows
from envmanager.errors import (
    BadObservation,
    ConnectionLost,
    EnvManagerError,
    EnvRaised,
    NotPlaced,
    ProtocolError,
    RestartsExhausted,
    WorkerDied,
    WorkerError,
    WorkerOutOfMemory,
    WorkerTimedOut,
)
from envmanager.kernel.host import WorkerHost
from envmanager.kernel.table import CANCELLED, RECYCLED, Entry, Replacement, WorkerState, WorkerTable
from envmanager.observe import events
from envmanager.options import ResetConfig, RestartPolicy

LONGEST_BACKOFF_S = 30.0
_ASK_EVERY_S = 1.0
"""Interval (s) at which the host is asked whether a worker is due."""
_KILLED = ("SIGKILL", "SIGTERM", "EXIT(?)")
"""Ends of workers that are killed from outside; of the last the helper, which was killed too, has told nothing."""

_FAILURES: dict[type[Exception], type[events.Failed]] = {
    WorkerDied: events.Died,
    WorkerOutOfMemory: events.Died,
    WorkerTimedOut: events.TimedOut,
    ProtocolError: events.ProtocolBroken,
    ConnectionLost: events.Disconnected,
    NotPlaced: events.NotStarted,
    WorkerError: events.NotStarted,  # its process could not be started
}


@attrs.frozen
class Replace:
    """A decision to replace a worker after ``delay_s`` seconds. ``number``: recent restarts, including this one.

    If ``number`` is 0, the restart does not count. Its host tells of it, in one event for all workers of a server.
    """

    delay_s: float
    number: int


@attrs.frozen
class GiveUp:
    """A decision not to replace a worker. ``error`` is raised unless ``drop`` is True and other workers are left."""

    error: Exception
    drop: bool = False


class Supervisor:
    """The restart budgets of the workers. Each worker may restart ``max_restarts`` times within ``within_s`` seconds.

    The time spent waiting for a hung worker, a server or a node does not count towards ``within_s``. Otherwise a worker
    that hangs in each reset would be replaced for ever, because a timeout is often as long as ``within_s``.
    """

    def __init__(self, policy: RestartPolicy, jitter: random.Random | None = None) -> None:
        self._policy = policy
        self._recent: defaultdict[int, deque[tuple[float, WorkerError]]] = defaultdict(deque)
        self._hung_s: defaultdict[int, float] = defaultdict(float)
        self._streak: defaultdict[int, int] = defaultdict(int)
        """Number of restarts since each worker has last worked for as long as the next delay."""
        self._jitter = jitter

    def judge(self, worker_id: int, error: Exception, now: float, worked_s: float = 0.0) -> Replace | GiveUp:
        """Decide whether to replace a worker that failed at ``now``, ``worked_s`` after its start. If so, count it."""
        policy = self._policy
        if not isinstance(error, WorkerError):
            return GiveUp(error)
        if isinstance(error, EnvRaised | BadObservation) and policy.on_exception == "raise":
            return GiveUp(error)
        if isinstance(error, EnvRaised):
            error.leave_out_restarts()
        if error.phase == CANCELLED:
            return Replace(0.0, 0)
        if policy.max_restarts == 0:
            return GiveUp(error, drop=policy.then == "drop")
        if isinstance(error, ConnectionLost) and not error.is_charged:
            return Replace(0.0, 0)
        recent = self._recent[worker_id]
        if isinstance(error, WorkerTimedOut | ConnectionLost | NotPlaced):
            self._hung_s[worker_id] += error.timeout_s
            worked_s -= error.timeout_s
        now -= self._hung_s[worker_id]
        while recent and now - recent[0][0] > policy.within_s:
            recent.popleft()
        if len(recent) >= policy.max_restarts:
            what: Any = {"restarts": len(recent), "within_s": policy.within_s, "then": policy.then}
            exhausted = RestartsExhausted(first=recent[0][1], last=error, **what)
            exhausted.__cause__ = error
            return GiveUp(exhausted, drop=policy.then == "drop")
        recent.append((now, error))
        number = len(recent)
        streak = min(self._streak[worker_id] + 1, number)
        longest = 0.0 if streak == 1 else min(policy.backoff_s * 2.0 ** min(streak - 2, 60), LONGEST_BACKOFF_S)
        self._streak[worker_id] = streak if worked_s < longest else 1
        if worked_s >= longest:
            return Replace(0.0, number)
        jitter = self._jitter or random.Random(now)  # of the time alone, so that a recorded run repeats it
        return Replace(longest * jitter.uniform(0.5, 1.0), number)

    def excuse(self, errors: Sequence[Exception]) -> None:
        """Do not count the restarts after ``errors``."""
        for worker_id in {error.worker_id for error in errors if isinstance(error, WorkerError)}:
            recent = self._recent[worker_id]
            self._recent[worker_id] = deque(each for each in recent if each[1] not in errors)

    def forgive(self, worker_id: int) -> None:
        """Restore the full restart budget of a worker."""
        self._recent[worker_id].clear()


class Recovery:
    """The part of a manager that replaces failed workers, or stops using them."""

    def __init__(self, table: WorkerTable, policy: RestartPolicy, seed: int | None) -> None:
        self.host: WorkerHost
        self.events = events.EventLog([entry.env_ids for entry in table.entries])
        self.steps_lost = 0
        """Number of requested steps that were never delivered."""
        self.last_config = ResetConfig(seed=seed)
        """Arguments for the reset of replacements: the options of the last reset, and the seed that was given last."""
        self._table = table
        table.counts_each = policy.recycle_after_steps is not None
        self._policy = policy
        self._supervisor = Supervisor(policy)
        self.scheduled: list[tuple[float, int, Entry, Replacement]] = []
        """Heap of the replacements to start, by time. It may hold some that were started or superseded since."""
        self._starting: set[Entry] = set()
        """Workers whose replacements were started, of which some may have responded since."""
        self._numbers = itertools.count()
        self.keeper: Any = None
        """The Keeper, if episodes are kept. Its module imports this one."""

    # Responses.

    def arrive(self, response: EnvironmentResponse) -> None:
        """Queue a response in its worker's outbox, or record the failure that it reports.

        Raises RuntimeError if no call awaits the response, unless it is a failure or a replacement's first response.
        """
        response = self._table.with_specs_learned(response)
        entry = self._table.entries[response.worker_id]
        replacement = entry.replacement
        if response.name is CommandName.FAILED:
            self.fail(entry, response.payload)
        elif entry.restore is not None and self.keeper.takes(entry, response):
            pass
        elif replacement is not None and not replacement.has_begun:
            last = entry.last_responses
            replacement.is_started = replacement.has_begun = entry.has_attributes = True
            entry.began_at = self.host.now()
            self._table.set_pending(entry, *last, response)
        elif entry.state is WorkerState.IN_FLIGHT:
            self._table.move([entry], WorkerState.READY, (response,))
            if self._table.counts_each:
                self._recycle_if_old(entry, response)
        else:
            raise RuntimeError(
                f"worker {entry.worker_id} responded to a {response.name} for which no call waits: it is "
                f"{entry.state.name}."
            )

    def fail(self, entry: Entry, error: Exception) -> None:
        """Record ``error`` as a worker's failure. Plan a replacement, or give up the worker if none is allowed."""
        now = self.host.now()
        who: Any = {"worker_id": entry.worker_id, "generation": entry.generation}
        worked_s = now - entry.began_at if entry.replacement is None else 0.0
        verdict = None if entry.is_given_up else self._supervisor.judge(entry.worker_id, error, now, worked_s)
        counts = not isinstance(verdict, Replace) or verdict.number > 0
        if counts:
            kind = _FAILURES.get(type(error), events.Raised)
            tasks = self._table.book.under_way(entry.worker_id)
            self.events.add(kind(**who, error=error, tasks=tasks))
        if verdict is None:
            return
        keeps = isinstance(verdict, Replace) and self.keeper is not None and self.keeper.can_keep(entry, error)
        if not keeps:
            self.lose(entry, error)
        if isinstance(verdict, GiveUp):
            responses = entry.last_responses
            self._table.give_up(entry, verdict.error, drop=verdict.drop)
            if verdict.drop:
                self.events.add(events.Dropped(**who, error=verdict.error))
            if entry.kind and all(each.error is not None for each in self._table.entries if each.kind == entry.kind):
                self.events.add(events.KindLeftOut(**who, kind=entry.kind, why="all its workers were given up"))
            if not verdict.drop or self._table.n_dropped == len(self._table.entries):
                entry.ignores_action = False  # a later send() raises the error
                responses = (*responses, EnvironmentResponse(CommandName.FAILED, entry.worker_id, verdict.error))
            self._table.set_pending(entry, *responses)
            return
        assert isinstance(error, WorkerError)
        last, before = entry.last_responses, entry.replacement
        # If the failed worker was itself a replacement that has delivered nothing, the first cause is to be reported.
        self._schedule(entry, error if before is None else before.cause, now + verdict.delay_s, keeps=keeps)
        entry.restarts += 1
        if not keeps:
            self._table.set_pending(entry, *last)
        if counts:
            who["generation"] += 1
            self.events.add(events.Restarted(**who, **attrs.asdict(verdict), cause=error, policy=self._policy))

    def starts_again(self, error: WorkerError) -> bool:
        """Return whether to start a worker again, at once, that failed while it started for the first time.

        Only if it, or the process that starts it, was killed from outside, and a restart is left. Any other failure
        then is most likely a mistake of the user, and others would follow.
        """
        is_cut_off = type(error) is WorkerError and getattr(error.__cause__, "errno", 0) == errno.ECONNRESET
        if not is_cut_off and (type(error) is not WorkerDied or error.exit not in _KILLED):
            return False
        verdict = self._supervisor.judge(error.worker_id, error, self.host.now())
        if isinstance(verdict, Replace):
            entry = self._table.entries[error.worker_id]
            who: Any = {"worker_id": entry.worker_id, "generation": entry.generation}
            self.events.add(_FAILURES[type(error)](**who, error=error))
            self.events.add(events.Restarted(**who, **attrs.asdict(verdict), cause=error, policy=self._policy))
            entry.restarts += 1
        return isinstance(verdict, Replace)

    def lose(self, entry: Entry, error: Exception) -> None:
        """Note that the episodes in a worker are lost, and with them the step in flight or the next action."""
        self.host.lost(entry.worker_id, error)
        if entry.state is WorkerState.IDLE:
            entry.ignores_action = True
        elif entry.state is WorkerState.IN_FLIGHT:
            self.steps_lost += 1
        if self.keeper is not None:
            self.keeper.lose_all(entry, error)

    def excuse(self, entry: Entry, errors: Sequence[Exception]) -> None:
        """Do not count the restarts after ``errors``, for which a task that was lost in a worker accounts.

        If more tasks in a row were given up there than it may restart, they count: it is the worker that fails.
        """
        if entry.n_lost_tasks <= self._policy.max_restarts:
            self._supervisor.excuse(errors)

    def fail_quietly(self, failures: Sequence[tuple[Entry, Exception]]) -> None:
        """Record failures without queueing errors, because the caller raises one of them. Start due replacements."""
        for entry, error in failures:
            self.fail(entry, error)
        self.start_due()
        for entry, _ in failures:
            if entry.error is not None and entry.outbox:
                self._table.set_pending(entry, *(each for each in entry.outbox if each.name is not CommandName.FAILED))

    # Replacements.

    def _schedule(self, entry: Entry, cause: WorkerError | None, start_at: float, *, keeps: bool = False) -> None:
        """Set the replacement of a worker by its next generation, which ``start_due`` starts at ``start_at``."""
        entry.replacement = Replacement(cause, keeps=keeps)
        heapq.heappush(self.scheduled, (start_at, next(self._numbers), entry, entry.replacement))
        self._table.note(entry)

    def replace_once_more(self, entry: Entry) -> None:
        """Replace a worker again that has just begun its episodes again. It has not failed, so nothing counts."""
        assert entry.restore is not None
        self._schedule(entry, entry.restore.cause, self.host.now(), keeps=True)

    def next_start_at(self) -> float:
        """Return the time (monotonic seconds) at which to start the next replacement; infinity if none is scheduled."""
        first = self._next()
        return math.inf if first is None else first[0]

    def _next(self) -> tuple[float, int, Entry, Replacement] | None:
        """Return what is to start first. What keeps episodes can when the steps before it are delivered."""
        held = []
        first = None
        if self.scheduled and self._starting:
            self._starting = {each for each in self._starting if each.is_starting}
            if len(self._starting) >= self.host.start_at_most:
                return None  # one that has begun, or failed, makes room
        while self.scheduled and first is None:
            _, _, entry, replacement = self.scheduled[0]
            if entry.replacement is not replacement or replacement.is_started:
                heapq.heappop(self.scheduled)
            elif replacement.keeps and entry.outbox:
                held.append(heapq.heappop(self.scheduled))
            else:
                first = self.scheduled[0]
        for each in held:
            heapq.heappush(self.scheduled, each)
        return first

    def start_due(self) -> None:
        """Start the replacements that are due. An unsuccessful start counts as a failure of the worker."""
        while (first := self._next()) is not None and first[0] <= self.host.now():
            self._start(first[2], first[3])

    def _start(self, entry: Entry, replacement: Replacement) -> None:
        """Launch a replacement and reset it with the last options and, if seeded, new seeds. Record a failed start."""
        host, worker_id = self.host, entry.worker_id
        replacement.is_started = True
        if self.host.start_at_most < math.inf:
            self._starting.add(entry)
        entry.generation, entry.steps_of_generation, entry.is_old = entry.generation + 1, 0, False
        entry.is_due = ""
        entry.has_attributes = not entry.attributes
        if replacement.keeps:
            config: Any = self.keeper.begins_of(entry)
        else:
            of_seeds = 0 if entry.keeps_seed else entry.generation
            if self.keeper is None or not self._table.book.is_resetting:
                entry.keeps_seed, entry.generation_of_seeds = False, entry.generation
            seed = reseeded(self.last_config.seed, of_seeds)
            config = attrs.evolve(self.last_config, seed=seed, generation=of_seeds)
            config = self._table.book.first_of(entry, config, seed, of_seeds, is_replaced=True)
        try:
            host.workers[worker_id] = host.launch(worker_id, entry.generation)
            response = host.begin_again(worker_id, config)
        except (OSError, EnvManagerError) as error:
            if not isinstance(error, WorkerError):
                error = _error(entry, f"could not be started again: {error}", "start", str(error))
            self.fail(entry, error)
        except BaseException:  # a Ctrl-C; the next call launches another replacement
            replacement.is_started = False
            raise
        else:
            if response is not None:
                self.arrive(response)

    def cut(self, entry: Entry, acts: np.ndarray | None = None) -> tuple[Steps, Lost] | None:
        """Return the step that ends a replaced worker's old episodes and begins new ones, and the cause; else None.

        ``acts``: the environments, bool by env_id, whose episodes are cut, if they begin on demand with ``recv``.
        Returns None unless the worker's next response is its first after a replacement that was not made by a reset.
        """
        replacement, before = entry.replacement, entry.previous_step
        if replacement is None or replacement.cause is None or not entry.is_first_of_generation:
            return None
        last: Steps = {} if before is None else before.current
        if entry.batches or acts is not None:  # a worker that rests may have had no rows at all
            behaviors = self._table.specs_of(entry.kind) or last  # the workers of a test may report no specs
            n_acting = self._table.book.seats.n_acting_in[entry.worker_id]
            last = {name: last_rows(entry, acts) for name in behaviors if n_acting}
        old = lost(last, with_new=replacement.cause.phase != RECYCLED)
        return followed_by(old, entry.outbox[0].payload), Lost(replacement.cause, entry.generation, entry.env_ids)

    def _recycle_if_old(self, entry: Entry, response: EnvironmentResponse) -> None:
        """Count a step. Recycle an old worker when an episode ends; if they begin on demand, when its last one does."""
        entry.steps_of_generation += 1
        limit = self._policy.recycle_after_steps
        if limit is not None and entry.steps_of_generation >= limit:
            entry.is_due = entry.is_due or "steps"
        if self.host.is_asked and not entry.is_due and (now := self.host.now()) >= entry.asked_at + _ASK_EVERY_S:
            entry.asked_at, entry.is_due = now, self.host.why_due(entry.worker_id)
        if not entry.is_due:
            return
        book, parts = self._table.book, response.payload.values()
        if self.keeper is not None and entry.log is not None:
            if self.keeper.keeps_all(entry):
                self.recycle(entry, response, keeps=True)
                return
            if book.is_automatic:
                return  # what is not kept is not cut either: it ends first
        entry.is_old = not book.is_automatic
        if entry.is_old:
            n_ended = len({env_id for steps in parts for env_id in steps.env_id[steps.ended].tolist()})
            n_acting = book.seats.n_acting_in[entry.worker_id]
            is_time = n_ended and n_acting <= n_ended and not any(len(steps.acting_rows) for steps in parts)
        else:  # an episode ended, and its agent acts again, in a new episode
            is_time = any(steps.ended[steps.acting_rows].any() for steps in parts)
        if is_time:
            self.recycle(entry, response)

    def move(self, entry: Entry) -> None:
        """Replace a healthy worker: now if its episodes are kept, or all its environments rest, else as an old one."""
        if entry.replacement is not None or entry.is_due:
            return
        self._table.counts_each = True  # from the next response on, it is old
        entry.is_due, book = "as it is moved", self._table.book
        rests = not book.is_automatic and not book.seats.n_acting_in[entry.worker_id]
        entry.is_old = not book.is_automatic
        if entry.state is not WorkerState.IDLE or not entry.is_nominal or book.is_resetting:
            return
        keeps = self.keeper is not None and self.keeper.keeps_all(entry)
        if keeps or rests:
            self.recycle(entry, keeps=keeps)
            self.start_due()

    def recycle(self, entry: Entry, *responses: EnvironmentResponse, keeps: bool = False) -> None:
        """Plan the replacement of a healthy worker, once ``responses`` are delivered."""
        worker_id, generation, n_steps = entry.worker_id, entry.generation + 1, entry.steps_of_generation
        why = entry.is_due.removeprefix("steps")
        told = why or f"after {n_steps} steps"
        cause = _error(entry, f"was recycled {told}", RECYCLED, told.removeprefix("after "))
        if keeps:
            self.keeper.can_keep(entry, cause)
        else:
            self.host.lost(worker_id, cause)
            if self.keeper is not None:
                self.keeper.lose_all(entry, cause)
        self._schedule(entry, cause, self.host.now(), keeps=keeps)
        if responses or not keeps:
            self._table.set_pending(entry, *responses)
        self.events.add(events.Recycled(worker_id=worker_id, generation=generation, steps=n_steps, why=why))

    def abandon(self, entry: Entry, env_id: int) -> bool:
        """Replace a worker in which a cancelled step of an environment goes on. Return whether that is possible."""
        worker = self.host.workers[entry.worker_id]
        is_usual = entry.state is WorkerState.IN_FLIGHT and entry.replacement is None and entry.restore is None
        if not is_usual or not hasattr(worker, "kill"):
            return False
        worker.kill()
        self.events.add(events.StepCancelled(worker_id=entry.worker_id, generation=entry.generation + 1, env_id=env_id))
        cause = _error(entry, "was replaced, as a cancelled step went on", CANCELLED, "a cancelled step")
        cause.env_ids = (env_id,)
        self.fail(entry, cause)
        self.start_due()
        return True

    # Actions and resets.

    def discard_action(self, entry: Entry) -> None:
        """Count an action as lost, without sending it. The worker failed or was recycled since its last observation."""
        entry.ignores_action = False
        self.steps_lost += 1
        self._table.note(entry)

    def take_back(self, entry: Entry) -> None:
        """If a worker was given up, clear its error and restore its restart budget. Called at a reset."""
        if entry.error is not None:
            entry.error = None
            self._supervisor.forgive(entry.worker_id)
            self._table.set_pending(entry)

    def revive(self, entry: Entry) -> None:
        """Plan the replacement of a worker that cannot be reset. Clear its error and restore its restart budget."""
        self.take_back(entry)
        self._schedule(entry, None, self.host.now())
        self._table.set_pending(entry)


def _error(entry: Entry, text: str, phase: str, cause: str) -> WorkerError:
    worker_id = entry.worker_id
    return WorkerError(
        f"worker {worker_id} {text}", worker_id=worker_id, env_ids=entry.env_ids, phase=phase, cause=cause
    )


def last_rows(entry: Entry, acts: np.ndarray | None = None) -> AgentSteps:
    """Return the last observations of a worker's environments (with ``acts``, where it is true) since the reset."""
    left = {env_id for env_id in entry.env_ids if acts is None or acts[env_id]}
    first = [] if entry.previous_step is None else [Batch.of(steps) for steps in entry.previous_step.current.values()]
    parts = []
    for batch in reversed([*first, *entry.batches]):
        places = np.flatnonzero(np.isin(batch.env_ids, list(left)))
        left.difference_update(batch.env_ids[places].tolist())
        ids = only_agents(batch.env_ids[places].tolist())
        infos: list[dict[str, Any]] | None = None if batch.info is None else [{} for _ in ids]
        parts.append(AgentSteps.first(agent_id=ids, obs=take_rows(batch.obs, places), info=infos))
    steps = concat_steps([part for part in parts if len(part)] or parts[:1])
    return steps.take(np.argsort(steps.agent_id))


def lost(last: Steps, *, with_new: bool = True) -> dict[str, AgentSteps]:
    """Return rows, by behavior, that truncate a worker's episodes with reward 0. ``last``: the worker's last steps.

    An agent whose episode ended in ``last`` has a row only if a new episode began at once and ``with_new`` is True.
    """
    ends = {}
    for name, steps in last.items():
        plays = ~steps.ended
        if with_new:
            plays |= True if steps.acting is None else steps.acting
        own = steps.take(np.flatnonzero(plays))
        if len(own):
            begun = AgentSteps.first(agent_id=own.agent_id, obs=own.obs, info=_empty_infos(own))
            ends[name] = attrs.evolve(begun, truncated=np.ones(len(own), np.bool_), final_obs=copy_tree(own.obs))
    return ends


def followed_by(old: Steps, first: Steps) -> dict[str, AgentSteps]:
    """Return ``old``, the result of ``lost``, joined with ``first``, the first steps of the new generation.

    There is one row per agent. ``final_obs`` has the last observations of old episodes. Agents of the new generation
    have its ``obs``, and are in its order, in which it expects actions. Agents that are gone come last, and do not act.
    """
    joined, nothing = {}, np.zeros(0, np.int64)
    for name in dict.fromkeys([*old, *first]):
        before = old[name] if name in old else first[name].take(nothing)
        now = first[name] if name in first else before.take(nothing)
        old_row = {agent_id: row for row, agent_id in enumerate(before.agent_id.tolist())}
        old_rows = np.array([old_row.get(agent_id, -1) for agent_id in now.agent_id.tolist()], np.int64)
        returning, new = np.flatnonzero(old_rows >= 0), np.flatnonzero(old_rows < 0)
        gone = np.setdiff1d(np.arange(len(before)), old_rows)
        begun, ended = now.take(returning), before.take(gone)
        idle = np.zeros(len(ended), np.bool_)
        parts = [
            attrs.evolve(before.take(old_rows[returning]), obs=begun.obs, acting=begun.acting, reset_info=begun.info),
            now.take(new),
            attrs.evolve(ended, obs=copy_tree(ended.final_obs), acting=idle, reset_info=_empty_infos(ended)),
        ]
        in_order = np.argsort(np.concatenate([returning, new, len(now) + gone]))
        joined[name] = concat_steps([part for part in parts if len(part)] or parts[:1]).take(in_order)
    return joined


def _empty_infos(steps: AgentSteps) -> list[dict[str, Any]] | None:
    return None if steps.info is None else [{} for _ in steps.info]
