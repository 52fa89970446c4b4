"""Trainings whose process kills itself.

``python -m envmanager_tests.training.killable NAME WORKERS DIR EPISODES MANAGER``, the last of which is JSON.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from pettingzoo.utils.env import ParallelEnv

from envmanager.training.runs.figures import EpisodeEnd, Report
from envmanager.training.runs.run import TrainingPlan, TrainingRun


class Slope(gymnasium.Env[Any, Any]):
    """A walk by chance, whose steps are as long as the option ``slope`` says; it pays to go up."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._slope = float((options or {}).get("slope", 1.0))
        self._n, self._at = 0, float(self.np_random.random())
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        self._at += self._slope * (2 * int(action) - 1) + float(self.np_random.normal()) * 0.1
        return self._seen(), float(action) * self._slope, self._n >= 12 or abs(self._at) > 6, False, {}

    def _seen(self) -> Any:
        return np.array([self._at, self._n], np.float32)


class Mixed(ParallelEnv):  # type: ignore[misc]
    """Agents of two behaviors that come and go in the middle of an episode."""

    metadata = {"name": "mixed"}
    possible_agents = ["hero_0", "target_0", "target_1"]

    def observation_space(self, agent: str) -> Any:
        return gymnasium.spaces.Box(-np.inf, np.inf, (2 if agent == "hero_0" else 3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return gymnasium.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._n, self._length = 0, int(self._random.integers(6, 20))
        self._x = dict.fromkeys(self.possible_agents, float(self._random.random()))
        self.agents = ["hero_0", *(["target_0"] if self._random.random() < 0.5 else [])]
        return self._rows(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self._n += 1
        for agent, action in actions.items():
            self._x[agent] = (self._x[agent] * 1.7 + int(action) + float(self._random.random())) % 3.0
        is_over, acted = self._n >= self._length, self.agents
        ends = {agent: is_over or (agent != "hero_0" and bool(self._random.random() < 0.1)) for agent in acted}
        joins = [each for each in self.possible_agents if each not in acted][: self._random.random() < 0.2]
        self.agents = [] if is_over else sorted([*(agent for agent in acted if not ends[agent]), *joins])
        both = list(dict.fromkeys([*acted, *self.agents]))
        no, infos = dict.fromkeys(both, False), {agent: {} for agent in both}
        return self._rows(both), {agent: self._x[agent] for agent in both}, {**no, **ends}, no, infos

    def _rows(self, agents: list[str]) -> dict[str, Any]:
        rest = {"hero_0": (), "target_0": (1.0,), "target_1": (2.0,)}
        return {agent: np.array([self._x[agent], self._n, *rest[agent]], np.float32) for agent in agents}

    def close(self) -> None:
        pass


PPO = {"kind": "ppo", "rollout": 128, "minibatch": 64, "epochs": 1, "hidden": [8]}
DQN = {"kind": "dqn", "learning_starts": 64, "hidden": [8], "n_step": 3, "prioritized": True, "capacity": 400}
SAC = {"kind": "sac", "learning_starts": 64, "hidden": [8], "batch": 16, "capacity": 400}
MODULE = "envmanager_tests.training.killable"  # also where it is __main__
SLOPE, NORMAL = f"{MODULE}:Slope", {"normalize_rewards": True, "normalize_observations": True}
LESSONS = {
    "slope": {
        "lessons": [
            {"value": 0.5, "until": {"measure": "reward", "threshold": 1.0, "episodes": 10}},
            {"value": 1.0, "until": {"measure": "progress", "threshold": 0.5}},
            {"value": {"sampler": "uniform", "min": 0.5, "max": 1.5}},
        ]
    }
}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"env": SLOPE, "trainers": {"*": {**PPO, **NORMAL}}},
    "dqn": {"env": SLOPE, "trainers": {"*": {**DQN, **NORMAL}}},
    "sac": {"env": "Pendulum-v1", "trainers": {"*": SAC}, "steps": 1600, "env_kwargs": {"g": 9.0}},
    "apart": {"env": SLOPE, "trainers": {"*": {**DQN, **NORMAL, "apart": 40}}},
    "sac apart": {"env": "Pendulum-v1", "trainers": {"*": {**SAC, "apart": 30}}},
    "lessons": {"env": SLOPE, "trainers": {"*": PPO}, "parameters": LESSONS},
    "rounds": {
        "env": f"{MODULE}:Mixed",
        "trainers": {"hero": PPO, "target": PPO},
        "rounds": {"steps": 40, "train": [["hero"], ["target"]]},
    },
    "two": {"env": f"{MODULE}:Mixed", "trainers": {"hero": PPO, "target": DQN}},
}


def plan_of(
    name: str, workers: int, folder: Path, *, of_manager: dict[str, Any] | None = None, **more: Any
) -> TrainingPlan:
    """Return the plan of a training of ``RUNS`` with so many workers; 0 for the trainer's process."""
    own = RUNS[name]
    kind = {"kind": "subprocess", "n_workers": workers} if workers else {"kind": "simple"}
    manager = {"env": own["env"], "n_envs": 4, "wait": "all", **kind, **(of_manager or {})}
    if "env_kwargs" in own:
        manager["env_kwargs"] = own["env_kwargs"]
    training = {"steps": own.get("steps", 1600), "checkpoint_every": 230, "evaluation_episodes": 0, "seed": 7}
    training |= {"device": "cpu", "metrics": ["csv"]}
    training |= {key: own[key] for key in ("parameters", "rounds") if key in own}
    return TrainingPlan.parse({"manager": manager, "training": training, "trainers": own["trainers"]}, folder, **more)


class Killed(Report):
    """Kills the process at the end of an episode."""

    def __init__(self, n_episodes: int) -> None:
        self.left = n_episodes

    def episode_ended(self, end: EpisodeEnd) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def digests(folder: Path) -> tuple[dict[str, str], list[list[str]]]:
    """Return the hashes of the last weights, replays and optimizers, and the table of episodes without times."""
    name = (folder / "checkpoints" / "latest").read_text().split()[0]
    parts = sorted((folder / "checkpoints" / name).glob("trainer-*.safetensors"))
    table = (folder / "episodes.csv").read_text().splitlines()
    rows = [[row[0], *row[2:]] for row in csv.reader(table)]
    return {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in parts}, rows


if __name__ == "__main__":
    name, workers, folder, n_episodes, of_manager = sys.argv[1:]
    plan = plan_of(name, int(workers), Path(folder), of_manager=json.loads(of_manager), resume="auto")
    TrainingRun(plan, Killed(int(n_episodes))).go()
