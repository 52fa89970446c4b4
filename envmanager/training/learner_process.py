"""A trainer that learns in a separate process, the learner, while this process keeps stepping the environments.

::

    this process                                     the learner
    policy ◀── weights in shared memory ◀─────────── trainer: replay, optimizer
    add ────── StepInfos, through a socket ────────▶ add, update
    add, is_ready ◀── counts of steps and updates ── add, update

The learner waits until it has enough steps for its next update. This process waits while the learner is more than
``max_ahead`` steps behind. The learner ignores SIGINT (Ctrl-C) and SIGTERM, because this process may need the learner's
state for a last checkpoint. Unless ``learner_timeout_s`` is infinite, waits for the learner have a timeout. When this
process ends, the learner ends too. Over the portable transport, the default on systems other than Linux, the learner
may end later, when its native code releases the GIL.

This process reads the learner's messages from a ``Channel``, and waits only in ``_exchange``. An interrupt never cuts a
message short: what was not written stays queued. The learner's end of the socket blocks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import cloudpickle
import numpy as np

from envmanager.data.steps import StepInfo
from envmanager.errors import EnvManagerError, UsageError
from envmanager.hosts import descriptors
from envmanager.hosts.link import SIGKILL
from envmanager.hosts.shared_rows import allocate, map_memory
from envmanager.hosts.wire import MESSAGE, MESSAGE_MARK, Channel
from envmanager.importing import needed_by
from envmanager.options import choose_transport
from envmanager.policy import Policy
from envmanager.system.interrupts import allow_interrupts, defer_interrupts
from envmanager.system.machine import advice, state_of
from envmanager.training.trainer import Arrays, Trainer, require_can_learn_apart

if TYPE_CHECKING:
    from envmanager.processes.portable import PortableProcess
    from envmanager.processes.starting import Process

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import nn


LEARNER_TIMEOUT_S = 40.0
"""Default of the option ``learner_timeout_s``, in seconds."""
_START_S = 120.0
"""Minimum timeout, in seconds, for the learner's start, during which it imports PyTorch and makes the trainer."""
_CLOSE_S = 10.0
_STATES = {"R": "running", "S": "asleep", "D": "waiting for a device", "T": "stopped (SIGSTOP)", "t": "traced"}
_ALIGNED_BYTES = 64
"""Alignment of the tensors in shared memory, in bytes."""
_logger = logging.getLogger("envmanager")


class LearnerFailed(EnvManagerError):
    """Error raised when a learner raised an error, exited, timed out or was closed. The text says which."""


class LearnerProcess(Trainer):
    """A trainer that runs another one in a separate process, the learner. The policy acts in the caller's process.

    The weights change while the policy acts, so only off-policy trainers such as DQN can learn like this. ``make()``
    is called in both processes and returns the trainer, whose attribute ``model`` must be the same network in both.
    ``max_ahead``: number of agent steps that the learner may be behind before ``add`` blocks. ``learner_timeout_s``:
    seconds that a method waits for the learner to send or read data before killing the learner (at least 120 during
    the start); ``math.inf`` for no limit. Call ``close()``, or use a ``with`` statement. Raises UsageError for invalid
    options and unsuitable trainers. Methods that need the learner raise LearnerFailed once it has failed or is closed.
    """

    learns_while_playing = True

    def __init__(
        self, make: Callable[[], Trainer], *, max_ahead: int = 1000, learner_timeout_s: float = LEARNER_TIMEOUT_S
    ) -> None:
        if max_ahead < 1:
            raise UsageError(f"max_ahead must be at least 1, not {max_ahead}.")
        if not learner_timeout_s > 0:
            raise UsageError(f"learner_timeout_s must be a number of seconds above 0, not {learner_timeout_s}.")
        self._here = make()
        if not isinstance(getattr(self._here, "model", None), nn.Module):
            raise UsageError(f"{type(self._here).__name__} has no `model`, so its weights cannot be shared.")
        require_can_learn_apart(self._here)
        self.behavior, self.policy = self._here.behavior, self._here.policy
        self.options = getattr(self._here, "options", None)
        self.max_policy_lag = math.inf
        self._model: nn.Module = self._here.model  # type: ignore[attr-defined]
        self._max_ahead = max_ahead
        self._timeout_s = learner_timeout_s
        self._owner_pid = os.getpid()
        self._n_before = 0
        """Number of agent steps collected in earlier runs of the training, not included in ``_n_sent``."""
        self._n_sent = 0
        self._n_learned = 0
        self._learned_version = 0
        self._figures: dict[str, float] = {}
        self._n_asked = 0
        self._answer: tuple[int, Any] = 0, None
        """Number of the last request that the learner answered, and the answer."""
        self._has_started = False
        self._failure = ""
        """Reason why the learner is unusable; empty while it is usable."""
        self._unsent: list[memoryview] = []
        self._process, self._channel, self._copies = _start(cloudpickle.dumps(make), self._model)
        self._release = weakref.finalize(self, _release, self._process, self._channel, self._owner_pid)

    def __enter__(self) -> LearnerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ask the learner to exit, and kill it if it still runs 10 s later. In a forked process, do nothing."""
        if not self._release.alive or self._owner_pid != os.getpid():
            return
        self._failure = self._failure or f"the learner of {self.behavior!r} was closed."
        with defer_interrupts():
            try:
                with allow_interrupts():
                    deadline = time.monotonic() + _CLOSE_S
                    self._queue("close")
                    while not self._is_cut_off() and self._exchange(deadline - time.monotonic()):
                        pass
                    descriptors.wait_for([self._process.pidfd], deadline - time.monotonic())
            finally:
                self._release()
        self._copies = []
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            tensor.data = tensor.data.clone()  # otherwise the shared memory stays mapped

    def add(self, info: StepInfo) -> int:
        own = _only(info, self.behavior)
        before = None if own.previous is None or own.lost is not None else own.previous.get(self.behavior)
        n = 0 if before is None or not own.actions else len(before.acting_rows)
        with defer_interrupts():  # a step that is counted but not sent would never be learned from
            self._n_sent += n
            self._here.collected(self._n_before + self._n_sent)
            self._send("add", own)
            while self._n_sent - self._n_learned > self._max_ahead:
                self._hear_or_wait()
        return n

    def is_ready(self) -> bool:
        self._require_usable()
        with defer_interrupts():
            while self._hear():
                pass
        return self._learned_version > self.version

    def update(self, progress: float) -> dict[str, float]:
        """Use the learner's newest weights and ``version``. Send it ``progress``. Return its last update's figures."""
        self._use_learned()
        self._send("progress", progress)
        return self._figures

    def pause(self) -> None:
        """Wait until the learner has learned from all steps sent to it. Set ``version`` to the learner's version."""
        self._ask("pause")
        self._use_learned()

    def greedy_policy(self) -> Policy:
        return self._here.greedy_policy()

    def greedy_module(self) -> nn.Module:
        return self._here.greedy_module()

    def environments_were_reset(self) -> None:
        self._send("reset")

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return self._ask("state")  # type: ignore[no-any-return]

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        self._learned_version = int(self._ask("restore", (dict(arrays), dict(facts))))
        self._use_learned()
        self._n_before = int(facts.get("n_steps", 0)) - self._n_sent
        self._here.collected(self._n_before + self._n_sent)

    def _use_learned(self) -> None:
        """Set ``version`` to the learner's, and copy the learner's weights to a model that is on a GPU."""
        self.version = self._here.policy.version = self._learned_version  # type: ignore[attr-defined]
        with torch.no_grad():
            for tensor, shared in self._copies:
                tensor.copy_(shared)

    def _send(self, what: str, payload: Any = None) -> None:
        self._require_usable()
        with defer_interrupts():
            self._queue(what, payload)
            while self._unsent:
                self._wait()

    def _queue(self, what: str, payload: Any = None) -> None:
        """Queue a message, and write as much as possible without blocking. The caller must defer interrupts."""
        self._unsent.append(memoryview(pickle.dumps((what, payload), protocol=5)))
        self._write()

    def _ask(self, what: str, payload: Any = None) -> Any:
        """Send a request and return the learner's answer. Discard answers to earlier, interrupted requests."""
        with defer_interrupts():
            self._n_asked += 1
            number = self._n_asked
            self._send(what, (number, payload))
            while self._answer[0] != number:
                self._hear_or_wait()
            (_, answer), self._answer = self._answer, (number, None)
        return answer

    def _hear_or_wait(self) -> None:
        if not self._hear():
            self._wait()

    def _hear(self) -> bool:
        """Handle the learner's next message. Return False if there is none. The caller must defer interrupts."""
        if not self._channel.messages:
            self._read()
        if not self._channel.messages:
            if self._channel.broken:
                self._process.signal(SIGKILL)
                self._fail(f"the learner of {self.behavior!r} sent {self._channel.broken} and was killed.")
            if self._is_cut_off():
                self._require_usable()  # after a close in another thread
                self._fail(f"the learner of {self.behavior!r} has ended ({self._process.exit_name()}).")
            return False
        what, payload = pickle.loads(self._channel.messages.pop(0).data)
        self._has_started = True
        if what == "failed":
            self._fail(f"the learner of {self.behavior!r} raised:\n{payload}")
        elif what == "answer":
            self._answer = payload
        elif what == "learned":
            self._n_learned = payload
        elif what == "updated":
            self._learned_version, self._figures = payload
        return True

    def _wait(self) -> None:
        """Wait until the learner reads or sends bytes. On timeout, kill the learner and raise LearnerFailed."""
        who = f"the learner of {self.behavior!r} has {'not responded' if self._has_started else 'been starting'}"
        timeout_s = self._timeout_s if self._has_started else max(self._timeout_s, _START_S)
        half_s = timeout_s / 2
        if self._exchange(half_s):
            return
        _logger.warning("%s for %g s; after %g s more it is killed (learner_timeout_s).", who, half_s, half_s)
        if self._exchange(half_s):
            return
        state = _STATES.get(state_of(self._process.pid), "unknown")
        self._process.signal(SIGKILL)
        self._fail(
            f"{who} for {timeout_s:g} s and was killed; its process was {state}. If it was only busy, raise "
            "learner_timeout_s."
        )

    def _exchange(self, timeout_s: float) -> bool:
        """Wait until the socket is ready, then write queued bytes and read new ones. Return False only on timeout."""
        deadline = time.monotonic() + timeout_s
        while (fd := self._channel.fd) != descriptors.CLOSED and not self._channel.hung_up:
            with allow_interrupts():
                writable = [fd] if self._unsent else []
                ready = descriptors.wait_for([fd], deadline - time.monotonic(), writable=writable)
            if ready:
                self._write()
                self._read()
                break
            if time.monotonic() >= deadline:
                return False
        return True

    def _is_cut_off(self) -> bool:
        return self._channel.hung_up or self._channel.fd == descriptors.CLOSED

    def _write(self) -> None:
        with self._channel.lock:
            while self._unsent:
                try:
                    n_written = descriptors.write(self._channel.fd, self._unsent[0])
                except BlockingIOError:
                    return
                except OSError:  # the learner's end is closed, which the next read reports
                    self._unsent.clear()
                    return
                self._unsent[0] = self._unsent[0][n_written:]
                if not self._unsent[0]:
                    del self._unsent[0]

    def _read(self) -> None:
        with self._channel.lock:
            self._channel.pump()
            if self._is_cut_off():
                self._unsent.clear()

    def _fail(self, why: str) -> NoReturn:
        self._failure = why
        raise LearnerFailed(why)

    def _require_usable(self) -> None:
        if self._owner_pid != os.getpid():
            raise UsageError(f"the learner of {self.behavior!r} can only be used by the process that started it.")
        if self._failure:
            raise LearnerFailed(self._failure)


def _start(
    pickled: bytes, model: nn.Module
) -> tuple[Process | PortableProcess, Channel, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Start a learner that writes its weights to shared memory. Return process, channel, and tensors to copy.

    The model's tensors on the CPU are moved to the shared memory. The tensors to copy are pairs of a tensor on a GPU
    and the shared tensor that holds its newest value.
    """
    from envmanager.processes.portable import PortableProcess, open_memory

    transport = choose_transport()
    descriptors.open_standard()
    ours, theirs = descriptors.connected_sockets()
    ours.setblocking(False)
    channel = Channel()
    channel.open(descriptors.register(ours.detach()), descriptors.CLOSED)
    memory = open_memory()
    try:
        with theirs:
            state = model.state_dict(keep_vars=True)
            allocate(memory, _size_of(state), "the weights")
            copies = []
            for name, shared in _lay_out(state, memory).items():
                shared.copy_(state[name].detach())
                if state[name].device.type == "cpu":
                    state[name].data = shared
                else:
                    copies.append((state[name], shared))
            who, function, arguments = "envmanager-learner", f"{__name__}:_learn", (pickled, torch.get_num_threads())
            process: Process | PortableProcess
            if transport == "portable":
                process = PortableProcess(
                    who, function, arguments, connection=theirs, memory=memory, environ=os.environ
                )
            else:
                from envmanager.processes.starting import start  # imported here because it needs Linux

                process = start("spawn", who, function, arguments, fds=(theirs.fileno(), int(memory)))
            return process, channel, copies
    except BaseException as error:
        channel.close()
        if isinstance(error, OSError):
            raise LearnerFailed(f"the learner could not be started: {error}. {advice(error)}".strip()) from error
        raise
    finally:
        if isinstance(memory, int):
            descriptors.close(memory)


def _room_for(tensor: torch.Tensor) -> int:
    n_bytes: int = tensor.numel() * tensor.element_size()
    return math.ceil(n_bytes / _ALIGNED_BYTES) * _ALIGNED_BYTES


def _size_of(state: Mapping[str, torch.Tensor]) -> int:
    return max(1, sum(map(_room_for, state.values())))


def _lay_out(state: Mapping[str, torch.Tensor], memory: int | str) -> dict[str, torch.Tensor]:
    """Return tensors in shared memory, by name, with the shapes and dtypes of the tensors in a model's state."""
    mapped, offset = map_memory(memory, _size_of(state)), 0
    tensors = {}
    for name, tensor in state.items():
        if tensor.numel() == 0:
            tensors[name] = torch.empty_like(tensor)
        else:
            flat = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            tensors[name] = flat.view(tensor.shape)
        offset += _room_for(tensor)
    return tensors


def _release(process: Process | PortableProcess, channel: Channel, owner_pid: int) -> None:
    """Kill the learner if it still runs, and release its process and channel. Do nothing in a forked process."""
    if os.getpid() == owner_pid:
        process.signal(SIGKILL)
        process.release()
        with channel.lock:
            channel.close()


def _only(info: StepInfo, behavior: str) -> StepInfo:
    """Return the part of ``info`` that the learner needs: one behavior, without infos and previous observations."""

    def part(of: Any) -> Any:
        return {behavior: of[behavior]} if of is not None and behavior in of else {}

    previous = None if info.previous is None else part(info.previous)
    if previous:
        before = previous[behavior]
        previous = {behavior: attrs.evolve(before, obs=None, final_obs=None, info=None, reset_info=None)}
    current = {name: attrs.evolve(steps, info=None, reset_info=None) for name, steps in part(info.current).items()}
    actions = None if info.actions is None or behavior not in info.actions else part(info.actions)
    return StepInfo(previous, current, actions, info.worker_id, info.lost)


def _learn(inherited: list[Any], pickled: bytes, n_threads: int) -> None:
    """Run a learner with the pickled ``make``. ``inherited`` holds the socket's descriptor and the shared memory."""
    fd, memory = inherited
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    with socket.socket(fileno=descriptors.register(fd)) as connection:
        try:
            torch.set_num_threads(n_threads)
            trainer: Any = cloudpickle.loads(pickled)()
            weights = _lay_out(trainer.model.state_dict(), memory)
            if isinstance(memory, int):
                os.close(memory)
            with torch.no_grad():
                trainer.model.load_state_dict(weights)
            _Learner(connection, trainer, weights).run()
        except BaseException:
            with contextlib.suppress(OSError):  # the other process has exited
                tell(connection, "failed", traceback.format_exc())


def tell(connection: socket.socket, what: str, payload: Any) -> None:
    """Send a message from the learner. Block, without a timeout, until it is entirely written."""
    data = pickle.dumps((what, payload), protocol=5)
    connection.sendall(MESSAGE.pack(0, 0, 0, MESSAGE_MARK, 0, len(data), 0, 0))
    connection.sendall(data)


class _Learner:
    """The loop of the learner's process. It reads no message while an update is due, so the sender may have to wait."""

    def __init__(self, connection: socket.socket, trainer: Any, weights: dict[str, torch.Tensor]) -> None:
        self._connection = connection
        self._trainer = trainer
        self._weights = weights
        self._progress = 0.0
        self._n_learned = 0

    def run(self) -> None:
        self._tell("started", None)
        received = self._connection.makefile("rb")
        goes_on = True
        while goes_on:
            if self._trainer.is_ready():
                figures = self._trainer.update(self._progress)
                self._publish()
                self._tell("updated", (self._trainer.version, figures))
            else:
                goes_on = self._obey(*pickle.load(received))

    def _tell(self, what: str, payload: Any) -> None:
        tell(self._connection, what, payload)

    def _obey(self, what: str, payload: Any) -> bool:
        if what == "add":
            self._n_learned += self._trainer.add(payload)
            self._tell("learned", self._n_learned)
        elif what == "progress":
            self._progress = payload
        elif what == "reset":
            self._trainer.environments_were_reset()
        elif what in ("pause", "state", "restore"):
            number, told = payload
            self._tell("answer", (number, self._answer(what, told)))
        return what != "close"

    def _answer(self, what: str, told: Any) -> Any:
        if what == "state":
            return self._trainer.state()
        if what == "restore":
            self._trainer.restore(*told)
            self._publish()
            return self._trainer.version
        return None  # "pause" is read only when no update is due, so all earlier steps are learned from

    def _publish(self) -> None:
        with torch.no_grad():
            for name, tensor in self._trainer.model.state_dict().items():
                self._weights[name].copy_(tensor)
