"""The protocol between manager and worker: the format of messages, and the trainer's end of a connection.

::

    step pipe (one for all)     RECORD: a step that is in shared memory             workers ▶ manager
                                (a MESSAGE of length 0 in the portable transport, which has no such pipe)
    connection (one per worker) COMMAND, then its pickles                           manager ▶ worker
                                MESSAGE, then ``length`` bytes of pickle            worker ▶ manager

A record is at most PIPE_BUF bytes, so the kernel writes it whole or not at all. The step pipe has no lock, so it stays
usable if a worker is killed at any moment. All other responses are messages through the worker's own connection (a
socket pair), where half a message affects no other worker. Every response repeats the ticket of the command.

An environment may write to a descriptor that it did not open. So records and messages begin with or contain a mark.
Bytes without it are skipped in the step pipe. In a connection they are a violation of the protocol by its worker.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.adapters.factories import pickled, why_unpicklable
from envmanager.adapters.names import base_names
from envmanager.data.specs import BehaviorSpecs, SpecConflict, SpecMismatch
from envmanager.data.steps import CommandName, EnvironmentResponse, Steps, phase_of
from envmanager.errors import BadObservation, EnvManagerError, EnvRaised, UsageError, Where
from envmanager.hosts import descriptors
from envmanager.hosts.shared_rows import FULL, IN_MEMORY, SharedRows
from envmanager.importing import is_missing

if TYPE_CHECKING:
    from typing_extensions import Unpack

COMMAND = struct.Struct("<QBBHIQ")
"""Header of a command: ticket, command code, slot, flags, and the lengths of a pickled list of Begin and of the pickle
of the payload. The payload follows first."""

RECORD = struct.Struct("<8sQIIHHIQQ")
"""Record of a step: RECORD_MARK, ticket, worker_id, generation, slot, flags, n final observations, busy ns, end (ns).
"""

MESSAGE = struct.Struct("<QBBHIQQQ")
"""Header of a message: ticket, code, flags, MESSAGE_MARK, n final observations, pickle length, busy ns, end (ns)."""

RECORD_MARK, MESSAGE_MARK = b"\xb1\x9eenvstp", 0xB19E

CODES: dict[CommandName, int] = {name: code for code, name in enumerate(CommandName, start=1)}
NAMES: dict[int, CommandName] = {code: name for name, code in CODES.items()}

ATTACH_CODE = 0
"""Code of the command that sends the layout of the shared memory. It has no response."""
STEP_CODE, FAILED_CODE = CODES[CommandName.STEP], CODES[CommandName.FAILED]

WITH_SPECS = 16
"""Message flag: the pickle is ``(payload, specs, not_begun)``; see EnvironmentResponse. What is unchanged is None."""


def dumps(value: Any) -> bytes:
    """Return the pickle of ``value``, by value where pickle alone fails, for example for a local class."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return pickled(value)


NotBegun = Mapping[int, Any] | None


def step_message(
    steps: Steps, flags: int, specs: BehaviorSpecs | None, not_begun: NotBegun = None
) -> tuple[int, bytes] | None:
    """Return a step's flags and pickle, or None if no pickle is needed. ``flags`` come from ``SharedRows.put``."""
    if not flags:
        return WITH_SPECS, dumps((dict(steps), specs, not_begun))
    infos = {name: (own.info, own.reset_info) for name, own in steps.items() if own.info is not None}
    is_needed = infos or specs is not None or not_begun
    return (flags | WITH_SPECS, dumps((infos, specs, not_begun))) if is_needed else None


def response_message(payload: Any, specs: BehaviorSpecs | None, not_begun: NotBegun = None) -> tuple[int, bytes]:
    """Return the flags and pickle of the response to a command other than a step. What is given is included."""
    more = specs, not_begun
    return (0, dumps(payload)) if more == (None, None) else (WITH_SPECS, dumps((payload, *more)))


def dumps_command(payload: Any) -> bytes:
    """Return the pickle of a command's payload. Raises UsageError if it cannot be pickled."""
    try:
        return pickled(payload)
    except Exception as error:
        raise UsageError(f"this cannot be sent to a worker, because {why_unpicklable(payload, error)}") from error


_UNKNOWN_ID = "gymnasium.error.UnregisteredEnv"
"""Name of Gymnasium's error for an unregistered id. Compared by name, so that Gymnasium need not be imported."""
_ADVICE = """\
That id is not registered in the process of this environment; what another one, such as the trainer's, has registered \
or imported is not known there. Name the module that registers it in `imports` (imports: [my_envs] in a config, \
EnvRecipe(…, imports=['my_envs']) in Python), or import it inside env_factory.
"""


def describe_failure(error: BaseException, **where: Unpack[Where]) -> EnvManagerError:
    """Return an EnvManagerError that reports ``error``, which was raised by code in a worker.

    In the phase "start", the library's own errors (no adapter, no such environment) are returned unchanged. Otherwise a
    violated spec becomes a BadObservation, and any other error becomes an EnvRaised.
    """
    if where["phase"] == "start" and isinstance(error, EnvManagerError):
        return error
    if isinstance(error, SpecMismatch | SpecConflict):
        return BadObservation(path=error.path, expected=error.expected, got=error.got, **where)
    return env_raised(error, **where)


def env_raised(error: BaseException, **where: Unpack[Where]) -> EnvRaised:
    """Return an EnvRaised caused by ``error``. It quotes the traceback, unless a start failed for lack of a library."""
    try:
        text = str(error) or repr(error)
    except Exception as broken:  # an error in __str__ must not hide the first one
        text = f"(its text cannot be shown: {type(broken).__name__})"
    # If a library is missing, an environment may raise an error that says so, which needs no traceback.
    says_what_to_install = where["phase"] == "start" and is_missing(error.__cause__)
    lines = [] if says_what_to_install else traceback.format_exception(type(error), error, error.__traceback__)
    raised = EnvRaised(
        type_name=type(error).__qualname__,
        cause=text,
        remote_traceback="".join(lines),
        advice=_ADVICE if _UNKNOWN_ID in base_names(error) else "",
        **where,
    )
    raised.__cause__ = error
    return raised


def dumps_failure(error: EnvManagerError) -> bytes:
    """Return the pickle of an error, with its cause if possible. An unpicklable error becomes an EnvManagerError."""
    original = None
    if error.__cause__ is not None:
        with contextlib.suppress(Exception):  # it may contain a lock, or its constructor may take two arguments
            cause = dumps(error.__cause__)
            pickle.loads(cause)
            original = cause
    try:
        return pickle.dumps((error, original), protocol=5)
    except Exception:  # a user's subclass of our errors
        return pickle.dumps((EnvManagerError(str(error)), None), protocol=5)


def loads_failure(data: bytes) -> EnvManagerError:
    """Return the error pickled by ``dumps_failure``, with its cause if the cause was sent and can be unpickled."""
    error, original = pickle.loads(data)
    if original is not None:
        with contextlib.suppress(Exception):  # only the worker can import its class
            error.__cause__ = pickle.loads(original)
    return error  # type: ignore[no-any-return]


_READ_SIZE, _STEP_BYTES = 1 << 20, 1 << 12


@attrs.define(eq=False)
class Message:
    """A worker's message, with the ticket of the command that it answers."""

    ticket: int
    code: int
    flags: int
    data: Any
    """Payload as bytes, or as a memoryview of a buffer that no other message uses."""
    busy_ns: int
    ended_ns: int
    """Time (``perf_counter_ns``) when the command ended, or when the message came if the worker has another clock."""
    n_ended: int = 0
    """Number of final observations of a step that the environments wrote in place in shared memory, else 0."""


class Channel:
    """The connection to one worker: a socket to which commands are written and from which messages are read."""

    def __init__(self) -> None:
        self.fd = descriptors.CLOSED
        self.pidfd = descriptors.CLOSED
        self.messages: list[Message] = []
        """Messages that were read but not taken, oldest first."""
        self.hung_up = False
        """Whether the worker has closed its end of the socket. The trainer's end then stays readable forever."""
        self.broken = ""
        """Description of the worker's violation of the protocol, or empty. Nothing is read after a violation."""
        self.on_moved: Callable[[int, int], None] = lambda *_: None
        """Callback that receives the old and the new descriptor before ``fd`` changes. The poller sets it."""
        self.lock = threading.RLock()
        """Lock held while messages are read and while the worker's state changes, because ``close()`` in another thread
        does both beside a call."""
        self._inbox = bytearray()
        self._n_kept = 0
        """Number of bytes that ``take_step`` has read and kept since the last ``pump``."""

    def open(self, fd: int, pidfd: int) -> None:
        """Use the non-blocking socket ``fd``. The process that ``pidfd`` refers to has the other end."""
        self.fd, self.pidfd = fd, pidfd

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        self.fd = descriptors.close(self.fd)

    def watched_fds(self) -> list[int]:
        """Return the descriptors that become readable when the worker sends something or ends."""
        return [self.pidfd] if self.hung_up else [self.pidfd, self.fd]

    # Out.

    def push(self, message: Any, deadline: float) -> Any:
        """Write a command, and return what was not written. Stop early at the deadline or if the worker has ended.

        ``deadline`` is in monotonic seconds. If it has passed, the write does not block and may be incomplete.

        Also reads messages, because a worker that blocks on writing one does not read the command. Another thread may
        close the channel between any two system calls. A manager's calls defer interrupts, so no interrupt leaves half
        a command behind. While workers start or end, interrupts are not deferred, but an interrupt ends the worker.
        """
        left = memoryview(message)
        while left and self.fd != descriptors.CLOSED:
            try:
                left = left[descriptors.write(self.fd, left) :]
            except BlockingIOError:
                pass
            except OSError:  # the worker is gone, which a later wait reports
                break
            left_s = deadline - time.monotonic()
            if not left or left_s <= 0:
                break
            ready = descriptors.wait_for(self.watched_fds(), left_s + 0.001, writable=[self.fd])
            with self.lock:
                self.pump()
            if self.pidfd in ready:
                break
        return left

    # In.

    def pump(self) -> bool:
        """Read available bytes without blocking. Add complete messages to ``messages``. Return whether bytes came."""
        n_new, self._n_kept = self._n_kept, 0
        while True:
            self._split()
            if self.hung_up or self.fd == descriptors.CLOSED:
                return n_new > 0
            try:
                part = descriptors.read(self.fd, _READ_SIZE)
            except BlockingIOError:
                return n_new > 0
            except OSError:  # the worker ended before reading all
                part = b""
            self.hung_up = not part
            n_new += len(part)
            self._inbox += part

    def take_step(self, ticket: int) -> tuple[int, int, int, int] | None:
        """Return flags, final_obs count, busy_ns and ended_ns of step ``ticket``, or None if ``pump`` must be used."""
        if self._inbox or self.fd == descriptors.CLOSED:
            return None
        try:
            data = descriptors.read(self.fd, _STEP_BYTES)
        except OSError:
            return None
        if len(data) == MESSAGE.size:
            found, code, flags, _, n_ended, length, busy_ns, ended_ns = MESSAGE.unpack(data)
            if found == ticket and code == STEP_CODE and not length:
                return flags, n_ended, busy_ns, ended_ns
        self._inbox += data
        self._n_kept = len(data)
        return None

    def _split(self) -> None:
        while len(self._inbox) >= MESSAGE.size:
            ticket, code, flags, mark, n_ended, length, busy_ns, ended_ns = MESSAGE.unpack_from(self._inbox)
            if mark != MESSAGE_MARK:
                self.broken, self.hung_up = "bytes that are no message", True
                return
            if len(self._inbox) < MESSAGE.size + length:
                return
            data = bytes(memoryview(self._inbox)[MESSAGE.size : MESSAGE.size + length])
            del self._inbox[: MESSAGE.size + length]
            ended_ns = ended_ns or time.perf_counter_ns()
            self.messages.append(Message(ticket, code, flags, data, busy_ns, ended_ns, n_ended))


class Decoder:
    """A converter of one worker's messages and records to responses."""

    def __init__(self, worker_id: int, env_ids: tuple[int, ...]) -> None:
        self._worker_id = worker_id
        self._env_ids = env_ids
        self._worker_rows: SharedRows | None = None
        self._full: list[EnvironmentResponse] = []
        """Responses, by slot, to steps that were written in place and in which no episode ended."""

    def attach(self, worker_rows: SharedRows | None) -> None:
        """Set the shared rows from which later steps are read. None releases the current rows."""
        self._worker_rows = worker_rows
        slots = [] if worker_rows is None else worker_rows.full
        self._full = [EnvironmentResponse(CommandName.STEP, self._worker_id, steps) for steps in slots]

    def record(self, slot: int, flags: int, n_ended: int) -> EnvironmentResponse:
        """Return the response to a step entirely in shared memory. ``flags``, ``n_ended``: from ``SharedRows.put``."""
        if flags & FULL and not n_ended:
            return self._full[slot]
        assert self._worker_rows is not None
        return EnvironmentResponse(CommandName.STEP, self._worker_id, self._worker_rows.read(slot, flags, n_ended))

    def response(self, message: Message, asked: CommandName, slot: int = 0) -> EnvironmentResponse:
        """Convert a message to the response to the command ``asked``. A step may be in ``slot`` of shared memory."""
        if message.code == FAILED_CODE:
            return EnvironmentResponse(CommandName.FAILED, self._worker_id, loads_failure(message.data))
        if not message.data:  # a step without anything but its rows in shared memory
            return self.record(slot, message.flags, message.n_ended)
        try:
            payload = pickle.loads(message.data)
        except Exception as error:  # pickle cannot call the constructor, or only the worker has the class
            text = f"what it returned cannot be unpickled in the trainer: {type(error).__name__}: {error}"
            where = Where(worker_id=self._worker_id, env_ids=self._env_ids, phase=phase_of(asked))
            return EnvironmentResponse(CommandName.FAILED, self._worker_id, env_raised(RuntimeError(text), **where))
        payload, specs, not_begun = payload if message.flags & WITH_SPECS else (payload, None, None)
        if message.flags & IN_MEMORY and self._worker_rows is not None:
            infos, payload = payload, dict(self._worker_rows.read(slot, message.flags, message.n_ended))
            for name in infos.keys() & payload.keys():  # a behavior may have no infos, or no rows in memory
                info, reset_info = infos[name]
                payload[name] = attrs.evolve(payload[name], info=info, reset_info=reset_info)
        return EnvironmentResponse(asked, self._worker_id, payload, specs, not_begun)
