"""Stacks of frames are what was written, while each frame is kept once."""

from __future__ import annotations

import numpy as np
import pytest

from envmanager.training.algorithms import store
from envmanager.training.algorithms.store import FrameStacks

SHAPE = (4, 3, 2)


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WINDOW", 8)


def episode(n: int, seed: int) -> np.ndarray:
    """The stacks of n steps; the first one repeats one frame."""
    drawn = np.random.default_rng(seed).integers(0, 256, (n, *SHAPE[1:]), dtype=np.uint8)
    padded = np.concatenate([drawn[:1]] * (SHAPE[0] - 1) + [drawn])
    return np.stack([padded[at : at + SHAPE[0]] for at in range(n)])


def write(stacks: FrameStacks, rows: np.ndarray, first: int, capacity: int) -> None:
    for number, row in enumerate(rows, first):
        stacks[np.array([number % capacity])] = row[None]


def test_what_was_written_is_read_and_takes_a_frame_per_row() -> None:
    stacks, rows = FrameStacks(SHAPE, np.uint8, 40), episode(40, seed=1)
    write(stacks, rows, 0, 40)
    np.testing.assert_array_equal(stacks[np.arange(40)], rows)
    assert len(stacks.state(40)["frames"]) == 40
    assert stacks.first_whole(0, 40) == 0


def test_agents_in_turns_share_each_their_own_frames() -> None:
    stacks, ours, theirs = FrameStacks(SHAPE, np.uint8, 40), episode(20, seed=1), episode(20, seed=2)
    for at in range(20):
        stacks[np.array([2 * at, 2 * at + 1])] = np.stack([ours[at], theirs[at]])
    np.testing.assert_array_equal(stacks[np.arange(0, 40, 2)], ours)
    np.testing.assert_array_equal(stacks[np.arange(1, 40, 2)], theirs)
    assert len(stacks.state(40)["frames"]) == 40


@pytest.mark.parametrize("n_steps", [1, 3, 30])
def test_rows_that_are_said_to_be_whole_are(n_steps: int) -> None:
    """With short episodes each row brings more than one frame, so fewer rows fit."""
    capacity = 20
    stacks = FrameStacks(SHAPE, np.uint8, capacity)
    rows = np.concatenate([episode(n_steps, seed) for seed in range(120 // n_steps)])
    first = 0
    for number, row in enumerate(rows):
        write(stacks, row[None], number, capacity)
        first = stacks.first_whole(max(first, number + 1 - capacity), number + 1)
        held = np.arange(first, number + 1)
        np.testing.assert_array_equal(stacks[held % capacity], rows[held])
    assert len(held) == capacity


def test_without_anything_to_share_a_part_of_the_rows_fits() -> None:
    stacks = FrameStacks(SHAPE, np.uint8, 20)
    rows = np.random.default_rng(0).integers(0, 256, (100, *SHAPE), dtype=np.uint8)
    first = 0
    for number, row in enumerate(rows):
        write(stacks, row[None], number, 20)
        first = stacks.first_whole(max(first, number - 19), number + 1)
        held = np.arange(first, number + 1)
        np.testing.assert_array_equal(stacks[held % 20], rows[held])
    assert len(held) == 20 // 4


def test_restored_it_holds_the_same_and_goes_on() -> None:
    stacks, rows = FrameStacks(SHAPE, np.uint8, 20), episode(50, seed=3)
    write(stacks, rows[:30], 0, 20)
    again = FrameStacks(SHAPE, np.uint8, 20)
    again.restore({name: array.copy() for name, array in stacks.state(20).items()}, 20)
    write(again, rows[30:35], 30, 20)
    held = np.arange(again.first_whole(15, 35), 35)
    np.testing.assert_array_equal(again[held % 20], rows[held])
    assert len(held) >= 15
