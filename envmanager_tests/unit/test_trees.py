"""Trees: taking them apart and putting them together."""

import sys
import threading
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager.data.trees import build, leaves, leaves_like, map_tree, paths, snapshot

trees = st.recursive(
    st.integers(),
    lambda children: (
        st.dictionaries(st.text(max_size=3), children, max_size=3) | st.lists(children, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


def shuffled(tree):
    """The same tree with every dict's keys in the other order."""
    if isinstance(tree, dict):
        return {key: shuffled(tree[key]) for key in reversed(tree)}
    return tuple(shuffled(child) for child in tree) if isinstance(tree, tuple) else tree


@given(trees)
def test_a_tree_is_built_again_from_its_leaves(tree):
    assert build(tree, leaves(tree)) == tree


@given(trees)
def test_mapping_a_tree_maps_its_leaves_in_order(tree):
    assert leaves(map_tree(lambda leaf: leaf * 2, tree)) == [leaf * 2 for leaf in leaves(tree)]


@given(trees)
def test_trees_whose_keys_are_in_another_order_meet_leaf_by_leaf(tree):
    assert leaves_like(tree, shuffled(tree)) == leaves(tree)
    assert map_tree(lambda a, b: a - b, tree, shuffled(tree)) == map_tree(lambda leaf: 0, tree)


@given(trees)
def test_a_path_is_how_python_reaches_the_leaf(tree):
    assert [eval(path, {"root": tree}) for path in paths(tree, "root")] == leaves(tree)


def test_tuples_of_different_lengths_do_not_meet():
    with pytest.raises(ValueError, match="zip"):
        map_tree(lambda a, b: a, (1, 2), (1,))
    with pytest.raises(ValueError, match="zip"):
        leaves_like((1, 2), (1, 2, 3))


def test_a_missing_key_does_not_meet():
    with pytest.raises(KeyError):
        leaves_like({"a": 1, "b": 2}, {"a": 1})


Pair = namedtuple("Pair", "left right")


def test_a_snapshot_does_not_change_with_what_it_was_taken_of():
    nested = np.empty(2, object)
    nested[0], nested[1] = [1, [2]], {"n": 3}
    value = OrderedDict(
        array=np.zeros(2), pair=Pair([1], {2}), nested=nested, text="a", rows=np.ones((2, 2), order="F")
    )
    taken = snapshot(value)
    value["array"][:] = 9
    value["pair"].left.append(9)
    value["pair"].right.add(9)
    value["nested"][0][1].append(9)
    value["nested"][1]["n"] = 9
    value["rows"][:] = 9

    assert type(taken) is OrderedDict
    assert list(taken) == ["array", "pair", "nested", "text", "rows"]
    assert taken["array"].tolist() == [0, 0]
    assert taken["pair"] == Pair([1], {2})
    assert taken["nested"].tolist() == [[1, [2]], {"n": 3}]
    assert taken["rows"].tolist() == [[1, 1], [1, 1]]


def test_a_snapshot_shares_what_is_no_container_of_values():
    simulator = threading.Lock()  # cannot be copied
    assert snapshot({"simulator": simulator})["simulator"] is simulator


def test_a_snapshot_of_a_value_that_contains_itself_does_so_too():
    value: dict = {"n": 1}
    value["self"] = [value]
    taken = snapshot(value)
    value["n"] = 2

    assert taken["self"][0] is taken
    assert taken["n"] == 1


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts)
    )
)
def test_a_snapshot_is_equal_to_its_value(value):
    assert snapshot(value) == value


class Celsius(tuple):
    """A tuple that is made of one number."""

    def __new__(cls, degrees):
        return super().__new__(cls, [degrees, [degrees]])


def test_a_snapshot_keeps_values_of_classes_with_ways_of_their_own():
    counter, tuple_of_its_own = Counter(a=3, b=1), Celsius(5)
    taken = snapshot([counter, tuple_of_its_own, sys.version_info, bytearray(b"ab")])
    tuple_of_its_own[1].append(6)
    counter["a"] = 9

    assert taken[0] == Counter(a=3, b=1)
    assert (type(taken[1]), taken[1][1]) == (Celsius, [5])
    assert taken[2] is sys.version_info
