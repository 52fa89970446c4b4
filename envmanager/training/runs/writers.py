"""The interface of metrics writers, and the writers of this library: CSV, TensorBoard, Weights & Biases and MLflow.

The rows of a CSV file that a resumed run keeps are written to a new file. When complete, it replaces the old one. Each
new row is flushed at once.

Both trackers work without a network: W&B with ``mode: offline``, MLflow with a database or a folder as
``tracking_uri``. A library is imported when its writer is made. Resumed training continues its tracker run if one
exists.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import attrs

from envmanager.errors import UsageError
from envmanager.observe.files import append_to, replacing, reporting
from envmanager.observe.tensorboard import make_writer

METRICS = "metrics.csv"
COLUMNS = ("steps", "name", "value")
_NUMBER = re.compile("[0-9]{1,18}")
FOLDER = "tensorboard"
"""Default folder of the scalars, inside the training's folder."""
_NOT_IN_A_KEY = re.compile(r"[^\w\-. /]")
"""Pattern of a character that is replaced in MLflow keys. Names of behaviors may contain such characters."""
_TAG = "envmanager.run"
_PARAMS_AT_ONCE = 100
"""Maximum number of parameters that an MLflow server accepts in one request."""


class MetricsWriter(Protocol):
    """Interface of objects that write the metrics of a training run to a file or a service."""

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> Any:
        """Write ``scalars``, which maps names (``"default/loss"``) to values. ``step`` is the number of agent steps.

        ``step`` may be smaller than in the previous call, if that call was for other metrics.
        """
        ...

    def close(self) -> Any:
        """Write all buffered values and close the file or the connection."""
        ...


@attrs.frozen
class RunFacts:
    """A training run's folder, id and config (as plain data). Every metrics writer receives these facts.

    A resumed run keeps its ``run_id``. ``resumed_at`` is its number of agent steps when resumed; None for a new run.
    """

    directory: Path
    run_id: str
    config: Mapping[str, Any]
    resumed_at: int | None = None


class CsvFile:
    """A CSV file with a header and the rows ``kept``, replacing any file at ``path``. Raises NotWritten on failure."""

    def __init__(self, path: Path, columns: Sequence[str], kept: Iterable[Sequence[Any]] = ()) -> None:
        with reporting(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                text = _text(file)
                csv.writer(text).writerows([columns, *kept])
                text.detach()
            self._file = _text(append_to(path))
            self._writer = csv.writer(self._file)

    def write(self, row: Sequence[Any]) -> None:
        """Append a row and flush it. Raises OSError if the row cannot be written."""
        self._writer.writerow(row)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()


def _text(file: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, encoding="utf-8", newline="", line_buffering=True)


def rows_of(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows below the header of ``path`` as dicts by column name, or [] if the file does not exist.

    Rows with missing or extra values are skipped. Raises UsageError if the file cannot be read or has other columns.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    if rows and rows[0] != list(columns):
        raise UsageError(f"{path} cannot be read: its columns are not {', '.join(columns)}. Restore it, or delete it.")
    return [dict(zip(columns, row, strict=True)) for row in rows[1:] if len(row) == len(columns)]


class CsvMetrics:
    """A metrics writer for ``metrics.csv``. A resumed run keeps the lines up to its checkpoint."""

    def __init__(self, facts: RunFacts) -> None:
        path = facts.directory / METRICS
        self._file = CsvFile(path, COLUMNS, () if facts.resumed_at is None else _until(facts.resumed_at, path))

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._file.write((step, name, f"{value:.6g}"))

    def close(self) -> None:
        self._file.close()


def _until(steps: int, path: Path) -> list[tuple[str, ...]]:
    rows = rows_of(path, COLUMNS)
    return [tuple(row.values()) for row in rows if _NUMBER.fullmatch(row["steps"]) and int(row["steps"]) <= steps]


class TensorBoardMetrics:
    """A metrics writer for TensorBoard. The default ``directory`` is ``tensorboard`` in the training's folder.

    TensorBoard shows what a resumed run has up to its checkpoint and from then on, not what was written between.
    """

    def __init__(self, facts: RunFacts, *, directory: str | None = None) -> None:
        folder = str(facts.directory / FOLDER) if directory is None else directory
        self._writer = make_writer(folder, purge_step=None if facts.resumed_at is None else facts.resumed_at + 1)

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbMetrics:
    """A metrics writer that logs a training run as a Weights & Biases run. ``options`` are passed to ``wandb.init``."""

    def __init__(self, facts: RunFacts, **options: Any) -> None:
        wandb: Any = importlib.import_module("wandb")
        ours = {"project": "envmanager", "name": facts.directory.name, "dir": str(facts.directory), "id": facts.run_id}
        if facts.resumed_at is not None:
            ours["resume"] = "allow"
        facts.directory.mkdir(parents=True, exist_ok=True)  # otherwise W&B uses another directory
        self._run = wandb.init(**{**ours, "config": dict(facts.config), **options})
        self._run.define_metric("*", step_metric="steps")

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log({**scalars, "steps": step})  # not as W&B's own step, which must not decrease

    def close(self) -> None:
        self._run.finish()


class MlflowMetrics:
    """A metrics writer that logs a training run as an MLflow run, with the config as parameters.

    If ``tracking_uri`` is None, MLflow's default is used. The experiment is created if it does not exist.
    """

    def __init__(
        self,
        facts: RunFacts,
        *,
        tracking_uri: str | None = None,
        experiment: str = "envmanager",
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri)
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        where = f"tags.`{_TAG}` = '{facts.run_id}'"
        before = [] if facts.resumed_at is None else self._client.search_runs([experiment_id], where)
        if before:
            self._run_id = str(before[0].info.run_id)
            self._client.update_run(self._run_id, status="RUNNING")
            return
        name = facts.directory.name if run_name is None else run_name
        run = self._client.create_run(experiment_id, tags={**(tags or {}), _TAG: facts.run_id}, run_name=name)
        self._run_id, param = run.info.run_id, self._entities.Param
        params = [param(_NOT_IN_A_KEY.sub("_", name), str(value)) for name, value in _flat(facts.config)]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_AT_ONCE])

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        now_ms = int(1000 * time.time())
        metric = self._entities.Metric
        named = {_NOT_IN_A_KEY.sub("_", name): value for name, value in scalars.items()}
        self._client.log_batch(self._run_id, [metric(name, value, now_ms, step) for name, value in named.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _flat(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value
