"""Commands to all or some workers of a manager: ``reset``, ``call``, ``get_attr``, ``set_attr``, ``render``.

::

    reset   drain ── send("reset") to usable workers ── recv from them ── replace ended workers ── first StepInfos
    call    send to the workers of ``env_ids`` ── recv from all ── results in the order of ``env_ids``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.env_rows import EnvIndex
from envmanager.data.steps import CommandName, EnvironmentResponse, StepInfo
from envmanager.data.trees import snapshot
from envmanager.errors import UsageError
from envmanager.kernel.calls import Calls
from envmanager.kernel.collecting import Collector
from envmanager.kernel.host import WorkerHost
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.table import WorkerState, WorkerTable
from envmanager.options import ResetConfig


@attrs.define(eq=False)
class Commands:
    """The part of a manager that implements ``reset``, ``call``, ``get_attr``, ``set_attr`` and ``render``."""

    _table: WorkerTable
    _recovery: Recovery
    _collector: Collector
    _env_rows: EnvIndex
    _calls: Calls
    seed: int | None
    """Seed of the first reset if its config contains none."""
    host: WorkerHost = attrs.field(init=False)

    def checked(self, config: Any, *, seed: Any, options: Any) -> tuple[Any, ResetConfig]:
        """Return the config to send to workers and its parsed form. The first reset uses the manager's seed by default.

        Raises UsageError if ``config`` is invalid or cannot be sent, or if ``seed`` or ``options`` are given beside it,
        and worker 0's error if all workers were dropped.
        """
        if seed is not None or options is not None:
            if config is not None:
                raise UsageError(
                    "reset takes a config, or seed= and options=, not both: put all of it into one of them."
                )
            config = ResetConfig(seed, options)
        parsed = ResetConfig.of(config, n_envs=self._env_rows.n_envs)
        if self.seed is not None and parsed.seed is None:
            config = parsed = attrs.evolve(parsed, seed=self.seed)
        self.host.check_can_travel(parsed)
        self._require_some_worker()
        return config, parsed

    def _require_some_worker(self) -> None:
        entries = self._table.entries
        if all(entry.is_dropped for entry in entries):
            entries[0].require_alive()

    def reset(self, config: Any, parsed: ResetConfig) -> list[StepInfo]:
        """Reset or replace all workers except dropped ones. Return their first StepInfos in order of worker_id.

        If a worker fails and is neither replaced nor dropped, its error is raised after all workers have responded.
        If episodes begin on demand, the first ones are those that the table's book draws.
        """
        table, recovery, workers = self._table, self._recovery, self.host.workers
        book = table.book
        book.draw_first()
        self._calls.require_open("reset")
        self._collector.drain()  # a failure does not matter: the reset revives the worker
        for entry in table.entries:
            entry.actions, entry.batches = None, ()
            if entry.times.track is not None:
                entry.times.track.begin(entry.generation)  # the tasks from before the reset are over
        self._require_some_worker()  # the drain may have dropped the last worker
        seed = recovery.last_config.seed if parsed.seed is None else parsed.seed
        recovery.last_config = attrs.evolve(parsed, seed=seed, options=snapshot(parsed.options))
        asked = []
        if recovery.keeper is not None:
            recovery.keeper.n_resets += 1
        for entry in table.entries:
            entry.previous_step, entry.keeps_seed, entry.is_old = None, parsed.seed is not None, False
            if recovery.keeper is not None:
                recovery.keeper.begin_log(entry, is_seeded=parsed.seed is not None)
            is_lost = self.host.is_gone(entry.worker_id) or not entry.has_attributes
            if entry.is_kept or (entry.state is WorkerState.FAILED and is_lost):
                recovery.revive(entry)
            elif entry.state is not WorkerState.DROPPED:
                asked.append(entry)
        for entry in asked:
            recovery.take_back(entry)
            workers[entry.worker_id].send(CommandName.RESET, book.first_of(entry, config, parsed.seed))
        responses = {entry.worker_id: table.with_specs_learned(workers[entry.worker_id].recv()) for entry in asked}
        for entry in asked:
            if responses[entry.worker_id].name is CommandName.FAILED:
                error = responses.pop(entry.worker_id).payload
                recovery.fail(entry, error)
                if entry.error is not None or recovery.keeper is None:  # else it begins the same tasks again
                    book.lose(entry, error)
        replacements, failure = self._collector.drain()
        for entry in table.entries:
            entry.ignores_action = entry.keeps_seed = False
            table.note(entry)
        if failure is not None:
            raise failure
        responses.update(replacements)
        infos = []
        told = [response.not_begun for response in responses.values() if response.not_begun is not None]
        book.not_begun = {env_id: error for own in told for env_id, error in own.items()}
        for worker_id in sorted(responses):
            # Copied even with zero_copy: send and recv keep this StepInfo until the next reset.
            steps = {name: each.copy() for name, each in responses[worker_id].payload.items()}
            table.entries[worker_id].previous_step = info = StepInfo(None, steps, None, worker_id, specs=table.specs)
            infos.append(info)
        table.begin_counting()
        self._collector.shares = None
        self.seed = None
        return infos

    def ids(self, env_ids: Any) -> np.ndarray:
        """Return ``env_ids`` (None: all) as an int64 array. Raises UsageError for an unknown or repeated id."""
        rows = self._env_rows
        return rows.all_env_ids if env_ids is None else rows.checked(env_ids, UsageError)[0].astype(np.int64)

    def ask(
        self,
        name: CommandName,
        env_ids: Any,
        payload: Callable[[list[int], list[int]], Any],
        *,
        is_repeatable: bool | None = True,
    ) -> list[Any]:
        """Send a command with ``payload(rows, places)`` to the workers that run ``env_ids``. Return one result per id.

        ``rows`` are indices of environments in the worker, ``places`` indices in ``env_ids``. Waits for replacements.
        ``is_repeatable``: whether a call may be repeated, with episodes that are kept; None if it only reads.
        Raises a given-up worker's error before sending, or the first failure after all workers have responded.
        """
        with self._calls.named[name]:
            ids = self.ids(env_ids)
            groups, entries, workers = self._env_rows.by_worker(ids), self._table.entries, self.host.workers
            self._collector.await_replacements([entries[group.worker_id] for group in groups])
            for group in groups:
                entries[group.worker_id].require_alive()
            payloads = [payload(group.rows.tolist(), group.places.tolist()) for group in groups]
            self.host.check_can_travel(payloads)
            for group, own in zip(groups, payloads, strict=True):
                workers[group.worker_id].send(name, own)
            learned = self._table.with_specs_learned
            responses: list[EnvironmentResponse] = []
            try:
                for group in groups:
                    responses.append(learned(workers[group.worker_id].recv()))
                    if name is CommandName.SET_ATTR and responses[-1].name is not CommandName.FAILED:
                        self._table.book.note_begins(group.worker_id)
                        entries[group.worker_id].remember(*payloads[len(responses) - 1])
            finally:  # after an interrupt too, else recv() would wait for the step of a worker that has failed
                failed = [response for response in responses if response.name is CommandName.FAILED]
                gone = [(entries[each.worker_id], each.payload) for each in failed if self.host.is_gone(each.worker_id)]
                if self._recovery.keeper is not None and name in (CommandName.CALL, CommandName.SET_ATTR):
                    asked = [entries[group.worker_id] for group in groups]
                    gone_ids = {entry.worker_id for entry, _ in gone}
                    self._recovery.keeper.asked(asked, name, payloads, responses, gone_ids, repeats=is_repeatable)
                if gone:
                    self._recovery.fail_quietly(gone)
            if failed:
                given_up_for = entries[failed[0].worker_id].error
                raise given_up_for or failed[0].payload
            results: list[Any] = [None] * len(ids)
            for group, response in zip(groups, responses, strict=True):
                own_results = response.payload or [None] * len(group.rows)
                for place, result in zip(group.places.tolist(), own_results, strict=True):
                    results[place] = result
            return results


def one_for_each(values: Any, n: int) -> Sequence[Any]:
    """Return ``values`` if it is a sequence (not text or bytes) or a non-scalar array, else ``[values] * n``.

    Raises UsageError if there are not ``n`` values, or if it is unclear whether ``values`` is one value or several.
    """
    if not _is_many(values):
        return [values] * n
    if len(values) != n:
        raise UsageError(
            f"set_attr needs one value for each of {n} environments, or one for all that is no sequence, but got "
            f"{len(values)}: {values!r}. To give all of them the same sequence, write [sequence] * {n}."
        )
    return values  # type: ignore[no-any-return]


def _is_many(values: Any) -> bool:
    if isinstance(values, str | bytes | bytearray | Mapping):
        return False
    if isinstance(values, Sequence):
        return True
    if hasattr(values, "__array__"):
        return bool(getattr(values, "shape", ()))
    if hasattr(type(values), "__getitem__") and hasattr(type(values), "__len__"):
        raise UsageError(
            f"set_attr cannot tell whether {values!r} is one value for all environments or one for each: write [value] "
            "* n, or list(values)."
        )
    return False
