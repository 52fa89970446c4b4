"""The actions of the episodes that play in one worker, from which another worker can make these episodes again.

::

    all workers step ── Rounds.held ── now and then ──┐
    a step is sent ── keep ──▶ bytes of all its rows ◀─┘ (a list, for several agents, trees and objects)
    rows are delivered ── ended, begin ──▶ the number of the step at which each episode has begun
    the worker has failed ── actions_of(row) ──▶ Begin.actions

A step of all workers costs one append. Steps before the beginnings of all episodes are forgotten now and then.
"""

from __future__ import annotations

import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AgentSteps, Begin, Call, CommandName
from envmanager.data.trees import Tree, as_numpy, concat_rows, is_foreign, leaves, snapshot, take_rows

_TIDY_EVERY = 64
"""Number of steps, and of ends, after which what is not needed any more is forgotten."""

Actions = Mapping[str, Tree]


class Rounds:
    """The actions of steps of all environments of a manager, which the logs of its workers take over now and then."""

    def __init__(self) -> None:
        self.logs: list[EpisodeLog] = []
        """The logs, in the order of the environments."""
        self.held: list[bytes] = []
        """The actions of all environments in each step that the logs have not taken over."""

    def share(self) -> None:
        """Let each log take over its part of what is held."""
        if not self.held:
            return
        rounds, start = np.frombuffer(b"".join(self.held), np.uint8).reshape(len(self.held), -1), 0
        self.held.clear()
        for log in self.logs:
            stop = start + log.size
            log.packed += rounds[:, start:stop].tobytes()
            start = stop


class EpisodeLog:
    """The actions of one worker since the beginnings of its episodes, in the order of its steps.

    A *step* is a number: that of the steps sent before since the log was made.
    """

    __slots__ = (
        "_behavior", "_ended", "_ended_at", "_first", "_listed", "_n_envs", "_partial", "_rounds", "_spec", "before",
        "calls", "calls_before", "held", "numbers", "packed", "size", "starts", "unkept", "unsure",
    )  # fmt: skip

    def __init__(self, n_envs: int, specs: Mapping[str, BehaviorSpec], rounds: Rounds, *, is_single: bool) -> None:
        """``is_single``: whether each environment has one agent. ``rounds``: holds steps that the log has not, too."""
        self.starts = [0] * n_envs
        """Step at which each environment's episode has begun."""
        self.numbers = [0] * n_envs
        """Number of episodes that ended in each environment before, as ``ended`` told."""
        self.before: dict[int, Actions] = {}
        """Actions of the present episodes from before the log was made, by row."""
        self.calls_before: dict[int, list[Call]] = {}
        """Calls amid the present episodes from before the log was made, and those of their beginnings, by row."""
        self.unkept: dict[int, int] = {}
        """Environments, by row, whose episode is not kept, with the step after which it has begun."""
        self.unsure: dict[int, set[str]] = {}
        """Attributes, by row, whose values are not known since ``set_attr`` has not succeeded. No episode is kept."""
        self.calls: list[tuple[int, int, Call, bool]] = []
        """Calls amid the episodes: the step before which each came, the row, and whether the episode's Begin has it."""
        self.held: list[dict[str, Any]] = [{} for _ in range(n_envs)]
        """Values of the attributes that were set in each environment before its episode began, by name."""
        self._behavior, spec = next(iter(specs.items()), ("default", None))
        only = None if spec is None else spec.action
        is_packed = is_single and len(specs) == 1 and isinstance(only, ArraySpec) and only.dtype.kind in "biufc"
        self._spec: Any = only if is_packed else None
        self._n_envs, self._first, self._rounds = n_envs, 0, rounds
        self.size = 0 if self._spec is None else n_envs * self._spec.dtype.itemsize * int(np.prod(self._spec.shape))
        """Number of bytes of the actions of all environments, if they are arrays of a single agent each; else 0."""
        self.packed, self._listed = bytearray(), list[tuple[Actions, Mapping[str, np.ndarray]]]()
        self._partial: dict[int, np.ndarray] = {}
        """Rows of the steps that not all environments took, by step."""
        self._ended, self._ended_at = bytearray(), array.array("q")
        """Whether each environment has ended its episode, a row for each delivery that tells of ends; and its step."""

    @property
    def n_steps(self) -> int:
        """Number of steps sent since the log was made, the one in flight too."""
        if not self.size:
            return self._first + len(self._listed)
        return self._first + len(self.packed) // self.size + len(self._rounds.held)

    def keep(self, actions: Actions, rows: Mapping[str, np.ndarray]) -> None:
        """Keep the actions of a step. ``rows``: by behavior, the row of the environment of each action, ascending.

        They may be left out if the actions are those of all environments and ``size`` is not 0.
        """
        if not self.size:
            self._listed.append((snapshot(dict(actions)), rows))
            return
        self._rounds.share()
        own, given = rows.get(self._behavior, ()), actions.get(self._behavior, ())
        given = np.asarray(as_numpy(given) if is_foreign(given) else given, self._spec.dtype)
        if len(given) == self._n_envs:
            self.packed += given.tobytes()
            return
        all_rows = np.zeros((self._n_envs, *self._spec.shape), self._spec.dtype)
        if len(own):
            all_rows[own] = given
        self._partial[self.n_steps] = np.asarray(own, np.int64)
        self.packed += all_rows.tobytes()

    def note(self, row: int, calls: Iterable[Call], *, is_of_begin: bool = False) -> None:
        """Keep what was called in an environment after the step that was sent last, or what its episode began with."""
        self.calls += [(self.n_steps, row, call, is_of_begin) for call in calls]

    def settle(self, over: Collection[int] = ()) -> None:
        """Forget the calls of episodes that are over, as those in the rows ``over`` are, or not kept.

        What they have set holds when the next ones begin. A call after the last step may be of the next one.
        """
        calls, self.calls = self.calls, []
        for each in calls:
            step, row, call, _ = each
            is_kept = row not in self.unkept or step >= self.n_steps
            if step >= self.starts[row] and is_kept and row not in over:
                self.calls.append(each)
            elif call.command == "set_attr" and isinstance(call.name, str):
                self.held[row][call.name] = call.args[0]

    def ended(self, steps: AgentSteps, rows: np.ndarray | None) -> None:
        """Note that with these steps, which are delivered, episodes have ended, and others have begun at once.

        ``rows``: the rows of their environments, None for all in order.
        """
        ended = steps.terminated | steps.truncated
        if rows is not None:
            ended, own = np.zeros(self._n_envs, np.bool_), ended
            ended[rows[own]] = True
        self._ended += ended.tobytes()
        self._ended_at.append(self.n_steps)
        if len(self._ended_at) >= _TIDY_EVERY:
            self.tidy()

    def playing(self) -> list[int]:
        """Return the rows of the environments whose episodes are kept."""
        return [row for row in range(self._n_envs) if row not in self.unkept]

    def begin(self, row: int) -> None:
        """Note that an episode has begun with the last delivered step, if ``ended`` does not tell it."""
        self.starts[row] = self.n_steps
        self._is_new(row)

    def leave_out(self, rows: Iterable[int], *, is_called: bool = False) -> None:
        """Keep neither the present episodes in these rows nor, if ``is_called``, those begun with the last step."""
        self.unkept.update(dict.fromkeys(rows, self.n_steps - (not is_called)))
        self.settle()

    def _is_new(self, row: int) -> None:
        self.before.pop(row, None)
        self.calls_before.pop(row, None)
        if row in self.unkept and self.unkept[row] < self.starts[row] and not self.unsure.get(row):
            del self.unkept[row]

    def tidy(self) -> None:
        """Find the beginnings of the episodes that ``ended`` has told of, and forget the steps before all of them."""
        self._rounds.share()
        if self._ended_at:
            ended = np.frombuffer(self._ended, np.bool_).reshape(-1, self._n_envs)
            counts, newest = ended.sum(0).tolist(), (len(ended) - 1 - ended[::-1].argmax(0)).tolist()
            for row, count in enumerate(counts):
                if count:
                    self.starts[row], self.numbers[row] = self._ended_at[newest[row]], self.numbers[row] + count
                    self._is_new(row)
            del ended  # which holds the buffer
            del self._ended[:], self._ended_at[:]
        if self.calls:
            self.settle()
        first = min([self.starts[row] for row in self.playing()], default=self.n_steps)
        if first >= self._first + _TIDY_EVERY:
            n_steps, self._first = first - self._first, first
            del self.packed[: n_steps * self.size], self._listed[:n_steps]
            self._partial = {step: rows for step, rows in self._partial.items() if step >= first}

    def actions_of(self, row: int, stop: int) -> Actions | None:
        """Return the actions of the episode in an environment before the step ``stop``, by behavior; None without."""
        return joined_actions([self.before.get(row), self._since_begin(row, stop)])

    def length(self, row: int) -> int:
        """Return the number of steps of the present episode in an environment."""
        own = self.before.get(row, {})
        return self.n_steps - self.starts[row] + max((len(leaves(tree)[0]) for tree in own.values()), default=0)

    def _since_begin(self, row: int, stop: int) -> Actions | None:
        start = self.starts[row]
        if start >= stop:
            return None
        if not self.size:
            own = []
            for actions, rows in self._listed[start - self._first : stop - self._first]:
                places = {name: np.flatnonzero(own_rows == row) for name, own_rows in rows.items()}
                own.append({name: take_rows(tree, places[name]) for name, tree in actions.items() if len(places[name])})
            return joined_actions(own)
        took = self._counts(row, stop) > 0
        data = self.packed[(start - self._first) * self.size : (stop - self._first) * self.size]
        shape = (stop - start, self._n_envs, *self._spec.shape)
        taken: np.ndarray = np.frombuffer(data, self._spec.dtype).reshape(shape)[:, row]
        return {self._behavior: taken[took]} if took.any() else None

    def calls_of(self, row: int, stop: int, begin: Begin) -> list[Call]:
        """Return what was called amid the episode in an environment up to the step ``stop``, first what ``begin`` has.

        Attributes that were set amid it have their values of before its reset first.
        """
        own = [
            (step, call) for step, each, call, is_begun in self.calls if each == row and step <= stop and not is_begun
        ]
        first = self.calls_before.get(row, begin.calls)
        if not own and not first:
            return []
        n_taken = np.cumsum([n_actions(begin.actions, self.before.get(row)), *self._counts(row, stop)])
        start = self.starts[row]
        calls = [*first, *(call._replace(after=int(n_taken[step - start])) for step, call in own)]
        return with_values_before(calls, self.held[row])

    def _counts(self, row: int, stop: int) -> np.ndarray:
        """Return how many actions the episode in an environment has taken in each of its steps before ``stop``."""
        steps = range(self.starts[row], stop)
        if self.size:
            counts = np.ones(len(steps), np.int64)
            for step, rows in self._partial.items():
                if step in steps and row not in rows:
                    counts[step - steps.start] = 0
            return counts
        taken = [self._listed[step - self._first][1].values() for step in steps]
        return np.array([sum(np.count_nonzero(rows == row) for rows in own) for own in taken], np.int64)

    def stop(self, row: int, *, is_sent: bool) -> int:
        """Return the step before which an environment stands. ``is_sent``: whether the last step is not delivered."""
        takes_it = is_sent and self.n_steps > self._first and any(row in rows for rows in self.last()[1].values())
        return self.n_steps - takes_it

    def is_called_after(self, row: int) -> bool:
        """Return whether a call in an environment came after the step that was sent last."""
        return any(each == row and step == self.n_steps for step, each, *_ in self.calls)

    def last(self) -> tuple[Actions, Mapping[str, np.ndarray]]:
        """Return the actions of the step that was sent last, and the rows of their environments."""
        if not self.size:
            return self._listed[-1]
        self._rounds.share()
        rows = self._partial.get(self.n_steps - 1, np.arange(self._n_envs))
        taken = np.frombuffer(self.packed[-self.size :], self._spec.dtype)
        taken = taken.reshape((self._n_envs, *self._spec.shape))
        return {self._behavior: taken[rows]}, {self._behavior: rows}


def joined_actions(parts: Sequence[Actions | None]) -> Actions | None:
    """Return actions one after the other, by behavior; None if there are none."""
    by_name: dict[str, list[Tree]] = {}
    for part in parts:
        for name, tree in (part or {}).items():
            by_name.setdefault(name, []).append(tree)
    return {name: concat_rows(trees) for name, trees in by_name.items()} or None


def calls_in(name: str, payload: Any) -> list[tuple[int, Call]]:
    """Return what a command "call" or "set_attr" with ``payload`` does, by the row of each environment it is for."""
    if name == CommandName.SET_ATTR:
        attribute, values, rows = payload
        return [(row, Call(0, str(name), attribute, (value,))) for row, value in zip(rows, values, strict=True)]
    method, args, rows, kwargs = payload
    return [(row, Call(0, str(name), method, args, kwargs)) for row in rows]


def with_values_before(calls: Sequence[Call], held: Mapping[str, Any]) -> list[Call]:
    """Return the calls amid an episode, behind others by which attributes have the values of before its reset.

    ``held``: these values by name, of attributes that were set before.
    """
    known = {call.name for call in calls if call.after < 0}
    names = dict.fromkeys(str(call.name) for call in calls if call.command != "call" and call.name not in known)
    before = [
        Call(-1, "set_attr", name, (held[name],)) if name in held else Call(-1, "unset_attr", name) for name in names
    ]
    return [*before, *calls]


def n_actions(*parts: Actions | None) -> int:
    """Return the number of actions of all agents in all parts."""
    return sum(len(leaves(tree)[0]) for part in parts for tree in (part or {}).values())
