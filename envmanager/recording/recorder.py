"""Recording of all that a manager learns from its workers, in the order in which it learns it.

::

    kernel ──▶ Recorder ──▶ host          what passes is a fact: what was asked, what was answered, when steps arrived
                  └── facts ── a thread ──▶ file

The kernel decides by nothing but what its host tells it: responses, the results of calls, and the time. So a manager
whose host tells the same, and whose trainer does the same, makes the same run; see ``recording.tape``. Those who read
the recording as data also find what the kernel knows: which agents act, which episodes begin, and which are lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse, only_agents
from envmanager.errors import UsageError
from envmanager.kernel.host import HostContext, ResponseSource, WorkerHost
from envmanager.observe.events import Event, EventLog
from envmanager.recording.codec import packed
from envmanager.recording.file import RecordWriter
from envmanager.recording.tap import Tap, TappedHost
from envmanager.system.interrupts import allow_interrupts, defer_interrupts

_MOST_PENDING, _MOST_PENDING_BYTES = 10_000, 1 << 26
"""Number of facts, and about their size, above which the trainer waits until they are written."""
LONGEST_STALL_S = 10.0
"""Seconds in which nothing could be written after which a recording that is waited for has failed."""
_EVERY_S = 0.02
"""Time in which facts are gathered for one record, so that compressing and writing take little."""

_logger = logging.getLogger("envmanager")


@attrs.frozen(kw_only=True)
class RecordingFailed(Event):
    """Event: the recording has ended early, because of ``error``; the run goes on."""

    LEVEL = logging.WARNING

    path: str
    error: Exception

    def __str__(self) -> str:
        return f"the recording {self.path} ends here, and the run goes on without it: {self.error}"


class Recorder(Tap):
    """The tap that records. Its thread writes facts to a file, all of a short time as one record."""

    def __init__(self, path: str, about: Mapping[str, Any], *, observations: bool = True) -> None:
        """Create the file. ``about``: what it says first. Raises UsageError if that is impossible."""
        self.path, self.observations = path, observations
        self.error: Exception | None = None
        """The error with which it has failed, if it has."""
        self._is_over = self._has_started = False
        """Whether nothing more is recorded (it was closed, or has failed), and whether the workers have started."""
        self._owner_pid = os.getpid()
        try:
            self._writer = writer = RecordWriter(path)
            try:
                own = {"observations": observations, "part_of": writer.part_of, "n_steps": writer.n_steps}
                writer.add(time.time_ns(), {**own, **about})
            except OSError:
                writer.close()
                writer.put_back()
                raise
        except OSError as error:
            raise UsageError(f"the recording {path} cannot be written: {error}.") from error
        self.facts: deque[tuple[str, int, bytes]] = deque()
        """Facts that wait to be written; see ``file.Fact``."""
        self._events: EventLog | None = None
        self.most_pending = _MOST_PENDING
        """Number of facts above which the trainer waits, because they are many or large."""
        self.is_waited_for = True
        """Whether the trainer waits at all; not when another thread closes the manager."""
        self._logged: dict[int, tuple[Any, int]] = {}
        """Log and number of each worker's last step, if episodes are kept. A step that is sent again has the same."""
        self._nothing: tuple[str, int] = ("", 0)
        """Call that has found nothing, and how often in a row."""
        self._closing, self._has_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="envmanager-recorder", daemon=True)
        self._thread.start()

    # In the trainer's thread.

    def open(self, context: HostContext, source: ResponseSource) -> None:
        super().open(context, source)
        self._entries, self._seats, self._events = context.entries, context.seats, context.events

    def send(self, worker_id: int, name: str, payload: Any, do: Callable[[str, Any], None]) -> None:
        do(name, payload)
        if name in STEPPING:
            rows, actions = (None, payload) if name == CommandName.STEP else payload
            entry, what = self._entries[worker_id], "step"
            if entry.log is not None:
                logged = entry.log, entry.log.n_steps
                what = "again" if self._logged.get(worker_id) == logged else "step"
                self._logged[worker_id] = logged
            if rows is None and entry.actions is not None and entry.previous_step is not None:  # step() sends them
                versions = {behavior: each.version for behavior, each in entry.actions.items()}
                last = entry.previous_step.current
                agents = {name: each.agent_id[each.acting_rows].tolist() for name, each in last.items()}
            else:
                versions, env_ids = None, np.array(entry.env_ids)
                acting = env_ids[self._seats().acts[env_ids] if rows is None else rows]
                agents = dict.fromkeys(actions, only_agents(acting.tolist()).tolist())
            self._add(what, worker_id, (rows, actions, agents, versions))
        else:
            self._add("send", worker_id, (str(name), payload))

    def call(self, what: str, worker_id: int, asked: Any, do: Callable[[], Any]) -> Any:
        if what == "recv":
            self._wait_for_room()
        try:
            answer = do()
        except Exception as error:
            self._add(what, worker_id, (asked, None, error))
            raise
        if what != "check_can_travel":  # which is asked in each step, and answers with nothing but an error
            self._add(what, worker_id, (asked, answer, None))
        if what == "await_start":
            self._has_started = True  # else close() puts an earlier recording back
            if self._writer.moved:
                _logger.warning("the earlier recording is in %s now.", self._writer.moved[0][1])
        return answer

    def lost(self, worker_id: int, error: Exception, env_ids: Sequence[int] | None = None) -> None:
        self._add("lost", worker_id, error if env_ids is None else (error, tuple(env_ids)))

    def take(self) -> Sequence[EnvironmentResponse]:
        self._wait_for_room()  # before a response is taken, which an interrupt would lose
        return self._found("take", self.source.take())

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        return self._found("get", self.source.get(n_wanted, deadline))

    def due_at(self) -> float:
        return self.source.due_at()

    def _found(self, call: str, responses: Sequence[EnvironmentResponse]) -> Sequence[EnvironmentResponse]:
        """Add the fact that a call of the source has returned responses. Many in a row without any are one fact."""
        if responses:
            self._add(call, -1, (time.time_ns(), list(responses)))
            self._report()
            return responses
        if self._nothing[0] != call:
            self._tell_nothing_found()
        self._nothing = (call, self._nothing[1] + 1)
        return responses

    def _tell_nothing_found(self) -> None:
        (call, number), self._nothing = self._nothing, ("", 0)
        if number:
            self._add(f"no {call}", -1, number)

    def _add(self, what: str, worker_id: int, content: Any) -> None:
        if self._is_over:
            return
        self._tell_nothing_found()
        try:
            self.facts.append((what, worker_id, packed(content, observations=self.observations)))
        except Exception as error:  # a list within lists without end, say
            self._is_over, self.error = True, error

    def _report(self) -> None:
        """Add an event if the recording has failed."""
        error, self.error = self.error, None
        if error is not None and self._events is not None:
            self._events.add(RecordingFailed(worker_id=-1, generation=0, path=self.path, error=error))

    def _wait_for_room(self) -> None:
        """Wait while very much is to be written. A Ctrl-C ends the wait."""
        self._wait_until(
            lambda: len(self.facts) <= self.most_pending or self._is_over or not self.is_waited_for  # by another thread
        )

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until something is written that is waited for. If the file stops growing, the recording has failed."""
        n_written, grown_s = -1, 0.0
        while not is_done():
            if self._writer.n_written != n_written:
                n_written, grown_s = self._writer.n_written, time.monotonic()
            elif time.monotonic() > grown_s + LONGEST_STALL_S:
                self._is_over = True
                self.error = TimeoutError(f"nothing could be written for {LONGEST_STALL_S:g} s")
                return
            with allow_interrupts():
                self._has_ended.wait(_EVERY_S)  # not join(): in Python 3.12 an interrupt there ends the Thread object

    def wake(self) -> None:
        self.is_waited_for = False

    def close(self) -> None:
        """Write what is left and the end of the file. Has no effect in a process forked from the trainer."""
        if os.getpid() == self._owner_pid:
            with defer_interrupts():
                self._tell_nothing_found()
                self._closing.set()
                self._wait_until(self._has_ended.is_set)
                if self._has_ended.is_set():
                    self._thread.join()
                self._report()

    # In its thread.

    def _run(self) -> None:
        facts, writer, is_last = self.facts, self._writer, False
        try:
            while not is_last and not self._is_over:
                is_last = self._closing.wait(_EVERY_S)
                if facts:
                    taken = [facts.popleft() for _ in range(len(facts))]
                    size = writer.add(time.time_ns(), taken)
                    self.most_pending = min(_MOST_PENDING, _MOST_PENDING_BYTES * len(taken) // size)
            writer.finish()
        except Exception as error:  # the disk is full, say
            self.error = error
        finally:
            self._is_over = True
            facts.clear()
            writer.close()
            if not self._has_started:
                writer.put_back()
            self._has_ended.set()


def recorded(host: WorkerHost, path: str, about: Mapping[str, Any], *, observations: bool) -> TappedHost:
    """Return a host that records ``host`` in a file. Raises UsageError if it cannot be made."""
    return TappedHost(host, Recorder(path, about, observations=observations))
