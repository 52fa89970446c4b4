"""One worker's rows in a block: what each side writes there, and what the other reads.

::

    actions ── write_actions ──▶ the block ── read_payload ──▶ the worker's environments
      steps ◀── full, read ───── the block ◀── in_place, write ── what they have written

The rule: environments of one agent each write straight into their rows; what others return is copied there, if it fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager._workers.block import BehaviorLayout, Block, BlockLayout
from envmanager._workers.wire import ENDED, FULL, IN_MEMORY
from envmanager.data.steps import AgentSteps, CommandName, RowBuffer, only_agents
from envmanager.data.tree_rows import take_rows
from envmanager.data.trees import Tree, leaves, leaves_like, map_tree


class WorkerRows:
    """One worker's part of the block: what it reads and writes, and what the manager reads and writes for it."""

    def __init__(self, block: Block, worker_id: int, env_ids: Sequence[int]) -> None:
        self._block = block
        self._worker_id = worker_id
        self._fixed_ids = only_agents(env_ids)
        self._behaviors = [
            (index, each) for index, each in enumerate(block.layout.behaviors) if each.capacity[worker_id]
        ]
        self._capacities = {each.name: each.capacity[worker_id] for _, each in self._behaviors}
        self._full = [
            {each.name: self._all_steps(each, slot) for _, each in self._behaviors}
            for slot in range(block.layout.n_slots)
        ]
        self._finals = [
            {each.name: self._steps(each, slot, 0, each.capacity[worker_id]).final_obs for _, each in self._behaviors}
            for slot in range(block.layout.n_slots)
        ]
        self._buffers = [self._buffer(slot) for slot in range(block.layout.n_slots)]
        self.actions = {each.name: self._own(each, block.columns[each.name].action) for _, each in self._behaviors}
        """Views of the actions of all rows, by behavior."""
        self._plain_action = self._find_plain_action()
        self._row_numbers = {each.name: self._own(each, block.columns[each.name].row) for _, each in self._behaviors}

    def _find_plain_action(self) -> tuple[str, np.ndarray] | None:
        """The actions of a worker of one behavior, by name, if they are one array: as nearly all are."""
        if len(self._behaviors) != 1:
            return None
        ((name, action),) = self.actions.items()
        return (name, action) if action.__class__ is np.ndarray else None

    @property
    def layout(self) -> BlockLayout:
        """That of the whole block."""
        return self._block.layout

    def _steps(self, each: BehaviorLayout, slot: int, n: int, m: int, has_acting: bool = False) -> AgentSteps:
        return self._block.columns[each.name].steps(slot, each.first[self._worker_id], n, m, has_acting)

    def _all_steps(self, each: BehaviorLayout, slot: int) -> AgentSteps:
        """All rows of a slot.

        Their agents are always the same, one per environment, so their ids are not in the block.
        """
        steps = self._steps(each, slot, each.capacity[self._worker_id], 0)
        if len(self._fixed_ids) == len(steps):
            steps.agent_id = self._fixed_ids
        return steps

    def _own(self, each: BehaviorLayout, column: Tree) -> Tree:
        first = each.first[self._worker_id]
        own = slice(first, first + each.capacity[self._worker_id])
        return map_tree(lambda leaf: leaf[own], column)

    def full(self, slot: int) -> dict[str, AgentSteps]:
        """Views of all rows of a slot: what a step is when every agent is there and acts."""
        return self._full[slot]

    def buffer(self, slot: int) -> RowBuffer | None:
        """All rows of a slot for environments of one agent each to write into; None when they are not such."""
        return self._buffers[slot]

    def _buffer(self, slot: int) -> RowBuffer | None:
        if len(self._behaviors) != 1 or self._behaviors[0][1].capacity[self._worker_id] != len(self._fixed_ids):
            return None
        _, each = self._behaviors[0]
        return RowBuffer(self._full[slot][each.name], self._finals[slot][each.name])

    def put(self, slot: int, steps_by_behavior: Mapping[str, AgentSteps]) -> tuple[int, int]:
        """Have steps lie in a slot: the flags of the response, and with FULL how many final rows there are.

        0 when they do not fit.
        """
        n_ended = self.in_place(slot, steps_by_behavior)
        if n_ended is None:
            return IN_MEMORY if self.write(slot, steps_by_behavior) else 0, 0
        return IN_MEMORY | FULL | (ENDED if n_ended else 0), n_ended

    def in_place(self, slot: int, steps_by_behavior: Mapping[str, AgentSteps]) -> int | None:
        """How many final rows, when the steps already are all rows of the slot; None when they must be written."""
        buffer = self._buffers[slot]
        if buffer is None or len(steps_by_behavior) != 1:
            return None
        (steps,) = steps_by_behavior.values()
        if steps.reward is not buffer.steps.reward:
            return None
        return 0 if steps.final_obs is None else int(np.count_nonzero(steps.ended))

    def write(self, slot: int, steps_by_behavior: Mapping[str, AgentSteps]) -> bool:
        """Copy steps into a slot; False, and nothing counts, when some do not fit."""
        if any(steps.agent_id.size > self._capacities.get(name, -1) for name, steps in steps_by_behavior.items()):
            return False
        self._block.counts[slot, self._worker_id] = 0
        for index, each in self._behaviors:
            if each.name in steps_by_behavior:
                self._write(slot, index, each, steps_by_behavior[each.name])
        return True

    def _write(self, slot: int, index: int, each: BehaviorLayout, steps: AgentSteps) -> None:
        m = 0 if steps.final_obs is None else int(np.count_nonzero(steps.ended))
        into = self._steps(each, slot, len(steps), m, steps.acting is not None)
        for name in ("agent_id", "reward", "terminated", "truncated", "acting"):
            source = getattr(steps, name)
            if source is not None:
                getattr(into, name)[...] = source
        _copy_tree_into(into.obs, steps.obs)
        if m:
            _copy_tree_into(into.final_obs, steps.final_obs)
        self._block.counts[slot, self._worker_id, index] = (len(steps), m, steps.acting is not None)

    def full_with_final(self, slot: int, n_ended: int) -> dict[str, AgentSteps]:
        """Views of all rows of a slot, in which some episodes ended: one behavior's."""
        ((name, full),) = self._full[slot].items()
        final_obs = take_rows(self._finals[slot][name], slice(n_ended))
        flags = (full.reward, full.terminated, full.truncated)
        return {name: AgentSteps(full.agent_id, full.obs, *flags, final_obs)}

    def read(self, slot: int) -> dict[str, AgentSteps]:
        """Views of the steps in a slot."""
        found = {}
        for index, each in self._behaviors:
            n, m, has_acting = self._block.counts[slot, self._worker_id, index].tolist()
            if n:
                found[each.name] = self._steps(each, slot, n, m, bool(has_acting))
        return found

    def write_actions(self, actions: Mapping[str, Tree], rows: np.ndarray | None = None) -> int:
        """Put actions where the worker finds them, for some of its rows or for all; how, as flags of the command.

        0 when they do not fit.
        """
        plain = self._plain_action
        if plain is not None and rows is None and len(actions) == 1:
            action = actions.get(plain[0])
            if action.__class__ is np.ndarray and len(action) == len(plain[1]):
                plain[1][...] = action
                return IN_MEMORY | FULL
        for name, action in actions.items():
            if _n_rows(action) > self._capacities.get(name, -1):
                return 0
        for index, each in self._behaviors:
            n = self._write_action(each, actions[each.name], rows) if each.name in actions else -1
            self._block.action_counts[self._worker_id, index] = n
        return IN_MEMORY

    def _write_action(self, each: BehaviorLayout, action: Tree, rows: np.ndarray | None) -> int:
        structure = self.actions[each.name]
        n = _n_rows(action)
        if structure.__class__ is np.ndarray:
            structure[:n] = action
        else:
            for target, source in zip(leaves(structure), leaves_like(structure, action), strict=True):
                target[:n] = source
        if rows is not None:
            self._row_numbers[each.name][:n] = rows
        return n

    def read_payload(self, name: CommandName, flags: int) -> Any:
        """The payload of a step that came with these flags."""
        if flags & FULL:
            return self.actions
        actions = self.read_actions()
        return actions if name is CommandName.STEP else (self.read_row_numbers(), actions)

    def read_actions(self) -> dict[str, Tree]:
        """Views of the actions that were written."""
        found = {}
        for index, each in self._behaviors:
            n = int(self._block.action_counts[self._worker_id, index])
            if n == each.capacity[self._worker_id]:
                found[each.name] = self.actions[each.name]
            elif n >= 0:
                found[each.name] = _first_rows(self.actions[each.name], n)
        return found

    def read_row_numbers(self) -> np.ndarray:
        """The rows that the actions are for."""
        index, each = self._behaviors[0]
        n = int(self._block.action_counts[self._worker_id, index])
        return np.array(self._row_numbers[each.name][:n])


_UNKNOWN = 2**32
"""More rows than fit anywhere: a tree without leaves (an empty Dict) does not say how many it has."""


def _n_rows(tree: Tree) -> int:
    if tree.__class__ is np.ndarray:
        return len(tree)
    columns = leaves(tree)
    return len(columns[0]) if columns else _UNKNOWN


def _first_rows(tree: Tree, n: int) -> Tree:
    return map_tree(lambda leaf: leaf[:n], tree)


def _copy_tree_into(target: Tree, source: Tree) -> None:
    for into, values in zip(leaves(target), leaves_like(target, source), strict=True):
        into[...] = values
