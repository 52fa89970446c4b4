"""Displays of ``envmanager tune``: a table that is redrawn in a terminal, or plain lines.

As in ``envmanager run``, a display has no thread. It draws only when the command calls it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from envmanager.cli.display import count
from envmanager.cli.tuning import Trial
from envmanager.cli.wrapping import describe_notice, print_table, print_text, show, show_notice
from envmanager.placing.placement import IN_PROCESS

COLUMNS = ("workers", "envs", "envs each", "wait", "env steps/s", "restarts", "")
STYLES = {"best": "bold green", "out": "dim", "failed": "red", "running": "yellow"}
LINES_AROUND_ROWS = 6


class PlainTuneDisplay:
    """A display of ``envmanager tune`` that prints lines of text without control characters."""

    def show_start(self, text: str) -> None:
        """Show ``text``, which names the environment and the duration of the tuning."""
        print_text(text)

    @contextmanager
    def running(self, trials: Sequence[Trial]) -> Iterator[None]:
        """Return a context in which the trials run and :meth:`update` may be called."""
        self._started = time.monotonic()
        yield

    def update(self, running: Trial, *, is_done: bool) -> None:
        """Print the results of the trial ``running``, but only if it has finished its round or failed (``is_done``)."""
        if is_done:
            result = f"{running.steps_per_s:,.0f} environment steps/s"
            if running.restarts:
                result += f", {count(running.restarts, 'restart')}"
            if running.failure is not None:
                result = f"failed: {running.failure}"
            print(f"{time.monotonic() - self._started:7.1f} s  {running.candidate}: {result}", flush=True)

    def show_notice(self, level: str, text: str) -> None:
        """Show a logged message; ``level`` is ``"note"``, ``"warning"`` or ``"error"``."""
        print_text(describe_notice(level, text), sys.stderr)

    def show_result(self, trials: Sequence[Trial], best: Trial | None, lines: Sequence[str], command: str) -> None:
        """Print a table of all trials, then ``lines``. Also print ``command``, if not empty, as the next one to run."""
        print()
        print_table([COLUMNS, *(cells(trial, "best" if trial is best else "") for trial in by_speed(trials))])
        print("\n".join(["", *lines, *([f"run it: {command}"] if command else [])]), flush=True)


class LiveTuneDisplay(PlainTuneDisplay):
    """A display for terminals. It redraws a table of the trials up to four times a second and when a trial is done."""

    EVERY_S = 0.25

    def __init__(self, console: Console, errors: Console) -> None:
        self._console = console
        self._errors = errors
        self._due = -math.inf

    def show_start(self, text: str) -> None:
        self._console.print(Text(text, style="bold"))

    @contextmanager
    def running(self, trials: Sequence[Trial]) -> Iterator[None]:
        self._trials = trials
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield

    def update(self, running: Trial, *, is_done: bool) -> None:
        now = time.monotonic()
        if is_done or now >= self._due:
            self._due = now + self.EVERY_S
            n_rows = max(1, self._console.height - LINES_AROUND_ROWS)
            self._live.update(table(by_speed(self._trials)[:n_rows], {id(running): "running"}), refresh=True)

    def show_notice(self, level: str, text: str) -> None:
        show_notice(self._console, self._errors, level, text)

    def show_result(self, trials: Sequence[Trial], best: Trial | None, lines: Sequence[str], command: str) -> None:
        self._console.print(table(by_speed(trials), {} if best is None else {id(best): "best"}))
        self._console.print()
        for line in lines:
            show(self._console, line)
        if command:
            self._console.print(Text(f"run it: {command}"), soft_wrap=True)  # can be copied as one line


def by_speed(trials: Sequence[Trial]) -> list[Trial]:
    """Return ``trials`` sorted by speed, fastest first, but with the dropped trials after the remaining trials."""
    return sorted(trials, key=lambda trial: (trial.is_out, -trial.steps_per_s))


def table(trials: Sequence[Trial], states: dict[int, str]) -> Table:
    """Return a table with a row per trial. ``states`` maps ``id(trial)`` to the text in its last column."""
    made = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in COLUMNS:
        made.add_column(name, justify="right")
    for trial in trials:
        row = cells(trial, states.get(id(trial), ""))
        made.add_row(*map(Text, row), style=STYLES.get(row[-1], ""))
    return made


def cells(trial: Trial, state: str) -> tuple[str, ...]:
    """Return a trial's row. Its last cell is "failed" after a failure, else ``state``, else "out" if it was dropped."""
    candidate = trial.candidate
    local = candidate.n_workers == IN_PROCESS
    if trial.failure is not None:
        state = "failed"
    return (
        "in process" if local else str(candidate.n_workers),
        str(candidate.n_envs),
        candidate.envs_per_worker,
        "" if local else str(candidate.wait),
        f"{trial.steps_per_s:,.0f}" if trial.n_steps else "",
        f"{trial.restarts:,}" if trial.restarts else "",
        state or ("out" if trial.is_out else ""),
    )
