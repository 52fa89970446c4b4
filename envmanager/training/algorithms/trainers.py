"""Creation of trainers from the tables of a config. Other packages can add kinds of trainers as plugins."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from envmanager.adapters.other_names import other_names
from envmanager.data.specs import BehaviorSpec
from envmanager.errors import ConfigError, UsageError
from envmanager.importing import Plugins, nearest
from envmanager.options import at_least, plain_numbers, seconds
from envmanager.structuring import structure
from envmanager.training.algorithms.dqn import DQN, DQNOptions
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.algorithms.sac import SAC, SACOptions
from envmanager.training.learner_process import LEARNER_TIMEOUT_S, LearnerProcess
from envmanager.training.trainer import Trainer, require_can_learn_apart

ENTRY_POINT_GROUP = "envmanager.trainers"
_ADDED = Plugins(ENTRY_POINT_GROUP, "trainer")

MakeTrainer = Callable[..., Trainer]
"""A factory ``make(behavior, spec, options, seed=…, device=…)``; ``options``: the kind's own options in the table."""


def _make(
    cls: Callable[..., Trainer],
    options_cls: type[Any],
    behavior: str,
    spec: BehaviorSpec,
    options: Mapping[str, Any],
    *,
    seed: int,
    device: str,
) -> Trainer:
    parsed = structure(options_cls, options, where=f"trainers.{behavior}")
    return cls(behavior, spec, parsed, seed=seed, device=device)


KINDS: dict[str, MakeTrainer] = {
    "dqn": functools.partial(_make, DQN, DQNOptions),
    "ppo": functools.partial(_make, PPO, PPOOptions),
    "sac": functools.partial(_make, SAC, SACOptions),
}


def make_trainer(behavior: str, spec: BehaviorSpec, table: Mapping[str, Any], *, seed: int, device: str) -> Trainer:
    """Return a new trainer for a table such as ``{"kind": "ppo", "rollout": 512}``.

    The caller must close the trainer. With ``frozen: true`` the trainer does not learn until it is unfrozen. With
    ``apart: N`` the trainer learns in its own process, which may be N agent steps behind and must respond within
    ``learner_timeout_s``. Raises ConfigError for an invalid table, and UsageError for unsuitable specs or ``apart``.
    """
    of_kind, options, frozen, apart = _understood(behavior, table)
    make = functools.partial(of_kind, behavior, spec, options, seed=seed, device=device)
    try:
        trainer = make() if apart is None else LearnerProcess(make, **apart)
    except ConfigError:
        raise
    except UsageError as error:
        raise ConfigError(f"trainers.{behavior}.kind is {table['kind']!r}, which does not fit: {error}") from error
    trainer.frozen = frozen
    return trainer


def check_tables(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for a mistake in a trainer's table. The options of other packages' trainers are not checked."""
    for behavior, table in tables.items():
        make, options, _, apart = _understood(behavior, table)
        if isinstance(make, functools.partial) and make.func is _make:
            cls, options_cls = make.args
            structure(options_cls, options, where=f"trainers.{behavior}")
            try:
                if apart is not None:
                    require_can_learn_apart(cls)
            except UsageError as error:
                raise ConfigError(f"trainers.{behavior}.apart: {error}") from error


@attrs.frozen(kw_only=True, field_transformer=plain_numbers)
class _OfAnyKind:
    """The options in a trainer's table that every kind of trainer has."""

    other_names = staticmethod(other_names)

    kind: Any = None
    frozen: bool = False
    apart: int | None = attrs.field(default=None, validator=attrs.validators.optional(at_least(1)))
    learner_timeout_s: float = attrs.field(default=LEARNER_TIMEOUT_S, validator=seconds(unlimited=True))


def _understood(
    behavior: str, table: Mapping[str, Any]
) -> tuple[MakeTrainer, dict[str, Any], bool, dict[str, Any] | None]:
    """Return the factory, its options, ``frozen``, and options of a LearnerProcess or None. Raises ConfigError."""
    names = ["trainer_type", *(field.name for field in attrs.fields(_OfAnyKind))]
    options = {name: value for name, value in table.items() if name not in names}
    own = structure(
        _OfAnyKind, {name: value for name, value in table.items() if name in names}, where=f"trainers.{behavior}"
    )
    of_apart = None if own.apart is None else {"max_ahead": own.apart, "learner_timeout_s": own.learner_timeout_s}
    return _find(own.kind, behavior), options, own.frozen, of_apart


def known_kinds() -> list[str]:
    """Return the names of all kinds of trainers, including those of other packages."""
    return _ADDED.names_with(KINDS)


def _find(kind: Any, behavior: str) -> MakeTrainer:
    if isinstance(kind, str):
        found: MakeTrainer | None = KINDS[kind] if kind in KINDS else _ADDED.load(kind)
        if callable(found) and not inspect.isabstract(found):
            return found
    known = known_kinds()
    raise ConfigError(
        f"trainers.{behavior}.kind is {kind!r}: there is no such trainer{nearest(str(kind), known)} "
        f"Known trainers: {', '.join(known)}."
    )
