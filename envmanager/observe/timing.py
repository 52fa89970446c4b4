"""Measures how long steps take and responses wait, without keeping every one of them.

Where a :class:`Track` is set, the same moments go into the trace too.

The rule: what is measured here is paid for in every step, so it is a few additions, and its memory does not grow.
"""

from __future__ import annotations

import array
import bisect
import itertools
import time
from typing import Any, Protocol

import attrs

_N_BUCKETS = 62 << 3
_COUNT_AFTER = 1023
"""Times are put into buckets after one step more than this, a power of two less one."""


class Track(Protocol):
    """A line of the trace, on which spans of time are drawn."""

    def begin(self, generation: int) -> None:
        """What follows is of this generation of a worker."""
        ...

    def span(self, name: str, began_ns: int, ended_ns: int) -> None:
        """Something named ``name`` lasted so long; times by ``time.monotonic_ns``."""
        ...


class Histogram:
    """How often each time was seen, in nanoseconds, in buckets whose width grows with the time.

    Eight buckets for every doubling, as in HdrHistogram: a percentile is wrong by at most 1/16 of itself, and exact
    below 16 ns. Times up to 2**64 ns fit.
    """

    __slots__ = ("_counts", "_recent", "add")

    def __init__(self) -> None:
        self._counts = [0] * _N_BUCKETS
        self._recent = array.array("Q")
        self.add = self._recent.append
        """Note one time, from 0 up; ``count`` is to follow now and then. No call of Python's: every step does this."""

    def count(self) -> None:
        """Put what was noted into the buckets."""
        times_ns = self._recent.tolist()
        del self._recent[: len(times_ns)]  # another thread may have added to it
        for time_ns in times_ns:
            shift = time_ns.bit_length() - 4
            self._counts[(shift << 3) + (time_ns >> shift) if shift > 0 else time_ns] += 1

    def percentiles(self, *percents: int) -> list[float]:
        """For each of ``percents`` the time that so many per cent did not exceed; 0.0 without any."""
        self.count()
        seen = list(itertools.accumulate(self._counts))  # up to and with each bucket
        total = seen[-1]
        if not total:
            return [0.0] * len(percents)
        return [_middle(bisect.bisect_left(seen, max(1, -(-percent * total // 100)))) for percent in percents]


def _middle(bucket: int) -> float:
    """The time in the middle of a bucket."""
    shift = max(0, (bucket >> 3) - 1)
    least = bucket - (shift << 3) << shift
    return least + ((1 << shift) - 1) / 2


@attrs.define(eq=False)
class WorkerTimes:
    """What one worker's steps have taken, over all its generations."""

    start_s: float = 0.0
    steps: int = 0
    busy_ns: int = 0
    idle_ns: int = 0
    queued_ns: int = 0
    busy: Histogram = attrs.field(factory=Histogram, init=False)
    track: Track | None = attrs.field(default=None, init=False)
    ended_ns: int = attrs.field(default=0, init=False)
    """When the last step ended; 0 as long as the worker has reported no times."""

    def started(self, asked_ns: int, ready_ns: int, *, generation: int) -> None:
        """The worker was asked for, and was ready, at these times."""
        self.start_s = (ready_ns - asked_ns) / 1e9
        if self.track is not None:
            self.track.begin(generation)
            self.track.span("start", asked_ns, ready_ns)

    def stepped(self, busy_ns: int, idle_ns: int, ended_ns: int) -> None:
        """A step took ``busy_ns``, after a wait of ``idle_ns``, and ended at ``ended_ns``."""
        self.steps += 1
        self.busy_ns += busy_ns
        self.idle_ns += idle_ns
        self.busy.add(busy_ns)
        self.ended_ns = ended_ns
        if not self.steps & _COUNT_AFTER:
            self.busy.count()
        if self.track is not None:
            self.track.span("step", ended_ns - busy_ns, ended_ns)

    def responded(self, name: str, busy_ns: int, ended_ns: int) -> None:
        """Another command than a step took ``busy_ns`` and ended at ``ended_ns``."""
        if self.track is not None:
            self.track.span(name, ended_ns - busy_ns, ended_ns)


@attrs.define(eq=False)
class WaitTimes:
    """How long a trainer has waited for responses."""

    waited_ns: int = 0
    track: Track | None = attrs.field(default=None, init=False)

    def wait(self, source: Any, timeout: float | None, n_wanted: int) -> Any:
        """``source.wait(timeout, n_wanted)``, measured."""
        began_ns = time.monotonic_ns()
        try:
            return source.wait(timeout, n_wanted)
        finally:
            ended_ns = time.monotonic_ns()
            self.waited_ns += ended_ns - began_ns
            if self.track is not None:
                self.track.span("wait for workers", began_ns, ended_ns)
