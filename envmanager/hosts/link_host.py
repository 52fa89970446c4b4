"""The base class of hosts whose workers are other processes, and the resources that such workers share.

::

    launch ── "start" ──▶ worker process ── specs ──▶ await_start
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

import attrs

from envmanager.adapters.factories import check_travel
from envmanager.data.steps import CommandName, EnvironmentResponse, StartReport
from envmanager.errors import ManagerClosed, UsageError, WorkerError
from envmanager.hosts import descriptors
from envmanager.hosts.hosting import GroupFactory
from envmanager.hosts.life import State, WorkerPlan
from envmanager.hosts.link import SIGKILL
from envmanager.hosts.poller import AnyLink, Poller
from envmanager.hosts.wire import dumps_command
from envmanager.kernel.calls import weak_callback
from envmanager.kernel.host import EnvWorker, HostContext, WorkerHost, start_report
from envmanager.kernel.table import Entry
from envmanager.observe.stats import WorkerStats
from envmanager.options import KindOptions, ResetConfig
from envmanager.system.interrupts import allow_interrupts, defer_interrupts
from envmanager.system.machine import absolute, advice, count_cores, memory_bytes
from envmanager.system.memory import MIB, MemoryLimits

_DESCRIPTORS_PER_WORKER = 5
"""Number of descriptors per worker: connection, pidfd, the socket that reports the exit code, and an engine's log or,
in the portable transport, the worker's standard input and the kernel's pidfd."""
_MORE_DESCRIPTORS = 32
"""Number of all other descriptors: those of the manager and of the process that starts its workers, those that are open
while a process starts, and some in reserve."""
_LEAST_AT_ONCE = 2
"""Number of workers that may make their environments at the same time however few cores there are."""
_GROWTH = 1.25
"""Growth of memory below which a worker is not recycled, so that one that begins above the limit is not at once."""
_HURRIED_S = 0.3
"""Seconds that workers have to end once their manager was told to stop."""


class Resources(Generic[AnyLink]):
    """The links of one manager, their poller, and the resources that the workers share, such as memory.

    A finalizer of the host calls ``close`` when the manager is garbage-collected or the program exits. This class
    must not refer to the host or the manager, because the finalizer would then keep them alive.
    """

    def __init__(self, close_s: float, poller: Poller[AnyLink], *give_back: Callable[[], object]) -> None:
        """Store the functions ``give_back``, which release the shared resources once the workers have ended."""
        self.poller = poller
        self._more_to_give_back = give_back
        self.limits: MemoryLimits | None = None
        self.close_s = close_s
        self._owner_pid = os.getpid()
        self._is_stopped = self._is_closed = False
        self._links: set[AnyLink] = set()
        self._lock = threading.RLock()
        """Lock held while workers are stopped, and while one is released, after which other files get its numbers."""
        poller.on_retired = weak_callback(self.drop)

    def watch(self, link: AnyLink) -> None:
        """Register a worker. If another thread has closed the manager, release the worker and raise ManagerClosed."""
        with self._lock:
            if not self._is_stopped:
                self._links.add(link)
                self.poller.register(link)
                return
        link.release()
        raise ManagerClosed("the start of a worker")

    def drop(self, link: AnyLink) -> None:
        """Kill a worker, unless it has ended. Stop watching it, and close its descriptors."""
        with self._lock:
            self._links.discard(link)
            self.poller.forget(link)
            link.release()

    def retire(self, link: AnyLink) -> None:
        """Ask a worker that is being replaced to exit. If it is not RUNNING, kill it and release it at once instead."""
        if link.state is State.RUNNING:
            link.retire()
            self.poller.retiring.add(link)
        else:
            self.drop(link)

    def close(self) -> None:
        """Stop the workers and release all resources. Workers that do not exit on request get SIGTERM, then SIGKILL.

        An interrupt ends the wait of up to ``close_s`` seconds. Has no effect in a process forked from the trainer.
        """
        if os.getpid() != self._owner_pid:
            return  # the workers do not belong to a forked copy of the trainer
        with self._lock:
            try:
                self.stop()
            finally:
                with defer_interrupts():
                    if not self._is_closed:
                        self._is_closed = True
                        for link in self._links:
                            link.kill()  # all at once, so that their ends are waited for together
                        for link in list(self._links):
                            self.drop(link)
                        self.poller.close()
                        if self.limits is not None:
                            self.limits.close()
                        for give_back in self._more_to_give_back:
                            give_back()

    def stop(self) -> None:
        """Stop all workers within ``close_s`` seconds, but release nothing. Wait if another thread is stopping them."""
        with self._lock:
            self._is_stopped = True
            links, deadline = list(self._links), time.monotonic() + self.close_s
            for link in links:
                link.ask_to_close()
            for number, share in ((signal.SIGTERM, 0.6), (SIGKILL, 0.9)):
                for link in _wait_for_ends(links, deadline - (1 - share) * self.close_s):
                    link.process.signal(number)
            _wait_for_ends(links, deadline)


def _wait_for_ends(links: list[AnyLink], deadline: float) -> list[AnyLink]:
    """Wait until all processes have ended or the deadline has passed. Return the links whose processes are alive."""
    left = {link.process.pidfd: link for link in links}
    while left:
        left_s = deadline - time.monotonic()
        ready = descriptors.wait_for([fd for link in left.values() for fd in link.channel.watched_fds()], left_s)
        for fd in ready & left.keys():
            del left[fd]
        if not ready and left_s <= 0:
            break
        for link in left.values():
            with link.channel.lock:
                link.channel.pump()  # a worker that blocks on a full socket cannot end
    return list(left.values())


class LinkHost(WorkerHost, Generic[AnyLink]):
    """The base class of hosts whose workers are other processes, each with a Link that ``make_worker`` returns."""

    tells_memory = True
    n_local = 0
    """Number of workers, the last ones, that run in the trainer's process and so have no Link and no descriptors."""

    def __init__(self, env_factory: Any, options: KindOptions) -> None:
        super().__init__()
        self.env_factory = env_factory
        if options.log_dir is not None:
            options = attrs.evolve(options, log_dir=absolute(options.log_dir))  # the trainer may change its directory
        self.options = options
        self.start_at_most = options.start_at_most or max(_LEAST_AT_ONCE, count_cores())
        self.is_asked = options.restarts.recycle_above_mb is not None
        self._reports: dict[int, StartReport] = {}
        """Reports of workers that have started, by worker_id."""

    def open(self, context: HostContext) -> None:
        super().open(context)
        self._n_links = len(context.entries) - self.n_local
        descriptors.require_room(_DESCRIPTORS_PER_WORKER * self._n_links + _MORE_DESCRIPTORS)
        descriptors.open_standard()
        with defer_interrupts():
            self._resources: Any  # Any, because hosts use attributes of their kind of poller
            try:
                self._resources = self._make_resources()
            except OSError as error:  # no more descriptors, no memory, no folder for temporary files
                raise UsageError(f"what the workers share cannot be made: {error}. {advice(error)}".strip()) from error
            self._finalizer = weakref.finalize(self, self._resources.close)
            if self.tells_memory:
                self._resources.limits = MemoryLimits(self.options.memory_limit_mb)
        self.step_queue = self._resources.poller

    def _make_resources(self) -> Resources[AnyLink]:
        """Return the resources that the workers share: a poller, and in some subclasses also shared memory."""
        return Resources(self.options.timeouts.close_s, Poller())

    @abstractmethod
    def make_worker(self, worker_id: int) -> EnvWorker:
        """Start the process of a worker and return the worker, without waiting until it has started."""

    def launch(self, worker_id: int, generation: int) -> EnvWorker:
        if not self.workers:
            check_travel(self.factories)
        if generation > 0 and worker_id < self._n_links:
            self._resources.retire(self.workers[worker_id])
        elif generation > 0:
            self.workers[worker_id].close_quietly()
        if generation > 0:
            return self.make_worker(worker_id)
        if worker_id < self._n_links:
            self._await_room()
        first: EnvWorker = self._make_first(worker_id)
        return first

    def _await_room(self) -> None:
        """Wait until fewer workers than ``start_at_most`` make their environments. Raises the error of one that fails.

        So many processes at once do not compete for cores, memory and disk, or for the license of a simulator.
        """
        while True:
            left = {worker.worker_id: worker for worker in self.workers if worker.worker_id not in self._reports}
            if len(left) < self.start_at_most:
                return
            answered = [worker_id for worker_id, worker in left.items() if worker.has_answered()]
            for worker_id in answered:
                self._reports[worker_id] = self._await_start_of(worker_id)
            if not answered:
                left_s = min(worker.asked.deadline for worker in left.values()) - time.monotonic()
                fds = [fd for worker in left.values() for fd in worker.channel.watched_fds()]
                with allow_interrupts():
                    descriptors.wait_for(fds, left_s + 0.001)

    def _make_first(self, worker_id: int) -> Any:
        while True:
            try:
                return self.make_worker(worker_id)
            except WorkerError as error:
                if not self.context.starts_again(error):
                    raise

    def care_for(self, make: Callable[[], AnyLink]) -> AnyLink:
        """Make a worker, register it with the poller, and send the command "start". Return the worker."""
        with defer_interrupts():  # an interrupt before the registration would leak the worker
            worker = make()
            self._resources.watch(worker)
            limits = worker.limits = self._resources.limits
            if limits is not None:
                limits.add(worker.process.pid, partial(worker.process.signal, SIGKILL))
        worker.send(CommandName.START)
        return worker

    def group_factory(self, entry: Entry) -> GroupFactory:
        """Return the factory of the environments of a worker's current generation."""
        return GroupFactory.of(self.factories, entry, self.options)

    def plan_of(self, entry: Entry, kind: Callable[..., Any] = WorkerPlan, **more: Any) -> Any:
        """Return the plan with which to start a worker's current generation: ids, time limits, and ``more`` fields."""
        who = {"worker_id": entry.worker_id, "env_ids": entry.env_ids, "generation": entry.generation}
        return kind(**who, timeouts=self.options.timeouts, **more)

    def await_start(self) -> dict[int, StartReport]:
        for worker_id in range(self._n_links):
            if worker_id not in self._reports:
                self._reports[worker_id] = self._await_start_of(worker_id)
        return self._reports

    def _await_start_of(self, worker_id: int) -> StartReport:
        while True:
            response = self.workers[worker_id].recv()
            if response.name is not CommandName.FAILED or not self.context.starts_again(response.payload):
                return start_report(response)
            self._resources.drop(self.workers[worker_id])
            self.workers[worker_id] = self._make_first(worker_id)

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        if worker_id >= self._n_links:
            return super().begin_again(worker_id, config)
        self.workers[worker_id].begin_again(config, self.context.entries[worker_id].attributes.values())
        return None

    def check_can_travel(self, payload: Any) -> None:
        if payload is not None:
            dumps_command(payload)

    def why_due(self, worker_id: int) -> str:
        limit_mb, worker = self.options.restarts.recycle_above_mb, self.workers[worker_id]
        if limit_mb is None or worker_id >= self._n_links or worker.process.pid is None:
            return ""
        in_use_mb = memory_bytes(worker.process.pid) / MIB
        worker.first_mb = worker.first_mb or in_use_mb
        return f"at {in_use_mb:,.0f} MiB" if in_use_mb > max(limit_mb, _GROWTH * worker.first_mb) else ""

    def is_gone(self, worker_id: int) -> bool:
        return worker_id < self._n_links and self.workers[worker_id].state is not State.RUNNING

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        if entry.worker_id >= self._n_links:
            return known
        worker = self.workers[entry.worker_id]
        pid = worker.process.pid
        in_use = 0 if pid is None else memory_bytes(pid)
        return attrs.evolve(known, pid=pid, core_wait_share=worker.core_wait_share(), memory_bytes=in_use)

    def wake(self) -> None:
        self._resources.poller.wake()

    def hurry(self) -> None:
        self._resources.close_s = min(self._resources.close_s, _HURRIED_S)
        self.wake()

    def stop(self) -> None:
        self._resources.stop()

    def close(self) -> None:
        self._resources.close()
        self._finalizer.detach()
