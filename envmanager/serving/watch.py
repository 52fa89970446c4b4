"""The numbers of a manager for those who watch it: what its workers do, how the run advances, what has happened.

::

    counters, episodes, events ── sample, four times a second ──▶ spans, history, texts ──▶ the page
    stats(), the book of tasks ── when asked for, at most once a second ──▶ the page, Prometheus

The rule: all is read from other threads than the trainer's and without its lock, so a step costs what it costs
unwatched. A number that is read in the middle of a step may lack that step; the next sample has it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs

from envmanager.errors import UsageError
from envmanager.kernel.calls import Calls
from envmanager.kernel.table import Entry, WorkerState, WorkerTable
from envmanager.observe.episodes import RECENT, Episodes, FinishedEpisode, means_of_measures
from envmanager.observe.events import Event, LateReplyDiscarded, Note, Started
from envmanager.observe.stats import ManagerStats
from envmanager.observe.timing import WaitTimes

SAMPLE_S = 0.25
"""Seconds between two samples."""
_N_SAMPLES = round(60 / SAMPLE_S)
"""Number of samples whose spans are kept."""
_MOST_POINTS = 400
"""Number of points of the history at which every other one is left out, so that it covers the whole run."""
_STATS_S = 1.0
"""Least age of stats() at which they are made again. It is 100 times as long as making them took, if that is more."""
_LONGEST_TEXT = 4000
_UNSHOWN = (Started, LateReplyDiscarded, Note)
_STATES = ("idle", "step", "idle", "restart", "failed", "failed")
"""What a worker does, by WorkerState."""


class _Counts(NamedTuple):
    """The counters of a worker at the end of a command. Times in ns."""

    ended: int
    busy: int
    other: int
    idle: int
    core_wait: int
    generation: int


@attrs.define
class _Progress:
    """Finished episodes of one behavior: their number, the sum of their returns, and the last of them."""

    count: int = 0
    total: float = 0.0
    recent: deque[FinishedEpisode] = attrs.field(factory=lambda: deque(maxlen=RECENT))


class Watch:
    """The samples of one manager, which it does not keep alive. Its methods may be called from any thread."""

    def __init__(
        self, manager: Callable[[], Any], table: WorkerTable, calls: Calls, waits: WaitTimes, episodes: Episodes
    ) -> None:
        """``manager`` returns the EnvManager, or None when it is gone. The others are parts of it, or its trainer's.

        ``episodes`` may be a proxy. What may hold errors is not kept alive, because tracebacks lead to the manager.
        """
        self.table: WorkerTable = weakref.proxy(table)
        self.waits, self.episodes = waits, episodes
        self.figures: dict[str, Mapping[str, float]] = {}
        """Figures of learning, by behavior, such as losses: numbers, also of NumPy and PyTorch. No others are shown."""
        self.facts: dict[str, str] = {}
        """Further texts to show, by name, such as the goal of a training and its last evaluation."""
        self.manager, self._calls = manager, calls
        self._began_ns = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._number = 0
        """Number of samples so far."""
        self._spans: deque[tuple[int, list[list[int]]]] = deque(maxlen=_N_SAMPLES)
        """Number of the sample, and what the workers have done since the one before."""
        self._shown: deque[tuple[int, dict[str, Any]]] = deque(maxlen=200)
        """Number of the sample, and an event."""
        self._rates = deque([(0.0, table.env_steps)], maxlen=round(2 / SAMPLE_S))
        """Seconds and environment steps of the last samples."""
        self._history: list[tuple[float, int, dict[str, tuple[int, float]]]] = []
        """Seconds, environment steps, and number and sum of the returns by behavior, all since the beginning."""
        self._point_every_s, self._point_due_s = 1.0, 0.0
        self._progress: dict[str, _Progress] = {}
        self._last_episode: FinishedEpisode | None = None
        self._last_event: Callable[[], Event | None] = lambda: None
        self._stats, self._stats_due_s, self._stats_lock = ManagerStats(()), -math.inf, threading.Lock()
        self._before = [self._counts(entry) for entry in table.entries]

    def sample(self, now_ns: int) -> None:
        """Take a sample of all counters. ``now_ns``: the time, by ``time.perf_counter_ns``."""
        now_s, manager, spans = (now_ns - self._began_ns) / 1e9, self.manager(), []
        for number, entry in enumerate(self.table.entries):
            before = self._before[number]
            if entry.times.ended_ns != before.ended:
                now = self._before[number] = self._counts(entry)
                if before.ended:
                    spans.append(self._span(entry.worker_id, before, now))
        with self._lock:
            self._number += 1
            self._spans.append((self._number, spans))
            self._rates.append((now_s, self.table.env_steps))
            for episode in _since(list(self.episodes.recent), self._last_episode):
                self._last_episode = episode
                own = self._progress.setdefault(episode.behavior, _Progress())
                own.count, own.total = own.count + 1, own.total + episode.total
                own.recent.append(episode)
            for event in [] if manager is None else _since(list(manager.events), self._last_event()):
                self._last_event = weakref.ref(event)
                if not isinstance(event, _UNSHOWN):
                    at_ms, text = self._ms(int(event.at_s * 1e9)), str(event)[:_LONGEST_TEXT]
                    shown = {"ms": at_ms, "worker": event.worker_id, "kind": type(event).__name__, "text": text}
                    self._shown.append((self._number, shown))
            if now_s >= self._point_due_s:
                self._point_due_s = now_s + self._point_every_s
                returns = {behavior: (own.count, own.total) for behavior, own in self._progress.items()}
                self._history.append((now_s, self.table.env_steps, returns))
                if len(self._history) >= _MOST_POINTS:
                    del self._history[1::2]
                    self._point_every_s *= 2

    def _ms(self, at_ns: int) -> int:
        return round((at_ns - self._began_ns) / 1e6)

    def _counts(self, entry: Entry) -> _Counts:
        times, manager = entry.times, self.manager()
        worker = None if manager is None else manager.env_workers[entry.worker_id]
        core_wait_ns = getattr(worker, "core_wait_ns", int)()
        return _Counts(times.ended_ns, times.busy_ns, times.other_ns, times.idle_ns, core_wait_ns, entry.generation)

    def _span(self, worker_id: int, before: _Counts, now: _Counts) -> list[int]:
        """Return the worker, begin, end, and times of step, reset, idle, wait for a core, and restart, all in ms."""
        left, parts = now.ended - before.ended, []
        for part in (now.busy - before.busy, now.other - before.other, now.idle - before.idle):
            parts.append(max(0, min(part, left)))
            left -= parts[-1]
        step, other, idle = parts
        restart = left if now.generation != before.generation else 0
        idle += left - restart  # before a command that is no step
        core_wait = max(0, min(now.core_wait - before.core_wait, step + idle))
        before_step = min(core_wait, idle)  # as in the verdict
        times = step - (core_wait - before_step), other, idle - before_step, core_wait, restart
        return [worker_id, self._ms(before.ended), self._ms(now.ended), *(round(ns / 1e6) for ns in times)]

    def stats(self) -> ManagerStats:
        """Return the manager's statistics, which may be a second old, or older if they take long to make."""
        with self._stats_lock:
            began_s, manager = time.perf_counter(), self.manager()
            if manager is not None and began_s >= self._stats_due_s:
                self._stats = manager.stats()
                took_s = time.perf_counter() - began_s
                self._stats_due_s = began_s + took_s + max(_STATS_S, 100 * took_s)
            return self._stats

    def tasks(self) -> dict[str, int | None] | None:
        """Return how many tasks are done, lost, running and, if that is known, in all; None without tasks."""
        try:
            book = self.manager().tasks
        except (UsageError, AttributeError):
            return None
        if book.given is None:
            return None
        n_running, n_lost = len(book.running), book.n_lost
        total = len(book.given) if hasattr(book.given, "__len__") else None
        return {"done": max(0, book.n_drawn - n_running - n_lost), "lost": n_lost, "running": n_running, "total": total}

    def known_figures(self) -> dict[str, dict[str, float]]:
        """Return the figures of learning that are numbers, by behavior."""
        known: dict[str, dict[str, float]] = {}
        for behavior, own in self.figures.copy().items():
            for name, figure in dict(own).items() if isinstance(own, Mapping) else ():
                with contextlib.suppress(TypeError, ValueError, OverflowError):
                    known.setdefault(behavior, {})[name] = float(figure)
        return known

    def means(self) -> dict[str, dict[str, float]]:
        """Return the means of returns, lengths and measures of the last hundred episodes, by behavior."""
        with self._lock:
            recent = {behavior: list(own.recent) for behavior, own in self._progress.items()}
        return {
            behavior: {
                "return": sum([episode.total for episode in own]) / len(own),
                "length": sum([episode.length for episode in own]) / len(own),
                **means_of_measures(own, self.episodes.measures),
            }
            for behavior, own in recent.items()
        }

    def data(self, after: int) -> dict[str, Any]:
        """Return what the page shows. Of spans and events only those of samples with a number above ``after``."""
        stats, entries = self.stats(), self.table.entries
        is_resetting = self._calls.in_progress[-1:] == ["reset"]
        workers = []
        for entry, before, own in zip(entries, self._before, stats.workers, strict=False):
            state = "reset" if is_resetting and entry.state is WorkerState.IDLE else _STATES[entry.state]
            known = {"id": entry.worker_id, "envs": entry.env_ids, "steps": entry.steps, "restarts": entry.restarts}
            shares = {"idle": own.idle_share, "median": own.step_time_p50_s, "memory": own.memory_bytes}
            workers.append({**known, **shares, "state": state, "since": self._ms(before.ended)})
        with self._lock:
            (then_s, n_then), (now_s, n_now) = self._rates[0], self._rates[-1]
            sampled = {
                "number": self._number,
                "spans": [span for number, spans in self._spans if number > after for span in spans],
                "events": [event for number, event in self._shown if number > after],
                "history": list(self._history),
            }
        return {
            **sampled,
            "now": self._ms(time.perf_counter_ns()),
            "steps_per_s": (n_now - n_then) / max(1e-9, now_s - then_s),
            "env_steps": self.table.env_steps,
            "restarts": sum([entry.restarts for entry in entries]),
            "episodes": self.episodes.count,
            "episodes_lost": self.episodes.lost,
            "episodes_kept": stats.episodes_kept,
            "means": self.means(),
            "tasks": self.tasks(),
            "figures": self.known_figures(),
            "facts": {str(name): str(text)[:_LONGEST_TEXT] for name, text in self.facts.copy().items()},
            "verdict": stats.verdict or stats.placement,
            "workers": workers,
        }


def _since(kept: list[Any], last: Any) -> list[Any]:
    """Return the items of ``kept`` after ``last``, oldest first; all if ``last`` is not among them."""
    n_new = next((n for n, each in enumerate(reversed(kept)) if each is last), len(kept))
    return kept[len(kept) - n_new :]
