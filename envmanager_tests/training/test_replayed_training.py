"""A recorded training learns the same again: with two behaviors, stragglers, workers that die, and tasks."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pettingzoo import ParallelEnv

pytest.importorskip("torch")
pytest.importorskip("mcap")

from gymnasium.spaces import Box, Discrete

from envmanager import EnvContext
from envmanager.recording import ReplayDiverged
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun


class Pair(ParallelEnv):  # type: ignore[misc, type-arg]
    """Two agents of different behaviors. The first environment is slow, and the second one dies at times."""

    metadata = {"name": "pair"}
    possible_agents = ["hider", "seeker"]

    def __init__(self, context: EnvContext) -> None:
        self.env_id, self.agents = context.env_id, []
        self.n_until_death = 60 + random.randrange(60)

    def observation_space(self, agent: str) -> Any:
        return Box(-1.0, 1.0, (3 if agent == "hider" else 2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return Discrete(3 if agent == "hider" else 2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.generator = np.random.default_rng(seed)
        self.agents, self.n_steps, self.noise = list(self.possible_agents), 0, options["noise"]
        return self.obs(), {agent: {} for agent in self.agents}

    def obs(self) -> dict[str, np.ndarray]:
        return {
            agent: self.generator.uniform(-self.noise, self.noise, self.observation_space(agent).shape).astype("f")
            for agent in self.agents
        }

    def step(self, actions: Any) -> Any:
        time.sleep(random.random() * (0.003 if self.env_id == 0 else 0.0003))
        self.n_until_death -= self.env_id == 1
        if not self.n_until_death:
            os._exit(9)
        self.n_steps += 1
        obs, over = self.obs(), dict.fromkeys(self.agents, self.n_steps == 20)
        reward = {agent: float(action == 1) for agent, action in actions.items()}
        return obs, reward, over, dict.fromkeys(self.agents, False), {agent: {} for agent in self.agents}


def trained(directory: Path, seed: int = 3, **manager: Any) -> list[str]:
    """Train, and return the hashes of all files of the last checkpoint that hold weights."""
    ppo = {"kind": "ppo", "rollout": 128, "epochs": 2, "minibatch": 64, "hidden": [8]}
    config = {
        "manager": {"env": Pair, "n_envs": 4, "restarts": {"max_restarts": 100, "backoff_s": 0.05}, **manager},
        "training": {
            "steps": 3000,
            "seed": seed,
            "evaluation_episodes": 0,
            "device": "cpu",
            "parameters": {"noise": {"sampler": "uniform", "min": 0.1, "max": 1.0}},
        },
        "trainers": {"hider": ppo, "seeker": ppo},
    }
    TrainingRun(TrainingPlan.parse(config, directory), Report()).go()
    weights = sorted(max((directory / "checkpoints").glob("0*")).glob("trainer-*.safetensors"))
    assert len(weights) == 2
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]


def test_a_replayed_training_learns_the_same_weights_to_the_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "run.emrec")
    recorded = trained(tmp_path / "recorded", kind="subprocess", record=path)
    for number in range(2):
        assert trained(tmp_path / f"replayed{number}", kind="replay", recording=path) == recorded
    with pytest.raises(ReplayDiverged):
        trained(tmp_path / "other", seed=4, kind="replay", recording=path)
