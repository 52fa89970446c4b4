"""The loop between manager and trainers, with workers that are fakes: no process, no learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from pytest_mock import MockerFixture

pytest.importorskip("torch")

from envmanager import ActionInfo, AgentSteps, StepInfo, SubprocessEnvManager, UsageError, Wait
from envmanager.testing import EchoEnvironment, FakeWorker
from envmanager.training.controller import TrainerController, Update
from envmanager.training.trainer import Arrays, Trainer
from envmanager_tests.training.conftest import Answers


class Zeros:
    def __init__(self) -> None:
        self.version = 0

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64), version=self.version)


class Counts(Trainer):
    """Learns nothing; is ready after so many steps."""

    behavior = "default"

    def __init__(self, every: int) -> None:
        self.policy: Zeros = Zeros()
        self.every = every
        self.n = 0
        self.versions: list[list[int]] = []
        self.batch: list[int] = []
        self.progress: list[float] = []
        self.n_resets = 0

    def add(self, info: StepInfo) -> int:
        if info.actions is None:
            return 0
        taken = info.actions["default"]
        self.batch += [taken.version] * len(taken.action)
        self.n += len(taken.action)
        return len(taken.action)

    def is_ready(self) -> bool:
        return len(self.batch) >= self.every

    def update(self, progress: float) -> dict[str, float]:
        self.versions.append(self.batch)
        self.batch = []
        self.progress.append(progress)
        self.version += 1
        self.policy.version = self.version
        return {"loss": 1.0}

    def greedy_policy(self) -> Zeros:
        return Zeros()

    def environments_were_reset(self) -> None:
        self.n_resets += 1

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return {}, {}

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        pass


@pytest.fixture
def manager(mocker: MockerFixture) -> Any:
    answers = Answers()
    mocker.patch.object(
        SubprocessEnvManager,
        "create_worker",
        side_effect=lambda worker_id, _, factory: FakeWorker(worker_id, answers, factory),
    )
    with SubprocessEnvManager(EchoEnvironment, n_envs=3) as manager:
        manager.step_queue = answers
        yield manager


def let_go(manager: Any, worker_id: int) -> None:
    manager.env_workers[worker_id].hold = False
    manager.env_workers[worker_id].release()


def test_a_trainer_gets_every_step_and_is_updated_when_it_has_enough(manager: Any) -> None:
    trainer, updates = Counts(every=6), list[Update]()
    controller = TrainerController(manager, {"default": trainer}, wait=Wait.all(), on_update=updates.append)
    controller.train(30)
    assert trainer.n == controller.n_steps == 30
    assert [len(batch) for batch in trainer.versions] == [6] * 5
    assert [update.version for update in updates] == [1, 2, 3, 4, 5]
    assert [update.n_steps for update in updates] == [6, 12, 18, 24, 30]
    assert trainer.progress == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_with_all_steps_waited_for_each_batch_is_of_one_version(manager: Any) -> None:
    trainer = Counts(every=6)
    TrainerController(manager, {"default": trainer}, wait=Wait.all()).train(30)
    assert trainer.versions == [[version] * 6 for version in range(5)]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_no_step_is_learned_from_that_is_staler_than_allowed(manager: Any, lag: int) -> None:
    trainer = Counts(every=4)
    controller = TrainerController(manager, {"default": trainer}, wait=Wait.any(), max_policy_lag=lag)
    controller.reset()
    manager.env_workers[2].hold = True
    manager.step_queue.when_waiting = lambda: let_go(manager, 2)
    while trainer.version < 12:
        controller.step()
        manager.env_workers[2].hold = True
    staleness = [version - min(batch) for version, batch in enumerate(trainer.versions)]
    assert max(staleness) == lag
    assert sum(map(len, trainer.versions)) + len(trainer.batch) == controller.n_steps, "nothing is thrown away"


def test_a_step_that_brings_enough_for_several_updates_is_followed_by_as_many(manager: Any) -> None:
    class OnePerStep(Counts):
        def update(self, progress: float) -> dict[str, float]:
            rest = self.batch[1:]
            figures = super().update(progress)
            self.batch = rest
            return figures

    trainer = OnePerStep(every=1)
    controller = TrainerController(manager, {"default": trainer}, wait=Wait.all())
    controller.reset()
    assert [update.version for update in controller.step()] == [1, 2, 3]


def test_a_lost_step_is_not_learned_from(manager: Any) -> None:
    trainer = Counts(every=100)
    controller = TrainerController(manager, {"default": trainer}, wait=Wait.all())
    controller.train(9)
    assert controller.episodes.env_steps == 9


def test_a_frozen_trainer_acts_and_learns_nothing(manager: Any) -> None:
    trainer = Counts(every=3)
    trainer.frozen = True
    controller = TrainerController(manager, {"default": trainer}, wait=Wait.all())
    controller.reset()
    for _ in range(5):
        assert controller.step() == []
    assert (trainer.n, controller.n_steps, controller.episodes.env_steps) == (0, 0, 15)


def test_trainers_are_told_of_a_reset(manager: Any) -> None:
    trainer = Counts(every=3)
    controller = TrainerController(manager, {"default": trainer}, wait=Wait.all())
    controller.train(9)
    assert trainer.n_resets == 1
    controller.reset()
    assert trainer.n_resets == 2
    controller.train(18)
    assert trainer.n_resets == 2, "training goes on where it is"


def test_until_ends_it_between_two_steps(manager: Any) -> None:
    trainer = Counts(every=100)
    controller = TrainerController(manager, {"default": trainer}, wait=Wait.all())
    controller.train(1000, until=lambda: trainer.n >= 12)
    assert controller.n_steps == 12


def test_a_negative_lag_is_refused(manager: Any) -> None:
    with pytest.raises(UsageError, match="max_policy_lag"):
        TrainerController(manager, {}, max_policy_lag=-1)
