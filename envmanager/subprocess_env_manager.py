"""Environments in worker processes.

::

    trainer                                         worker 0          worker 1
    SubprocessEnvManager ── command pipe each ──▶   envs 0 1 2        envs 3 4 5
          ▲                 shared memory ◀──────▶  their rows        their rows
          └── one step pipe ◀── records ────────────┴─────────────────┘

The rule: the trainer's process makes no environment unless it is told to (``local_envs``), and the constructor sends
nothing through a worker that ``create_worker`` did not start itself, so that tests can put fakes in their place.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import attrs
import cloudpickle
import numpy as np

from envmanager._workers import descriptors
from envmanager._workers.block import Block, BlockLayout
from envmanager._workers.child import worker
from envmanager._workers.guardian import Guardian
from envmanager._workers.handle import LaunchPlan, State, WorkerHandle
from envmanager._workers.lifeline import NAME
from envmanager._workers.memory import allocate
from envmanager._workers.processes import default_start_method
from envmanager._workers.step_queue import StepQueue
from envmanager._workers.wire import dumps_command
from envmanager.core.table import Entry
from envmanager.env_manager import EnvManager, EnvWorker
from envmanager.env_rows import deal
from envmanager.errors import EnvManagerError, ManagerClosed, UsageError, WorkerError
from envmanager.events import EventLog
from envmanager.factories import EnvFactory, check_travel, factories_for
from envmanager.hosting import GroupFactory, StartReport
from envmanager.interrupts import held
from envmanager.local_worker import LocalStepQueue, LocalWorker
from envmanager.options import ManagerOptions, ResetConfig, RestartPolicy, StartMethod, Timeouts, Wait, WorkerCount
from envmanager.probing import place
from envmanager.stats import WorkerStats
from envmanager.steps import AgentSteps, Batch, CommandName, EnvironmentResponse, add_ends_and_infos, only_agents
from envmanager.weak_calls import weakly

__all__ = ["SubprocessEnvManager", "worker"]


_DESCRIPTORS_PER_WORKER = 3
"""The connection, the pidfd, and under forkserver the socket that tells the exit code."""
_MORE_DESCRIPTORS = 32
"""The manager's own (two pipes, two memories, an epoll, the guardian's socket), those that starting a process takes for
a moment, and room."""


class SubprocessEnvManager(EnvManager):
    """Runs ``n_envs`` environments in ``n_workers`` processes (by default one each). Linux only.

    ``n_workers="auto"``: as many as suit the first environment, which a worker of its own steps for a moment before the
    others start; ``stats().placement`` says what was chosen and why. ``local_envs``: the last so many environments run
    in this process, as one more worker, which steps while the trainer would wait; it sees no other answers meanwhile,
    and nothing protects it from their crashes and hangs. ``n_workers`` does not count it.

    ``env_factory``: a callable, a Gymnasium id, ``"module:callable"``, or a list of these, one per environment; it may
    be defined anywhere, also in a script without a guard or in a notebook. ``start_method``: "forkserver" (default),
    "spawn", or "fork" (only safe while the trainer has no threads). ``zero_copy``: hand out views of shared memory,
    see StepInfo. ``infos``: bring the environments' info dicts along (they travel pickled). ``check_values``: also
    check observations for NaN and for their bounds. ``worker_env``: exactly these environment variables, instead of
    the trainer's. ``log_dir``: a file per worker for its output, whose end goes into errors.

    The constructor returns when all workers are ready, at most after ``timeouts.start_s``. Raises UsageError when the
    options or the factory cannot work, and the WorkerError of the first worker that could not start; then all others
    are stopped.
    """

    def __init__(
        self,
        env_factory: EnvFactory,
        n_envs: int = 1,
        *,
        n_workers: WorkerCount = None,
        local_envs: int = 0,
        start_method: StartMethod | None = None,
        wait: Wait | str | int = "any",
        timeouts: Timeouts | None = None,
        restarts: RestartPolicy | None = None,
        zero_copy: bool = False,
        infos: bool = False,
        check_values: bool = False,
        seed: int | None = None,
        worker_env: Mapping[str, str] | None = None,
        log_dir: str | None = None,
        trace: str | None = None,
    ) -> None:
        self._options = ManagerOptions(
            n_envs=n_envs,
            n_workers=n_workers,
            local_envs=local_envs,
            start_method=start_method,
            wait=wait,
            timeouts=Timeouts() if timeouts is None else timeouts,
            restarts=RestartPolicy() if restarts is None else restarts,
            zero_copy=zero_copy,
            infos=infos,
            check_values=check_values,
            seed=seed,
            worker_env=worker_env,
            log_dir=log_dir,
            trace=trace,
        )
        if n_workers == "auto":
            placement = place(SubprocessEnvManager, env_factory, self._options, in_process=False)
            n_workers, self.placement = placement.n_workers, str(placement)
        n_apart = n_envs - local_envs
        blocks = deal(n_apart, n_apart if n_workers is None else n_workers)
        self._local_id: int | None = None
        if local_envs:
            self._local_id = len(blocks)
            blocks.append(range(n_apart, n_envs))
        super().__init__(
            blocks,
            wait=self._options.wait,
            seed=seed,
            restarts=self._options.restarts,
            zero_copy=zero_copy,
            check_values=check_values,
            trace=self._options.trace,
        )
        _require_linux()
        self._env_factory = env_factory
        self._log_dir = None if log_dir is None else os.path.abspath(log_dir)  # the trainer may go elsewhere
        self._factories = factories_for(env_factory, n_envs)
        self._starting: list[WorkerHandle] = []
        self._all_agent_ids = only_agents(range(n_envs))
        self._slots = 0
        self._n_slots = 3 if zero_copy else 1
        self._block: Block | None = None
        descriptors.require_room(_DESCRIPTORS_PER_WORKER * self.n_workers + _MORE_DESCRIPTORS)
        with held():
            self._resources = _Resources(self._hear, self.events, self._options.timeouts.close_s)
            self._finalizer = weakref.finalize(self, self._resources.close)
        self.step_queue = self._resources.step_queue
        if self._local_id is not None:
            self.step_queue = LocalStepQueue(self.env_workers, self._local_id, self._resources.step_queue)
        try:
            check_travel(self._factories)
            for worker_id in range(self.n_workers):
                self.env_workers.append(self.create_worker(worker_id, self.step_queue, env_factory))
            self._wait_for_start()
        except BaseException as error:
            was_closed = self._closed
            self.close()
            if was_closed and isinstance(error, EnvManagerError):
                raise ManagerClosed("the constructor") from error
            raise

    def create_worker(self, worker_id: int, step_queue: Any, env_factory: Any) -> EnvWorker:
        """Start one worker process, or for ``local_envs`` make the worker that starts with its first command.

        Tests replace this by something that returns a fake.
        """
        factory = self._group_factory(worker_id)
        if worker_id == self._local_id:
            return LocalWorker(
                worker_id,
                factory,
                self._times[worker_id],
                self.events,
                on_news=weakly(self._hear),
                rotates=self._zero_copy,
            )
        with descriptors.standard_open():
            handle = self._launch(worker_id, factory)
        self._starting.append(handle)
        return handle

    # Start.

    def _group_factory(self, worker_id: int) -> GroupFactory:
        """What makes the environments of a worker, or of the one that takes its place."""
        env_ids = self._env_rows.blocks[worker_id]
        factory = GroupFactory.of(
            self._factories,
            env_ids,
            self._options,
            worker_id=worker_id,
            generation=self._table.entries[worker_id].generation,
            first_slot=self._slots,
        )
        self._slots += len(env_ids)
        return factory

    def _launch(self, worker_id: int, factory: GroupFactory) -> WorkerHandle:
        self._require_open("the start of a worker")
        options = self._options
        generation = self._table.entries[worker_id].generation
        environ = options.worker_env
        if environ is None and options.start_method != "fork":
            environ = dict(os.environ)
        plan = LaunchPlan(
            env_ids=self._env_rows.blocks[worker_id],
            generation=generation,
            seed=int(np.random.SeedSequence().generate_state(1)[0]),
            start_method=options.start_method or default_start_method(),
            memory_fd=self._resources.memory_fd,
            steps_fd=self._resources.step_queue.write_fd,
            life_fd=self._resources.life_read_fd,
            guardian_fd=self._guardian_fd(worker_id),
            crash_fd=self._resources.crash_fd,
            n_slots=self._n_slots,
            timeouts=options.timeouts,
            environ=environ,
            log_dir=self._log_dir,
        )
        pickled = cloudpickle.dumps(factory, protocol=5)
        with held():  # a worker that nobody watches would be left behind
            handle = WorkerHandle(worker_id, pickled, plan, self.events, self._times[worker_id])
            self._resources.watch(handle)
        handle.send(CommandName.START)
        return handle

    def _guardian_fd(self, worker_id: int) -> int:
        try:
            return self._resources.guardian_fd()
        except OSError as error:
            raise WorkerError(
                f"worker {worker_id} could not be started, because the process that guards workers could not: {error}. "
                "Is the machine out of processes (`ulimit -u`), memory or descriptors (`ulimit -n`)?",
                worker_id=worker_id,
                env_ids=self._env_rows.blocks[worker_id],
                phase="start",
                cause=str(error),
            ) from error

    def _wait_for_start(self) -> None:
        """Wait for all workers' specs, then lay out the memory they share."""
        if not self._starting:
            return
        local_reports = [local.start() for local in self._local_workers()]  # while the processes start
        reports = [self._report(handle) for handle in self._starting]
        for worker_id, report in enumerate([*reports, *local_reports]):
            self._learn_specs(report.specs, worker_id)
        self._partial_actions = all(report.partial_actions for report in [*reports, *local_reports])
        layout = BlockLayout.of(self._specs, [report.max_agents for report in reports], n_slots=self._n_slots)
        allocate(self._resources.memory_fd, Block(layout).size_bytes)
        self._block = Block(layout, self._resources.memory_fd)
        for handle in self._starting:
            handle.attach(self._block)
        self._starting = []

    def _local_workers(self) -> list[LocalWorker]:
        return [each for each in self.env_workers if isinstance(each, LocalWorker)]

    def _report(self, handle: WorkerHandle) -> StartReport:
        response = handle.recv()
        if response.name is CommandName.FAILED:
            raise response.payload
        return response.payload  # type: ignore[no-any-return]

    # Replacing.

    def _replace(self, worker_id: int) -> EnvWorker:
        old = self.env_workers[worker_id]
        if isinstance(old, WorkerHandle):
            self._resources.retire(old)
        elif isinstance(old, LocalWorker):
            old.close_quietly()
        try:
            return self.create_worker(worker_id, self.step_queue, self._env_factory)
        finally:
            self._starting.clear()  # nobody waits for it as for the first ones

    def _begin_again(self, worker: EnvWorker, config: ResetConfig) -> EnvironmentResponse | None:
        if isinstance(worker, WorkerHandle):
            others = (each.slot for each in self.env_workers if isinstance(each, WorkerHandle) and each is not worker)
            worker.begin_again(self._block, config, next(others, 0))
            return None
        return super()._begin_again(worker, config)

    def _is_gone(self, worker: EnvWorker) -> bool:
        return isinstance(worker, WorkerHandle) and worker.state is not State.RUNNING

    # What the abstract manager asks for.

    def _own(self, payload: Any) -> Any:
        if self._zero_copy or self._block is None:
            return payload
        return {behavior: steps.copy() for behavior, steps in payload.items()}

    def _check_can_travel(self, payload: Any) -> None:
        if payload is not None and self._block is not None:
            dumps_command(payload)

    def _batch(self, behavior: str, parts: list[AgentSteps]) -> Batch:
        """When all rows lie in one slot of the block, they are a batch already."""
        if (
            self._block is None
            or self._local_id is not None
            or len(parts) < self.n_workers
            or sum(map(len, parts)) != self.n_envs
        ):
            return super()._batch(behavior, parts)
        parts = sorted(parts, key=lambda steps: int(steps.agent_id[0]))
        slot = self.env_workers[0].slot
        if not all(w.holds_all_rows(steps, slot) for w, steps in zip(self.env_workers, parts, strict=True)):
            return super()._batch(behavior, parts)
        all_rows = self._block.columns[behavior].rows(slot, 0, self.n_envs, 0, False)
        steps = all_rows if self._zero_copy else all_rows.copy()
        steps.agent_id = self._all_agent_ids
        add_ends_and_infos(steps, parts)
        return Batch.of(steps, self._env_rows.all_env_ids, is_view=self._zero_copy)

    def _worker_stats(self, entry: Entry) -> WorkerStats:
        known, worker = super()._worker_stats(entry), self.env_workers[entry.worker_id]
        if not isinstance(worker, WorkerHandle):
            return known
        return attrs.evolve(known, pid=worker.process.pid, core_wait_share=worker.core_wait_share())

    def _wake(self) -> None:
        self._resources.step_queue.wake()

    def _stop(self) -> None:
        self._resources.stop()

    def _close(self) -> None:
        self._resources.close()
        self._finalizer.detach()
        for local in self._local_workers():
            local.close_quietly()
        self._block = None


class _Resources:
    """What must be given back, also when the manager is garbage or the program ends: processes, pipes, memory.

    It holds no reference to the manager, which could otherwise never become garbage.
    """

    def __init__(self, hear: Any, events: EventLog, close_s: float) -> None:
        self._close_s = close_s
        self._owner_pid = os.getpid()
        self._closed = False
        self._handles: set[WorkerHandle] = set()
        self._stopping = threading.RLock()
        self._guardian: Guardian | None = None
        with descriptors.standard_open():
            self._open(events, hear)

    def _open(self, events: EventLog, hear: Any) -> None:
        self.step_queue = StepQueue(events, on_news=weakly(hear), on_retired=weakly(self.drop))
        self.memory_fd = descriptors.create_memory("envmanager")
        self.crash_fd = descriptors.create_memory("envmanager-crashes")
        self.life_read_fd, self._life_write_fd = os.pipe()
        descriptors.register(self.life_read_fd)
        descriptors.register(self._life_write_fd)

    def guardian_fd(self) -> int:
        """Where workers leave their lifelines; OSError when there can be no guardian."""
        with held():
            if self._guardian is None:
                self._guardian = Guardian(self.life_read_fd)
            return self._guardian.fd

    def watch(self, handle: WorkerHandle) -> None:
        """Take a worker into care."""
        self._handles.add(handle)
        self.step_queue.register(handle)

    def drop(self, handle: WorkerHandle) -> None:
        """Give back a worker that has ended or must."""
        self._handles.discard(handle)
        self.step_queue.forget(handle)
        handle.release()
        if handle.process.is_buried and self._guardian is not None:
            self._guardian.let_go(NAME.pack(handle.worker_id, handle.generation))

    def retire(self, handle: WorkerHandle) -> None:
        """Give back a worker that is to be replaced: at once when it has ended, else it is asked to end."""
        if handle.state is State.RUNNING:
            handle.retire()
            self.step_queue.retire(handle)
        else:
            self.drop(handle)

    def close(self) -> None:
        """Ask, then SIGTERM, then SIGKILL, all inside ``close_s``; then give everything back.

        An interrupt meanwhile leaves out the waiting.
        """
        if os.getpid() != self._owner_pid or self._closed:
            return  # in a process that the trainer forked, the workers are not its own
        try:
            self.stop()
        finally:
            with held():
                self._give_back()

    def stop(self) -> None:
        """End all workers, inside ``close_s``; what belongs to them is still there. One thread does it at a time."""
        with self._stopping:
            self._stop(list(self._handles))

    def _stop(self, handles: list[WorkerHandle]) -> None:
        deadline = time.monotonic() + self._close_s
        for handle in handles:
            handle.ask_to_close()
        for number, share in ((signal.SIGTERM, 0.6), (signal.SIGKILL, 0.9)):
            left = _wait_for_ends(handles, deadline - (1 - share) * self._close_s)
            for handle in left:
                handle.process.signal(number)
        _wait_for_ends(handles, deadline)

    def _give_back(self) -> None:
        self._closed = True
        for handle in list(self._handles):
            self.drop(handle)
        if self._guardian is not None:
            os.write(self._life_write_fd, b"\0")  # groups whose leaders nobody could bury end now
            self._guardian.end()
        self.step_queue.close()
        for fd in (self.memory_fd, self.crash_fd, self.life_read_fd, self._life_write_fd):
            descriptors.close(fd)


def _wait_for_ends(handles: list[WorkerHandle], deadline: float) -> list[WorkerHandle]:
    """Wait until all processes have ended or the time is up; those that have not."""
    left = {handle.process.pidfd: handle for handle in handles}
    while left:
        left_s = deadline - time.monotonic()
        ready = descriptors.wait_for([fd for handle in left.values() for fd in handle.telling_fds()], left_s)
        for fd in ready & left.keys():
            del left[fd]
        if not ready and left_s <= 0:
            break
        for handle in left.values():
            handle.pump()  # a worker that blocks on a full pipe cannot end
    return list(left.values())


def _require_linux() -> None:
    if sys.platform != "linux":
        raise UsageError("SubprocessEnvManager needs Linux (memfd and pidfd); use SimpleEnvManager here.")
