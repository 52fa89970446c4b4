"""RandomPolicy: within bounds, and the same for the same seed whatever runs beside."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager.data.casting import check_batch
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AgentSteps
from envmanager.data.trees import leaves
from envmanager.errors import UsageError
from envmanager.policy import RandomPolicy

ACTIONS = {
    "bounded": ArraySpec((2,), np.float32, -1, [1, 3]),
    "free": ArraySpec((2,), np.float64),
    "from below": ArraySpec((), np.float32, 0),
    "whole": (ArraySpec((), np.int64, -2, 2), ArraySpec((3,), np.uint8)),
    "yes or no": ArraySpec((4,), np.bool_),
    "of eight bits": ArraySpec((), np.int8),
    "of 64 bits": ArraySpec((), np.int64),
}


def asking(ids):
    n = len(ids)
    flags = np.zeros(n, bool)
    return AgentSteps(np.array(ids, np.int64), np.zeros((n, 1)), np.zeros(n, np.float32), flags, flags)


def policy(action, seed=0):
    return RandomPolicy(BehaviorSpec(ArraySpec(), action), seed)


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_fit_their_spec(name):
    random = policy(ACTIONS[name])

    for _ in range(50):
        action = random.get_action(asking([0, 1, 1 << 32])).action
        check_batch(ACTIONS[name], action, 3, "action")
        assert all(leaf.dtype == spec.dtype for leaf, spec in zip(leaves(action), leaves(ACTIONS[name]), strict=True))


def test_both_ends_of_a_range_are_drawn():
    random = policy(ArraySpec((), np.int64, -1, 1))

    assert {int(random.get_action(asking([0])).action[0]) for _ in range(100)} == {-1, 0, 1}


@given(st.lists(st.permutations(range(4)), min_size=1, max_size=4), st.integers(0, 2**32))
def test_what_an_agent_does_depends_on_no_other_agent(orders, seed):
    spec = ArraySpec((3,))
    together, alone = policy(spec, seed), [policy(spec, seed) for _ in range(4)]

    for order in orders:
        action = together.get_action(asking(order)).action
        for row, agent in enumerate(order):
            np.testing.assert_array_equal(action[row], alone[agent].get_action(asking([agent])).action[0])


def test_agents_and_seeds_differ():
    spec = ArraySpec((3,))
    drawn = [policy(spec, seed).get_action(asking([0, 1, 1 << 32, 1 << 32 | 1])).action for seed in (0, 1)]

    assert len(np.unique(np.concatenate(drawn), axis=0)) == 8


def test_nobody_asking_gets_no_rows():
    assert policy(ACTIONS["bounded"]).get_action(asking([])).action.shape == (0, 2)


def test_actions_that_are_no_arrays_cannot_be_drawn():
    with pytest.raises(UsageError, match="write a policy"):
        policy({"say": ArraySpec(dtype=object)})
