"""Gymnasium's spaces and our specs, there and back."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envmanager.adapters.rows import finite_number, flag, real_number, stack_rows
from envmanager.adapters.spaces import row_reader, to_spec
from envmanager.data.casting import check_batch
from envmanager.data.specs import ArraySpec, SpecMismatch, object_array
from envmanager.data.trees import leaves, leaves_like, map_tree

SPACES = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box of one number": spaces.Box(-1, 1, (), np.float32),
    "box of pixels": spaces.Box(0, 255, (4, 4), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "discrete of bytes": spaces.Discrete(5, dtype=np.int8),
    "multi-discrete": spaces.MultiDiscrete([3, 4], start=[1, 2]),
    "multi-binary": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(8),
    "sequence": spaces.Sequence(spaces.Box(0, 1, (2,))),
    "dict": spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Text(4)])}),
}


def batch_of(spec, samples):
    """The samples as a batch, the way a manager would hold them."""
    parts = [leaves_like(spec, sample) for sample in samples]
    columns = iter([list(column) for column in zip(*parts, strict=True)])

    def column(leaf):
        values = next(columns)
        return object_array(values) if leaf.is_object else np.array(values, leaf.dtype)

    return map_tree(column, spec)


@pytest.mark.parametrize("name", SPACES)
def test_what_a_space_samples_survives_the_way_into_a_batch_and_out_again(name):
    space, spec = SPACES[name], to_spec(SPACES[name])
    space.seed(3)
    batch = batch_of(spec, [space.sample() for _ in range(4)])

    read = row_reader(space)

    checked = check_batch(spec, batch, 4, "action")
    assert all(read(checked, row) in space for row in range(4))


def test_discrete_is_a_whole_number_between_its_start_and_its_last():
    assert to_spec(spaces.Discrete(5, start=-2)) == ArraySpec((), np.int64, -2, 2)


def test_multi_discrete_has_bounds_of_its_own_for_each_entry():
    assert to_spec(spaces.MultiDiscrete([3, 4], start=[1, 2])) == ArraySpec((2,), np.int64, [1, 2], [3, 5])


def test_bounds_that_are_the_same_everywhere_are_kept_as_one_number():
    spec = to_spec(spaces.Box(0, 255, (84, 84), np.uint8))

    assert (spec.minimum.shape, int(spec.maximum)) == ((), 255)


def test_infinite_bounds_are_none():
    spec = to_spec(spaces.Box(-np.inf, np.inf, (2,), np.float32))

    assert (spec.minimum, spec.maximum) == (None, None)


@pytest.mark.parametrize("name", ["text", "sequence"])
def test_a_space_without_arrays_is_a_leaf_of_objects(name):
    assert to_spec(SPACES[name]).is_object


def test_a_space_of_an_unknown_class_is_a_leaf_of_objects():
    class Molecules(gymnasium.Space):
        pass

    assert to_spec(Molecules()).is_object


def test_a_read_action_does_not_change_the_batch_when_the_environment_changes_it():
    batch = np.zeros((2, 3), np.float32)

    row_reader(spaces.Box(-1, 1, (3,)))(batch, 1)[:] = 7

    assert not batch.any()


@pytest.mark.parametrize("reward", [1, 1.5, np.float64(2), np.int32(3), np.array(4.0), np.float16(5)])
def test_numbers_of_all_real_kinds_are_rewards(reward):
    assert real_number(reward, "reward") == float(reward)


@pytest.mark.parametrize("reward", [1e39, -1e39, 10**400, np.float64(1e39), np.array(1e39), np.longdouble("1e4000")])
def test_a_finite_number_that_would_become_infinite_is_no_reward(reward):
    with pytest.raises(SpecMismatch, match="reward should be a number that fits float32"):
        real_number(reward, "reward")


@pytest.mark.parametrize("reward", [np.inf, -np.inf, np.float16(np.inf), np.array(np.inf), np.nan])
def test_an_infinite_number_and_nan_are_rewards_unless_values_are_checked(reward):
    np.testing.assert_equal(real_number(reward, "reward"), float(reward))


@pytest.mark.parametrize("reward", [None, "1", True, np.bool_(True), 1j, [1.0], np.array([1.0])])
def test_what_is_not_one_real_number_is_no_reward(reward):
    with pytest.raises(SpecMismatch, match="reward should be a real number"):
        real_number(reward, "reward")


def test_a_reward_that_is_not_finite_is_refused_on_request():
    with pytest.raises(SpecMismatch, match="finite"):
        finite_number(float("nan"), "reward")


@pytest.mark.parametrize("value", [1, None, "True", np.array([True])])
def test_only_bools_are_flags(value):
    with pytest.raises(SpecMismatch, match="terminated should be a bool"):
        flag(value, "terminated")


def test_stacked_rows_name_the_row_that_does_not_fit():
    spec = {"a": ArraySpec((2,), np.float32)}
    good, bad = {"a": np.zeros(2, np.float32)}, {"a": np.zeros(3, np.float32)}

    with pytest.raises(SpecMismatch) as caught:
        stack_rows(spec, [good, bad], ["obs of first", "obs of second"])

    assert caught.value.path == "obs of second['a']"


def test_stacked_rows_of_lists_in_an_object_leaf_stay_lists():
    rows = stack_rows(ArraySpec(dtype=object), [[1, 2], [3, 4]], ["a", "b"])

    assert (rows.shape, leaves(rows)[0][1]) == ((2,), [3, 4])
