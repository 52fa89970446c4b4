"""Specs: what they say of data, and which data they refuse."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envmanager.adapters.rows import fitting_array
from envmanager.data.casting import check_batch
from envmanager.data.specs import (
    ArraySpec,
    BehaviorSpec,
    SpecMismatch,
    as_array,
    check_structure,
    check_values,
    describe_spec,
    describe_value,
    merge_specs,
    object_array,
    zeros,
)
from envmanager.errors import UsageError

TREE = {"camera": ArraySpec((2, 2), np.uint8, 0, 255), "pose": (ArraySpec((3,)), ArraySpec(dtype=object))}


def refusal(function, *args):
    with pytest.raises(SpecMismatch) as caught:
        function(*args)
    return caught.value


def test_specs_with_equal_bounds_are_equal_and_hash_alike():
    one, other = ArraySpec((2,), np.float32, -1, [1, 2]), ArraySpec([2], "float32", -1, (1, 2), name="pose")

    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    "other", [ArraySpec((3,)), ArraySpec((2,), np.float64), ArraySpec((2,), minimum=0), ArraySpec((2,), maximum=1)]
)
def test_specs_that_differ_in_one_thing_are_not_equal(other):
    assert ArraySpec((2,)) != other


def test_a_spec_is_the_same_after_pickling():
    spec = BehaviorSpec(TREE, ArraySpec((), np.int64, 0, 3))

    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_spec_reads_as_one_line():
    assert describe_spec(TREE) == ("{'camera': uint8[2, 2] in [0, 255], 'pose': (float32[3], any object)}")
    assert str(ArraySpec((2,), maximum=[1, 2])) == "float32[2] in [-, (1, 2)]"
    assert str(ArraySpec((9,), minimum=range(9))) == "float32[9] in [0…8, -]"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((2, 3), np.float32), "float32[2, 3]"),
        (np.int64(1), "int64[]"),
        ({"b": 1, "a": 2}, "a dict with keys ['a', 'b']"),
        ((1, 2), "a tuple of 2"),
        (None, "None"),
        (True, "bool True"),
        ("x" * 99, "str '" + "x" * 36 + "…"),
        (object(), "an object"),
        ([], "a list"),
    ],
)
def test_values_are_described_in_the_words_of_specs(value, text):
    assert describe_value(value) == text


def test_whether_anything_must_travel_pickled():
    assert BehaviorSpec(TREE, ArraySpec()).has_objects
    assert not BehaviorSpec(TREE["camera"], ArraySpec()).has_objects


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"camera": 0}, "obs"),
        ({"camera": 0, "pose": (0, 0), "more": 0}, "obs"),
        ([0], "obs"),
        ({"camera": 0, "pose": (0,)}, "obs['pose']"),
        ({"camera": 0, "pose": 0}, "obs['pose']"),
    ],
)
def test_a_wrong_structure_is_named_where_it_is_wrong(value, path):
    assert refusal(check_structure, TREE, value, "obs").path == path


def test_a_list_passes_for_a_tuple():
    check_structure(TREE, {"pose": [0, 0], "camera": 0}, "obs")


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (ArraySpec((2,)), np.zeros(2, np.float32)),
        (ArraySpec((2,), np.float64), np.zeros(2, np.float32)),
        (ArraySpec((2,), np.int64), np.zeros(2, np.uint8)),
        (ArraySpec(()), 1.5),
        (ArraySpec((), np.int8), -128),
        (ArraySpec((), np.bool_), True),
        (ArraySpec((), np.int64), np.int32(4)),
        (ArraySpec(dtype=object), [1, "anything"]),
    ],
)
def test_values_that_lose_nothing_fit(spec, value):
    assert fitting_array(spec, value, "obs") is value or np.array_equal(fitting_array(spec, value, "obs"), value)


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (ArraySpec((2,)), np.zeros(2, np.float64)),
        (ArraySpec((2,)), np.zeros((2, 1), np.float32)),
        (ArraySpec((2,)), [0.0, 0.0]),
        (ArraySpec((2,)), 1.0),
        (ArraySpec((2,)), None),
        (ArraySpec(()), 1),
        (ArraySpec((), np.int64), True),
        (ArraySpec((), np.int64), 1.0),
        (ArraySpec((), np.int8), 128),
        (ArraySpec((), np.uint8), -1),
        (ArraySpec((1,), "m8[M]"), np.array([768614336404564651], "m8[Y]")),
    ],
)
def test_values_that_would_change_do_not_fit(spec, value):
    assert refusal(fitting_array, spec, value, "obs['x']").path == "obs['x']"


@given(hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(max_dims=2, max_side=3)), hnp.scalar_dtypes())
def test_whatever_fits_is_kept_exactly(value, dtype):
    spec = ArraySpec(value.shape, dtype)
    row = np.empty(spec.shape, spec.dtype)
    try:
        fitting = fitting_array(spec, value, "obs")
    except SpecMismatch:
        return

    row[...] = fitting

    assert np.array_equal(row, value, equal_nan=value.dtype.kind in "fcmM")


@pytest.mark.parametrize(
    ("spec", "value", "got"),
    [
        (ArraySpec((2,)), np.array([0, np.nan]), "NaN"),
        (ArraySpec((2,)), np.array([np.inf, 0]), "NaN or infinite"),
        (ArraySpec((2,), minimum=0), np.array([3, -2]), "as low as -2"),
        (ArraySpec((2,), maximum=[1, 5]), np.array([2, 2]), "as high as 2"),
    ],
)
def test_numbers_must_be_finite_and_within_bounds(spec, value, got):
    assert got in refusal(check_values, spec, value, "obs").got


def test_bounds_are_inclusive():
    check_values(ArraySpec((2,), minimum=-1, maximum=1), np.array([-1.0, 1.0]), "obs")


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_an_integer_batch_of_another_width_is_brought_to_the_spec_s(dtype):
    checked = check_batch(ArraySpec((), np.int64, 0, 3), np.array([0, 3], dtype), 2, "action")

    assert (checked.dtype, checked.tolist()) == (np.int64, [0, 3])


def test_a_batch_of_the_right_dtype_is_passed_on_as_it_is():
    batch = np.zeros((2, 3), np.float32)

    assert check_batch(ArraySpec((3,)), batch, 2, "action") is batch


def test_lists_and_wider_floats_may_be_batches():
    assert check_batch(ArraySpec((2,)), [[1, 2], [3, 4]], 2, "action").dtype == np.float32
    assert check_batch(ArraySpec((1,)), np.zeros((2, 1)), 2, "action").dtype == np.float32


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"go": np.zeros(3, np.int64), "say": ["a", "b"]}, "action['go']"),
        ({"go": np.zeros(2), "say": ["a", "b"]}, "action['go']"),
        ({"go": np.array([0, 4]), "say": ["a", "b"]}, "action['go']"),
        ({"go": [[1], [1, 2]], "say": ["a", "b"]}, "action['go']"),
        ({"go": None, "say": ["a", "b"]}, "action['go']"),
        ({"go": np.array([None, None]), "say": ["a", "b"]}, "action['go']"),
        ({"go": np.zeros(2, np.int64), "say": ["a"]}, "action['say']"),
        ({"go": np.zeros(2, np.int64), "say": 3}, "action['say']"),
        ({"go": np.zeros(2, np.int64)}, "action"),
    ],
)
def test_a_batch_that_does_not_fit_is_named_where_it_does_not(batch, path):
    spec = {"go": ArraySpec((), np.int64, 0, 3), "say": ArraySpec(dtype=object)}

    assert refusal(check_batch, spec, batch, 2, "action").path == path


def test_an_integer_too_large_for_the_dtype_is_refused():
    assert "range" in refusal(check_batch, ArraySpec((), np.int8), np.array([1, 300]), 2, "action").got


class NoArray:
    """Like a tensor that requires grad."""

    def __array__(self, *args, **kwargs):
        raise RuntimeError("call detach() first")


@pytest.mark.parametrize(
    ("values", "reason"),
    [([[1], [1, 2]], "a list that cannot be made an array"), (NoArray(), r"call detach\(\) first")],
)
def test_what_cannot_be_an_array_says_why(values, reason):
    with pytest.raises(ValueError, match=reason):
        as_array(values)


def test_an_array_is_its_own_array():
    array = np.zeros(2)

    assert as_array(array) is array


@given(st.lists(st.lists(st.integers()) | st.text() | st.none(), max_size=4))
def test_an_object_array_has_an_entry_for_each_value_that_later_changes_do_not_reach(values):
    before = [copy.deepcopy(value) for value in values]
    array = object_array(values)
    for value in values:
        if isinstance(value, list):
            value.append(0)

    assert array.shape == (len(values),)
    assert list(array) == before


def test_zeros_have_the_leading_axes_and_none_for_objects():
    tree = zeros(TREE, 4, 1)

    assert tree["camera"].shape == (4, 1, 2, 2)
    assert tree["pose"][1].tolist() == [[None]] * 4


def test_one_behavior_has_one_spec():
    known = {}
    merge_specs(known, {"a": BehaviorSpec(ArraySpec(), ArraySpec())}, seen_in="env 0", now_in="env 1")
    merge_specs(known, {"b": BehaviorSpec(ArraySpec(), ArraySpec())}, seen_in="env 0", now_in="env 1")
    other = {"a": BehaviorSpec(ArraySpec((2,)), ArraySpec())}

    with pytest.raises(UsageError, match="behavior 'a' has another spec in env 1 than in env 0"):
        merge_specs(known, other, seen_in="env 0", now_in="env 1")

    assert set(known) == {"a", "b"}


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, bool, np.complex64, ">f4", object, "U3"])
def test_a_spec_has_the_dtype_that_arrays_have_also_when_it_was_unpickled(dtype):
    unpickled = pickle.loads(pickle.dumps(np.dtype(dtype)))
    spec = ArraySpec((), unpickled)

    assert spec.dtype == np.dtype(dtype)
    if np.dtype(dtype).kind in "biufc" and np.dtype(dtype).isnative:
        assert spec.dtype is np.zeros(1, dtype).dtype


def test_few_whole_numbers_in_bounds_are_known_as_choices():
    assert ArraySpec((), np.int64, 0, 3).choices == {0, 1, 2, 3}
    assert not ArraySpec((), np.int64).choices, "without bounds it is in doubt"
    assert not ArraySpec((2,), np.int64, 0, 3).choices
    assert not ArraySpec((), np.int64, 0, 10**9).choices


@pytest.mark.parametrize("n", [1, 100], ids=["few numbers", "many numbers"])
@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (ArraySpec((), np.float32), np.nan),
        (ArraySpec((), np.float32), np.inf),
        (ArraySpec((), np.float32), -np.inf),
        (ArraySpec((), np.float64, -1, 1), 1.5),
        (ArraySpec((), np.float64, -1, np.inf), np.inf),
        (ArraySpec((), np.float64, -np.inf, 1), -np.inf),
        (ArraySpec((), np.int64, 0, 3), 4),
        (ArraySpec((), np.int64, 0), -1),
        (ArraySpec((2,), np.float32, [0, -1], [1, 2]), [0.5, 3.0]),
    ],
)
def test_numbers_out_of_bounds_and_such_that_are_not_finite_are_found_among_few_and_many(spec, value, n):
    fitting = np.zeros((n, *spec.shape), spec.dtype)
    check_values(spec, fitting, "obs")

    fitting[-1] = value

    with pytest.raises(SpecMismatch):
        check_values(spec, fitting, "obs")
