"""What is drawn from the replay belongs together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import ActionInfo, AgentSteps, ArraySpec, SimpleEnvManager
from envmanager.testing import EchoEnvironment
from envmanager.training.algorithms.replay import Replay, SumTree

COLUMNS = {"raw0": ArraySpec((1,), np.int64)}


class Numbered:
    """Actions that are never the same twice."""

    def __init__(self) -> None:
        self.n = 0

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        self.n += len(steps)
        action = np.arange(self.n - len(steps), self.n)
        return ActionInfo(action, {"raw0": action[:, None]})


def filled(n_steps: int = 60, *, capacity: int = 1000, **options: Any) -> Replay:
    """A replay with the steps of three EchoEnvironments, whose episodes are 7, 8 and 9 steps long."""
    replay = Replay(EchoEnvironment.SPEC.observation, COLUMNS, capacity=capacity, seed=0, **options)
    with SimpleEnvManager(EchoEnvironment, 3) as manager:
        manager.set_policy("default", Numbered())
        for info in manager.reset():
            replay.add(info, "default")
        for _ in range(n_steps):
            for info in manager.step():
                replay.add(info, "default")
    return replay


@pytest.mark.parametrize("capacity", [1000, 64])
@pytest.mark.parametrize("priority_exponent", [None, 0.6], ids=["uniform", "prioritized"])
def test_a_row_its_action_reward_and_next_observation_belong_together(
    capacity: int, priority_exponent: float | None
) -> None:
    drawn = filled(capacity=capacity, priority_exponent=priority_exponent).sample(500)
    before, after = drawn.obs[0], drawn.next_obs[0]
    action = drawn.columns["raw0"][:, 0]
    goes_on = drawn.discount > 0
    assert (drawn.reward == action % 1000).all()
    assert (before[goes_on, 0] == after[goes_on, 0]).all(), "the same environment"
    assert (before[goes_on, 2] + 1 == after[goes_on, 2]).all(), "the next step of it"
    assert (after[goes_on, 3] == action[goes_on]).all(), "after this very action"


def test_n_steps_are_discounted_and_end_with_the_episode() -> None:
    gamma = 0.5
    drawn = filled(n_step=3, gamma=gamma).sample(400)
    before, after = drawn.obs[0], drawn.next_obs[0]
    n_ahead = after[:, 2] - before[:, 2]
    goes_on = drawn.discount > 0
    assert set(n_ahead[goes_on].tolist()) <= {1, 2, 3}
    np.testing.assert_allclose(drawn.discount[goes_on], gamma ** n_ahead[goes_on].astype(float))
    full = goes_on & (n_ahead == 3)
    assert full.sum() > 100
    # The environments act in turn, so an agent's actions are 3 apart.
    first = drawn.columns["raw0"][full, 0]
    expected = sum(gamma**k * ((first + 3 * k) % 1000) for k in range(3))
    np.testing.assert_allclose(drawn.reward[full], expected)


def test_the_last_step_of_an_agent_waits_until_it_is_known_what_came_after() -> None:
    replay = filled(n_steps=1)
    drawn = replay.sample(100)
    assert set(drawn.obs[0][:, 2].tolist()) == {0}


def test_what_was_wrong_is_drawn_more_often_and_weighs_less() -> None:
    replay = filled(priority_exponent=1.0)
    rows = np.unique(replay.sample(2000).rows)
    errors = np.where(rows == rows[0], 50.0, 1.0)
    replay.update_priorities(rows, errors)
    drawn = replay.sample(2000, importance_exponent=1.0)
    share = (drawn.rows == rows[0]).mean()
    assert 0.5 * 50 / (50 + len(rows) - 1) < share < 2 * 50 / (50 + len(rows) - 1)
    assert drawn.weight[drawn.rows == rows[0]].max() < drawn.weight[drawn.rows != rows[0]].min()


def test_rewards_are_clipped_before_they_are_summed() -> None:
    drawn = filled(n_step=3, gamma=1.0).sample(200, reward_clip=1.0)
    assert drawn.reward.max() <= 3.0
    assert (drawn.reward == 3.0).any()


def test_restored_it_draws_the_same_rows() -> None:
    replay = filled(priority_exponent=0.6)
    arrays, facts = replay.state()
    again = Replay(EchoEnvironment.SPEC.observation, COLUMNS, capacity=1000, seed=9, priority_exponent=0.6)
    again.restore({name: np.array(array) for name, array in arrays.items()}, facts)
    assert (replay.sample(50).rows == again.sample(50).rows).all()


def test_without_rows_as_of_a_trainer_that_was_frozen_all_the_time_it_is_restored_too() -> None:
    replay, again = (
        Replay(EchoEnvironment.SPEC.observation, COLUMNS, capacity=1000, seed=seed, priority_exponent=0.6)
        for seed in (0, 9)
    )
    again.restore(*replay.state())
    assert len(again.store) == 0


@pytest.mark.parametrize("capacity", [1, 2, 3, 64, 100])
def test_a_sum_tree_finds_the_place_in_which_a_mark_lies(capacity: int) -> None:
    chance = np.random.default_rng(capacity)
    tree, values = SumTree(capacity), chance.random(capacity) + 0.01
    tree.set(np.arange(capacity), np.zeros(capacity))
    tree.set(np.arange(capacity), values)
    assert tree.total == pytest.approx(values.sum())
    marks = chance.random(200) * values.sum()
    expected = np.searchsorted(np.cumsum(values), marks, side="right")
    assert (tree.find(marks) == np.minimum(expected, capacity - 1)).all()
