"""``reset``: steps in flight are completed and discarded, then every worker begins again.

::

    drain ── send("reset") to all that can ── recv from all ── replace those that cannot ── first StepInfos
"""

from __future__ import annotations

from typing import Any

import attrs

from envmanager.data.steps import CommandName, StepInfo
from envmanager.kernel.collecting import Collector
from envmanager.kernel.host import WorkerHost
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.table import WorkerState, WorkerTable
from envmanager.options import ResetConfig


class Resets:
    """Resets the workers of one manager."""

    def __init__(self, table: WorkerTable, recovery: Recovery, collector: Collector, seed: int | None) -> None:
        """``seed`` is the seed of the first reset, unless that names one; later resets continue the random numbers."""
        self.host: WorkerHost
        self._seed = seed
        self._table = table
        self._recovery = recovery
        self._collector = collector

    def checked(self, config: Any) -> tuple[Any, ResetConfig]:
        """Return what to send to the workers, and its meaning; UsageError if it is no config or cannot be sent.

        Raises the error for which the workers were dropped, if none is left.
        """
        parsed = ResetConfig.parse(config, n_envs=sum(len(entry.env_ids) for entry in self._table.entries))
        if self._seed is not None and parsed.seed is None:
            config = parsed = attrs.evolve(parsed, seed=self._seed)
        self.host.check_can_travel(config)
        self._require_some_worker()
        return config, parsed

    def _require_some_worker(self) -> None:
        entries = self._table.entries
        if all(entry.is_dropped for entry in entries):
            entries[0].require_alive()

    def reset(self, config: Any, parsed: ResetConfig) -> list[StepInfo]:
        """Return the first observations of every worker that is not dropped. Failed workers are replaced.

        If some fail, the first WorkerError is raised after all have responded.
        """
        table, recovery, workers = self._table, self._recovery, self.host.workers
        self._collector.drain()  # a failure does not matter: the reset revives the worker
        for entry in table.entries:
            entry.actions, entry.batches, entry.ignores_action = None, (), False
        table.recount()
        self._require_some_worker()  # the last one may have been dropped meanwhile
        seed = recovery.last_config.seed if parsed.seed is None else parsed.seed
        recovery.last_config = attrs.evolve(parsed, seed=seed)
        asked = []
        for entry in table.entries:
            entry.previous_step = None
            if entry.state is WorkerState.FAILED and self.host.is_gone(entry.worker_id):
                recovery.revive(entry)
            elif entry.state is not WorkerState.DROPPED:
                asked.append(entry)
        for entry in asked:
            recovery.take_back(entry)
            workers[entry.worker_id].send(CommandName.RESET, config)
        responses = {entry.worker_id: table.with_specs_learned(workers[entry.worker_id].recv()) for entry in asked}
        for entry in asked:
            if responses[entry.worker_id].name is CommandName.FAILED:
                recovery.fail(entry, responses.pop(entry.worker_id).payload)
        replacements, failure = self._collector.drain()
        for entry in table.entries:
            entry.ignores_action = False
        table.recount()
        if failure is not None:
            raise failure
        responses.update(replacements)
        infos = []
        for worker_id in sorted(responses):
            steps = self.host.own(responses[worker_id].payload)
            infos.append(StepInfo(None, steps, None, worker_id, specs=table.specs))
        for info in infos:
            table.entries[info.worker_id].previous_step = info
        table.begin_counting()
        self._seed = None
        return infos
