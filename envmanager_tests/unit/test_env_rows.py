"""EnvIndex: which environments a user may name, and whose they are."""

import numpy as np
import pytest

from envmanager.data.env_rows import EnvIndex, split_evenly
from envmanager.errors import BadAction, UsageError

ROWS = EnvIndex(split_evenly(8, 3))


@pytest.mark.parametrize("env_ids", [[7, 0, 3], (7, 0, 3), np.array([7, 0, 3], np.uint8)])
def test_environments_are_named_by_whole_numbers_in_any_order(env_ids):
    ids, numbers = ROWS.checked(env_ids, BadAction)

    assert ids.tolist() == numbers == [7, 0, 3]


def test_no_environment_may_be_named():
    assert ROWS.checked([], BadAction)[1] == []


@pytest.mark.parametrize("error", [BadAction, UsageError])
@pytest.mark.parametrize(
    "env_ids", [None, 3, {0}, "012", ["0"], [0.0], [True], [[0], [1, 2]], [[0, 1]], [8], [-1], [1, 1], [2**63], [2**70]]
)
def test_anything_else_is_refused_with_the_error_asked_for(env_ids, error):
    with pytest.raises(error, match="env_ids"):
        ROWS.checked(env_ids, error)


def test_numbers_of_another_kind_are_named():
    with pytest.raises(BadAction, match=r"whole numbers, but is float64\[2\]"):
        ROWS.checked([0.0, 1.0], BadAction)


def test_environments_are_sorted_by_worker():
    groups = ROWS.by_worker(np.array([7, 1, 0, 6]))

    assert [(g.worker_id, g.rows.tolist(), g.places.tolist()) for g in groups] == [
        (0, [0, 1], [2, 1]),
        (2, [0, 1], [3, 0]),
    ]


@pytest.mark.parametrize("nobody", [[], (), np.zeros(0), np.zeros(0, np.int64)])
def test_nobody_is_grouped_into_nothing(nobody):
    assert EnvIndex([(0, 1, 2), (3, 4)]).grouped(nobody, BadAction) == (0, [])
