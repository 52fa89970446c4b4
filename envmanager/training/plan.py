"""What to train, as a config says it.

::

    tables manager, training, trainers ── TrainingPlan.parse ──▶ TrainingPlan

The rule: what can be known to be wrong without an environment is found here, before one is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from envmanager.errors import ConfigError, UsageError
from envmanager.observe.metrics import parse as parse_metrics
from envmanager.options import ManagerOptions, at_least
from envmanager.registry import structure
from envmanager.training.rounds import Rounds

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in that of a training."""
CONTROL = "control.toml"
"""File in which a person changes a training that runs; the training only reads it."""
ANY_BEHAVIOR = "*"
"""In the table ``trainers``: every behavior that has no entry of its own."""
NOT_TOLD = frozenset({"worker_env", "cluster", "log_dir", "trace"})
"""Options of a manager that are not in checkpoints: they may be secret, or are about one run."""


@attrs.frozen(kw_only=True)
class TrainingOptions:
    """The table ``training`` of a config. ``steps`` are those of agents, all behaviors that learn together."""

    steps: int = 100_000
    seed: int = 0
    device: str = "auto"
    threads: int | None = 1
    """How many threads PyTorch may use for one operation; the workers want the other cores."""
    max_policy_lag: int | None = None
    checkpoint_every: int | None = None
    """Steps between checkpoints; one is always written at the end."""
    keep: int = attrs.field(default=3, validator=at_least(1))
    """How many of the latest checkpoints stay; the best by evaluation stays too."""
    evaluation_episodes: int = 100
    """How many episodes to play greedily at the end, as many in each environment; 0 for none."""
    evaluate_every: int | None = attrs.field(default=None, validator=attrs.validators.optional(at_least(1)))
    """Steps between evaluations on the way, of as many episodes, in environments of their own."""
    metrics: Any = attrs.field(default=(), converter=parse_metrics)
    """Where numbers go: names of writers, or ``{name: options}``: tensorboard, csv, wandb, mlflow."""
    rounds: Rounds | None = None
    """Who learns when; without them all learn at once that are not frozen."""

    def __attrs_post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"steps must be a whole number of at least 1, not {self.steps!r}.")
        if self.evaluation_episodes < 0:
            raise UsageError(f"evaluation_episodes must be at least 0, not {self.evaluation_episodes!r}.")
        if self.evaluate_every is not None and not self.evaluation_episodes:
            raise UsageError("evaluate_every needs evaluation_episodes: how many it plays each time.")


@attrs.frozen
class TrainingPlan:
    """What to train, how, and where what it leaves goes."""

    manager: ManagerOptions
    training: TrainingOptions
    trainers: Mapping[str, Mapping[str, Any]]
    directory: Path
    resume: bool = False
    """Go on with the training in ``directory``."""
    force: bool = False
    """Begin anew where there is one, and delete what it has left; nothing else."""

    def __attrs_post_init__(self) -> None:
        if self.resume and self.force:
            raise UsageError("a training either goes on (resume) or begins anew (force), not both.")

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], directory: Path, *, resume: bool = False, force: bool = False
    ) -> TrainingPlan:
        """From the tables ``manager``, ``training`` and ``trainers``. Raises ConfigError."""
        tables = config.get("training") or {}
        training = structure(TrainingOptions, _without_rounds(tables), where="training")
        of_manager = config.get("manager") or {}
        manager = structure(ManagerOptions, {"seed": training.seed, **of_manager}, where="manager")
        if manager.env is None:
            raise ConfigError("There is no environment: pass --env, or name it as `env` in the config's manager table.")
        trainers = config.get("trainers") or {}
        if not isinstance(trainers, Mapping) or not trainers:
            raise ConfigError("There is no trainer: the table `trainers` should have one per behavior, or one for '*'.")
        for behavior, table in trainers.items():
            if not isinstance(table, Mapping):
                raise ConfigError(f"trainers.{behavior} should be a mapping, but is {table!r}.")
        if tables.get("rounds") is not None:
            training = attrs.evolve(training, rounds=_rounds(tables["rounds"], trainers))
        return cls(manager, training, trainers, directory, resume, force)

    def to_json(self) -> dict[str, Any] | None:
        """What plays and who learns, as plain data: enough to play with the policies of a checkpoint later.

        None when it cannot be said so: options of a trainer that are objects. ``"manager"`` is None where the
        environment is no text. ``directory`` is that of this process, in which the environment's name means what it
        does.
        """
        try:
            told = {"manager": self._manager_as_told(), "trainers": dict(self.trainers), "directory": os.getcwd()}
            plain: dict[str, Any] = json.loads(json.dumps(told, default=_as_plain))
        except (TypeError, ValueError, FileNotFoundError):  # the last: the directory was deleted
            return None
        return plain

    def _manager_as_told(self) -> dict[str, Any] | None:
        if not isinstance(self.manager.env, str):
            return None
        return attrs.asdict(self.manager, filter=lambda field, _: field.name not in NOT_TOLD)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.directory / CHECKPOINTS

    @property
    def control(self) -> Path:
        """Where a person may put the file that changes the training while it runs."""
        return self.directory / CONTROL


def _as_plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else os.fspath(value)


def _without_rounds(tables: Any) -> Any:
    """They are structured apart: their own check tells best what is wrong with them."""
    return {key: value for key, value in tables.items() if key != "rounds"} if isinstance(tables, Mapping) else tables


def _rounds(table: Any, trainers: Mapping[str, Any]) -> Rounds:
    """Checked against the trainers, as far as they are named already."""
    rounds = structure(Rounds, table, where="training.rounds")
    for behavior, own in trainers.items():
        if own.get("apart") is not None:
            raise ConfigError(
                f"trainers.{behavior}.apart lets it learn while it plays, so no round has fixed policies: leave "
                "it out, or training.rounds."
            )
    if ANY_BEHAVIOR not in trainers:
        try:
            rounds.check(trainers)
        except UsageError as error:
            raise ConfigError(str(error)) from error
    return rounds
