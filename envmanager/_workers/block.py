"""The rows of workers in one block of memory: their observations, rewards, flags and actions.

::

    steps     counts [slot][worker][behavior] = (n rows, m final rows, has acting?)
              per behavior agent_id, obs, reward, terminated, truncated, acting     [slot][row, …]
    finals    per behavior final_obs                                                [slot][row, …]
    actions   action_counts [worker][behavior] = n rows, or -1 for no action
              per behavior action, row (which rows an action is for)                [row, …]

The workers of one machine share one block, a nameless map. A worker elsewhere has a block of its own, as large as the
one that its manager keeps for it; the parts travel as bytes.

A worker's rows lie together, so one worker's step is a slice, and with all workers in one slot a full batch is one
view. With ``zero_copy`` there are three slots: one handed out, the one before it, and the one being written. Otherwise
one is enough, because a step is copied out before the worker gets its next command.

The rule: both sides lay the same arrays over the same bytes, from one BlockLayout and nothing else.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager._workers.memory import make_private, map_memory
from envmanager.data.specs import BehaviorSpec
from envmanager.data.steps import AgentSteps
from envmanager.data.trees import Tree, map_tree

_ALIGNMENT = 64  # a cache line, at which each array begins


@attrs.frozen
class BehaviorLayout:
    """The rows of one behavior: worker w has ``[first[w], first[w] + capacity[w])``."""

    name: str
    spec: BehaviorSpec
    first: tuple[int, ...]
    capacity: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        return sum(self.capacity)


@attrs.frozen
class BlockLayout:
    """What lies in the block, for both sides to lay their arrays over the same bytes."""

    n_slots: int
    n_workers: int
    behaviors: tuple[BehaviorLayout, ...]

    @classmethod
    def of(
        cls, specs: Mapping[str, BehaviorSpec], max_agents: Sequence[Mapping[str, int]], *, n_slots: int
    ) -> BlockLayout:
        """The layout for workers that report ``max_agents`` per behavior. Behaviors with object leaves have no rows."""
        behaviors = []
        for name, spec in specs.items():
            if not spec.has_objects:
                capacity = [own.get(name, 0) for own in max_agents]
                first = np.concatenate([[0], np.cumsum(capacity)[:-1]])
                behaviors.append(BehaviorLayout(name, spec, tuple(int(row) for row in first), tuple(capacity)))
        return cls(n_slots, len(max_agents), tuple(behaviors))


class Block:
    """Arrays over a writable buffer of ``size_bytes``, or, without one, just the size they would take."""

    def __init__(self, layout: BlockLayout, memory: Any = None) -> None:
        self.layout = layout
        self.memory = memory
        self._offset = 0
        behaviors, n_slots, n_counts = layout.behaviors, layout.n_slots, max(1, len(layout.behaviors))
        self.counts = self._array((n_slots, layout.n_workers, n_counts, 3), np.dtype(np.int32))
        steps = [self._step_columns(each) for each in behaviors]
        self.finals_at = self._offset
        finals = [self._tree(each.spec.observation, n_slots, each.n_rows) for each in behaviors]
        self.actions_at = self._offset
        self.action_counts = self._array((layout.n_workers, n_counts), np.dtype(np.int32))
        actions = [self._tree(each.spec.action, each.n_rows) for each in behaviors]
        rows = [self._array((each.n_rows,), np.dtype(np.int64)) for each in behaviors]
        self.columns = {
            each.name: Columns(**own, final_obs=final_obs, action=action, row=row)
            for each, own, final_obs, action, row in zip(behaviors, steps, finals, actions, rows, strict=True)
        }

    @classmethod
    def shared(cls, layout: BlockLayout, fd: int) -> Block:
        """One that lies in the memory behind ``fd``, which has its size."""
        return cls(layout, map_memory(fd, cls(layout).size_bytes))

    def make_private(self, fd: int) -> None:
        """In a forked process: the arrays keep what is in them, and share it with nobody."""
        make_private(self.memory, fd)

    @property
    def size_bytes(self) -> int:
        """How much memory the layout takes; at least one page."""
        return max(self._offset, mmap.PAGESIZE)

    def _step_columns(self, behavior: BehaviorLayout) -> dict[str, Tree]:
        shape = (self.layout.n_slots, behavior.n_rows)
        return {
            "agent_id": self._array(shape, np.dtype(np.int64)),
            "obs": self._tree(behavior.spec.observation, *shape),
            "reward": self._array(shape, np.dtype(np.float32)),
            "terminated": self._array(shape, np.dtype(np.bool_)),
            "truncated": self._array(shape, np.dtype(np.bool_)),
            "acting": self._array(shape, np.dtype(np.bool_)),
        }

    def _tree(self, spec: Tree, *leading: int) -> Tree:
        return map_tree(lambda leaf: self._array((*leading, *leaf.shape), leaf.dtype), spec)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        start = self._offset
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._offset = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        if self.memory is None or size == 0:
            return np.empty(shape if size == 0 else (0,), dtype)
        return np.frombuffer(self.memory, dtype, size // dtype.itemsize, start).reshape(shape)


@attrs.define(eq=False)
class Columns:
    """All rows of one behavior: ``[slot][row, …]``; the last two are ``[row, …]``."""

    agent_id: np.ndarray
    obs: Tree
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    acting: np.ndarray
    final_obs: Tree
    action: Tree
    row: np.ndarray

    def steps(self, slot: int, first: int, n: int, m: int, has_acting: bool) -> AgentSteps:
        """Views of ``n`` rows of one slot, from row ``first``, with ``m`` final rows."""
        own = slice(first, first + n)
        final = slice(first, first + m)
        return AgentSteps(
            self.agent_id[slot, own],
            map_tree(lambda leaf: leaf[slot, own], self.obs),
            self.reward[slot, own],
            self.terminated[slot, own],
            self.truncated[slot, own],
            map_tree(lambda leaf: leaf[slot, final], self.final_obs) if m else None,
            self.acting[slot, own] if has_acting else None,
        )
