"""Choice of metrics writers: TensorBoard, a CSV file, Weights & Biases, MLflow, or a writer of another package.

::

    training.metrics: [csv, {wandb: {project: x}}] ── parse ──▶ Metrics ── open_writers ──▶ MetricsWriter, …
                                                                            add_scalars({"return/mean": 21.5}, 30_000)

Another package adds a writer with an entry point in its ``pyproject.toml``::

    [project.entry-points."envmanager.metrics"]
    comet = "my_package.metrics:CometMetrics"

The entry point names a callable: ``CometMetrics(facts, **options)`` returns a MetricsWriter.

The rule: an unknown writer, a missing library, and an option that a writer does not declare are reported before any
process starts. A writer that takes ``**options`` checks them itself when it is opened.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from envmanager.data.specs import describe_value
from envmanager.errors import EnvManagerError, UsageError
from envmanager.importing import Plugins, nearest, needed_by
from envmanager.training.runs import writers
from envmanager.training.runs.writers import MetricsWriter, RunFacts

ENTRY_POINT_GROUP = "envmanager.metrics"
_ADDED = Plugins(ENTRY_POINT_GROUP, "metrics writer")
_EXAMPLE = "a list such as [tensorboard, csv, {wandb: {project: x}}]"


MakeWriter = Callable[..., MetricsWriter]
"""A function ``make(facts, **options)`` that returns a writer."""


KINDS: dict[str, tuple[MakeWriter, str | None]] = {
    "csv": (writers.CsvMetrics, None),
    "mlflow": (writers.MlflowMetrics, "mlflow"),
    "tensorboard": (writers.TensorBoardMetrics, "tensorboardX"),
    "wandb": (writers.WandbMetrics, "wandb"),
}
"""Writers of this library, by name, with the library that each needs, which the extra named like the kind installs.

It is imported only if its writer is chosen.
"""


@attrs.frozen
class Metrics:
    """A metrics writer chosen in a config. ``kind`` is the writer's name, ``options`` are its keyword arguments."""

    kind: str
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def to_json(self) -> Any:
        """Return the choice in the form used in a config: the writer's name, or ``{name: options}``."""
        return {self.kind: dict(self.options)} if self.options else self.kind


def parse(value: Any) -> tuple[Metrics, ...]:
    """Convert a list of names and ``{name: options}`` to Metrics. Raises UsageError for invalid or repeated entries."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UsageError(f"metrics should be {_EXAMPLE}, but is {describe_value(value)}.")
    chosen = tuple(map(_one, value))
    kinds = [each.kind for each in chosen]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise UsageError(f"metrics names {kind!r} twice.")
    return chosen


def _one(value: Any) -> Metrics:
    if isinstance(value, Metrics):
        return value
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise UsageError(f"metrics should be {_EXAMPLE}, but {describe_value(value)} is in it.")
    ((kind, options),) = value.items()
    if kind not in known_kinds():
        known = ", ".join(known_kinds())
        raise UsageError(
            f"metrics names {kind!r}, which is not known{nearest(str(kind), known_kinds())} Known: {known}."
        )
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise UsageError(f"metrics.{kind} should be a mapping of its options, but is {describe_value(options)}.")
    return Metrics(kind, dict(options))


def known_kinds() -> list[str]:
    """Return the names of all metrics writers, including those that other packages add."""
    return _ADDED.names_with(KINDS)


def require(chosen: Iterable[Metrics]) -> None:
    """Raise ImportFailed for a writer whose library cannot be imported, or UsageError for an unknown option."""
    for each in chosen:
        _check_options(each, _find(each.kind))


def open_writers(chosen: Iterable[Metrics], facts: RunFacts) -> dict[str, MetricsWriter]:
    """Open the writers and return them by kind. If one cannot be opened, close the others and raise EnvManagerError."""
    opened: dict[str, MetricsWriter] = {}
    try:
        # The file of "csv" makes its folder one that holds a training run, so it is made when all others are open.
        for each in sorted(chosen, key=lambda each: each.kind == "csv"):
            opened[each.kind] = _open(each, facts)
    except BaseException:
        for writer in opened.values():
            writer.close()
        raise
    return opened


def _open(each: Metrics, facts: RunFacts) -> MetricsWriter:
    try:
        return _find(each.kind)(facts, **each.options)
    except EnvManagerError:
        raise
    except Exception as error:  # such as no network, no login, an unknown option
        raise UsageError(f"the metrics of {each.kind} cannot be opened: {type(error).__name__}: {error}") from error


def _find(kind: str) -> MakeWriter:
    found, library = KINDS.get(kind) or (_ADDED.load(kind), None)
    if library is not None:
        with needed_by(f"training.metrics: {kind}", extra=kind):
            importlib.import_module(library)
    assert found is not None, "parse took a kind that nobody knows"
    return found


def _check_options(each: Metrics, make: MakeWriter) -> None:
    parameters = list(inspect.signature(make).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for name in each.options:
        if name not in names:
            known = f" Known options: {', '.join(names)}." if names else " It has none."
            raise UsageError(f"There is no option metrics.{each.kind}.{name}{nearest(str(name), names)}{known}")
