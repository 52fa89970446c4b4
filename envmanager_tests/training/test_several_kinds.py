"""Trainings of several kinds of environments, each with its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envmanager.registry import make_manager
from envmanager.training.evaluation import episodes_for, evaluate
from envmanager.training.policies.saved import SavedTraining, with_n_envs
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

KINDS = [
    {"env": "CartPole-v1", "n": 3, "behavior": "cart"},
    {"env": "Acrobot-v1", "n": 2, "behavior": "acro", "env_kwargs": {"max_episode_steps": 20}},
]
TABLES: dict[str, Any] = {
    "manager": {"kind": "simple", "env": KINDS, "wait": {"shares": {"cart": 0.5, "acro": 0.5}}},
    "training": {"steps": 400, "evaluation_episodes": 4, "device": "cpu"},
    "trainers": {
        "cart": {"kind": "ppo", "rollout": 48, "epochs": 1, "minibatch": 24},
        "acro": {"kind": "dqn", "capacity": 500, "learning_starts": 32, "train_every": 16, "hidden": [16]},
    },
}


def test_each_kind_learns_with_its_trainer_and_a_resumed_training_goes_on(tmp_path: Path) -> None:
    for steps, resume in ((400, False), (600, True)):
        tables = {**TABLES, "training": {**TABLES["training"], "steps": steps}}
        run = TrainingRun(TrainingPlan.parse(tables, tmp_path / "run", resume=resume), Report())
        run.go()
        assert run.controller is not None
        assert run.controller.n_steps >= steps
        assert {name: trainer.version > 0 for name, trainer in run.trainers.items()} == {
            "cart": True,
            "acro": True,
        }


def test_a_saved_training_of_several_kinds_is_evaluated_with_as_many_episodes_of_each(tmp_path: Path) -> None:
    run = TrainingRun(TrainingPlan.parse(TABLES, tmp_path / "run"), Report())
    run.go()
    training = SavedTraining.open(tmp_path / "run")
    options = with_n_envs(training.manager_options(), 1)
    assert (options.n_envs, options.env_name) == (5, "3 cart, 2 acro")
    with make_manager(options) as manager:
        policies = training.policies_for(manager.behavior_specs)
        evaluation = evaluate(manager, policies, **episodes_for(manager, 6, 0))
    assert {name: len(returns) for name, returns in evaluation.returns_of.items()} == {"cart": 3, "acro": 3}
