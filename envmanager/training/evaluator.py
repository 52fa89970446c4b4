"""Evaluation of a training run's policies while the training is paused, in separate environments.

::

    training's manager    step ─ step ─ update ─ step ─ │            │ step ─ update ─ …
    evaluator's manager                                 │ 20 episodes │

The rule: an evaluation does not affect the training. The training's environments, their episodes, the steps in flight
and PyTorch's random generators (CPU and CUDA) are unchanged afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from envmanager.data.seeding import derive_seed
from envmanager.errors import ConfigError
from envmanager.importing import needed_by
from envmanager.options import Wait
from envmanager.registry import ManagerOptions, make_manager
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.system.machine import count_cores
from envmanager.training.evaluation import Evaluation, evaluate_until, logged_as_evaluation, shares
from envmanager.training.trainer import Trainer

with needed_by("envmanager.training", extra="torch"):
    import torch

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

_GENERATION = 2**31 - 1
"""Generation for ``derive_seed`` that no worker reaches, so that evaluations share no seed with the training."""


class Evaluator:
    """A context manager that evaluates greedy policies in its own environments, with the same seeds each time.

    ``options``, ``manager`` and ``seed`` are those of the training. The evaluator makes a second manager and closes it
    on exit. Each evaluation plays ``n_episodes`` episodes. Raises the errors of ``options_for`` and ``make_manager``.
    """

    def __init__(self, options: ManagerOptions, manager: EnvManager, *, n_episodes: int, seed: int) -> None:
        self._seed = derive_seed(seed, 0, generation=_GENERATION)
        with logged_as_evaluation():
            self._manager = make_manager(options_for(options, manager, n_episodes=n_episodes))
        self._episodes_per_env = shares(n_episodes, self._manager.n_envs)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def evaluate(self, trainers: Mapping[str, Trainer], is_over: Callable[[], bool]) -> Evaluation | None:
        """Pause the trainers, play the episodes and return the evaluation, or None as soon as ``is_over()`` is True."""
        for trainer in trainers.values():
            trainer.pause()  # so that the weights stay equal to those in a checkpoint written now
        policies = {behavior: trainer.greedy_policy() for behavior, trainer in trainers.items()}
        before = generator_states()
        try:
            return evaluate_until(
                is_over,
                self._manager,
                policies,
                episodes_per_env=self._episodes_per_env,
                config={"seed": self._seed},
            )
        finally:
            restore_generators(before)


def options_for(options: ManagerOptions, manager: EnvManager, *, n_episodes: int) -> ManagerOptions:
    """Return the training's options, changed for an evaluation's manager with at most ``n_episodes`` environments.

    Raises ConfigError when the training is attached to a running game, which cannot be started a second time.
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
    """Return engine options with ``window`` and ``pin`` set to False. Raises ConfigError if ``attach`` is set."""
    if options.get("attach") is not None:
        raise ConfigError(
            "training.evaluate_every needs a second game for its evaluations, but engine.attach gives only one: leave "
            "out one of the two."
        )
    return {**options, "window": False, "pin": False}


def generator_states() -> dict[str, np.ndarray]:
    """Return the states of PyTorch's random generators by name, such as ``"torch"`` (CPU) and ``"cuda0"``."""
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    found = {"torch": torch.get_rng_state(), **{f"cuda{number}": state for number, state in enumerate(of_gpus)}}
    return {name: state.numpy() for name, state in found.items()}


def restore_generators(states: Mapping[str, np.ndarray]) -> None:
    """Restore the states that ``generator_states`` returned. States of missing GPUs are ignored."""
    torch.set_rng_state(torch.from_numpy(np.array(states["torch"])))
    for number in range(torch.cuda.device_count()):
        if f"cuda{number}" in states:
            torch.cuda.set_rng_state(torch.from_numpy(np.array(states[f"cuda{number}"])), number)
