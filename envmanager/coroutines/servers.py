"""The book of workers that have no connection to their server: when they try again, and events that tell of them all.

A first reset that raises ConnectionError is tried again, whatever the environment: OpenEnv's, MCP's or a user's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from envmanager.errors import ConnectionLost
from envmanager.kernel.table import Entry
from envmanager.observe.events import EventLog, ServerBack, ServerGone

LASTING_S = 10.0
"""Time (s) that a connection lasts at least if its loss says nothing of its environment, but of the server."""
_FIRST_TRY_S, _LONGEST_TRY_S = 0.05, 0.75
"""First and longest time (s) before another try of a reset without a server. Chance takes off up to half of it."""
_TRY_S = 0.002
"""Mean time (s) between two tries of any of many environments: they try less often, so that the tries take little."""
_MOST_DOUBLED = 20


class Servers:
    """The workers that have no connection to their server, since the first of them lost its."""

    def __init__(self, entries: Sequence[Entry], events: EventLog, wait_s: float) -> None:
        """``wait_s``: time for which the first reset waits for a server."""
        self.missed_by: dict[int, None] = {}
        """Workers without a connection, by worker_id."""
        self.waiting: set[Any] = set()
        """Sessions whose first reset is to be tried again. Only loops use the set."""
        self._entries, self._events, self._wait_s = entries, events, wait_s
        self._n_workers = 0
        """Number of workers that were added to ``missed_by`` since it was empty."""
        self._since_s = 0.0
        self._unlasting: set[int] = set()
        """Workers whose last connection was lost soon."""

    def delay_s(self, n_tries: int) -> float:
        """Return the time (s) before another try of a first reset that was tried again ``n_tries`` times."""
        longest_s = max(_LONGEST_TRY_S, _TRY_S * len(self.waiting))
        return min(_FIRST_TRY_S * 2.0 ** min(n_tries, _MOST_DOUBLED), longest_s) * random.uniform(0.5, 1.0)

    def note_loss(self, error: ConnectionLost) -> None:
        """Take note that a worker has lost its connection. Decide whether its restart counts.

        It does if no server was found, or if this connection was lost soon, as was the one before.
        """
        worker_id, was_soon = error.worker_id, error.is_charged
        error.is_charged = error.timeout_s > 0 or (was_soon and worker_id in self._unlasting)
        (self._unlasting.add if was_soon else self._unlasting.discard)(worker_id)
        assert isinstance(error.__cause__, Exception)
        self.note_gone(worker_id, error.__cause__)

    def note_gone(self, worker_id: int, error: Exception) -> None:
        """Take note that a worker has no connection because of ``error``. If it is the first, add an event."""
        for other in [each for each in self.missed_by if self._entries[each].error is not None]:
            del self.missed_by[other]  # given up
        if not self.missed_by:
            self._since_s, self._n_workers = time.monotonic(), 0
            generation = self._entries[worker_id].generation
            self._events.add(ServerGone(worker_id=worker_id, generation=generation, error=error, wait_s=self._wait_s))
        self._n_workers += worker_id not in self.missed_by
        self.missed_by[worker_id] = None

    def note_back(self, worker_id: int) -> None:
        """Take note that a worker has a connection again. If it is the last, add an event."""
        if worker_id not in self.missed_by:
            return
        del self.missed_by[worker_id]
        if not self.missed_by:
            generation, after_s = self._entries[worker_id].generation, time.monotonic() - self._since_s
            event = ServerBack(worker_id=worker_id, generation=generation, n_workers=self._n_workers, after_s=after_s)
            self._events.add(event)
