"""Evaluates the policies of a training while it goes on, in environments of its own.

::

    training's manager    step ─ step ─ update ─ step ─ │            │ step ─ update ─ …
    evaluator's manager                                 │ 20 episodes │

The rule: the training does not notice. Its environments, the episodes in them, the steps in flight and all generators
are afterwards as they were before; only time has passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.data.seeding import derive_seed
from envmanager.errors import ConfigError
from envmanager.options import ManagerOptions, Wait
from envmanager.registry import make_manager
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.system.cores import count_cores
from envmanager.training import generators
from envmanager.training.evaluation import Evaluation, evaluate_until, shares
from envmanager.training.trainer import Trainer

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

_GENERATION = 2**31 - 1
"""No worker's: so seeds of evaluations are none of the training's."""


class Evaluator:
    """Plays ``n_episodes`` with greedy policies, each time the same: from the same seeds. Close it.

    ``options`` are those of the training's ``manager``. Raises what making a manager does.
    """

    def __init__(self, options: ManagerOptions, manager: EnvManager, *, n_episodes: int, seed: int) -> None:
        self._seed = derive_seed(seed, 0, generation=_GENERATION)
        self._manager = make_manager(options_for(options, manager, n_episodes=n_episodes))
        self._episodes_per_env = shares(n_episodes, self._manager.n_envs)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.close()

    def evaluate(self, trainers: Mapping[str, Trainer], is_over: Callable[[], bool]) -> Evaluation | None:
        """Play; None when ``is_over()`` came first."""
        for trainer in trainers.values():
            trainer.pause()  # one policy from beginning to end, and the one that a checkpoint then has
        policies = {behavior: trainer.greedy_policy() for behavior, trainer in trainers.items()}
        before = generators.states()
        try:
            return evaluate_until(
                is_over,
                self._manager,
                policies,
                episodes_per_env=self._episodes_per_env,
                config={"seed": self._seed},
            )
        finally:
            generators.restore(before)


def options_for(options: ManagerOptions, manager: EnvManager, *, n_episodes: int) -> ManagerOptions:
    """A manager like the training's ``manager``, no larger than ``n_episodes`` need.

    Raises ConfigError when there can be only one.
    """
    kind = options.kind
    if kind == "auto":
        kind = "simple" if isinstance(manager, SimpleEnvManager) else "subprocess"
    n_envs = min(options.n_envs, n_episodes)
    n_workers = options.n_workers
    if n_workers == "auto" or options.kind == "auto":
        n_workers = count_cores()
    return attrs.evolve(
        options,
        kind=kind,
        n_envs=n_envs,
        n_workers=None if n_workers is None else min(n_workers, n_envs),
        local_envs=0,
        wait=Wait.all(),  # so that policies see the same batches each time
        seed=None,
        trace=None,
        log_dir=None if options.log_dir is None else os.path.join(options.log_dir, "evaluation"),
        engine=None if options.engine is None else _engine(options.engine),
    )


def _engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the training's engines, without a window and without their cores."""
    if options.get("attach") is not None:
        raise ConfigError(
            "training.evaluate_every needs environments of its own, and a game that is attached is the only one: leave "
            "it out, or engine.attach."
        )
    return {**options, "window": False, "pin": False}
