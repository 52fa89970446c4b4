"""A replay buffer of past steps, from which batches are drawn uniformly or by priority."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec
from envmanager.data.steps import StepInfo
from envmanager.data.trees import Tree, leaves
from envmanager.training.algorithms.states import copy_into
from envmanager.training.algorithms.store import NOWHERE, StepStore

Array = TypeVar("Array")
Other = TypeVar("Other")


@attrs.frozen
class Drawn(Generic[Array]):
    """A batch drawn from a Replay. ``next_obs`` is up to ``n_step`` steps after ``obs``. Both hold leaves ``[n, …]``.

    ``reward`` is the discounted sum of the rewards in between. ``discount`` multiplies the value of ``next_obs`` and
    is 0 after a termination. ``weight`` is for importance sampling. ``columns`` holds the outputs of the policy.
    """

    rows: np.ndarray
    obs: list[Array]
    columns: dict[str, Array]
    reward: Array
    next_obs: list[Array]
    discount: Array
    weight: Array

    def map(self, change: Callable[[Array], Other]) -> Drawn[Other]:
        """Return the batch with each array changed, but for ``rows``."""
        columns = {name: change(column) for name, column in self.columns.items()}
        obs, next_obs = list(map(change, self.obs)), list(map(change, self.next_obs))
        return Drawn(self.rows, obs, columns, change(self.reward), next_obs, change(self.discount), change(self.weight))


class Replay:
    """A buffer of at most the last ``capacity`` rows, from which batches are drawn.

    With ``priority_exponent`` rows are drawn by priority (Schaul et al. 2016, proportional), else uniformly. A row can
    be drawn once the next observation is known or the episode has terminated. Observations are stored in their own
    dtype. With ``share_frames``, equal frames of stacked images share their memory.
    """

    def __init__(
        self,
        observation: Tree,
        columns: Mapping[str, ArraySpec],
        *,
        capacity: int,
        seed: int,
        n_step: int = 1,
        gamma: float = 0.99,
        priority_exponent: float | None = None,
        share_frames: bool = False,
    ) -> None:
        self.store = StepStore(observation, columns, capacity, share_frames=share_frames)
        self._generator = np.random.default_rng(seed)
        self._n_step = n_step
        self._gamma = gamma
        self._exponent = priority_exponent
        self._tree = None if priority_exponent is None else SumTree(capacity)
        self._highest = 1.0
        self._can_draw = False

    def add(self, info: StepInfo, behavior: str) -> int:
        """Add one worker's step. Return the number of earlier rows that get their action and reward from it."""
        rows = self.store.add(info, behavior)
        if self._tree is not None and len(rows):
            self._tree.set(self.store.places(rows), np.full(len(rows), self._highest))
        return len(rows)

    def can_draw(self) -> bool:
        """Return whether any row can be drawn yet. If agents take turns, this may stay False for several steps."""
        if not self._can_draw:
            self._can_draw = len(self._usable(np.arange(self.store.first, self.store.n_rows))) > 0
        return self._can_draw

    def sample(
        self,
        n: int,
        *,
        importance_exponent: float = 0.4,
        reward_factor: float = 1.0,
        reward_clip: float | None = None,
    ) -> Drawn[np.ndarray]:
        """Return ``n`` random rows, possibly with repeats. ``can_draw`` must be true.

        Raw rewards are multiplied by ``reward_factor``, then clipped to ±``reward_clip``, then discounted and summed.
        ``importance_exponent``: exponent of the importance-sampling weights, used only with priorities.
        """
        store = self.store
        rows, weight = self._draw(n, importance_exponent)
        reward, last, discount = self._look_ahead(rows, reward_factor, reward_clip)
        places, next_places = store.places(rows), store.places(last)
        return Drawn(
            rows,
            [leaf[places] for leaf in leaves(store.obs)],
            {name: column[places] for name, column in store.columns.items()},
            reward,
            [leaf[next_places] for leaf in leaves(store.obs)],
            discount,
            weight,
        )

    def update_priorities(self, rows: np.ndarray, errors: np.ndarray) -> None:
        """Set the priorities of ``rows`` from absolute TD errors, float[n]. Does nothing if draws are uniform."""
        if self._tree is not None and self._exponent is not None:
            priorities = (errors.astype(np.float64) + 1e-6) ** self._exponent
            self._highest = max(self._highest, float(priorities.max()))
            self._tree.set(self.store.places(rows), priorities)

    def _draw(self, n: int, importance_exponent: float) -> tuple[np.ndarray, np.ndarray]:
        rows = np.zeros(0, np.int64)
        while len(rows) < n:
            rows = np.concatenate([rows, self._usable(self._candidates(n))])
        rows = rows[:n]
        if self._tree is None:
            return rows, np.ones(n, np.float32)
        chance = self._tree.values(self.store.places(rows)) / self._tree.total
        weight = (len(self.store) * chance) ** -importance_exponent
        return rows, (weight / weight.max()).astype(np.float32)

    def _candidates(self, n: int) -> np.ndarray:
        store = self.store
        if self._tree is None:
            return self._generator.integers(store.first, store.n_rows, n)
        # Stratified sampling: one random mark in each of n equal parts of the total.
        marks = (np.arange(n) + self._generator.random(n)) / n * self._tree.total
        places = self._tree.find(marks)
        newest = store.n_rows - 1
        rows: np.ndarray = newest - (newest - places) % store.capacity  # the last row written at this index
        return rows

    def _usable(self, rows: np.ndarray) -> np.ndarray:
        store = self.store
        places = store.places(rows)
        known = store.terminated[places] | (store.successor[places] != NOWHERE)
        usable: np.ndarray = rows[store.acted[places] & known & (rows >= store.first)]
        return usable

    def _look_ahead(
        self, rows: np.ndarray, reward_factor: float, reward_clip: float | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Follow ``rows`` for up to ``n_step`` steps. Return discounted reward sums, rows reached, and discounts."""
        store = self.store
        total = np.zeros(len(rows), np.float32)
        discount = np.ones(len(rows), np.float32)
        at = rows.copy()
        goes_on = np.ones(len(rows), np.bool_)
        for _ in range(self._n_step):
            places = store.places(at)
            step = store.reward[places]
            if reward_factor != 1.0:
                step = step * np.float32(reward_factor)
            if reward_clip is not None:
                step = step.clip(-reward_clip, reward_clip)
            total[goes_on] += (discount * step)[goes_on]
            discount[goes_on] *= self._gamma
            ends = goes_on & store.terminated[places]
            discount[ends] = 0.0
            goes_on &= ~ends
            at = np.where(goes_on, store.successor[places], at)
            after = store.places(at)
            goes_on &= store.acted[after] & (store.terminated[after] | (store.successor[after] != NOWHERE))
        return total, at, discount

    def state(self) -> tuple[dict[str, np.ndarray], ReplayState]:
        """Return the state for a checkpoint: arrays by name, and plain data."""
        arrays = dict(self.store.state())
        if self._tree is not None:
            arrays["priorities"] = self._tree.values(np.arange(min(self.store.n_rows, self.store.capacity)))
        return arrays, ReplayState(generator=dict(self._generator.bit_generator.state), highest=self._highest)

    def restore(self, arrays: Mapping[str, np.ndarray], state: ReplayState) -> None:
        """Restore a state that ``state()`` returned. Raises KeyError, TypeError or ValueError if it does not fit."""
        self.store.restore(arrays)
        self._generator.bit_generator.state = state.generator
        self._highest = state.highest
        if self._tree is not None and self.store.n_rows:
            priorities = np.zeros(min(self.store.n_rows, self.store.capacity))
            copy_into(priorities, arrays, "priorities")
            self._tree.set(np.arange(len(priorities)), priorities)


@attrs.frozen(kw_only=True)
class ReplayState:
    """The state of a Replay in a checkpoint, without the arrays. ``highest``: the highest priority so far."""

    generator: dict[str, Any]
    highest: float


class SumTree:
    """A binary tree of sums over non-negative numbers. ``find`` searches the numbers' cumulative sum in O(log n)."""

    def __init__(self, capacity: int) -> None:
        self._n_leaves = 1 << max(1, (capacity - 1).bit_length())
        self._sums = np.zeros(2 * self._n_leaves)

    @property
    def total(self) -> float:
        """Sum of all numbers in the tree."""
        return float(self._sums[1])

    def values(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at the indices ``places``."""
        values: np.ndarray = self._sums[places + self._n_leaves]
        return values

    def set(self, places: np.ndarray, values: np.ndarray) -> None:
        """Set the numbers at the indices ``places`` to ``values``. If an index occurs twice, the last value is kept."""
        nodes = places + self._n_leaves
        self._sums[nodes] = values
        while nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, marks: np.ndarray) -> np.ndarray:
        """Return, for each mark in [0, ``total``), the first index at which the cumulative sum exceeds the mark."""
        nodes = np.ones(len(marks), np.int64)
        left_over = marks.astype(np.float64)
        while nodes[0] < self._n_leaves:
            left = self._sums[2 * nodes]
            goes_right = left_over >= left
            left_over = np.where(goes_right, left_over - left, left_over)
            nodes = 2 * nodes + goes_right
        return nodes - self._n_leaves
