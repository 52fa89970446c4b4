"""The config of a training run, with defaults, and a comparison of the old and new configs on a resume.

The rule: a change of the recorded seed or kind of trainer raises an error before an environment is made. Other changes
take effect if the checkpoint still fits. Changes to trainers and to what is played are logged as a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from envmanager.errors import UsageError
from envmanager.training import records
from envmanager.training.plan import ANY_BEHAVIOR, TrainingPlan
from envmanager.training.trainer import Trainer
from envmanager.training.trainers import table_for

_OF_RUNNING = frozenset(
    {"kind", "n_envs", "n_workers", "local_envs", "wait", "timeouts", "restarts", "zero_copy", "start_method", "trace"}
    | {"log_dir", "check_values", "infos", "seed"}
)
"""Manager options that change only how environments are run, not what is played."""


def resolved(plan: TrainingPlan, trainers: Mapping[str, Trainer]) -> dict[str, Any]:
    """Return the plan's tables as JSON data, with defaults but no secrets. ``trainers`` maps behaviors to trainers."""
    of_trainers = {}
    for name, trainer in trainers.items():
        options = getattr(trainer, "options", None)
        filled_in = records.plain(options) if attrs.has(type(options)) else {}
        of_trainers[name] = {"kind": None, **filled_in, **records.plain(table_for(name, plan.trainers))}
    manager, training = records.plain(plan.manager), records.plain(plan.training)
    if manager["seed"] == training["seed"]:
        del manager["seed"]  # the default; left out so that a change of training.seed changes both
    return {"manager": manager, "training": training, "trainers": of_trainers}


def check_resumed(plan: TrainingPlan) -> None:
    """Raise UsageError if ``plan`` has another seed, or another kind of trainer, than the training that it resumes."""
    before = records.read(plan.directory)
    if before is None:
        return
    wrong = list(_wrong(before, plan))
    if wrong:
        raise UsageError(
            f"the training in {plan.directory} cannot go on with another config than it began with: "
            f"{', '.join(wrong)}. Resume with what {plan.directory / records.CONFIG} says, or begin again (--force), "
            "or train elsewhere (--dir)."
        )


def _wrong(before: Mapping[str, Any], plan: TrainingPlan) -> Iterator[str]:
    seed = _table(before, "training").get("seed", plan.training.seed)
    yield from records.differences(seed, plan.training.seed, "training.seed")
    for behavior, table in _table(before, "trainers").items():
        now = plan.trainers.get(behavior, plan.trainers.get(ANY_BEHAVIOR))
        if now is not None and isinstance(table, Mapping):
            yield from records.differences(table.get("kind"), now.get("kind"), f"trainers.{behavior}.kind")


def changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each trainer or environment option that differs between configs; [] if ``before`` is None."""
    if before is None:
        return []
    was_played, is_played = (
        {name: value for name, value in _table(config, "manager").items() if name not in _OF_RUNNING}
        for config in (before, now)
    )
    of_trainers = records.differences(_table(before, "trainers"), _table(now, "trainers"), "trainers")
    return [*records.differences(was_played, is_played, "manager"), *of_trainers]


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}
