"""The shares of several kinds of environments: what each kind has had since the reset, and which kinds wait.

The *pace* of a kind is what it has had (steps, or time in steps) over its share. Equal paces are exact shares. A kind
whose pace is ahead of the slowest one is held back: its steps stay in the outboxes of their workers.

The rule: a kind holds the others back only while it can go on, that is while a worker of it that has not failed since
its last step has one in flight or to deliver. The slowest of these kinds is never held back, so none waits for ever.
A kind that comes back, because its worker was replaced or it has tasks again, goes on at the pace of the slowest.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from envmanager.data.steps import CommandName
from envmanager.errors import UsageError
from envmanager.kernel.table import Entry, WorkerState, WorkerTable
from envmanager.observe.events import EventLog, KindLeftOut
from envmanager.options import Wait

_STEP, _IN_FLIGHT, _READY = CommandName.STEP, WorkerState.IN_FLIGHT, WorkerState.READY
_LEAD = 3.0
"""Number of responses of the coarsest kind by which a kind may be ahead, so that none stops after each response."""
_SMOOTHING = 1 / 16


class Shares:
    """The count of what each kind has had, since a reset, under the shares of a Wait."""

    def __init__(self, wait: Wait, table: WorkerTable, events: EventLog) -> None:
        """Begin to count. Raises UsageError unless ``wait`` gives a share to each kind, and to no other."""
        assert wait.shares is not None
        self.given = given = wait.shares
        self._shares_of = wait.shares_of
        if given.keys() != {*table.kinds}:
            kinds = ", ".join(table.kinds) or "of one kind, without a name"
            raise UsageError(
                f"shares are of {', '.join(given)}, but the environments are {kinds}: give a share to each kind "
                "that env_factory (in a config env) lists with a behavior, and to no other."
            )
        self._share = {kind: share / sum(given.values()) for kind, share in given.items()}
        self._table, self._events = table, events
        self._had = dict.fromkeys(self._share, 0.0)
        self._response = dict.fromkeys(self._share, 0.0)
        """What a response of each kind has brought lately."""
        for entry in table.entries if wait.shares_of == "steps" else ():
            self._response[entry.kind] = max(self._response[entry.kind], len(entry.env_ids))
        self._restarts = [entry.restarts for entry in table.entries]
        """Restarts of each worker when its last step was delivered. If there are more, it has failed since."""
        self._busy_ns = [entry.times.busy_ns for entry in table.entries]
        self._able: Set[str] = {*table.kinds}
        self._told: set[str] = set()

    def are_of(self, wait: Wait) -> bool:
        """Return whether ``wait`` gives the same shares, so that the count goes on."""
        return (wait.shares, wait.shares_of) == (self.given, self._shares_of)

    def held_back(self) -> Set[str]:
        """Return the kinds that are too far ahead."""
        able: set[str] = set()
        for entry in self._table.entries:
            has_failed = entry.restarts != self._restarts[entry.worker_id]
            if (entry.state is _IN_FLIGHT or entry.state is _READY) and not has_failed:
                able.add(entry.kind)
        share, had = self._share, self._had
        paces = {kind: had[kind] / share[kind] for kind in able}
        slowest = min((paces[kind] for kind in (able & self._able) or able), default=0.0)
        for kind in able - self._able:
            paces[kind] = max(paces[kind], slowest)
            had[kind] = paces[kind] * share[kind]
        for kind in self._able - able - self._told:
            self._tell(kind)
        self._able = able
        limit = slowest + _LEAD * max((self._response[kind] / share[kind] for kind in able), default=0.0)
        return {kind for kind, pace in paces.items() if pace > limit}

    def count(self, entries: Iterable[Entry]) -> None:
        """Count the steps of ``entries`` that are delivered next."""
        for entry in entries:
            if entry.outbox[0].name is not _STEP:
                continue
            worker_id, kind = entry.worker_id, entry.kind
            had: float = entry.n_envs_in_flight
            if self._shares_of == "time":
                had = (entry.times.busy_ns - self._busy_ns[worker_id]) / 1e9
                self._busy_ns[worker_id] = entry.times.busy_ns
            self._had[kind] += had
            self._response[kind] += _SMOOTHING * (had - self._response[kind])
            self._restarts[worker_id] = entry.restarts
            self._told.discard(kind)

    def _tell(self, kind: str) -> None:
        """Report that a kind is left out, if it is because its workers fail; else it rests."""
        for entry in self._table.entries:
            has_failed = entry.restarts != self._restarts[entry.worker_id]
            if entry.kind == kind and has_failed and entry.error is None and kind not in self._told:
                self._told.add(kind)
                who = {"worker_id": entry.worker_id, "generation": entry.generation}
                why = "its workers have failed, and have taken no step since"
                self._events.add(KindLeftOut(**who, kind=kind, why=why))
