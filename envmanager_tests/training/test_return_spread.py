"""Rewards are divided by the spread of the discounted return, which runs along each agent's own episode."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import ActionInfo, AgentSteps, SimpleEnvManager
from envmanager.training.algorithms.states import LIMIT, ReturnSpread
from envmanager_tests.training.test_store import Worker

GAMMA = 0.5


class Noted(ReturnSpread):
    """One that keeps the returns it was given."""

    def __init__(self) -> None:
        super().__init__(GAMMA)
        self.seen: list[float] = []

    def _run_on(self, now: AgentSteps, acted: set[int]) -> list[float]:
        returns = super()._run_on(now, acted)
        self.seen.extend(returns)
        return returns


def test_a_return_runs_along_the_steps_of_an_agent_and_begins_anew_with_an_episode() -> None:
    spread, worker = Noted(), Worker(0, [3])
    spread.add(worker.reset([0.0]), "default")
    spread.add(worker.step([1.0], reward=2.0), "default")
    spread.add(worker.step([2.0], reward=1.0, truncated=True, final_obs=np.ones((1, 1))), "default")
    spread.add(worker.step([3.0], reward=4.0), "default")

    assert spread.seen == [2.0, 1.0 + GAMMA * 2.0, 4.0]


def test_uneven_workers_do_not_mix() -> None:
    spread, fast, slow = Noted(), Worker(0, [0]), Worker(1, [7])
    for worker in (fast, slow):
        spread.add(worker.reset([0.0]), "default")
    spread.add(fast.step([1.0], reward=8.0), "default")
    spread.add(fast.step([2.0], reward=8.0), "default")
    spread.add(slow.step([1.0], reward=1.0), "default")
    spread.add(slow.step([2.0], reward=1.0), "default")

    assert spread.seen == [8.0, 12.0, 1.0, 1.5]


def test_a_lost_step_has_no_return_and_the_next_begins_anew() -> None:
    spread, worker = Noted(), Worker(0, [0])
    spread.add(worker.reset([0.0]), "default")
    spread.add(worker.step([1.0], reward=8.0), "default")
    spread.add(worker.step([2.0], lost=True, truncated=True, final_obs=np.ones((1, 1))), "default")
    spread.add(worker.step([3.0], reward=1.0), "default")

    assert spread.seen == [8.0, 1.0]


def test_an_environment_that_is_lost_alone_begins_anew_and_the_others_run_on() -> None:
    spread, worker = Noted(), Worker(0, [0, 1 << 32])
    spread.add(worker.reset([0.0, 0.0]), "default")
    spread.add(worker.step([1.0, 1.0], reward=[8.0, 2.0]), "default")
    cut = {"truncated": [True, False], "final_obs": np.ones((1, 1))}
    spread.add(worker.step([2.0, 2.0], lost_envs=[0], reward=[0.0, 2.0], **cut), "default")
    spread.add(worker.step([3.0, 3.0], reward=[1.0, 1.0]), "default")

    assert sorted(spread.seen) == [1.0, 2.0, 2.5, 3.0, 8.0]


@pytest.mark.parametrize("how", ["by the manager", "by a trainer that learns again"])
def test_after_a_reset_returns_begin_anew(how: str) -> None:
    spread, worker = Noted(), Worker(0, [0])
    spread.add(worker.reset([0.0]), "default")
    spread.add(worker.step([1.0], reward=8.0), "default")
    if how == "by the manager":
        spread.environments_were_reset()
    else:
        spread.add(worker.reset([2.0]), "default")
    spread.add(worker.step([3.0], reward=1.0), "default")

    assert spread.seen == [8.0, 1.0]


def test_what_comes_in_the_turn_of_another_belongs_to_the_last_action() -> None:
    spread, worker = Noted(), Worker(0, [0, 1])
    spread.add(worker.reset([0.0, 10.0]), "default")
    spread.add(worker.step([1.0, 11.0], reward=2.0, acting=np.array([True, False])), "default")
    spread.add(worker.step([2.0, 12.0], reward=4.0), "default")
    spread.add(worker.step([3.0, 13.0], reward=0.0), "default")

    assert spread.seen == [2.0, 2.0, 4.0 + GAMMA * 2.0, GAMMA * 5.0, GAMMA * 6.0]


class Paid(gymnasium.Env):  # type: ignore[misc]
    """Rewards by a formula, in episodes of a length of their own."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, number: int) -> None:
        self._number, self._n_steps = number, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        reward = 100.0 * math.sin(self._n_steps * (1 + self._number)) + 30.0
        return 0, reward, self._n_steps % (4 + self._number) == 0, False, {}


class Still:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def test_the_spread_is_that_of_stable_baselines3() -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    theirs = vec_env.VecNormalize(
        vec_env.DummyVecEnv([lambda number=number: Paid(number) for number in range(3)]), norm_obs=False, gamma=0.9
    )
    ours = ReturnSpread(0.9)
    theirs.reset()
    with SimpleEnvManager(lambda context: Paid(context.env_id), 3) as manager:
        manager.set_policy("default", Still())
        for info in manager.reset():
            ours.add(info, "default")
        for _ in range(50):
            theirs.step(np.zeros(3, np.int64))
            for info in manager.step():
                ours.add(info, "default")

    assert ours.spread.variance == pytest.approx(float(theirs.ret_rms.var), rel=1e-5)
    rewards = np.array([-3.0, 0.0, 50.0], np.float32)
    np.testing.assert_allclose(ours.normalized(rewards), theirs.normalize_reward(rewards), rtol=1e-5)


def test_normalized_rewards_stay_within_the_limit() -> None:
    assert ReturnSpread(0.9).normalized(np.array([-1e6, 1e6])).tolist() == [-LIMIT, LIMIT]


def test_one_that_is_not_enabled_changes_nothing_and_has_no_state() -> None:
    spread, worker = ReturnSpread(0.9, enabled=False), Worker(0, [0])
    spread.add(worker.reset([0.0]), "default")
    spread.add(worker.step([1.0], reward=8.0), "default")

    assert spread.normalized(np.array([70.0])).tolist() == [70.0]
    assert spread.state() is None


def test_restored_it_knows_what_it_knew() -> None:
    spread, worker = ReturnSpread(0.9), Worker(0, [0])
    spread.add(worker.reset([0.0]), "default")
    spread.add(worker.step([1.0], reward=8.0), "default")
    again = ReturnSpread(0.9)
    again.restore(spread.state())

    assert again.factor == spread.factor != ReturnSpread(0.9).factor
