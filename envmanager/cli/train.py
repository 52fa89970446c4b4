"""``envmanager train``: train the policies of a config, show the progress, and write checkpoints.

The first Ctrl-C or SIGTERM ends the training, and writes a checkpoint with the steps in flight. The second ends the
command at once.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.text import Text

from envmanager.cli.display import Rate, evaluation_lines, of_behavior, write_json
from envmanager.cli.output import NAMES, PlainOutput, Table, describe_notice, print_pairs, print_text
from envmanager.cli.plan import serve
from envmanager.cli.run import EXIT_DONE, EXIT_FAILED, EndOfInput, Notices, StopSignals, exit_code_of
from envmanager.errors import EnvManagerError
from envmanager.observe.files import json_safe
from envmanager.training.algorithms.trainers import check_tables
from envmanager.training.controller import Update
from envmanager.training.curriculum import LessonBegan
from envmanager.training.evaluation import Evaluation
from envmanager.training.learners import LearnersChanged
from envmanager.training.runs.figures import Clocks, Report
from envmanager.training.runs.run import TrainingPlan, TrainingResult, TrainingRun

__all__ = ["TrainDisplay", "TrainingPlan", "check_tables", "state_of", "train"]

if TYPE_CHECKING:
    from envmanager.serving.server import Server


def train(
    plan: TrainingPlan,
    display: TrainDisplay,
    *,
    out: Path | None,
    verbose: bool = False,
    end: EndOfInput | None = None,
    located: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Train, print the result or error, and return the exit code. Raises NotWritten if ``out`` cannot be written.

    The end of standard input, ``end``, stops the training as a first SIGINT does. ``located`` makes a context that adds
    to ConfigErrors where a value comes from.
    """
    run = TrainingRun(plan, display)
    signals = Stopping(run)
    try:
        with Notices(display.show_notice, verbose=verbose), signals, display.drawing():
            if end is not None:
                end.then(signals.stop)
            with located():
                result = run.go()
    except EnvManagerError as error:
        print_text(f"Error: {error}".rstrip(), sys.stderr)
        if exit_code_of(error) == EXIT_FAILED and run.controller is not None and run.controller.n_steps:
            print_text(_what_is_left(run), sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:  # a second signal
        return 128 + (signals.number or signal.SIGINT)
    print_pairs(summary_lines(plan, result))
    if out is not None:
        write_json(out, json_safe(result.to_json()))
    return EXIT_DONE if signals.number is None else 128 + signals.number


def _what_is_left(run: TrainingRun) -> str:
    """Return a hint for a failed training: how many agent steps its last checkpoint lacks, or that none was written."""
    assert run.controller is not None
    n_steps = run.controller.n_steps
    if not run.saved_at:
        return "It had written no checkpoint: training.checkpoint_every says how often it writes one."
    if run.saved_at == n_steps:
        return "Its last checkpoint has all its agent steps."
    return f"Go on with --resume from its last checkpoint, which is {n_steps - run.saved_at:,} agent steps older."


class Stopping(StopSignals):
    """A context in which the first SIGINT or SIGTERM makes ``run`` save and stop. A second raises KeyboardInterrupt.

    The first does so too while the environments start, when there is nothing to save.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self.number: int | None = None

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        is_first, self.number = self.number is None, self.number or signum
        if not (is_first and self._run.is_begun):
            raise KeyboardInterrupt
        self._run.stop()

    def stop(self) -> None:
        """Do what a first SIGINT does, unless a signal has come. Any thread may call this."""
        if self.number is None:
            self.number = signal.SIGINT
            self._run.stop()


class TrainDisplay(Report):
    """The display of ``envmanager train``: lines about events, and the progress.

    Between checkpoints, ``show_update`` is called at most once per behavior in ``TOLD_EVERY_S`` seconds. When a
    checkpoint is saved, ``show_update`` is first called with each behavior's latest update, if that is still pending.
    """

    TOLD_EVERY_S = 0.5

    def __init__(self, output: PlainOutput, *, serve: tuple[int, str] | None = None) -> None:
        """``serve``: port and host of the page that shows the training, if it is to be served."""
        self._output = output
        self._serve = serve
        self._server: Server | None = None
        self.drawing = output.drawing
        self._clocks = Clocks(self.TOLD_EVERY_S)
        self._untold: dict[str, tuple[TrainingRun, Update]] = {}
        self._figures: dict[str, Mapping[str, float]] = {}
        self._due = 0.0

    def started(self, run: TrainingRun) -> None:
        self._rate = Rate(time.monotonic(), run.n_steps_before)
        options = run.plan.manager
        kinds = ", ".join(f"{type(trainer).__name__} for {behavior!r}" for behavior, trainer in run.trainers.items())
        self.show_line(f"{options.env_name}: {options.n_envs} environments, manager {options.kind}; {kinds}")
        if run.manager is not None and run.manager.placement:
            self.show_line(run.manager.placement)
        if self._serve is not None and run.manager is not None and run.controller is not None:
            self._server = serve(run.manager, self._serve, run.controller.episodes)
            self.show_line(f"watch it at {self._server.url}")
        if (options.engine or {}).get("window") and len(run.trainers) > 1 and run.manager is not None:
            keys = ", ".join(f"{number} {behavior!r}" for number, behavior in enumerate(run.manager.behavior_specs, 1))
            self.show_line(
                f"keys        numpad (or Ctrl and) {keys}: freeze or unfreeze; press them in the game's window"
            )

    def updated(self, run: TrainingRun, update: Update) -> None:
        now = time.monotonic()
        if self._server is not None:
            self._server.figures[update.behavior] = {"version": update.version, **update.figures}
            self._server.facts["agent steps"] = f"{update.n_steps:,} of {run.plan.training.steps:,}"
            self._server.facts.update({} if run.curriculum is None else run.curriculum.describe())
        self._untold[update.behavior] = run, update
        if self._clocks.is_due(update.behavior, now):
            del self._untold[update.behavior]
            self.show_update(run, update, now)

    def changed(self, run: TrainingRun, change: LearnersChanged) -> None:
        if not change.is_round:  # rounds may be short and frequent
            self.show_line(str(change))

    def lesson_began(self, run: TrainingRun, began: LessonBegan) -> None:
        self.show_line(f"lesson      {began.text}, at agent step {began.n_steps:,}")

    def saved(self, path: Path) -> None:
        untold, self._untold = self._untold, {}
        for run, update in untold.values():
            self.show_update(run, update, time.monotonic())
        self.show_line(f"checkpoint  {path}")

    def evaluated(self, run: TrainingRun, evaluation: Evaluation, is_best: bool) -> None:
        assert run.controller is not None
        is_the_best = ", the best so far" if is_best else ""
        for line in evaluation_lines(evaluation):
            self.show_line(f"evaluation  {line}, after {run.controller.n_steps:,} agent steps{is_the_best}")
        if self._server is not None and evaluation.returns:
            self._server.facts["last evaluation"] = f"{evaluation.mean:.4g}{is_the_best}"

    def evaluating(self, n_episodes: int) -> None:
        self.show_line(f"evaluating  {n_episodes:,} episodes")

    def show_notice(self, level: str, text: str) -> None:
        """Show a logged message; ``level`` is ``"note"``, ``"warning"`` or ``"error"``."""
        self.show_line(describe_notice(level, text))

    def show_line(self, text: str) -> None:
        """Print a line that later output does not overwrite."""
        self._output.line(text, indent=NAMES)

    def show_update(self, run: TrainingRun, update: Update, now: float) -> None:
        """Show the progress at the time ``now`` (by ``time.monotonic``); as a line, at most every two seconds."""
        self._figures[update.behavior] = {"version": update.version, **update.figures}
        state = [f"{name} {text}" for name, text in state_of(run, self._rate, now).items()]
        line = "  ".join(state) if now >= self._due else ""
        if line:
            self._due = now + self._output.EVERY_S
        parts = Columns([Text(part, no_wrap=True) for part in state], padding=(0, 3))
        self._output.progress(line, lambda _: [parts, self._table()])

    def _table(self) -> Table:
        """Return a table with the figures of each behavior's last update."""
        names = list(dict.fromkeys(name for figures in self._figures.values() for name in figures))
        rows = [
            [behavior, *(f"{figures[name]:.3g}" if name in figures else "" for name in names)]
            for behavior, figures in self._figures.items()
        ]
        return Table(["behavior", *(name.replace("_", " ") for name in names)], rows, left="behavior")


def state_of(run: TrainingRun, rate: Rate, now: float) -> dict[str, str]:
    """Return a dict that describes the progress of ``run`` at time ``now``, such as ``{"episodes": "1,024", …}``."""
    controller, goal = run.controller, run.plan.training.steps
    assert controller is not None
    episodes = controller.episodes
    told = {
        "time": f"{now - run.began:.0f} s",
        "agent steps": f"{controller.n_steps:,}/{goal:,} ({rate.at(now, controller.n_steps):,.0f}/s)",
        "episodes": f"{episodes.count:,}",
    }
    for behavior in run.trainers:
        mean = episodes.mean_of_recent(behavior)
        told[f"return{of_behavior(behavior, run.trainers)}"] = "–" if math.isnan(mean) else f"{mean:.4g}"
        for name, measured in episodes.means_of_measures(behavior).items():
            told[f"{name}{of_behavior(behavior, run.trainers)}"] = f"{measured:.4g}"
    length = episodes.mean_length()
    told["length"] = "–" if math.isnan(length) else f"{length:.4g}"
    if controller.round is not None:
        told["round"] = str(controller.round)
    if len(controller.learning) < len(run.trainers):
        told["learning"] = ", ".join(controller.learning)
    if run.curriculum is not None:
        told |= run.curriculum.describe()
    return told


def summary_lines(plan: TrainingPlan, result: TrainingResult) -> list[tuple[str, str]]:
    """Return a training run's summary, or a note that the run was already complete, as ``(name, text)`` pairs."""
    if result.ended == "over":
        over = f"{plan.directory} has taken {result.n_steps:,} of {plan.training.steps:,} agent steps"
        return [
            ("result", f"nothing to do: {over}"),
            ("next", f"envmanager evaluate {plan.directory}, or train on with --resume --steps {2 * result.n_steps}"),
        ]
    taken = f"{result.n_steps - result.n_steps_before:,} agent steps in {result.wall_s:.1f} s"
    lines = [
        ("result", {"done": "all steps taken", "stopped": "stopped; resume with --resume"}[result.ended]),
        ("steps", f"{taken}, {result.n_steps:,} with those before" if result.n_steps_before else taken),
    ]
    keeps = plan.manager.restarts.keep_episodes
    loses = result.stats.restarts and (not keeps or (keeps == "if_possible" and not result.stats.episodes_kept))
    for behavior, mean in result.mean_return_of.items():
        whose = of_behavior(behavior, result.mean_return_of)
        without = " (lost ones, which are mostly long, do not count)" if loses else ""
        measured = "".join(f", {name} {own:.4g}" for name, own in result.measures_of.get(behavior, {}).items())
        lines.append(("return", f"{mean:.4g}{whose}{measured} while training, mean of the last episodes{without}"))
    if result.evaluation is not None:
        lines.extend(("evaluation", line) for line in evaluation_lines(result.evaluation))
    if result.stats.restarts:
        kept = f", {result.stats.episodes_kept:,} episodes kept" if result.stats.episodes_kept else ""
        lines.append(("restarts", f"{result.stats.restarts:,}, {result.stats.steps_lost:,} worker steps lost{kept}"))
    if plan.manager.log_dir is not None and os.path.isdir(plan.manager.log_dir):  # else nothing was printed
        lines.append(("output", plan.manager.log_dir))
    if plan.manager.trace is not None:
        lines.append(("trace", f"{plan.manager.trace}, for https://ui.perfetto.dev"))
    lines.append(("checkpoint", str(plan.checkpoints)))
    return lines
