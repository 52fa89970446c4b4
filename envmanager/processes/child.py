"""The worker process: its end of the connection, the loop that carries out commands, and the exit of its forks.

::

    helper or boot ──▶ run_worker: signals, output, seeds ──▶ worker(connection, step queue, factory, worker_id)

    worker ─── step ───▶ environment ─── os.fork() ───▶ the parent continues as the worker
                                             └────────▶ the fork: its connections to the trainer are cut;
                                                        it exits when it leaves the environment's code

A fork may continue (a simulator), or exit itself (``os._exit``, ``multiprocessing``, another program). If it leaves
the environment's code (returns, raises or calls ``sys.exit``), it must not take commands as a second worker. It then
exits like a script, but without the worker's ``atexit`` functions, finalizers and ``close`` of the environments.

The rule: ``worker`` needs only ``recv``, ``send`` and ``put``, so tests can run it with mocks. TrainerConnection, which
it receives as an argument, handles tickets, slots and shared memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import numpy.random  # here, so that the helper loads it, because NumPy loads it lazily

from envmanager.data.steps import STEPPING, CommandName, EnvironmentCommand, EnvironmentResponse
from envmanager.environment import EnvGroup
from envmanager.hosts import descriptors
from envmanager.hosts.hosting import COMMANDS, GroupFactory, failed, make_group, take_not_begun
from envmanager.hosts.shared_rows import IN_MEMORY, Block, BlockLayout, SharedRows
from envmanager.hosts.spin import Spinner
from envmanager.hosts.wire import (
    ATTACH_CODE,
    CODES,
    COMMAND,
    FAILED_CODE,
    MESSAGE,
    MESSAGE_MARK,
    NAMES,
    RECORD,
    RECORD_MARK,
    dumps_failure,
    response_message,
    step_message,
)
from envmanager.processes import output
from envmanager.processes.boot import end_group, flush_output
from envmanager.system.machine import after_fork_in_child

FDS = ("connection", "memory", "steps", "crash")
"""Names of the descriptors that a worker inherits, in order. The portable transport has only the first two."""
_STDERR = 2
_START, _STEP = CommandName.START, CommandName.STEP
_CLOSE, _FAILED = CommandName.CLOSE, CommandName.FAILED


class TrainerGone(ConnectionError):
    """Error raised when the trainer has closed the connection or the step pipe."""


class TrainerConnection:
    """The worker's side of the link to the trainer. It receives commands and sends responses."""

    def __init__(self, fds: Mapping[str, Any], worker_id: int, generation: int, spin_ns: int) -> None:
        self._fds = fds
        self._fd = fds["connection"]
        self._worker_id = worker_id
        self._generation = generation
        self._ticket = 0
        self._slot = 0
        """Slot of shared memory for the response to the current step."""
        self._offered_slot = -1
        self._block: Block | None = None
        self._worker_rows: SharedRows | None = None
        self._group: EnvGroup | None = None
        self._cannot_obey: Exception | None = None
        """Payload of every command once the shared memory could not be mapped. It makes the command fail."""
        self._n_reported = 0
        """Number of behaviors whose specs were sent with a response other than the one to "start"."""
        self._started_ns = time.perf_counter_ns()
        self._has_come: Callable[[], Any] = bool
        if spin_ns:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            self._has_come = partial(poll.poll, 0)
        self._spinner = Spinner(spin_ns)

    def use_group(self, group: EnvGroup) -> None:
        """Set the worker's environments. They may write into shared memory, and responses report their new specs."""
        self._group = group

    def cut_off(self) -> None:
        """Disconnect this fork of a worker from the trainer, and replace the shared memory with a private copy."""
        if self._block is not None:
            self._block.make_private(self._fds["memory"])
        descriptors.lead_nowhere(list(self._fds.values()))

    # Commands.

    def recv(self) -> EnvironmentCommand:
        """Block until the next command arrives, and return it. Raises TrainerGone if the connection is closed."""
        while True:
            has_come = (self._spinner.pays and self._has_come()) or self._spinner.spin(self._has_come)
            header = self._read(COMMAND.size)
            if not has_come:
                self._spinner.slept()
            if len(header) < COMMAND.size:
                header = self._read_exactly(COMMAND.size, header)
            ticket, code, slot, flags, n_begins, length = COMMAND.unpack(header)
            data = self._read_exactly(length) if length else b""
            if n_begins:
                begins = self._read_exactly(n_begins)
            self._ticket, self._slot = ticket, slot
            if code == ATTACH_CODE:
                self._attach(pickle.loads(data))
                continue
            self._started_ns = time.perf_counter_ns()
            try:
                payload = self._payload(NAMES[code], flags, data)
                if n_begins and self._group is not None and self._group.on_demand is not None:
                    self._group.on_demand.add(pickle.loads(begins))
            except BaseException as error:  # of the user's classes; the command raises it
                payload = error
            return EnvironmentCommand(NAMES[code], payload)

    def _attach(self, layout: BlockLayout) -> None:
        """Map the shared memory, which now has its final size. If the mapping fails, all later commands fail."""
        assert self._group is not None
        try:
            self._block = Block.shared(layout, self._fds["memory"])
            self._worker_rows = SharedRows(self._block, self._worker_id, self._group.env_ids)
        except Exception as error:
            self._cannot_obey = error

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
        return pickle.loads(data) if data else None

    def _read_exactly(self, n_bytes: int, begun: bytes = b"") -> bytes:
        data = bytearray(begun)
        while len(data) < n_bytes:
            data += self._read(min(n_bytes - len(data), 1 << 20))
        return bytes(data)

    def _read(self, n_bytes: int) -> bytes:
        try:
            data = descriptors.read(self._fd, n_bytes)
        except ConnectionError as error:  # the trainer closed the connection before reading all
            raise TrainerGone from error
        if not data:
            raise TrainerGone
        return data

    # Responses.

    def send(self, response: EnvironmentResponse) -> None:
        """Send a response, with step arrays in shared memory if they fit. Raises TrainerGone if disconnected."""
        if response.name is _FAILED:
            self._write_message(FAILED_CODE, dumps_failure(response.payload))
            return
        payload, group, rows, specs = response.payload, self._group, self._worker_rows, None
        if group is not None and response.name is not _START and len(group.behavior_specs) != self._n_reported:
            specs = dict(group.behavior_specs)
        flags = n_ended = 0
        if response.name is _STEP:
            if rows is not None:
                flags, n_ended = rows.put(self._slot, payload)
            message = step_message(payload, flags, specs, response.not_begun)
        else:
            message = response_message(payload, specs, response.not_begun)
        if message is None and "steps" in self._fds:  # the whole step is in shared memory: one atomic write reports it
            now_ns = time.perf_counter_ns()
            who = RECORD_MARK, self._ticket, self._worker_id, self._generation
            self._write("steps", RECORD.pack(*who, self._slot, flags, n_ended, now_ns - self._started_ns, now_ns))
        else:
            flags, data = message or (flags, b"")
            self._write_message(CODES[response.name], data, flags, n_ended)
        if specs is not None:
            self._n_reported = len(specs)

    put = send

    def _write_message(self, code: int, data: bytes, flags: int = 0, n_ended: int = 0) -> None:
        now_ns = time.perf_counter_ns()
        times = now_ns - self._started_ns, now_ns
        header = MESSAGE.pack(self._ticket, code, flags, MESSAGE_MARK, n_ended, len(data), *times)
        left = memoryview(header + data)
        while left:
            left = left[self._write("connection", left) :]

    def _write(self, where: str, data: Any) -> int:
        try:
            return descriptors.write(self._fds[where], data)
        except ConnectionError as error:
            raise TrainerGone from error


def worker(parent_conn: Any, step_queue: Any, pickled_env_factory: bytes, worker_id: int) -> None:
    """Make environments, carry out commands until "close" or an EOFError from ``recv``, then close the environments.

    Responses to "step" and "step_rows" go to ``step_queue``, all others to ``parent_conn``. If a command fails, its
    response has the name "failed" and an error of this library as its payload. TrainerGone is not caught.
    """
    factory = group = failure = None
    try:
        factory = cloudpickle.loads(pickled_env_factory)
        if _leave_worker is not None and isinstance(factory, GroupFactory):  # not in a thread of the trainer
            factory.fill_main()
        group = make_group(factory, worker_id)
        if hasattr(parent_conn, "use_group"):
            parent_conn.use_group(group)
    except BaseException as error:
        if _is_fork:
            raise
        env_ids = [c.env_id for c in factory.contexts] if isinstance(factory, GroupFactory) else [worker_id]
        failure = failed(error, CommandName.START, worker_id=worker_id, env_ids=env_ids, group=None)
    while True:
        try:
            command = parent_conn.recv()
        except EOFError:
            break
        if command.name is _CLOSE:
            break
        if command.name in STEPPING:
            respond = step_queue.put
        elif command.name is CommandName.BEGIN and group is not None and group.on_demand is not None:
            group.on_demand.add(command.payload)
            continue
        else:
            respond = parent_conn.send
        if failure is not None or group is None:
            respond(failure)
        else:
            _obey(group, command, respond, worker_id)
    if group is not None:
        group.close()


def _obey(group: EnvGroup, command: EnvironmentCommand, respond: Any, worker_id: int) -> None:
    name = _STEP if command.name in STEPPING else command.name
    try:
        if isinstance(command.payload, BaseException):
            raise command.payload
        result = COMMANDS[command.name](group, command.payload)
        not_begun = take_not_begun(group, worker_id) if group.not_begun else None
        respond(EnvironmentResponse(name, worker_id, result, not_begun=not_begun))
    except TrainerGone:
        raise  # there is no trainer to report to
    except BaseException as error:
        if _is_fork:
            raise
        # Includes SystemExit, KeyboardInterrupt and MemoryError, because they come from the environment's code.
        respond(failed(error, command.name, worker_id=worker_id, env_ids=group.env_ids, group=group))


def run_worker(
    inherited: list[Any], worker_id: int, generation: int, seed: int, spin_ns: int, pickled_env_factory: bytes
) -> None:
    """Set up signals, output and random seeds, then call ``worker``. ``inherited`` has the descriptors named in FDS."""
    fds = dict(zip(FDS, inherited, strict=False))
    # Only the trainer handles a Ctrl-C; it ends its workers. To ignore the signal also discards a pending one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    crash_fd = output.enable_crash_report(fds.get("crash"), worker_id)
    # Otherwise all workers would draw the same numbers, from the generators inherited from the helper.
    random.seed(seed)
    np.random.seed(seed % 2**32)
    trainer = TrainerConnection(fds, worker_id, generation, spin_ns)

    def leave() -> None:
        trainer.cut_off()
        output.leave_crash_report(crash_fd)

    global _leave_worker
    _leave_worker = leave
    try:
        worker(trainer, trainer, pickled_env_factory, worker_id)
    except BaseException as error:
        # A process that an environment forked gets here too when it leaves the environment's code.
        if _is_fork:
            _end_fork(None if isinstance(error, TrainerGone) else error)
        if isinstance(error, TrainerGone):  # may be raised before the life pipe closes
            end_group()
        raise
    if _is_fork:
        _end_fork(None)


_is_fork = False
"""Whether this process was forked by an environment."""
_leave_worker: Callable[[], None] | None = None
"""Function that each process forked from this worker calls first. None if this process is no worker."""


@after_fork_in_child
def _after_fork_in_child() -> None:
    global _is_fork, _leave_worker
    if _leave_worker is None:  # no worker, or a fork of a fork
        return
    _is_fork, leave, _leave_worker = True, _leave_worker, None
    try:
        leave()
    except BaseException as error:  # Python would print the error and continue, as a second worker
        _end_fork(error)


def _end_fork(error: BaseException | None) -> NoReturn:
    """Exit this forked process like a script that raised ``error``, or that reached its end if ``error`` is None."""
    code, text = 1, ""
    try:
        flush_output()
        if error is None:
            code = 0
        elif not isinstance(error, SystemExit):
            text = "".join(traceback.format_exception(error))
        elif error.code is None or isinstance(error.code, int):
            code = int(error.code or 0) & 0xFF
        else:
            text = f"{error.code}\n"
        os.write(_STDERR, text.encode(errors="backslashreplace"))
    finally:
        os._exit(code)
