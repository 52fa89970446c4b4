"""The metrics of a watched manager, in the formats that Prometheus reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from envmanager.importing import needed_by
from envmanager.serving.watch import Watch

with needed_by("/metrics", extra="serve"):
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily as Counter
    from prometheus_client.core import GaugeMetricFamily as Gauge
    from prometheus_client.exposition import choose_encoder


class Collector:
    """A collector that reads all values when Prometheus asks for them."""

    def __init__(self, watch: Watch, more: Mapping[str, float] | None = None) -> None:
        """``more``: further numbers by name."""
        self._watch, self._more = watch, more or {}

    def exposed(self, accepted: str) -> tuple[str, bytes]:
        """Return the type and the text of the metrics. ``accepted``: the header ``Accept`` of the request."""
        encode, content_type = choose_encoder(accepted)
        registry = CollectorRegistry()
        registry.register(self)
        return content_type, encode(registry)

    def collect(self) -> Iterator[Any]:
        watch = self._watch
        stats, entries, tasks, manager = watch.stats(), watch.table.entries, watch.tasks() or {}, watch.manager()
        for kind, name, text, value in (
            (Counter, "env_steps", "Environment steps delivered", watch.table.env_steps),
            (Counter, "steps_lost", "Worker steps sent and never delivered", stats.steps_lost),
            (Counter, "late_replies", "Responses after their deadline", stats.late_replies),
            (Counter, "trainer_wait_seconds", "Time in which the trainer waited", watch.waits.waited_ns / 1e9),
            (Gauge, "trainer_wait_share", "Share of the time in which the trainer waited", stats.wait_share),
            (Counter, "episodes", "Finished episodes", watch.episodes.count),
            (Counter, "episodes_lost", "Episodes cut by a failure", watch.episodes.lost),
            (Counter, "episodes_kept", "Episodes that went on after a failure", stats.episodes_kept),
            (Counter, "episodes_diverged", "Episodes whose repetition led elsewhere", stats.episodes_diverged),
            (Counter, "steps_repeated", "Environment steps repeated after failures", stats.steps_repeated),
            *(
                (kind, name, text, tasks[key])
                for kind, name, text, key in (
                    (Counter, "tasks_done", "Tasks that have ended", "done"),
                    (Counter, "tasks_lost", "Tasks that were given up", "lost"),
                    (Gauge, "tasks_running", "Tasks under way", "running"),
                    (Gauge, "tasks", "Number of tasks in all", "total"),
                )
                if tasks.get(key) is not None
            ),
            *((Gauge, name, name.replace("_", " "), value) for name, value in self._more.items()),
        ):
            yield _family(kind, name, text, [((), value)])
        for kind, name, text, workers, field in (
            (Counter, "steps", "Worker steps delivered", entries, "steps"),
            (Counter, "restarts", "Replacements after failures", entries, "restarts"),
            (Gauge, "failed", "Whether the worker was given up", entries, "is_given_up"),
            (Gauge, "idle_share", "Share of the time without a command", stats.workers, "idle_share"),
            (Gauge, "core_wait_share", "Share of the time without a free core", stats.workers, "core_wait_share"),
            (Gauge, "memory_bytes", "Resident memory, or 0 if unknown", stats.workers, "memory_bytes"),
        ):
            of_each = [((each.worker_id,), getattr(each, field)) for each in workers]
            yield _family(kind, f"worker_{name}", text, of_each, "worker")
        doing = [
            ((entry.worker_id, doing), getattr(entry.times, f"{name}_ns") / 1e9)
            for entry in entries
            for doing, name in (("step", "busy"), ("idle", "idle"), ("other", "other"))
        ]
        yield _family(Counter, "worker_seconds", "Time in steps, idle, and in other commands", doing, "worker", "doing")
        counts = {} if manager is None else manager.events.counts()
        yield _family(Counter, "events", "Events", [((kind,), n) for kind, n in counts.items()], "kind")
        means = watch.means()
        for name in ("return", "length"):
            values = [((behavior,), own.pop(name)) for behavior, own in means.items()]
            yield _family(Gauge, f"episode_{name}", "Mean of the last hundred episodes", values, "behavior")
        measures = [((behavior, name), mean) for behavior, own in means.items() for name, mean in own.items()]
        text = "Mean of the last hundred episodes that have it"
        yield _family(Gauge, "episode_measure", text, measures, "behavior", "measure")
        figures = [
            ((behavior, name), figure)
            for behavior, own in watch.known_figures().items()
            for name, figure in own.items()
            if not math.isnan(figure)
        ]
        yield _family(Gauge, "training_figure", "Last figure of learning", figures, "behavior", "figure")


def _family(kind: Any, name: str, text: str, values: Iterable[tuple[tuple[Any, ...], Any]], *labels: str) -> Any:
    family = kind(f"envmanager_{name}", text, labels=labels)
    for own, value in values:
        family.add_metric([str(label) for label in own], float(value))
    return family
