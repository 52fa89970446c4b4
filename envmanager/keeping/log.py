"""The actions of the episodes that play in one worker, from which another worker can make these episodes again.

::

    a step is sent ── keep ──▶ bytes of all its rows (a list, for several agents, trees and objects)
    rows are delivered ── ended, begin ──▶ the number of the step at which each episode has begun
    the worker has failed ── actions_of(row) ──▶ Begin.actions

A log costs an append for each step. Steps before the beginnings of all episodes are forgotten now and then.
"""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AgentSteps
from envmanager.data.trees import Tree, as_numpy, concat_rows, is_foreign, snapshot, take_rows

_TIDY_EVERY = 64
"""Number of steps, and of ends, after which what is not needed any more is forgotten."""

Actions = Mapping[str, Tree]


class EpisodeLog:
    """The actions of one worker since the beginnings of its episodes, in the order of its steps.

    A *step* is a number: that of the steps sent before since the log was made.
    """

    __slots__ = (
        "_behavior", "_ended", "_ended_at", "_first", "_listed", "_n_envs", "_packed", "_partial", "_size", "_spec",
        "extend", "n_packed", "numbers", "starts", "unkept",
    )  # fmt: skip

    def __init__(self, n_envs: int, specs: Mapping[str, BehaviorSpec], *, is_single: bool) -> None:
        """``is_single``: whether each environment has one agent."""
        self.starts = [0] * n_envs
        """Step at which each environment's episode has begun."""
        self.numbers = [0] * n_envs
        """Number of episodes that ended in each environment before, as ``ended`` told."""
        self.unkept: set[int] = set()
        """Environments, by row, whose episode is not kept."""
        self._behavior, spec = next(iter(specs.items()), ("default", None))
        only = None if spec is None else spec.action
        is_packed = is_single and len(specs) == 1 and isinstance(only, ArraySpec) and only.dtype.kind in "biufc"
        self._spec: Any = only if is_packed else None
        self._n_envs, self._first = n_envs, 0
        self._size = 0 if self._spec is None else n_envs * self._spec.dtype.itemsize * int(np.prod(self._spec.shape))
        self._packed, self._listed = bytearray(), list[tuple[Actions, Mapping[str, np.ndarray]]]()
        self._partial: dict[int, np.ndarray] = {}
        """Rows of the steps that not all environments took, by step."""
        self._ended, self._ended_at = bytearray(), array.array("q")
        """Whether each environment has ended its episode, a row for each delivery that tells of ends; and its step."""
        self.extend = self._packed.extend
        """Function that keeps the actions of a step of all environments, an array in the order of their rows."""
        self.n_packed = n_envs if self._size else -1
        """Number of actions for which ``extend`` may be used: those of all environments; else -1."""

    @property
    def n_steps(self) -> int:
        """Number of steps sent since the log was made, the one in flight too."""
        return self._first + (len(self._packed) // self._size if self._size else len(self._listed))

    def keep(self, actions: Actions, rows: Mapping[str, np.ndarray]) -> None:
        """Keep the actions of a step. ``rows``: by behavior, the row of the environment of each action, ascending."""
        if not self._size:
            self._listed.append((snapshot(dict(actions)), rows))
            return
        own, given = rows.get(self._behavior, ()), actions.get(self._behavior)
        all_rows = np.zeros((self._n_envs, *self._spec.shape), self._spec.dtype)
        if len(own):
            all_rows[own] = as_numpy(given) if is_foreign(given) else given
        if len(own) < self._n_envs:
            self._partial[self.n_steps] = np.asarray(own, np.int64)
        self.extend(all_rows.data)

    def ended(self, steps: AgentSteps, rows: np.ndarray | None) -> None:
        """Note that with these steps, which are delivered, episodes have ended, and others have begun at once.

        ``rows``: the rows of their environments, None for all in order.
        """
        ended = steps.terminated | steps.truncated
        if rows is not None:
            ended, own = np.zeros(self._n_envs, np.bool_), ended
            ended[rows[own]] = True
        self._ended.extend(ended.data)
        self._ended_at.append(self.n_steps)
        if len(self._ended_at) >= _TIDY_EVERY:
            self.tidy()

    def playing(self) -> list[int]:
        """Return the rows of the environments whose episodes are kept."""
        return [row for row in range(self._n_envs) if row not in self.unkept]

    def begin(self, row: int) -> None:
        """Note that an episode has begun with the last delivered step, if ``ended`` does not tell it."""
        self.unkept.discard(row)
        self.starts[row] = self.n_steps

    def tidy(self) -> None:
        """Find the beginnings of the episodes that ``ended`` has told of, and forget the steps before all of them."""
        if self._ended_at:
            ended = np.frombuffer(self._ended, np.bool_).reshape(-1, self._n_envs)
            counts, newest = ended.sum(0).tolist(), (len(ended) - 1 - ended[::-1].argmax(0)).tolist()
            for row, count in enumerate(counts):
                if count:
                    self.starts[row], self.numbers[row] = self._ended_at[newest[row]], self.numbers[row] + count
                    self.unkept.discard(row)
            del ended  # which holds the buffer
            del self._ended[:], self._ended_at[:]
        first = min([self.starts[row] for row in self.playing()], default=self.n_steps)
        if first >= self._first + _TIDY_EVERY:
            n_steps, self._first = first - self._first, first
            del self._packed[: n_steps * self._size], self._listed[:n_steps]
            self._partial = {step: rows for step, rows in self._partial.items() if step >= first}

    def actions_of(self, row: int, stop: int) -> Actions | None:
        """Return the actions of the episode in an environment before the step ``stop``, by behavior; None without."""
        start = self.starts[row]
        if start >= stop:
            return None
        if not self._size:
            own = []
            for actions, rows in self._listed[start - self._first : stop - self._first]:
                places = {name: np.flatnonzero(own_rows == row) for name, own_rows in rows.items()}
                own.append({name: take_rows(tree, places[name]) for name, tree in actions.items() if len(places[name])})
            return joined_actions(own)
        data = self._packed[(start - self._first) * self._size : (stop - self._first) * self._size]
        shape = (stop - start, self._n_envs, *self._spec.shape)
        taken: np.ndarray = np.frombuffer(data, self._spec.dtype).reshape(shape)[:, row]
        took = [step not in self._partial or row in self._partial[step] for step in range(start, stop)]
        return {self._behavior: taken[took] if self._partial else taken.copy()} if any(took) else None

    def last(self) -> tuple[Actions, Mapping[str, np.ndarray]]:
        """Return the actions of the step that was sent last, and the rows of their environments."""
        if not self._size:
            return self._listed[-1]
        rows = self._partial.get(self.n_steps - 1, np.arange(self._n_envs))
        taken = np.frombuffer(self._packed[-self._size :], self._spec.dtype)
        taken = taken.reshape((self._n_envs, *self._spec.shape))
        return {self._behavior: taken[rows]}, {self._behavior: rows}


def joined_actions(parts: Sequence[Actions | None]) -> Actions | None:
    """Return actions one after the other, by behavior; None if there are none."""
    by_name: dict[str, list[Tree]] = {}
    for part in parts:
        for name, tree in (part or {}).items():
            by_name.setdefault(name, []).append(tree)
    return {name: concat_rows(trees) for name, trees in by_name.items()} or None
