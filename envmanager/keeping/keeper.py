"""Episodes that outlive their worker: begun again in the next one, and their actions repeated.

::

    a failure ── can_keep ──▶ the next generation starts ── begins_of: a reset, with the actions so far ──▶ first rows
        ▲                                                                                                      │
        │ in the same step: twice, and that episode is lost                              as last delivered? takes
        └──────────────────── the step in flight is sent again ── response ──▶ trainer                         │
                                              ▲────────────────────────────────────────────────────────────────┘

The rule: nothing is delivered twice, and nothing is assumed. An environment whose observation after the repetition is
not the one that the trainer has seen last loses its episode, alone: the next step with an action for it tells so.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.data.differences import differences
from envmanager.data.seeding import derive_seed, seed_of_series
from envmanager.data.steps import AgentSteps, Begin, Call, CommandName, EnvironmentResponse, Steps, concat_steps
from envmanager.data.trees import Tree, snapshot, take_rows
from envmanager.errors import UsageError, WorkerError
from envmanager.keeping.log import EpisodeLog, Rounds, calls_in, joined_actions, n_actions
from envmanager.kernel.recovery import Recovery, followed_by, last_rows, lost
from envmanager.kernel.seats import SeatState
from envmanager.kernel.table import CANCELLED, RECYCLED, Entry, Restore, WorkerState, WorkerTable
from envmanager.observe import events
from envmanager.options import ResetConfig, RestartPolicy
from envmanager.tasks import Task

_MOST_IN_STEP, _MOST_REPEATING = 2, 8
"""Numbers of failures in one step of a worker, and outside of steps before it, from which on it is not repeated."""
_CHECK_EVERY = 256
"""Number of steps of the manager after which the logs are looked through for episodes that are too long."""


class SeedSource:
    """A source of tasks with a seed each, in place of episodes that begin by themselves from a random generator."""

    def __init__(self, seed: int | Sequence[int | None], base: int, numbers: dict[int, int]) -> None:
        """``numbers``: the number of the next episode by env_id, which this source counts on."""
        self._first_seed = functools.cache(functools.partial(first_seed, seed, base))
        self._numbers = numbers

    def next_task(self, env_id: int) -> Task:
        """Return the task of the next episode of an environment."""
        number = self._numbers.get(env_id, 0)
        self._numbers[env_id] = number + 1
        return Task(seed=seed_of_series(self._first_seed(env_id), number))

    def state(self) -> list[list[int]]:
        """Return the number of the next episode of each environment."""
        return [list(pair) for pair in self._numbers.items()]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Go on from a state that ``state`` returned."""
        self._numbers.update((env_id, number) for env_id, number in state)


def first_seed(seed: int | Sequence[int | None], base: int, env_id: int) -> int:
    """Return the seed of an environment's first episode since a reset with ``seed``. ``base``: in place of None."""
    own = seed if isinstance(seed, int) else seed[env_id]
    return derive_seed(base if own is None else own, env_id) if own is None or isinstance(seed, int) else own


class Keeper:
    """The part of a manager that keeps episodes when their workers are replaced."""

    def __init__(self, table: WorkerTable, recovery: Recovery, policy: RestartPolicy, seed: int) -> None:
        """``seed``: of environments without a seed in the list that a reset was given."""
        self.n_kept = self.n_diverged = self.n_repeated = 0
        """Number of episodes that went on, of those that did not because they differed, and of steps repeated."""
        self.has_one_agent_each = True
        self.seed = seed
        self.n_resets, self._numbers = 0, dict[int, int]()
        self._table, self._recovery, self._policy = table, recovery, policy
        self._rounds, self._until_check = Rounds(), 1
        self._n_bytes = -1
        """Number of bytes of the actions of all environments; -1 if the last check or failure found one unusual."""

    def tasks(self, config: ResetConfig) -> SeedSource:
        """Return the source of tasks for a reset without tasks, of environments that begin no series by themselves."""
        if config.seed is not None:
            self._numbers = {}
        seed = self._recovery.last_config.seed if config.seed is None else config.seed
        return SeedSource(self.seed if seed is None else seed, self.seed, self._numbers)

    def counts(self) -> dict[str, int]:
        """Return the fields of ManagerStats that count what was kept."""
        return {
            "episodes_kept": self.n_kept,
            "episodes_diverged": self.n_diverged,
            "steps_repeated": self.n_repeated,
        }

    # Logs.

    def begin_log(self, entry: Entry, *, is_seeded: bool) -> None:
        """Begin a log, for a reset. ``is_seeded``: whether the reset has a seed, else the seeds of episodes go on."""
        self._rounds.share()
        self._n_bytes, self._until_check = -1, 1
        old = entry.log
        entry.log = EpisodeLog(
            len(entry.env_ids), self._table.specs_of(entry.kind), self._rounds, is_single=self.has_one_agent_each
        )
        for name, values, rows in entry.attributes.values():
            for row, value in zip(rows, values, strict=True):
                entry.log.held[row][name] = value
        entry.restore, entry.blame = None, (-1, (), 0)
        if old is not None:
            entry.log.unsure = {row: names for row, names in old.unsure.items() if names}
            entry.log.unkept = dict.fromkeys(entry.log.unsure, 0)
        if old is not None and not is_seeded:
            old.tidy()
            entry.log.numbers = [number + 1 for number in old.numbers]

    def seed_of_reset(self) -> int:
        """Return the seed of the last reset, if it had none: the same for all workers."""
        return derive_seed(self.seed, self.n_resets)

    def log_all(self, actions: Tree) -> bool:
        """Keep the actions of a step, if they are those of all environments, in their order. Return whether so.

        Called before steps are sent. If it returns False, ``log_step`` follows for each worker.
        """
        self._until_check -= 1
        if not self._until_check:
            self._check()
        if actions.__class__ is not np.ndarray or actions.nbytes != self._n_bytes:
            return False
        self._rounds.held.append(actions.tobytes())
        return True

    def log_step(self, entry: Entry, actions: Mapping[str, Tree], rows: Mapping[str, np.ndarray] | None = None) -> None:
        """Keep the actions of a worker's step. ``rows``: those of the environments, by default all that act."""
        log, info = entry.log, entry.previous_step
        if log is None or info is None:
            return
        if rows is None and not (log.size and sum(map(len, actions.values())) == len(entry.env_ids)):
            current, first = info.current, entry.env_ids[0]
            rows = {name: current[name].env_id[current[name].acting_rows] - first for name in actions}
        log.keep(actions, rows or {})

    def _check(self) -> None:
        """Give up what is longer than the policy's ``keep_at_most``, and note whether anything is unusual."""
        entries, self._until_check = self._table.entries, _CHECK_EVERY
        self._rounds.share()
        self._rounds.logs = logs = [entry.log for entry in entries if entry.log is not None]
        is_nominal = not self._table.unusual and all(entry.restore is None for entry in entries)
        is_usual = is_nominal and len(logs) == len(entries) and all(log.size for log in logs)
        self._n_bytes = sum(log.size for log in logs) if is_usual else -1
        for entry, log in [(entry, entry.log) for entry in entries if entry.log is not None]:
            log.tidy()
            most, n_calls = self._policy.keep_at_most, Counter(row for _, row, *_ in log.calls)
            if n_calls or log.before or min(log.starts) < log.n_steps - most:
                long = [row for row in log.playing() if max(log.length(row), n_calls[row]) > most]
                self.leave_out(entry, long, f"it has more than keep_at_most={most:,} steps or calls")
                log.tidy()

    def asked(
        self,
        entries: Sequence[Entry],
        name: CommandName,
        payloads: Sequence[Any],
        responses: Sequence[EnvironmentResponse],
        gone: Collection[int],
        *,
        repeats: bool | None,
    ) -> None:
        """Keep a call or ``set_attr``, with which workers were asked, for the episodes in which it has succeeded.

        ``responses``: fewer if an interrupt came. ``gone``: workers, by id, that have failed, and with them the call.
        """
        for number, (entry, payload) in enumerate(zip(entries, payloads, strict=True)):
            what, rows, sets = f"{name}({payload[0]!r}, …)", payload[2], name is CommandName.SET_ATTR
            if entry.log is None or entry.worker_id in gone or repeats is None:
                continue
            if not repeats:
                self.leave_out(entry, rows, f"{what} is not to be repeated", is_called=True)
            elif number >= len(responses) or responses[number].name is CommandName.FAILED:
                self.leave_out(entry, rows, f"{what} has not succeeded, and may have changed it", is_called=True)
                for row in rows if sets else ():
                    entry.log.unsure.setdefault(row, set()).add(payload[0])
            else:
                for row, call in calls_in(name, payload):
                    if sets and row in entry.log.unsure:
                        entry.log.tidy()  # the present episode, which is not kept, began before
                        entry.log.unsure[row].discard(payload[0])
                    entry.log.note(row, snapshot((call,)))
        self._until_check -= 1
        if not self._until_check:
            self._check()

    def leave_out(self, entry: Entry, rows: Sequence[int], why: str, *, is_called: bool = False) -> None:
        """Do not keep the present episodes of these environments, and tell so. ``is_called``: as after a call."""
        if entry.log is None:
            return
        entry.log.tidy()
        new = [row for row in rows if row not in entry.log.unkept]
        entry.log.leave_out(rows, is_called=is_called)
        if new:
            env_ids = tuple(entry.env_ids[row] for row in new)
            who: Any = {"worker_id": entry.worker_id, "generation": entry.generation}
            self._recovery.events.add(events.EpisodesNotKept(**who, env_ids=env_ids, why=why))

    def begins_of_series(self, entry: Entry) -> list[Begin]:
        """Return the episodes that begin in a worker whose environments begin the later ones by themselves."""
        return [self._begin_of_series(entry, row) for row in range(len(entry.env_ids))]

    def _begin_of_series(self, entry: Entry, row: int) -> Begin:
        assert entry.log is not None
        config, env_id, number = self._recovery.last_config, entry.env_ids[row], entry.log.numbers[row]
        first = first_seed(self.seed if config.seed is None else config.seed, self.seed, env_id)
        return Begin(row, True, seed_of_series(first, number), config.options, series=(first, number))

    def position(self, entry: Entry, row: int) -> Task | None:
        """Return the beginning and the actions of the episode that an environment plays, as last delivered, or None."""
        log, book = entry.log, self._table.book
        seat = book.seats.of_worker[entry.worker_id][row]
        is_lost = entry.restore is not None and row in entry.restore.lost
        if log is None or is_lost or entry.error is not None or seat.state is not SeatState.PLAYS:
            return None
        log.tidy()
        if row in log.unkept:
            raise UsageError(f"the position of env {seat.env_id} is not known: an event EpisodesNotKept says why.")
        begin = self._begin_of_series(entry, row) if book.is_automatic else seat.begun
        stop = log.stop(row, is_sent=entry.state in (WorkerState.IN_FLIGHT, WorkerState.READY))
        by_name, calls = self._so_far(log, begin, stop)
        actions: Any = by_name or None
        if by_name and len(self._table.specs_of(entry.kind)) == 1:
            (actions,) = by_name.values()
        own: Any = {"seed": begin.seed, "options": begin.options, "actions": actions, "calls": calls}
        return Task(**own, kind=entry.kind or None)

    @staticmethod
    def _so_far(log: EpisodeLog, begin: Begin, stop: int) -> tuple[Mapping[str, Tree] | None, list[Call]]:
        """Return the actions and the calls of an episode before the step ``stop``, those of its beginning first."""
        calls = log.calls_of(begin.row, stop, begin)
        return joined_actions([begin.actions, log.actions_of(begin.row, stop)]) or ({} if calls else None), calls

    def note_ends(self, entry: Entry, steps: AgentSteps, cuts: Sequence[tuple[Entry, Any, Sequence[int]]]) -> None:
        """Note the ends that a worker's steps tell of, except those of ``cuts``: workers, causes and env_ids."""
        assert entry.log is not None
        lost = [env_id for _, _, env_ids in cuts for env_id in env_ids]
        steps = steps.take(np.flatnonzero(~np.isin(steps.env_id, lost))) if lost else steps
        entry.log.ended(steps, None if len(steps) == len(entry.env_ids) else steps.env_id - entry.env_ids[0])

    # Failures.

    def can_keep(self, entry: Entry, error: WorkerError) -> bool:
        """Decide whether a worker that failed, or is old, is replaced by one that goes on with its episodes."""
        log, book = entry.log, self._table.book
        is_lost = entry.replacement is not None and not entry.replacement.keeps
        if log is None or book.is_resetting or is_lost or entry.state is WorkerState.REPLACING:
            return False
        log.tidy()
        self._n_bytes = -1
        if entry.restore is None:
            is_sent = entry.state is WorkerState.IN_FLIGHT
            entry.restore = Restore(error, self._recovery.host.now(), is_sent=is_sent)
        guilty, restore = self._guilty(entry, error), entry.restore
        restore.left, restore.parts = [], []
        if entry.state is not WorkerState.READY:
            restore.told = ()
        rows = [seat.row for seat in book.seats.of_worker[entry.worker_id] if seat.state is not SeatState.RESTS]
        self.lose(entry, rows if guilty is None else [*guilty, *(row for row in rows if row in log.unkept)], error)
        return not restore.lost.keys() >= set(rows)

    def keeps_all(self, entry: Entry) -> bool:
        """Return whether a healthy worker can be replaced without the loss of an episode."""
        if entry.log is None or entry.restore is not None:
            return False
        entry.log.tidy()
        return not entry.log.unkept

    def _guilty(self, entry: Entry, error: WorkerError) -> set[int] | None:
        """Return the rows of the environments to which a failure is charged, perhaps none yet; None for all."""
        log, restore = _of(entry)
        step = log.n_steps
        if error.phase in (RECYCLED, "start") or getattr(error, "type_name", "") == "KeyboardInterrupt":
            return set()
        named = [entry.env_ids.index(env_id) for env_id in error.env_ids]
        if error.phase == CANCELLED:
            return set(named)
        is_alone = bool(restore.left)
        suspect = restore.left[0] if is_alone else named[0] if len(named) == 1 else -1
        in_step, n_repeating = entry.blame[1:] if entry.blame[0] == step else ((), 0)
        if entry.state is WorkerState.IN_FLIGHT and entry.replacement is None:
            in_step = (*in_step, suspect)
        else:
            n_repeating += 1
        entry.blame = step, in_step, n_repeating
        if n_repeating >= max(2, min(self._policy.max_restarts - 1, _MOST_REPEATING)):
            return None if suspect < 0 else {suspect}
        if in_step.count(suspect) < _MOST_IN_STEP and not is_alone:
            return set()
        entry.blame = step, (), 0
        lost, rows = restore.lost, log.last()[1].values()
        none_takes_it = is_alone or all(row in lost for own in rows for row in own.tolist())
        if suspect >= 0 or none_takes_it or not self._loses_rows(entry):  # if none takes it, a beginning has failed
            return None if suspect < 0 else {suspect}
        restore.is_alone = True
        return set()

    def _loses_rows(self, entry: Entry) -> bool:
        """Return whether some environments of a worker can lose their episodes without the others."""
        return len(entry.env_ids) == 1 or (self.has_one_agent_each and self._recovery.host.steps_some_rows)

    def lose(self, entry: Entry, rows: Sequence[int], cause: WorkerError) -> None:
        """Note that the episodes of these environments are lost; all of the worker's, if they can only be together."""
        if not rows or entry.restore is None or entry.log is None:
            return
        if not self._loses_rows(entry):
            rows = range(len(entry.env_ids))
        new = sorted(set(rows) - entry.restore.lost.keys())
        if new:
            self._recovery.host.lost(entry.worker_id, cause, [entry.env_ids[row] for row in new])
        entry.log.settle(new)
        for row in new:
            entry.restore.lost[row] = cause
            entry.log.numbers[row] += 1
            entry.log.unkept.pop(row, None)

    def lose_all(self, entry: Entry, cause: Exception) -> None:
        """Note that all episodes of a worker are lost, and that others begin; in a reset first the same once more."""
        self._n_bytes, book = -1, self._table.book
        if book.is_resetting and any(seat.state is SeatState.SENT for seat in book.seats.of_worker[entry.worker_id]):
            entry.blame = -1, (), entry.blame[2] + 1
            if entry.blame[2] >= _MOST_IN_STEP:
                book.lose(entry, cause)
        if entry.log is not None:
            entry.log.tidy()
            entry.log.settle(range(len(entry.env_ids)))
            entry.log.unkept.clear()
            entry.log.unsure.clear()
            for row in range(len(entry.env_ids)):
                if not book.is_resetting:  # else the first episodes, which nobody has seen, begin once more
                    entry.log.numbers[row] += entry.restore is None or row not in entry.restore.lost
                entry.log.begin(row)
        entry.restore = None

    # The next generation.

    def begins_of(self, entry: Entry) -> list[Begin]:
        """Return what a replacement begins: the episodes that play, with their actions, and what is laid ready."""
        (log, restore), book = _of(entry), self._table.book
        log.tidy()  # the steps before are delivered now
        log.unsure.clear()  # the new environments have what was set
        stop, begins, laid = log.n_steps - (entry.state is WorkerState.IN_FLIGHT), [], []
        for seat in book.seats.of_worker[entry.worker_id]:
            if seat.row in restore.lost:
                continue
            if book.is_automatic:
                begin: Begin | None = self._begin_of_series(entry, seat.row)
            else:
                begin = seat.begun if seat.state is SeatState.PLAYS else None
            if begin is not None:
                actions, calls = self._so_far(log, begin, stop)
                begin = begin._replace(
                    at_once=True, actions=actions, calls=calls, counted_from=n_actions(begin.actions)
                )
                if book.episodes is None or self._policy.keep_episodes == "unchecked":
                    begin = begin._replace(counted_from=None)
                else:
                    restore.counts[seat.env_id] = book.episodes.running(seat.env_id)
                begins.append(begin)
            if seat.is_laid and seat.told is not None:
                laid.append(seat.told)
        restore.begins, restore.last = begins, self.last(entry)
        return [*begins, *laid]

    def takes(self, entry: Entry, response: EnvironmentResponse) -> bool:
        """Go on with a response of a worker whose episodes are being made again. Return whether it was one."""
        _, restore = _of(entry)
        if entry.replacement is not None:
            if not entry.replacement.keeps:
                return False
            not_begun = response.not_begun or {}
            failures = [getattr(each, "failure", None) for each in not_begun.values()]
            raised = next(filter(None, failures), None)
            if raised is not None and self._policy.on_exception == "restart":
                self._recovery.fail(entry, raised)
                return True
            self._compare(entry, response, not_begun)
            if entry.state is WorkerState.IN_FLIGHT:
                self.send_again(entry)
            return True
        if entry.state is not WorkerState.IN_FLIGHT:
            return False
        if restore.left:
            restore.left.pop(0)
            restore.parts.append({name: steps.copy() for name, steps in response.payload.items()})
            if restore.left:
                self._send_next(entry)
                return True
        payload, name = self._with_losses(entry, _joined(restore.parts or [response.payload])), CommandName.STEP
        if len(restore.told) == entry.n_envs_in_flight > 0:
            self._recovery.steps_lost += 1
            name = CommandName.RESET
        made = EnvironmentResponse(name, entry.worker_id, payload, None, response.not_begun)
        restore.is_sent = False
        self._table.move([entry], WorkerState.READY, (made,))
        return True

    def _compare(self, entry: Entry, response: EnvironmentResponse, not_begun: Mapping[int, Any]) -> None:
        """End a replacement that has repeated the actions. Note the loss of each episode that stands elsewhere."""
        (_, restore), recovery = _of(entry), self._recovery
        last, who = restore.last, dict[str, Any](worker_id=entry.worker_id, generation=entry.generation)
        kept, plays_on = list[int](), False
        for begin in restore.begins:
            env_id = entry.env_ids[begin.row]
            told, difference = not_begun.get(env_id), None
            failure = None if isinstance(told, dict) else told
            if failure is not None:
                difference = "the episode", "goes on", getattr(failure, "cause", str(failure))
            elif self._policy.keep_episodes != "unchecked":
                difference = _difference(_of_envs(last, [env_id]), _of_envs(response.payload, [env_id]))
                if difference is None and told is not None:
                    difference = _miscounted(restore.counts[env_id], told)
            if difference is None:
                kept.append(env_id)
                continue
            path, expected, got = difference
            found: Any = {"step": begin.n_repeated, "path": path, "expected": expected, "got": got}
            recovery.events.add(events.EpisodesDiverged(**who, env_id=env_id, **found))
            self.n_diverged += 1
            self.lose(entry, [begin.row], restore.cause)
            plays_on |= failure is None
        if plays_on and not self._table.book.is_automatic:  # it is to rest, but plays there: begin the others alone
            recovery.replace_once_more(entry)
            return
        kept = [env_id for env_id in kept if entry.env_ids.index(env_id) not in restore.lost]
        n_steps, now = sum(begin.n_repeated for begin in restore.begins), recovery.host.now()
        self.n_kept, self.n_repeated = self.n_kept + len(kept), self.n_repeated + n_steps
        what: Any = {"env_ids": tuple(kept), "n_steps": n_steps, "seconds": now - restore.began_at}
        recovery.events.add(events.EpisodesKept(**who, **what))
        entry.replacement, entry.has_attributes, entry.began_at = None, True, now
        self._table.note(entry)
        if not restore.lost and not restore.is_alone and entry.state is not WorkerState.IN_FLIGHT:
            entry.restore = None

    def last(self, entry: Entry) -> Steps:
        """Return the rows of a worker's environments that were delivered last, by behavior."""
        book = self._table.book
        assert entry.previous_step is not None
        if not entry.batches:
            return {name: steps.copy() for name, steps in entry.previous_step.current.items()}
        acts = None if book.is_automatic else book.seats.acts
        return {name: last_rows(entry, acts) for name in self._table.specs_of(entry.kind)}

    # The step in flight.

    def send_again(self, entry: Entry) -> None:
        """Send the last step of the log, without the environments whose episode is lost, which may begin another."""
        (log, restore), book, worker = _of(entry), self._table.book, self._recovery.host.workers[entry.worker_id]
        if entry.replacement is not None:
            return  # it is sent when the episodes have been made again
        actions, rows = log.last()
        taken = sorted({row for own in rows.values() for row in own.tolist()})
        restore.told = tuple(row for row in taken if row in restore.lost)
        laid = [begin for begin in restore.held if not begin.at_once]
        if book.is_automatic:
            begins = [self._begin_of_series(entry, row) for row in restore.told]
        else:
            seats = book.seats.of_worker[entry.worker_id]
            begins = [seat.told for seat in seats if seat.state is SeatState.SENT and seat.told is not None]
        left = [row for row in taken if row not in restore.lost]
        is_alone = restore.is_alone and bool(left)
        is_single = len(self._table.specs_of(entry.kind)) == 1
        is_partial = len(taken) < book.seats.n_acting_in[entry.worker_id] or (not taken and is_single)
        if laid or (begins and not is_alone):
            worker.send(CommandName.BEGIN, laid if is_alone else laid + begins)
        if is_alone:
            restore.left, restore.held = [*left, -1] if begins else left, begins
            self._send_next(entry)
        elif restore.told or is_partial:
            self._send_rows(entry, left)
        else:
            self._send(entry, CommandName.STEP, actions)
            if not restore.lost:
                entry.restore = None

    def _send_next(self, entry: Entry) -> None:
        """Send the step to the next environment that takes it alone; after all of them (-1) what is to begin."""
        _, restore = _of(entry)
        if restore.left[0] < 0:
            self._recovery.host.workers[entry.worker_id].send(CommandName.BEGIN, restore.held)
        self._send_rows(entry, restore.left[:1])

    def _send_rows(self, entry: Entry, chosen: Sequence[int]) -> None:
        assert entry.log is not None
        actions, rows = entry.log.last()
        own = {name: take_rows(tree, np.flatnonzero(np.isin(rows[name], chosen))) for name, tree in actions.items()}
        self._send(entry, CommandName.STEP_ROWS, (np.array(chosen, np.int64), own))

    def _send(self, entry: Entry, name: CommandName, payload: Any) -> None:
        _, restore = _of(entry)
        host = self._recovery.host
        if restore.is_sent:
            host.reuse_rows(entry.worker_id)
        restore.is_sent = True
        host.workers[entry.worker_id].send(name, payload)

    def _with_losses(self, entry: Entry, payload: Steps) -> Steps:
        """Return the steps of a worker with the rows that end the lost episodes, in place of the first of new ones."""
        _, restore = _of(entry)
        if not restore.told:
            return payload
        env_ids = [entry.env_ids[row] for row in restore.told]
        ends = followed_by(lost(_of_envs(restore.last, env_ids)), _of_envs(payload, env_ids))
        others = _of_envs(payload, [env_id for env_id in entry.env_ids if env_id not in env_ids])
        return _joined([others, ends])

    def tell(self, entry: Entry) -> list[tuple[WorkerError, tuple[int, ...]]]:
        """Return the losses that the next response tells of: causes with the environments. They are over then."""
        log, restore = _of(entry)
        causes: dict[WorkerError, list[int]] = {}
        if entry.outbox[0].name is CommandName.STEP:
            self._table.env_steps -= len(restore.told)  # the table counts all that were sent
        for row in restore.told:
            log.begin(row)
            causes.setdefault(restore.lost.pop(row), []).append(entry.env_ids[row])
        restore.told, restore.is_alone, restore.parts, restore.held = (), False, [], []
        if not restore.lost and entry.replacement is None:
            entry.restore = None
        return [(cause, tuple(env_ids)) for cause, env_ids in causes.items()]


def _of(entry: Entry) -> tuple[EpisodeLog, Restore]:
    assert entry.log is not None
    assert entry.restore is not None
    return entry.log, entry.restore


def _of_envs(steps: Steps, env_ids: Sequence[int]) -> dict[str, AgentSteps]:
    """Return the rows of some environments, by behavior, without behaviors that have none."""
    own = {name: each.take(np.flatnonzero(np.isin(each.env_id, env_ids))) for name, each in steps.items()}
    return {name: each for name, each in own.items() if len(each)}


def _joined(parts: Sequence[Steps]) -> Steps:
    """Return the rows of all parts, by behavior, in the order of their ids."""
    if len(parts) == 1:
        return parts[0]
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        steps = concat_steps([part[name] for part in parts if name in part])
        joined[name] = steps = steps.take(np.argsort(steps.agent_id, kind="stable"))
        if steps.acting is not None and steps.acting.all():
            steps.acting = None
    return joined


def _difference(expected: Steps, got: Steps) -> tuple[str, Any, Any] | None:
    """Return the first difference of the observations of agents that play, as its path and what is there; or None."""
    for name in sorted({*expected, *got}):
        one, other = _playing(expected.get(name)), _playing(got.get(name))
        ids = [[] if steps is None else steps.agent_id.tolist() for steps in (one, other)]
        if ids[0] != ids[1]:
            return f"the agents of behavior {name!r}", *ids
        if one is not None and other is not None:
            row: Any = 0 if len(one) == 1 else slice(None)
            found = next(differences(take_rows(one.obs, row), take_rows(other.obs, row), "obs"), None)
            if found is not None:
                return tuple(found)
    return None


def _miscounted(expected: Mapping[int, tuple[float, int]], got: Mapping[int, tuple[float, int]]) -> Any:
    """Return the first difference of the returns and lengths of agents, as ``_difference`` does."""
    for agent_id, (total, length) in expected.items():
        own_total, own_length = got.get(agent_id, (0.0, 0))
        if own_length != length:
            return "the length", length, own_length
        if own_total != total and not (math.isnan(own_total) and math.isnan(total)):
            return "the return", total, own_total
    return None


def _playing(steps: AgentSteps | None) -> AgentSteps | None:
    if steps is None:
        return None
    plays = ~steps.ended | (True if steps.acting is None else steps.acting)
    own = steps.take(np.flatnonzero(plays))
    return own if len(own) else None
