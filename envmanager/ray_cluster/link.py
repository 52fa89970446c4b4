"""The link to one actor: its calls carry commands, and Ray tells of its end."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError, NotPlaced
from envmanager.hosts import descriptors
from envmanager.hosts.link import Link, WorkerPlan
from envmanager.hosts.wire import CODES, FAILED_CODE, Channel, Decoder, Message
from envmanager.observe.events import EventLog
from envmanager.observe.timing import WorkerTimes
from envmanager.ray_cluster.wire import SentRows, brings_step, pack_command, unpack_answer

if TYPE_CHECKING:  # it needs Ray
    from envmanager.ray_cluster.cluster import ActorHandle, Cluster

_NODE_DIED = "NODE_DIED"
_EXIT_CODE = re.compile(r"exit code (\d+)")


TakeIn = Callable[[Any, int], None]
"""Takes an answer in: Ray's future, and when it came (monotonic ns)."""


class Answers:
    """The answers that have come and were not taken in. Ray's threads add them; the trainer's thread takes them in."""

    def __init__(self) -> None:
        self.n_wanted = 1
        """The number of steps for which the trainer is woken: awake, its thread and Ray's delay each other."""
        self.bell_fd = descriptors.register(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        """A descriptor that is readable when answers are to be taken in."""
        self._came: deque[tuple[TakeIn, Any, int]] = deque()
        self._lock = threading.Lock()

    def to(self, take_in: TakeIn) -> Callable[[Any], None]:
        """Return a callback for a call of an actor: ``take_in`` gets its answer, in the trainer's thread."""
        return partial(self._add, take_in)

    def _add(self, take_in: TakeIn, future: Any) -> None:
        self._came.append((take_in, future, time.monotonic_ns()))
        if len(self._came) >= self.n_wanted or not brings_step(future):
            with self._lock:  # or close() could come in between, and the number be another file's
                if self.bell_fd != descriptors.CLOSED:
                    os.eventfd_write(self.bell_fd, 1)

    def drain(self) -> None:
        """Take all answers in."""
        with contextlib.suppress(OSError):  # the bell first: an answer that comes meanwhile rings again
            os.eventfd_read(self.bell_fd)
        while True:
            try:
                take_in, future, at_ns = self._came.popleft()
            except IndexError:
                return
            take_in(future, at_ns)

    def close(self) -> None:
        """Give back the bell."""
        with self._lock:
            self.bell_fd = descriptors.close(self.bell_fd)


class ActorConnection(Channel):
    """An actor as a link's channel and process: its calls are the messages, and a failed call is its end."""

    def __init__(self, make_actor: Callable[[], ActorHandle], answers: Answers) -> None:
        super().__init__()
        self.pidfd = descriptors.register(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.pid: int | None = None
        self.node = ""
        """The host that the actor is on, once it has been placed."""
        self.error = ""
        """Ray's message about its end, else empty."""
        self._exit_name = "KILLED"
        self._make_actor = make_actor
        self._answers = answers
        self._first: tuple[tuple[int, bytes], float] | None = None
        """The first command and its deadline: it is sent again when the actor's node was gone before it ran."""
        self._is_pinging = self._has_ended = False
        self._actor = self._new_actor()

    def _new_actor(self) -> ActorHandle:
        """Ask for an actor, and ask it who it is."""
        actor = self._make_actor()
        actor.hello(self._answers.to(partial(self._said_hello, actor)))
        return actor

    def watched_fds(self) -> list[int]:
        return [self.pidfd, self._answers.bell_fd]

    def push(self, message: tuple[int, bytes], deadline: float) -> None:
        if self._first is None:
            self._first = message, deadline
        if not self._has_ended:
            ticket, command = message
            self._actor.obey(command, self._answers.to(partial(self._answered, self._actor, ticket)))

    def ping(self) -> None:
        """Ask whether the actor lives, so that its end is noticed though no command is under way."""
        if not self._is_pinging:
            self._is_pinging = True
            self._actor.ping(self._answers.to(partial(self._lives, self._actor)))

    def pump(self) -> bool:
        n_before = len(self.messages)
        self._answers.drain()
        return len(self.messages) > n_before

    # Answers.

    def _said_hello(self, actor: ActorHandle, future: Any, _: int) -> None:
        if self._is_answer(actor, future):
            self.pid, self.node = future.result()

    def _lives(self, actor: ActorHandle, future: Any, _: int) -> None:
        self._is_pinging = False
        self._is_answer(actor, future)

    def _answered(self, actor: ActorHandle, ticket: int, future: Any, at_ns: int) -> None:
        if self._is_answer(actor, future):
            answer = unpack_answer(future.result())
            self.messages.append(Message(ticket, answer.code, answer.flags, answer, answer.busy_ns, at_ns))
            if answer.code == CODES[CommandName.CLOSE]:
                self._end()

    def _is_answer(self, actor: ActorHandle, future: Any) -> bool:
        """Return whether the call brought an answer; if it failed, note the actor's end.

        For some seconds Ray may send actors to a node that has gone. One that never ran there is asked for again.
        """
        error = future.exception()
        if error is None or actor is not self._actor:  # else of one that never ran
            return error is None
        if self._has_ended:
            return False
        self._exit_name, self.error = _exit_name(type(error).__name__, str(error)), str(error).strip()
        message, deadline = self._first or ((0, b""), -math.inf)
        if self._exit_name == _NODE_DIED and self.pid is None and time.monotonic() < deadline:
            self._actor = self._new_actor()
            self.push(message, deadline)
        else:
            self._end()
        return False

    # Its end.

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            os.eventfd_write(self.pidfd, 1)

    def signal(self, number: int) -> None:
        """End the actor, whatever it does, with SIGKILL; Ray passes on no other signal."""
        if number == signal.SIGKILL and self.pidfd != descriptors.CLOSED:
            self._actor.kill()
            self._end()

    def core_wait_ns(self) -> int:
        return 0

    def exit_name(self) -> str:
        return self._exit_name

    def release(self) -> None:
        self.pidfd = descriptors.close(self.pidfd)
        self._has_ended = True


class ActorLink(Link):
    """The link to an actor."""

    channel: ActorConnection
    decoder: Decoder

    def __init__(
        self,
        plan: WorkerPlan,
        cluster: Cluster,
        pickled_factory: bytes,
        answers: Answers,
        events: EventLog,
        times: WorkerTimes,
    ) -> None:
        make_actor = partial(cluster.make_actor, plan.worker_id, plan.env_ids, pickled_factory)
        connection = ActorConnection(make_actor, answers)
        super().__init__(plan, connection, events, times)
        self.process = connection
        self.decoder = Decoder(plan.worker_id, plan.env_ids)
        self._cluster = cluster
        self._rows: SentRows | None = None

    def encode(self, ticket: int, command: CommandName, payload: Any) -> tuple[int, bytes]:
        if command in STEPPING and self._rows is not None:
            return ticket, self._rows.pack_step(command, payload)
        return ticket, pack_command(command, payload)

    def _response(self, message: Message) -> EnvironmentResponse:
        message.data = message.data.data
        response = super()._response(message)
        if response.name is CommandName.START:
            self._rows = SentRows(response.payload, self.env_ids)
            self.decoder.attach(self._rows.rows)
        return response

    def step_response(self, message: Message) -> EnvironmentResponse:
        self._note_step(message.busy_ns, message.ended_ns)
        answer = message.data
        if self._rows is not None and answer.code != FAILED_CODE:
            self._rows.receive_steps(answer.steps)
        return self.decoder.step(answer.code, 0, answer.flags, answer.n_ended, answer.data or None)

    def timed_out(self, during: CommandName) -> EnvManagerError:
        if self.channel.pid is not None:
            return super().timed_out(during)
        self.kill()
        return NotPlaced(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            timeout_s=self._timeouts.start_s,
            wanted=self._cluster.wanted_in_words,
            missing=self._cluster.why_no_room(),
            cluster=self._cluster.what_it_has(),
        )

    def last_words(self) -> str:
        return self.channel.error

    def ask_to_close(self) -> None:
        if self.channel.pid is None:  # nothing was made, or it is not known where
            self.kill()
        super().ask_to_close()


def _exit_name(kind: str, text: str) -> str:
    """Return how an actor ended, as far as Ray knows."""
    code = _EXIT_CODE.search(text)
    if code is not None:
        return f"EXIT({code[1]})"
    if "node" in text and ("node has died" in text or "node was" in text):
        return _NODE_DIED
    return {"ActorDiedError": "DIED", "ActorUnavailableError": "UNREACHABLE", "OutOfMemoryError": "OUT_OF_MEMORY"}.get(
        kind, kind
    )
