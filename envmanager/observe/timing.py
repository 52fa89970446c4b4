"""Measured times: starts, steps, idle time and queueing of workers, and waits of the trainer.

If a track is set, the starts, commands and waits are also added to the trace as spans.

This code runs in every step, so it does little work per step, and its memory does not grow with the number of steps.
"""

from __future__ import annotations

import array
import time
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from envmanager.observe.tracing import SpanTrack

_NO_BUCKETS = (np.zeros(0, np.int16), np.zeros(0, np.int64), np.zeros(0, np.uint64))


class Histogram:
    """A histogram of times in nanoseconds, with buckets whose width grows with the time.

    There are 16 buckets for every doubling, as in HdrHistogram. A percentile is the mean of the times in its bucket. So
    it is within 1/16 of the true value, and exact if all times are equal. Sums of buckets must be below 2**64 ns.
    """

    __slots__ = ("_buckets", "_recent", "add")

    def __init__(self) -> None:
        self._buckets: tuple[np.ndarray, np.ndarray, np.ndarray] = _NO_BUCKETS
        """Numbers of the buckets that hold a time, in ascending order, and the count and sum of the times in each."""
        self._recent = array.array("Q")
        self.add = self._recent.append
        """Function that adds a time ≥ 0; a C method, for speed. Call ``count`` regularly to empty the buffer."""

    def count(self) -> None:
        """Move the times added since the last call from the buffer to the buckets. Call it where times are added."""
        n = len(self._recent)
        self._buckets = self._counted(n)
        del self._recent[:n]

    def _counted(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the buckets with the first ``n`` times of the buffer added."""
        times_ns = np.frombuffer(self._recent[:n].tobytes(), np.uint64)
        n_bits = np.frexp(times_ns.astype(np.float64))[1]
        shift = np.maximum(n_bits - 5, 0).astype(np.uint64)
        own = ((shift << np.uint64(4)) + (times_ns >> shift)).astype(np.int16)
        before, counts_before, sums_before = self._buckets
        buckets = np.concatenate([before, own])
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        firsts = np.flatnonzero(np.diff(buckets, prepend=np.int16(-1)))
        counts = np.concatenate([counts_before, np.ones(len(own), np.int64)])[order]
        sums_ns = np.concatenate([sums_before, times_ns])[order]
        return buckets[firsts], np.add.reduceat(counts, firsts), np.add.reduceat(sums_ns, firsts)

    def percentiles(self, *percents: int) -> list[float]:
        """Return the percentiles ``percents`` (0 to 100) of all added times, in ns; zeros if no time was added."""
        if not self._recent and not len(self._buckets[0]):
            return [0.0] * len(percents)
        _, counts, sums_ns = self._counted(len(self._recent))  # keeps nothing: another thread may ask
        seen = np.cumsum(counts)  # numbers of times in each bucket and all below
        total = int(seen[-1])
        places = np.searchsorted(seen, [max(1, -(-percent * total // 100)) for percent in percents])
        return [int(sums_ns[place]) / int(counts[place]) for place in places.tolist()]


@attrs.define(eq=False)
class WorkerTimes:
    """Busy, idle and queue times of one worker over all its generations, and the duration of its last start."""

    start_s: float = 0.0
    steps: int = 0
    busy_ns: int = 0
    idle_ns: int = 0
    queued_ns: int = 0
    other_ns: int = 0
    """Time in commands that are no steps, such as resets."""
    busy: Histogram = attrs.field(factory=Histogram, init=False)
    track: SpanTrack | None = attrs.field(default=None, init=False)
    count_after: int = 1023
    """Bit mask for the number of steps: every 1,024 steps the buffered times are moved to the buckets of ``busy``."""
    ended_ns: int = 0
    """Time at which the last command ended; 0 before the first one."""

    def shares(self, n_delivered: int) -> dict[str, Any]:
        """Return the fields of WorkerStats that say how long things took. They include steps not delivered yet."""
        total_ns = self.busy_ns + self.idle_ns
        p50, p95, p99 = self.busy.percentiles(50, 95, 99)
        return {
            "start_s": self.start_s,
            "step_time_s": self.busy_ns / max(1, self.steps) / 1e9,
            "step_time_p50_s": p50 / 1e9,
            "step_time_p95_s": p95 / 1e9,
            "step_time_p99_s": p99 / 1e9,
            "idle_share": self.idle_ns / total_ns if total_ns else 0.0,
            "queue_wait_s": self.queued_ns / max(1, n_delivered) / 1e9,
        }

    def started(self, asked_ns: int, ready_ns: int, *, generation: int) -> None:
        """Record a start of the worker, requested at ``asked_ns`` and finished at ``ready_ns``."""
        self.start_s = (ready_ns - asked_ns) / 1e9
        self.ended_ns = ready_ns
        if self.track is not None:
            self.track.begin(generation)
            self.track.span("start", asked_ns, ready_ns)

    def stepped(self, busy_ns: int, ended_ns: int) -> None:
        """Record a step that took ``busy_ns`` and ended at ``ended_ns``, and the idle time before it."""
        began_ns = ended_ns - busy_ns
        if began_ns > self.ended_ns > 0:
            self.idle_ns += began_ns - self.ended_ns
        self.steps += 1
        self.busy_ns += busy_ns
        self.busy.add(busy_ns)
        self.ended_ns = ended_ns
        if not self.steps & self.count_after:
            self.busy.count()
        if self.track is not None:
            self.track.span("step", ended_ns - busy_ns, ended_ns)

    def responded(self, name: str, busy_ns: int, ended_ns: int) -> None:
        """Record a command other than a step, called ``name``, which took ``busy_ns`` and ended at ``ended_ns``."""
        self.other_ns += busy_ns
        self.ended_ns = ended_ns
        if self.track is not None:
            self.track.span(name, ended_ns - busy_ns, ended_ns)


@attrs.define(eq=False)
class WaitTimes:
    """A counter of the nanoseconds that a trainer has waited for responses."""

    waited_ns: int = 0
    track: SpanTrack | None = attrs.field(default=None, init=False)

    def add(self, began_ns: int) -> None:
        """Add a wait that began at ``began_ns`` and ends now."""
        ended_ns = time.perf_counter_ns()
        self.waited_ns += ended_ns - began_ns
        if self.track is not None:
            self.track.span("wait for workers", began_ns, ended_ns)
