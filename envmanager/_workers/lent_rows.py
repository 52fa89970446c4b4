"""Rows that environments of this process write into, and that change from step to step.

::

    RotatingRows   three sets of arrays in turn: views that stay valid for a while (zero_copy, or shared memory)
    LentRows       the trainer's own, without a copy: a set is written again when nobody refers to it any more

The rule: what was handed out is never written into as long as the trainer may still look at it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envmanager.data.steps import AgentSteps, RowBuffer, Steps
from envmanager.data.tree_rows import copy_tree
from envmanager.data.trees import Tree, leaves, map_tree

LEAST_BYTES = 1 << 16
"""Observations of so many bytes are lent; copying fewer is faster than lending them."""
_MAX_KEPT = 3
"""So many sets are kept for being written again; a trainer may keep as many more as it likes."""


class RotatingRows:
    """Some buffers, one after the other."""

    def __init__(self, buffers: Sequence[RowBuffer]) -> None:
        self._buffers = buffers
        self._slot = 0

    def next(self) -> RowBuffer:
        """What the next step is to be written into."""
        self._slot = (self._slot + 1) % len(self._buffers)
        return self._buffers[self._slot]

    def handed_out(self, steps: Steps) -> Steps:
        """What is handed out of the step that was written."""
        return steps


class LentRows:
    """Buffers whose observations are handed out without a copy; the other arrays are small and copied."""

    def __init__(self, make: Callable[[], RowBuffer]) -> None:
        self._make = make
        self._kept: list[_LentBuffer] = []
        self._next: _LentBuffer | None = None

    def next(self) -> RowBuffer:
        """What the next step is to be written into: the first that came back, as it may still be in the caches."""
        self._next = next((each for each in self._kept if each.is_back), None)
        if self._next is None:
            self._next = _LentBuffer(self._make())
            self._kept = [self._next, *self._kept[: _MAX_KEPT - 1]]  # the trainer keeps one more for long
        return self._next.buffer

    def handed_out(self, steps: Steps) -> Steps:
        """What is handed out of the step that was written; copies of what was written elsewhere."""
        return {behavior: self._own(each) for behavior, each in steps.items()}

    def _own(self, steps: AgentSteps) -> AgentSteps:
        if self._next is None or steps.obs is not self._next.buffer.steps.obs:
            return steps.copy()
        return AgentSteps(
            steps.agent_id.copy(),
            self._next.lend(),
            steps.reward.copy(),
            steps.terminated.copy(),
            steps.truncated.copy(),
            copy_tree(steps.final_obs),
            None,
            steps.info,
            steps.reset_info,
        )


class _LentBuffer:
    """A buffer, and whether somebody refers to what was lent of it.

    What is lent is a view of an array that lies on the buffer's memory, and whose own base is no array: NumPy has all
    views of views refer to the first array of the chain, so that one lives as long as any of them.
    """

    def __init__(self, buffer: RowBuffer) -> None:
        self.buffer = buffer
        self._roots: list[weakref.ref[np.ndarray]] = []

    @property
    def is_back(self) -> bool:
        return all(root() is None for root in self._roots)

    def lend(self) -> Tree:
        """The observations."""
        lent = map_tree(_on_the_same_memory, self.buffer.steps.obs)
        self._roots = [weakref.ref(leaf.base) for leaf in leaves(lent)]
        return lent


def _on_the_same_memory(array: np.ndarray) -> np.ndarray:
    data: Any = array.reshape(-1).view(np.uint8)
    same: np.ndarray = np.asarray(memoryview(data)).view(array.dtype).reshape(array.shape)
    return same


def is_worth_lending(observation: Tree, n_envs: int) -> bool:
    """Whether the observations of ``n_envs`` environments, by their spec, are so large that lending them pays."""
    n_bytes = 0
    for leaf in leaves(observation):
        if leaf.is_object:
            return False
        n_bytes += n_envs * leaf.dtype.itemsize * math.prod(leaf.shape)
    return n_bytes >= LEAST_BYTES
