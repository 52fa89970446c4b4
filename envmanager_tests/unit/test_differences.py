"""Differences between steps: where they are, and what counts as one."""

from __future__ import annotations

import numpy as np
import pytest

from envmanager.data.differences import Difference, differences, first_difference
from envmanager.data.steps import AgentSteps
from envmanager.placing.pair import INFOS, LARGEST, plain_steps

NAN = float("nan")


@pytest.mark.parametrize(
    ("expected", "got", "texts"),
    [
        (np.array([0.0, 1.0]), np.array([0.0, 2.0]), ["obs[1] was 1.0 and is 2.0"]),
        (np.zeros((2, 3)), np.eye(2, 3), ["obs[0, 0] was 0.0 and is 1.0"]),
        (np.zeros(2), np.zeros(3), ["obs was float64[2] and is float64[3]"]),
        (np.array([NAN, 1]), np.array([NAN, 1]), []),
        (np.array([NAN, 1]), np.array([0.0, 1]), ["obs[0] was nan and is 0.0"]),
        (np.array([0.0]), np.array([-0.0]), []),
        (np.zeros(1, np.float32), np.zeros(1), ["obs was float32[1] and is float64[1]"]),
        (np.zeros(()), np.zeros(1), ["obs was float64[] and is float64[1]"]),
        (np.float32(0.1), np.float32(0.2), ["obs was 0.1 and is 0.2"]),
        (NAN, NAN, []),
        ("left", "right", ["obs was 'left' and is 'right'"]),
        (None, np.zeros(1), ["obs was None and is float64[1]"]),
        ({"a": 1, "b": (2, 3)}, {"a": 1, "b": (2, 4)}, ["obs['b'][1] was 3 and is 4"]),
        ({"a": 1}, {"b": 1}, ["obs['a'] was 1 and is None", "obs['b'] was None and is 1"]),
        ([1, 2], [1, 2, 3], ["obs was [1, 2] and is [1, 2, 3]"]),
        (np.array(["x", {"k": [1]}], object), np.array(["x", {"k": [2]}], object), ["obs[1]['k'][0] was 1 and is 2"]),
        (np.array([np.zeros(2), None], object), np.array([np.ones(2), None], object), ["obs[0][0] was 0.0 and is 1.0"]),
    ],
)
def test_a_difference_names_its_place_and_both_values(expected, got, texts):
    assert [str(each) for each in differences(expected, got, "obs")] == texts


def test_paths_without_a_root_begin_with_the_key():
    assert list(differences({"reward": 1}, {"reward": 2})) == [Difference("reward", 1, 2)]


def test_a_value_whose_comparison_fails_differs():
    class Stubborn:
        def __eq__(self, other):
            raise TypeError("no")

    assert len(list(differences(Stubborn(), Stubborn(), "info"))) == 1


def test_of_two_streams_the_first_unequal_step_is_named():
    assert first_difference([1, 2, 3], [1, 5, 4, 9]) == (1, [Difference("", 2, 5)])
    assert first_difference([1, 2], [1, 2, 3]) is None


def steps_of(obs, *infos):
    return {"default": AgentSteps.first(agent_id=np.arange(len(obs)), obs=obs, info=list(infos) or None)}


def test_plain_infos_are_equal_where_their_sources_are():
    class Thing:
        pass

    class Named:
        def __repr__(self):
            return "Named(3)"

    class Unspeakable:
        def __repr__(self):
            raise TypeError("no")

    info = {"thing": Thing(), "named": Named(), "unspeakable": Unspeakable(), "set": {"b", "a"}, 3: (np.zeros(2),)}
    found = plain_steps(steps_of(np.zeros((1, 2)), info), INFOS)
    info[3][0][0] = 1

    expected = {"thing": "Thing", "named": "Named(3)", "unspeakable": "Unspeakable", "set": ["'a'", "'b'"]}
    assert list(differences({"info": {**expected, "3": [np.zeros(2)]}, "reset_info": None}, found)) == []


def test_of_large_arrays_a_hash_is_compared():
    large = np.zeros((2, LARGEST + 1), np.uint8)
    other = large.copy()
    other[-1, -1] = 1

    found, same, another = (plain_steps(steps_of(each))["obs"] for each in (large, large.copy(), other))
    assert found == same != another
    assert found.startswith("uint8[2, 4097] ")


def test_the_only_agent_has_no_row_in_paths_and_several_have():
    def shape(n):
        steps = AgentSteps.first(agent_id=np.arange(n), obs={"x": (np.zeros((n, 2)),)})
        return plain_steps({"default": steps})["obs"]["x"][0].shape

    assert [shape(1), shape(2)] == [(2,), (2, 2)]


def test_infos_that_contain_themselves_are_left_out():
    info: dict = {"a": 1}
    info["self"] = info

    assert plain_steps(steps_of(np.zeros((1, 2)), info), INFOS) == {"info": None, "reset_info": None}
