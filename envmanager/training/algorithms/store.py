"""A store of many agents' steps as rows, each linked to the same agent's next row.

::

    row 7   agent 3   obs  action columns  reward  terminated   successor ──▶ row 9   agent 3   obs  (open)

The observation of an agent that can act opens a row. The action and its reward close the row when the next step
arrives. A row without an action holds only an observation, for example because the episode was truncated, or because
the next step was lost or is still in flight. The agent's next observation is stored only in the next row.

New rows get the next higher row numbers. The oldest rows are overwritten, unless the store grows. Rows from ``first``
on are valid.

Stacks of frames share frames, so stacks of four take about a quarter of the memory::

    row 7   frames 12 13 14 15          frames   … │ 12 │ 13 │ 14 │ 15 │ 16 │ …   overwritten oldest first
    row 8   frames 13 14 15 16

A frame that is known to equal one of the last ``WINDOW`` frames, in any stack, is not stored again. Older frames are
not used for a new row, so each row keeps all its frames until at least ``capacity`` newer frames have been stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envmanager.data.specs import ArraySpec, as_array, zeros
from envmanager.data.steps import AgentSteps, StepInfo
from envmanager.data.trees import Tree, leaves, leaves_like, map_tree, paths, take_rows
from envmanager.errors import UsageError
from envmanager.training.algorithms.states import copy_into
from envmanager.training.trainer import named, of_part

WINDOW = 4096
"""Number of newest frames with which a new frame is compared."""


class FrameStacks:
    """A store of ``capacity`` rows, each a stack of frames. ``stacks[i]`` reads or writes the rows at indices ``i``.

    It has room for one new frame per row. If rows add more frames, as the first row of an episode does, frames of the
    oldest rows can be overwritten although the rows remain. ``first_whole`` finds the first row with all its frames.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, capacity: int) -> None:
        self._window = WINDOW + shape[0]
        self._frames = np.zeros((capacity + self._window, *shape[1:]), dtype)
        self._numbers = np.zeros((capacity, shape[0]), np.int64)
        self._n_before = np.zeros(capacity, np.int64)  # number of frames when the row was written
        self._n_frames = 0
        self._number_of: dict[int, int] = {}  # number of the newest frame, by the hash of its content

    def __getitem__(self, places: Any) -> np.ndarray:
        stacks: np.ndarray = self._frames[self._numbers[places] % len(self._frames)]
        return stacks

    def __setitem__(self, places: np.ndarray, stacks: np.ndarray) -> None:
        for place, stack in zip(places.tolist(), stacks, strict=True):
            self._n_before[place] = self._n_frames
            self._numbers[place] = [self._number(frame) for frame in stack]

    def first_whole(self, first: int, n_rows: int) -> int:
        """Return the first row not before ``first`` that surely has all its frames, or ``n_rows`` if there is none."""
        overwritten = self._n_frames - len(self._frames)
        while first < n_rows and self._n_before[first % len(self._n_before)] - self._window < overwritten:
            first += 1
        return first

    def _number(self, frame: np.ndarray) -> int:
        key = hash(frame.tobytes())
        known = self._number_of.get(key)
        if known is not None and known >= self._n_frames - WINDOW and np.array_equal(self._frame(known), frame):
            return known
        number = self._n_frames
        self._n_frames += 1
        self._frame(number)[...] = frame
        self._number_of[key] = number
        if len(self._number_of) > 2 * WINDOW:
            oldest = self._n_frames - WINDOW
            self._number_of = {key: number for key, number in self._number_of.items() if number >= oldest}
        return number

    def _frame(self, number: int) -> np.ndarray:
        frame: np.ndarray = self._frames[number % len(self._frames)]
        return frame

    def state(self, n_rows: int) -> dict[str, np.ndarray]:
        """Return the arrays of the first ``n_rows`` rows by name, for a checkpoint."""
        return {
            "frames": self._frames[: self._n_frames],
            "numbers": self._numbers[:n_rows],
            "n_before": self._n_before[:n_rows],
            "n_frames": np.array([self._n_frames]),
        }

    def restore(self, arrays: Mapping[str, np.ndarray], n_rows: int) -> None:
        """Restore ``n_rows`` rows from the arrays that ``state`` returned.

        Raises KeyError or ValueError for arrays that do not fit.
        """
        n_frames = np.zeros(1, np.int64)
        copy_into(n_frames, arrays, "n_frames")
        self._n_frames = n_frames.item()
        copy_into(self._frames[: self._n_frames], arrays, "frames")
        copy_into(self._numbers[:n_rows], arrays, "numbers")
        copy_into(self._n_before[:n_rows], arrays, "n_before")
        newest = range(max(0, self._n_frames - WINDOW), self._n_frames)
        self._number_of = {hash(self._frame(number).tobytes()): number for number in newest}


NOWHERE = -1
_IMAGE_AXES = 3
_NO_ROWS = np.zeros(0, np.int64)
_TRACKED = "open", "unlinked"
"""Names of the arrays of the rows that lack an action or a successor, by agent_id."""


class StepStore:
    """A store of at most ``capacity`` rows, each a step of an agent of one behavior. New rows overwrite the oldest.

    With ``grows``, ``capacity`` is enlarged instead, so that only ``clear`` removes rows. With ``share_frames``, equal
    frames share memory. The arrays are ``[capacity, …]``. ``obs``: a tree; ``columns``: the policy's outputs by name;
    ``reward``: float32; ``terminated``, ``acted``: bool; ``successor``: int64, the agent's next row or ``NOWHERE``.
    """

    def __init__(
        self,
        observation: Tree,
        columns: Mapping[str, ArraySpec],
        capacity: int,
        *,
        share_frames: bool = False,
        grows: bool = False,
    ) -> None:
        if grows and share_frames:
            raise UsageError("a store either grows or shares frames, not both.")
        by_path = zip(paths(observation, "obs"), leaves(observation), strict=True)
        objects = [path for path, leaf in by_path if leaf.is_object]
        if objects:
            raise UsageError(
                f"texts and other objects cannot be trained on: {', '.join(objects)}. Make numbers of them in a "
                "wrapper of the environment, as docs/writing-an-environment.md#encoders shows."
            )
        self.capacity = capacity
        self._grows = grows
        self.n_rows = 0
        """Number of rows ever added, which is also the row number of the next row."""
        self.n_acted = 0
        """Number of rows ever closed by an action and its reward."""
        self.obs: Tree = _with_stacks(observation, capacity) if share_frames else zeros(observation, capacity)
        self._stacks = [leaf for leaf in leaves(self.obs) if isinstance(leaf, FrameStacks)]
        self.columns = {name: zeros(spec, capacity) for name, spec in columns.items()}
        self.reward = np.zeros(capacity, np.float32)
        self.terminated = np.zeros(capacity, np.bool_)
        self.acted = np.zeros(capacity, np.bool_)
        self.successor = np.full(capacity, NOWHERE, np.int64)
        self._first = 0
        self._open: dict[int, int] = {}
        self._unlinked: dict[int, int] = {}

    def __len__(self) -> int:
        return self.n_rows - self.first

    @property
    def first(self) -> int:
        """Row number of the oldest row that is still in the store."""
        return max(self._first, self.n_rows - self.capacity)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Return the array indices of the rows with these row numbers."""
        places: np.ndarray = rows % self.capacity
        return places

    def add(self, info: StepInfo, behavior: str) -> np.ndarray:
        """Add a worker's step of ``behavior``. Return the int64 numbers of rows that get their action and reward."""
        now = info.current.get(behavior)
        before = None if info.previous is None else info.previous.get(behavior)
        taken = None if info.actions is None else info.actions.get(behavior)
        closed = _NO_ROWS
        if info.lost is not None:
            self._abandon(info.lost.agents({*self._open, *self._unlinked}))
        if before is not None and taken is not None and now is not None:
            closed = self._close(before, taken.outputs, now)
        elif before is not None:
            self._abandon(before.agent_id.tolist())
        if now is not None:
            self._open_rows(now)
        return closed

    def abandon_all(self) -> None:
        """Stop tracking rows that lack an action or a successor. Call this when the environments are reset."""
        self._open.clear()
        self._unlinked.clear()

    def clear(self) -> None:
        """Remove all rows. Observations that still wait for an action are added again as new rows."""
        kept = {agent_id: row for agent_id, row in self._open.items() if row >= self.first}
        obs = take_rows(self.obs, self.places(np.array(list(kept.values()), np.int64)))
        self._first = self.n_rows
        self._unlinked.clear()
        self._open = dict(zip(kept, self._append(obs, len(kept)).tolist(), strict=True))

    def _abandon(self, agent_ids: list[int]) -> None:
        for agent_id in agent_ids:
            self._open.pop(agent_id, None)
            self._unlinked.pop(agent_id, None)

    def _close(self, before: AgentSteps, outputs: Mapping[str, np.ndarray], now: AgentSteps) -> np.ndarray:
        """Write actions and rewards into the open rows of the agents that acted. Return the numbers of these rows."""
        agent_ids = before.agent_id[before.acting_rows].tolist()
        row_of = {agent_id: row for row, agent_id in enumerate(now.agent_id.tolist())}
        closing = [
            (index, row_of[agent_id], self._open.pop(agent_id))
            for index, agent_id in enumerate(agent_ids)
            if agent_id in row_of and self._open.get(agent_id, NOWHERE) >= self.first
        ]
        self._abandon([agent_id for agent_id in agent_ids if agent_id in self._open])
        self._credit_late_rewards(before, now, row_of)
        if not closing:
            return _NO_ROWS
        acted, came, rows = np.array(closing, np.int64).T
        places = self.places(rows)
        for name, column in self.columns.items():
            column[places] = outputs[name][acted]
        self.reward[places] = now.reward[came]
        self.terminated[places] = now.terminated[came]
        self.acted[places] = True
        self.n_acted += len(rows)
        self._link(now, came, rows)
        return rows  # type: ignore[no-any-return]

    def _credit_late_rewards(self, before: AgentSteps, now: AgentSteps, row_of: Mapping[int, int]) -> None:
        """Credit the rewards and terminations of agents that did not act to the rows of their last actions."""
        agent_ids = [] if before.acting is None else before.agent_id[~before.acting].tolist()
        waiting = [
            (row_of[agent_id], self._unlinked.pop(agent_id))
            for agent_id in agent_ids
            if agent_id in row_of and self._unlinked.get(agent_id, NOWHERE) >= self.first
        ]
        if waiting:
            came, rows = np.array(waiting, np.int64).T
            places = self.places(rows)
            self.reward[places] += now.reward[came]
            self.terminated[places] |= now.terminated[came]
            self._link(now, came, rows)

    def _link(self, now: AgentSteps, came: np.ndarray, rows: np.ndarray) -> None:
        """Link rows of truncated episodes to their final observations. Rows of running episodes are linked later."""
        ended = now.ended[came]
        for agent_id, row in zip(now.agent_id[came[~ended]].tolist(), rows[~ended].tolist(), strict=True):
            self._unlinked[agent_id] = row
        is_cut = ended & ~now.terminated[came]
        if is_cut.any():
            place_in_final = np.cumsum(now.ended)[came[is_cut]] - 1
            last_rows = self._append(take_rows(now.final_obs, place_in_final), int(is_cut.sum()))
            self.successor[self.places(rows[is_cut])] = last_rows

    def _open_rows(self, now: AgentSteps) -> None:
        acting = now.acting_rows
        rows = self._append(now.obs if now.acting is None else take_rows(now.obs, acting), len(acting))
        for agent_id, row in zip(now.agent_id[acting].tolist(), rows.tolist(), strict=True):
            self._open[agent_id] = row
            before = self._unlinked.pop(agent_id, NOWHERE)
            if before >= self.first:
                self.successor[before % self.capacity] = row

    def _append(self, obs: Tree, n: int) -> np.ndarray:
        """Add ``n`` observations as rows without actions, and return the row numbers. May enlarge the store."""
        if self._grows and len(self) + n > self.capacity:
            self._grow(max(2 * self.capacity, len(self) + n))
        rows = np.arange(self.n_rows, self.n_rows + n)
        places = self.places(rows)
        for into, values in zip(leaves(self.obs), leaves_like(self.obs, obs), strict=True):
            into[places] = as_array(values)
        self.acted[places] = False
        self.terminated[places] = False
        self.successor[places] = NOWHERE
        self.n_rows += n
        for stacks in self._stacks:
            self._first = stacks.first_whole(self.first, self.n_rows)
        return rows

    def _grow(self, capacity: int) -> None:
        """Enlarge the arrays to ``capacity`` rows, and move the rows to their new indices."""
        kept = np.arange(self.first, self.n_rows)
        before, after = self.places(kept), kept % capacity

        def larger(column: np.ndarray) -> np.ndarray:
            copied = np.zeros((capacity, *column.shape[1:]), column.dtype)
            copied[after] = column[before]
            return copied

        self.obs = map_tree(larger, self.obs)
        self.columns = {name: larger(column) for name, column in self.columns.items()}
        self.reward, self.terminated = larger(self.reward), larger(self.terminated)
        self.acted, self.successor = larger(self.acted), larger(self.successor)
        self.capacity = capacity

    def state(self) -> dict[str, Any]:
        """Return the arrays and counts by name, for a checkpoint. The arrays may share memory with the store."""
        n = min(self.n_rows, self.capacity)
        arrays: dict[str, np.ndarray] = {}
        for index, leaf in enumerate(leaves(self.obs)):
            own = leaf.state(n) if isinstance(leaf, FrameStacks) else {"rows": leaf[:n]}
            arrays |= named(f"obs.{index}", own)
        arrays |= {f"column.{name}": column[:n] for name, column in self.columns.items()}
        arrays |= {name: getattr(self, name)[:n] for name in ("reward", "terminated", "acted", "successor")}
        for name, rows_of in zip(_TRACKED, (self._open, self._unlinked), strict=True):
            arrays[name] = np.array(list(rows_of.items()), np.int64).reshape(-1, 2)
        arrays["counts"] = np.array([self.n_rows, self.n_acted, self._first, self.capacity])
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore what ``state`` returned. Call ``abandon_all`` unless the episodes go on.

        Raises KeyError or ValueError for arrays that do not fit.
        """
        n_rows, n_acted, first, capacity = arrays["counts"].tolist()
        if self._grows and capacity != self.capacity:
            self._grow(capacity)
        n = min(n_rows, self.capacity)
        for index, leaf in enumerate(leaves(self.obs)):
            own = of_part(f"obs.{index}", arrays)
            if isinstance(leaf, FrameStacks):
                leaf.restore(own, n)
            else:
                copy_into(leaf[:n], own, "rows")
        for name, column in self.columns.items():
            copy_into(column[:n], arrays, f"column.{name}")
        for name in ("reward", "terminated", "acted", "successor"):
            copy_into(getattr(self, name)[:n], arrays, name)
        self.n_rows, self.n_acted, self._first = n_rows, n_acted, first
        self._open, self._unlinked = (dict(arrays[name].tolist()) if name in arrays else {} for name in _TRACKED)


def _with_stacks(observation: Tree, capacity: int) -> Tree:
    if all(len(spec.shape) < _IMAGE_AXES for spec in leaves(observation)):
        raise UsageError("share_frames=true is for stacks of images, uint8[k, height, width], which are missing here.")

    def rows_of(spec: ArraySpec) -> Any:
        is_stack = len(spec.shape) >= _IMAGE_AXES
        return FrameStacks(spec.shape, spec.dtype, capacity) if is_stack else zeros(spec, capacity)

    return map_tree(rows_of, observation)
