"""The seats of a manager, one for each environment: which episode plays there, and which comes next.

::

             assign           tell             begin                 end
    RESTS ──────────▶ COMING ──────▶ SENT ──────────────▶ PLAYS ──────────────▶ RESTS
      ▲  ◀────────── withdraw         ▲  tell          ▲   │  ▲                 (COMING, if another was assigned;
      │                               └─────── CUT ◀───┘───┘  └──── begins      PLAYS, if its worker was told of it)
      └── vacate: the worker was lost          assign at once

A seat is what the trainer knows from the rows that were delivered to it. It RESTS until an episode is assigned to it.
Its worker is told with the worker's next step, and the row that is the first of the episode lets it play. While it
plays, another episode can be laid ready, which begins at the end; or take its place at once, which cuts it.

What holds at all times, and is tested at random: an environment takes actions if and only if its seat PLAYS. A seat
that RESTS or PLAYS without one laid ready has no ``next``; one that is COMING or CUT has one that its worker does not
know. The sums are those of the seats. Nothing else in the kernel knows which episode plays where.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import Begin
from envmanager.observe.episodes import FinishedEpisode


class SeatState(enum.Enum):
    """What happens in an environment, as far as the trainer knows."""

    RESTS = enum.auto()
    COMING = enum.auto()
    """An episode is to begin, of which the worker is not told yet."""
    SENT = enum.auto()
    """The next row is the first of an episode. If another played before, it is cut."""
    PLAYS = enum.auto()
    CUT = enum.auto()
    """Another episode is to begin at once, of which the worker is not told yet. No action is taken until then."""


_RESTS, _COMING, _SENT, _PLAYS, _CUT = SeatState


@attrs.define(eq=False)
class Drawn:
    """A task that was drawn from a source, or given."""

    index: int
    task: Any
    actions: Mapping[str, Any] | None = None
    """Those of the task, checked, as ``Begin.actions``."""
    attempts: int = 0
    charges: list[Exception] = attrs.field(factory=list)
    """Errors of the attempts whose loss is charged to it."""


@attrs.define(eq=False)
class Seat:
    """One environment. Only ``Seats`` changes it."""

    env_id: int
    row: int
    worker_id: int
    state: SeatState = SeatState.RESTS
    playing: Drawn | None = None
    """Task of the episode that plays; None if it has none, because a reset or the environment itself began it."""
    next: Drawn | None = None
    is_laid: bool = False
    """Whether the worker begins ``next`` by itself when the present episode has ended."""
    is_new: bool = False
    """Whether no episode has begun in it since its worker was replaced."""
    told: Begin | None = None
    """What its worker was told last to begin here."""
    begun: Begin | None = None
    """What its worker was told of the episode that plays."""
    noted: Begin | None = None
    """The last of these whose calls were taken note of."""
    ended: list[FinishedEpisode] = attrs.field(factory=list)
    """Episodes of agents that ended in the episode that it plays."""

    @property
    def tasks(self) -> list[Drawn]:
        """The tasks that play or come here."""
        return [drawn for drawn in (self.playing, self.next) if drawn is not None]


class Seats:
    """The seats of all environments, by env_id, and their sums. The methods are the moves of the drawing above."""

    def __init__(self, blocks: Sequence[Sequence[int]], *, plays: bool = False) -> None:
        """``blocks``: the env_ids of each worker. ``plays``: whether all play, for ever, without tasks."""
        self.of_worker = [
            [Seat(env_id, row, worker_id) for row, env_id in enumerate(block)] for worker_id, block in enumerate(blocks)
        ]
        self.all = sorted((seat for seats in self.of_worker for seat in seats), key=lambda seat: seat.env_id)
        self.n_envs = n_envs = len(self.all)
        self.acts = np.zeros(n_envs, np.bool_)
        """Whether each environment takes an action, or has taken one and the result was not delivered: bool[n_envs]."""
        self.first = np.zeros(n_envs, np.bool_)
        """Whether the next row of each environment is no step, but the first of an episode: bool[n_envs]."""
        self.index = np.full(n_envs, -1, np.int64)
        """Index of the task that plays in each environment, -1 without."""
        self.n_acting_in, self.n_first_in = [0] * len(blocks), [0] * len(blocks)
        """Sums of ``acts`` and ``first`` by worker_id."""
        self.n_acting = self.n_first = self.n_active = 0
        """Sums of ``acts`` and ``first``, and number of seats that do not rest."""
        self.untold: dict[int, list[Seat]] = {}
        """By worker_id, the seats that have got an episode since their worker was last told what to begin."""
        self._tasks_in: list[Mapping[int, int] | None] = [None] * len(blocks)
        for seat in self.all if plays else ():
            self._move(seat, _PLAYS)

    def assign(self, seat: Seat, drawn: Drawn, *, at_once: bool = False) -> None:
        """Let an episode come. ``at_once``: if another plays, it is cut; else the new one begins at its end."""
        if seat.next is None:
            self.untold.setdefault(seat.worker_id, []).append(seat)
        seat.next = drawn
        if seat.state is _RESTS:
            self._move(seat, _COMING)
        elif seat.state is _PLAYS and at_once:
            self._move(seat, _CUT)

    def withdraw(self, seat: Seat) -> None:
        """Take back ``next``, of which the worker does not know. What plays goes on."""
        self._drop_next(seat)
        self._move(seat, _RESTS if seat.state is _COMING else _PLAYS)

    def tell(self, worker_id: int) -> list[tuple[Seat, Drawn, bool]]:
        """Note that a worker is told what comes. Return the seats with their tasks, and whether these begin at once."""
        told = []
        for seat in self.untold.pop(worker_id, ()):
            assert seat.next is not None
            begins = seat.state is not _PLAYS
            if begins:
                seat.next.attempts += 1
                self._move(seat, _SENT)
            else:
                seat.is_laid = True
            told.append((seat, seat.next, begins))
        return told

    def send(self, seats: Sequence[Seat]) -> None:
        """Note that a reset begins an episode without a task in each of ``seats``, which rest."""
        for seat in seats:
            self._move(seat, _SENT)

    def place(self, seat: Seat, to: SeatState, **fields: Any) -> None:
        """Put a new seat where a seat of another manager was, whose state is restored."""
        for name, value in fields.items():
            setattr(seat, name, value)
        if seat.next is not None and not seat.is_laid and to is not _SENT:
            self.untold.setdefault(seat.worker_id, []).append(seat)
        self._move(seat, to)

    def begin(self, seat: Seat) -> Drawn | None:
        """Note that the first row was delivered. Return the task of the episode that was cut, if any."""
        if seat.state is not _SENT:  # its first row was delivered once more
            self.set_first(seat, False)
            return None
        before, seat.playing, seat.next, seat.is_new = seat.playing, seat.next, None, False
        seat.begun = seat.told
        seat.ended.clear()
        self._move(seat, _PLAYS)
        return before

    def end(self, seat: Seat) -> bool:
        """Note that the row that ends the episode was delivered. Return whether the worker has begun the next one."""
        seat.ended.clear()
        goes_on, seat.playing = seat.is_laid, None
        if goes_on:
            assert seat.next is not None
            seat.next.attempts += 1
            seat.playing, seat.next, seat.is_laid = seat.next, None, False
            seat.begun = seat.told
        self._move(seat, _PLAYS if goes_on else _RESTS if seat.next is None else _COMING)
        return goes_on

    def vacate(self, seat: Seat) -> tuple[Drawn | None, Drawn | None, bool]:
        """Let a seat rest. Return the tasks that were playing and coming, and whether the latter was begun."""
        left = seat.playing, seat.next, seat.state is _SENT
        seat.ended.clear()
        self._drop_next(seat)
        seat.playing = None
        self._move(seat, _RESTS)
        self.set_first(seat, False)
        return left

    def set_first(self, seat: Seat, is_first: bool) -> None:
        """Set whether the next row of a seat is the first of an episode."""
        more = is_first - int(self.first[seat.env_id])
        if more:
            self.first[seat.env_id] = is_first
            self.n_first_in[seat.worker_id] += more
            self.n_first += more

    def rests_in(self, worker_id: int) -> bool:
        """Whether a worker has nothing to do: no environment that takes an action, and no episode to begin."""
        return not self.n_acting_in[worker_id] and worker_id not in self.untold

    def tasks_in(self, worker_id: int) -> Mapping[int, int]:
        """Return the index of the task that plays in each environment of a worker, by env_id. StepInfos hold it."""
        tasks = self._tasks_in[worker_id]
        if tasks is None:
            seats = self.of_worker[worker_id]
            tasks = {seat.env_id: seat.playing.index for seat in seats if seat.playing is not None}
            self._tasks_in[worker_id] = tasks
        return tasks

    def _drop_next(self, seat: Seat) -> None:
        untold = self.untold.get(seat.worker_id, [])
        if seat in untold:
            untold.remove(seat)
            if not untold:
                del self.untold[seat.worker_id]
        seat.next, seat.is_laid = None, False

    def _move(self, seat: Seat, to: SeatState) -> None:
        env_id, worker_id = seat.env_id, seat.worker_id
        self.n_active += (to is not _RESTS) - (seat.state is not _RESTS)
        more = (to is _PLAYS) - (seat.state is _PLAYS)
        self.n_acting += more
        self.n_acting_in[worker_id] += more
        if _SENT in (seat.state, to):
            self.set_first(seat, to is _SENT)
        self.acts[env_id], seat.state = to is _PLAYS, to
        self.index[env_id] = -1 if seat.playing is None else seat.playing.index
        self._tasks_in[worker_id] = None
