"""Values put into the dtype of their spec: what survives, and what is refused."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envmanager.adapters.rows import fitting_array
from envmanager.data.casting import Casting, cast_without_loss, check_batch, checked_actions
from envmanager.data.specs import ArraySpec, BehaviorSpec, SpecMismatch
from envmanager.errors import BadAction

SURVIVE = [
    (np.array([0.25, -3.0]), np.float32),
    (np.array([0.1]), np.float32),
    (np.array([np.nan, np.inf]), np.float32),
    (np.array([0.0, 1.0, 255.0]), np.uint8),
    (np.array([-128.0], np.float16), np.int8),
    (np.array([300, -5]), np.int16),
    (np.array([2**63], np.uint64), np.float32),
    (np.array([0, 1]), np.bool_),
    (np.array([0.0, 1.0]), np.bool_),
    (np.array([True, False]), np.int8),
    (np.array([True, False]), np.float32),
    (np.array([float(2**62)]), np.int64),
    (np.zeros((0, 3)), np.int8),
]
CHANGE = [
    (np.array([0.5]), np.int64),
    (np.array([np.nan]), np.int64),
    (np.array([np.inf]), np.int64),
    (np.array([300]), np.uint8),
    (np.array([300.0]), np.uint8),
    (np.array([-1]), np.uint64),
    (np.array([2**63], np.uint64), np.int64),
    (np.array([2.0**63]), np.int64),
    (np.array([2]), np.bool_),
    (np.array([0.5]), np.bool_),
    (np.array([np.nan]), np.bool_),
    (np.array([1e300]), np.float32),
    (np.array([70000]), np.float16),
    (np.array([1 + 0j]), np.float32),
    (np.array(["1"]), np.int64),
    (np.array([1], object), np.int64),
    (np.array(["2020-01-01"], "M8[D]"), np.int64),
]


@pytest.mark.parametrize(("array", "dtype"), SURVIVE, ids=str)
def test_values_that_mean_the_same_in_the_other_dtype_survive(array, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast = cast_without_loss(array, np.dtype(dtype))

    assert cast.dtype == dtype
    assert np.allclose(cast.astype(np.float64), array.astype(np.float64), rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("array", "dtype"), CHANGE, ids=str)
def test_values_that_would_mean_something_else_do_not(array, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cast_without_loss(array, np.dtype(dtype)) is None


NUMBERS = hnp.integer_dtypes() | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64)) | st.just("?")


@given(hnp.arrays(NUMBERS, st.integers(0, 4)), NUMBERS)
def test_whatever_is_cast_to_whole_numbers_is_equal_one_by_one(array, dtype):
    cast = cast_without_loss(array, np.dtype(dtype))

    if cast is not None and cast.dtype.kind in "iub":
        assert [int(value) for value in cast] == [value.item() for value in array]


@pytest.mark.parametrize(
    ("spec", "value", "kept"),
    [
        (ArraySpec((), np.bool_), 1, True),
        (ArraySpec((), np.bool_), np.float32(0), False),
        (ArraySpec((), np.int64), 3.0, 3),
        (ArraySpec((), np.int64), True, 1),
        (ArraySpec(()), 2, 2.0),
        (ArraySpec((2,)), np.array([0.5, 1.5]), [0.5, 1.5]),
        (ArraySpec((2,), np.int8), np.array([7, 8]), [7, 8]),
    ],
)
def test_a_casting_takes_what_survives_and_calls_back(spec, value, kept):
    told = []
    casting = Casting(on_cast=lambda *cast: told.append(cast))
    assert np.array_equal(fitting_array(spec, value, "obs", casting), kept)
    assert told == [("obs", spec, value)] or np.array_equal(told[0][2], value)


@pytest.mark.parametrize("casting", [None, Casting(strict=True)], ids=["no casting", "a strict one"])
def test_without_leave_nothing_is_cast(casting):
    with pytest.raises(SpecMismatch, match="float64"):
        fitting_array(ArraySpec((2,)), np.zeros(2), "obs", casting)
    with pytest.raises(SpecMismatch, match="float32"):
        check_batch(ArraySpec((2,), np.int8), np.zeros((3, 2), np.float32), 3, "action", strict=True)


def test_what_is_accepted_with_a_strict_casting_too():
    casting = Casting(strict=True)
    assert fitting_array(ArraySpec((), np.int64), np.int8(3), "obs", casting) == 3
    assert fitting_array(ArraySpec((2,), np.float64), np.zeros(2, np.float32), "obs", casting).tolist() == [0, 0]
    assert check_batch(ArraySpec((), np.int8), np.array([1, 2]), 2, "action", strict=True).tolist() == [1, 2]
    assert check_batch(ArraySpec((1,)), np.zeros((2, 1)), 2, "action", strict=True).dtype == np.float32


@pytest.mark.parametrize(
    ("spec", "batch"),
    [
        (ArraySpec((2,), np.int8, 0, 1), np.array([[0.0, 1.0]], np.float32)),
        (ArraySpec((2,), np.int8, 0, 1), np.array([[False, True]])),
        (ArraySpec((2,), np.int8, 0, 1), [[0.0, 1.0]]),
        (ArraySpec((2,), np.int32, 0, 5), np.array([[0.0, 1.0]])),
        (ArraySpec((2,), np.bool_), np.array([[0, 1]])),
    ],
)
def test_a_batch_of_another_kind_is_cast(spec, batch):
    checked = check_batch(spec, batch, 1, "action", strict=False)

    assert (checked.dtype, checked.tolist()) == (spec.dtype, [[0, 1]])


@pytest.mark.parametrize("value", [0.5, np.nan, 2.0, -1.0, 300.0])
def test_a_batch_of_another_kind_must_survive_and_be_within_the_bounds(value):
    with pytest.raises(SpecMismatch):
        check_batch(ArraySpec((1,), np.int8, 0, 1), np.array([[value]], np.float32), 1, "action", strict=False)


def test_a_number_that_would_become_infinite_is_no_action():
    with pytest.raises(SpecMismatch, match="range"):
        check_batch(ArraySpec((1,)), np.array([[1e300]]), 1, "action")


@pytest.mark.parametrize(
    ("spec", "action", "told"),
    [
        (
            ArraySpec((), np.float32, -1, 1),
            1.5,
            r"but is as high as 1.5. Clip it. Nothing was sent",
        ),
        (ArraySpec((), np.float32, -1, 1), np.nan, "NaN or infinite in part. Nothing was sent"),
        (ArraySpec((), np.int64, 0, 1), 2, "but is as high as 2. Nothing was sent"),
    ],
)
def test_actions_beyond_the_bounds_are_to_be_clipped(spec, action, told):
    with pytest.raises(BadAction, match=told):
        checked_actions(BehaviorSpec(ArraySpec((1,)), spec), np.array([action], spec.dtype), 1, "send", True)


@pytest.mark.parametrize("numbers", [[0, 3], [], [2]])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_numbers_of_choices_are_taken_as_copies_of_the_specs_dtype(numbers, dtype):
    given = np.array(numbers, dtype)
    spec = BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64, 0, 3))
    taken = checked_actions(spec, given, len(numbers), "send", True)
    assert (taken.dtype, taken.tolist()) == (np.int64, numbers)
    assert not np.shares_memory(taken, given)


@pytest.mark.parametrize("batch", [[0, 4], [-1, 0], [[0, 1]], [0], [0.0, 1.0]])
def test_numbers_that_are_no_choices_are_refused(batch):
    spec = BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64, 0, 3))
    with pytest.raises(BadAction):
        checked_actions(spec, np.array(batch), 2, "send", True)
