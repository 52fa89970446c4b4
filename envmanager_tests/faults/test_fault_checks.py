"""The checks behind FaultContract fail where they should: a manager that breaks an invariant does not get through."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager import EnvRaised, Lost, RestartPolicy, SimpleEnvManager, StepInfo, WorkerDied
from envmanager.testing import EchoEnvironment, Raise, fault_checks, faulty
from envmanager.testing.fault_checks import CheckedTrainer, check_error, returns_within, until

LOST = Lost(WorkerDied(worker_id=0, env_ids=(0,), phase="step", exit="SIGKILL"), 1, (0, 1))


class Tampering(SimpleEnvManager):
    """Hands out its fourth step as ``tamper`` makes it."""

    tamper: Callable[[StepInfo], StepInfo]
    n_steps = 0

    def step(self, wait: Any = None) -> list[StepInfo]:
        self.n_steps += 1
        infos = super().step(wait)
        return [self.tamper(info) for info in infos] if self.n_steps == 4 else infos


def with_column(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[StepInfo], StepInfo]:
    def tamper(info: StepInfo) -> StepInfo:
        steps = info.current["default"]
        changed = attrs.evolve(steps, **{name: change(getattr(steps, name))})
        return attrs.evolve(info, current={"default": changed})

    return tamper


TAMPERINGS: dict[str, Callable[[StepInfo], StepInfo]] = {
    "rows of another env": with_column("obs", lambda obs: obs[::-1]),
    "a step left out": with_column("obs", lambda obs: obs + np.array([0, 0, 1, 0, 0])),
    "an episode cut in silence": with_column("obs", lambda obs: obs * np.array([1, 1, 0, 1, 1])),
    "another's action": with_column("obs", lambda obs: obs + np.array([0, 0, 0, 1, 0])),
    "another's reward": with_column("reward", lambda reward: reward + 1),
    "no actions": lambda info: attrs.evolve(info, actions=None),
    "a broken chain": lambda info: attrs.evolve(info, previous=dict(info.previous or {})),
    "a loss that keeps its actions": lambda info: attrs.evolve(info, lost=LOST),
    "a loss that goes on": lambda info: attrs.evolve(info, lost=LOST, actions=None),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_step_that_was_tampered_with_is_noticed(name: str) -> None:
    with Tampering(EchoEnvironment, 2) as manager:
        manager.tamper = TAMPERINGS[name]
        trainer = CheckedTrainer(manager)
        trainer.reset()
        for _ in range(3):
            trainer.step()
        with pytest.raises(AssertionError):
            trainer.step()


def test_a_step_that_comes_twice_is_noticed() -> None:
    with SimpleEnvManager(EchoEnvironment, 2) as manager:
        trainer = CheckedTrainer(manager)
        trainer.reset()
        infos = trainer.step()
        manager.step = lambda wait: infos  # type: ignore[method-assign]
        with pytest.raises(AssertionError):
            trainer.step()


def test_a_worker_that_is_recycled_unasked_is_noticed() -> None:
    with SimpleEnvManager(EchoEnvironment, 1, restarts=RestartPolicy(recycle_after_steps=1)) as manager:
        trainer = CheckedTrainer(manager)
        trainer.reset()
        with pytest.raises(AssertionError):
            trainer.go_on([0], n_steps=20)


@pytest.mark.parametrize(
    "expected",
    [
        {"kind": WorkerDied},
        {"worker_id": 1},
        {"env_id": 0},
        {"phase": "reset"},
    ],
    ids=lambda expected: next(iter(expected)),
)
def test_an_error_that_says_something_else_is_noticed(expected: dict[str, Any]) -> None:
    right = {"kind": EnvRaised, "worker_id": 0, "env_id": 1, "phase": "step"}
    with SimpleEnvManager(faulty(Raise(ValueError("gear 7 broke")), only_env=1), 2) as manager:
        trainer = CheckedTrainer(manager)
        trainer.reset()
        error = trainer.first_error()
        check_error(error, **right)  # type: ignore[arg-type]
        with pytest.raises(AssertionError):
            check_error(error, **{**right, **expected})  # type: ignore[arg-type]


def test_a_call_that_takes_too_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_checks, "time", SimpleNamespace(monotonic=iter([0.0, 3.1]).__next__))
    monkeypatch.setattr(fault_checks, "SLACK_S", 2.0)
    with pytest.raises(AssertionError, match=r"3\.1 s"), returns_within(1.0):
        pass


def test_a_condition_that_never_comes_true_is_noticed() -> None:
    with pytest.raises(AssertionError, match="did not come true"):
        until(lambda: False, within_s=0.01)
