"""Environments whose observations and actions are trees, which can be looked at; and runs that were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envmanager.keeping.state import checksum_of
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

HERE = __name__
PUZZLE = f"{HERE}:Puzzle"
SPEAKERS = "mpe2.simple_speaker_listener_v4:parallel_env"
SMALL_PPO = {"kind": "ppo", "rollout": 64, "epochs": 2, "minibatch": 32, "hidden": [16]}
SMALL_DQN = {"kind": "dqn", "capacity": 2000, "learning_starts": 64, "train_every": 16, "hidden": [16]}


class Puzzle(gymnasium.Env):  # type: ignore[misc]
    """Nothing to win. Its episodes take 4, 5, 6, … steps; what it shows gets brighter with each."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (36, 36, 3), np.uint8),
            "place": spaces.Discrete(4, start=1),
            "body": spaces.Tuple((spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.MultiBinary(3))),
        }
    )
    action_space = spaces.Dict(
        {
            "move": spaces.Discrete(3, start=-1),
            "arm": spaces.Tuple(
                (spaces.Box(np.array([-2, 0], np.float32), np.array([3, 1], np.float32)), spaces.MultiDiscrete([2, 3]))
            ),
            "keys": spaces.MultiBinary(2),
        }
    )

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._n_episodes = self._n_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
            self._n_episodes = 0
        self._n_episodes += 1
        self._n_steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self._n_steps += 1
        return self.observation_space.sample(), 1.0, self._n_steps == 3 + self._n_episodes, False, {}

    def render(self) -> Any:
        return np.full((32, 48, 3), 20 * self._n_steps, np.uint8)


class Quiet(Report):
    """A report to nobody."""


def trained(directory: Path, env: Any, trainers: dict[str, Any], *, steps: int = 200, **manager: Any) -> TrainingRun:
    """A training run in this process that has ended, in ``directory``."""
    tables = {
        "manager": {"kind": "simple", "env": env, "n_envs": 3, "wait": "all", **manager},
        "training": {"steps": steps, "evaluation_episodes": 0, "device": "cpu"},
        "trainers": trainers,
    }
    run = TrainingRun(TrainingPlan.parse(tables, directory), Quiet())
    run.go()
    return run


def rewrite(state: Path, before: str, after: str) -> None:
    """Replace a text in the ``state.json`` of a checkpoint, and the checksum."""
    facts = json.loads(state.read_text().replace(before, after))
    del facts["checksum"]
    state.write_text(json.dumps({**facts, "checksum": checksum_of(facts)}))
