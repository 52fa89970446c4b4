"""The host of actors: has the cluster make them, replaces and ends them.

::

    launch ── an actor, and "start" ──▶ Ray        await_start ◀── specs

The rule: all workers are asked for before any is waited for, so that one wait is enough to see that there is no room.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import cloudpickle

from envmanager._workers.hosting import GroupFactory
from envmanager._workers.remote import State, WorkerPlan
from envmanager._workers.wire import dumps_command
from envmanager.adapters.factories import check_travel
from envmanager.core.hosts import EnvWorker, WorkerHost, start_report
from envmanager.core.table import Entry
from envmanager.data.reports import StartReport
from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.observe.stats import WorkerStats
from envmanager.options import ResetConfig
from envmanager.ray_cluster.answer_queue import AnswerQueue
from envmanager.ray_cluster.cluster import Cluster, is_connected
from envmanager.ray_cluster.options import RayOptions
from envmanager.ray_cluster.worker import RayWorker
from envmanager.system.interrupts import held
from envmanager.system.refusals import absolute


class RayHost(WorkerHost):
    """Actors on a Ray cluster."""

    step_queue: AnswerQueue

    def __init__(self, env_factory: Any, factories: Sequence[Any], cluster: Cluster, options: RayOptions) -> None:
        super().__init__()
        check_travel(factories)
        self.env_factory = env_factory
        self._factories = factories
        self._cluster = cluster
        self._options = options
        self._slots = 0
        self._log_dir = None if options.log_dir is None else absolute(options.log_dir)
        self._answers = AnswerQueue(is_connected)
        self._finalizer = weakref.finalize(self, self._answers.close_all, options.timeouts.close_s)
        self.step_queue = self._answers
        # What Ray has put into its object store is read-only; the copy makes it the trainer's own.
        self.rewrites_arrays = True

    # Starting.

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        if worker_id < len(self.workers):
            self._replace(self.workers[worker_id])
        return self.context.create(worker_id)

    def make_worker(self, worker_id: int) -> RayWorker:
        """Ask for an actor, and do not wait for it."""
        self.context.calls.require_open("the start of a worker")
        entry, options = self.context.entries[worker_id], self._options
        factory = GroupFactory.of(
            self._factories,
            entry.env_ids,
            attrs.evolve(options, log_dir=self._log_dir),
            worker_id=worker_id,
            generation=entry.generation,
            first_slot=self._slots,
        )
        self._slots += len(entry.env_ids)
        plan = WorkerPlan(
            worker_id=worker_id, env_ids=entry.env_ids, generation=entry.generation, timeouts=options.timeouts
        )
        with held():  # an actor that nobody watches would be left behind
            worker = RayWorker(
                plan,
                self._cluster,
                cloudpickle.dumps(factory, protocol=5),
                answers=self._answers,
                events=self.context.events,
                times=entry.times,
            )
            self._answers.register(worker)
        worker.send(CommandName.START)
        return worker

    def _replace(self, worker: Any) -> None:
        """Another takes its place."""
        if not isinstance(worker, RayWorker):
            return
        if worker.state is State.RUNNING:
            self._answers.retire(worker, self._options.timeouts.close_s)
        else:
            worker.kill()

    def await_start(self) -> dict[int, StartReport]:
        started = [worker for worker in self.workers if isinstance(worker, RayWorker)]
        return {worker.worker_id: start_report(worker.recv()) for worker in started}

    # What the manager asks for.

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        worker = self.workers[worker_id]
        if not isinstance(worker, RayWorker):
            return super().begin_again(worker_id, config)
        worker.begin_again(config)
        return None

    def is_gone(self, worker_id: int) -> bool:
        worker = self.workers[worker_id]
        return isinstance(worker, RayWorker) and worker.state is not State.RUNNING

    def check_can_travel(self, payload: Any) -> None:
        if payload is not None:
            dumps_command(payload)

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        worker = self.workers[entry.worker_id]
        return attrs.evolve(known, pid=worker.pid, node=worker.node) if isinstance(worker, RayWorker) else known

    # The end.

    def wake(self) -> None:
        self._answers.wake()

    def stop(self) -> None:
        self._answers.close_all(self._options.timeouts.close_s)

    def close(self) -> None:
        self._answers.close_all(self._options.timeouts.close_s)
        self._finalizer.detach()
