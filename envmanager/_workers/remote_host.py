"""The common part of hosts whose workers are other processes: start, replacement, end.

::

    launch ── start ──▶ process        await_start ◀── specs

The rule: nothing is sent through a worker that this host did not start itself, so that tests can put fakes there.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic

import attrs

from envmanager._workers import descriptors
from envmanager._workers.hosting import GroupFactory
from envmanager._workers.remote import Link, State, WorkerPlan
from envmanager._workers.resources import Resources
from envmanager._workers.watch import AnyLink, Poller
from envmanager.core.hosts import EnvWorker, HostContext, WorkerHost, start_report
from envmanager.core.table import Entry
from envmanager.data.steps import CommandName, EnvironmentResponse, StartReport
from envmanager.observe.stats import WorkerStats
from envmanager.options import KindOptions, ResetConfig
from envmanager.system.files import absolute
from envmanager.system.interrupts import held

_DESCRIPTORS_PER_WORKER = 3
"""Descriptors of a worker: connection, pidfd, socket that reports the exit code. An engine has one more, its log."""
_MORE_DESCRIPTORS = 32
"""The manager's own (a pipe, two memories, an epoll), the helper's (a pipe, a socket, its pidfd), those that starting a
process takes for a moment, and room."""


class RemoteHost(WorkerHost, Generic[AnyLink]):
    """Workers in processes of their own."""

    def __init__(self, env_factory: Any, options: KindOptions) -> None:
        super().__init__()
        self.env_factory = env_factory
        self._options = options
        self._log_dir = None if options.log_dir is None else absolute(options.log_dir)  # the trainer may move
        self._factories: Sequence[Any] = ()
        """The factories of all environments, for hosts whose workers are made of them."""
        self._slots = 0
        """The number of environments that were ever to be made: each has a slot of its own."""
        self._starting: list[AnyLink] = []

    def open(self, context: HostContext) -> None:
        super().open(context)
        descriptors.require_room(_DESCRIPTORS_PER_WORKER * len(context.entries) + _MORE_DESCRIPTORS)
        descriptors.open_standard()
        with held():
            self._resources: Any = self._make_resources()  # each kind of host uses more of its own
            self._finalizer = weakref.finalize(self, self._resources.close)
        self.step_queue = self._resources.poller

    def _make_resources(self) -> Resources[AnyLink]:
        """Acquire what the workers of this kind share: a poller, and in subclasses more."""
        return Resources(self._options.timeouts.close_s, Poller())

    @abstractmethod
    def make_worker(self, worker_id: int) -> EnvWorker:
        """Start the process of a worker, and do not wait for it."""

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        if worker_id >= len(self.workers):
            return self.context.create(worker_id)
        self._replace(self.workers[worker_id])
        try:
            return self.context.create(worker_id)
        finally:
            self._starting.clear()  # nobody waits for it as for the first ones

    def _replace(self, worker: Any) -> None:
        """Another takes its place."""
        if isinstance(worker, Link):
            self._resources.retire(worker)

    def _care_for(self, make: Callable[[], AnyLink]) -> AnyLink:
        """A worker that has just been made, watched over and asked to start."""
        with held():  # a worker that nobody watches would be left behind
            worker = make()
            self._resources.watch(worker)
        worker.send(CommandName.START)
        self._starting.append(worker)
        return worker

    def _group_factory(self, entry: Entry) -> GroupFactory:
        """Return what makes the environments of a worker's present generation."""
        first_slot, self._slots = self._slots, self._slots + len(entry.env_ids)
        return GroupFactory.of(
            self._factories,
            entry.env_ids,
            attrs.evolve(self._options, log_dir=self._log_dir),
            worker_id=entry.worker_id,
            generation=entry.generation,
            first_slot=first_slot,
        )

    def _plan(self, entry: Entry) -> WorkerPlan:
        """Return the identity of a worker's present generation."""
        return WorkerPlan(
            worker_id=entry.worker_id,
            env_ids=entry.env_ids,
            generation=entry.generation,
            timeouts=self._options.timeouts,
        )

    def await_start(self) -> dict[int, StartReport]:
        return {worker.worker_id: start_report(worker.recv()) for worker in self._starting}

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        worker = self.workers[worker_id]
        if not isinstance(worker, Link):
            return super().begin_again(worker_id, config)
        worker.begin_again(config)
        return None

    def is_gone(self, worker_id: int) -> bool:
        worker = self.workers[worker_id]
        return isinstance(worker, Link) and worker.state is not State.RUNNING

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        worker = self.workers[entry.worker_id]
        if not isinstance(worker, Link):
            return known
        return attrs.evolve(known, pid=worker.process.pid, core_wait_share=worker.core_wait_share())

    def wake(self) -> None:
        self._resources.poller.wake()

    def stop(self) -> None:
        self._resources.stop()

    def close(self) -> None:
        self._resources.close()
        self._finalizer.detach()
