"""Tests of cases 32 and 34 of FaultContract: data that cannot be pickled, and large data."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager.data.specs import ArraySpec, BehaviorSpec, object_array
from envmanager.data.steps import Steps
from envmanager.env_manager import EnvManager
from envmanager.environment import EnvContext
from envmanager.errors import BadObservation, EnvRaised
from envmanager.options import Timeouts, Wait
from envmanager.testing.contract_base import NumberedActions
from envmanager.testing.fakes import EchoEnvironment, FakeEnvironment
from envmanager.testing.fault_checks import (
    FaultyManagers,
    check_error,
    only_with_processes,
    returns_within,
)
from envmanager.testing.faults import (
    faulty,
    inform,
)


class DataFaults(FaultyManagers):
    """Tests that data that cannot be pickled raises an error, and that large data arrives."""

    large_observation_bytes = 256 << 20

    @contextmanager
    def _ready(self, env_factory: Any, n_envs: int, **options: Any) -> Iterator[EnvManager]:
        """Yield a manager that has a policy and was reset, for environments that CheckedTrainer cannot check."""
        with self.managing(env_factory, n_envs, **options) as manager:
            manager.set_policy("default", NumberedActions())
            manager.reset()
            yield manager

    @only_with_processes
    def test_case_32_an_info_that_cannot_be_pickled_is_an_error_and_the_worker_lives(self) -> None:
        fault = inform(lambda: {"lock": threading.Lock()})
        with self.running(faulty(fault, after=3, only_env=1), infos=True) as trainer:
            pid = trainer.pid_of(1)
            told = check_error(trainer.first_error(), EnvRaised, worker_id=1, env_id=1, phase="step")
            assert "pickle" in told.cause
            trainer.go_on([0, 2])
            trainer.reset()
            trainer.go_on([0, 1, 2])
            assert trainer.pid_of(1) == pid

    @only_with_processes
    def test_case_32_an_observation_that_cannot_be_pickled_is_an_error_and_the_worker_lives(self) -> None:
        with self._ready(_Locked, 1) as manager:
            pid = manager.stats().workers[0].pid
            told = check_error(_error_of_step(manager), EnvRaised, worker_id=0, env_id=0, phase="step")
            assert "pickle" in told.cause
            manager.reset()
            assert len(manager.step()) == 1
            assert manager.stats().workers[0].pid == pid

    # Sizes.

    def test_case_34_a_very_large_observation_is_delivered(self) -> None:
        size = self.large_observation_bytes
        with self._ready(lambda: _Large(size), 1) as manager:
            for number in (1, 2):
                (info,) = manager.step()
                obs = info.current["default"].obs
                assert obs.shape == (1, size)
                assert (obs[0, 0], obs[0, size // 2], obs[0, -1]) == (number, number, number)
                assert info.previous is not None
                assert info.previous["default"].obs[0, -1] == number - 1

    def test_case_34_an_observation_whose_size_changes_is_delivered(self) -> None:
        with self._ready(_Growing, 3) as manager:
            n_steps = dict.fromkeys(range(3), 0)
            while min(n_steps.values()) < 6:
                for info in manager.step():
                    steps = info.current["default"]
                    for env_id, obs in zip(steps.env_id.tolist(), steps.obs, strict=True):
                        n_steps[env_id] += 1
                        assert obs.tolist() == [n_steps[env_id]] * _Growing.size_at(n_steps[env_id])

    def test_case_34_large_commands_and_large_responses_at_once_do_not_block(self) -> None:
        text = "x" * 1_000_000
        fault = inform(lambda: {"picture": bytes(1_000_000)})
        with self.running(faulty(fault, times=sys.maxsize), infos=True, timeouts=Timeouts(step_s=10)) as trainer:
            for _ in range(20):
                trainer.step(Wait(max_ready=1))
                assert trainer.manager.call("who", text) == [f"{text}: env {env_id}" for env_id in range(3)]
                with returns_within(0):
                    trainer.step(Wait.all())


def _error_of_step(manager: EnvManager) -> BaseException:
    with pytest.raises((BadObservation, EnvRaised)) as raised:
        manager.step(Wait.all())
    return raised.value


class _AnyObservation(EchoEnvironment):
    """Base class of environments whose observation is a Python object, returned by ``observe(n_steps)``."""

    SPEC = BehaviorSpec(ArraySpec((), object), ArraySpec((), np.int64))

    def observe(self, n_steps: int) -> Any:
        raise NotImplementedError

    def _steps(self, obs: np.ndarray, action: np.ndarray, ended: bool, final_obs: np.ndarray | None) -> Steps:
        steps = super()._steps(obs, action, ended, final_obs)["default"]
        seen, final = self._seen(obs), None if final_obs is None else self._seen(final_obs)
        return {"default": attrs.evolve(steps, obs=seen, final_obs=final)}

    def _seen(self, obs: np.ndarray) -> np.ndarray:
        return object_array([self.observe(int(obs[0, 2]))])


class _Growing(_AnyObservation):
    SIZES = (1, 10, 1_000_000, 100, 100_000, 10_000, 1_000)

    @classmethod
    def size_at(cls, n_steps: int) -> int:
        return cls.SIZES[n_steps % len(cls.SIZES)]

    def observe(self, n_steps: int) -> Any:
        return np.full(self.size_at(n_steps), n_steps, np.uint8)


class _Locked(_AnyObservation):
    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self._is_spoiled = False

    def observe(self, n_steps: int) -> Any:
        if n_steps == 1 and not self._is_spoiled:
            self._is_spoiled = True
            return threading.Lock()
        return n_steps


class _Large(FakeEnvironment):
    """An environment whose observation has ``n_bytes`` bytes, each equal to the number of the step."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        self.SPEC = BehaviorSpec(ArraySpec((n_bytes,), np.uint8), ArraySpec((), np.int64))

    def _obs(self, action: int) -> np.ndarray:
        return np.full((1, *self.SPEC.observation.shape), self._n_steps, np.uint8)
