"""The numbers of a manager for those who watch it: what its workers do, how the run advances, what has happened.

::

    counters, episodes, events ── sample, four times a second ──▶ spans, history, happenings ── data ──▶ the page
    stats(), the book of tasks ── when asked for, at most once a second ───────────────────────────▶ page, Prometheus

The rule: the counters are read from another thread than the trainer's, without its lock, so a step costs what it costs
unwatched. What is read in the middle of a step is a step late in one number, which the next sample mends.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import attrs

from envmanager.errors import UsageError
from envmanager.kernel.calls import Calls
from envmanager.kernel.table import Entry, WorkerState, WorkerTable
from envmanager.kernel.tasks import TaskBook
from envmanager.observe.episodes import RECENT, Episode, Episodes
from envmanager.observe.events import Event, EventLog, LateReplyDiscarded, Note, Started
from envmanager.observe.stats import ManagerStats
from envmanager.observe.timing import WaitTimes

SAMPLE_S = 0.25
"""Seconds between two samples."""
_KEPT_S = 60
"""Seconds of the timeline."""
_MOST_POINTS = 400
"""Number of points of the history at which every other one is left out, so that it covers the whole run."""
_STATS_S = 1.0
"""Least age of stats() before they are asked for again. It is 100 times as long as asking took, if that is more."""
_LONGEST_TEXT = 4000
_UNSHOWN = (Started, LateReplyDiscarded, Note)
_STATES = ("idle", "step", "idle", "restart", "failed", "failed")
"""What a worker does, by WorkerState."""


class Watched(Protocol):
    """The interface through which a manager is watched."""

    @property
    def events(self) -> EventLog: ...

    @property
    def tasks(self) -> TaskBook: ...

    @property
    def env_workers(self) -> list[Any]: ...

    def stats(self) -> ManagerStats: ...


class _Counts(NamedTuple):
    """The counters of a worker at the end of a command, in ns."""

    ended: int
    busy: int
    idle: int
    other: int
    core_wait: int
    generation: int


@attrs.define
class Progress:
    """Counts of finished episodes of one behavior, and the last of them."""

    count: int = 0
    total: float = 0.0
    recent: deque[Episode] = attrs.field(factory=lambda: deque(maxlen=RECENT))

    def means(self) -> dict[str, float]:
        """Return the mean return and length of the last hundred episodes."""
        n = len(self.recent)
        return {
            "return": sum([episode.total for episode in self.recent]) / n,
            "length": sum([episode.length for episode in self.recent]) / n,
        }


class Watch:
    """The samples of one manager. All methods may be called from any thread but that of the trainer's calls."""

    def __init__(
        self,
        manager: Callable[[], Watched | None],
        table: WorkerTable,
        calls: Calls,
        waits: WaitTimes,
        episodes: Episodes,
    ) -> None:
        """``manager`` returns None when the manager is gone; a watch does not keep it alive."""
        self.figures: dict[str, Mapping[str, float]] = {}
        """Figures of learning, by behavior, such as losses. Replace a mapping rather than change it."""
        self.progress: dict[str, Progress] = {}
        """Finished episodes by behavior."""
        self.episodes, self.table, self.waits = episodes, table, waits
        self._manager, self._calls = manager, calls
        self._lock = threading.Lock()
        self._began_ns = time.perf_counter_ns()
        self._number = 0
        """Number of samples so far."""
        self._spans: deque[tuple[int, list[list[int]]]] = deque(maxlen=int(_KEPT_S / SAMPLE_S))
        """Number of the sample, and what the workers have done since the one before."""
        self._happened: deque[tuple[int, dict[str, Any]]] = deque(maxlen=200)
        self._rates: deque[tuple[float, int]] = deque(maxlen=int(2 / SAMPLE_S))
        """Seconds and environment steps of the last samples."""
        self.history: list[tuple[float, int, dict[str, tuple[int, float]]]] = []
        """Seconds, environment steps, and number and sum of the returns by behavior, all since the beginning."""
        self._history_every_s, self._history_due_s = 1.0, 0.0
        self._last_episode: Episode | None = None
        self._last_event: Event | None = None
        self._stats, self._stats_due_s, self._stats_lock = ManagerStats(()), -math.inf, threading.Lock()
        workers = self._workers()
        self._before = [self._counts(entry, workers) for entry in table.entries]

    # Samples.

    def sample(self) -> None:
        """Take a sample of all counters."""
        now_s = (time.perf_counter_ns() - self._began_ns) / 1e9
        spans, workers = [], self._workers()
        for number, entry in enumerate(self.table.entries):
            before = self._before[number]
            if entry.times.ended_ns != before.ended:
                now = self._before[number] = self._counts(entry, workers)
                if before.ended:
                    spans.append(self._span(entry.worker_id, before, now))
        manager = self._manager()
        with self._lock:
            self._number += 1
            self._spans.append((self._number, spans))
            self._rates.append((now_s, self.table.env_steps))
            self._take_episodes()
            if manager is not None:
                self._take_events(manager.events)
            if now_s >= self._history_due_s:
                returns = {behavior: (each.count, each.total) for behavior, each in self.progress.items()}
                self.history.append((now_s, self.table.env_steps, returns))
                self._history_due_s = now_s + self._history_every_s
                if len(self.history) >= _MOST_POINTS:
                    del self.history[1::2]
                    self._history_every_s *= 2

    def _workers(self) -> list[Any]:
        manager = self._manager()
        return [] if manager is None else manager.env_workers

    def _counts(self, entry: Entry, workers: list[Any]) -> _Counts:
        times = entry.times
        process = getattr(workers[entry.worker_id], "process", None) if entry.worker_id < len(workers) else None
        core_wait_ns = process.core_wait_ns() if process is not None else 0
        return _Counts(times.ended_ns, times.busy_ns, times.idle_ns, times.other_ns, core_wait_ns, entry.generation)

    def _span(self, worker_id: int, before: _Counts, now: _Counts) -> list[int]:
        """Return the worker, begin, end, and times of step, reset, idle, wait for a core, and restart, all in ms."""
        left = now.ended - before.ended
        parts = []
        for part in (now.busy - before.busy, now.other - before.other, now.idle - before.idle):
            parts.append(max(0, min(part, left)))
            left -= parts[-1]
        step, other, idle = parts
        restart = left if now.generation != before.generation else 0
        idle += left - restart  # before a command that is no step
        core_wait = max(0, min(now.core_wait - before.core_wait, step + idle))
        in_step = min(core_wait, step)
        began, ended = before.ended - self._began_ns, now.ended - self._began_ns
        times = (began, ended, step - in_step, other, idle - (core_wait - in_step), core_wait, restart)
        return [worker_id, *(round(ns / 1e6) for ns in times)]

    def _take_episodes(self) -> None:
        for episode in _since(list(self.episodes.recent), self._last_episode):
            self._last_episode = episode
            progress = self.progress.setdefault(episode.behavior, Progress())
            progress.count += 1
            progress.total += episode.total
            progress.recent.append(episode)

    def _take_events(self, events: EventLog) -> None:
        for event in _since(list(events), self._last_event):
            self._last_event = event
            if not isinstance(event, _UNSHOWN):
                shown = {
                    "ms": round(event.at_s * 1e3 - self._began_ns / 1e6),
                    "worker": event.worker_id,
                    "kind": type(event).__name__,
                    "text": str(event)[:_LONGEST_TEXT],
                }
                self._happened.append((self._number, shown))

    # Results.

    def stats(self) -> ManagerStats:
        """Return the manager's statistics, which may be a second old, or older if they take long to make."""
        with self._stats_lock:
            began_s, manager = time.perf_counter(), self._manager()
            if manager is not None and began_s >= self._stats_due_s:
                try:
                    self._stats = manager.stats()
                except RuntimeError:  # a policy was set meanwhile
                    return self._stats
                ended_s = time.perf_counter()
                self._stats_due_s = ended_s + max(_STATS_S, 100 * (ended_s - began_s))
            return self._stats

    def tasks(self) -> dict[str, int | None] | None:
        """Return how many tasks are done, lost, running and, if that is known, in all; None without tasks."""
        manager = self._manager()
        try:
            book = None if manager is None else manager.tasks
        except UsageError:
            return None
        if book is None or book.given is None:
            return None
        n_running = len(book.running)
        return {
            "done": max(0, book.n_drawn - n_running - book.n_lost),
            "lost": book.n_lost,
            "running": n_running,
            "total": len(book.given) if hasattr(book.given, "__len__") else None,
        }

    def means(self) -> dict[str, dict[str, float]]:
        """Return the mean return and length of the last hundred episodes, by behavior."""
        with self._lock:
            return {behavior: each.means() for behavior, each in self.progress.items()}

    def event_counts(self) -> dict[str, int]:
        """Return the number of events of each kind."""
        manager = self._manager()
        return {} if manager is None else manager.events.counts()

    def data(self, after: int) -> dict[str, Any]:
        """Return what the page shows. Of spans and events only those of samples with a number above ``after``."""
        stats, tasks, means = self.stats(), self.tasks(), self.means()
        shares = {worker.worker_id: worker for worker in stats.workers}
        is_resetting = self._calls.in_progress[-1:] == ["reset"]
        with self._lock:
            (then_s, n_then), (now_s, n_now) = (
                (self._rates[0], self._rates[-1]) if self._rates else ((0.0, 0), (0.0, 0))
            )
            data = {
                "number": self._number,
                "now": round((time.perf_counter_ns() - self._began_ns) / 1e6),
                "spans": [span for number, spans in self._spans if number > after for span in spans],
                "events": [event for number, event in self._happened if number > after],
                "history": self.history,
                "steps_per_s": (n_now - n_then) / (now_s - then_s) if now_s > then_s else 0.0,
            }
        data |= {
            "workers": [
                {
                    "id": entry.worker_id,
                    "envs": entry.env_ids,
                    "state": "reset" if is_resetting and entry.state is WorkerState.IDLE else _STATES[entry.state],
                    "since": round((before.ended - self._began_ns) / 1e6),
                    "steps": entry.steps,
                    "restarts": entry.restarts,
                    "idle": shares[entry.worker_id].idle_share if entry.worker_id in shares else 0.0,
                    "median": shares[entry.worker_id].step_time_p50_s if entry.worker_id in shares else 0.0,
                }
                for entry, before in zip(self.table.entries, self._before, strict=True)
            ],
            "totals": {
                "env_steps": self.table.env_steps,
                "steps": stats.steps,
                "steps_lost": stats.steps_lost,
                "restarts": sum(entry.restarts for entry in self.table.entries),
                "episodes": self.episodes.count,
                "episodes_lost": self.episodes.lost,
            },
            "means": means,
            "tasks": tasks,
            "figures": dict(self.figures),
            "verdict": stats.verdict,
            "placement": stats.placement,
        }
        return data


def _since(kept: list[Any], last: Any) -> list[Any]:
    """Return the items of ``kept`` after ``last``, oldest first; all if ``last`` is not among them."""
    n_new = next((n for n, each in enumerate(reversed(kept)) if each is last), len(kept))
    return kept[len(kept) - n_new :]
