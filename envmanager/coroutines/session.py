"""A session: a worker that is one environment on an event loop; and the queue of the sessions' responses.

::

    trainer's thread                         loop's thread
    Session.send ── post ──▶ Session._take ──▶ _serve, one task: the environment obeys, one command after the other
    SessionQueue.pump ◀── arrived, and a ring ──────────┘

The life of a session (state, tickets, deadlines) belongs to the trainer's thread, its tasks to the loop's thread. The
trainer finds the sessions that are late by looking at all of them at the earliest deadline. A session that
is late, or that failed for good, is ended on the loop: its task is cancelled, and closes the environment. So whatever
``reset`` has entered is left in the task that entered it, unless that task does not end when it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import CoroutineType
from typing import Any

from envmanager.adapters.choosing import SAME_ENVIRONMENT, innermost
from envmanager.coroutines import environment
from envmanager.coroutines.environment import AwaitedEnvironment
from envmanager.coroutines.loop import LoopThread, OwnThread, abandoned, logger, wait
from envmanager.coroutines.servers import LASTING_S, Servers
from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse, StartReport, phase_of
from envmanager.environment import EnvGroup
from envmanager.errors import ConnectionLost, ManagerClosed, ServerFull, UsageError
from envmanager.hosts.hosting import COMMANDS, GroupFactory, failed, take_not_begun
from envmanager.hosts.life import Alarm, State, WorkerLife, WorkerPlan
from envmanager.kernel.host import ResponseSource
from envmanager.kernel.table import Entry
from envmanager.observe.events import Abandoned, EventLog
from envmanager.observe.timing import WorkerTimes
from envmanager.options import Timeouts
from envmanager.system.interrupts import allow_interrupts, defer_interrupts

_STEP, _FAILED, _START = CommandName.STEP, CommandName.FAILED, CommandName.START
_AWAITED = (CommandName.RESET, *STEPPING)
_MOST_STARTING = 32
"""Number of sessions that start at the same time without a pause between them."""
_PAUSE_S = 0.002
"""Maximum pause (s) before the start of a further session. Thousands of threads at once would take much memory."""
_WATCH_EVERY_S = 0.25
"""Interval (s) at which the trainer's thread looks whether a loop is blocked."""
_LAST_TRY_S = 1.0

_CANCELLED = "its task was cancelled, perhaps by a task group that it has entered and that has failed"

_OUR_FILES = (__file__, environment.__file__)
"""Files whose frames lie between the loop and an environment's code."""

Order = tuple[int, CommandName, Any, Any]
"""Ticket, command, its payload, and the episodes to begin with a step."""


class Session(WorkerLife):
    """A worker whose only environment runs on an event loop, or in a thread of its own that the loop waits for."""

    _server_until: float | None = None
    """Time (monotonic seconds) until which the first reset waits for a server, if it has had to."""
    _error: Exception | None = None
    _is_late = False
    """Whether the environment has not been closed in time."""
    _begun_at: float | None = None
    """Time (monotonic seconds) at which the first reset has succeeded."""
    _n_tries = 0
    """Number of tries of the first reset that found no server."""

    def __init__(
        self, plan: WorkerPlan, loop: LoopThread, queue: SessionQueue, events: EventLog, times: WorkerTimes
    ) -> None:
        super().__init__(plan, events, times)
        self.loop = loop
        self.answer: EnvironmentResponse | None = None
        """Response to ``asked``, until ``recv`` returns it."""
        self._queue = queue
        self._begins: Any = None
        # On the loop.
        self.task: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[Order] | None = None
        """Future of the next command, which the task awaits. None while it carries one out, or closes."""
        self._is_closing = False
        """Whether the environment is being closed, or was."""
        self._broken: Exception | None = None
        """Error for all commands, once the environment had to be closed because its task was cancelled."""
        self.group: EnvGroup | None = None
        self._guest = 0
        """Id of the environment; 0 before it was made."""
        self._orders = deque[Order]()
        self._thread: OwnThread | None = None
        self._n_reported = 0

    # In the trainer's thread.

    def send(self, name: str, payload: Any = None) -> None:
        command = name if name.__class__ is CommandName else CommandName(name)
        if command is CommandName.BEGIN:
            self._begins = [*(self._begins or ()), *payload]
            return
        self.ticket = ticket = self.ticket + 1
        begins, self._begins = self._begins, None
        deadline = time.monotonic() + self._timeouts_s[command]
        if begins or command is CommandName.RESET:
            deadline += self.repeating_s(begins or payload)
        if command in STEPPING:
            self.await_response(ticket, _STEP, deadline)
        else:
            asked, self.answer = self.asked, None  # one of before, which an interrupt has kept from being taken
            asked.ticket, asked.command, asked.deadline = ticket, command, deadline
        self.loop.post(self._take, (ticket, command, payload, begins))

    def recv(self) -> EnvironmentResponse:
        try:
            return self._queue.answer_of(self)
        finally:
            self.asked.ticket, self.answer = 0, None  # what comes after an interrupt or a timeout is late

    def accept(
        self, ticket: int, response: EnvironmentResponse, busy_ns: int, ended_ns: int
    ) -> EnvironmentResponse | None:
        """Take note of a response. Return it if it belongs into the step queue."""
        awaited, asked = self.awaited, self.asked
        if ticket == awaited.ticket and awaited.command is _STEP:
            awaited.clear()
            self.times.stepped(busy_ns, ended_ns)
            if response.name is _FAILED:
                self._note_failure(response.payload)
            return response
        if ticket not in (awaited.ticket, asked.ticket):
            if self.state < State.CLOSING:
                self.discard(ticket)
            return None
        assert asked.command is not None
        is_awaited = ticket == awaited.ticket
        if response.name is _FAILED:
            self._note_failure(response.payload)
        elif self.state is State.STARTING:
            self.move(State.RUNNING)
            self.note_start(ended_ns, None)
        else:
            self.times.responded(asked.command, busy_ns, ended_ns)
        if is_awaited:
            return self.first_response(response)
        self.answer = response
        return None

    def _note_failure(self, error: Exception) -> None:
        self._error = error
        if isinstance(error, ConnectionLost):
            self._queue.servers.note_loss(error)
            self.kill()  # what has lost its connection is not used again

    def kill(self) -> None:
        """End the session on the loop: cancel what it does, and close its environment. A second call does nothing."""
        self.awaited.clear()
        if self.state is not State.GONE:
            self.move(State.GONE)
            self.loop.post(self.end)

    def retire(self) -> None:
        """End the session, which is replaced. Errors are kept for long, and their tracebacks would keep its frames."""
        self.kill()
        error: BaseException | None = self._error
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__

    def ask_to_close(self) -> None:
        self.kill()

    # On the loop.

    def _take(self, order: Order) -> None:
        """Carry out a command, after those that came before."""
        if self.ending is not None:
            return
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(order)
        elif self._broken is not None:
            self._queue.put((self, order[0], self._failed(self._broken, order[1]), 0, time.perf_counter_ns()))
        else:
            self._orders.append(order)
            if self.task is None:
                self.loop.members.add(self)
                self.task = self.loop.loop.create_task(self._serve())

    async def _serve(self) -> None:
        """Carry out commands until the session ends, then close the environment. The only task of the session."""
        try:
            while self.ending is None:
                if self._orders:
                    await self._carry_out(self._orders.popleft())
                else:
                    self._idle = self.loop.loop.create_future()
                    await self._carry_out(await self._idle)
        except asyncio.CancelledError as error:
            if self.ending is None:  # by a task group that the environment has entered: it cancels until it is left
                idle, self._idle, self._broken = self._idle, None, RuntimeError(_CANCELLED)
                self._broken.__cause__ = error
                if idle is not None and not idle.cancelled():  # a command came at the same moment
                    self._take(idle.result())
            elif sys.version_info >= (3, 11) and self.task is not None:
                self.task.uncancel()  # else timeouts and task groups in ``close`` would take it for theirs
        if not self._is_closing:
            self._is_closing = True
            await self._close()

    async def _carry_out(self, order: Order) -> None:
        """Carry out a command. Put its response, a failure if it raised, on the queue."""
        self._idle = None
        ticket, command, payload, begins = order
        group = self.group
        began_ns = time.perf_counter_ns()
        try:
            if command is _STEP and begins is None and group.__class__ is AwaitedEnvironment:
                step = group.step(payload)
                del order, payload  # a step may take long, and there may be many
                response = EnvironmentResponse(_STEP, self.worker_id, await step)
            else:
                response = await self._respond(command, payload, begins)
        except BaseException as error:
            is_end = isinstance(error, asyncio.CancelledError) and self.ending is not None
            is_freed = isinstance(error, GeneratorExit) and asyncio.current_task(self.loop.loop) is not self.task
            if is_end or is_freed:
                raise
            response = self._failed(error, command)
        ended_ns = time.perf_counter_ns()
        self._queue.put((self, ticket, response, ended_ns - began_ns, ended_ns))

    async def _respond(self, command: CommandName, payload: Any, begins: Any) -> EnvironmentResponse:
        """Carry out a command and return its response."""
        group = self.group
        if group is None:
            return EnvironmentResponse(command, self.worker_id, await self._start(payload))
        if begins is not None and group.on_demand is not None:
            group.on_demand.add(begins)
        if not isinstance(group, AwaitedEnvironment):
            assert self._thread is not None
            return await self._thread.run(self._obey, group, command, payload)  # type: ignore[no-any-return]
        if command in _AWAITED:
            result = await COMMANDS[command](group, payload)
        else:
            result = self.run(COMMANDS[command], group, payload)
            if self._thread is not None:
                result = await result
            if command in (CommandName.CALL, CommandName.RENDER):
                result = [await each if inspect.isawaitable(each) else each for each in result]
        return self._response(command, result, group)

    async def _start(self, factory: GroupFactory) -> StartReport:
        """Make the environment in a thread, because a factory may block. A coroutine needs the thread no more."""
        thread = self._thread = OwnThread(self.loop, f"envmanager-env-{self.env_ids[0]}")
        made = await thread.run(self._make, factory)
        if inspect.isawaitable(made):
            build = partial(factory.build, [await made], list(self.env_ids))
            made = await thread.run(self._make, build)
        report: StartReport = made
        group = self.group
        assert group is not None
        subject = id(innermost(group.subjects[0]))
        if subject in self.loop.guests:
            raise UsageError(SAME_ENVIRONMENT)
        self._guest = subject
        self.loop.guests.add(subject)
        if isinstance(group, AwaitedEnvironment):
            group.runner = self
            if any(inspect.iscoroutinefunction(getattr(group.subjects[0], name)) for name in ("reset", "step")):
                self._thread = None  # it runs on the loop
                thread.stop()
        return report

    @property
    def returns_full(self) -> bool:
        """Whether an episode that finds its server full is not begun."""
        return self._queue.returns_full

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the environment, in its thread if it has one. Return the result, or an awaitable of it."""
        return function(*args) if self._thread is None else self._thread.run(function, *args)

    def _failed(self, error: BaseException, command: CommandName) -> EnvironmentResponse:
        group = self.group
        if not (isinstance(error, ConnectionError) and command in _AWAITED and isinstance(group, AwaitedEnvironment)):
            return failed(error, command, worker_id=self.worker_id, env_ids=self.env_ids, group=group)
        lost = ConnectionLost(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase=phase_of(command),
            type_name=type(error).__qualname__,
            cause=str(error),
            timeout_s=self._timeouts_s[_START] if self._begun_at is None else 0.0,
            is_charged=self._begun_at is None or time.monotonic() - self._begun_at < LASTING_S,
        )
        lost.__cause__ = error
        return EnvironmentResponse(_FAILED, self.worker_id, lost)

    async def run_reset(self, reset: Callable[..., Any], *args: Any) -> Any:
        """Call ``reset`` as ``run`` does, and return its awaited result. Before the first result, await the server.

        Later, a ConnectionError means that the environment has lost its session, so it is raised.
        """
        while True:
            try:
                result = self.run(reset, *args)
                while inspect.isawaitable(result):
                    result = await result
            except ConnectionError as error:
                if self._begun_at is not None or (isinstance(error, ServerFull) and self.returns_full):
                    raise
                await self._await_server(error)
            else:
                if self._begun_at is None:
                    self._begun_at = time.monotonic()
                    self._queue.servers.waiting.discard(self)
                    if self.worker_id in self._queue.servers.missed_by:
                        self._queue.tell(self, self._queue.servers.note_back, self.worker_id)
                return result

    async def _await_server(self, error: ConnectionError) -> None:
        """Wait before the next try of the first reset, which raised ``error``. Raises it if it is too late."""
        now = time.monotonic()
        if self._server_until is None:
            self._server_until = now + self._timeouts_s[_START]
            for each in (self.awaited, self.asked):
                each.deadline = max(each.deadline, self._server_until + _LAST_TRY_S)
            self._queue.servers.waiting.add(self)
            self._queue.tell(self, self._queue.servers.note_gone, self.worker_id, error)
        left_s = self._server_until - now
        if left_s <= 0:
            raise error
        delay_s, self._n_tries = self._queue.servers.delay_s(self._n_tries), self._n_tries + 1
        await asyncio.sleep(min(delay_s, left_s))

    def owns(self, task: asyncio.Task[Any]) -> bool:
        return task in (self.task, self.ending)

    def end(self) -> asyncio.Task[None]:
        """Begin to end the session, if that has not begun. Return the task that does it."""
        if self.ending is None:
            self.ending = self.loop.loop.create_task(self._end())
        return self.ending

    async def _end(self) -> None:
        """Cancel the task of the session, then close its environment, within ``close_s``. Abandon what does not end."""
        close_s = self._timeouts_s[CommandName.CLOSE]
        tasks = [] if self.task is None else [self.task]
        for task in () if self._is_closing else tasks:
            task.cancel()
        await wait(tasks, 0.4 * close_s)
        if not self._is_closing:
            self._is_closing = True
            tasks.append(self.loop.loop.create_task(self._close()))
        closing = tasks[-1]
        await wait([closing], 0.5 * close_s)
        self._is_late = not closing.done()
        closing.cancel()
        await wait(tasks, 0.1 * close_s)
        left = [task for task in tasks if not task.done()]
        for task in left:
            abandoned.add(task)
            task.add_done_callback(abandoned.discard)
        if self._thread is not None:
            self._thread.stop()
        if left or (self._is_late and self._thread is not None):
            what = "coroutine" if self._thread is None else "thread"
            event = Abandoned(worker_id=self.worker_id, generation=self.generation, what=what)
            self._queue.tell(self, self._events.add, event)
        self._orders.clear()
        if not self._is_late:
            self.group = None
        self._queue.servers.waiting.discard(self)
        self.loop.guests.discard(self._guest)
        self.loop.members.discard(self)

    async def _close(self) -> None:
        try:
            result = self._close_made() if self._thread is None else await self._thread.run(self._close_made)
            while inspect.isawaitable(result):
                result = await result
        except (Exception, SystemExit, KeyboardInterrupt):
            logger.exception("an environment failed to close")

    # In the thread of the environment, or on the loop if there is none.

    def _make(self, factory: Callable[[], Any]) -> Any:
        """Make the environment, and return the report of it. Return an awaitable of the environment unchanged."""
        group = factory()
        if inspect.isawaitable(group):
            return group
        self.group = group
        report = COMMANDS[_START](group, None)
        self._n_reported = len(report.specs)
        return report

    def _obey(self, group: EnvGroup, command: CommandName, payload: Any) -> EnvironmentResponse:
        result = COMMANDS[command](group, payload)
        if command in _AWAITED and not group.returns_new_arrays:
            result = {behavior: steps.copy() for behavior, steps in result.items()}
        response = self._response(command, result, group)
        if len(group.behavior_specs) != self._n_reported:
            response.specs = dict(group.behavior_specs)
            self._n_reported = len(response.specs)
        return response

    def _response(self, command: CommandName, result: Any, group: EnvGroup) -> EnvironmentResponse:
        name = _STEP if command in STEPPING else command
        return EnvironmentResponse(name, self.worker_id, result, not_begun=take_not_begun(group, self.worker_id))

    def _close_made(self) -> Any:
        result: Any = None if self.group is None else self.group.close()
        if self._is_late and isinstance(result, CoroutineType):
            result.close()  # the factory has returned so late that the loop does not wait for it
        return result


Arrived = tuple[Session, int, Any, int, int]
"""Session, ticket, response, duration and end of a command (ns). With the ticket 0, a function in place of a response:
the trainer's thread calls it."""


class SessionQueue(ResponseSource):
    """The queue of all sessions' responses, and the loops on which they run."""

    def __init__(self, timeouts: Timeouts, entries: Sequence[Entry], events: EventLog) -> None:
        self.sessions: dict[int, Session] = {}
        """Sessions by worker_id. A replacement overwrites its predecessor."""
        self.alarm = Alarm()
        self._events = events
        self.servers = Servers(entries, events, timeouts.start_s)
        self._watch_at = 0.0
        self.start_s = timeouts.start_s
        self._close_s = timeouts.close_s
        self._owner_pid = os.getpid()
        self._arrived: deque[Arrived] = deque()
        self._ready: list[EnvironmentResponse] = []
        self._bell = threading.Lock()
        """Lock that is released to wake up the trainer's thread, and acquired to wait for that."""
        self._bell.acquire()
        self._is_waiting = self._is_urgent = self._is_woken = self._is_stopped = False
        self._listener: Callable[[], None] | None = None
        """Function that rings in the event loop of a pool."""
        self._n_wanted = 1
        self._n_started = 0
        self._stopping = threading.RLock()
        self._loops = [LoopThread(self._ring, _OUR_FILES)]

    # On the loop.

    def put(self, arrived: Arrived) -> None:
        """Add a response. Ring for it soon."""
        self._arrived.append(arrived)
        session, _, response, busy_ns, _ = arrived
        if response.name is not _STEP:
            self._is_urgent = True
            self._n_started += response.name is _START
            busy_ns = 0
        session.loop.ring_soon(busy_ns * 1e-9)

    def tell(self, session: Session, function: Callable[..., object], *args: Any) -> None:
        """Make the trainer's thread call a function, which takes note of news about a session."""
        self._arrived.append((session, 0, partial(function, *args), 0, 0))
        self._is_urgent = True
        session.loop.ring_soon(0.0)

    def _ring(self) -> None:
        if self._is_waiting and (self._is_urgent or len(self._arrived) >= self._n_wanted):
            with contextlib.suppress(RuntimeError):  # it has been rung
                self._bell.release()
        listener = self._listener
        if listener is not None:
            listener()

    # In the trainer's thread.

    @property
    def loop(self) -> LoopThread:
        """The loop for new sessions. Raises ManagerClosed if another thread has closed the manager."""
        with defer_interrupts(), self._stopping:
            if self._is_stopped:
                raise ManagerClosed("the start of a worker")
            if self._loops[-1].blocked is not None:
                self._loops.append(LoopThread(self._ring, _OUR_FILES))
            return self._loops[-1]

    def start(self, session: Session, factory: GroupFactory) -> None:
        """Add a session that is to make its environment. Of many, let some start before others follow."""
        self.sessions[session.worker_id] = session
        session.alarm = self.alarm
        session.send(_START, factory)
        if len(self.sessions) - self._n_started > _MOST_STARTING:
            self._pump()
            self._wait(1, _PAUSE_S)

    def take(self) -> Sequence[EnvironmentResponse]:
        now = time.monotonic()
        if now >= self._watch_at:
            self._watch(now)
        return self.get(0, now)

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        while True:
            self._pump()
            now = time.monotonic()
            if now >= self.alarm.at:
                self._end_late(now)
            ready = self._ready
            is_enough = len(ready) >= n_wanted or any(response.name is _FAILED for response in ready)
            if is_enough or now >= deadline or self._is_woken:
                self._ready = []
                return ready
            self._wait(n_wanted - len(ready), min(deadline, self.alarm.at) - now)

    def listen(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> Callable[[], None]:
        is_rung = False

        def rung() -> None:
            nonlocal is_rung
            is_rung = False
            ring()

        def listener() -> None:
            nonlocal is_rung
            if not is_rung:
                is_rung = True
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(rung)

        def stop() -> None:
            if self._listener is listener:
                self._listener = None

        self._listener = listener
        return stop

    def due_at(self) -> float:
        return min(self.alarm.at + 0.001, self._watch_at)

    def answer_of(self, session: Session) -> EnvironmentResponse:
        """Await the response to the last command other than a step, or return a failure at its deadline."""
        asked, awaited = session.asked, session.awaited
        assert asked.command is not None
        while True:
            self._pump()
            if session.answer is not None:
                return session.answer
            if self._is_woken:
                raise ManagerClosed("a call that waits")
            is_behind_step = awaited.command is _STEP and awaited.deadline < asked.deadline
            left_s = (awaited if is_behind_step else asked).deadline - time.monotonic()
            if left_s <= 0 or session.state is State.GONE:
                own = [each for each in self._ready if each.worker_id == session.worker_id]
                self._ready = [each for each in self._ready if each.worker_id != session.worker_id]  # it is replaced
                if own and session.state is State.GONE:
                    return own[-1]
                error = session.timed_out(_STEP if is_behind_step else asked.command)
                return EnvironmentResponse(_FAILED, session.worker_id, error)
            self._wait(1, left_s)

    def _pump(self) -> None:
        """Hand all that has arrived to the sessions."""
        self._is_urgent = False
        arrived = self._arrived
        while arrived:
            session, ticket, response, busy_ns, ended_ns = arrived.popleft()
            if not ticket:
                response()
                continue
            accepted = session.accept(ticket, response, busy_ns, ended_ns)
            if accepted is not None:
                self._ready.append(accepted)

    def _watch(self, now: float) -> None:
        """Add events for loops that are blocked."""
        self._watch_at = now + _WATCH_EVERY_S
        for loop in self._loops:
            found = loop.watch(now)
            if found is not None:
                self._events.add(found)

    def _wait(self, n_wanted: int, left_s: float) -> None:
        """Wait until ``n_wanted`` responses have arrived, or one that is urgent, at most ``left_s`` seconds."""
        now = time.monotonic()
        if now >= self._watch_at:
            self._watch(now)
        left_s = min(left_s, self._watch_at - now)
        self._n_wanted, self._is_waiting = n_wanted, True
        try:
            if len(self._arrived) < n_wanted and not self._is_urgent and not self._is_woken:
                with allow_interrupts():
                    self._bell.acquire(timeout=max(0.0, left_s + 0.001))
        finally:
            self._is_waiting = False

    def _end_late(self, now: float) -> None:
        """End all sessions whose response is late, and find the earliest deadline of the others."""
        for session in self.sessions.values():
            awaited = session.awaited
            if awaited.deadline <= now:
                assert awaited.command is not None
                error = session.timed_out(awaited.command)
                self._ready.append(EnvironmentResponse(_FAILED, session.worker_id, error))
        self.alarm.at = min((session.awaited.deadline for session in self.sessions.values()), default=math.inf)

    # The end, in any thread.

    def wake(self) -> None:
        """Unblock a wait in another thread. No later wait blocks either."""
        self._is_woken = True
        with contextlib.suppress(RuntimeError):
            self._bell.release()

    def close(self) -> None:
        """End all sessions and the loops within ``close_s`` seconds. Has no effect in a forked process."""
        if os.getpid() != self._owner_pid:
            return
        with defer_interrupts(), self._stopping:
            self._is_stopped = True
            for loop in self._loops:
                loop.finish(self._close_s)
        deadline = time.monotonic() + self._close_s + 1.0
        for loop in self._loops:
            loop.join(max(0.0, deadline - time.monotonic()))
        for _, ticket, news, *_ in list(self._arrived):
            if not ticket:
                news()
        self._arrived.clear()
