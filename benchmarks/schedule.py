"""Rounds: the order of the turns, and their results.

The rule: in every round of a cell (one workload with one number of environments) the bare environment runs first and
last and the contenders between in random order. So a machine that gets slower or faster favours no contender.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import attrs

from benchmarks.launcher import NotMeasured
from benchmarks.protocol import Job, Measured
from benchmarks.workloads import ALL, BARE


@attrs.frozen
class Cell:
    """One workload with one number of environments, and its contenders."""

    workload: str
    n_envs: int
    contenders: tuple[str, ...]


@attrs.frozen
class Turn:
    """One turn: a contender's result in one round."""

    workload: str
    n_envs: int
    round: int
    contender: str
    measured: Measured


@attrs.frozen
class LeftOut:
    """The reason why a contender has no (further) results in a cell; ``kind`` is the kind of NotMeasured."""

    workload: str
    n_envs: int
    contender: str
    kind: str
    reason: str
    details: str = ""


@attrs.frozen
class Pace:
    """Number of rounds, and length of the turns."""

    rounds: int = 5
    seconds: float = 2.0
    warm_up_s: float = 0.3
    limit_s: float = 120.0
    """Seconds that a turn may take in addition, to start and to end."""


@attrs.define
class Results:
    """All results so far."""

    turns: list[Turn] = attrs.field(factory=list)
    left_out: list[LeftOut] = attrs.field(factory=list)

    def of(self, cell: Cell) -> list[Turn]:
        """Return the turns of one cell."""
        return [turn for turn in self.turns if (turn.workload, turn.n_envs) == (cell.workload, cell.n_envs)]

    def has_left_out(self, cell: Cell, contender: str) -> bool:
        """Return whether a contender was left out of a cell."""
        gone = ((out.workload, out.n_envs, out.contender) for out in self.left_out)
        return (cell.workload, cell.n_envs, contender) in gone


def order_of_round(contenders: Sequence[str], chance: random.Random) -> list[str]:
    """Return the order of a round: the bare environment first and last, the others shuffled between."""
    others = [contender for contender in contenders if contender != BARE]
    chance.shuffle(others)
    return [BARE, *others, BARE]


def run_cell(
    cell: Cell, pace: Pace, results: Results, *, run: Callable[[Job], Measured], chance: random.Random
) -> Iterator[Turn | LeftOut]:
    """Run all turns of a cell. Add each result to ``results`` and yield it."""
    shows_start = ALL[cell.workload].shows == "start_s"
    seconds, warm_up_s = (0.0, 0.0) if shows_start else (pace.seconds, pace.warm_up_s)
    for number in range(pace.rounds):
        for contender in order_of_round(cell.contenders, chance):
            if results.has_left_out(cell, contender):
                continue
            limit_s = pace.limit_s + warm_up_s + seconds
            job = Job(contender, cell.workload, cell.n_envs, seconds, warm_up_s, limit_s)
            try:
                turn = Turn(cell.workload, cell.n_envs, number, contender, run(job))
            except NotMeasured as reason:
                out = LeftOut(cell.workload, cell.n_envs, contender, reason.kind, str(reason), reason.details)
                results.left_out.append(out)
                yield out
            else:
                results.turns.append(turn)
                yield turn
