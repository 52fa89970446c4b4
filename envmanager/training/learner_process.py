"""A trainer that learns in a separate process, the learner, while this process keeps stepping the environments.

::

    this process                                     the learner
    policy ◀── copied ── weights in shared memory ◀─ trainer: replay, optimizer
    add ────── StepInfos, through a socket ────────▶ add, update
    add ────── "turn", after so many steps ────────▶ writes its weights
    add ◀───── "turned": version, figures ────────── …

The learner waits until it has enough steps for its next update. After each turn of ``max_ahead / 2`` steps the policy
takes the weights that the learner had when it had learned from the turn before, for which this process waits. So which
weights act depends on the steps alone, and a training can be repeated. The learner ignores SIGINT (Ctrl-C) and SIGTERM,
because this process may need the learner's state for a last checkpoint. Unless ``learner_timeout_s`` is infinite, waits
for the learner have a timeout. When this process ends, the learner ends too. Over the portable transport, the default
on systems other than Linux, the learner may end later, when its native code releases the GIL.

This process reads the learner's messages from a ``Channel``, and waits only in ``_exchange``. An interrupt never cuts a
message short: what was not written stays queued. The learner's end of the socket blocks.
"""

from __future__ import annotations

import contextlib
import errno
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
from itertools import accumulate
from typing import Any, NoReturn

import attrs
import numpy as np

from envmanager.adapters.factories import pickled
from envmanager.data.steps import StepInfo
from envmanager.errors import EnvManagerError, UsageError
from envmanager.hosts import descriptors
from envmanager.hosts.link import SIGKILL, WorkerProcess
from envmanager.hosts.shared_rows import allocate, map_memory
from envmanager.hosts.wire import MESSAGE, MESSAGE_MARK, Channel
from envmanager.importing import needed_by
from envmanager.options import choose_transport
from envmanager.policy import Policy
from envmanager.system.interrupts import allow_interrupts, defer_interrupts
from envmanager.system.machine import advice, state_of
from envmanager.training.trainer import (
    Arrays,
    Trainer,
    generator_states,
    named,
    of_part,
    require_can_learn_apart,
    restore_generators,
)

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
_PLACE, _ACTING, _TURNED, _GENERATORS = "apart", "apart.acting", "apart.turned", "apart.generators"
"""Key of what a LearnerProcess adds to a trainer's facts; parts of the arrays that it adds to the trainer's."""
_logger = logging.getLogger("envmanager")


class LearnerFailed(EnvManagerError):
    """Error raised when a learner raised an error, exited, timed out or was closed. The text says which."""


class LearnerProcess(Trainer):
    """A trainer that runs another one in a separate process, the learner. The policy acts in the caller's process.

    The weights are up to ``max_ahead`` agent steps older than the newest steps, so only off-policy trainers such as DQN
    can learn like this. ``add`` blocks while the learner is further behind. ``make()`` is called in both processes and
    returns the trainer, whose attribute ``model`` must be the same network in both. ``learner_timeout_s``:
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
        self._who = f"the learner of {self.behavior!r}"
        self.options = getattr(self._here, "options", None)
        self.max_policy_lag, self.n_before_update = math.inf, self._here.n_before_update
        self._model: nn.Module = self._here.model  # type: ignore[attr-defined]
        self._turn = max(1, max_ahead // 2)
        self._n_in_turn = 0
        """Number of agent steps in this turn."""
        self._timeout_s = learner_timeout_s
        self._owner_pid = os.getpid()
        self._n_before = 0
        """Number of agent steps collected in earlier runs of the training, not included in ``_n_sent``."""
        self._n_sent = 0
        self._is_asked = False
        """Whether the learner has not yet said that it has written the weights of the turn before."""
        self._turned: tuple[int, dict[str, float]] | None = None
        """Version and figures of the weights in the shared memory, until the policy takes them."""
        self._learned_version = 0
        """The version of the policy's weights. ``version`` follows with the next ``update``."""
        self._figures: dict[str, float] = {}
        self._n_asked = 0
        self._answer: tuple[int, Any] = 0, None
        """Number of the last request that the learner answered, and the answer."""
        self._has_started = False
        self._failure = ""
        """Reason why the learner is unusable; empty while it is usable."""
        self._unsent = memoryview(b"")
        try:
            started = _start(pickled(make), self._model)
        except LearnerFailed as error:
            if getattr(error.__cause__, "errno", None) != errno.ECONNRESET:
                raise
            started = _start(pickled(make), self._model)  # the helper has ended, so another one starts it
        self._process, self._channel, self._copies = started
        self._release = weakref.finalize(self, _release, self._process, self._channel, self._owner_pid)

    def __enter__(self) -> LearnerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ask the learner to exit, and kill it if it still runs 10 s later. In a forked process, do nothing."""
        if not self._release.alive or self._owner_pid != os.getpid():
            return
        self._failure = self._failure or f"{self._who} was closed."
        with defer_interrupts():
            try:
                with allow_interrupts():
                    deadline = time.monotonic() + _CLOSE_S
                    self._write(pickle.dumps(("close", None)))
                    while not self._is_cut_off() and self._exchange(deadline - time.monotonic()):
                        pass
                    descriptors.wait_for([self._process.pidfd], deadline - time.monotonic())
            finally:
                self._release()
        self._copies = []  # otherwise the shared memory stays mapped

    def add(self, info: StepInfo) -> int:
        own = _only(info, self.behavior)
        before = None if own.previous is None else own.previous.get(self.behavior)
        acted = [] if before is None or not own.actions else before.agent_id[before.acting_rows].tolist()
        n = len(acted) - (0 if own.lost is None else len(own.lost.agents(acted)))
        with defer_interrupts():  # a step that is counted but not sent would never be learned from
            self._n_sent += n
            self._n_in_turn += n
            self._here.collected(self._n_before + self._n_sent)
            self._send("add", own)
            if self._n_in_turn >= self._turn:
                self._await(lambda: not self._is_asked)
                self._take(self._turned)
                self._n_in_turn, self._is_asked = 0, True
                self._send("turn")
        return n

    def is_ready(self) -> bool:
        self._require_usable()
        with defer_interrupts():
            self._exchange(0.0)
            while self._hear():
                pass
        return self._learned_version > self.version

    def update(self, progress: float) -> dict[str, float]:
        """Set ``version`` to that of the policy. Send the learner ``progress``. Return its last update's figures."""
        self.version = self._learned_version
        self._send("progress", progress)
        return self._figures

    def pause(self) -> None:
        """Wait until the learner has learned from all steps sent to it, and use its newest weights and version."""
        self._take(self._ask("pause"))
        self.version = self._learned_version

    def greedy_policy(self) -> Policy:
        return self._here.greedy_policy()

    def greedy_module(self) -> nn.Module:
        return self._here.greedy_module()

    def environments_were_reset(self) -> None:
        self._send("reset")

    def not_finite(self) -> str | None:
        if self._failure:
            return self._here.not_finite()
        return self._ask("not_finite")  # type: ignore[no-any-return]

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays, facts = self._ask("state")  # after which no weights are asked for
        acting, own = self._here.state()
        turned = {} if self._turned is None else {name: shared.clone().numpy() for name, _, shared in self._copies}
        arrays = {**arrays, **named(_ACTING, acting), **named(_TURNED, turned)}
        place = {"acting": own, "version": self.version, "learned_version": self._learned_version}
        place |= {"acting_figures": self._figures, "turned": self._turned, "n_in_turn": self._n_in_turn}
        return arrays, {**facts, _PLACE: {**facts[_PLACE], **place}}

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        acting, turned = of_part(_ACTING, arrays), of_part(_TURNED, arrays)
        of_learner = {name: arrays[name] for name in arrays if not name.startswith((f"{_ACTING}.", f"{_TURNED}."))}
        learned = self._ask("restore", (of_learner, dict(facts)))
        self._n_before = int(facts.get("n_steps", 0)) - self._n_sent
        place = facts.get(_PLACE)
        if place is None:  # it was no LearnerProcess
            self._take(learned)
            self.version = self._learned_version
        else:
            self._here.restore(acting, place["acting"])
            self.version, self._learned_version = place["version"], place["learned_version"]
            self._here.policy.version = self._learned_version  # type: ignore[attr-defined]
            self._figures, self._n_in_turn = place["acting_figures"], place["n_in_turn"]
            self._turned = None if place["turned"] is None else (place["turned"][0], place["turned"][1])
            with torch.no_grad():
                for name, _, shared in self._copies if turned else ():
                    array = np.array(turned[name]).reshape(shared.shape)  # a file has [1] for a number
                    shared.copy_(torch.from_numpy(array))
        self._here.collected(self._n_before + self._n_sent)

    def _take(self, learned: tuple[int, dict[str, float]] | None) -> None:
        """Let the policy act with the weights in the shared memory, whose version and figures are ``learned``."""
        if learned is None:
            return
        self._turned, (self._learned_version, self._figures) = None, learned
        self._here.policy.version = self._learned_version  # type: ignore[attr-defined]
        with torch.no_grad():
            for _, tensor, shared in self._copies:
                tensor.copy_(shared)

    def _send(self, what: str, payload: Any = None) -> None:
        self._require_usable()
        with defer_interrupts():
            self._write(pickle.dumps((what, payload), protocol=5))
            self._await(lambda: not self._unsent)

    def _ask(self, what: str, payload: Any = None) -> Any:
        """Send a request and return the learner's answer. Discard answers to earlier, interrupted requests."""
        with defer_interrupts():
            self._n_asked += 1
            number = self._n_asked
            self._send(what, (number, payload))
            self._await(lambda: self._answer[0] == number)
            (_, answer), self._answer = self._answer, (number, None)
        return answer

    def _await(self, is_done: Callable[[], bool]) -> None:
        """Handle messages until ``is_done()``. If the learner neither reads nor sends any bytes in time, kill it.

        Raises LearnerFailed if the learner fails. The caller must defer interrupts.
        """
        since, is_warned = time.monotonic(), False
        while not is_done():
            if self._hear():
                continue
            timeout_s = self._timeout_s if self._has_started else max(self._timeout_s, _START_S)
            half_s, does_what = timeout_s / 2, "not responded" if self._has_started else "been starting"
            left_s = since + (timeout_s if is_warned else half_s) - time.monotonic()
            if self._exchange(left_s):
                since, is_warned = time.monotonic(), False
            elif left_s <= 0 and not is_warned:
                is_warned, text = True, "%s has %s for %g s; after %g s more it is killed (learner_timeout_s)."
                _logger.warning(text, self._who, does_what, half_s, half_s)
            elif left_s <= 0:
                state = _STATES.get(state_of(self._process.pid or 0), "unknown")
                self._process.signal(SIGKILL)
                self._fail(
                    f"has {does_what} for {timeout_s:g} s and was killed; its process was {state}. If it was only "
                    "busy, raise learner_timeout_s."
                )

    def _hear(self) -> bool:
        """Handle the next message that was read. Return False if there is none. The caller must defer interrupts."""
        if not self._channel.messages:
            if self._channel.broken:
                self._process.signal(SIGKILL)
                self._fail(f"sent {self._channel.broken} and was killed.")
            if self._is_cut_off():
                self._require_usable()  # after a close in another thread
                self._fail(f"has ended ({self._process.exit_name()}).")
            return False
        what, payload = pickle.loads(self._channel.messages.pop(0).data)
        self._has_started = True
        if what == "failed":
            self._fail(f"raised:\n{payload}")
        elif what == "answer":
            self._answer = payload
        elif what == "turned":
            self._is_asked, self._turned = False, payload
        return True

    def _exchange(self, timeout_s: float) -> bool:
        """Wait until the socket is ready, then write queued bytes and read new ones. Return False only on timeout."""
        fd = self._channel.fd
        if self._is_cut_off():
            return True
        with allow_interrupts():
            ready = descriptors.wait_for([fd], timeout_s, writable=[fd] if self._unsent else [])
        self._write()
        with self._channel.lock:
            self._channel.pump()
        return bool(ready)

    def _is_cut_off(self) -> bool:
        return self._channel.hung_up or self._channel.fd == descriptors.CLOSED

    def _write(self, more: bytes = b"") -> None:
        """Queue ``more``, and write as much as possible without blocking. The caller must defer interrupts."""
        with self._channel.lock:
            queued = b"".join(filter(None, (self._unsent, more))) if more else self._unsent
            self._unsent = self._channel.push(queued, deadline=0.0)

    def _fail(self, what: str) -> NoReturn:
        self._failure = f"{self._who} {what}"
        raise LearnerFailed(self._failure)

    def _require_usable(self) -> None:
        if self._owner_pid != os.getpid():
            raise UsageError(f"{self._who} can only be used by the process that started it.")
        if self._failure:
            raise LearnerFailed(self._failure)


def _start(
    make: bytes, model: nn.Module
) -> tuple[WorkerProcess, Channel, list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Start a learner that writes its weights to shared memory. Return process, channel, and tensors to copy."""
    from envmanager.processes.portable import PortableProcess, open_memory

    is_portable = choose_transport() == "portable"
    descriptors.open_standard()
    ours, theirs = descriptors.connected_sockets()
    ours.setblocking(False)
    channel = Channel()
    channel.open(descriptors.register(ours.detach()), descriptors.CLOSED)
    memory = open_memory()
    try:
        with theirs:
            state = model.state_dict(keep_vars=True)
            allocate(memory, _offsets(state)[-1], "the weights")
            copies = [(name, state[name], shared) for name, shared in _lay_out(state, memory).items()]
            for _, tensor, shared in copies:
                shared.copy_(tensor.detach())
            seed = (torch.initial_seed() + 1) % 2**63  # not this process's random numbers
            who, function = "envmanager-learner", f"{__name__}:_learn"
            arguments = make, torch.get_num_threads(), seed
            process: WorkerProcess
            if is_portable:
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


def _offsets(state: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the offsets of a model's tensors in the shared memory, and the size of the memory, in bytes."""
    sizes = (tensor.numel() * tensor.element_size() for tensor in state.values())
    *offsets, end = accumulate((math.ceil(n / _ALIGNED_BYTES) * _ALIGNED_BYTES for n in sizes), initial=0)
    return [*offsets, max(1, end)]


def _lay_out(state: Mapping[str, torch.Tensor], memory: int | str) -> dict[str, torch.Tensor]:
    """Return tensors in shared memory, by name, with the shapes and dtypes of the tensors in a model's state."""
    *offsets, size_bytes = _offsets(state)
    mapped, tensors = map_memory(memory, size_bytes), {}
    for (name, tensor), offset in zip(state.items(), offsets, strict=True):
        n, dtype = tensor.numel(), tensor.dtype
        flat = torch.frombuffer(mapped, dtype=dtype, count=n, offset=offset) if n else torch.empty_like(tensor)
        tensors[name] = flat.view(tensor.shape)
    return tensors


def _release(process: WorkerProcess, channel: Channel, owner_pid: int) -> None:
    """Kill the learner if it still runs, and release its process and channel. Do nothing in a forked process."""
    if os.getpid() == owner_pid:
        process.signal(SIGKILL)
        process.release()
        with channel.lock:
            channel.close()


def _only(info: StepInfo, behavior: str) -> StepInfo:
    """Return the part of ``info`` that the learner needs: one behavior, without infos and previous observations."""

    def part(of: Any, *left_out: str) -> Any:
        own = {} if of is None else {name: steps for name, steps in of.items() if name == behavior}
        return {name: attrs.evolve(steps, **dict.fromkeys(left_out)) for name, steps in own.items()}

    previous = None if info.previous is None else part(info.previous, "obs", "final_obs", "info", "reset_info")
    current, actions = part(info.current, "info", "reset_info"), part(info.actions) or None
    return StepInfo(previous, current, actions, info.worker_id, info.lost)


def _learn(inherited: list[Any], make: bytes, n_threads: int, seed: int) -> None:
    """Run a learner with the pickled ``make``. ``inherited`` holds the socket's descriptor and the shared memory."""
    fd, memory = inherited
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    with socket.socket(fileno=descriptors.register(fd)) as connection:
        try:
            torch.set_num_threads(n_threads)
            torch.manual_seed(seed)
            trainer: Any = pickle.loads(make)()
            weights = _lay_out(trainer.model.state_dict(), memory)
            if isinstance(memory, int):
                os.close(memory)
            with torch.no_grad():
                trainer.model.load_state_dict(weights)
            _serve(connection, trainer, weights)
        except BaseException:
            with contextlib.suppress(OSError):  # the other process has exited
                tell(connection, "failed", traceback.format_exc())


def tell(connection: socket.socket, what: str, payload: Any) -> None:
    """Send a message from the learner. Block, without a timeout, until it is entirely written."""
    data = pickle.dumps((what, payload), protocol=5)
    connection.sendall(MESSAGE.pack(0, 0, 0, MESSAGE_MARK, 0, len(data), 0, 0))
    connection.sendall(data)


def _serve(connection: socket.socket, trainer: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Learn from what is received until "close". While an update is due, no message is read: the sender may wait."""
    progress, figures = 0.0, dict[str, float]()

    def publish() -> tuple[int, dict[str, float]]:
        with torch.no_grad():
            for name, tensor in trainer.model.state_dict().items():
                weights[name].copy_(tensor)
        return trainer.version, figures

    tell(connection, "started", None)
    received = connection.makefile("rb")
    while True:
        if trainer.is_ready():
            figures = trainer.update(progress)
            tell(connection, "alive", None)
            continue
        what, payload = pickle.load(received)
        if what == "add":
            trainer.add(payload)
            tell(connection, "alive", None)
        elif what == "turn":
            tell(connection, "turned", publish())
        elif what == "progress":
            progress = payload
        elif what == "reset":
            trainer.environments_were_reset()
        elif what == "close":
            return
        else:
            answer: Any = None
            number, told = payload
            if what == "pause":  # which waits until all earlier steps are learned from
                answer = publish()
            elif what == "not_finite":
                answer = trainer.not_finite()
            elif what == "state":
                arrays, facts = trainer.state()
                place = {"progress": progress, "figures": figures}
                answer = {**arrays, **named(_GENERATORS, generator_states())}, {**facts, _PLACE: place}
            elif what == "restore":
                arrays, facts = told
                trainer.restore(arrays, facts)
                if _PLACE in facts:
                    progress, figures = facts[_PLACE]["progress"], facts[_PLACE]["figures"]
                    restore_generators(of_part(_GENERATORS, arrays))
                answer = publish()
            tell(connection, "answer", (number, answer))
