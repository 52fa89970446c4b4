"""The run of a plan: its progress, and tables, a JSON file and plots of the results.

This process does nothing while a turn is measured; not even a thread draws. However a measurement ends, the results so
far are shown and written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from benchmarks.launcher import Launcher
from benchmarks.machine import facts
from benchmarks.plan import BenchPlan
from benchmarks.report import to_json
from benchmarks.roster import label_of
from benchmarks.schedule import Cell, LeftOut, Results, Turn, run_cell
from benchmarks.summary import CellSummary, rate_of
from benchmarks.tables import cell_table, cell_title, left_out_lines, target_table, warning_of
from benchmarks.targets import Outcome, outcomes
from benchmarks.workloads import BARE
from envmanager.cli.display import write_json
from envmanager.cli.output import show
from envmanager.cli.run import EXIT_DONE, EXIT_FAILED, Stopped, StopSignals

WIDTH = 140
"""Width of lines in a file or a pipe."""


def run(plan: BenchPlan, console: Console) -> int:
    """Measure, and return the exit code: 0, 1 when a contender failed, 130 after Ctrl-C."""
    if not console.is_terminal:
        console.width = WIDTH
    course = _Course(plan, console)
    exit_code, ended = EXIT_DONE, "done"
    with StopSignals() as signals:
        try:
            course.go()
        except Stopped as stopped:
            exit_code, ended = stopped.exit_code, "interrupted"
        signals.hold()
        course.tell(ended)
    if exit_code == EXIT_DONE and any(out.kind == "failed" for out in course.results.left_out):
        return EXIT_FAILED
    return exit_code


@attrs.define
class _Course:
    """A measurement and its results so far."""

    plan: BenchPlan
    console: Console
    results: Results = attrs.field(init=False)
    versions: dict[str, dict[str, str]] = attrs.field(factory=dict)
    machine: dict[str, object] = attrs.field(factory=facts)
    _shown: set[Cell] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        self.results = Results(left_out=list(self.plan.left_out))

    def go(self) -> None:
        """Measure cell by cell; show each cell as soon as it is done."""
        chance = random.Random(0)
        with Launcher(self.plan.pythons) as launcher:
            self.versions = launcher.versions
            for cell in self.plan.cells:
                for number, came in enumerate(
                    run_cell(cell, self.plan.pace, self.results, run=launcher.run, chance=chance)
                ):
                    self._show_progress(cell, number, came)
                self._show(cell)

    def tell(self, ended: str) -> None:
        """Show and write the results."""
        self._clear_progress()
        for cell in self.plan.cells:
            self._show(cell)
        summaries = self.summaries()
        reached = outcomes(summaries) if self.plan.goals else []
        self._show_targets(reached)
        for line in left_out_lines(self.results.left_out):
            show(self.console, line, style="yellow")
        if ended != "done":
            self.console.print(Text(f"{ended}; the figures are of what was measured until then", style="yellow"))
        self._write(summaries, reached, ended)
        for path in self._draw(summaries):
            self.console.print(f"drawn: {path}", soft_wrap=True)

    def summaries(self) -> list[CellSummary]:
        """Return the summaries of all cells whose bare environment was measured."""
        turns = [self.results.of(cell) for cell in self.plan.cells]
        return [CellSummary.of(own) for own in turns if any(turn.contender == BARE for turn in own)]

    def _show(self, cell: Cell) -> None:
        turns = self.results.of(cell)
        if cell not in self._shown and any(turn.contender == BARE for turn in turns):
            self._shown.add(cell)
            self._clear_progress()
            summary = CellSummary.of(turns)
            self.console.print()
            show(self.console, cell_title(summary))
            self.console.print(cell_table(summary), soft_wrap=True)
            if warning := warning_of(summary):
                show(self.console, warning)

    def _show_progress(self, cell: Cell, number: int, came: Turn | LeftOut) -> None:
        """Print a line that the next line overwrites; in a file or a pipe, print nothing."""
        if not self.console.is_terminal:
            return
        total = self.plan.pace.rounds * (len(cell.contenders) + 1)
        what = f"{rate_of(came):,.0f} env steps/s" if isinstance(came, Turn) else came.reason
        whom = label_of(came.contender, cell.n_envs)
        text = f"{cell.workload}, {cell.n_envs} environments: {number + 1}/{total} {whom}: {what}"
        width = self.console.width - 1
        self.console.print(Text(text[:width].ljust(width), style="dim"), end="\r")

    def _clear_progress(self) -> None:
        if self.console.is_terminal:
            self.console.print(" " * (self.console.width - 1), end="\r")

    def _show_targets(self, reached: Sequence[Outcome]) -> None:
        """Print this project's goals for the cells of the plan."""
        cells = {(cell.workload, cell.n_envs) for cell in self.plan.cells}
        concerned = [each for each in reached if (each.target.workload, each.target.n_envs) in cells]
        if concerned:
            self.console.print("", Text("Goals of this project", style="bold"), target_table(concerned), sep="\n")

    def _write(self, summaries: Sequence[CellSummary], reached: Sequence[Outcome], ended: str) -> None:
        if self.plan.out is None:
            return
        about: dict[str, Any] = {"ended": ended, "pace": self.plan.pace}
        about |= {"machine": self.machine, "versions": self.versions}
        write_json(self.plan.out, to_json(self.results, summaries, reached, **about))
        self.console.print(f"written to {self.plan.out}", soft_wrap=True)

    def _draw(self, summaries: Sequence[CellSummary]) -> list[Path]:
        if self.plan.plot is None:
            return []
        from benchmarks.plots import draw_all

        return draw_all(summaries, self.plan.plot)
