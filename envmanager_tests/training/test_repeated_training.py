"""A training with ``wait: all`` repeats itself, though its workers respond in another order each time."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun


class Uneven(gymnasium.Env):  # type: ignore[type-arg]
    """Its steps take a time by chance."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n_steps = 0
        return self.seen(), {}

    def seen(self) -> np.ndarray:
        return self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)

    def step(self, action: Any) -> Any:
        time.sleep(random.random() * 0.002)
        self.n_steps += 1
        return self.seen(), float(action), self.n_steps == 20, False, {}


def trained(directory: Path) -> str:
    """Train, and return the hash of the last weights."""
    config = {
        "manager": {"env": Uneven, "n_envs": 4, "wait": "all"},
        "training": {"steps": 1024, "seed": 3, "evaluation_episodes": 0, "device": "cpu"},
        "trainers": {"*": {"kind": "ppo", "rollout": 256, "minibatch": 64, "hidden": [8]}},
    }
    TrainingRun(TrainingPlan.parse(config, directory), Report()).go()
    (weights,) = max((directory / "checkpoints").glob("0*")).glob("trainer-*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def test_two_trainings_whose_workers_respond_in_other_orders_learn_the_same(tmp_path: Path) -> None:
    assert trained(tmp_path / "one") == trained(tmp_path / "other")
