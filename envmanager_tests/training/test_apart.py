"""A trainer in a process of its own keeps the balance, hands over its weights, and tells when it fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import SimpleEnvManager, UsageError
from envmanager.testing.fault_checks import is_gone, until
from envmanager.training.apart import Apart, LearnerFailed
from envmanager.training.controller import TrainerController
from envmanager.training.dqn import DQN, DQNOptions
from envmanager.training.trainers import make_trainer

OPTIONS = DQNOptions(capacity=1000, learning_starts=50, train_every=10, batch=16, hidden=(8,))


def make(spec: Any) -> Any:
    return lambda: DQN("default", spec, OPTIONS, device="cpu")


@pytest.fixture
def manager() -> Iterator[Any]:
    with SimpleEnvManager("CartPole-v1", 2, seed=0) as manager:
        yield manager


def test_updates_keep_up_with_steps_and_the_policy_has_the_weights_that_were_learned(manager: Any) -> None:
    with Apart(make(manager.behavior_specs["default"]), max_ahead=40) as trainer:
        before = {name: tensor.clone() for name, tensor in trainer._model.state_dict().items()}
        TrainerController(manager, {"default": trainer}).train(1000)
        arrays, facts = trainer.state()  # everything that was sent before is dealt with
        most = 1 + (1000 - 50) // 10
        assert most - 5 <= facts["version"] <= most, "updates do not run ahead of the steps"
        assert facts["n_steps"] == 1000
        assert trainer.version >= (1000 - 40 - 50) // 10 - 1
        for name, tensor in trainer._model.state_dict().items():
            np.testing.assert_array_equal(tensor.numpy(), arrays[f"model.{name}"])
        assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer._model.state_dict().items())


@pytest.mark.load
def test_it_is_restored_on_both_sides(manager: Any) -> None:
    with Apart(make(manager.behavior_specs["default"])) as trainer:
        TrainerController(manager, {"default": trainer}).train(300)
        arrays, facts = trainer.state()
    with Apart(make(manager.behavior_specs["default"])) as again:
        again.restore(arrays, facts)
        assert again.version == facts["version"] > 0
        arrays_again, facts_again = again.state()
        assert facts_again == facts
        np.testing.assert_array_equal(arrays_again["model.last.0.weight"], arrays["model.last.0.weight"])
        assert torch.equal(again._model.state_dict()["last.0.weight"], torch.from_numpy(arrays["model.last.0.weight"]))


class Fails(DQN):
    def update(self, progress: float) -> dict[str, float]:
        raise ArithmeticError("no more")


def test_what_the_learner_raises_is_raised_here_with_its_traceback(manager: Any) -> None:
    spec = manager.behavior_specs["default"]
    with Apart(lambda: Fails("default", spec, OPTIONS, device="cpu")) as trainer:
        controller = TrainerController(manager, {"default": trainer})
        with pytest.raises(LearnerFailed, match="ArithmeticError: no more"):
            controller.train(100_000)


@pytest.mark.load
def test_a_learner_that_was_killed_is_told_and_nothing_hangs(manager: Any) -> None:
    with Apart(make(manager.behavior_specs["default"]), max_ahead=20) as trainer:
        controller = TrainerController(manager, {"default": trainer})
        controller.train(100)
        os.kill(trainer._process.pid or 0, signal.SIGKILL)
        until(lambda: is_gone(trainer._process.pid or 0))
        with pytest.raises(LearnerFailed, match="has ended with exit code -9"):
            controller.train(100_000)


@pytest.mark.load
def test_closed_twice_it_leaves_no_process(manager: Any) -> None:
    trainer = Apart(make(manager.behavior_specs["default"]))
    pid = trainer._process.pid or 0
    trainer.close()
    trainer.close()
    assert is_gone(pid)


def test_a_trainer_without_a_model_cannot_learn_apart() -> None:
    with pytest.raises(UsageError, match="has no `model`"):
        Apart(lambda: object())  # type: ignore[arg-type,return-value]


def test_one_that_is_frozen_in_the_config_learns_apart_once_it_is_not(manager: Any) -> None:
    table = {"kind": "dqn", "frozen": True, "apart": 50, "learning_starts": 10, "hidden": [8]}
    with make_trainer("default", manager.behavior_specs["default"], table, seed=0, device="cpu") as trainer:
        assert isinstance(trainer, Apart)
        assert trainer.frozen


def test_the_policy_here_explores_as_it_should_after_so_many_steps(manager: Any) -> None:
    options = attrs.evolve(OPTIONS, exploration_steps=200, final_epsilon=0.1)
    spec = manager.behavior_specs["default"]
    with Apart(lambda: DQN("default", spec, options, device="cpu"), max_ahead=40) as trainer:
        policy: Any = trainer.policy
        assert policy.epsilon == 1.0
        TrainerController(manager, {"default": trainer}).train(100)
        assert policy.epsilon == pytest.approx(0.55)
        TrainerController(manager, {"default": trainer}).train(300)
        assert policy.epsilon == pytest.approx(0.1)
