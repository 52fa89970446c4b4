"""Carries out ``send`` and ``recv``: environments of one agent each, one row per environment.

::

    actions, env_ids ── checked ── dealt by worker ──▶ worker.send
    Batch ◀── one copy per field ── the rows of whoever is ready ◀── collect

The rule: a batch exists before any worker it comes from moves on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envmanager.core.hosts import WorkerHost
from envmanager.core.last_rows import batches_with, last_steps
from envmanager.core.policy_calls import checked_actions
from envmanager.core.recovery import Recovery
from envmanager.core.table import Entry, WorkerState, WorkerTable
from envmanager.data.env_rows import EnvRows, RowsOfWorker
from envmanager.data.specs import BehaviorSpec
from envmanager.data.steps import AgentSteps, Batch, CommandName, EnvironmentResponse, ends_and_infos
from envmanager.data.trees import Tree, take_rows
from envmanager.errors import BadAction, UsageError

_IDLE, _STEP, _STEP_ROWS = WorkerState.IDLE, CommandName.STEP, CommandName.STEP_ROWS


class RowSteps:
    """Sends actions to environments and makes batches of their steps, for one manager."""

    def __init__(
        self,
        table: WorkerTable,
        recovery: Recovery,
        env_rows: EnvRows,
        *,
        zero_copy: bool,
        check_values: bool,
    ) -> None:
        self.host: WorkerHost
        self._table = table
        self._recovery = recovery
        self._env_rows = env_rows
        self._specs = table.specs
        self._zero_copy = zero_copy
        self._check_values = check_values
        self._behavior: tuple[str, BehaviorSpec | None] | None = None
        self._n_specs = 0

    # What it is about.

    def behavior(self, *, is_begun: bool) -> tuple[str, BehaviorSpec | None]:
        """The one behavior and its spec; UsageError when some environment has more than one agent.

        Without ``is_begun`` the first observations are still the last, so that can be seen of them.
        """
        if self._behavior is None or not is_begun or len(self._specs) != self._n_specs:
            self._behavior, self._n_specs = self._found_behavior(is_begun), len(self._specs)
        return self._behavior

    def _found_behavior(self, is_begun: bool) -> tuple[str, BehaviorSpec | None]:
        last = {each.env_ids: each.previous_step for each in self._table.entries if not each.is_given_up}
        if any(step is None for step in last.values()):
            raise UsageError("send() and recv() come after reset(): call reset() first.")
        if len(self._specs) > 1:
            raise UsageError(
                f"send() and recv() serve single-agent environments; these have the behaviors {sorted(self._specs)}. "
                "Use step()."
            )
        behavior, spec = next(iter(self._specs.items())) if self._specs else ("default", None)
        if not is_begun and spec is not None:
            for env_ids, step in last.items():
                steps = None if step is None else step.current.get(behavior)
                if steps is None or steps.env_id.tolist() != list(env_ids):
                    raise UsageError("send() and recv() serve environments of one agent each. Use step().")
        return behavior, spec

    def offer_first_observations(self) -> None:
        """What a reset returned is the first batch too; raises what ``behavior`` does."""
        self.behavior(is_begun=False)
        for entry in self._table.entries:
            if entry.state is WorkerState.IDLE and entry.previous_step is not None:
                steps = entry.previous_step.current
                self._table.offered(entry, EnvironmentResponse(CommandName.RESET, entry.worker_id, steps))

    # Actions.

    def checked(self, actions: Tree, env_ids: Any, is_begun: bool) -> tuple[Tree, list[RowsOfWorker]]:
        """Actions that fit, and whose they are, by worker.

        Raises BadAction when they do not or a worker is still waiting, or the error of one that was given up.
        """
        _, spec = self.behavior(is_begun=is_begun)
        n, groups = self._env_rows.grouped(env_ids, BadAction)
        own = checked_actions(spec, actions, n, "send", self._check_values)
        entries = self._table.entries
        for group in groups:
            if entries[group.worker_id].state is not _IDLE:
                self._check_not_idle(entries[group.worker_id], group)
        if not self.host.steps_some_rows:
            self._check_whole(groups)
        if self._table.has_objects:
            self.host.check_can_travel(own)
        return own, groups

    def _check_not_idle(self, entry: Entry, group: RowsOfWorker) -> None:
        if entry.ignores_action:
            return  # it failed after its observation was handed out, which the user cannot know yet
        entry.require_alive()
        raise BadAction(
            f"env {entry.env_ids[group.rows[0]]} is still waiting: the response of worker {entry.worker_id} to the "
            "last actions has not been handed out. Call recv() first. Nothing was sent."
        )

    def _check_whole(self, groups: list[RowsOfWorker]) -> None:
        for group in groups:
            env_ids = self._table.entries[group.worker_id].env_ids
            if len(group.rows) < len(env_ids):
                raise BadAction(
                    f"the actions are for {len(group.rows)} of the {len(env_ids)} environments of worker "
                    f"{group.worker_id}, which move together: send actions for all of {list(env_ids)}. Nothing was "
                    "sent."
                )

    def send(self, actions: Tree, groups: list[RowsOfWorker]) -> None:
        """Send what was ``checked``."""
        assert self._behavior is not None
        behavior = self._behavior[0]
        entries, workers = self._table.entries, self.host.workers
        for group in groups:
            entry = entries[group.worker_id]
            if entry.ignores_action:
                self._recovery.discard_action(entry)
                continue
            n_rows = len(group.rows)
            places = group.places
            if len(groups) > 1 or places.__class__ is not slice:  # else all actions, as they lie, are for one worker
                own = {behavior: actions[places] if actions.__class__ is np.ndarray else take_rows(actions, places)}
            else:
                own = {behavior: actions}
            if n_rows == len(entry.env_ids):
                workers[group.worker_id].send(_STEP, own)
            else:
                workers[group.worker_id].send(_STEP_ROWS, (group.rows, own))
            self._table.sent(entry, n_rows)

    # Batches.

    def batch_of(self, entries: Sequence[Entry]) -> Batch:
        """What is handed out of their responses; then they are handed out."""
        behavior = self.behavior(is_begun=True)[0]
        lost_env_ids: list[int] = []
        parts: list[AgentSteps] = []
        holders: list[Entry] = []
        for entry in entries:
            payload = entry.response.payload  # type: ignore[union-attr]
            if entry.replacement is not None:
                cut = self._recovery.cut(entry, last_steps(entry))
                if cut is not None:
                    lost_env_ids += entry.env_ids
                    payload = cut[0]
            steps = payload.get(behavior)
            if steps is not None:
                parts.append(steps)
                holders.append(entry)
        batch = self._batch(behavior, parts, holders)
        if lost_env_ids:
            batch.lost[:] = np.isin(batch.env_ids, lost_env_ids)
        only_this = (batch,)
        more = [] if len(batch.env_ids) == self._env_rows.n_envs else self._earlier_too(holders, parts, batch)
        self._table.handed_out(entries)
        for entry in holders:
            entry.batches = only_this
        for entry, batches in more:
            entry.batches = batches
        return batch

    def _earlier_too(
        self, holders: list[Entry], parts: list[AgentSteps], batch: Batch
    ) -> list[tuple[Entry, Sequence[Batch]]]:
        """The workers of which ``batch`` has not all environments, and the batches that have them."""
        return [
            (entry, batches_with(entry, batch))
            for entry, steps in zip(holders, parts, strict=True)
            if len(steps.agent_id) < len(entry.env_ids)
        ]

    def _batch(self, behavior: str, parts: list[AgentSteps], holders: list[Entry]) -> Batch:
        """The rows of some workers as one Batch, in env_id order when it holds all environments."""
        n_envs = self._env_rows.n_envs
        if len(parts) == 1:
            (steps,) = parts
            env_ids = self._env_rows.all_env_ids if len(steps.agent_id) == n_envs else None
            return self._handed_out(steps, env_ids)
        if not parts:
            some = next(entry.previous_step for entry in self._table.entries if entry.previous_step is not None)
            return Batch.copied(some.current[behavior].take(np.arange(0)))
        if sum([len(steps.agent_id) for steps in parts]) < n_envs:
            return Batch.joined(parts)
        by_worker = {entry.worker_id: steps for entry, steps in zip(holders, parts, strict=True)}
        parts = [by_worker[worker_id] for worker_id in sorted(by_worker)]
        env_ids = self._env_rows.all_env_ids
        whole = self.host.whole(behavior, parts) if len(parts) == len(self._table.entries) else None
        if whole is None:
            return Batch.joined(parts, env_ids)
        batch = self._handed_out(whole, env_ids)
        batch.final_obs, batch.info, batch.reset_info = ends_and_infos(parts)
        return batch

    def _handed_out(self, steps: AgentSteps, env_ids: np.ndarray | None) -> Batch:
        if self.host.rewrites_arrays:
            return Batch.copied(steps, env_ids)
        return Batch.of(steps, env_ids, is_view=self._zero_copy)
