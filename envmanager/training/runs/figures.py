"""Figures of a training run: the metrics that go to writers, and the returns of all episodes in ``episodes.csv``.

::

    default/loss …           figures of an update                        evaluation/return, evaluation/length
    default/return, length   means of the last hundred episodes          default/evaluation_return, …
    default/MEASURE          the same of a measure, such as is_success   default/evaluation_MEASURE
    default/frozen           0 or 1                                      training/steps_per_s
    curriculum/NAME/lesson, curriculum/NAME/value: lesson, from 1, and last value of a parameter
    return/mean, length/mean over all behaviors                          envmanager/…  the manager's statistics

Updates are reported at most every ``Figures.EVERY_S`` seconds, and at checkpoints. Each behavior, such as ``default``
above, has a timer of its own. Behaviors that learn together are updated at nearly the same moment, so a shared timer
would omit most behaviors. A writer that fails is removed with a warning, and the training continues.

The rule: a resumed training run keeps the episodes up to its checkpoint and drops later episodes. The kept episodes are
written to a new file, which replaces the old file when it is complete.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from envmanager.data.steps import AGENT_BITS
from envmanager.errors import UsageError
from envmanager.observe.tensorboard import scalars_of
from envmanager.training.controller import TrainerController, Update
from envmanager.training.curriculum import Curriculum, LessonBegan
from envmanager.training.evaluation import Evaluation, mean_and_spread
from envmanager.training.learners import LearnersChanged
from envmanager.training.runs.writers import CsvFile, MetricsWriter, rows_of

_logger = logging.getLogger("envmanager")
EPISODES = "episodes.csv"
COLUMNS = ("steps", "seconds", "behavior", "env_id", "agent_id", "return", "length")


@attrs.frozen
class EpisodeEnd:
    """One finished episode of one agent. ``total`` is the agent's return, ``length`` the agent's number of steps.

    ``steps`` and ``seconds`` are the training's total agent steps and total time when the episode ended.
    """

    steps: int
    seconds: float
    behavior: str
    agent_id: int
    total: float
    length: int

    @property
    def env_id(self) -> int:
        """Id of the environment in which the agent plays."""
        return self.agent_id >> AGENT_BITS


class Report:
    """A receiver of a training run's progress, such as a display. ``run`` is the TrainingRun."""

    def started(self, run: Any) -> None:
        """Report that the environments are running and the trainers have been made."""

    def updated(self, run: Any, update: Update) -> None:
        """Report an update of a trainer."""

    def changed(self, run: Any, change: LearnersChanged) -> None:
        """Report that behaviors were frozen or unfrozen, by a request or by a new round."""

    def lesson_began(self, run: Any, began: LessonBegan) -> None:
        """Report that the next lesson of an environment parameter began."""

    def episode_ended(self, end: EpisodeEnd) -> None:
        """Report the end of an agent's episode. ``end.seconds`` does not include earlier runs of the training."""

    def saved(self, path: Path) -> None:
        """Report a new checkpoint."""

    def evaluated(self, run: Any, evaluation: Evaluation, is_best: bool) -> None:
        """Report an evaluation during training. ``is_best``: whether the mean return is the highest so far."""

    def evaluating(self, n_episodes: int) -> None:
        """Report that training has ended and the final evaluation begins."""

    def evaluated_at_the_end(self, run: Any, evaluation: Evaluation) -> None:
        """Report the final evaluation."""


class EpisodeLog(Report):
    """A writer that replaces ``directory/episodes.csv``. Drops old episodes from agent step ``resumed_at`` on.

    ``n_kept``: number of rows when the training was at ``resumed_at``, if it is known.
    The time of the last kept episode is added to the times of new episodes. Raises NotWritten if the file cannot be
    created, and UsageError if the file of the resumed run cannot be read.
    """

    def __init__(self, directory: Path, *, resumed_at: int | None = None, n_kept: int | None = None) -> None:
        path = self._path = directory / EPISODES
        self._is_incomplete = False
        # The last step of an episode is not yet counted in its ``steps``.
        kept = [] if resumed_at is None else read_episodes(path)
        kept = [end for end in kept if end.steps < (resumed_at or 0)] if n_kept is None else kept[:n_kept]
        self.n_rows = len(kept)
        self._seconds_before = kept[-1].seconds if kept else 0.0
        self._file = CsvFile(path, COLUMNS, [_row(end, end.seconds) for end in kept])

    def __enter__(self) -> EpisodeLog:
        return self

    def __exit__(self, *_: object) -> None:
        with self._surviving():
            self._file.close()

    def episode_ended(self, end: EpisodeEnd) -> None:
        """Append an episode. An episode that cannot be written is dropped; only the first such failure is logged."""
        with self._surviving():
            self._file.write(_row(end, self._seconds_before + end.seconds))
            self.n_rows += 1

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk must not end hours of training
            if not self._is_incomplete:
                self._is_incomplete = True
                _logger.warning("from now on episodes are missing from %s: %s.", self._path, error.strerror or error)


def _row(end: EpisodeEnd, seconds: float) -> tuple[object, ...]:
    return end.steps, f"{seconds:.3f}", end.behavior, end.env_id, end.agent_id, f"{end.total:.6g}", end.length


def read_episodes(path: Path) -> list[EpisodeEnd]:
    """Return the episodes of a file in order, or an empty list if there is no file. Skips incomplete lines.

    Raises UsageError if the file cannot be read, or if a number in a complete line is invalid.
    """
    rows = rows_of(path, COLUMNS)
    try:
        return [
            EpisodeEnd(
                int(row["steps"]),
                float(row["seconds"]),
                row["behavior"],
                int(row["agent_id"]),
                float(row["return"]),
                int(row["length"]),
            )
            for row in rows
            if row["length"]  # empty in an incomplete last line
        ]
    except ValueError as error:
        raise UsageError(f"{path} cannot be read as a list of episodes: {error}.") from error


class Clocks:
    """A set of timers, one per key. A timer is due at its first check and then every ``every_s`` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due: dict[str | None, float] = {}

    def is_due(self, what: str | None, now: float) -> bool:
        """Return whether the timer with key ``what`` is due; if so, restart it. ``now`` is from ``time.monotonic``."""
        is_due = now >= self._due.get(what, -math.inf)
        if is_due:
            self._due[what] = now + self._every_s
        return is_due


class Figures(Report):
    """A report that passes a training run's metrics to ``writers``, and closes the writers when its context ends."""

    EVERY_S = 0.5

    def __init__(
        self,
        controller: TrainerController,
        writers: Mapping[str, MetricsWriter],
        curriculum: Curriculum | None = None,
    ) -> None:
        self._controller, self._curriculum = controller, curriculum
        self._writers = dict(writers)
        self._clocks = Clocks(self.EVERY_S)
        self._untold: dict[str, Update] = {}
        self._rate_from: tuple[float, int] | None = None

    def __enter__(self) -> Figures:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._writers):
            self._try(name, lambda writer: writer.close())

    def started(self, run: Any) -> None:
        self._rate_from = time.monotonic(), self._controller.n_steps
        if set(self._controller.learning) != set(self._controller.trainers):
            self._write(_who_is_frozen(self._controller), self._controller.n_steps)

    def updated(self, run: Any, update: Update) -> None:
        if not self._writers:
            return
        now = time.monotonic()
        self._untold[update.behavior] = update
        if self._clocks.is_due(update.behavior, now):
            self._tell(update)
        if self._clocks.is_due(None, now):
            self._tell_of_all(update.n_steps, now)

    def changed(self, run: Any, change: LearnersChanged) -> None:
        self._write(_who_is_frozen(self._controller), change.n_steps)

    def lesson_began(self, run: Any, began: LessonBegan) -> None:
        self._write({f"curriculum/{began.parameter}/lesson": began.lesson + 1}, began.n_steps)

    def saved(self, path: Path) -> None:
        untold = list(self._untold.values())
        for update in untold:
            self._tell(update)
        if untold:
            self._tell_of_all(untold[-1].n_steps, time.monotonic())

    def evaluated_at_the_end(self, run: Any, evaluation: Evaluation) -> None:
        self.evaluated(run, evaluation, False)

    def evaluated(self, run: Any, evaluation: Evaluation, is_best: bool) -> None:
        scalars = _return_and_length("evaluation/", evaluation.returns, evaluation.lengths)
        for behavior, returns in evaluation.returns_of.items():
            lengths = evaluation.lengths_of.get(behavior, [])
            scalars |= _return_and_length(f"{behavior}/evaluation_", returns, lengths)
            means = evaluation.means_of_measures(behavior)
            scalars |= {f"{behavior}/evaluation_{name}": mean for name, mean in means.items()}
        self._write({**scalars, "evaluation/lost": evaluation.lost}, self._controller.n_steps)

    def _tell(self, update: Update) -> None:
        del self._untold[update.behavior]
        behavior, measures = update.behavior, self._controller.episodes.means_of_measures(update.behavior)
        told = {**update.figures, **self._means(behavior), **measures}
        self._write({f"{behavior}/{name}": figure for name, figure in told.items()}, update.n_steps)

    def _tell_of_all(self, n_steps: int, now: float) -> None:
        """Write the metrics that belong to no single behavior, such as overall means and the manager's statistics."""
        scalars = {f"{name}/mean": mean for name, mean in self._means().items()}
        scalars |= self._rate(now)
        scalars |= {} if self._curriculum is None else self._curriculum.figures()
        scalars |= {f"envmanager/{name}": value for name, value in scalars_of(self._controller.manager.stats()).items()}
        self._write(scalars, n_steps)

    def _means(self, behavior: str | None = None) -> dict[str, float]:
        """Return the mean return and length of the last episodes, or {} if none has ended."""
        episodes = self._controller.episodes
        means = {"return": episodes.mean_of_recent(behavior), "length": episodes.mean_length(behavior)}
        return {name: mean for name, mean in means.items() if not math.isnan(mean)}

    def _rate(self, now: float) -> dict[str, float]:
        """Return the agent steps per second since the last call as a metric, or {} if the rate is unknown."""
        before, n_steps = self._rate_from, self._controller.n_steps
        self._rate_from = now, n_steps
        if before is None or now <= before[0]:
            return {}
        return {"training/steps_per_s": (n_steps - before[1]) / (now - before[0])}

    def _write(self, scalars: Mapping[str, float], n_steps: int) -> None:
        for name in list(self._writers):
            self._try(name, lambda writer: writer.add_scalars(scalars, n_steps))

    def _try(self, name: str, use: Callable[[MetricsWriter], Any]) -> None:
        try:
            use(self._writers[name])
        except Exception as error:  # a full disk or a service that is down must not end hours of training
            del self._writers[name]
            _logger.warning("the metrics of %s end here: %s: %s", name, type(error).__name__, error)


def _who_is_frozen(controller: TrainerController) -> dict[str, float]:
    return {f"{behavior}/frozen": float(behavior not in controller.learning) for behavior in controller.trainers}


def _return_and_length(prefix: str, returns: list[float], lengths: list[int]) -> dict[str, float]:
    scalars = {f"{prefix}return": mean_and_spread(returns)[0]} if returns else {}
    return {**scalars, f"{prefix}length": mean_and_spread(lengths)[0]} if lengths else scalars
