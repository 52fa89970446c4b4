"""The metrics of a watched manager, in the formats that Prometheus reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from envmanager.importing import needed_by
from envmanager.serving.watch import Watch

with needed_by("/metrics", extra="serve"):
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.exposition import choose_encoder

_Values = Iterable[tuple[tuple[Any, ...], float]]


def metrics_of(watch: Watch, accepted: str) -> tuple[str, bytes]:
    """Return the type and the text of the metrics. ``accepted``: the header ``Accept`` of the request."""
    encode, content_type = choose_encoder(accepted)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(watch))
    return content_type, encode(registry)


class _Collector:
    """A collector that reads all values when Prometheus asks for them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        watch = self._watch
        stats, entries, episodes, tasks = watch.stats(), watch.table.entries, watch.episodes, watch.tasks()
        means = watch.means().items()
        yield _counter("env_steps", "Environment steps delivered", [((), watch.table.env_steps)])
        yield _counter("worker_steps", "Worker steps delivered", _each(entries, "steps"), "worker")
        yield _counter("worker_restarts", "Replacements after failures", _each(entries, "restarts"), "worker")
        yield _counter(
            "worker_seconds",
            "Time in steps, without a command, and in other commands such as resets",
            [
                ((entry.worker_id, doing), getattr(entry.times, f"{name}_ns") / 1e9)
                for entry in entries
                for doing, name in (("step", "busy"), ("idle", "idle"), ("other", "other"))
            ],
            "worker",
            "doing",
        )
        shares = {"idle": "idle_share", "core_wait": "core_wait_share"}
        for name, field in shares.items():
            yield _gauge(f"worker_{name}_share", "Share of the time", _each(stats.workers, field), "worker")
        yield _gauge(
            "worker_up", "Whether it is in use", [((e.worker_id,), e.error is None) for e in entries], "worker"
        )
        yield _counter("trainer_wait_seconds", "Time in which the trainer waited", [((), watch.waits.waited_ns / 1e9)])
        yield _gauge("trainer_wait_share", "Share of the time in which the trainer waited", [((), stats.wait_share)])
        yield _counter("steps_lost", "Worker steps sent and never delivered", [((), stats.steps_lost)])
        yield _counter("late_replies", "Responses after their deadline", [((), stats.late_replies)])
        yield _counter("events", "Events", [((kind,), n) for kind, n in watch.event_counts().items()], "kind")
        yield _counter("episodes", "Finished episodes", [((), episodes.count)])
        yield _counter("episodes_lost", "Episodes cut by a failure", [((), episodes.lost)])
        for name in ("return", "length"):
            values = [((behavior,), mean[name]) for behavior, mean in means]
            yield _gauge(f"episode_{name}", "Mean of the last hundred episodes", values, "behavior")
        if tasks is not None:
            yield _counter("tasks_done", "Tasks that have ended", [((), tasks["done"] or 0)])
            yield _counter("tasks_lost", "Tasks that were given up", [((), tasks["lost"] or 0)])
            yield _gauge("tasks_running", "Tasks under way", [((), tasks["running"] or 0)])
            if tasks["total"] is not None:
                yield _gauge("tasks", "Number of tasks in all", [((), tasks["total"])])
        figures = [
            ((behavior, name), float(figure))
            for behavior, own in watch.figures.copy().items()
            for name, figure in own.items()
            if not math.isnan(figure)
        ]
        yield _gauge("training_figure", "Last figure of learning", figures, "behavior", "figure")


def _each(workers: Iterable[Any], name: str) -> _Values:
    return [((worker.worker_id,), getattr(worker, name)) for worker in workers]


def _counter(name: str, text: str, values: _Values, *labels: str) -> Any:
    return _family(CounterMetricFamily, name, text, values, labels)


def _gauge(name: str, text: str, values: _Values, *labels: str) -> Any:
    return _family(GaugeMetricFamily, name, text, values, labels)


def _family(kind: Any, name: str, text: str, values: _Values, labels: tuple[str, ...]) -> Any:
    family = kind(f"envmanager_{name}", text, labels=labels)
    for own, value in values:
        family.add_metric([str(label) for label in own], float(value))
    return family
