"""The link to one Ray actor, and the poller of all links to Ray actors.

::

    answer, in Ray's thread ── bring ──▶ queue and bell ── drain, in the trainer's thread ──▶ ActorConnection

Ray's threads write to a socket, the bell, to wake the trainer. When an actor ends, its pending call fails. While
collecting responses, the trainer pings idle actors, at most once a second, so that their ends are detected too.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError, NotPlaced
from envmanager.hosts import descriptors
from envmanager.hosts.life import State, WorkerPlan
from envmanager.hosts.link import SIGKILL, Link
from envmanager.hosts.poller import Poller
from envmanager.hosts.wire import CODES, COMMAND, STEP_CODE, Channel, Decoder, Message
from envmanager.observe.events import EventLog
from envmanager.observe.timing import WorkerTimes
from envmanager.ray_cluster.actor import WHO, WHO_CODE, Answer, SentRows, unpack_answer

if TYPE_CHECKING:  # it needs Ray
    from envmanager.ray_cluster.cluster import ActorHandle, Cluster

_ASK_EVERY_S = 1.0
_BELL_BYTES = 1 << 12
_NODE_DIED = "NODE_DIED"
_EXIT_NAMES = {"ActorDiedError": "DIED", "ActorUnavailableError": "UNREACHABLE", "OutOfMemoryError": "OUT_OF_MEMORY"}


class ActorConnection(Channel):
    """A connection that sends messages as calls to a Ray actor. ActorLinks use it as ``channel`` and as ``process``."""

    def __init__(
        self,
        make_actor: Callable[..., ActorHandle],
        poller: ActorPoller,
        place_s: float = math.inf,
        actor: ActorHandle | None = None,
    ) -> None:
        """``place_s``: time without room on a node after which the actor may be squeezed. ``actor``: one to use."""
        super().__init__()
        self.pidfd, self._end_fd = descriptors.socket_pair()
        self.pid: int | None = None
        self.node = ""
        """Name of the host on which the actor runs; empty until the actor has been placed."""
        self.node_id = ""
        self.is_squeezed = self.has_room = False
        self._asked_at, self._place_s = time.monotonic(), place_s
        self._place: ActorHandle | None = None
        """Actor that waits for a place in the name of one that is squeezed, and when it ``has_room`` goes on for it."""
        self.error = ""
        """Ray's message about the actor's end; empty before the end."""
        self._exit_name = "KILLED"
        self._make_actor = make_actor
        self._poller = poller
        self._first: tuple[bytes, float] = b"", -math.inf
        """First command and its deadline. A new actor receives the command if the node dies before the actor runs."""
        self._is_asked = self._has_ended = False
        self._actor = actor or make_actor()
        self.ask()

    def watched_fds(self) -> list[int]:
        return [self.pidfd, self._poller.answers_fd]

    def ask(self) -> None:
        """Ping the actor unless a ping is pending, so that its end is detected even without a pending command."""
        if not self._is_asked:
            self._is_asked = True
            self._call(WHO)

    def push(self, message: bytes, deadline: float) -> None:
        if not self._first[0]:
            self._first = message, deadline
        if not self._has_ended:
            self._call(message)

    def _call(self, command: bytes) -> None:
        self._actor.obey(command, partial(self._poller.bring, self, self._actor))

    def pump(self) -> bool:
        n_before = len(self.messages)
        self._poller.drain()
        return len(self.messages) > n_before

    def take_in(self, actor: ActorHandle, answer: Answer | BaseException) -> None:
        """Store the answer to a call, or the error with which the actor ended. Ignore answers from replaced actors."""
        if self._place is not None and actor is self._place:
            self.has_room = isinstance(answer, Answer)
            if not self.has_room:  # its node has died
                self._place = None
        elif actor is not self._actor:  # that actor never ran and was replaced
            pass
        elif isinstance(answer, BaseException):
            self._note_end(answer)
        elif answer.code == WHO_CODE:
            self._is_asked = False
            self.pid, self.node, self.node_id = pickle.loads(answer.data)
        else:
            self.messages.append(answer)
            if answer.code == CODES[CommandName.CLOSE]:
                self._end()

    @property
    def waits_for_place(self) -> bool:
        """Whether an actor waits for a place in the name of this one."""
        return self._place is not None and not self.has_room

    def squeeze_if_due(self) -> bool:
        """Ask for an actor without CPUs if this one has found no place in time. Return whether that was so."""
        if self._has_ended or self.pid is not None or time.monotonic() < self._asked_at + self._place_s:
            return False
        self.is_squeezed = True
        self._actor.kill()
        self.await_place()
        self._begin_again(squeezed=True)
        return True

    def await_place(self) -> None:
        """Let another actor wait for a place, if this one is squeezed and none does."""
        if self.is_squeezed and self._place is None and not self._has_ended:
            self._place = self._make_actor(node_id="")
            self._place.obey(WHO, partial(self._poller.bring, self, self._place))

    def take_place(self) -> ActorHandle | None:
        """Return the actor that has found a place, if there is one. End one that waits."""
        place, self._place = self._place, None
        if place is not None and not self.has_room:
            place.kill()
        return place if self.has_room else None

    def _begin_again(self, **how: Any) -> None:
        """Ask for another actor in place of one that never ran, and send it the first command."""
        self._actor, self._is_asked, self.error, self._exit_name = self._make_actor(**how), False, "", "KILLED"
        self.ask()
        if self._first[0]:
            self._call(self._first[0])

    # The actor's end.

    def _note_end(self, error: BaseException) -> None:
        """Record how the actor ended. If its node died before it ran, send the first command to a new actor instead.

        Ray may place actors on a node for some seconds after it has died. After the command's deadline, record the end.
        """
        if self._has_ended:
            return
        kind, self.error = type(error).__name__, str(error).strip()
        code = re.search(r"exit code (\d+)", self.error)
        if code is not None:
            self._exit_name = f"EXIT({code[1]})"
        elif "node has died" in self.error or "node was" in self.error:
            self._exit_name = _NODE_DIED
        else:
            self._exit_name = _EXIT_NAMES.get(kind, kind)
        if self._exit_name == _NODE_DIED and self.pid is None and time.monotonic() < self._first[1]:
            self._begin_again(squeezed=self.is_squeezed)
        else:
            self._end()

    def _end(self) -> None:
        with self.lock:
            self._has_ended = True
            self._end_fd = descriptors.close(self._end_fd)  # this makes ``pidfd`` readable

    def signal(self, number: int) -> None:
        """Kill the actor if ``number`` is SIGKILL. Ignore other signals, since Ray cannot send them."""
        if number == SIGKILL and self.pidfd != descriptors.CLOSED:
            self._actor.kill()
            self._end()

    def exit_name(self) -> str:
        return self._exit_name

    def release(self) -> None:
        self._end()
        if self._place is not None:
            self._place.kill()
        self.pidfd = descriptors.close(self.pidfd)


class ActorLink(Link):
    """The link to a worker in a Ray actor. It sends actions and receives steps as bytes of SentRows if they fit."""

    channel: ActorConnection
    decoder: Decoder
    _rows: SentRows
    """Rows of the worker, set when the worker has started."""

    def __init__(
        self, plan: WorkerPlan, connection: ActorConnection, cluster: Cluster, events: EventLog, times: WorkerTimes
    ) -> None:
        super().__init__(plan, connection, events, times)
        self.process = connection
        self.decoder = Decoder(plan.worker_id, plan.env_ids)
        self._cluster = cluster

    def encode(self, ticket: int, command: CommandName, payload: Any) -> Any:
        if command in STEPPING:
            rows, actions = (None, payload) if command is CommandName.STEP else payload
            flags = self._rows.rows.write_actions(actions, rows)
            if flags:
                begins, self.begins = self.begins, b""
                header = COMMAND.pack(ticket, CODES[command], 0, flags, len(begins), len(self._rows.actions))
                return header + self._rows.actions + begins
        return super().encode(ticket, command, payload)

    def command_response(self, message: Message, command: CommandName) -> EnvironmentResponse:
        response = super().command_response(message, command)
        if response.name is CommandName.START:
            self._rows = SentRows(response.payload, self.env_ids)
            self.decoder.attach(self._rows.rows)
        return response

    def step_response(self, message: Any) -> EnvironmentResponse:
        self.awaited.clear()
        self.times.stepped(message.busy_ns, message.ended_ns)
        self._rows.steps[: len(message.steps)] = message.steps
        if message.data:
            return self.decoder.response(message, CommandName.STEP)
        return self.decoder.record(0, message.flags, message.n_ended)

    def timed_out(self, during: CommandName) -> EnvManagerError:
        if self.channel.pid is not None:
            return super().timed_out(during)
        self.kill()
        worker_id, env_ids, limit_s = self.worker_id, self.env_ids, self._timeouts_s[CommandName.START]
        return NotPlaced(worker_id=worker_id, env_ids=env_ids, timeout_s=limit_s, **self._cluster.shortage())

    def core_wait_ns(self) -> int:
        return 0

    def output_tail(self) -> str:
        return self.channel.error

    def ask_to_close(self) -> None:
        if self.channel.pid is None or not self._cluster.is_connected():  # no actor could receive the command
            self.kill()
        super().ask_to_close()


class ActorPoller(Poller[ActorLink]):
    """The poller of all ActorLinks. It delivers responses to "step", and the first observations of replacements."""

    def __init__(self) -> None:
        super().__init__()
        self.n_wanted = 1
        """Number of queued steps at which the trainer is woken. Each wakeup costs time that Ray's threads need."""
        self.answers_fd, self._bring_fd = descriptors.socket_pair()
        """The ends of the bell. ``answers_fd`` becomes readable when enough steps, or any other answer, are queued."""
        self.epoll.register(self.answers_fd, descriptors.READABLE)
        self.on_ring: Callable[[], object] = lambda: None
        """Function that the trainer's thread calls after ``ring``. The host sets it."""
        self._is_rung = False
        self._came: deque[tuple[ActorConnection, ActorHandle, Answer | BaseException]] = deque()
        self._lock = threading.Lock()
        self._ask_at = 0.0

    def bring(self, connection: ActorConnection, actor: ActorHandle, future: Any) -> None:
        """Queue an answer. Wake the trainer; for a step, only if ``n_wanted`` are queued. Called by Ray's threads."""
        error = future.exception()
        answer = unpack_answer(future.result(), time.perf_counter_ns()) if error is None else error
        self._came.append((connection, actor, answer))
        is_step = isinstance(answer, Answer) and answer.code == STEP_CODE
        if not is_step or len(self._came) >= self.n_wanted:
            self._wake_up()

    def ring(self) -> None:
        """Let the trainer's thread call ``on_ring`` soon. May be called by any thread."""
        self._is_rung = True
        self._wake_up()

    def _wake_up(self) -> None:
        with self._lock:  # close() could otherwise free the descriptor for another file before the write
            if self._bring_fd != descriptors.CLOSED:
                with contextlib.suppress(BlockingIOError):  # it has rung many times
                    descriptors.write(self._bring_fd, b"!")

    def drain(self) -> None:
        """Pass each queued answer to its connection. Called in the trainer's thread."""
        with contextlib.suppress(OSError):  # empty the bell first: an answer that comes meanwhile rings again
            descriptors.read(self.answers_fd, _BELL_BYTES)
        if self._is_rung:
            self._is_rung = False
            self.on_ring()
        while True:
            try:
                connection, actor, answer = self._came.popleft()
            except IndexError:
                return
            connection.take_in(actor, answer)

    def collect(self) -> bool:
        self.drain()
        self._alarm.has_unread = True
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY_S
            for link in self.links.values():
                if link.state is State.RUNNING and link.awaited.command is None:
                    link.channel.ask()
        return super().collect()

    look = collect

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        self.n_wanted = n_wanted
        self.look()  # for answers that came before and rang no bell, because more were wanted then
        return super().get(n_wanted, deadline)

    def close(self) -> None:
        super().close()
        with self._lock:
            self.answers_fd, self._bring_fd = map(descriptors.close, (self.answers_fd, self._bring_fd))
