"""What ``set_attr`` takes for one value for all, and what for one for each."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from envmanager.errors import UsageError
from envmanager.kernel.commands import one_for_each


class Basket:
    """Has a length and places, and is no Sequence."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> int:
        return place


class Plain:
    pass


@pytest.mark.parametrize("values", [[1, 2], (1, 2), range(1, 3), deque([1, 2]), np.array([1, 2])], ids=repr)
def test_sequences_and_arrays_are_one_for_each(values: Any) -> None:
    assert list(one_for_each(values, 2)) == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        3,
        0.5,
        None,
        "xy",
        b"xy",
        bytearray(2),
        {"x": 1, "y": 2},
        {1, 2},
        Plain,
        list,
        np.float32(1),
        np.array(7),
        np.void(b"xy"),
    ],
    ids=repr,
)
def test_anything_else_is_one_for_all_whatever_its_length(value: Any) -> None:
    first, second = one_for_each(value, 2)
    assert first is second is value


@pytest.mark.parametrize("values", [[1], (1, 2, 3), [], np.zeros(3)], ids=repr)
def test_another_number_of_values_is_refused(values: Any) -> None:
    with pytest.raises(UsageError, match=r"one value for each of 2 environments.*write \[sequence\] \* 2"):
        one_for_each(values, 2)


def test_what_could_be_either_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot tell"):
        one_for_each(Basket(), 2)
