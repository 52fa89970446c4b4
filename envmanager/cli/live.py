"""The live display of ``envmanager run``: a bar, the episodes, and a row per worker, redrawn in place.

Drawing happens on the caller's thread when it is due, never on a thread of its own, so that it costs nothing between
two updates and worker processes can be forked at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from envmanager.cli.display import (
    MAX_WORKERS_SHOWN,
    WORKER_COLUMNS,
    PlainDisplay,
    Rate,
    describe,
    describe_rest,
    describe_start,
    summary_lines,
    worker_cells,
)
from envmanager.cli.plan import Plan
from envmanager.cli.summary import RunSummary
from envmanager.cli.wrapping import show_notice
from envmanager.observe.episodes import Episodes
from envmanager.observe.stats import ManagerStats, WorkerStats

STATE_STYLES = {"ready": "green", "stepping": "green", "restarting": "yellow", "failed": "red", "dropped": "red"}
LINES_AROUND_ROWS = 9
"""Height of all that is drawn except the rows of workers; a low terminal shows fewer rows."""


class LiveDisplay(PlainDisplay):
    """A display that is redrawn at most eight times a second."""

    EVERY_S = 0.125

    def __init__(self, console: Console, errors: Console) -> None:
        self._console = console
        self._errors = errors

    def show_start(self, plan: Plan) -> None:
        self._plan = plan
        self._console.print(Text(describe_start(plan), style="bold"))

    def show_placement(self, placement: str) -> None:
        self._console.print(Text(placement))

    @contextmanager
    def running(self, now: float) -> Iterator[None]:
        self._started, self._rate = now, Rate(now)
        self.due = now
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield

    def update(self, now: float, episodes: Episodes, stats: ManagerStats) -> None:
        self.due = now + self.EVERY_S
        rate = self._rate.at(now, episodes.env_steps)
        parts = [self._progress(now, episodes.env_steps, rate), Text(describe(episodes)), Text()]
        self._live.update(Group(*parts, *self._workers(stats)), refresh=True)

    def show_notice(self, level: str, text: str) -> None:
        show_notice(self._console, self._errors, level, text)

    def show_summary(self, summary: RunSummary) -> None:
        table = Table.grid(padding=(0, 2))
        for name, text in summary_lines(summary):
            table.add_row(Text(name, style="dim"), Text(text))
        for part in ("", table, "", *worker_table(summary.stats, MAX_WORKERS_SHOWN)):
            self._console.print(part)

    def _progress(self, now: float, n_steps: int, rate: float) -> RenderableType:
        total = self._plan.steps
        left = f"{(total - n_steps) / rate:,.0f} s left" if rate and n_steps < total else ""
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            ProgressBar(total=total, completed=min(n_steps, total), width=20),
            Text(f"{n_steps:,}/{total:,} env steps"),
            Text(f"{rate:,.0f}/s", style="bold"),
            Text(f"{now - self._started:,.0f} s, {left}".rstrip(", "), style="dim"),
        )
        return grid

    def _workers(self, stats: ManagerStats) -> list[RenderableType]:
        return worker_table(stats, max(1, min(MAX_WORKERS_SHOWN, self._console.height - LINES_AROUND_ROWS)))


def worker_table(stats: ManagerStats, n_shown: int) -> list[RenderableType]:
    """Return the first workers as a table, and a line on the others."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in WORKER_COLUMNS:
        table.add_column(name, justify="left" if name == "state" else "right")
    for worker in stats.workers[:n_shown]:
        table.add_row(*_styled(worker))
    rest = describe_rest(stats.workers, n_shown)
    return [table, Text(rest, style="dim")] if rest else [table]


def _styled(worker: WorkerStats) -> list[Text]:
    return [Text(cell, style=STATE_STYLES.get(cell, "")) for cell in worker_cells(worker)]
