"""The config and the library versions of a training run: recorded in its folder, and compared on a resume.

::

    run/config.json      the config without secrets, with defaults and trainers by behavior; `envmanager train` reads it
    run/versions.json    versions of Python, the operating system and every installed package

Each file is complete or absent. The key ``envmanager`` marks a file as written by a training run, and has a checksum.

The rule: on a resume, a change of the recorded seed or kind of trainer raises an error before an environment is made.
Other changes take effect if the checkpoint still fits. Changes to trainers and to what is played are logged as a
warning.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager import __version__
from envmanager.errors import UsageError
from envmanager.keeping.state import checksum_of
from envmanager.observe.files import reporting, write_atomically
from envmanager.options import Wait
from envmanager.training.runs.metrics import Metrics
from envmanager.training.runs.plan import ANY_BEHAVIOR, OF_TRAINING, TrainingPlan, table_for
from envmanager.training.trainer import Trainer

CONFIG, VERSIONS = "config.json", "versions.json"
OURS = "envmanager"
"""Name of the table that marks a file as written by a training run."""
_LARGEST = 10_000_000
_WAITS = {Wait.any(): "any", Wait.all(): "all"}


def write(directory: Path, config: Mapping[str, Any]) -> None:
    """Write config.json and versions.json. Raises NotWritten on an OSError."""
    for name, content in ((VERSIONS, versions()), (CONFIG, config)):
        path = directory / name
        about = {"wrote": "envmanager train", "version": __version__, "directory": _directory()}
        with reporting(path):
            directory.mkdir(parents=True, exist_ok=True)
            told = {OURS: {**about, "checksum": checksum_of(content)}, **content}
            write_atomically(path, json.dumps(told, indent=2) + "\n")


def read(directory: Path) -> dict[str, Any] | None:
    """Return the config that a training run recorded in ``directory``; None if it is missing or cannot be read."""
    content = _content(directory / CONFIG)
    return None if content is None else {name: table for name, table in content.items() if name != OURS}


def is_edited(directory: Path) -> bool:
    """Return whether the config in ``directory`` is not what a training run wrote there. False if there is none."""
    content = _content(directory / CONFIG)
    return content is not None and content[OURS].get("checksum") != checksum_of(read(directory))


def versions() -> dict[str, Any]:
    """Return the versions of Python, of the operating system, and of every installed package."""
    named = {found.metadata["Name"]: found.version for found in distributions() if "Name" in (found.metadata or ())}
    packages = {name: named[name] for name in sorted(named, key=str.lower)}
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": packages}


def plain(value: Any) -> Any:
    """Convert ``value`` to JSON data for a config. Objects without a JSON form become strings such as ``module:name``.

    Attrs fields with ``repr=False``, which may hold secrets, are left out.
    """
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Wait) and value in _WAITS:
        return _WAITS[value]
    if isinstance(value, Metrics):
        return plain(value.to_json())
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value)) if field.repr}
    if isinstance(value, Mapping):
        return {str(name): plain(own) for name, own in value.items()}
    if isinstance(value, Sequence | Set):
        return [plain(own) for own in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(value)


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield a phrase for each difference between configs, such as ``trainers.default.gamma was 0.99 and is 0.9``."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            yield from differences(before.get(name), now.get(name), f"{where}.{name}" if where else name)
    elif before != now and not all(isinstance(each, float) and math.isnan(each) for each in (before, now)):
        yield f"{where} was {before!r} and is {now!r}"


def _content(path: Path) -> dict[str, Any] | None:
    """Return the parsed JSON of a file that a training run wrote. None for anything else, including a symbolic link."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(content, dict) and isinstance(content.get(OURS), dict)
    return content if is_ours else None


def _directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the working directory was deleted
        return None


_OF_RUNNING = frozenset(
    {"kind", "n_envs", "n_workers", "local_envs", "wait", "timeouts", "restarts", "zero_copy", "start_method", "trace"}
    | {"record", "record_observations", "order", "recording", "strict", "trust"}
    | {"log_dir", "check_values", "infos", "measures", "seed"}
)
"""Manager options that change only how environments are run, not what is played."""


def resolved(plan: TrainingPlan, trainers: Mapping[str, Trainer]) -> dict[str, Any]:
    """Return the plan's tables as JSON data, with defaults but no secrets. ``trainers`` maps behaviors to trainers."""
    of_trainers = {}
    for name, trainer in trainers.items():
        options = getattr(trainer, "options", None)
        filled_in = plain(options) if attrs.has(type(options)) else {}
        of_trainers[name] = {"kind": None, **filled_in, **plain(table_for(name, plan.trainers))}
    manager, training = plain(plan.manager), plain(plan.training)
    if manager["seed"] == training["seed"]:
        del manager["seed"]  # the default; left out so that a change of training.seed changes both
    if manager["log_dir"] == str(plan.directory / OF_TRAINING):
        del manager["log_dir"]  # likewise, so that a training elsewhere with this config has its own
    return {"manager": manager, "training": training, "trainers": of_trainers}


def check_resumed(plan: TrainingPlan) -> None:
    """Raise UsageError if ``plan`` has another seed, or another kind of trainer, than the training that it resumes.

    Also raise UsageError if the config that the training has recorded is not one any more.
    """
    before = read(plan.directory)
    if before is None:
        if os.path.lexists(plan.directory / CONFIG):
            raise UsageError(f"{plan.directory / CONFIG} is no config of a training run: restore it, or delete it.")
        return
    wrong = list(_wrong(before, plan))
    if wrong:
        raise UsageError(
            f"the training in {plan.directory} cannot go on with another config than it began with: "
            f"{', '.join(wrong)}. Resume with what {plan.directory / CONFIG} says, or begin again (--force), "
            "or train elsewhere (--dir)."
        )


def _wrong(before: Mapping[str, Any], plan: TrainingPlan) -> Iterator[str]:
    seed = _table(before, "training").get("seed", plan.training.seed)
    yield from differences(seed, plan.training.seed, "training.seed")
    for behavior, table in _table(before, "trainers").items():
        now = plan.trainers.get(behavior, plan.trainers.get(ANY_BEHAVIOR))
        if now is not None and isinstance(table, Mapping):
            yield from differences(table.get("kind"), now.get("kind"), f"trainers.{behavior}.kind")


def changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each option of environments, parameters or trainers that differs; [] without ``before``."""
    if before is None:
        return []
    was_played, is_played = (
        {name: value for name, value in _table(config, "manager").items() if name not in _OF_RUNNING}
        for config in (before, now)
    )
    of_trainers = differences(_table(before, "trainers"), _table(now, "trainers"), "trainers")
    had, has = (_table(_table(config, "training"), "parameters") for config in (before, now))
    return [*differences(was_played, is_played, "manager"), *differences(had, has, "training.parameters"), *of_trainers]


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}
