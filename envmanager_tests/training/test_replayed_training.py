"""A recorded training learns the same again: with two behaviors, stragglers, workers that die, and tasks."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from pettingzoo import ParallelEnv

pytest.importorskip("torch")
pytest.importorskip("zstandard")

from gymnasium.spaces import Box, Discrete

from envmanager import EnvContext
from envmanager.recording import ReplayDiverged, episodes
from envmanager.registry import ManagerOptions, live, make_manager
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


def cart_pole(directory: Path, *, resume: bool = False, steps: int = 300, **tables: Any) -> list[str]:
    """Train PPO on CartPole, and return the names and hashes of all weights."""
    config = {
        "manager": {"kind": "simple", "env": "CartPole-v1", "n_envs": 2} | tables.pop("manager"),
        "training": {"steps": steps, "seed": 1, "checkpoint_every": 150, "evaluation_episodes": 2} | tables,
        "trainers": {"*": {"kind": "ppo", "rollout": 64, "epochs": 1, "minibatch": 64, "hidden": [8]}},
    }  # fmt: skip
    TrainingRun(TrainingPlan.parse(config, directory, resume=resume), Report()).go()
    found = sorted((directory / "checkpoints").glob("0*/*.safetensors"))
    return [f"{each.parent.name} {hashlib.sha256(each.read_bytes()).hexdigest()}" for each in found]


@pytest.mark.parametrize("every", [{"evaluate_every": 150}, {}])
def test_evaluations_are_in_no_recording_and_run_in_environments_beside_a_replay(
    every: dict[str, int], tmp_path: Path, caplog: Any
) -> None:
    path = str(tmp_path / "run.emrec")
    recorded = cart_pole(tmp_path / "recorded", manager={"record": path}, **every)
    assert sum(each.length for each in episodes(path)) == 300
    replay = {"kind": "replay", "recording": path}
    assert cart_pole(tmp_path / "replayed", manager=replay, **every) == recorded
    assert cart_pole(tmp_path / "ordered", manager={"order": path}, **every) == recorded
    best = [(tmp_path / name / "checkpoints" / "best").read_text() for name in ("recorded", "replayed")]
    assert best[0] == best[1]
    assert cart_pole(tmp_path / "without", manager={**replay, "env": None}, **every) == recorded
    assert "nothing is evaluated" in caplog.text


def test_a_resumed_training_records_a_further_part_which_is_replayed_too(tmp_path: Path, caplog: Any) -> None:
    path, further = str(tmp_path / "run.emrec"), str(tmp_path / "run.2.emrec")
    recorded = [
        cart_pole(tmp_path / "recorded", manager={"record": path}, steps=steps, resume=steps == 600)
        for steps in (300, 600)
    ]
    assert further in caplog.text
    assert [sum(each.length for each in episodes(each)) for each in (path, further)] == [600, 300]
    replayed = [
        cart_pole(
            tmp_path / "replayed", manager={"kind": "replay", "recording": part}, steps=steps, resume=steps == 600
        )
        for part, steps in ((path, 300), (further, 600))
    ]
    assert replayed == recorded


def test_a_replay_of_another_kind_is_evaluated_with_that_kind(tmp_path: Path) -> None:
    path = str(tmp_path / "run.emrec")
    with make_manager({"kind": "asyncio", "env": "CartPole-v1", "record": path}):
        pass
    options = ManagerOptions(kind="replay", env="CartPole-v1", recording=path, strict=False)
    assert attrs.asdict(live(options)) == attrs.asdict(ManagerOptions(kind="asyncio", env="CartPole-v1"))
