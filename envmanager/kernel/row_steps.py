"""Implementation of ``send`` and ``recv`` for environments with one agent each. Arrays have one row per environment.

::

    actions, env_ids ── checked ── grouped by worker ──▶ worker.send
    Batch ◀── copied or shared ── the rows of the workers to deliver ◀── collect

The rule: a batch is complete before the next command is sent to any of its workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.casting import checked_actions
from envmanager.data.env_rows import EnvIndex, EnvsOfWorker
from envmanager.data.specs import BehaviorSpec, zeros
from envmanager.data.steps import AgentSteps, Batch, CommandName, EnvironmentResponse, ends_and_infos
from envmanager.data.trees import Tree, take_rows
from envmanager.errors import BadAction, EnvManagerError, UsageError
from envmanager.kernel.host import WorkerHost
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.table import Entry, WorkerState, WorkerTable
from envmanager.kernel.tasks import TaskBook

_IDLE, _IN_FLIGHT, _READY = WorkerState.IDLE, WorkerState.IN_FLIGHT, WorkerState.READY
_STEP, _STEP_ROWS = CommandName.STEP, CommandName.STEP_ROWS


@attrs.define(eq=False, slots=False)
class BatchStepper:
    """The implementation of a manager's ``send`` and ``recv``. It sends actions and joins responses into batches."""

    _table: WorkerTable
    _recovery: Recovery
    _env_rows: EnvIndex
    _zero_copy: bool = attrs.field(kw_only=True)
    _check_values: bool = attrs.field(kw_only=True)
    host: WorkerHost = attrs.field(init=False)
    behavior: str = attrs.field(default="default", init=False)
    """Name of the only behavior, or of that of the kind that was sent or received last."""
    _spec: BehaviorSpec | None = attrs.field(default=None, init=False)
    _no_actions: dict[str, Tree] = attrs.field(factory=dict, init=False)
    _of_kinds: dict[str, tuple[str, BehaviorSpec | None, dict[str, Tree]]] = attrs.field(factory=dict, init=False)
    """The behavior of each kind of environments, its spec, and no actions for it. Without kinds, the key is ""."""
    _n_specs: int = attrs.field(default=-1, init=False)
    """Number of known specs when the behavior was last looked up; -1 before the first look-up."""

    def _find_behavior(self, *, is_begun: bool) -> None:
        """Store the name and spec of the only behavior, of each kind. Raises UsageError before a reset, or for several.

        At the first use after a reset (not ``is_begun``), also require one agent per env and empty ``rows_in_flight``.
        """
        specs = self._table.specs
        in_use = [entry for entry in self._table.entries if not entry.is_given_up]
        if any(entry.previous_step is None for entry in in_use):
            raise UsageError("send() and recv() come after reset(): call reset() first.")
        for kind in self._table.kinds or ("",):
            own_specs = self._table.specs_of(kind)
            if len(own_specs) > 1:
                raise UsageError(
                    f"send() and recv() serve single-agent environments; these have the behaviors {sorted(own_specs)}. "
                    "Use step()."
                )
            behavior, spec = next(iter(own_specs.items())) if own_specs else (kind or "default", None)
            self._of_kinds[kind] = behavior, spec, {} if spec is None else {behavior: zeros(spec.action, 0)}
        if not is_begun:
            for entry in in_use:
                behavior, spec, _ = self._of_kinds[entry.kind]
                if spec is None:
                    continue
                assert entry.previous_step is not None
                own, n_envs = entry.previous_step.current.get(behavior), len(entry.env_ids)
                if not self._table.book.is_automatic:  # some may rest
                    n_envs = 0 if own is None else len(set(own.env_id.tolist()))
                self._check_rows(entry, own, n_envs)
                entry.rows_in_flight = frozenset()
        self._n_specs = len(specs)
        self.behavior, self._spec, self._no_actions = next(iter(self._of_kinds.values()))

    def _take_kind_of(self, entries: Sequence[Entry]) -> None:
        """Take the behavior of the kind of these workers. Raises BadAction if they are of several kinds."""
        kinds = dict.fromkeys(entry.kind for entry in entries)
        if len(kinds) > 1:
            raise BadAction(
                f"the actions of one send() are for environments of one kind, but these are of {' and '.join(kinds)}: "
                "send those of each kind apart, as recv() returns them. Nothing was sent."
            )
        for kind in kinds:
            self.behavior, self._spec, self._no_actions = self._of_kinds[kind]

    def _check_rows(self, entry: Entry, steps: AgentSteps | None, n: int) -> None:
        """Raise UsageError unless ``steps`` has an acting row for each of ``n`` environments, in order if n are all."""
        env_ids = [] if steps is None else steps.env_id.tolist()
        n_acting = 0 if steps is None else len(steps.acting_rows)
        is_whole = n == len(entry.env_ids)
        is_distinct = len(env_ids) == len(set(env_ids)) == n
        if n_acting != n or not (env_ids == list(entry.env_ids) if is_whole else is_distinct):
            raise UsageError(
                f"send() and recv() serve environments of one agent each, but worker {entry.worker_id} has returned "
                f"{len(env_ids)} agents, of which {n_acting} act, for {n} environments (env_ids {env_ids}). "
                "Call reset(), and use step()."
            )
        if steps is not None and is_whole:
            entry.usual_ids = steps.agent_id

    def offer_first_observations(self) -> None:
        """Queue the last reset's observations for ``recv``. Raises UsageError if ``recv`` cannot be used."""
        self._find_behavior(is_begun=False)
        for entry in self._table.entries:
            if entry.state is _IDLE and entry.previous_step is not None:
                steps = {name: self._table.book.offer_first(each) for name, each in entry.previous_step.current.items()}
                if any(map(len, steps.values())):
                    first = EnvironmentResponse(CommandName.RESET, entry.worker_id, steps)
                    self._table.move([entry], _READY, (first,))

    # Actions.

    def send(self, actions: Tree, env_ids: Any, begin: Callable[[], None] | None) -> None:
        """Send ``actions`` to the workers of ``env_ids``. ``begin``, if given, is called once all checks have passed.

        Raises BadAction, before anything is sent, for invalid actions or env_ids, or if a worker's response has not
        been delivered. Raises the error of a worker that was given up. ``begin`` is for the first use after a reset.
        """
        table, host, behavior = self._table, self.host, self.behavior
        if begin is not None or len(table.specs) != self._n_specs:
            self._find_behavior(is_begun=begin is None)
            behavior = self.behavior
        rows_of = self._env_rows
        is_all = env_ids is rows_of.all_env_ids  # as recv() gives them
        n, groups = (rows_of.n_envs, rows_of.all_groups) if is_all else rows_of.grouped(env_ids, BadAction)
        if table.kinds:
            self._take_kind_of([table.entries[group.worker_id] for group in groups])
            behavior = self.behavior
        actions = checked_actions(self._spec, actions, n, "send", self._check_values, host.accepts_device_arrays)
        entries, book = table.entries, table.book
        seats = book.seats
        if not book.is_automatic:
            book.draw()
            if seats.n_acting < seats.n_envs:
                groups = self._acting(groups, book)
        for worker_id, rows, _ in groups:
            entry = entries[worker_id]
            if entry.state is not _IDLE and not entry.ignores_action:  # the trainer does not know of an ignored action
                entry.require_alive()
                raise BadAction(
                    f"env {entry.env_ids[rows[0]]} is still waiting: the response of worker {worker_id} to the last "
                    "actions has not been delivered. Call recv() first. Nothing was sent."
                )
            if not host.steps_some_rows and len(rows) < seats.n_acting_in[worker_id]:
                acting = [env_id for env_id in entry.env_ids if seats.acts[env_id]]
                raise BadAction(
                    f"the actions are for {len(rows)} of the {len(acting)} environments of worker {worker_id}, "
                    f"which move together: send actions for all of {acting}. Nothing was sent."
                )
            if entry.batch_size:
                _require_batch(entry, rows)
        if table.has_objects:
            host.check_can_travel(actions)
        if begin is not None:
            begin()
        workers, keeper, n_sent = host.workers, self._recovery.keeper, 0
        is_logged = keeper is None or keeper.log_all(actions if groups is rows_of.all_groups else None)
        try:
            for worker_id, rows, places in groups:
                entry, n_rows, worker = entries[worker_id], len(rows), workers[worker_id]
                if entry.ignores_action:
                    self._recovery.discard_action(entry)
                    continue
                own = actions
                if n_rows < n or places.__class__ is not slice:  # else all actions, in order
                    own = actions[places] if actions.__class__ is np.ndarray else take_rows(actions, places)
                if not is_logged and entry.restore is not None:
                    worker = entry.restore
                if seats.untold:
                    book.send_begins(worker_id, worker)
                if not is_logged:
                    keeper.log_step(entry, {behavior: own}, {behavior: rows})
                if 0 < n_rows == seats.n_acting_in[worker_id] and not entry.batch_size:
                    worker.send(_STEP, {behavior: own})
                else:
                    worker.send(_STEP_ROWS, (rows, {behavior: own}))
                    if entry.batch_size:
                        entry.rows_in_flight |= frozenset(rows.tolist())
                entry.n_envs_in_flight, entry.state = n_rows, _IN_FLIGHT
                n_sent += 1
                if not is_logged and entry.restore is not None:
                    keeper.send_again(entry)
        finally:
            table.n_waiting += n_sent

    def _acting(self, groups: Sequence[EnvsOfWorker], book: TaskBook) -> list[EnvsOfWorker]:
        """Return ``groups`` without the environments that rest. A worker without others is left out, unless it begins.

        Raises BadAction for an environment that rests if the trainer begins the episodes itself.
        """
        acting = []
        for group in groups:
            entry, places = self._table.entries[group.worker_id], group.places
            acts = book.seats.acts[group.rows + entry.env_ids[0]]
            if not acts.all():
                if book.given is None:
                    raise BadAction(
                        f"env {entry.env_ids[group.rows[~acts][0]]} takes no action, because its episode has ended or "
                        "is about to begin: call begin() for it, or leave it out. Nothing was sent."
                    )
                if places.__class__ is slice:
                    places = np.arange(places.start, places.stop)
                group = EnvsOfWorker(group.worker_id, group.rows[acts], places[acts])
            if acts.any() or (entry.state is _IDLE and group.worker_id in book.seats.untold):
                acting.append(group)
        return acting

    def send_begins(self, book: TaskBook) -> None:
        """Let workers that rest begin episodes, once old ones are recycled; let all of them if no step is in flight."""
        table, is_idle = self._table, book.begins_at_once or not self._table.n_waiting
        for worker_id in sorted(book.seats.untold):
            entry = table.entries[worker_id]
            worker: Any = self.host.workers[worker_id] if entry.restore is None else entry.restore
            rests = not book.seats.n_acting_in[worker_id]
            may_step = rests or (is_idle and not self.host.moves_all)
            if entry.state is not _IDLE or not entry.is_nominal or not may_step:
                continue
            if table.kinds:
                self._take_kind_of([entry])
            if entry.is_old and rests:
                self._recovery.recycle(entry)
                continue
            book.send_begins(worker_id, worker, to_old=True)
            if entry.log is not None:
                entry.log.keep(self._no_actions, {self.behavior: np.zeros(0, np.int64)})
            worker.send(_STEP_ROWS, (np.zeros(0, np.int64), self._no_actions))
            entry.n_envs_in_flight, entry.state = 0, _IN_FLIGHT
            table.n_waiting += 1
            if entry.restore is not None:
                self._recovery.keeper.send_again(entry)

    # Batches.

    def batch_of(self, entries: Sequence[Entry]) -> Batch:
        """Return the next response of each entry as one batch, and mark these responses as delivered."""
        table, n_envs = self._table, self._env_rows.n_envs
        if len(table.specs) != self._n_specs:
            self._find_behavior(is_begun=True)
        if table.kinds:
            self._take_kind_of(entries)
        book, keeper = table.book, self._recovery.keeper
        cuts: list[tuple[Entry, EnvManagerError, Sequence[int]]] = []
        parts: list[AgentSteps] = []
        not_begun: dict[int, EnvManagerError] = {}
        for entry in entries:
            response, told, cut = entry.outbox[0], (), None
            payload = response.payload
            if entry.replacement is not None:
                cut = self._recovery.cut(entry, book.seats.acts)
            if cut is not None:
                payload = cut[0]
                cuts.append((entry, cut[1].cause, entry.env_ids))
            elif keeper is not None and entry.restore is not None:
                told = keeper.tell(entry)
                cuts += [(entry, *each) for each in told]
            steps = payload.get(self.behavior)
            if not book.is_automatic:
                if steps is None:
                    steps = self._no_steps()
                expected = entry.n_envs_in_flight if response.name is _STEP else 0
                expected += book.seats.n_first_in[entry.worker_id]
                if response.not_begun is not None:
                    not_begun.update(response.not_begun)
                    expected -= len(response.not_begun)
                if len(steps.agent_id) != expected and not any(each is entry for each, *_ in cuts):
                    self._check_rows(entry, steps, expected)
            elif entry.batch_size:
                entry.n_envs_in_flight = len(steps)
                entry.rows_in_flight -= frozenset((steps.env_id - entry.env_ids[0]).tolist())
            elif not told and (steps is None or steps.agent_id is not entry.usual_ids or steps.acting is not None):
                self._check_rows(entry, steps, entry.n_envs_in_flight if response.name is _STEP else len(entry.env_ids))
            parts.append(steps)
        if len(parts) == 1:
            (steps,) = parts
            env_ids = self._env_rows.all_env_ids if len(steps.agent_id) == n_envs else None
            batch = Batch.of(steps, env_ids, self._zero_copy, self.host.rewrites_arrays)
        else:
            batch = self._joined(parts, entries)
        batch.behavior = self.behavior
        if cuts:
            batch.lost[:] = np.isin(batch.env_ids, [env_id for *_, env_ids in cuts for env_id in env_ids])
        book.cuts, book.not_begun = cuts, not_begun
        for entry, steps in zip(entries, parts, strict=True):
            if steps.final_obs is not None and entry.log is not None and book.is_automatic:
                keeper.note_ends(entry, steps, cuts)
            entry.batches = (batch,) if len(steps.agent_id) == len(entry.env_ids) else batches_with(entry, batch)
        table.delivered(entries)
        return batch

    def _joined(self, parts: list[AgentSteps], entries: Sequence[Entry]) -> Batch:
        """Join ``parts``, the steps of ``entries``, into one batch. A batch of all environments is sorted by env id."""
        if not parts:
            return Batch.of(self._no_steps(), is_view=False)
        if sum([len(steps.agent_id) for steps in parts]) < self._env_rows.n_envs:
            parts = [steps for steps in parts if len(steps.agent_id)] or parts[:1]  # a part without rows has no infos
            return Batch.joined(parts)
        by_worker = {entry.worker_id: steps for entry, steps in zip(entries, parts, strict=True)}
        parts = [by_worker[worker_id] for worker_id in sorted(by_worker)]
        env_ids = self._env_rows.all_env_ids
        whole = self.host.whole(self.behavior, parts) if len(parts) == len(self._table.entries) else None
        if whole is None:
            return Batch.joined(parts, env_ids)
        batch = Batch.of(whole, env_ids, self._zero_copy, self.host.rewrites_arrays)
        batch.final_obs, batch.info, batch.reset_info = ends_and_infos(parts)
        return batch

    def _no_steps(self) -> AgentSteps:
        nothing = np.zeros(0, np.int64)
        return AgentSteps.first(agent_id=nothing, obs=None if self._spec is None else zeros(self._spec.observation, 0))


def _require_batch(entry: Entry, rows: np.ndarray) -> None:
    """Raise BadAction if a row is already in flight, or if fewer than ``batch_size`` rows would be in flight."""
    twice = entry.rows_in_flight.intersection(rows.tolist())
    if twice:
        raise BadAction(
            f"env {entry.env_ids[min(twice)]} is still waiting: worker {entry.worker_id} has responded without it. "
            "Send actions for the environments of the last batch. Nothing was sent."
        )
    n_rows = len(entry.rows_in_flight) + len(rows)
    if n_rows < entry.batch_size:
        raise BadAction(
            f"with these actions {n_rows} environments of worker {entry.worker_id} would step, but it returns "
            f"{entry.batch_size} at a time: send actions for {entry.batch_size - n_rows} more. Nothing was sent."
        )


def batches_with(entry: Entry, batch: Batch) -> list[Batch]:
    """Return the latest batches that hold the last delivered row of each environment of the worker, oldest first.

    ``batch`` is the newest batch. Views are copied, because later steps overwrite the memory under them.
    """
    kept: list[Batch] = []
    unseen = set(entry.env_ids)
    for each in (batch, *reversed(entry.batches)):
        n_unseen = len(unseen)
        unseen.difference_update(each.env_ids.tolist())
        if len(unseen) < n_unseen:
            kept.insert(0, each.copy() if each.is_view else each)
    return kept
