"""The display and the result of ``envmanager run``, and text formatting that several commands share."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from envmanager.cli import output
from envmanager.cli.output import PlainOutput
from envmanager.cli.plan import Plan
from envmanager.observe.episodes import Episodes
from envmanager.observe.files import json_safe, write_atomically
from envmanager.observe.stats import ManagerStats, WorkerStats
from envmanager.placing.placement import count, describe_seconds
from envmanager.training.evaluation import Evaluation, mean_and_spread

MAX_WORKERS_SHOWN = 16
WORKER_COLUMNS = ("worker", "envs", "state", "worker steps", "median step", "p99", "idle", "memory", "restarts")
STATE_STYLES = {"ready": "green", "stepping": "green", "restarting": "yellow", "failed": "red", "dropped": "red"}
LINES_AROUND_ROWS = 9
"""Number of lines drawn around the rows of workers. Rows that do not fit into the terminal are not shown."""


@attrs.define
class RunSummary:
    """The result of ``envmanager run``. ``ended`` is ``"done"``, ``"interrupted"`` or ``"failed"``."""

    plan: Plan
    ended: str = "failed"
    episodes: Episodes = attrs.field(factory=Episodes)
    wall_s: float = 0.0
    stats: ManagerStats = attrs.field(factory=lambda: ManagerStats(()))
    """Statistics at the end of the run. They are of no workers if no manager was started."""

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second since the reset."""
        return self.episodes.env_steps / self.wall_s if self.wall_s > 0 else 0.0

    def returns(self) -> dict[str, float]:
        """Return a dict with the ``mean``, ``min`` and ``max`` episode return, each NaN if no episode has ended."""
        values = [value for values in self.episodes.returns.values() for value in values]
        if not values:
            return dict.fromkeys(("mean", "min", "max"), math.nan)
        return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a dict for JSON, with None for NaN and infinite numbers."""
        return {
            "ended": self.ended,
            "env": str(self.plan.manager.env),
            "manager": self.plan.manager.kind,
            "n_envs": self.plan.manager.n_envs,
            "placement": self.stats.placement,
            "seed": self.plan.seed,
            "env_steps": self.episodes.env_steps,
            "worker_steps": self.episodes.worker_steps,
            "wall_s": self.wall_s,
            "env_steps_per_s": self.steps_per_s,
            "episodes": self.episodes.count,
            "episodes_lost": self.episodes.lost,
            "restarts": self.stats.restarts,
            "steps_lost": self.stats.steps_lost,
            "return": json_safe(self.returns()),
            "episode_returns": json_safe(self.episodes.returns_by_env()),
            "wait_share": self.stats.wait_share,
            "verdict": self.stats.verdict,
            "workers": json_safe([attrs.asdict(worker) for worker in self.stats.workers]),
        }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` to ``path`` as JSON, one line per top-level key. Raises NotWritten if writing fails."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in data.items()]
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")


class RunDisplay:
    """The display of ``envmanager run``: progress, the workers, and the summary.

    ``due`` is the time, by ``time.perf_counter``, of the next update. :meth:`update` need not be called earlier.
    """

    def __init__(self, output: PlainOutput) -> None:
        self._output = output
        self.show_notice = output.show_notice
        self.echoing, self.show_table = output.echoing, output.table
        self.show_line = output.line

    def show_start(self, plan: Plan) -> None:
        """Show the line that ``describe_start`` returns. Called before the workers start, which may take a while."""
        self._plan = plan
        self._output.line(describe_start(plan), "bold")

    @contextmanager
    def running(self, now: float) -> Iterator[None]:
        """Return a context in which :meth:`update` may be called. ``now`` is the time at which the steps begin."""
        self._started, self._rate = now, Rate(now)
        self.due = now + self._output.FIRST_S
        with self._output.drawing():
            yield

    def update(self, now: float, episodes: Episodes, stats: ManagerStats) -> None:
        """Show the progress at the time ``now``, and set ``due`` to the time of the next update."""
        self.due = now + self._output.EVERY_S
        n_steps, total, seconds = episodes.env_steps, self._plan.steps, now - self._started
        rate = self._rate.at(now, n_steps)
        parts = [f"{n_steps / total:>4.0%}", f"{n_steps:,} env steps", f"{rate:,.0f}/s", describe(episodes)]

        def draw(height: int) -> list[RenderableType]:
            n_shown = max(1, min(MAX_WORKERS_SHOWN, height - LINES_AROUND_ROWS))
            rest = describe_rest(stats.workers, n_shown)
            return [
                progress_bar(n_steps, total, "env steps", rate, seconds),
                Text(describe(episodes)),
                Text(),
                worker_table(stats, n_shown),
                *([Text(rest, style="dim")] if rest else []),
            ]

        self._output.progress(f"{seconds:6.1f} s  {'  '.join(parts)}", draw)

    def show_summary(self, summary: RunSummary) -> None:
        """Show the result of the run and a table of its workers."""
        self._output.line("")
        self._output.pairs(summary_lines(summary))
        self._output.line("")
        self._output.table(worker_table(summary.stats, MAX_WORKERS_SHOWN))
        rest = describe_rest(summary.stats.workers, MAX_WORKERS_SHOWN)
        if rest:
            self._output.line(rest, "dim")


class EpisodeProgress:
    """The progress of ``envmanager evaluate``, which only a terminal shows. ``total``: number of episodes to play."""

    def __init__(self, output: PlainOutput, total: int) -> None:
        self._output, self._total = output, total
        self.n_before = 0
        """Number of episodes in the evaluations that have ended."""
        self._began = self._due = time.perf_counter()

    def show(self, n_ended: Callable[[], int]) -> bool:
        """Show the progress if it is due. ``n_ended`` returns the number of episodes that have ended since n_before."""
        now = time.perf_counter()
        if now >= self._due:
            self._due = now + self._output.EVERY_S
            n, seconds = self.n_before + n_ended(), now - self._began
            row = progress_bar(n, self._total, "episodes", n / seconds if n else 0.0, seconds)
            self._output.progress("", lambda _: [row])
        return False  # the evaluation goes on


def progress_bar(n: int, total: int, things: str, rate: float, seconds: float) -> Table:
    """Return a line with a bar, the numbers, the speed per second, the time so far and an estimate of the time left."""
    left = f"{(total - n) / rate:,.0f} s left" if rate and n < total else ""
    grid = Table.grid(Column(), *(Column(no_wrap=True) for _ in range(3)), padding=(0, 2))
    grid.add_row(
        ProgressBar(total=total, completed=min(n, total), width=20),
        Text(f"{n:,}/{total:,} {things}"),
        Text(f"{rate:,.0f}/s", style="bold"),
        Text(f"{seconds:,.0f} s, {left}".rstrip(", "), style="dim"),
    )
    return grid


def worker_table(stats: ManagerStats, n_shown: int) -> output.Table:
    """Return a table of the first ``n_shown`` workers."""
    rows = [worker_cells(worker) for worker in stats.workers[:n_shown]]
    spare = ("memory", "p99", "idle", "envs", "median step", "worker steps")
    return output.Table(WORKER_COLUMNS, rows, lambda cell: STATE_STYLES.get(cell, ""), left="state", spare=spare)


class Rate:
    """A meter of steps per second over the last ``WINDOW_S`` seconds, or longer if ``at`` is called less often."""

    WINDOW_S = 2.0

    def __init__(self, now: float, n_steps: int = 0) -> None:
        self._points = deque([(now, n_steps)])

    def at(self, now: float, n_steps: int) -> float:
        """Record that ``n_steps`` steps in total were taken by the time ``now``, and return the steps per second."""
        while len(self._points) > 1 and self._points[1][0] <= now - self.WINDOW_S:
            self._points.popleft()
        then, n_then = self._points[0]
        self._points.append((now, n_steps))
        return (n_steps - n_then) / (now - then) if now > then else 0.0


def describe_start(plan: Plan) -> str:
    """Return a line with a run's environment, number of environments, number of workers (if set), manager and seed."""
    options = plan.manager
    workers = f" in {count(options.n_workers, 'worker')}" if isinstance(options.n_workers, int) else ""
    envs = count(options.n_envs, "environment")
    seed = "not seeded" if plan.seed is None else f"seed {plan.seed}"
    return f"{options.env_name}: {envs}{workers}, manager {options.kind}, {seed}"


def describe(episodes: Episodes) -> str:
    """Return a line with the numbers of ended and lost episodes, and the mean recent return of each behavior."""
    lost = f", {episodes.lost:,} lost" if episodes.lost else ""
    if not episodes.count:
        return f"no episode has ended yet{lost}"
    last = "" if episodes.count == len(episodes.recent) else f" (last {len(episodes.recent)})"
    behaviors = sorted({episode.behavior for episode in episodes.recent})
    means = (
        f"mean return{of_behavior(own, behaviors)} {episodes.mean_of_recent(own):.4g}"
        + "".join(f", {name} {mean:.4g}" for name, mean in episodes.means_of_measures(own).items())
        for own in behaviors
    )
    return f"{count(episodes.count, 'episode')}, {', '.join(means)}{last}{lost}"


def describe_returns(returns: Sequence[float]) -> str:
    """Format returns or episode lengths: one value as ``"12.3"``, several as ``"12.3 ± 0.4, from 11.7 to 12.9"``.

    The numbers are mean ± standard deviation, minimum and maximum.
    """
    mean, spread = mean_and_spread(returns)
    if len(returns) == 1:
        return f"{mean:.4g}"
    return f"{mean:.4g} ± {spread:.3g}, from {min(returns):.4g} to {max(returns):.4g}"


def of_behavior(behavior: str, behaviors: Sized) -> str:
    """Return ``" of 'hero'"`` for the behavior ``hero``, or ``""`` if ``behaviors`` has only one."""
    return f" of {behavior!r}" if len(behaviors) > 1 else ""


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """Return a line per behavior with the mean, spread and range of its returns, and the numbers of episodes."""
    lines = []
    parts = [(evaluation.lost, "lost"), (evaluation.unplayed, "not played")]
    lost = "".join(f", {number:,} {what}" for number, what in parts if number)
    lost += "" if evaluation.is_complete else " (incomplete)"
    for behavior, returns in evaluation.returns_of.items():
        of_agents = f", {count(len(returns), 'return')}" if len(returns) != evaluation.n_episodes else ""
        episodes = f"{count(evaluation.n_episodes, 'episode')}{of_behavior(behavior, evaluation.returns_of)}{of_agents}"
        means = "".join(f", {name} {mean:.4g}" for name, mean in evaluation.means_of_measures(behavior).items())
        lines.append(f"{describe_returns(returns) if returns else 'no return'}{means}, {episodes}{lost}")
    return lines


def summary_lines(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the lines that summarize a run, as pairs of name and text."""
    episodes, returns, stats = summary.episodes, summary.returns(), summary.stats
    n_dropped = sum(worker.dropped for worker in stats.workers)
    ended = {"done": "all steps taken", "interrupted": "interrupted", "failed": "stopped by an error"}[summary.ended]
    lines = [
        ("result", ended),
        ("steps", f"{episodes.env_steps:,} of {summary.plan.steps:,} environment steps"),
        ("wall time", f"{summary.wall_s:.2f} s"),
        ("speed", f"{summary.steps_per_s:,.0f} environment steps/s"),
        ("episodes", f"{episodes.count:,}"),
    ]
    if episodes.count:
        lines.append(("return", ", ".join(f"{name} {value:.4g}" for name, value in returns.items())))
    if stats.verdict:
        lines.append(("verdict", stats.verdict))
    if stats.restarts or n_dropped:
        lines.append(("restarts", f"{stats.restarts:,}"))
        lines.append(("lost", f"{count(episodes.lost, 'episode')}, {count(stats.steps_lost, 'worker step')}"))
    if stats.episodes_kept:
        repeated = count(stats.steps_repeated, "environment step")
        lines.append(("kept", f"{count(stats.episodes_kept, 'episode')}, for which {repeated} were repeated"))
    if n_dropped:
        lines.append(("dropped", f"{n_dropped} of {count(len(stats.workers), 'worker')}"))
    if summary.plan.out is not None:
        lines.append(("written to", str(summary.plan.out)))
    if summary.plan.manager.trace is not None:
        lines.append(("trace", f"{summary.plan.manager.trace}, for https://ui.perfetto.dev"))
    return lines


def worker_cells(worker: WorkerStats) -> tuple[str, ...]:
    """Return the cells of a worker's row in the table of workers, in the order of WORKER_COLUMNS."""
    return (
        str(worker.worker_id),
        describe_env_ids(worker.env_ids),
        state_of(worker),
        f"{worker.steps:,}",
        describe_seconds(worker.step_time_p50_s),
        describe_seconds(worker.step_time_p99_s),
        f"{worker.idle_share:.0%}",
        f"{worker.memory_bytes / 2**20:,.0f} MiB" if worker.memory_bytes else "–",
        f"{worker.restarts:,}",
    )


def state_of(worker: WorkerStats) -> str:
    """Return the state of a worker: ``"dropped"``, ``"failed"``, ``"restarting"``, ``"stepping"`` or ``"ready"``."""
    words = {"dropped": worker.dropped, "failed": worker.failed, "restarting": worker.replacing}
    words["stepping"] = worker.waiting
    return next((word for word, holds in words.items() if holds), "ready")


def describe_rest(workers: Sequence[WorkerStats], n_shown: int) -> str:
    """Return one line that sums up the workers after the first ``n_shown``, or ``""`` if there are none."""
    rest = workers[n_shown:]
    if not rest:
        return ""
    failed = sum(worker.failed for worker in rest)  # dropped workers count as failed
    steps = sum(worker.steps for worker in rest)
    restarts = sum(worker.restarts for worker in rest)
    idle = sum(worker.idle_share for worker in rest) / len(rest)
    return (
        f"and {len(rest)} more: {steps:,} worker steps, {idle:.0%} idle, {failed} failed, {count(restarts, 'restart')}"
    )


def describe_env_ids(env_ids: Sequence[int]) -> str:
    """Format environment ids: a single id as ``"3"``, a consecutive range as ``"0-7"``, other ids as ``"0, 4"``."""
    if len(env_ids) > 1 and list(env_ids) == list(range(env_ids[0], env_ids[-1] + 1)):
        return f"{env_ids[0]}-{env_ids[-1]}"
    return ", ".join(map(str, env_ids))
