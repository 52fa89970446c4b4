"""Metrics writers for experiment trackers: Weights & Biases, and MLflow.

Both work without a network: W&B with ``mode: offline``, MLflow with a database or a folder as ``tracking_uri``.

A tracker's library is imported when its writer is made. Resumed training continues its tracker run if one exists.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from envmanager.observe.metrics_writer import RunFacts

_NOT_IN_A_KEY = re.compile(r"[^\w\-. /]")
"""Pattern of a character that is replaced in MLflow keys. Names of behaviors may contain such characters."""
_TAG = "envmanager.run"
_PARAMS_AT_ONCE = 100
"""Maximum number of parameters that an MLflow server accepts in one request."""


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
        self._run_id = self._run_before(facts, experiment_id)
        if self._run_id is None:
            name = facts.directory.name if run_name is None else run_name
            run = self._client.create_run(experiment_id, tags={**(tags or {}), _TAG: facts.run_id}, run_name=name)
            self._run_id = run.info.run_id
            self._log_config(facts.config)

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        now_ms = int(1000 * time.time())
        metric = self._entities.Metric
        named = {_NOT_IN_A_KEY.sub("_", name): value for name, value in scalars.items()}
        self._client.log_batch(self._run_id, [metric(name, value, now_ms, step) for name, value in named.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        param = self._entities.Param
        params = [param(_NOT_IN_A_KEY.sub("_", name), str(value)) for name, value in _flat(config)]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_AT_ONCE])

    def _run_before(self, facts: RunFacts, experiment_id: str) -> str | None:
        """Reopen the MLflow run of a resumed training run and return its id. Return None if there is none to resume."""
        if facts.resumed_at is None:
            return None
        runs = self._client.search_runs([experiment_id], f"tags.`{_TAG}` = '{facts.run_id}'")
        for run in runs:
            self._client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
        return None


def _flat(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value
