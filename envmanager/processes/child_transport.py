"""The worker's end of the transport: the connection that brings commands, and the step queue that takes responses.

The rule: tickets, slots and shared memory belong to these objects; the loop in ``child`` knows only ``recv``, ``send``
and ``put``.
"""

from __future__ import annotations

import os
import pickle
import select
import time
from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.data.specs import BehaviorSpecs
from envmanager.data.steps import STEPPING, CommandName, EnvironmentCommand, EnvironmentResponse
from envmanager.environment import EnvGroup
from envmanager.hosts import descriptors
from envmanager.hosts.shared_rows import IN_MEMORY, Block, BlockLayout, WorkerRows
from envmanager.hosts.spin import Spinner
from envmanager.hosts.wire import (
    ATTACH_CODE,
    CODES,
    COMMAND,
    FAILED_CODE,
    MESSAGE,
    NAMES,
    RECORD,
    STEP_CODE,
    Undecoded,
    dumps_failure,
    response_message,
    step_message,
)

_FAILED = CommandName.FAILED


@attrs.frozen
class Launch:
    """The parameters of a worker besides its factory."""

    worker_id: int
    generation: int
    seed: int
    spin_ns: int
    pickled_factory: bytes


class TrainerGone(ConnectionError):
    """The trainer has closed the connection or the step queue."""


@attrs.frozen
class CannotObey:
    """The reason why this worker can obey no command, in place of a payload."""

    reason: Exception


class Transport:
    """The state that the worker's two channels share: the current command, and the rows for the response."""

    def __init__(self, fds: Mapping[str, int], launch: Launch) -> None:
        self.fds = fds
        self.worker_id = launch.worker_id
        self.generation = launch.generation
        self.spin_ns = launch.spin_ns
        self.ticket = 0
        self.slot = 0
        self.block: Block | None = None
        self.worker_rows: WorkerRows | None = None
        self.group: EnvGroup | None = None
        self.cannot_obey: CannotObey | None = None
        self.n_reported = 0
        """Number of behaviors whose specs were sent with a response; those sent by "start" do not count."""
        self.started_ns = time.monotonic_ns()

    def attach(self, layout: BlockLayout) -> None:
        """Lay arrays over the shared memory, which now has its size. If that fails, every command fails."""
        if self.group is None:  # the environments could not be made; their steps are failures
            return
        try:
            self._attach(layout, self.group)
        except Exception as error:
            self.cannot_obey = CannotObey(error)

    def _attach(self, layout: BlockLayout, group: EnvGroup) -> None:
        self.block = Block.shared(layout, self.fds["memory"])
        self.worker_rows = WorkerRows(self.block, self.worker_id, group.env_ids)

    def cut_off(self) -> None:
        """Disconnect a process that an environment forked from the trainer and the worker."""
        if self.block is not None:
            self.block.make_private(self.fds["memory"])
        descriptors.lead_nowhere([self.fds[name] for name in ("memory", "connection", "steps", "crash")])

    def specs_to_send(self) -> BehaviorSpecs | None:
        """Return all specs if some were not sent yet."""
        if self.group is None or len(self.group.behavior_specs) == self.n_reported:
            return None
        return dict(self.group.behavior_specs)

    def write_message(self, code: int, data: bytes, flags: int = 0, n_ended: int = 0) -> None:
        """Send a message through this worker's own connection."""
        now_ns = time.monotonic_ns()
        header = MESSAGE.pack(self.ticket, code, flags, 0, n_ended, len(data), now_ns - self.started_ns, now_ns)
        left = memoryview(header + data)
        while left:
            try:
                left = left[os.write(self.fds["connection"], left) :]
            except (BrokenPipeError, ConnectionResetError) as error:
                raise TrainerGone from error

    def write_record(self, flags: int, n_ended: int) -> None:
        """Report a step that is in shared memory, by one atomic write."""
        now_ns = time.monotonic_ns()
        busy_ns = now_ns - self.started_ns
        record = RECORD.pack(self.ticket, self.worker_id, self.generation, self.slot, flags, n_ended, busy_ns, now_ns)
        try:
            os.write(self.fds["steps"], record)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise TrainerGone from error


class Connection:
    """The worker's end of its own connection."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._fd = transport.fds["connection"]
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._spinner = Spinner(transport.spin_ns)
        self._header = b""
        self._offered_slot = -1

    def use_group(self, group: EnvGroup) -> None:
        """Set the environments: they are offered rows of the shared memory, and their new specs are sent."""
        self._transport.group = group

    def recv(self) -> EnvironmentCommand:
        """Return the next command; block until it arrives. Raises TrainerGone."""
        while True:
            ticket, code, slot, flags, _, length = COMMAND.unpack(self._next_header())
            data = self._read_exactly(length) if length else b""
            if ticket <= self._transport.ticket:
                continue  # sent twice after an interrupt
            self._transport.ticket, self._transport.slot = ticket, slot
            if code == ATTACH_CODE:
                self._transport.attach(pickle.loads(data))
                continue
            self._transport.started_ns = time.monotonic_ns()
            return EnvironmentCommand(NAMES[code], self._payload(NAMES[code], flags, data))

    def send(self, response: EnvironmentResponse) -> None:
        """Respond to a command other than a step."""
        if response.name is _FAILED:
            self._transport.write_message(FAILED_CODE, dumps_failure(response.payload))
        else:
            specs = None if response.name is CommandName.START else self._transport.specs_to_send()
            flags, message = response_message(response.payload, specs)
            self._transport.write_message(CODES[response.name], message, flags)
            if specs is not None:
                self._transport.n_reported = len(specs)

    def _payload(self, name: CommandName, flags: int, data: bytes) -> Any:
        transport = self._transport
        if transport.cannot_obey is not None:
            return transport.cannot_obey
        if name in STEPPING and transport.worker_rows is not None and transport.group is not None:
            if transport.slot != self._offered_slot:
                self._offer_rows(transport.worker_rows, transport.group, transport.slot)
            if flags & IN_MEMORY:
                return transport.worker_rows.read_payload(name, flags)
        return Undecoded(data) if data else None

    def _offer_rows(self, worker_rows: WorkerRows, group: EnvGroup, slot: int) -> None:
        self._offered_slot = slot
        buffer = worker_rows.buffer(slot)
        if buffer is not None:
            group.offer_rows(buffer)

    def _next_header(self) -> bytes:
        if not (self._spinner.pays and self._try_header()):
            self._spinner.wait(self._try_header, self._read_header)
        header, self._header = self._header, b""
        return header if len(header) == COMMAND.size else self._read_exactly(COMMAND.size, header)

    def _try_header(self) -> bool:
        """Read a header if one is there; return whether it was. A poll is faster than a read that raises."""
        return bool(self._poll.poll(0)) and self._read_header()

    def _read_header(self) -> bool:
        """Read a header, blocking; return True. Raises TrainerGone. Sleeping in the read saves a call."""
        try:
            self._header = os.read(self._fd, COMMAND.size)
        except ConnectionResetError as error:  # closed with something of ours unread
            raise TrainerGone from error
        if not self._header:
            raise TrainerGone
        return True

    def _read_exactly(self, n_bytes: int, begun: bytes = b"") -> bytes:
        if len(begun) == n_bytes:
            return begun
        data = bytearray(begun)
        while len(data) < n_bytes:
            try:
                part = os.read(self._fd, min(n_bytes - len(data), 1 << 20))
            except ConnectionResetError as error:
                raise TrainerGone from error
            if not part:
                raise TrainerGone
            data += part
        return bytes(data)


class StepQueueWriter:
    """The worker's end of the step queue."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def put(self, response: EnvironmentResponse) -> None:
        """Report a step: its arrays in shared memory if they fit, all else in a message."""
        transport, steps = self._transport, response.payload
        if response.name is _FAILED:
            transport.write_message(FAILED_CODE, dumps_failure(steps))
            return
        worker_rows = transport.worker_rows
        flags, n_ended = (0, 0) if worker_rows is None else worker_rows.put(transport.slot, steps)
        specs = transport.specs_to_send()
        message = step_message(steps, flags, specs)
        if message is None:
            transport.write_record(flags, n_ended)
        else:
            transport.write_message(STEP_CODE, message, flags, n_ended)
        if specs is not None:
            transport.n_reported = len(specs)
