"""The display of ``envmanager tune``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from envmanager.cli.display import count
from envmanager.cli.output import PlainOutput, Table
from envmanager.cli.tuning import Trial
from envmanager.placing.placement import IN_PROCESS

COLUMNS = ("workers", "envs", "envs each", "wait", "env steps/s", "restarts", "")
STYLES = {"best": "bold green", "out": "dim", "failed": "red", "running": "yellow"}
LINES_AROUND_ROWS = 6


class TuneDisplay:
    """The display of ``envmanager tune``: the trials, redrawn when one is done and up to four times a second."""

    EVERY_S = 0.25

    def __init__(self, output: PlainOutput) -> None:
        self._output = output
        self.show_notice = output.show_notice
        self._due = -math.inf

    def show_start(self, text: str) -> None:
        """Show ``text``, which names the environment and the duration of the tuning."""
        self._output.line(text, "bold")

    @contextmanager
    def running(self, trials: Sequence[Trial]) -> Iterator[None]:
        """Return a context in which the trials run and :meth:`update` may be called."""
        self._started, self._trials = time.monotonic(), trials
        with self._output.drawing():
            yield

    def update(self, running: Trial, *, is_done: bool) -> None:
        """Show the results so far. ``is_done``: whether the trial ``running`` has finished its round or failed."""
        now = time.monotonic()
        if not is_done and now < self._due:
            return
        self._due = now + self.EVERY_S
        line = f"{now - self._started:7.1f} s  {running.candidate}: {_result_of(running)}" if is_done else ""
        states = {id(running): "running"}
        self._output.progress(
            line, lambda height: [table(by_speed(self._trials)[: max(1, height - LINES_AROUND_ROWS)], states).drawn()]
        )

    def show_result(self, trials: Sequence[Trial], best: Trial | None, lines: Sequence[str], command: str) -> None:
        """Show a table of all trials, then ``lines``. Also show ``command``, if not empty, as the next one to run."""
        self._output.line("")
        self._output.table(table(by_speed(trials), {} if best is None else {id(best): "best"}))
        for line in ("", *lines):
            self._output.line(line)
        if command:
            print(f"run it: {command}", flush=True)  # not wrapped, so that it can be copied


def by_speed(trials: Sequence[Trial]) -> list[Trial]:
    """Return ``trials`` sorted by speed, fastest first, but with the dropped trials after the remaining trials."""
    return sorted(trials, key=lambda trial: (trial.is_out, -trial.steps_per_s))


def table(trials: Sequence[Trial], states: Mapping[int, str]) -> Table:
    """Return a table with a row per trial. ``states`` maps ``id(trial)`` to the text in its last column."""
    rows = [cells(trial, states.get(id(trial), "")) for trial in trials]
    return Table(COLUMNS, rows, lambda row, _: STYLES.get(row[-1], ""))


def _result_of(trial: Trial) -> str:
    if trial.failure is not None:
        return f"failed: {trial.failure}"
    restarts = f", {count(trial.restarts, 'restart')}" if trial.restarts else ""
    return f"{trial.steps_per_s:,.0f} environment steps/s{restarts}"


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
