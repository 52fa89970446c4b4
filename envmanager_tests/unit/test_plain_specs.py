"""Specs that were written to a file and read again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.trees import leaves
from envmanager.training.algorithms.states import plain_spec, spec_from_plain

SPECS = [
    ArraySpec(),
    ArraySpec((3,), np.float32, -np.inf, np.inf),
    ArraySpec((2,), np.float32, np.array([-1, -np.inf], np.float32), np.array([0.1, 2], np.float32)),
    ArraySpec((84, 84, 4), np.uint8, 0, 255),
    ArraySpec((40, 40), np.uint8, np.zeros((40, 40), np.uint8), np.full((40, 40), 255, np.uint8)),
    ArraySpec((), np.int64, -3, 2**62, name="hero"),
    ArraySpec((2,), np.bool_),
    ArraySpec((4,), np.float64, 0.1, 0.3),
    ArraySpec(dtype=object),
    {"b": ArraySpec((2,)), "a": (ArraySpec((), np.int8, 0, 1), {"x": ArraySpec()})},
]


@pytest.mark.parametrize("tree", SPECS, ids=str)
def test_a_spec_comes_back_equal_with_its_bounds_in_their_dtypes(tree):
    spec = BehaviorSpec(tree, ArraySpec((), np.int64, 0, 1))

    read = spec_from_plain(json.loads(json.dumps(plain_spec(spec), allow_nan=False)))

    assert read == spec
    assert str(read) == str(spec)
    for before, after in zip(leaves(tree), leaves(read.observation), strict=True):
        assert (before.name, before.dtype) == (after.name, after.dtype)
        for name in ("minimum", "maximum"):
            bounds = [getattr(each, name) for each in (before, after)]
            assert bounds[0] is bounds[1] is None or bounds[0].dtype == bounds[1].dtype


def test_the_order_of_keys_stays():
    spec = BehaviorSpec({"b": ArraySpec(), "a": ArraySpec()}, ArraySpec())

    assert list(spec_from_plain(json.loads(json.dumps(plain_spec(spec)))).observation) == ["b", "a"]


def test_the_bounds_of_an_image_take_no_room():
    spec = BehaviorSpec(ArraySpec((84, 84), np.uint8, np.zeros((84, 84)), np.full((84, 84), 255)), ArraySpec())

    assert len(json.dumps(plain_spec(spec))) < 500


def test_what_is_no_spec_is_refused():
    with pytest.raises((KeyError, TypeError, ValueError)):
        spec_from_plain({"observation": {"shape": [2], "dtype": "no such"}, "action": {}})
