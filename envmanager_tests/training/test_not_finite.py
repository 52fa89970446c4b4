"""NaN and infinite numbers end a training before it learns from them, and no checkpoint has them.

A training that another error ends is saved.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import AgentSteps, EnvRaised, SimpleEnvManager, Wait, WorkerDied
from envmanager.cli.app import run_command_line
from envmanager.data.steps import AGENT_BITS
from envmanager.training import load_policy
from envmanager.training.controller import TrainerController
from envmanager.training.runs import checkpoints
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun
from envmanager.training.trainer import NotFinite, require_finite
from envmanager_tests.envs import EchoGym
from envmanager_tests.training.test_controller import Counts

HERE = __name__
PPO = {"kind": "ppo", "rollout": 32, "epochs": 1, "hidden": [8]}
DQN = {"kind": "dqn", "learning_starts": 20, "hidden": [8]}
SAC = {"kind": "sac", "learning_starts": 20, "batch": 8, "train_every": 8, "hidden": [8]}
SPOILT = 100
"""Number of the step that goes wrong."""


class Sick(gymnasium.Env):  # type: ignore[misc]
    """Goes wrong in a step: with a bad reward, a bad observation, an exception, or the end of its process."""

    observation_space = gymnasium.spaces.Dict({"speed": gymnasium.spaces.Box(-9, 9, (3,), np.float32)})

    def __init__(self, reward: float = 1.0, speed: float = 0.0, discrete: bool = True, ends: str = "") -> None:
        box = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2) if discrete else box
        self._bad = reward, speed
        self._ends = ends
        self._n = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"speed": np.zeros(3, np.float32)}, {}

    def step(self, action: Any) -> Any:
        self._n += 1
        reward, speed = self._bad if self._n == SPOILT else (1.0, 0.0)
        if self._ends and self._n == SPOILT:
            if self._ends == "exits":
                os._exit(3)
            raise ArithmeticError("no more")
        return {"speed": np.array([0, speed, 0], np.float32)}, reward, False, self._n % 7 == 0, {}


def training(directory: Path, trainer: dict[str, Any], env: dict[str, Any], **options: Any) -> TrainingRun:
    tables = {
        "manager": {"kind": "simple", "env": f"{HERE}:Sick", "wait": "all", "env_kwargs": env, **options},
        "training": {"steps": 200, "checkpoint_every": 64, "evaluation_episodes": 0, "device": "cpu"},
        "trainers": {"default": trainer},
    }
    return TrainingRun(TrainingPlan.parse(tables, directory), Report())


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    "trainer", [PPO, DQN, SAC, pytest.param({**DQN, "apart": 100}, marks=pytest.mark.load)], ids=str
)
def test_a_bad_reward_ends_the_training_and_what_was_learned_before_is_saved(
    tmp_path: Path, trainer: dict[str, Any], value: float
) -> None:
    run = training(tmp_path, trainer, {"reward": value, "discrete": trainer is not SAC})
    with pytest.raises(NotFinite, match=r"env 0 gave 'default' reward = (nan|-inf) after agent step 99") as raised:
        run.go()
    error = raised.value
    assert (error.behavior, error.env_id, error.what, error.n_steps) == ("default", 0, "reward", SPOILT - 1)
    assert error.value == pytest.approx(value, nan_ok=True)
    assert checkpoints.load_latest(tmp_path / "checkpoints").training.n_steps == SPOILT - 1
    assert np.isfinite(load_policy(tmp_path)({"speed": np.ones(3, np.float32)})).all()


def test_a_bad_observation_ends_the_training_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match=r"env 0 gave 'default' obs\['speed'\]\[1\] = inf after agent step 99"):
        training(tmp_path, PPO, {"speed": math.inf}).go()


def test_the_command_fails_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "sick.yaml"
    config.write_text(
        f"manager: {{kind: simple, env: '{HERE}:Sick', env_kwargs: {{reward: .nan}}}}\n"
        "training: {steps: 200}\ntrainers: {'*': {kind: dqn, learning_starts: 20, hidden: [8]}}\n"
    )
    assert run_command_line(["train", str(config), "--dir", str(tmp_path / "run"), "--plain"]) == 1
    assert "Error: env 0 gave 'default' reward = nan after agent step 99." in capsys.readouterr().err


def steps(**fields: Any) -> AgentSteps:
    fine = {
        "agent_id": np.array([3 << AGENT_BITS, 3 << AGENT_BITS | 2]),
        "obs": np.zeros((2, 2), np.float32),
        "reward": np.zeros(2, np.float32),
        "terminated": np.array([True, False]),
        "truncated": np.array([False, True]),
        "final_obs": np.zeros((2, 2), np.float32),
    }
    return AgentSteps(**{**fine, **fields})


BAD_FIRST, BAD_SECOND = np.array([[0, np.nan], [0, 0]], np.float32), np.array([[0, 0], [np.nan, 0]], np.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {"final_obs": BAD_FIRST},
        {"obs": BAD_FIRST, "acting": np.array([False, True])},
        {"obs": {"image": np.zeros((2, 3), np.uint8)}, "final_obs": {"image": np.zeros((2, 3), np.uint8)}},
    ],
    ids=["the last one of an episode that terminated", "of an agent that does not act", "no floats"],
)
def test_what_no_trainer_learns_from_may_be_anything(fields: dict[str, Any]) -> None:
    require_finite("default", steps(**fields), 0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"final_obs": BAD_SECOND}, r"env 3 gave agent 2 of 'default' final_obs\[0\] = nan"),
        ({"obs": BAD_FIRST, "acting": np.array([True, False])}, r"env 3 gave 'default' obs\[1\] = nan"),
        ({"reward": np.array([0, np.inf], np.float32)}, "env 3 gave agent 2 of 'default' reward = inf"),
    ],
)
def test_what_a_trainer_learns_from_is_named_with_its_agent(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(NotFinite, match=told):
        require_finite("default", steps(**fields), 0)


def test_a_figure_of_any_trainer_that_is_not_finite_ends_the_training() -> None:
    class Diverges(Counts):
        def update(self, progress: float) -> dict[str, float]:
            return {**super().update(progress), "loss": math.inf if self.version == 3 else 1.0}

    with SimpleEnvManager(EchoGym, n_envs=2) as manager:
        controller = TrainerController(manager, {"default": Diverges(every=4)}, wait=Wait.all())
        with pytest.raises(NotFinite, match="'default' has loss = inf after agent step 12, and is not saved") as raised:
            controller.train(40)
    assert raised.value.env_id is None


@pytest.mark.parametrize("trainer", [PPO, DQN, SAC], ids=["ppo", "dqn", "sac"])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, trainer: dict[str, Any]) -> None:
    """However they came to be so: here in the last update before a checkpoint, whose losses are finite."""
    run = training(tmp_path, trainer, {"discrete": trainer is not SAC})

    class Spoils(Report):
        def updated(self, _: Any, update: Any) -> None:
            if update.n_steps >= 126:
                with torch.no_grad():
                    next(iter(run.trainers["default"].model.parameters())).fill_(math.nan)  # type: ignore[attr-defined]

    run._reports.append(Spoils())
    with pytest.raises(NotFinite, match=r"'default' has \S+ = nan after agent step 12\d, and is not saved"):
        run.go()
    assert checkpoints.load_latest(tmp_path / "checkpoints").training.n_steps == 64


@pytest.mark.parametrize(
    ("ends", "options", "error"),
    [
        ("raises", {}, EnvRaised),
        pytest.param("exits", {"kind": "subprocess", "restarts": 0}, WorkerDied, marks=pytest.mark.load),
    ],
)
@pytest.mark.parametrize("trainer", [PPO, DQN], ids=["ppo", "dqn"])
def test_a_training_that_an_error_of_the_manager_ends_is_saved(
    tmp_path: Path, trainer: dict[str, Any], ends: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        training(tmp_path, trainer, {"ends": ends}, **options).go()
    assert checkpoints.load_latest(tmp_path / "checkpoints").training.n_steps == SPOILT - 1


def test_a_training_without_an_update_says_so_at_its_start_and_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training(tmp_path, {**PPO, "rollout": 500}, {}).go()
    first, last = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert first.startswith("'default' will learn nothing: the first update comes after 500 agent steps")
    assert last == "'default' has learned nothing: no update in 200 agent steps."


@pytest.mark.parametrize("trainer", [PPO, DQN, SAC], ids=["ppo", "dqn", "sac"])
def test_a_training_that_learns_warns_of_nothing(
    tmp_path: Path, trainer: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    training(tmp_path, trainer, {"discrete": trainer is not SAC}).go()
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
