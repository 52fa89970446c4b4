"""A trainer in a process of its own keeps the balance, hands over its weights, and tells when it fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import ConfigError, SimpleEnvManager, UsageError
from envmanager.testing.fault_checks import is_gone, until
from envmanager.training import apart
from envmanager.training.apart import Apart, LearnerFailed
from envmanager.training.controller import TrainerController
from envmanager.training.dqn import DQN, DQNOptions
from envmanager.training.ppo import PPO
from envmanager.training.trainers import check_tables, make_trainer

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
        os.kill(trainer._process.pid, signal.SIGKILL)
        until(lambda: is_gone(trainer._process.pid))
        with pytest.raises(LearnerFailed, match=r"has ended \(SIGKILL\)"):
            controller.train(100_000)


@pytest.mark.load
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # PyTorch's threads; the child only closes
def test_closed_in_a_forked_process_it_goes_on_and_closed_twice_it_leaves_no_process(manager: Any) -> None:
    trainer = Apart(make(manager.behavior_specs["default"]))
    pid = trainer._process.pid
    child = os.fork()
    if child == 0:
        trainer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    trainer.pause()
    assert not is_gone(pid)
    trainer.close()
    trainer.close()
    assert is_gone(pid)


@pytest.mark.load
def test_one_that_is_stopped_with_all_its_pipe_full_is_closed_by_force(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "_CLOSE_S", 0.5)
    with Apart(make(manager.behavior_specs["default"]), max_ahead=1_000_000) as trainer:
        trainer.pause()  # it is there
        os.kill(trainer._process.pid, signal.SIGSTOP)
        fd = trainer._connection.fileno()
        os.set_blocking(fd, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fd, bytes(1 << 16))
        os.set_blocking(fd, True)
    assert is_gone(trainer._process.pid)


SCRIPT = """
import signal
from envmanager import SimpleEnvManager
from envmanager.training.apart import Apart
from envmanager.training.controller import TrainerController
from envmanager.training.dqn import DQN, DQNOptions

signals = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: signals.append(number))

class MyDQN(DQN):
    pass

with SimpleEnvManager("CartPole-v1", 2, seed=0) as manager:
    spec = manager.behavior_specs["default"]
    options = DQNOptions(learning_starts=50, batch=16, hidden=(8,))
    with Apart(lambda: MyDQN("default", spec, options, device="cpu"), max_ahead=40) as trainer:
        controller = TrainerController(manager, {"default": trainer})
        controller.train(200)
        print("at it", flush=True)
        while len(signals) < 2:
            controller.step()
        controller.train(controller.n_steps + 200)
        trainer.pause()
        print("learned from all", trainer.version > 0)
"""


def test_a_script_needs_no_guard_and_signals_to_its_group_leave_the_learner_to_its_trainer(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "at it\n"
        os.killpg(script.pid, signal.SIGINT)
        os.killpg(script.pid, signal.SIGTERM)
        assert script.stdout.read() == "learned from all True\n"
    assert script.returncode == 0


def test_a_trainer_without_a_model_cannot_learn_apart() -> None:
    with pytest.raises(UsageError, match="has no `model`"):
        Apart(lambda: object())  # type: ignore[arg-type,return-value]


def test_one_that_needs_steps_of_its_present_policy_cannot_learn_apart(manager: Any) -> None:
    spec = manager.behavior_specs["default"]
    with pytest.raises(UsageError, match=r"PPO cannot learn in a process of its own.*max_policy_lag is 1"):
        Apart(lambda: PPO("default", spec, device="cpu"))


def test_a_config_that_has_ppo_learn_apart_is_refused_before_there_is_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"trainers\.default\.apart: PPO cannot"):
        check_tables({"default": {"kind": "ppo", "apart": 100}})


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
