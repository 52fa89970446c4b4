"""A training run on Windows and macOS, as far as a simulation tells.

On Windows, workers and the process of a learner cannot be simulated. ``make test-wine`` starts workers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envmanager_tests.other_systems import SYSTEMS, run_on

OTHERS = ("gymnasium", "safetensors.torch", "tensorboardX", "torch.optim", "torch._dynamo", "yaml", "rich", "typer")
"""Other people's modules. The fourth is imported by PyTorch's optimizers, when the first is made."""

SCRIPT = """
import json
import sys
from pathlib import Path

import envmanager.cli.train
from envmanager.training import load_policy
from envmanager.training.runs.run import TrainingPlan, TrainingRun
from envmanager.training.algorithms.trainers import check_tables


class Report:
    def __getattr__(self, name):
        return lambda *arguments, **options: None


def config(manager="simple", **trainer):
    return {
        "manager": {"kind": manager, "env": "CartPole-v1", "n_envs": 2, "wait": "all"},
        "training": {"steps": 200, "evaluation_episodes": 1, "checkpoint_every": 100},
        "trainers": {"default": {"hidden": [8], **trainer}},
    }


def train(folder, **options):
    plan = TrainingPlan.parse(config(**options), Path(folder))
    TrainingRun(plan, Report()).go()
    load_policy(folder)
    return sorted(path.name for path in Path(folder).iterdir())


check_tables({"default": {"kind": "dqn", "apart": 100}})
told = {
    "dqn": train(FOLDER + "/dqn", kind="dqn", learning_starts=20, capacity=1000),
    "ppo": train(FOLDER + "/ppo", kind="ppo", rollout=64),
}
if sys.platform == "darwin":
    told["workers"] = train(FOLDER + "/workers", manager="subprocess", kind="ppo", rollout=64)
    told["apart"] = train(FOLDER + "/apart", kind="dqn", learning_starts=20, capacity=1000, apart=50)
print(json.dumps(told))
"""


BRIDGES = """
from stable_baselines3 import PPO
from envmanager import SimpleEnvManager
from envmanager.interop import as_sb3_vec_env, as_vector_env

environments = as_vector_env(SimpleEnvManager("CartPole-v1", 2))
observations, _ = environments.reset(seed=0)
for _ in range(50):
    observations, *_ = environments.step(environments.action_space.sample())
environments.close()

environments = as_sb3_vec_env(SimpleEnvManager("CartPole-v1", 2))
PPO("MlpPolicy", environments, n_steps=16, batch_size=8, n_epochs=1).learn(32)
environments.close()
print(observations.shape)
"""


@pytest.mark.parametrize("system", SYSTEMS)
def test_other_libraries_step_and_learn_through_the_bridges(system: str) -> None:
    pytest.importorskip("stable_baselines3")
    preloaded = [*OTHERS, "gymnasium.vector", "stable_baselines3", "matplotlib.pyplot"]
    assert run_on(system, BRIDGES, preloaded=preloaded) == "(2, 4)\n"


@pytest.mark.parametrize("system", SYSTEMS)
def test_trainings_work_also_with_a_learner_in_a_process_of_its_own(system: str, tmp_path: Path) -> None:
    script = f"FOLDER = {str(tmp_path)!r}\n{SCRIPT}"
    told = json.loads(run_on(system, script, preloaded=OTHERS, preloaded_by_children=OTHERS))

    assert set(told) == {"dqn", "ppo", *(["workers", "apart"] if system == "macos" else [])}
    assert all("checkpoints" in files for files in told.values())
