"""ML-Agents' PPO on the corridor, by its own TrainerController, with whatever env manager.

As a command it prints one line of JSON: ``python -m envmanager_tests.interop_mlagents.training ours --n-envs 4``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
from mlagents.plugins.trainer_type import get_default_trainer_types
from mlagents.trainers.environment_parameter_manager import EnvironmentParameterManager
from mlagents.trainers.ppo.optimizer_torch import PPOSettings
from mlagents.trainers.settings import NetworkSettings, RunOptions, TrainerSettings
from mlagents.trainers.stats import StatsReporter, StatsSummary, StatsWriter
from mlagents.trainers.subprocess_env_manager import SubprocessEnvManager as MlagentsSubprocessEnvManager
from mlagents.trainers.torch_entities.model_serialization import ModelSerializer
from mlagents.trainers.trainer import TrainerFactory
from mlagents.trainers.trainer_controller import TrainerController

from envmanager import RestartPolicy, SubprocessEnvManager
from envmanager.interop.mlagents import MlagentsEnvManager, MlagentsFactory
from envmanager_tests.interop_mlagents.envs import CorridorEnv

SUMMARY_STEPS = 1000


@attrs.define
class Training:
    """``rewards``: an episode's mean reward, every SUMMARY_STEPS steps. ``stats``: the names of all statistics."""

    rewards: list[float] = attrs.field(factory=list)
    stats: set[str] = attrs.field(factory=set)
    seconds: float = 0.0


class Recorder(StatsWriter):
    def __init__(self, training: Training) -> None:
        self._training = training

    def write_stats(self, category: str, values: dict[str, StatsSummary], step: int) -> None:
        self._training.stats |= values.keys()
        if "Environment/Cumulative Reward" in values:
            self._training.rewards.append(values["Environment/Cumulative Reward"].mean)


@contextmanager
def recording(training: Training) -> Iterator[None]:
    """Without exported models: as it is, ML-Agents' export does not fit a new PyTorch."""
    writers = list(StatsReporter.writers)
    StatsReporter.add_writer(Recorder(training))
    try:
        with mock.patch.object(ModelSerializer, "export_policy_model"):
            yield
    finally:
        StatsReporter.writers[:] = writers  # which are there for the whole program


def settings_for(max_steps: int, memory: NetworkSettings.MemorySettings | None = None) -> TrainerSettings:
    hyperparameters = PPOSettings(
        batch_size=64, buffer_size=512, learning_rate=3e-3, beta=5e-3, num_epoch=3, epsilon=0.2
    )
    return TrainerSettings(
        trainer_type="ppo",
        hyperparameters=hyperparameters,
        network_settings=NetworkSettings(hidden_units=32, num_layers=1, memory=memory),
        time_horizon=16,
        max_steps=max_steps,
        summary_freq=SUMMARY_STEPS,
        checkpoint_interval=max_steps,
        threaded=False,
    )


def train(
    env_manager: Any,
    folder: Path,
    *,
    seed: int = 1,
    max_steps: int = 6000,
    memory: NetworkSettings.MemorySettings | None = None,
) -> Training:
    """Train until ``max_steps``, then close the env manager."""
    get_default_trainer_types()
    parameters = EnvironmentParameterManager({}, seed)
    factory = TrainerFactory(
        {"Corridor": settings_for(max_steps, memory)},
        str(folder),
        train_model=True,
        load_model=False,
        seed=seed,
        param_manager=parameters,
    )
    controller = TrainerController(factory, str(folder), "corridor", parameters, True, seed)
    training = Training()
    started_at = time.monotonic()
    try:
        with recording(training):
            controller.start_learning(env_manager)
    finally:
        env_manager.close()
    training.seconds = time.monotonic() - started_at
    return training


def ours(n_envs: int, seed: int) -> MlagentsEnvManager:
    factory = MlagentsFactory(Seeded(seed))
    return MlagentsEnvManager(SubprocessEnvManager(factory, n_envs, infos=True, restarts=RestartPolicy(max_restarts=0)))


def theirs(n_envs: int, seed: int) -> MlagentsSubprocessEnvManager:
    return MlagentsSubprocessEnvManager(Seeded(seed), RunOptions(), n_envs)


@attrs.frozen
class Seeded:
    """Corridors with other goals for every ``seed``."""

    seed: int

    def __call__(self, worker_id: int, side_channels: Any) -> CorridorEnv:
        return CorridorEnv(100 * self.seed + worker_id, side_channels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("manager", choices=["ours", "theirs"])
    parser.add_argument("--n-envs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=6000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    env_manager = {"ours": ours, "theirs": theirs}[given.manager](given.n_envs, given.seed)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        training = train(env_manager, Path(folder), seed=given.seed, max_steps=given.max_steps)
    print(json.dumps({"rewards": training.rewards, "seconds": training.seconds, "stats": sorted(training.stats)}))


if __name__ == "__main__":
    main()
