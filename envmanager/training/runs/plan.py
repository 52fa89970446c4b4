"""The plan of a training run, parsed from a config.

::

    tables manager, training, trainers ── TrainingPlan.parse ──▶ TrainingPlan

``parse`` reports mistakes in the tables, except in a trainer's own options, before any environment is made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from envmanager.adapters.kinds import count_kinds
from envmanager.adapters.other_names import other_names
from envmanager.errors import ConfigError, UsageError
from envmanager.importing import nearest
from envmanager.observe.files import UNLOGGED
from envmanager.options import at_least, plain, plain_numbers
from envmanager.registry import ManagerOptions, live, structure
from envmanager.training import curriculum
from envmanager.training.learners import Rounds
from envmanager.training.runs.metrics import parse as parse_metrics

CHECKPOINTS, LATEST = "checkpoints", "latest"
"""Name of the folder of checkpoints in a training run's folder."""
CONTROL = "control.toml"
"""Name of the file that a person edits to change a training run in progress. The training only reads it."""
LOGS, OF_TRAINING = "logs", "logs/train"
"""Folders, in a training run's folder, of files with what workers print: of all commands, and of the training."""
ANY_BEHAVIOR = "*"
"""Key in the table ``trainers`` whose entry applies to every behavior without an entry of its own."""
_optional: Any = attrs.validators.optional
NOT_TOLD = frozenset({"worker_env", "cluster", "log_dir", "trace", "record", "order"})
"""Manager options not saved in checkpoints, because they may contain secrets or apply to a single run only."""


_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([smh])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float | None:
    """Return the seconds of a time such as ``90s``, ``10m`` or ``1.5h``; None for any other text."""
    found = _TIME.fullmatch(text)
    return None if found is None else float(found[1]) * _SECONDS[found[2]]


def _check_every(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_number and not (isinstance(value, str) and seconds_of(value)):
        raise UsageError(f"{attribute.name} must be a number of agent steps, or a time such as 10m, not {value!r}.")


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class TrainingOptions:
    """Options in a config's ``training`` table. Training ends after ``steps`` agent steps of all learners together."""

    other_names = staticmethod(other_names)

    steps: int = attrs.field(default=100_000, validator=at_least(1))
    seed: int = attrs.field(default=0, validator=at_least(0))
    device: str = "auto"
    threads: int | None = attrs.field(default=1, validator=_optional(at_least(1)))
    """Number of threads PyTorch may use for one operation; None for PyTorch's default. Workers need the other cores."""
    max_policy_lag: int | None = attrs.field(default=None, validator=_optional(at_least(0)))
    checkpoint_every: Any = attrs.field(default=None, converter=plain, validator=_optional(_check_every))
    """Number of agent steps between checkpoints, or a time such as 10m (s, m or h); None for no regular ones. A
    checkpoint is also written at the end."""
    keep: int = attrs.field(default=3, validator=at_least(1))
    """Number of newest checkpoints to keep. The checkpoint with the best evaluation is kept too."""
    evaluation_episodes: int = attrs.field(default=100, validator=at_least(0))
    """Number of greedy episodes in an evaluation, divided among the environments; 0 for no evaluation at the end."""
    evaluate_every: int | None = attrs.field(default=None, validator=_optional(at_least(1)))
    """Number of agent steps between evaluations in separate environments; None for no evaluations during training."""
    metrics: Any = attrs.field(default=(), converter=parse_metrics)
    """Metrics writers (such as tensorboard, csv, wandb, mlflow), as a list of names or as ``{name: options}``."""
    rounds: Rounds | None = None
    """Rounds in which behaviors learn in turn; without rounds all unfrozen behaviors learn at the same time."""
    parameters: Mapping[str, Any] = attrs.field(factory=dict)
    """Environment parameters by name: constants, samplers or lessons. See ``envmanager.training.curriculum``."""

    def __attrs_post_init__(self) -> None:
        if self.evaluate_every is not None and not self.evaluation_episodes:
            raise UsageError("evaluate_every needs evaluation_episodes, the number of episodes of each evaluation.")


def _require_environment(_: Any, __: attrs.Attribute[Any], manager: Mapping[str, Any]) -> None:
    if not isinstance(manager.get("env"), str | list):
        raise UsageError(f"manager.env should be the name of an environment, but is {manager.get('env')!r}.")


@attrs.frozen(kw_only=True)
class SavedPlan:
    """The part of a TrainingPlan saved in checkpoints, as JSON data, without the manager options in ``NOT_TOLD``.

    ``manager`` is None if the environments were not named by strings. ``directory`` is the working directory of the
    training, to which paths in the environment's name are relative.
    """

    manager: dict[str, Any] | None = attrs.field(validator=_optional(_require_environment))
    trainers: dict[str, dict[str, Any]]
    directory: str
    parameters: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class TrainingPlan:
    """The settings of a training run: its environments, its trainers, and the folder for its files."""

    manager: ManagerOptions
    training: TrainingOptions
    trainers: Mapping[str, Mapping[str, Any]]
    directory: Path
    resume: bool = False
    """Whether to resume the training in ``directory``."""
    force: bool | Literal["auto"] = False
    """Whether to begin again in a new folder. A folder that holds a training run is renamed to ``directory.1``.
    ``"auto"``: only if there is still no checkpoint."""

    def __attrs_post_init__(self) -> None:
        if self.resume and self.force:
            raise UsageError("a training run either goes on (resume) or begins again (force), not both.")

    @classmethod
    def parse(
        cls,
        config: Mapping[str, Any],
        directory: Path,
        *,
        resume: bool | Literal["auto"] = False,
        force: bool = False,
    ) -> TrainingPlan:
        """Build a plan from ``config``. Raises ConfigError for a mistake, UsageError for ``resume`` with ``force``.

        ``resume="auto"`` resumes if there is a checkpoint. If not, it begins; what a training run without one has left
        is renamed, as with ``force``.
        Unless ``config`` has a ``manager.log_dir``, which may be None, workers print into files in ``directory``.
        """
        tables = config.get("training") or {}
        # _rounds parses the table ``rounds``, with clearer errors.
        without_rounds = {**tables, "rounds": None} if isinstance(tables, Mapping) else tables
        training = structure(TrainingOptions, without_rounds, where="training")
        table = config.get("manager") or {}
        if isinstance(table, Mapping):
            logs = None if table.get("kind") in UNLOGGED else str(directory / OF_TRAINING)
            table = {"seed": training.seed, "log_dir": logs, **table, **_keeping(table)}
        manager = structure(ManagerOptions, table, where="manager")
        if manager.env is None and manager.kind != "replay":
            raise ConfigError("There is no environment: pass --env, or name it as `env` in the config's manager table.")
        trainers = config.get("trainers") or {}
        if not isinstance(trainers, Mapping) or not trainers:
            raise ConfigError("There is no trainer: the table `trainers` should have one per behavior, or one for '*'.")
        for behavior, table in trainers.items():
            if not isinstance(table, Mapping):
                raise ConfigError(f"trainers.{behavior} should be a mapping, but is {table!r}.")
        if tables.get("rounds") is not None:
            training = attrs.evolve(training, rounds=_rounds(tables["rounds"], trainers))
        _check_parameters(training.parameters, manager)
        if resume == "auto" and not force:
            resume = (directory / CHECKPOINTS / LATEST).exists()
            return cls(manager, training, trainers, directory, resume, False if resume else "auto")
        return cls(manager, training, trainers, directory, bool(resume), force)

    def saved(self) -> SavedPlan | None:
        """Return the plan to save in checkpoints; None if JSON cannot hold it or the working directory was deleted."""
        try:
            manager = None
            env = self.manager.env
            if all(isinstance(each, str) for each in ([own.env for own in env] if count_kinds(env) else [env])):
                manager = attrs.asdict(live(self.manager), filter=lambda field, _: field.name not in NOT_TOLD)
            told = {"manager": manager, "trainers": dict(self.trainers), "directory": os.getcwd()}
            told["parameters"] = dict(self.training.parameters)
            text = json.dumps(told, default=lambda own: dict(own) if isinstance(own, Mapping) else os.fspath(own))
            return SavedPlan(**json.loads(text))
        except (TypeError, ValueError, FileNotFoundError):  # FileNotFoundError: the working directory was deleted
            return None

    @property
    def checkpoints(self) -> Path:
        """Path of the folder of checkpoints."""
        return self.directory / CHECKPOINTS

    @property
    def control(self) -> Path:
        """Path of the control file, which a person may edit to change the training while it runs."""
        return self.directory / CONTROL


def _keeping(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``restarts`` for a manager's table that keep episodes where that is possible, unless it says otherwise.

    Not with recordings, where a replay needs the same steps.
    """
    restarts = table.get("restarts")
    if isinstance(restarts, int) and not isinstance(restarts, bool):
        restarts = {"max_restarts": restarts}
    is_apart = table.get("kind") == "replay" or any(table.get(name) for name in ("record", "order"))
    if is_apart or not isinstance(restarts, Mapping | None) or "keep_episodes" in (restarts or {}):
        return {}
    return {"restarts": {**(restarts or {}), "keep_episodes": "if_possible"}}


def table_for(behavior: str, tables: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the table of a behavior, else the default table, ``"*"``. Raises ConfigError if there is neither."""
    table = tables.get(behavior, tables.get(ANY_BEHAVIOR))
    if table is None:
        raise ConfigError(f"There is no trainer for the behavior {behavior!r}: add trainers.{behavior}.")
    return table


def _rounds(table: Any, trainers: Mapping[str, Any]) -> Rounds:
    """Build Rounds from ``table``. Raises ConfigError for mistakes, unknown behaviors or a trainer with ``apart``."""
    rounds = structure(Rounds, table, where="training.rounds")
    for behavior, own in trainers.items():
        if own.get("apart") is not None:
            raise ConfigError(
                f"trainers.{behavior}.apart changes the policy during a round, but rounds need fixed policies: leave "
                "out apart, or training.rounds."
            )
    if ANY_BEHAVIOR not in trainers:
        try:
            rounds.check(trainers)
        except UsageError as error:
            raise ConfigError(str(error)) from error
    return rounds


def _check_parameters(parameters: Any, manager: ManagerOptions) -> None:
    """Raise ConfigError for mistakes in ``training.parameters``, and for what they need of the other tables."""
    where = "training.parameters"
    ends = curriculum.ends_of(curriculum.parse(parameters, where=where))
    for path, until in ends.items():
        if until.measure not in curriculum.MEASURES and not manager.infos:
            raise ConfigError(
                f"{where}.{path}.measure is {until.measure!r}{nearest(until.measure, curriculum.MEASURES)} "
                f"Measures are {', '.join(curriculum.MEASURES)} and, with manager.infos: true, numbers in infos."
            )
