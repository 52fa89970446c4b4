"""Events of workers, such as failures and restarts: their classes, and the log that stores and counts them.

::

    for event in manager.events:                 # the last thousand, oldest first
        if isinstance(event, events.Restarted): …

Each event is stored, counted by kind and written to the logger ``envmanager``. A restart is one line at WARNING. A
dropped worker is logged at ERROR, each failure at DEBUG. Both messages contain the available evidence, such as a
traceback or the end of the output. ``event.error`` or ``event.cause`` contains the same evidence. The records have the
attributes ``event`` (the name of the event's class), ``worker_id`` and ``env_ids``.

The rule: text from an environment is an argument of a log call and never its format string.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, overload

import attrs

from envmanager.data.differences import Difference
from envmanager.errors import RestartsExhausted, WorkerError
from envmanager.options import RestartPolicy

KEPT = 1000
"""Maximum number of events kept. The counters and the log messages cover all events."""

_logger = logging.getLogger("envmanager")


@attrs.frozen(kw_only=True)
class Event:
    """Base class of the events of a worker. ``at_s`` is the time of the event, from ``time.perf_counter()``."""

    LEVEL: ClassVar[int] = logging.DEBUG

    worker_id: int
    generation: int
    at_s: float = attrs.field(factory=time.perf_counter)

    def __str__(self) -> str:
        return f"worker {self.worker_id}, generation {self.generation}"


@attrs.frozen(kw_only=True)
class Started(Event):
    """Event: a worker has started and made its environments in ``start_s`` seconds."""

    pid: int | None
    """Process id; None for a worker in this process and for a game that this library did not start."""
    start_s: float

    def __str__(self) -> str:
        where = "" if self.pid is None else f" as process {self.pid}"
        return f"{super().__str__()}, started{where} in {self.start_s:.2f} s"


@attrs.frozen(kw_only=True)
class Failed(Event):
    """Event: a worker failed with ``error``. If the worker is to be replaced or is dropped, the next event says so.

    The subclasses are the kinds of failure: Died, TimedOut, Raised, ProtocolBroken, Disconnected, NotStarted.
    """

    error: Exception
    tasks: tuple[int, ...] = ()
    """Indices of the tasks that were under way in the worker, if episodes begin with tasks."""

    def __str__(self) -> str:
        tasks = f"\nTasks under way in the worker: {', '.join(map(str, self.tasks))}" if self.tasks else ""
        return f"{self.error}{tasks}"


class Died(Failed):
    """Failure: the worker's process ended without being asked to."""


class TimedOut(Failed):
    """Failure: the worker did not respond in time."""


class Raised(Failed):
    """Failure: the environment raised an exception, or returned data that does not fit its spec."""


class ProtocolBroken(Failed):
    """Failure: a worker sent a message that violates the protocol."""


class Disconnected(Failed):
    """Failure: the environment lost its server or found none, and the restart counts. See ServerGone for the others."""


class NotStarted(Failed):
    """Failure: no process could be started for the worker, or the cluster had no room for it."""


@attrs.frozen(kw_only=True)
class Restarted(Event):
    """Event: a failed worker is replaced by its next ``generation`` in ``delay_s`` seconds. ``cause`` is the failure.

    ``number`` counts the restarts of this worker in the last ``policy.within_s`` seconds, including this one.
    """

    LEVEL = logging.WARNING

    cause: WorkerError
    delay_s: float
    number: int
    policy: RestartPolicy

    def __str__(self) -> str:
        window = f" in {self.policy.within_s:g} s" if math.isfinite(self.policy.within_s) else ""
        when = f", after {self.delay_s:.1f} s" if self.delay_s else ""
        return f"{self.cause.headline}; restart {self.number} (at most {self.policy.max_restarts}{window}){when}"


@attrs.frozen(kw_only=True)
class PoolShrunk(Event):
    """Event: a pool has lost the environments of a worker for good, and has ``n_left`` of ``n_envs`` left."""

    LEVEL = logging.WARNING

    error: WorkerError
    n_left: int
    n_envs: int

    def __str__(self) -> str:
        remedy = "A pool keeps them all with restarts left, and RestartPolicy(on_exception='restart') for exceptions"
        return f"a pool has {self.n_left} of {self.n_envs} environments left: {self.error.headline}. {remedy}"


@attrs.frozen(kw_only=True)
class Recycled(Event):
    """Event: a healthy worker is replaced by its next ``generation`` after ``steps`` steps, because of ``why``.

    That is its RestartPolicy, or ``move``.
    """

    LEVEL = logging.INFO

    steps: int
    why: str = ""
    """Such as ``"at 312 MiB"`` and ``"as it is moved"``; empty for the number of steps."""

    def __str__(self) -> str:
        why = self.why or f"after {self.steps} steps"
        return f"worker {self.worker_id} is recycled {why}, by generation {self.generation}"


@attrs.frozen(kw_only=True)
class Squeezed(Event):
    """Event: no node of the cluster has had room for a worker within ``place_s`` seconds, so it runs beside others."""

    LEVEL = logging.WARNING

    place_s: float
    missing: str

    def __str__(self) -> str:
        return (
            f"worker {self.worker_id} found no place within {self.place_s:g} s ({self.missing}): it shares the CPUs of "
            "others until there is one"
        )


@attrs.frozen(kw_only=True)
class StepCancelled(Event):
    """Event: a cancelled step of ``env_id`` in a pool went on. ``generation`` replaces its worker, at no charge."""

    LEVEL = logging.INFO

    env_id: int

    def __str__(self) -> str:
        own = f"worker {self.worker_id} is replaced by generation {self.generation}"
        return f"{own}: a step of env {self.env_id} was cancelled and has not ended"


@attrs.frozen(kw_only=True)
class EpisodesKept(Event):
    """Event: a worker was replaced, and the episodes of ``env_ids`` go on, after ``n_steps`` steps were repeated.

    ``seconds``: time since the failure.
    """

    LEVEL = logging.INFO

    env_ids: tuple[int, ...]
    n_steps: int
    seconds: float

    def __str__(self) -> str:
        which = f"env {self.env_ids[0]} goes" if len(self.env_ids) == 1 else f"{len(self.env_ids)} environments go"
        return f"{super().__str__()}: {which} on, after {self.n_steps:,} steps were repeated; {self.seconds:.2f} s lost"


@attrs.frozen(kw_only=True)
class EpisodesDiverged(Event):
    """Event: the episode of ``env_id`` is lost, because after ``step`` repeated steps it was not where it had been.

    ``path``: the part of the observation that differs, which was ``expected``, as the trainer has it, and is ``got``.
    """

    LEVEL = logging.WARNING

    env_id: int
    step: int
    path: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return (
            f"{super().__str__()}: the episode of env {self.env_id} is lost, because its repetition led elsewhere: "
            f"after {self.step:,} steps {Difference(self.path, self.expected, self.got)}. Likely causes are a random "
            "generator that reset() does not seed, the time, the order of a set, and what earlier episodes have left "
            "in the environment; `envmanager check` finds the step"
        )


@attrs.frozen(kw_only=True)
class EpisodesNotKept(Event):
    """Event: the present episodes of ``env_ids`` are lost if their worker fails. ``why`` completes "because …"."""

    LEVEL = logging.INFO

    env_ids: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        which = f"env {self.env_ids[0]}" if len(self.env_ids) == 1 else f"{len(self.env_ids)} environments"
        return f"{super().__str__()}: the present episode of {which} is not kept, because {self.why}"


@attrs.frozen(kw_only=True)
class Dropped(Event):
    """Event: a worker failed with ``error`` and is never used again, not even after a reset; the others continue."""

    LEVEL = logging.ERROR

    error: Exception

    def __str__(self) -> str:
        why = str(self.error)
        if isinstance(self.error, RestartsExhausted):  # without its advice, which comes too late
            last = self.error.last
            restarted = self.error.headline.removesuffix(last.headline).removeprefix(f"worker {self.worker_id} ")
            why = f"It {restarted}{last}"
        return f"worker {self.worker_id} is dropped; the others go on without it. {why}"


@attrs.frozen(kw_only=True)
class KindLeftOut(Event):
    """Event: no worker of one kind of environments is left, or they fail so often that the others go on without it."""

    LEVEL = logging.WARNING

    kind: str
    why: str

    def __str__(self) -> str:
        return f"the other kinds of environments go on without {self.kind!r}: {self.why}"


@attrs.frozen(kw_only=True)
class TaskLost(Event):
    """Event: the episode of task ``index`` was lost with its worker, or could not begin with the task's actions.

    The task is played again, or given up.

    ``losses``: number of losses charged to the task; one that the error does not blame on ``env_id`` is not.
    """

    LEVEL = logging.INFO

    env_id: int
    index: int
    losses: int
    is_given_up: bool

    def __str__(self) -> str:
        then = "is given up" if self.is_given_up else "begins again"
        charged = f" (losses: {self.losses})" if self.losses else ""
        return f"task {self.index} was lost in env {self.env_id}{charged} and {then}"


@attrs.frozen(kw_only=True)
class ServerGone(Event):
    """Event: an environment has no connection to its server because of ``error``, and all others had one.

    Until all have one again, there is no further event for environments that lose theirs.
    """

    LEVEL = logging.WARNING

    error: Exception
    wait_s: float
    """Time for which each environment waits for its server."""

    def __str__(self) -> str:
        why = f"{type(self.error).__name__}: {self.error}".removesuffix(": ")
        return (
            f"worker {self.worker_id} has no connection to its server ({why}). It waits up to {self.wait_s:g} s, as do "
            "others of which that is true, without a line for each"
        )


@attrs.frozen(kw_only=True)
class ServerBack(Event):
    """Event: all ``n_workers`` environments that lost their servers have one again, ``after_s`` seconds later."""

    LEVEL = logging.INFO

    n_workers: int
    after_s: float

    def __str__(self) -> str:
        last = f"worker {self.worker_id} has a connection to its server again"
        return f"{last}, the last of {self.n_workers} that had none, after {self.after_s:.1f} s"


@attrs.frozen(kw_only=True)
class LoopBlocked(Event):
    """Event: code of an environment has blocked the event loop for ``blocked_s`` seconds, as it did not await.

    ``worker_id`` is -1 if it was a task or a callback of which the worker is not known. ``where``: file, line and
    function. ``is_over``: whether the loop goes on.
    """

    LEVEL = logging.WARNING

    blocked_s: float
    where: str
    is_over: bool

    def __str__(self) -> str:
        who = "an environment" if self.worker_id < 0 else f"the environment of worker {self.worker_id}"
        since = "blocked the event loop for" if self.is_over else "has blocked the event loop for more than"
        return (
            f"{who} {since} {self.blocked_s:.1f} s in {self.where}. Meanwhile no environment goes on, and no deadline "
            "holds: await there, or write `def step` in place of `async def step` for a thread of its own"
        )


@attrs.frozen(kw_only=True)
class Abandoned(Event):
    """Event: a ``"coroutine"`` did not end when it was cancelled, or a ``"thread"`` is late. It may run on for ever."""

    LEVEL = logging.WARNING

    what: str

    def __str__(self) -> str:
        which = "coroutine, which was cancelled," if self.what == "coroutine" else self.what
        return f"{super().__str__()}: the {which} of its environment has not ended and is abandoned"


@attrs.frozen(kw_only=True)
class LateReplyDiscarded(Event):
    """Event: a response came after its deadline and was discarded; ``ticket`` is the number of the request."""

    LEVEL = logging.INFO

    ticket: int

    def __str__(self) -> str:
        return f"{super().__str__()}: a late response to request {self.ticket} was discarded"


@attrs.frozen(kw_only=True)
class Note(Event):
    """Event: a worker sent a message that is not part of a step, such as a statistic or a key pressed in its window."""

    name: str
    data: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{super().__str__()}, notes {self.name}: {dict(self.data)}"


class EventLog(Sequence[Event]):
    """A sequence of the last thousand events, oldest first, with the number of events of each kind since the start."""

    def __init__(self, env_ids_of_workers: Sequence[Sequence[int]] = ()) -> None:
        self._env_ids = [tuple(map(int, env_ids)) for env_ids in env_ids_of_workers]
        self._kept: deque[Event] = deque(maxlen=KEPT)
        self._counts: dict[type[Event], int] = {}
        self.listener: Callable[[Event], None] | None = None

    def add(self, event: Event) -> None:
        """Store, count and log an event, and pass it to ``listener`` if there is one."""
        self._kept.append(event)
        self._counts[type(event)] = self._counts.get(type(event), 0) + 1
        if self.listener is not None:
            self.listener(event)
        env_ids = self._env_ids[event.worker_id] if 0 <= event.worker_id < len(self._env_ids) else ()
        fields = {"event": type(event).__name__, "worker_id": event.worker_id, "env_ids": env_ids}
        _logger.log(event.LEVEL, "%s", event, extra=fields)

    def count(self, kind: type[Event]) -> int:
        """Return the number of events of the class ``kind`` and its subclasses, including events no longer stored."""
        counts = self._counts.copy()  # copied, because another thread may add an event
        return sum(number for each, number in counts.items() if issubclass(each, kind))

    def counts(self) -> dict[str, int]:
        """Return the number of events by the name of their class, including events no longer stored."""
        return {kind.__name__: number for kind, number in self._counts.copy().items()}

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        kept = list(self._kept)
        return kept[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(list(self._kept))

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {kind}" for kind, number in self.counts().items())
        return f"<EventLog: {counts or 'nothing happened'}>"
