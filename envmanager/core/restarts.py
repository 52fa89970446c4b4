"""Decides whether a worker that failed is replaced, and when.

::

    error ── Supervisor.judge ──▶ Replace(delay_s)    within the budget
                              ──▶ GiveUp(error)       raise it
                              ──▶ GiveUp(error, drop) go on without that worker

The rule: only arithmetic on times that the caller passes in; nothing here starts, stops or waits for anything.
"""

from __future__ import annotations

import random
from collections import deque

import attrs

from envmanager.errors import BadObservation, EnvRaised, RestartsExhausted, WorkerError, WorkerTimedOut
from envmanager.options import RestartPolicy

LONGEST_BACKOFF_S = 30.0


@attrs.frozen
class Replace:
    """Replace the worker, in ``delay_s`` seconds; ``number``: the how-many-th restart in the window that is."""

    delay_s: float
    number: int


@attrs.frozen
class GiveUp:
    """Leave the worker out: raise ``error``, or with ``drop`` go on without it."""

    error: Exception
    drop: bool = False


class Supervisor:
    """The budgets of all workers: each may be replaced ``max_restarts`` times within any ``within_s`` seconds.

    The time for which a hung worker was waited for does not count: a timeout is often as long as the window, and one
    that hangs in each reset would be replaced for ever.
    """

    def __init__(self, policy: RestartPolicy, n_workers: int, jitter: random.Random | None = None) -> None:
        self._policy = policy
        self._recent: list[deque[tuple[float, WorkerError]]] = [deque() for _ in range(n_workers)]
        self._hung_s = [0.0] * n_workers
        self._jitter = random.Random() if jitter is None else jitter

    def judge(self, worker_id: int, error: Exception, now: float) -> Replace | GiveUp:
        """What to do about a worker that failed with ``error`` at ``now`` (monotonic seconds)."""
        policy = self._policy
        if not isinstance(error, WorkerError):
            return GiveUp(error)
        if isinstance(error, EnvRaised | BadObservation) and policy.on_exception == "raise":
            return GiveUp(error)
        if policy.max_restarts == 0:
            return GiveUp(error, drop=policy.then == "drop")
        recent = self._recent[worker_id]
        if isinstance(error, WorkerTimedOut):
            self._hung_s[worker_id] += error.timeout_s
        now -= self._hung_s[worker_id]
        while recent and now - recent[0][0] > policy.within_s:
            recent.popleft()
        if len(recent) >= policy.max_restarts:
            first = recent[0][1]
            exhausted = RestartsExhausted(first=first, last=error, restarts=len(recent), within_s=policy.within_s)
            exhausted.__cause__ = error
            return GiveUp(exhausted, drop=policy.then == "drop")
        recent.append((now, error))
        return Replace(self._delay(len(recent)), len(recent))

    def forgive(self, worker_id: int) -> None:
        """Begin a new budget: the user has asked for a reset of a worker that was given up."""
        self._recent[worker_id].clear()

    def _delay(self, nth: int) -> float:
        """The first replacement starts at once; the others ever later, and not all at the same moment."""
        if nth == 1 or self._policy.backoff_s == 0:
            return 0.0
        longest = min(self._policy.backoff_s * 2.0 ** min(nth - 2, 60), LONGEST_BACKOFF_S)
        return longest * self._jitter.uniform(0.5, 1.0)
