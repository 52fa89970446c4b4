"""RandomPolicy: within bounds, and the same for the same seed whatever runs beside."""

import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist

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
    "of 64 bits without a sign": ArraySpec((2,), np.uint64, 0),
    "of every float32": ArraySpec((), np.float32, np.finfo(np.float32).min, np.finfo(np.float32).max),
    "of every float64": ArraySpec((), np.float64, np.finfo(np.float64).min, np.finfo(np.float64).max),
    "nothing": {},
    "large": {"picture": ArraySpec((9, 9, 3), np.uint8), "force": ArraySpec((100,), np.float32, -1, 1)},
}

HIGH = 0.1 + 2.2e-8
"""Three float32 are between 0.1 and this number. Neither of the two is a float32; the nearest to this one is larger."""


def asking(ids):
    n = len(ids)
    flags = np.zeros(n, bool)
    return AgentSteps(np.array(ids, np.int64), np.zeros((n, 1)), np.zeros(n, np.float32), flags, flags)


def policy(action, seed=0):
    return RandomPolicy(BehaviorSpec(ArraySpec(), action), seed)


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_fit_their_spec(name):
    random = policy(ACTIONS[name])

    for _ in range(150):
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


def test_actions_of_two_threads_are_those_of_one():
    spec = {"push": ArraySpec((2,), np.float32, -1, 1), "jump": ArraySpec((), np.int64, 0, 4)}
    shared, ids = policy(spec), (range(50), range(50, 100))
    expected = [acted(policy(spec), asking(own), 200) for own in ids]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda own: acted(shared, asking(own), 200), ids))

    for one, other in zip(found, expected, strict=True):
        np.testing.assert_equal(one, other)


def acted(random, steps, n):
    return [random.get_action(steps).action for _ in range(n)]


def test_a_copy_goes_on_as_the_original_does():
    random, steps = policy(ACTIONS["whole"]), asking([3, 4])
    acted(random, steps, 5)

    copy = pickle.loads(pickle.dumps(random))

    np.testing.assert_equal(acted(copy, steps, 100), acted(random, steps, 100))


@pytest.mark.parametrize(
    ("spec", "probability"),
    [
        (ArraySpec((), np.float32, -1, 3), np.full(16, 1 / 16)),
        (ArraySpec((), np.int8, -3, 3), np.full(7, 1 / 7)),
        (ArraySpec((), np.int64, -(2**62), 2**63 - 1), np.full(16, 1 / 16)),  # a remainder would favour one third
        (ArraySpec((), np.float64), [NormalDist().cdf(x + 0.5) - NormalDist().cdf(x - 0.5) for x in range(-2, 3)]),
        (ArraySpec((), np.bool_), np.full(2, 1 / 2)),
    ],
)
@pytest.mark.parametrize("n_agents", [1, 4000])
def test_each_part_of_a_range_is_drawn_as_often_as_it_should(spec, probability, n_agents):
    """By chi-squared, over the actions of one agent, and over the first actions of many."""
    n = 20_000
    drawn = np.concatenate(acted(policy(spec), asking(range(n_agents)), n // n_agents))
    if spec.minimum is None and spec.dtype.kind == "f":
        found = [np.count_nonzero(np.abs(drawn - x) < 1 / 2) for x in range(-2, 3)]
    else:
        low, high = (0, 1) if spec.minimum is None else (int(spec.minimum), int(spec.maximum))
        width = high - low + (spec.dtype.kind != "f")
        part = [int((value - low) * len(probability) / width) for value in drawn.tolist()]
        found = np.bincount(part, minlength=len(probability))

    expected = n * np.asarray(probability)
    assert ((found - expected) ** 2 / expected).sum() < len(expected) + 5 * (2 * len(expected)) ** 0.5


def test_actions_of_one_agent_are_not_correlated_and_neither_are_agents():
    drawn = np.array(acted(policy(ArraySpec((2,), np.float32, -1, 1)), asking(range(64)), 400))  # [time, agent, column]

    for one, other in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1]), (drawn[..., 0], drawn[..., 1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / one.size**0.5


@pytest.mark.parametrize("bounds", [([0.1, -HIGH], [HIGH, -0.1]), ([-np.inf, HIGH], [-0.1, np.inf])])
def test_a_bound_that_is_no_float32_is_never_exceeded(bounds):
    spec = ArraySpec((2,), np.float32, *bounds)

    drawn = np.array(acted(policy(spec), asking(range(20)), 50)).astype(np.float64)

    assert (drawn >= np.asarray(spec.minimum)).all()
    assert (drawn <= np.asarray(spec.maximum)).all()


def test_agents_that_come_and_go_cost_no_more_than_a_generator_and_a_kilobyte():
    random = policy(ArraySpec((100,), np.float32, -1, 1))
    tracemalloc.start()
    try:
        for first in range(0, 2000, 20):
            random.get_action(asking(range(first, first + 20)))
        per_agent = tracemalloc.get_traced_memory()[0] / 2000
    finally:
        tracemalloc.stop()

    assert per_agent < 1000 + 1024


def test_agents_and_seeds_differ():
    spec = ArraySpec((3,))
    drawn = [policy(spec, seed).get_action(asking([0, 1, 1 << 32, 1 << 32 | 1])).action for seed in (0, 1)]

    assert len(np.unique(np.concatenate(drawn), axis=0)) == 8


def test_nobody_asking_gets_no_rows():
    assert policy(ACTIONS["bounded"]).get_action(asking([])).action.shape == (0, 2)


def test_actions_that_are_no_arrays_cannot_be_drawn():
    with pytest.raises(UsageError, match="write a policy"):
        policy({"say": ArraySpec(dtype=object)})


def masked(action, n):
    return BehaviorSpec({"observation": ArraySpec((1,)), "action_mask": ArraySpec((n,), np.int8)}, action)


def asking_with(masks, ids=None):
    steps = asking(range(len(masks)) if ids is None else ids)
    steps.obs = {"observation": steps.obs, "action_mask": np.array(masks, np.int8)}
    return steps


def test_only_what_a_mask_allows_is_drawn_and_all_of_it_equally_often():
    spec = masked(ArraySpec((), np.int64, -1, 3), 5)
    random = RandomPolicy(spec)
    drawn = [int(random.get_action(asking_with([[0, 1, 0, 1, 1]])).action[0]) for _ in range(3000)]

    counts = {value: drawn.count(value) for value in set(drawn)}
    assert sorted(counts) == [0, 2, 3]
    assert all(900 < count < 1100 for count in counts.values())


def test_each_number_of_an_action_has_its_part_of_the_mask():
    action = {"push": ArraySpec((2,), np.float32, -1, 1), "what": ArraySpec((2,), np.int64, [0, 5], [1, 7])}
    random = RandomPolicy(masked(action, 5))
    for _ in range(100):
        acted = random.get_action(asking_with([[0, 1, 1, 0, 1], [1, 0, 0, 1, 0]])).action
        assert acted["what"][0, 0] == 1
        assert acted["what"][0, 1] in (5, 7)
        assert acted["what"][1].tolist() == [0, 6]


def test_a_mask_that_allows_nothing_or_fits_no_action_is_not_obeyed():
    for n, mask in ((3, [0, 0, 0]), (4, [1, 0, 0, 0])):
        random = RandomPolicy(masked(ArraySpec((), np.int64, 0, 2), n))
        assert {int(random.get_action(asking_with([mask])).action[0]) for _ in range(100)} == {0, 1, 2}


def test_masks_that_allow_all_change_no_draw():
    spec = ArraySpec((), np.int64, 0, 4)
    free, bound = policy(spec, 3), RandomPolicy(masked(spec, 5), 3)

    for _ in range(100):
        assert free.get_action(asking([0, 7])).action.tolist() == (
            bound.get_action(asking_with([[1] * 5] * 2, [0, 7])).action.tolist()
        )
