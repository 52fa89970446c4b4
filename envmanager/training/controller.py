"""The loop between a manager and the trainers of its behaviors.

::

    manager.step() ── StepInfo ──▶ the trainer of each behavior ── enough? ──▶ update ──▶ policy, version + 1
          ▲                                                                                     │
          └──────────────────── acts from the next step on ─────────────────────────────────────┘

The rule: an update waits while it would make any step in flight more than ``max_policy_lag`` versions old. Meanwhile
the trainer collects steps. No step is discarded for its age. Trainers are frozen and unfrozen between two steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from operator import attrgetter
from typing import Any

import attrs

from envmanager.data.steps import StepInfo
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe import events
from envmanager.observe.episodes import Episodes
from envmanager.options import ResetConfig, Wait
from envmanager.training.learners import FreezeKeys, Learners, LearnersChanged, LearnersState, RoundCount, Rounds
from envmanager.training.trainer import NotFinite, Trainer

_EPISODES_KEPT = 1000
"""Number of recent episodes kept for means, large enough to include behaviors whose episodes end rarely."""
_logger = logging.getLogger("envmanager")
_BY_WORKER = attrgetter("worker_id")


@attrs.frozen
class Update:
    """A finished update of one trainer, at agent step ``n_steps``. ``figures`` is what ``Trainer.update`` returned."""

    behavior: str
    version: int
    n_steps: int
    figures: Mapping[str, float]
    seconds: float


class TrainerController:
    """A loop that steps a manager and trains its behaviors, each with its own trainer.

    ``reset``, ``step`` and ``train`` also raise the manager's errors, and NotFinite for a number that is not finite in
    what a trainer would learn from, in the figures of an update, or, if an error says so first, in the weights.

    Args:
        manager: The manager to step. It needs a policy for each behavior without a trainer.
        trainers: Trainers by behavior.
        wait: Which responses each step waits for.
        max_policy_lag: Number of versions that no step in flight may be older than: an update waits for it. With 0 it
            waits for all steps in flight; with None the trainer's own limit applies.
        rounds: Which behaviors learn in which round. Without, all unfrozen behaviors learn.
        tasks: An endless source that always has a task, such as a Curriculum, for the manager's ``reset``.
        on_update: Called after each update.
        on_change: Called when the frozen or learning behaviors change.
    """

    def __init__(
        self,
        manager: EnvManager,
        trainers: Mapping[str, Trainer],
        *,
        wait: Wait | str | int | None = None,
        max_policy_lag: int | None = None,
        rounds: Rounds | None = None,
        tasks: Any = None,
        on_update: Callable[[Update], Any] | None = None,
        on_change: Callable[[LearnersChanged], Any] | None = None,
    ) -> None:
        if max_policy_lag is not None and max_policy_lag < 0:
            raise UsageError(f"max_policy_lag must be at least 0, not {max_policy_lag}.")
        self.manager = manager
        self.trainers = dict(trainers)
        self.episodes = Episodes(keeps_returns=False, n_recent=_EPISODES_KEPT, measures=manager.measures)
        """Episodes played for training; episodes of an evaluation with the same manager are not included."""
        self.n_steps = 0
        """Number of agent steps that the trainers have received to learn from."""
        self.rounds = rounds
        self.tasks = tasks
        self._wait = None if wait is None else Wait.parse(wait)
        self._max_policy_lag = max_policy_lag
        self._on_update = on_update
        self._learners = Learners(manager, self.trainers)
        self._ready: list[int] = []
        self._goal = 0
        self._toggles: deque[str] = deque()
        self._keys = FreezeKeys(manager)
        self._dropped: set[int] = set()
        self._round = RoundCount()
        if rounds is not None:
            rounds.check(self.trainers)
            for behavior, trainer in self.trainers.items():
                if trainer.learns_while_playing:
                    raise UsageError(
                        f"the trainer of {behavior!r} changes its policy during a round, but rounds need fixed "
                        "policies: leave out `apart`, or the rounds."
                    )
            self._require_learners(self.frozen)
            self._change(self.frozen, self._round)
        self._learners.on_change = on_change

    # Freezing.

    @property
    def learning(self) -> tuple[str, ...]:
        """The behaviors whose trainers learn now. The behaviors of all other trainers act greedily."""
        return self._learners.learning

    @property
    def frozen(self) -> frozenset[str]:
        """The behaviors frozen on request. Behaviors that only wait for their round are not included."""
        return frozenset(self._learners.frozen)

    @property
    def changes(self) -> list[LearnersChanged]:
        """The last 1000 changes of the frozen or learning behaviors, oldest first."""
        return list(self._learners.changes)

    @property
    def round(self) -> int | None:
        """Number of the current round, counted from 1; None without rounds."""
        return None if self.rounds is None else self._round.number

    @property
    def is_between_rounds(self) -> bool:
        """Whether a round is about to begin: some worker has no step in it yet. Always True without rounds."""
        return self.rounds is None or self._n_played() == 0

    def freeze(self, behavior: str) -> None:
        """Freeze a behavior: from the next step on it acts greedily, and its trainer gets no steps and no updates.

        Call between two steps. Raises UsageError for a behavior without a trainer, or if no behavior would learn.
        """
        self._learners.require_known(behavior)
        self.freeze_only(self.frozen | {behavior}, cause="freeze")

    def unfreeze(self, behavior: str) -> None:
        """Unfreeze a behavior, so that it learns again from the next step on. With rounds it learns only in its rounds.

        Call between two steps. Raises UsageError for a behavior without a trainer.
        """
        self._learners.require_known(behavior)
        self.freeze_only(self.frozen - {behavior}, cause="unfreeze")

    def freeze_only(self, behaviors: Set[str], *, cause: str = "freeze_only") -> None:
        """Freeze ``behaviors`` and unfreeze the rest. Raises UsageError as ``freeze`` does; then nothing changes."""
        for behavior in sorted(behaviors):
            self._learners.require_known(behavior)
        self._require_learners(behaviors)
        self._change(behaviors, self._round, cause)

    def toggle(self, behavior: str) -> None:
        """Switch a behavior between frozen and unfrozen at the start of the next step. Thread-safe.

        Raises UsageError for a behavior without a trainer. If no behavior would learn, ``step`` only logs a warning.
        """
        self._learners.require_known(behavior)
        self._toggles.append(behavior)

    def state(self) -> LearnersState:
        """Return the frozen behaviors and the progress of the round, for a checkpoint."""
        count = None if self.rounds is None else RoundCount(self._round.number, self._n_played())
        return LearnersState(frozen=tuple(sorted(self.frozen)), round=count)

    def restore(self, state: LearnersState) -> None:
        """Restore a state that ``state()`` returned. Call before the first reset. Ignores behaviors without a trainer.

        Raises UsageError if no behavior would learn.
        """
        frozen = self.trainers.keys() & set(state.frozen)
        self._require_learners(frozen)
        self._change(frozen, self._round if state.round is None else attrs.evolve(state.round), "resumed")

    # Playing and learning.

    def place(self) -> dict[str, Any]:
        """Return where the loop and its manager stand, as plain data. Raises the errors of ``EnvManager.state``."""
        return {"manager": self.manager.state(), "episodes": self.episodes.state(), "learners": self._learners.state()}

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Go on from what ``place`` returned, once the trainers are restored. Raises the errors of ``reset(state=…)``.

        Another number of workers is possible unless steps were in flight.
        """
        infos = self.manager.reset(state=place["manager"], tasks=self.tasks)
        self._ready = [info.worker_id for info in infos]
        self._learners.restore(place["learners"], self._ready, len(place["manager"]["workers"]))
        self.episodes.restore(place["episodes"])

    def reset(self, config: ResetConfig | Mapping[str, Any] | None = None) -> None:
        """Set the manager's policies, reset all environments, and pass their first observations to the trainers."""
        self._learners.begin()
        infos = self.manager.reset(config, tasks=self.tasks)
        self._ready = []
        self._take(infos)

    def train(self, n_steps: int, *, until: Callable[[], bool] | None = None) -> None:
        """Step and train until ``self.n_steps`` reaches ``n_steps`` agent steps or ``until()`` returns True.

        Calls ``reset`` first if there was no reset yet. Raises UsageError if no behavior would learn.
        """
        self._require_learners(self.frozen)
        self._goal = n_steps
        if not self._ready and not self._learners.in_flight:
            self.reset()
        self._learn()  # if the update before was stopped
        while self.n_steps < n_steps and not (until is not None and until()):
            self.step()

    def step(self, wait: Wait | None = None) -> list[Update]:
        """Step the manager, update each ready trainer, and return the updates. Steps again while an update has to wait.

        With rounds, trainers are updated only at the end of a round. ``wait`` replaces the controller's ``wait``.
        """
        self._obey_toggles()
        try:
            self._step(self._wait if wait is None else wait)
            return self._learn()
        except Exception as error:
            self.require_finite_weights(error)  # with NaN in the weights, actions fail in many ways
            raise

    def require_finite_weights(self, cause: Exception | None = None) -> None:
        """Raise NotFinite from ``cause`` if any weight is NaN or infinite. Call this before weights are saved."""
        for behavior, trainer in () if isinstance(cause, NotFinite) else self.trainers.items():
            weight = trainer.not_finite()
            if weight is not None:
                raise NotFinite(behavior, weight, math.nan, self.n_steps) from cause

    def _step(self, wait: Wait | None) -> None:
        self._learners.sent([worker_id for worker_id in self._ready if worker_id not in self._dropped])
        self._ready = []
        infos = sorted(self.manager.step(wait), key=_BY_WORKER)  # not as they came, which no run repeats
        if not infos and self.tasks is not None and self.manager.tasks.done:
            raise UsageError(f"there are no more tasks after {self.n_steps:,} agent steps: give an endless source.")
        self._take(infos)
        if self.manager.events.count(events.Dropped) != len(self._dropped):
            self._dropped = {worker.worker_id for worker in self.manager.stats().workers if worker.dropped}
            for worker_id in self._dropped:  # so that no update waits for their steps
                self._learners.in_flight.pop(worker_id, None)

    def _take(self, infos: list[StepInfo]) -> None:
        for info in infos:
            self._ready.append(info.worker_id)
            self._learners.require_finite(info, self.n_steps)
            self.episodes.add(info)
            if self.rounds is not None and info.is_step:
                self._round.add(info.worker_id)
            self.n_steps += self._learners.give(info)

    def _learn(self) -> list[Update]:
        if self.rounds is None:
            return self._update_all(lambda trainer: trainer.is_ready())
        if self._n_played() < self.rounds.steps:
            return []
        updates = self._update_all(lambda trainer: trainer.can_update())
        self._change(self.frozen, RoundCount(self._round.number + 1))
        return updates

    def _update_all(self, is_ready: Callable[[Trainer], bool]) -> list[Update]:
        updates = []
        for behavior, trainer in self.trainers.items():
            # One step of many environments may be enough for several updates. on_update may freeze the behavior.
            while not trainer.frozen and is_ready(trainer):
                updates.append(self._update(behavior, trainer))
        return updates

    def _update(self, behavior: str, trainer: Trainer) -> Update:
        most = trainer.max_policy_lag if self._max_policy_lag is None else self._max_policy_lag
        while trainer.version + 1 - self._learners.oldest_in_flight(behavior) > most:
            self._step(Wait.all())
        began = time.perf_counter()
        figures = trainer.update(min(1.0, self.n_steps / self._goal) if self._goal else 0.0)
        seconds = time.perf_counter() - began
        for name, figure in figures.items():
            if not math.isfinite(figure):
                raise NotFinite(behavior, name, figure, self.n_steps)
        update = Update(behavior, trainer.version, self.n_steps, figures, seconds)
        if self._on_update is not None:
            self._on_update(update)
        return update

    # Rounds, and requests to freeze.

    def _change(self, frozen: Set[str], count: RoundCount, cause: str | None = None) -> None:
        """Freeze only ``frozen``. Set the round to ``count``, but skip rounds in which no unfrozen behavior learns."""
        number, resting = count.number, frozenset[str]()
        if self.rounds is not None:
            number = self.rounds.next_with(self.trainers.keys() - frozen, count.number)
            self._round = count if number == count.number else RoundCount(number)
            resting = frozenset(self.trainers.keys() - set(self.rounds.group(number)))
        self._learners.change(
            frozen=frozen,
            resting=resting,
            n_steps=self.n_steps,
            cause=f"round {number}" if cause is None else cause,
            is_round=cause is None,
        )

    def _n_played(self) -> int:
        """Return the number of steps that the slowest worker has taken in this round. Dropped workers are ignored."""
        return self._round.played(set(range(self.manager.n_workers)) - self._dropped)

    def _require_learners(self, frozen: Set[str]) -> None:
        could_learn = self.trainers.keys() if self.rounds is None else self.rounds.behaviors
        if could_learn and not could_learn - frozen:
            names = ", ".join(map(repr, sorted(could_learn)))
            when = "" if self.rounds is None else " in any round"
            raise UsageError(
                f"with {names} frozen no behavior would learn{when}: unfreeze one of them, or stop the training."
            )

    def _obey_toggles(self) -> None:
        asked = [(self._toggles.popleft(), "toggle") for _ in range(len(self._toggles))]
        asked += [(behavior, "a key in the game's window") for behavior in self._keys.pressed()]
        for behavior, cause in asked:
            try:
                self.freeze_only(self.frozen ^ {behavior}, cause=cause)
            except UsageError as error:  # toggle() has returned already, so it cannot raise this
                _logger.warning("%s", error)
