"""Summaries of turns.

The rule: a ratio is computed within each round; the figure is the median of the ratios over the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median

import attrs

from benchmarks.roster import family_of
from benchmarks.schedule import Turn
from benchmarks.workloads import ALL, BARE


@attrs.frozen
class Line:
    """The figures of one contender in one cell: medians over the rounds."""

    contender: str
    rate: float
    """Environment steps per second."""
    to_bare: float
    to_limit: float | None
    """Rate divided by the maximum for environments that sleep; None for environments that compute."""
    cores: float
    """CPU use of the trainer's process, in cores."""
    all_cores: float
    """CPU use of the trainer's process and its workers, in cores."""
    start_s: float
    rounds: int


@attrs.frozen
class CellSummary:
    """The summary of one workload with one number of environments."""

    workload: str
    n_envs: int
    bare_rate: float
    lines: tuple[Line, ...]
    _turns: tuple[Turn, ...] = attrs.field(repr=False)

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> CellSummary:
        """Summarise the turns of one cell. At least one must be the bare environment's."""
        bare = _bare_rates(turns)
        names = dict.fromkeys(turn.contender for turn in turns if turn.contender != BARE and turn.round in bare)
        workload, n_envs = turns[0].workload, turns[0].n_envs
        lines = tuple(_line(name, turns, bare) for name in names)
        return cls(workload, n_envs, median(bare.values()), lines, tuple(turns))

    def line(self, contender: str) -> Line | None:
        """Return the figures of a contender in this cell, or None if it was not measured."""
        return next((line for line in self.lines if line.contender == contender), None)

    def ratio(self, one: str, other: str) -> float | None:
        """Return the rate of ``one`` divided by the rate of ``other``; None if no round has both."""
        ratios = [mine / theirs for mine, theirs in self.rates(one, other) if theirs]
        return median(ratios) if ratios else None

    def rates(self, one: str, other: str) -> list[tuple[float, float]]:
        """Return the pairs of their rates, for each round that has both."""
        by_round = [
            {turn.round: rate_of(turn) for turn in self._turns if turn.contender == name} for name in (one, other)
        ]
        return [(rate, by_round[1][number]) for number, rate in by_round[0].items() if number in by_round[1]]

    def fastest(self, names: Sequence[str]) -> str | None:
        """Return the fastest of these contenders, or None if none was measured."""
        lines = [line for line in self.lines if line.contender in names]
        return max(lines, key=lambda line: line.to_bare).contender if lines else None

    @property
    def bare_spread(self) -> float:
        """Rate of the bare environment's fastest run divided by that of its slowest; about 1 on an idle machine."""
        rates = [rate for turn in self._turns if turn.contender == BARE and (rate := rate_of(turn))]
        return max(rates) / min(rates) if rates else 1.0

    @property
    def best_of_ours(self) -> str | None:
        """The fastest contender of this library, or None if none was measured."""
        return self.fastest([line.contender for line in self.lines if family_of(line.contender) == "ours"])


def rate_of(turn: Turn) -> float:
    """Return the environment steps per second of a turn."""
    return _per_s(turn, turn.measured.n_steps)


def cores_of(turn: Turn) -> float:
    """Return the CPU use of the trainer's process in a turn, in cores."""
    return _per_s(turn, turn.measured.cpu_s)


def all_cores_of(turn: Turn) -> float:
    """Return the CPU use of the trainer's process and its workers in a turn, in cores."""
    return _per_s(turn, turn.measured.all_cpu_s)


def _per_s(turn: Turn, amount: float) -> float:
    return amount / turn.measured.wall_s if turn.measured.wall_s > 0 else 0.0


def _bare_rates(turns: Sequence[Turn]) -> dict[int, float]:
    """Return the mean rate of the bare environment's runs, by round."""
    bare = [turn for turn in turns if turn.contender == BARE]
    return {
        number: mean(rate_of(turn) for turn in bare if turn.round == number)
        for number in dict.fromkeys(turn.round for turn in bare)
    }


def _line(contender: str, turns: Sequence[Turn], bare: dict[int, float]) -> Line:
    own = [turn for turn in turns if turn.contender == contender and turn.round in bare]
    workload, n_envs = ALL[own[0].workload], own[0].n_envs

    def middle(figure: Callable[[Turn], float]) -> float:
        return median(figure(turn) for turn in own)

    def to_limit(turn: Turn) -> float:
        return rate_of(turn) / (workload.limit(bare[turn.round], n_envs) or 1.0)

    return Line(
        contender,
        rate=middle(rate_of),
        to_bare=middle(lambda turn: rate_of(turn) / bare[turn.round] if bare[turn.round] else 0.0),
        to_limit=middle(to_limit) if workload.sleeps else None,
        cores=middle(cores_of),
        all_cores=middle(all_cores_of),
        start_s=middle(lambda turn: turn.measured.start_s),
        rounds=len(own),
    )
