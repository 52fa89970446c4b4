"""The data of the plots. Without drawing, it can be used and tested without matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from benchmarks.roster import family_of, label_of
from benchmarks.summary import CellSummary
from benchmarks.workloads import ALL

STEP_TIMES = {
    "ours-simple": "sequential: all in the trainer's process",
    "ours-processes": "one process per environment, waiting for all",
    "ours-workers": "hybrid: one process per core, waiting for all",
    "ours-any": "asynchronous: one process per environment, waiting for any",
}
"""Contenders and labels of the plot of step times, which articles about parallel Gym environments usually show."""


@attrs.frozen
class Curve:
    """A curve: points of (number of environments, value)."""

    label: str
    points: tuple[tuple[int, float], ...]


def step_times(summaries: Sequence[CellSummary], workload: str = "scaling") -> list[Curve]:
    """Return curves of the seconds for one step of all environments; the last is n times the bare environment's."""
    cells = sorted((each for each in summaries if each.workload == workload), key=lambda each: each.n_envs)
    curves = [
        Curve(label, tuple((cell.n_envs, cell.n_envs / line.rate) for cell in cells if (line := cell.line(name))))
        for name, label in STEP_TIMES.items()
    ]
    linear = Curve("linear: n times the bare environment", tuple((c.n_envs, c.n_envs / c.bare_rate) for c in cells))
    return [curve for curve in (*curves, linear) if curve.points]


def worker_step_costs(summaries: Sequence[CellSummary], workload: str = "sleepers") -> Curve:
    """Return a curve of the trainer's CPU time for one worker step, in microseconds."""
    cells = sorted((each for each in summaries if each.workload == workload), key=lambda each: each.n_envs)
    lines = [(cell.n_envs, cell.line("ours-any")) for cell in cells]
    return Curve("waiting for any", tuple((n, 1e6 * line.cores / line.rate) for n, line in lines if line))


@attrs.frozen
class Bars:
    """The contenders of one cell with their steps/s, fastest first; ``ours`` marks this library's contenders."""

    workload: str
    n_envs: int
    names: tuple[str, ...]
    rates: tuple[float, ...]
    ours: tuple[bool, ...]


def bars(summaries: Sequence[CellSummary]) -> list[Bars]:
    """Return one group of bars for each cell that shows steps/s and in which a peer was measured."""
    groups = []
    for summary in summaries:
        lines = sorted(summary.lines, key=lambda line: -line.rate)
        ours = tuple(family_of(line.contender) == "ours" for line in lines)
        if ALL[summary.workload].shows == "rate" and not all(ours):
            names = tuple(label_of(line.contender, summary.n_envs) for line in lines)
            groups.append(Bars(summary.workload, summary.n_envs, names, tuple(line.rate for line in lines), ours))
    return groups
