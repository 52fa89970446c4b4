"""A whole training from a config: the manager, the trainers, checkpoints, evaluation, figures.

::

    TrainingPlan ── make_manager, make_trainer ──▶ TrainerController ── Update ──▶ Report (display, TensorBoard)
                                 control.toml ───────────┘   └── checkpoints, evaluation ──▶ TrainingResult

The rule: it stops only between two steps of the controller, so what is saved is always whole.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from envmanager.data.plain_specs import plain_spec
from envmanager.data.seeding import derive_seed
from envmanager.errors import ConfigError
from envmanager.extras import needed_by
from envmanager.observe.stats import ManagerStats
from envmanager.options import ResetConfig, Wait
from envmanager.registry import make_manager
from envmanager.training import checkpoints, generators, run_folder
from envmanager.training.control import Control, ControlFile
from envmanager.training.controller import TrainerController, Update
from envmanager.training.episode_log import EpisodeEnd, EpisodeLog
from envmanager.training.evaluation import Evaluation, evaluate
from envmanager.training.learners import KEPT, LearnersChanged
from envmanager.training.plan import ANY_BEHAVIOR, TrainingOptions, TrainingPlan
from envmanager.training.rounds import unknown_behavior
from envmanager.training.trainer import Trainer
from envmanager.training.trainers import PART, make_trainer, restore, table_for

with needed_by("envmanager.training", extra="torch"):
    import torch

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager

__all__ = ["Report", "TrainingOptions", "TrainingPlan", "TrainingResult", "TrainingRun"]


@attrs.frozen
class TrainingResult:
    """How a training went. ``ended`` is ``"done"`` or ``"stopped"``.

    Of the ``n_steps`` this run has taken those that came after ``n_steps_before``, in ``wall_s`` seconds.
    """

    ended: str
    n_steps: int
    wall_s: float
    mean_return: float
    evaluation: Evaluation | None
    stats: ManagerStats
    n_steps_before: int = 0

    @property
    def steps_per_s(self) -> float:
        """How fast this run was."""
        return (self.n_steps - self.n_steps_before) / self.wall_s if self.wall_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "ended": self.ended,
            "n_steps": self.n_steps,
            "n_steps_before": self.n_steps_before,
            "wall_s": self.wall_s,
            "steps_per_s": self.steps_per_s,
            "mean_return": None if math.isnan(self.mean_return) else self.mean_return,
            "evaluation": None
            if self.evaluation is None
            else {
                "episodes": len(self.evaluation.returns),
                "mean": self.evaluation.mean,
                "spread": self.evaluation.spread,
                "returns": dict(self.evaluation.returns_of),
            },
            "restarts": self.stats.restarts,
            "steps_lost": self.stats.steps_lost,
        }


class Report(Protocol):
    """Who is told how it goes."""

    def started(self, run: TrainingRun) -> None:
        """The environments run and the trainers are there."""

    def updated(self, run: TrainingRun, update: Update) -> None:
        """A trainer has learned."""

    def changed(self, run: TrainingRun, change: LearnersChanged) -> None:
        """Somebody was frozen, or learns again."""

    def saved(self, path: Path) -> None:
        """A checkpoint was written."""

    def evaluating(self, n_episodes: int) -> None:
        """Training has ended, and the policies are about to be tried."""


class TrainingRun:
    """One training. ``stop()`` may be called from a signal handler."""

    def __init__(self, plan: TrainingPlan, report: Report) -> None:
        self.plan = plan
        self.manager: EnvManager | None = None
        self.trainers: dict[str, Trainer] = {}
        self.controller: TrainerController | None = None
        self.began = 0.0
        self.n_steps_before = 0
        """How many steps the training that this one goes on with had taken."""
        # In every checkpoint, also of a training that goes on with this one.
        self._id: str | None = secrets.token_hex(8)
        self._plan = plan.to_json()
        self._report = report
        self._stops = False
        self._saved_at = 0
        self._log: EpisodeLog | None = None
        self._frozen_in_config: frozenset[str] = frozenset()
        self._control: ControlFile | None = None
        # Who was frozen and who learned again because somebody asked for it, also before this one went on: for plots.
        self._changes: deque[Mapping[str, Any]] = deque(maxlen=KEPT)

    def stop(self) -> None:
        """Save and leave after the step that is being taken."""
        self._stops = True

    def go(self) -> TrainingResult:
        """Train to the end, or until ``stop()``. Raises UsageError for a folder that holds something else."""
        training = self.plan.training
        run_folder.check(self.plan.directory, resume=self.plan.resume, force=self.plan.force)
        if training.threads is not None:
            torch.set_num_threads(training.threads)
        torch.manual_seed(training.seed)
        self.began = time.monotonic()
        with make_manager(self.plan.manager) as manager, ExitStack() as stack:
            self.manager = manager
            self.trainers = self._make_trainers(manager, stack)
            controller = self.controller = self._make_controller(manager)
            if self.plan.resume:
                self._restore(controller)
            if self.plan.force:
                run_folder.clear(self.plan.directory)
            resumed_at = controller.n_steps if self.plan.resume else None
            self._log = stack.enter_context(EpisodeLog(self.plan.directory, resumed_at=resumed_at))
            controller.episodes.on_end = self._episode_ended
            self._report.started(self)
            controller.train(training.steps, until=self._is_over)
            if self._stops:
                controller.step(Wait.all())  # what was in flight is learned from too
            wall_s = time.monotonic() - self.began
            self._save(controller)
            mean_return = controller.episodes.mean_of_recent()
            evaluation = None if self._stops else self._evaluate(manager)
            ended = "stopped" if self._stops else "done"
            return TrainingResult(
                ended, controller.n_steps, wall_s, mean_return, evaluation, manager.stats(), self.n_steps_before
            )

    def _make_trainers(self, manager: EnvManager, stack: ExitStack) -> dict[str, Trainer]:
        plan, training = self.plan, self.plan.training
        known = list(manager.behavior_specs)
        for behavior in sorted(plan.trainers.keys() - {ANY_BEHAVIOR}):
            if behavior not in known:
                raise ConfigError(f"There is a trainer for {unknown_behavior(behavior, known)}")
        if training.rounds is not None:
            training.rounds.check(known)
        made: dict[str, Trainer] = {}
        for number, (behavior, spec) in enumerate(manager.behavior_specs.items()):
            table = table_for(behavior, plan.trainers)
            made[behavior] = make_trainer(behavior, spec, table, seed=training.seed + number, device=training.device)
            stack.callback(made[behavior].close)
        return made

    def _make_controller(self, manager: EnvManager) -> TrainerController:
        training = self.plan.training
        controller = TrainerController(
            manager,
            self.trainers,
            max_policy_lag=training.max_policy_lag,
            rounds=training.rounds,
            on_update=self._updated,
            on_change=self._changed,
        )
        self._frozen_in_config = controller.frozen
        self._control = ControlFile(self.plan.control, self.trainers)
        return controller

    def _is_over(self) -> bool:
        controller, every = self.controller, self.plan.training.checkpoint_every
        assert controller is not None
        assert self._control is not None
        self._control.obey(self._carry_out, time.monotonic())
        is_due = every is not None and controller.n_steps - self._saved_at >= every
        if is_due and controller.is_between_rounds:
            self._save(controller)
        return self._stops

    def _carry_out(self, asked: Control) -> None:
        assert self.controller is not None
        if asked.frozen is not None:
            self.controller.freeze_only(asked.frozen, cause=run_folder.CONTROL)
        if asked.checkpoint:
            self._save(self.controller)

    def _updated(self, update: Update) -> None:
        self._report.updated(self, update)

    def _changed(self, change: LearnersChanged) -> None:
        if not change.is_round:
            self._changes.append(attrs.asdict(change))
        self._report.changed(self, change)

    def _episode_ended(self, behavior: str, agent_id: int, total: float) -> None:
        assert self._log is not None
        assert self.controller is not None
        seconds = self._log.seconds + time.monotonic() - self.began
        self._log.write(EpisodeEnd(self.controller.n_steps, seconds, behavior, agent_id, total))

    def _evaluate(self, manager: EnvManager) -> Evaluation | None:
        n_episodes = self.plan.training.evaluation_episodes
        if not n_episodes:
            return None
        self._report.evaluating(n_episodes)
        policies = {behavior: trainer.greedy_policy() for behavior, trainer in self.trainers.items()}
        return evaluate(manager, policies, episodes_per_env=-(-n_episodes // manager.n_envs))

    def _save(self, controller: TrainerController) -> None:
        states = {PART.format(behavior): trainer.state() for behavior, trainer in self.trainers.items()}
        facts = {
            "n_steps": controller.n_steps,
            "recent_returns": list(controller.episodes.recent),
            "learners": controller.state(),
            "frozen_in_config": sorted(self._frozen_in_config),
            "changes": list(self._changes),
            "control": None if self._control is None else self._control.state,
            "plan": self._plan,
            "specs": self._specs(),
        }
        states["controller"] = (generators.states(), facts)
        checkpoint = checkpoints.facts_and_arrays(states, run=self._id)
        self._report.saved(checkpoints.save(self.plan.checkpoints, f"{controller.n_steps:012d}", checkpoint))
        self._saved_at = controller.n_steps

    def _specs(self) -> dict[str, Any]:
        """What the agents see and do, so that a policy can act where there is no environment."""
        assert self.manager is not None
        return {behavior: plain_spec(self.manager.behavior_specs[behavior]) for behavior in self.trainers}

    def _restore(self, controller: TrainerController) -> None:
        checkpoint = checkpoints.load_latest(self.plan.checkpoints)
        for trainer in self.trainers.values():
            restore(trainer, checkpoint, self.plan.checkpoints, "Resume with the config it was written with.")
        facts = checkpoint.facts["parts"]["controller"]
        controller.n_steps = self._saved_at = self.n_steps_before = int(facts["n_steps"])
        controller.episodes.recent.extend(facts.get("recent_returns", ()))
        self._restore_learners(controller, facts)
        self._id = checkpoint.facts.get("run")
        generators.restore(checkpoint.arrays["controller"])
        if self.plan.manager.seed is not None:  # the episodes that the training began with have been played
            controller.reset(ResetConfig(seed=derive_seed(self.plan.manager.seed, 0, generation=controller.n_steps)))

    def _restore_learners(self, controller: TrainerController, facts: Mapping[str, Any]) -> None:
        """As they were saved; but who is frozen in the config since then, or is not any more, is as it says now."""
        if "learners" not in facts:  # a checkpoint from before trainers could be frozen while they train
            return
        differs = self._frozen_in_config ^ set(facts["frozen_in_config"])
        frozen = (set(facts["learners"]["frozen"]) - differs) | (self._frozen_in_config & differs)
        controller.restore({**facts["learners"], "frozen": sorted(frozen)})
        self._changes = deque(facts.get("changes", ()), maxlen=KEPT)  # that it goes on as it was is no change
        self._control = ControlFile(self.plan.control, self.trainers, seen=facts["control"])
