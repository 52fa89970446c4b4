"""The host that starts and replaces a manager's worker processes, and the link to each process.

::

    launch ── start ──▶ process        await_start ◀── specs        have_started ── layout of the memory ──▶ all

Actions and observations are in shared memory if they fit. Otherwise they are pickled and sent through the worker's own
connection. The modules ``native`` and ``portable`` each subclass the host and the link, for one transport.
"""

from __future__ import annotations

import os
import pickle
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, ClassVar

import attrs
import numpy as np

from envmanager.adapters.factories import factories_for, pickled
from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import STEPPING, AgentSteps, CommandName, EnvironmentResponse, StartReport, only_agents
from envmanager.errors import WorkerTimedOut
from envmanager.hosts import descriptors
from envmanager.hosts.life import WorkerPlan
from envmanager.hosts.link import Link, WorkerProcess
from envmanager.hosts.link_host import LinkHost
from envmanager.hosts.local_worker import LocalStepQueue, LocalWorker
from envmanager.hosts.shared_rows import Block, BlockLayout, SharedRows, allocate
from envmanager.hosts.spin import spin_ns
from envmanager.hosts.wire import ATTACH_CODE, CODES, COMMAND, Channel, Decoder, dumps_command
from envmanager.kernel.host import EnvWorker, HostContext
from envmanager.observe.events import EventLog
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ProcessOptions, ResetConfig
from envmanager.processes.boot import THREAD_CAPS
from envmanager.processes.output import OutputLog
from envmanager.system.interrupts import defer_interrupts

_STEP = CommandName.STEP
_DESCRIPTORS_TO_START = 16
"""Number of free descriptors required before a start, more than a start needs, so that no start fails half-way."""


@attrs.frozen(kw_only=True)
class LaunchPlan(WorkerPlan):
    """The settings for the start of a worker process."""

    options: ProcessOptions
    seed: int
    memory: int | str
    """Descriptor of the shared memory; on Windows its name."""
    shared_fds: tuple[int, ...]
    """Other descriptors that all workers of the manager inherit."""
    n_slots: int
    spin_ns: int
    """Maximum time in ns that the worker polls for a command before it sleeps."""
    environ: Mapping[str, str] = attrs.field(repr=False)  # may contain secrets

    def call(self, pickled_factory: bytes) -> tuple[str, str, tuple[Any, ...]]:
        """Return the name of the process, its function, and the function's arguments without the descriptors."""
        arguments = self.worker_id, self.generation, self.seed, self.spin_ns, pickled_factory
        return f"envmanager-worker-{self.worker_id}", "envmanager.processes.child:run_worker", arguments


class ProcessLink(Link):
    """The manager's link to a worker process. Actions and steps are exchanged through shared memory if they fit."""

    decoder: Decoder

    def __init__(self, plan: LaunchPlan, pickled_factory: bytes, events: EventLog, times: WorkerTimes) -> None:
        super().__init__(plan, Channel(), events, times)
        self.decoder = Decoder(plan.worker_id, plan.env_ids)
        self._plan = plan
        self._worker_rows: SharedRows | None = None
        self.rows_to_attach: SharedRows | None = None
        descriptors.require_room(_DESCRIPTORS_TO_START)
        descriptors.open_standard()  # the trainer may have closed standard descriptors since the last start
        self._log, output_fd = None, None
        if plan.options.log_dir is not None:
            self._log, output_fd = OutputLog.open(plan.options.log_dir, plan.worker_id, plan.generation)
        try:
            self.process, fd = self.launch(plan, pickled_factory, output_fd)
        except TimeoutError as error:
            raise WorkerTimedOut(**self._facts(CommandName.START), timeout_s=plan.timeouts.start_s) from error
        except OSError as error:
            raise plan.not_started("process", error) from error
        finally:
            if output_fd is not None:
                os.close(output_fd)
        self.channel.open(fd, self.process.pidfd)

    @abstractmethod
    def launch(self, plan: LaunchPlan, pickled_factory: bytes, output_fd: int | None) -> tuple[WorkerProcess, int]:
        """Start the process. Return the process and the descriptor of the trainer's end of the connection.

        ``output_fd``: descriptor for standard output and standard error; None for the trainer's. Raises
        TimeoutError after ``timeouts.start_s``, and another OSError if the process cannot be started.
        """

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command. A step blocks only if the socket is full. Call this method with interrupts deferred."""
        command = name if name.__class__ is CommandName else CommandName(name)
        if command not in STEPPING:
            super().send(command, payload)
            return
        rows, actions = (None, payload) if command is _STEP else payload
        flags = 0 if self._worker_rows is None else self._worker_rows.write_actions(actions, rows)
        data = b"" if flags else dumps_command(payload)
        slot = (self.slot + 1) % self._plan.n_slots
        deadline = time.monotonic() + self._timeouts_s[_STEP] + (self.begins_s if self.begins else 0.0)
        ticket = self.ticket + 1
        begins, self.begins = self.begins, b""
        message = COMMAND.pack(ticket, CODES[command], slot, flags, len(begins), len(data)) + data + begins
        self.ticket = ticket  # here, because to pack the message may raise MemoryError
        try:
            n_written = descriptors.write(self.channel.fd, message)
        except OSError:  # the socket is full, or the worker has ended
            n_written = 0
        if n_written < len(message):
            self.channel.push(message[n_written:], deadline)
        self.slot = slot
        self.await_response(ticket, _STEP, deadline)

    def attach(self, worker_rows: SharedRows) -> None:
        """Use ``worker_rows`` for all later steps, and send the layout of the shared memory to the worker."""
        self._worker_rows = worker_rows
        self.decoder.attach(worker_rows)
        data = pickle.dumps(worker_rows.layout)
        self.ticket += 1
        message = COMMAND.pack(self.ticket, ATTACH_CODE, self.slot, 0, 0, len(data)) + data
        self.channel.push(message, time.monotonic() + self._timeouts_s[CommandName.CALL])

    def first_response(self, response: EnvironmentResponse) -> EnvironmentResponse | None:
        if response.name is CommandName.START and self.rows_to_attach is not None:
            self.attach(self.rows_to_attach)
        return super().first_response(response)

    def output_tail(self) -> str:
        """Return the end of the worker's log file, or "" without ``log_dir``."""
        return "" if self._log is None else self._log.tail()

    def release(self) -> None:
        super().release()
        self._worker_rows = self.rows_to_attach = None
        self.decoder.attach(None)


class ProcessHost(LinkHost[ProcessLink]):
    """A manager's host for worker processes. With ``local_envs``, the last worker runs in the trainer's process.

    Each subclass implements a transport, which determines how processes are started and how they send responses.
    """

    link_class: ClassVar[type[ProcessLink]]
    options: ProcessOptions
    _shared_fds: tuple[int, ...] = ()
    _memory: int | str
    """Descriptor of the memory that the workers share; on Windows its name. ``_make_resources`` sets it."""

    def __init__(self, env_factory: Any, options: ProcessOptions) -> None:
        super().__init__(env_factory, options)
        self.factories = factories_for(env_factory, options.n_envs)
        self._n_slots = 3 if options.zero_copy else 1
        self._worker_rows: list[SharedRows] = []
        """Each worker's part of the shared memory, which its replacements use too."""
        self._whole: dict[str, list[tuple[list[np.ndarray], AgentSteps]]] = {}
        """All workers' reward arrays, which identify steps written in place, and a view of all their rows, by behavior
        and slot. Only for behaviors with one agent per environment."""
        self.rewrites_arrays = not options.zero_copy
        self.n_local = int(bool(options.local_envs))

    def open(self, context: HostContext) -> None:
        self._spin_ns = spin_ns(len(context.entries))
        super().open(context)
        if self.n_local:
            self.step_queue = LocalStepQueue(self.workers, self._n_links, self._resources.poller)

    # Starting.

    def make_worker(self, worker_id: int) -> EnvWorker:
        """Return a new worker: a started process, or the local worker, which makes its environments when first used."""
        entry = self.context.entries[worker_id]
        factory = self.group_factory(entry)
        if worker_id >= self._n_links:
            return LocalWorker(worker_id, factory, entry.times, self.context.events, rotates=self.options.zero_copy)
        self.context.calls.require_open("the start of a worker")
        options, data = self.options, pickled(factory)
        environ = os.environ if options.worker_env is None else options.worker_env
        plan = self.plan_of(
            entry,
            LaunchPlan,
            options=options,
            seed=int(np.random.SeedSequence().generate_state(1)[0]),
            memory=self._memory,
            shared_fds=self._shared_fds,
            n_slots=self._n_slots,
            spin_ns=self._spin_ns,
            environ={**dict.fromkeys(THREAD_CAPS, "1"), **environ},
        )
        return self.care_for(lambda: self.link_class(plan, data, self.context.events, entry.times))

    def await_start(self) -> dict[int, StartReport]:
        local = {each.worker_id: each.start() for each in self._local_workers()}  # while the processes start
        return {**super().await_start(), **local}

    def have_started(self, specs: BehaviorSpecs, reports: Mapping[int, StartReport]) -> None:
        """Allocate the shared memory for ``specs`` and attach all workers to it."""
        max_agents = [reports[worker_id].max_agents for worker_id in sorted(reports)]
        layout = BlockLayout.of(specs, max_agents, n_slots=self._n_slots)
        allocate(self._memory, Block(layout).size_bytes)
        block = Block.shared(layout, self._memory)
        self._worker_rows = [SharedRows(block, entry.worker_id, entry.env_ids) for entry in self.context.entries]
        for worker in self.workers:
            worker.attach(self._worker_rows[worker.worker_id])
        sizes = [len(entry.env_ids) for entry in self.context.entries]
        agent_ids = only_agents(range(sum(sizes)))
        for each in block.layout.behaviors:
            for slot in range(self._n_slots) if list(each.capacity) == sizes else ():
                rewards = [own.full[slot][each.name].reward for own in self._worker_rows]
                steps = block.columns[each.name].steps(slot, 0, len(agent_ids), 0, False)
                whole = attrs.evolve(steps, agent_id=agent_ids)
                self._whole.setdefault(each.name, []).append((rewards, whole))

    def _local_workers(self) -> list[LocalWorker]:
        return self.workers[self._n_links :]

    # Methods that the manager calls.

    def launch(self, worker_id: int, generation: int) -> Any:
        worker: Any = super().launch(worker_id, generation)
        if generation > 0:  # the trainer may hold views of two slots of its predecessor
            worker.slot = self.workers[worker_id].slot
        return worker

    def begin_again(self, worker_id: int, config: ResetConfig) -> EnvironmentResponse | None:
        worker = self.workers[worker_id]
        if worker_id < self._n_links:
            worker.rows_to_attach = self._worker_rows[worker_id]
        else:
            worker.attach(self._worker_rows[worker_id])
        return super().begin_again(worker_id, config)

    def reuse_rows(self, worker_id: int) -> None:
        worker = self.workers[worker_id]
        worker.slot = (worker.slot - 1) % self._n_slots

    def whole(self, behavior: str, parts: Sequence[AgentSteps]) -> AgentSteps | None:
        """Return one view of all workers' rows if it exists and all ``parts`` are in the same slot, else None."""
        written = [steps.reward for steps in parts]
        for rewards, whole in self._whole.get(behavior, ()):
            if all(map(is_, written, rewards)):
                return whole
        return None

    def close(self) -> None:
        super().close()
        for local in self._local_workers():
            local.close_quietly()
        with defer_interrupts():  # the finalizer that unmaps the memory would swallow an interrupt
            self._worker_rows, self._whole = [], {}
