"""A training run from a config: the manager, the trainers, checkpoints, evaluations and metrics.

::

    TrainingPlan ── make_manager, make_trainer ──▶ TrainerController ── Update ──▶ Reports: display, metrics, episodes
                                 control.toml ───────────┘   └── checkpoints, evaluation ──▶ TrainingResult

Checkpoints are written only between two steps of the controller. ``TrainingRun.stop`` takes effect there too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pkgutil
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.data.seeding import derive_seed
from envmanager.errors import CallStopped, ConfigError, EnvManagerError, UsageError, WorkerError
from envmanager.importing import needed_by
from envmanager.keeping.state import packed, unpacked
from envmanager.observe.episodes import RECENT, FinishedEpisode
from envmanager.observe.files import tidied, write_atomically
from envmanager.observe.stats import ManagerStats
from envmanager.options import ResetConfig, Wait
from envmanager.registry import ManagerOptions, make_manager
from envmanager.training.algorithms.networks import pick_device
from envmanager.training.algorithms.trainers import check_tables, make_trainer
from envmanager.training.controller import TrainerController, Update
from envmanager.training.curriculum import PROGRESS, Curriculum, CurriculumState, LessonBegan, ends_of
from envmanager.training.evaluation import (
    Evaluation,
    Evaluator,
    episodes_for,
    evaluate_until,
    evaluation_seed,
    mean_and_spread,
)
from envmanager.training.learner_process import LearnerFailed
from envmanager.training.learners import KEPT, LearnersChanged, unknown_behavior
from envmanager.training.runs import checkpoints, folder, metrics, records
from envmanager.training.runs.checkpoints import EVALUATED, Checkpoint, CheckpointDamaged, TrainingState
from envmanager.training.runs.control import Control, ControlFile
from envmanager.training.runs.figures import EpisodeEnd, EpisodeLog, Figures, Report
from envmanager.training.runs.plan import (
    ANY_BEHAVIOR,
    CONTROL,
    OF_TRAINING,
    TrainingOptions,
    TrainingPlan,
    seconds_of,
    table_for,
)
from envmanager.training.runs.writers import RunFacts
from envmanager.training.trainer import NotFinite, Trainer, generator_states, restore_generators

with needed_by("envmanager.training", extra="torch"):
    import torch

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

_logger = logging.getLogger("envmanager")
_GRACE_S = 0.2
"""Seconds after ``stop`` for which a step in progress, which needs no worker to be killed, is waited for."""

__all__ = ["Report", "TrainingOptions", "TrainingPlan", "TrainingResult", "TrainingRun"]


@attrs.frozen
class TrainingResult:
    """The result of a training run. ``ended`` is ``"done"``, ``"stopped"`` or, if no steps were left, ``"over"``.

    ``n_steps``: agent steps of the training, ``n_steps_before`` of them in earlier runs. ``wall_s``: seconds from the
    run's start to the end of training. ``mean_return_of``: mean recent return of each behavior with ended episodes.
    """

    ended: str
    n_steps: int
    wall_s: float
    mean_return: float
    evaluation: Evaluation | None
    stats: ManagerStats
    n_steps_before: int = 0
    mean_return_of: Mapping[str, float] = attrs.field(factory=dict)
    measures_of: Mapping[str, Mapping[str, float]] = attrs.field(factory=dict)
    """Means of the measures, such as a success rate, over the same episodes as ``mean_return_of``, by behavior."""
    lessons: Mapping[str, int] = attrs.field(factory=dict)
    """Present lesson, counted from 1, of each environment parameter that has several."""

    @property
    def steps_per_s(self) -> float:
        """Mean agent steps per second of this run."""
        return (self.n_steps - self.n_steps_before) / self.wall_s if self.wall_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "ended": self.ended,
            "n_steps": self.n_steps,
            "n_steps_before": self.n_steps_before,
            "wall_s": self.wall_s,
            "steps_per_s": self.steps_per_s,
            "mean_return": None if math.isnan(self.mean_return) else self.mean_return,
            "mean_return_of": dict(self.mean_return_of),
            "measures_of": dict(self.measures_of),
            "lessons": dict(self.lessons),
            "evaluation": None
            if self.evaluation is None
            else {
                "episodes": self.evaluation.n_episodes,
                "lost": self.evaluation.lost,
                "complete": self.evaluation.is_complete,
                "mean": self.evaluation.mean,
                "spread": self.evaluation.spread,
                "mean_length": mean_and_spread(self.evaluation.lengths)[0] if self.evaluation.lengths else None,
                "returns": dict(self.evaluation.returns_of),
                "measures": {own: self.evaluation.means_of_measures(own) for own in self.evaluation.returns_of},
            },
            "restarts": self.stats.restarts,
            "steps_lost": self.stats.steps_lost,
        }


class TrainingRun:
    """One run of a training plan. ``go()`` trains; ``stop()``, which a signal handler may call, ends training early."""

    def __init__(self, plan: TrainingPlan, report: Report) -> None:
        self.plan = plan
        self.manager: EnvManager | None = None
        self.trainers: dict[str, Trainer] = {}
        self.controller: TrainerController | None = None
        self.curriculum: Curriculum | None = None
        """Environment parameters, if the plan has any."""
        self.began = self._saved_s = 0.0
        self.n_steps_before = 0
        """Number of agent steps that earlier runs of this training have taken."""
        self.saved_at = 0
        """Number of agent steps of the training at the last checkpoint; 0 if there is none yet."""
        # Id of the training in every checkpoint; a resume restores it.
        self._id: str = secrets.token_hex(8)
        self._plan = plan.saved()
        self._reports = [report]
        """Receivers of what happens: the display, and once the environments run the figures and the episode log."""
        self._stops = False
        self.is_begun = False
        """Whether the environments have begun, so that there may be something to save."""
        self._saved: Path | None = None
        self._tried_at: int | None = None
        """Number of agent steps of the training when it last began to write a checkpoint."""
        self._evaluated_at = 0
        self._n_episodes: int | None = None
        """Number of rows in the table of episodes at the checkpoint that is resumed, if known."""
        self._log: EpisodeLog | None = None
        self._best: float | None = None
        self._evaluator: Evaluator | None = None
        self._frozen_in_config: frozenset[str] = frozenset()
        self._ends_at = math.inf
        """Number of agent steps at which the training stops, because a further part of what it replays begins there."""
        self._is_without_place = False
        """Whether the place of the loop is not saved any more."""
        self._control: ControlFile
        # Requested changes of the frozen behaviors, including those of earlier runs, for plots.
        self._changes: deque[LearnersChanged] = deque(maxlen=KEPT)
        self._lessons: list[LessonBegan] = []

    def stop(self) -> None:
        """Make ``go`` cancel any evaluation and update, save a checkpoint with the steps in flight, and return.

        A step that takes longer than a moment is not waited for, except in environments in this process.
        """
        self._stops = True
        for manager in (self.manager, None if self._evaluator is None else self._evaluator.manager):
            if manager is not None:
                manager.stop_waiting(_GRACE_S)

    def go(self) -> TrainingResult:
        """Train to the end, or until ``stop()``, and return the result.

        If a resumed training has no steps left, nothing is started or written, and ``ended`` is ``"over"``. Raises
        UsageError, for example if another run uses the folder, or left files there and neither resume nor force is set.
        """
        training, directory = self.plan.training, self.plan.directory
        folder.check(directory, resume=self.plan.resume, force=self.plan.force)
        check_tables(self.plan.trainers)
        pick_device(training.device, where="training.device")
        metrics.require(training.metrics)
        if self.plan.resume:
            records.check_resumed(self.plan)
            latest = checkpoints.load_latest(self.plan.checkpoints).training
            evaluated, n_steps = checkpoints.named(self.plan.checkpoints / EVALUATED), latest.n_steps
            is_evaluated = not latest.owes_evaluation or evaluated == checkpoints.latest(self.plan.checkpoints)
            if n_steps >= training.steps and is_evaluated:
                return TrainingResult("over", n_steps, 0.0, math.nan, None, ManagerStats(()), n_steps)
        with folder.held(directory, resume=self.plan.resume, force=self.plan.force), tidied(directory / OF_TRAINING):
            return self._train(training)

    def _train(self, training: TrainingOptions) -> TrainingResult:
        if training.threads is not None:
            torch.set_num_threads(training.threads)
        torch.manual_seed(training.seed)
        self.began = self._saved_s = time.monotonic()
        with make_manager(self._options()) as manager, ExitStack() as stack:
            controller = self._prepare(manager, stack)
            self._report(lambda report: report.started(self))
            if not manager.keeps_episodes and self.plan.manager.kind != "replay":
                why = "these environments cannot repeat them, or the config says so"
                _logger.info("a resume of this training begins its running episodes anew: %s.", why)
            self._warn_of_too_few_steps()
            try:
                controller.train(training.steps, until=self._is_over)
                if self._stops and not (manager.keeps_episodes or self.plan.manager.record or self._ends_at < math.inf):
                    controller.step(Wait.all())  # so that the trainers learn from the steps in flight too
            except CallStopped:
                pass
            except EnvManagerError as error:
                self._save_before(error, controller)
                raise
            wall_s = time.monotonic() - self.began
            if not self._stops:  # the evaluation at the end is in the place of one that is due now
                self._evaluated_at = controller.n_steps
            if not self.plan.resume or controller.n_steps > self.n_steps_before:
                self._save(controller)
            for behavior, trainer in self.trainers.items():
                if not self._stops and not trainer.version and behavior not in controller.frozen:
                    taken = f"{controller.n_steps:,}"
                    _logger.warning("%r has learned nothing: no update in %s agent steps.", behavior, taken)
            means = {behavior: controller.episodes.mean_of_recent(behavior) for behavior in self.trainers}
            measures = {behavior: controller.episodes.means_of_measures(behavior) for behavior in means}
            self._warn_of_unknown_measures(controller)
            ended = "stopped" if self._stops else "done"
            evaluation = None if self._stops else self._evaluate_at_the_end(controller)
            return TrainingResult(
                ended,
                controller.n_steps,
                wall_s,
                controller.episodes.mean_of_recent(),
                evaluation,
                manager.stats(),
                self.n_steps_before,
                {behavior: mean for behavior, mean in means.items() if not math.isnan(mean)},
                measures,
                {} if self.curriculum is None else self.curriculum.lessons,
            )

    def _warn_of_unknown_measures(self, controller: TrainerController) -> None:
        recent = controller.episodes.recent
        known = sorted({name for episode in recent for name in episode.numbers})
        for name in controller.manager.measures if recent else ():
            if name not in known:
                told = f"they have {', '.join(known)}" if known else "they have no numbers"
                _logger.warning("no info at the end of the last episodes has the measure %r: %s.", name, told)

    def _options(self) -> ManagerOptions:
        """Return the manager's options. A resumed training records into a further part, or replays one."""
        options = self.plan.manager
        if options.kind == "replay" and options.recording is not None:
            return attrs.evolve(options, recording=self._part_of(options.recording))
        if options.order is not None:
            options = attrs.evolve(options, order=self._part_of(options.order))
        if not self.plan.resume or options.record is None:
            return options
        further_part = pkgutil.resolve_name("envmanager.recording.file:further_part")
        record = further_part(options.record, checkpoints.load_latest(self.plan.checkpoints).training.n_steps)
        if record != options.record:
            _logger.warning("the recording goes on in %s, a further part of %s.", record, options.record)
        return attrs.evolve(options, record=record)

    def _part_of(self, path: str) -> str:
        """Return the part of a recording that is played again now. The training stops where the next one begins."""
        begins = pkgutil.resolve_name("envmanager.recording.file:begins_of_parts")(path)
        here = min(begins)
        if self.plan.resume:
            here = checkpoints.load_latest(self.plan.checkpoints).training.n_steps
        if here not in begins:
            known = ", ".join(f"{part} after {n_steps:,}" for n_steps, part in begins.items())
            raise UsageError(
                f"this training stands at {here:,} agent steps, where no part of the recording begins ({known}): begin "
                "it again (--force), which makes the same training."
            )
        self._ends_at = min((n_steps for n_steps in begins if n_steps > here), default=math.inf)
        return begins[here]  # type: ignore[no-any-return]

    def _prepare(self, manager: EnvManager, stack: ExitStack) -> TrainerController:
        """Make the trainers, evaluator and writers; on a resume, load the latest checkpoint. Return the controller."""
        plan, training, directory = self.plan, self.plan.training, self.plan.directory
        self.manager = manager
        self.trainers = self._make_trainers(manager, stack)
        if training.parameters:
            self.curriculum = self._make_curriculum(manager)
        controller = self.controller = TrainerController(
            manager,
            self.trainers,
            max_policy_lag=training.max_policy_lag,
            rounds=training.rounds,
            tasks=self.curriculum,
            on_update=self._updated,
            on_change=self._changed,
        )
        self._frozen_in_config = controller.frozen
        self._control = ControlFile(plan.control, self.trainers)
        config = records.resolved(plan, self.trainers)
        if plan.resume:
            changes = records.changes(records.read(directory), config)
            if records.is_edited(directory):
                changes.append(f"{directory / records.CONFIG} was edited or damaged after a training run wrote it")
            self._restore(controller, changes)
            if changes:
                _logger.warning("this training goes on with a changed config: %s.", ", ".join(changes))
        if training.evaluate_every is not None and not self._has_no_env:
            self._evaluator = stack.enter_context(self._make_evaluator(manager))
        resumed_at = controller.n_steps if plan.resume else None
        facts = RunFacts(directory, self._id, config, resumed_at)
        figures = stack.enter_context(
            Figures(controller, metrics.open_writers(training.metrics, facts), self.curriculum)
        )
        records.write(directory, config)
        log = stack.enter_context(EpisodeLog(directory, resumed_at=resumed_at, n_kept=self._n_episodes))
        self._log = log
        self._reports = [figures, log, *self._reports]
        controller.episodes.on_end = self._episode_ended
        return controller

    @property
    def _has_no_env(self) -> bool:
        """Whether the training replays a recording and names no environment, in which it could be evaluated."""
        return self.plan.manager.kind == "replay" and self.plan.manager.env is None

    def _make_evaluator(self, manager: EnvManager) -> Evaluator:
        training = self.plan.training
        more = {"n_episodes": training.evaluation_episodes, "seed": training.seed}
        return Evaluator(self.plan.manager, manager, **more, curriculum=self.curriculum)

    def _make_trainers(self, manager: EnvManager, stack: ExitStack) -> dict[str, Trainer]:
        plan, training = self.plan, self.plan.training
        known = list(manager.behavior_specs)
        for behavior in sorted(plan.trainers.keys() - {ANY_BEHAVIOR}):
            if behavior not in known:
                raise ConfigError(f"There is a trainer for {unknown_behavior(behavior, known)}")
        made: dict[str, Trainer] = {}
        for number, (behavior, spec) in enumerate(manager.behavior_specs.items()):
            table = table_for(behavior, plan.trainers)
            made[behavior] = make_trainer(behavior, spec, table, seed=training.seed + number, device=training.device)
            made[behavior].stops = lambda: self._stops
            stack.callback(made[behavior].close)
        return made

    def _make_curriculum(self, manager: EnvManager) -> Curriculum:
        training, known = self.plan.training, list(manager.behavior_specs)
        if not manager.begins_on_demand:
            raise ConfigError(
                "training.parameters needs episodes that begin on demand, which these environments cannot: see "
                "docs/episodes-and-tasks.md. Leave it out; or update the addon of a Godot game: `envmanager godot "
                "install-addon`."
            )
        curriculum = Curriculum(
            training.parameters,
            seed=training.seed,
            progress=lambda: self.controller.n_steps / training.steps if self.controller is not None else 0.0,
            on_lesson=self._lesson_began,
        )
        for path, until in ends_of(curriculum.parameters).items():
            if until.behavior is None and len(known) > 1 and until.measure != PROGRESS:
                raise ConfigError(
                    f"training.parameters.{path}.behavior is missing: which of {', '.join(known)} counts?"
                )
            if until.behavior not in (None, *known):
                raise ConfigError(f"training.parameters.{path} is for {unknown_behavior(until.behavior, known)}")
        return curriculum

    def _is_over(self) -> bool:
        controller, self.is_begun = self.controller, True
        assert controller is not None
        self._control.obey(self._carry_out, time.monotonic())
        if controller.is_between_rounds:
            gap, n_steps = self.plan.training.evaluate_every, controller.n_steps
            if self._evaluator is not None and gap is not None and n_steps // gap > self._evaluated_at // gap:
                self._evaluate_on_the_way(controller)
            if self._is_save_due(controller.n_steps - self.saved_at):
                self._save(controller)
        if not self._stops and controller.n_steps >= self._ends_at:
            _logger.warning("this part of the recording ends here: go on with the next one (--resume).")
            self._stops = True
        return self._stops

    def _is_save_due(self, n_new: int) -> bool:
        """Return whether the next regular checkpoint is due, ``n_new`` agent steps after the last."""
        every = self.plan.training.checkpoint_every
        if not isinstance(every, str):
            return every is not None and n_new >= every
        return n_new > 0 and time.monotonic() - self._saved_s >= (seconds_of(every) or 0.0)

    def _carry_out(self, asked: Control) -> None:
        assert self.controller is not None
        if asked.frozen is not None:
            self.controller.freeze_only(asked.frozen, cause=CONTROL)
        if asked.checkpoint:
            self._save(self.controller)

    def _report(self, tell: Callable[[Report], Any]) -> None:
        for report in self._reports:
            tell(report)

    def _updated(self, update: Update) -> None:
        self._report(lambda report: report.updated(self, update))

    def _changed(self, change: LearnersChanged) -> None:
        if not change.is_round:
            self._changes.append(change)
        self._report(lambda report: report.changed(self, change))

    def _lesson_began(self, began: LessonBegan) -> None:
        assert self.controller is not None
        self._lessons.append(attrs.evolve(began, n_steps=self.controller.n_steps))
        self._report(lambda report: report.lesson_began(self, self._lessons[-1]))

    def _episode_ended(self, episode: FinishedEpisode) -> None:
        assert self.controller is not None
        behavior, agent_id, total, length = episode
        seconds = time.monotonic() - self.began
        end = EpisodeEnd(self.controller.n_steps, seconds, behavior, agent_id, total, length)
        self._report(lambda report: report.episode_ended(end))

    # Evaluations.

    def _evaluate_on_the_way(self, controller: TrainerController) -> None:
        assert self._evaluator is not None
        evaluation = self._evaluator.evaluate(self.trainers, lambda: self._stops)
        if evaluation is None:  # it comes after the resume
            return
        self._evaluated_at = controller.n_steps
        is_best = self._is_best(evaluation)
        self._report(lambda report: report.evaluated(self, evaluation, is_best))
        if is_best:  # now, so that a checkpoint that knows of the evaluation is not older than what was told of it
            self._mark_best(evaluation.mean, controller)

    def _evaluate_at_the_end(self, controller: TrainerController) -> Evaluation | None:
        """Evaluate the final policies and mark a new best checkpoint. Return None if evaluation is off or stopped.

        A recording has the steps of the training alone, so that a replay needs no more of them.
        """
        n_episodes, options = self.plan.training.evaluation_episodes, self.plan.manager
        if n_episodes and self._has_no_env:
            _logger.warning("nothing is evaluated, because this replay names no environment (manager.env).")
        if not n_episodes or self._has_no_env:
            return None
        self._report(lambda report: report.evaluating(n_episodes))
        is_attached = options.engine is not None and options.engine.get("attach") is not None
        if self._evaluator is not None:
            evaluation = self._evaluator.evaluate(self.trainers, lambda: self._stops)
        elif options.kind == "replay" or ((options.record or options.order) and not is_attached):
            with self._make_evaluator(controller.manager) as self._evaluator:
                evaluation = self._evaluator.evaluate(self.trainers, lambda: self._stops)
        else:
            policies = {behavior: trainer.greedy_policy() for behavior, trainer in self.trainers.items()}
            seed = None if self.plan.manager.seed is None else evaluation_seed(self.plan.training.seed)
            episodes = episodes_for(controller.manager, n_episodes, seed, self.curriculum)
            evaluation = None
            with contextlib.suppress(CallStopped):
                evaluation = evaluate_until(lambda _: self._stops, controller.manager, policies, **episodes)
        if evaluation is not None:
            if self._is_best(evaluation):
                self._mark_best(evaluation.mean, controller)
            write_atomically(self.plan.checkpoints / EVALUATED, checkpoints.latest(self.plan.checkpoints).name)
            self._report(lambda report: report.evaluated_at_the_end(self, evaluation))
        return evaluation

    def _is_best(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation is complete, and the best so far."""
        mean = evaluation.mean
        return evaluation.is_complete and not math.isnan(mean) and (self._best is None or mean > self._best)

    def _mark_best(self, mean: float, controller: TrainerController) -> None:
        """Mark the checkpoint of the best evaluation so far, and remove those that need not be kept."""
        if self._saved is None or self.saved_at != controller.n_steps:
            self._save(controller, best=mean)
        else:
            checkpoints.mark_best(self._saved, mean)
        self._best = mean
        checkpoints.prune(self.plan.checkpoints, self._id, keep=self.plan.training.keep)

    def _warn_of_too_few_steps(self) -> None:
        training = self.plan.training
        for behavior, trainer in self.trainers.items():
            is_new = training.rounds is None and not trainer.frozen and not trainer.version
            if is_new and training.steps < trainer.n_before_update:
                why = f"the first update comes after {trainer.n_before_update:,} agent steps of its own (rollout"
                why += f", or learning_starts), and training.steps is {training.steps:,}"
                _logger.warning("%r will learn nothing: %s.", behavior, why)

    # Checkpoints.

    def _save_before(self, error: EnvManagerError, controller: TrainerController) -> None:
        """Save what was learned before ``error`` ended the training, if there is something new and it can be saved."""
        is_of_update = isinstance(error, LearnerFailed) or (isinstance(error, NotFinite) and error.env_id is None)
        if controller.n_steps in (self.saved_at, self._tried_at) or is_of_update:
            return
        if not isinstance(
            error, WorkerError
        ):  # which may have come when some trainers had taken a step, and others not
            self._is_without_place = True
        try:
            self._save(controller)
        except EnvManagerError as another:  # as on a full disk
            if type(another) is not type(error):
                _logger.warning("what was learned before the error that follows is not saved: %s", another)

    def _save(self, controller: TrainerController, *, best: float | None = None) -> None:
        self._tried_at = controller.n_steps
        trainers = {behavior: trainer.state() for behavior, trainer in self.trainers.items()}
        controller.require_finite_weights()
        recent, own = tuple(controller.episodes.recent)[-RECENT:], set(controller.manager.measures)
        training = TrainingState(
            n_steps=controller.n_steps,
            recent_episodes=recent,
            recent_measures=tuple({name: each.numbers[name] for name in own & each.numbers.keys()} for each in recent),
            learners=controller.state(),
            frozen_in_config=tuple(sorted(self._frozen_in_config)),
            changes=tuple(self._changes),
            curriculum=CurriculumState() if self.curriculum is None else CurriculumState.of(self.curriculum.state()),
            lessons=tuple(self._lessons),
            control=self._control.state,
            plan=self._plan,
            specs={behavior: controller.manager.behavior_specs[behavior] for behavior in self.trainers},
            evaluated_at=self._evaluated_at,
            owes_evaluation=bool(self.plan.training.evaluation_episodes and not self._has_no_env)
            and controller.n_steps >= self.plan.training.steps,
            n_episodes=None if self._log is None else self._log.n_rows,
        )
        checkpoint = Checkpoint(
            run=self._id,
            training=training,
            trainers=trainers,
            generators=generator_states(),
            place=self._place(controller),
        )
        keep = self.plan.training.keep
        saved = self._saved = checkpoints.save(self.plan.checkpoints, checkpoint, keep=keep, best=best)
        self.saved_at, self._saved_s = controller.n_steps, time.monotonic()
        self._report(lambda report: report.saved(saved))

    def _place(self, controller: TrainerController) -> tuple[dict[str, Any], Any] | None:
        """Return where the loop stands, for a checkpoint, or None if its episodes begin anew on a resume."""
        if not controller.manager.keeps_episodes or self._is_without_place:
            return None
        arrays: dict[str, Any] = {}
        try:
            return arrays, packed(controller.place(), arrays)
        except UsageError as error:
            self._is_without_place = True
            _logger.warning("a resume of this training begins its running episodes anew: %s", error)
            return None

    def _restore(self, controller: TrainerController, changes: list[str]) -> None:
        advice = "Resume with the config it was written with."
        if changes:
            advice = f"{advice} Since then {', '.join(changes)}."
        path = checkpoints.latest(self.plan.checkpoints)
        advice = f"{advice} {checkpoints.another_than(path)}"
        checkpoint = checkpoints.load(path)
        training = checkpoint.training
        controller.n_steps = self.saved_at = self._evaluated_at = self.n_steps_before = training.n_steps
        self._n_episodes = training.n_episodes
        if training.evaluated_at is not None:
            self._evaluated_at = training.evaluated_at
        controller.episodes.recent.extend(training.recent_episodes)
        for episode, numbers in zip(training.recent_episodes, training.recent_measures, strict=False):
            episode.numbers = numbers
        with checkpoints.restoring(f"the checkpoint {path} cannot be resumed", advice=checkpoints.another_than(path)):
            # A behavior whose `frozen` was changed in the config since then is what the config says now.
            differs = self._frozen_in_config ^ set(training.frozen_in_config)
            frozen = (set(training.learners.frozen) - differs) | (self._frozen_in_config & differs)
            controller.restore(attrs.evolve(training.learners, frozen=tuple(sorted(frozen))))
        for behavior, trainer in self.trainers.items():
            checkpoints.restore(trainer, controller.manager.behavior_specs[behavior], checkpoint, path, advice)
        with checkpoints.restoring(f"the checkpoint {path} cannot be resumed", advice=checkpoints.another_than(path)):
            restore_generators(checkpoint.generators)
        if self.curriculum is not None:
            self.curriculum.restore(training.curriculum)
        self._lessons = list(training.lessons)
        self._changes = deque(training.changes, maxlen=KEPT)  # the resume itself is not recorded as a change
        self._control = ControlFile(self.plan.control, self.trainers, seen=training.control)
        self._id = checkpoint.run or self._id
        self._best = checkpoints.best_mean(self.plan.checkpoints, self._id)
        if not self._goes_on(controller, checkpoint, path) and self.plan.manager.seed is not None:
            # new seeds, because the episodes of the old ones have been played
            controller.reset(ResetConfig(seed=derive_seed(self.plan.manager.seed, 0, generation=controller.n_steps)))

    def _goes_on(self, controller: TrainerController, checkpoint: Checkpoint, path: Path) -> bool:
        """Let the episodes of ``checkpoint`` go on, if possible. Return whether they do; if not, a warning says why."""
        why = ""
        if not controller.manager.keeps_episodes:  # which was told at the start
            return False
        if checkpoint.place is None:
            why = "the checkpoint has none"
        else:
            try:
                controller.go_on(unpacked(checkpoint.place[1], checkpoint.place[0]))
            except CheckpointDamaged:
                raise
            except UsageError as error:
                why = str(error)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                what = f"the running episodes in {path} are none: {type(error).__name__}: {error}"
                raise UsageError(f"{what}. {checkpoints.another_than(path)}") from error
        if why:
            _logger.warning("the running episodes begin anew: %s", why)
        return not why
