"""Carries out ``reset``: what is in flight is waited out and discarded, and every worker begins anew.

::

    drain ── send("reset") to all that can ── recv from all ── replace those that cannot ── first StepInfos
"""

from __future__ import annotations

from typing import Any

import attrs

from envmanager.core.collecting import Collector
from envmanager.core.hosts import WorkerHost
from envmanager.core.launching import Launcher
from envmanager.core.recovery import Recovery
from envmanager.core.table import Entry, WorkerState, WorkerTable
from envmanager.data.steps import CommandName, EnvironmentResponse, StepInfo
from envmanager.options import ResetConfig


class Resets:
    """Resets the workers of one manager."""

    def __init__(
        self,
        table: WorkerTable,
        recovery: Recovery,
        collector: Collector,
        launcher: Launcher,
        seed: int | None,
    ) -> None:
        """``seed``: of the first reset, unless it names one; later ones go on with the randomness there is."""
        self.host: WorkerHost
        self._launcher = launcher
        self._seed = seed
        self._table = table
        self._recovery = recovery
        self._collector = collector

    def checked(self, config: Any) -> tuple[Any, ResetConfig]:
        """What is sent to the workers, and what it means; UsageError when it is no config or cannot be sent.

        Raises what the workers were dropped for, when there is none left.
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
        """The first observations of every worker that is not dropped; raises the first WorkerError of all."""
        self._discard_steps_in_flight()
        self._require_some_worker()  # the last may have been dropped meanwhile
        self._launcher.asked(parsed)
        responses = self._reset_workers(config)
        own, specs = self.host.own, self._table.specs
        infos = [StepInfo(None, own(each.payload), None, each.worker_id, specs=specs) for each in responses]
        for info in infos:
            self._table.entries[info.worker_id].previous_step = info
        self._collector.restart_counting()
        self._seed = None
        return infos

    def _discard_steps_in_flight(self) -> None:
        """Wait for them; a failure does not matter, the reset revives the worker."""
        self._collector.drain()
        for entry in self._table.entries:
            entry.actions, entry.batches, entry.ignores_action = None, (), False

    def _reset_workers(self, config: Any) -> list[EnvironmentResponse]:
        """Those that are gone are replaced. When some fail, the first failure is raised after all have responded."""
        workers, alive = self.host.workers, self._alive()
        for entry in alive:
            self._recovery.take_back(entry)
            workers[entry.worker_id].send(CommandName.RESET, config)
        learned = self._table.with_specs_learned
        responses = {entry.worker_id: learned(workers[entry.worker_id].recv()) for entry in alive}
        for entry in alive:
            if responses[entry.worker_id].name is CommandName.FAILED:
                self._recovery.fail(entry, responses.pop(entry.worker_id).payload)
        replacements, failure = self._collector.drain()
        for entry in self._table.entries:
            entry.ignores_action = False
        self._table.note_exceptions()
        if failure is not None:
            raise failure
        responses.update(replacements)
        return [responses[worker_id] for worker_id in sorted(responses)]

    def _alive(self) -> list[Entry]:
        """Those that can be reset; those that cannot, and are not dropped, begin to be replaced."""
        alive = []
        for entry in self._table.entries:
            entry.previous_step = None
            if entry.state is WorkerState.FAILED and self.host.is_gone(entry.worker_id):
                self._recovery.revive(entry)
            elif entry.state is not WorkerState.DROPPED:
                alive.append(entry)
        return alive
