"""The worker's end of the transport: commands come in, responses go out.

The rule: tickets, slots and shared memory belong here; the loop in ``child`` knows only ``recv``, ``send`` and ``put``.
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
    """The trainer has closed the connection or the step pipe."""


@attrs.frozen
class CannotObey:
    """The reason why this worker can obey no command, in place of a payload."""

    reason: Exception


class TrainerConnection:
    """The worker's own connection, and its end of the step pipe."""

    def __init__(self, fds: Mapping[str, int], launch: Launch) -> None:
        self._fds = fds
        self._fd = fds["connection"]
        self._worker_id = launch.worker_id
        self._generation = launch.generation
        self._ticket = 0
        self._slot = 0
        """The slot for the response to the current step."""
        self._offered_slot = -1
        self._block: Block | None = None
        self._worker_rows: WorkerRows | None = None
        self._group: EnvGroup | None = None
        self._cannot_obey: CannotObey | None = None
        self._n_reported = 0
        """Number of behaviors whose specs were sent with a response; those sent by "start" do not count."""
        self._started_ns = time.monotonic_ns()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._spinner = Spinner(launch.spin_ns)
        self._header = b""

    def use_group(self, group: EnvGroup) -> None:
        """Set the environments: they are offered rows of the shared memory, and their new specs are sent."""
        self._group = group

    def cut_off(self) -> None:
        """Disconnect a process that an environment forked from the trainer and the worker."""
        if self._block is not None:
            self._block.make_private(self._fds["memory"])
        descriptors.lead_nowhere([self._fds[name] for name in ("memory", "connection", "steps", "crash")])

    # Commands.

    def recv(self) -> EnvironmentCommand:
        """Return the next command; block until it arrives. Raises TrainerGone."""
        while True:
            ticket, code, slot, flags, _, length = COMMAND.unpack(self._next_header())
            data = self._read_exactly(length) if length else b""
            if ticket <= self._ticket:
                continue  # sent twice after an interrupt
            self._ticket, self._slot = ticket, slot
            if code == ATTACH_CODE:
                self._attach(pickle.loads(data))
                continue
            self._started_ns = time.monotonic_ns()
            return EnvironmentCommand(NAMES[code], self._payload(NAMES[code], flags, data))

    def _attach(self, layout: BlockLayout) -> None:
        """Lay arrays over the shared memory, which now has its size. If that fails, every command fails."""
        if self._group is None:  # the environments could not be made; their steps are failures
            return
        try:
            self._block = Block.shared(layout, self._fds["memory"])
            self._worker_rows = WorkerRows(self._block, self._worker_id, self._group.env_ids)
        except Exception as error:
            self._cannot_obey = CannotObey(error)

    def _payload(self, name: CommandName, flags: int, data: bytes) -> Any:
        if self._cannot_obey is not None:
            return self._cannot_obey
        if name in STEPPING and self._worker_rows is not None and self._group is not None:
            if self._slot != self._offered_slot:
                self._offered_slot = self._slot
                buffer = self._worker_rows.buffers[self._slot]
                if buffer is not None:
                    self._group.offer_rows(buffer)
            if flags & IN_MEMORY:
                return self._worker_rows.read_payload(name, flags)
        return Undecoded(data) if data else None

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
        self._header = self._read(COMMAND.size)
        return True

    def _read_exactly(self, n_bytes: int, begun: bytes = b"") -> bytes:
        data = bytearray(begun)
        while len(data) < n_bytes:
            data += self._read(min(n_bytes - len(data), 1 << 20))
        return bytes(data)

    def _read(self, n_bytes: int) -> bytes:
        try:
            data = os.read(self._fd, n_bytes)
        except ConnectionResetError as error:  # closed with something of ours unread
            raise TrainerGone from error
        if not data:
            raise TrainerGone
        return data

    # Responses.

    def send(self, response: EnvironmentResponse) -> None:
        """Respond to a command other than a step."""
        if response.name is _FAILED:
            self._write_message(FAILED_CODE, dumps_failure(response.payload))
            return
        specs = None if response.name is CommandName.START else self._specs_to_send()
        flags, message = response_message(response.payload, specs)
        self._write_message(CODES[response.name], message, flags)
        if specs is not None:
            self._n_reported = len(specs)

    def put(self, response: EnvironmentResponse) -> None:
        """Respond to a step: its arrays in shared memory if they fit, all else in a message."""
        steps, rows = response.payload, self._worker_rows
        if response.name is _FAILED:
            self._write_message(FAILED_CODE, dumps_failure(steps))
            return
        flags, n_ended = (0, 0) if rows is None else rows.put(self._slot, steps)
        specs = self._specs_to_send()
        message = step_message(steps, flags, specs)
        if message is None:
            self._write_record(flags, n_ended)
        else:
            flags, data = message
            self._write_message(STEP_CODE, data, flags, n_ended)
        if specs is not None:
            self._n_reported = len(specs)

    def _specs_to_send(self) -> BehaviorSpecs | None:
        """Return all specs if some were not sent yet."""
        if self._group is None or len(self._group.behavior_specs) == self._n_reported:
            return None
        return dict(self._group.behavior_specs)

    def _write_message(self, code: int, data: bytes, flags: int = 0, n_ended: int = 0) -> None:
        now_ns = time.monotonic_ns()
        header = MESSAGE.pack(self._ticket, code, flags, 0, n_ended, len(data), now_ns - self._started_ns, now_ns)
        left = memoryview(header + data)
        while left:
            left = left[self._write("connection", left) :]

    def _write_record(self, flags: int, n_ended: int) -> None:
        """Report a step that is in shared memory, by one atomic write."""
        now_ns = time.monotonic_ns()
        busy_ns = now_ns - self._started_ns
        who = self._ticket, self._worker_id, self._generation
        self._write("steps", RECORD.pack(*who, self._slot, flags, n_ended, busy_ns, now_ns))

    def _write(self, where: str, data: Any) -> int:
        try:
            return os.write(self._fds[where], data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise TrainerGone from error
