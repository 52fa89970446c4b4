"""Takes in what workers report besides their responses: behaviors that are new, and values that had to be cast."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from envmanager.core.table import WorkerTable
from envmanager.data.reports import News
from envmanager.data.specs import BehaviorSpec, merge_specs
from envmanager.observe.events import Event, ValuesCast


class Listener:
    """The specs of all behaviors seen so far, and which casts were reported."""

    def __init__(self, table: WorkerTable, add_event: Callable[[Event], None]) -> None:
        self.specs: dict[str, BehaviorSpec] = {}
        self.has_objects = False
        """Whether some action or observation is an object, so that sending it may fail."""
        self._table = table
        self._add_event = add_event
        self._casts_reported: set[tuple[int, str]] = set()

    def learn(self, specs: Mapping[str, BehaviorSpec], worker_id: int) -> None:
        """Add a worker's specs; SpecConflict when a behavior has two."""
        merge_specs(self.specs, specs, seen_in="a worker before it", now_in=f"worker {worker_id}")
        self.has_objects = any(spec.has_objects for spec in self.specs.values())

    def hear(self, news: News, worker_id: int) -> None:
        """Take in what a worker reports; SpecConflict when a behavior has two specs."""
        if news.specs is not None:
            self.learn(news.specs, worker_id)
        env_ids: dict[tuple[str, str, str], list[int]] = {}
        for cast in news.casts:
            if (cast.env_id, cast.field) not in self._casts_reported:  # else by an earlier generation of the worker
                self._casts_reported.add((cast.env_id, cast.field))
                env_ids.setdefault((cast.field, cast.expected, cast.got), []).append(cast.env_id)
        generation = self._table.entries[worker_id].generation
        for (field, expected, got), ids in env_ids.items():
            event = ValuesCast(
                worker_id=worker_id,
                generation=generation,
                env_ids=tuple(ids),
                field=field,
                expected=expected,
                got=got,
            )
            self._add_event(event)
