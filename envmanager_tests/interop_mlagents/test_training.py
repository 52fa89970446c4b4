"""ML-Agents' own trainers over worker processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlagents")

import torch
from mlagents.trainers.agent_processor import AgentManager
from mlagents.trainers.settings import ConstantSettings, NetworkSettings
from mlagents.trainers.stats import StatsReporter

from envmanager import SimpleEnvManager, SubprocessEnvManager
from envmanager.interop.mlagents import MlagentsEnvManager, MlagentsFactory
from envmanager_tests.interop_mlagents.envs import (
    CorridorEnv,
    make_corridor,
    make_masked_corridor,
    make_mortal_corridor,
)
from envmanager_tests.interop_mlagents.policies import ToldPolicy
from envmanager_tests.interop_mlagents.training import train

pytestmark = pytest.mark.filterwarnings("default")

CORRIDOR = "Corridor?team=0"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def played(bridge, n_steps, config=None):
    """ML-Agents' trajectories of at least ``n_steps`` steps of an environment that goes where it is told."""
    policy = ToldPolicy(CorridorEnv.SPEC)
    agents = AgentManager(policy, CORRIDOR, StatsReporter("corridor"), max_trajectory_length=100, threaded=False)
    bridge.reset(config=config)
    bridge.set_agent_manager(CORRIDOR, agents)
    bridge.set_policy(CORRIDOR, policy)
    workers = Counter()
    while workers.total() < n_steps:
        steps = bridge.get_steps()
        bridge.process_steps(steps)
        workers.update(step.worker_id for step in steps)
    found = []
    while not agents.trajectory_queue.empty():
        found.append(agents.trajectory_queue.get_nowait())
    return found, workers


def assert_a_whole_episode(trajectory, hint=1.0):
    """From the middle of the corridor straight to the end: nothing of another environment, step or action in it."""
    obs = np.array([step.obs[0] for step in trajectory.steps] + [trajectory.next_obs[0]])
    direction = np.sign(obs[0, 0])
    assert obs[:, 0].tolist() == [hint * direction] * 5
    assert obs[:, 1].tolist() == [direction * place / 4 for place in range(5)]
    assert [int(step.action.discrete[0]) - 1 for step in trajectory.steps] == [direction] * 4
    assert [float(step.action_probs.discrete[0]) for step in trajectory.steps] == obs[:4, 1].tolist()
    assert [step.reward for step in trajectory.steps] == [np.float32(-0.05)] * 3 + [1]
    assert [bool(step.done) for step in trajectory.steps] == [False] * 3 + [True]


def test_trajectories_of_four_processes_are_whole_episodes():
    with SubprocessEnvManager(MlagentsFactory(make_corridor), n_envs=4) as manager:
        found, workers = played(MlagentsEnvManager(manager), 400, config={"hint": ConstantSettings(value=0.5)})

    assert len(found) >= 400 / 4 - 4
    assert workers.keys() == {0, 1, 2, 3}
    assert len({trajectory.agent_id for trajectory in found}) == len(found)
    for trajectory in found:
        assert_a_whole_episode(trajectory, hint=0.5)


def test_two_environments_in_a_process_are_kept_apart():
    with SubprocessEnvManager(MlagentsFactory(make_corridor), n_envs=4, n_workers=2) as manager:
        found, workers = played(MlagentsEnvManager(manager), 200)

    assert workers.keys() == {0, 1}
    assert len({trajectory.agent_id for trajectory in found}) == len(found) >= 90
    for trajectory in found:
        assert_a_whole_episode(trajectory)


def test_when_a_process_dies_only_its_unfinished_episode_is_missing():
    with SubprocessEnvManager(make_mortal_corridor, n_envs=3) as manager:
        found, workers = played(MlagentsEnvManager(manager), 300)
        assert manager.stats().restarts == 1

    assert workers.keys() == {0, 1, 2}
    assert len({trajectory.agent_id for trajectory in found}) == len(found) > 300 / 4 - 6
    for trajectory in found:
        assert_a_whole_episode(trajectory)


def test_a_recurrent_policy_trains(tmp_path):
    bridge = MlagentsEnvManager(SimpleEnvManager(MlagentsFactory(make_corridor), n_envs=2))

    training = train(
        bridge,
        tmp_path,
        max_steps=2000,
        memory=NetworkSettings.MemorySettings(sequence_length=8, memory_size=16),
    )

    assert len(training.rewards) == 2


def test_one_mask_over_several_branches_trains(tmp_path):
    bridge = MlagentsEnvManager(SubprocessEnvManager(MlagentsFactory(make_masked_corridor), n_envs=2))

    training = train(bridge, tmp_path, max_steps=1000)

    assert len(training.rewards) == 1


def trained_by(manager):
    command = [sys.executable, "-W", "ignore", "-m", "envmanager_tests.interop_mlagents.training", manager]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.timeout(500)
def test_ppo_learns_with_four_processes_what_it_learns_with_ml_agents_own_manager():
    ours, theirs = trained_by("ours"), trained_by("theirs")

    assert ours["rewards"][0] < 0.3, "it has something to learn"
    assert ours["rewards"][-1] > 0.7
    assert abs(ours["rewards"][-1] - theirs["rewards"][-1]) < 0.1
    assert "Corridor/Length" in ours["stats"], "what the environments sent"
    assert set(ours["stats"]) == set(theirs["stats"])


@pytest.mark.timeout(300)
def test_the_script_of_the_documentation_trains(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "mlagents.md").read_text("utf-8")
    (script,) = re.findall(r'```python title="train_with_mlagents.py"\n(.*?)```', page, re.S)
    (tmp_path / "train_with_mlagents.py").write_text(script, "utf-8")
    (tmp_path / "game.py").write_text("from envmanager_tests.interop_mlagents.envs import make_corridor as make_env")
    (tmp_path / "config.yaml").write_text(CONFIG, "utf-8")
    command = [sys.executable, "-W", "ignore", "train_with_mlagents.py", "config.yaml", "--run-id=first"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment())

    assert ended.returncode == 0, ended.stderr
    assert "Mean Reward" in ended.stdout + ended.stderr
    assert (tmp_path / "results" / "first" / "Corridor" / "checkpoint.pt").exists()
    assert (tmp_path / "results" / "first" / "Corridor.onnx").exists()


CONFIG = """
behaviors:
  Corridor:
    trainer_type: ppo
    hyperparameters: {batch_size: 64, buffer_size: 512, learning_rate: 0.003}
    network_settings: {hidden_units: 32, num_layers: 1}
    time_horizon: 16
    max_steps: 1500
    summary_freq: 500
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
