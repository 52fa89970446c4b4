"""The loop between a manager and the trainers of its behaviors.

::

    manager.step() ── StepInfo ──▶ the trainer of each behavior ── enough? ──▶ update ──▶ policy, version + 1
          ▲                                                                                     │
          └──────────────────── acts from the next step on ─────────────────────────────────────┘

The rule: a trainer is updated only when no step that is still in flight would then be staler than ``max_policy_lag``
versions; until then the trainer collects. Nothing is thrown away. Who learns changes only between two steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Any

import attrs

from envmanager.data.steps import StepInfo
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe import events
from envmanager.observe.episodes import Episodes
from envmanager.options import ResetConfig, Wait
from envmanager.training.learners import Learners, LearnersChanged
from envmanager.training.rounds import RoundCount, Rounds
from envmanager.training.trainer import Trainer

_EPISODES_KEPT = 1000
"""For means: behaviors of which few episodes end should be among them too."""
_logger = logging.getLogger("envmanager")


@attrs.frozen
class Update:
    """One update of one trainer, and when it was. ``figures`` are what the trainer said of it."""

    behavior: str
    version: int
    n_steps: int
    figures: Mapping[str, float]
    seconds: float


class TrainerController:
    """Trains every behavior of a manager, each by a trainer of its own.

    Behaviors without a trainer need a policy in the manager. ``max_policy_lag``: by how many versions a step may have
    been chosen before it is learned from; 0 waits for all steps before each update, and each trainer has a default.
    ``rounds``: who learns when; without them all do that are not frozen. ``on_update`` is told of each update,
    ``on_change`` when somebody is frozen or learns again.
    Exceptions of the manager (a worker that failed for good, a bad action) come out of ``step`` and ``train``.
    """

    def __init__(
        self,
        manager: EnvManager,
        trainers: Mapping[str, Trainer],
        *,
        wait: Wait | str | int | None = None,
        max_policy_lag: int | None = None,
        rounds: Rounds | None = None,
        on_update: Callable[[Update], Any] | None = None,
        on_change: Callable[[LearnersChanged], Any] | None = None,
    ) -> None:
        if max_policy_lag is not None and max_policy_lag < 0:
            raise UsageError(f"max_policy_lag must be at least 0, not {max_policy_lag}.")
        self.manager = manager
        self.trainers = dict(trainers)
        self.episodes = Episodes(keeps_returns=False, n_recent=_EPISODES_KEPT)
        """Those that were learned from: what others play with this manager, an evaluation, does not count."""
        self.n_steps = 0
        """How many steps of agents the trainers have learned from or will."""
        self.rounds = rounds
        self._wait = None if wait is None else Wait.parse(wait)
        self._max_policy_lag = max_policy_lag
        self._on_update = on_update
        self._learners = Learners(manager, self.trainers)
        self._ready: list[int] = []
        self._goal = 0
        self._toggles: deque[str] = deque()
        self._dropped: set[int] = set()
        self._round = RoundCount()
        if rounds is not None:
            rounds.check(self.trainers)
            _require_fixed_policies(self.trainers)
            self._require_learners(self.frozen)
            self._change(self.frozen, self._round)
        self._learners.on_change = on_change

    # Who learns.

    @property
    def learning(self) -> tuple[str, ...]:
        """The behaviors whose trainers learn now; the others act greedily."""
        return self._learners.learning

    @property
    def frozen(self) -> frozenset[str]:
        """The behaviors that were frozen, whoever's round it is."""
        return frozenset(self._learners.frozen)

    @property
    def changes(self) -> list[LearnersChanged]:
        """Who was frozen and unfrozen, oldest first; the last thousand."""
        return list(self._learners.changes)

    @property
    def round(self) -> int | None:
        """The number of the round, counted from 1; None without rounds."""
        return None if self.rounds is None else self._round.number

    @property
    def is_between_rounds(self) -> bool:
        """Whether nothing of the round that has begun is played yet; without rounds always."""
        return self.rounds is None or self._n_played() == 0

    def freeze(self, behavior: str) -> None:
        """From the next step on, have it act greedily; its trainer collects nothing and is not updated.

        Call it between two steps. Raises UsageError for a behavior without a trainer, or when nobody would learn.
        """
        self._learners.require_known(behavior)
        self.freeze_only(self.frozen | {behavior}, cause="freeze")

    def unfreeze(self, behavior: str) -> None:
        """Let its trainer learn again, with rounds when it is its turn; from steps that are chosen from now on."""
        self._learners.require_known(behavior)
        self.freeze_only(self.frozen - {behavior}, cause="unfreeze")

    def freeze_only(self, behaviors: Set[str], *, cause: str = "freeze_only") -> None:
        """Freeze these and no others. Raises what ``freeze`` does, and then nobody has changed."""
        for behavior in sorted(behaviors):
            self._learners.require_known(behavior)
        self._require_learners(behaviors)
        self._change(behaviors, self._round, cause)

    def toggle(self, behavior: str) -> None:
        """Freeze a behavior, or let it learn again, before the next step; from anywhere, another thread too.

        Raises UsageError for a behavior without a trainer. That nobody would learn is found out later, and logged.
        """
        self._learners.require_known(behavior)
        self._toggles.append(behavior)

    def state(self) -> dict[str, Any]:
        """Who learns, and how far the round is, for a checkpoint: plain data."""
        facts: dict[str, Any] = {"frozen": sorted(self.frozen)}
        if self.rounds is not None:
            facts["round"] = {"number": self._round.number, "steps": self._n_played()}
        return facts

    def restore(self, facts: Mapping[str, Any]) -> None:
        """As ``state`` told, before the first reset; behaviors that are no more are passed over."""
        frozen = self.trainers.keys() & set(facts["frozen"])
        self._require_learners(frozen)
        self._change(frozen, RoundCount(**facts["round"]) if "round" in facts else self._round, "resumed")

    # Playing and learning.

    def reset(self, config: ResetConfig | Mapping[str, Any] | None = None) -> None:
        """Begin new episodes everywhere, and hand the policies to the manager."""
        self._learners.begin()
        infos = self.manager.reset(config)
        self._ready = []
        self._take(infos)

    def train(self, n_steps: int, *, until: Callable[[], bool] | None = None) -> None:
        """Step and update until ``n_steps`` steps of agents in all have been taken, or ``until()``.

        Raises UsageError when nobody learns.
        """
        self._require_learners(self.frozen)
        self._goal = n_steps
        if not self._ready and not self._learners.in_flight.versions:
            self.reset()
        while self.n_steps < n_steps and not (until is not None and until()):
            self.step()

    def step(self, wait: Wait | None = None) -> list[Update]:
        """One step of the manager, and the updates for which that was enough. ``wait``: other than usual."""
        self._obey_toggles()
        self._step(self._wait if wait is None else wait)
        if self.rounds is None:
            return self._update_all(lambda trainer: trainer.is_ready())
        if self._n_played() < self.rounds.steps:
            return []
        updates = self._update_all(lambda trainer: trainer.can_update())
        self._change(self.frozen, RoundCount(self._round.number + 1))
        return updates

    def _step(self, wait: Wait | None) -> None:
        self._learners.sent([worker_id for worker_id in self._ready if worker_id not in self._dropped])
        self._ready = []
        self._take(self.manager.step(wait))
        self._note_dropped()

    def _take(self, infos: list[StepInfo]) -> None:
        for info in infos:
            self._ready.append(info.worker_id)
            self.episodes.add(info)
            if self.rounds is not None and info.previous is not None and info.lost is None:
                self._round.add(info.worker_id)
            self.n_steps += self._learners.give(info)

    def _update_all(self, is_ready: Callable[[Trainer], bool]) -> list[Update]:
        updates = []
        for behavior, trainer in self.trainers.items():
            # Many environments may bring enough for several at once; who is told of one may freeze it.
            while not trainer.frozen and is_ready(trainer):
                updates.append(self._update(behavior, trainer))
        return updates

    def _update(self, behavior: str, trainer: Trainer) -> Update:
        most = trainer.max_policy_lag if self._max_policy_lag is None else self._max_policy_lag
        while trainer.version + 1 - self._learners.in_flight.oldest(behavior) > most:
            self._step(Wait.all())
        began = time.monotonic()
        figures = trainer.update(min(1.0, self.n_steps / self._goal) if self._goal else 0.0)
        seconds = time.monotonic() - began
        update = Update(behavior, trainer.version, self.n_steps, figures, seconds)
        if self._on_update is not None:
            self._on_update(update)
        return update

    def _note_dropped(self) -> None:
        """Nobody waits for a worker that was given up for good."""
        if self.manager.events.count(events.Dropped) != len(self._dropped):
            self._dropped = {worker.worker_id for worker in self.manager.stats().workers if worker.dropped}
            for worker_id in self._dropped:
                self._learners.in_flight.came(worker_id)

    # Rounds, and what others ask for.

    def _change(self, frozen: Set[str], count: RoundCount, cause: str | None = None) -> None:
        """Freeze these; with rounds it is this one, or the next in which somebody learns who is not frozen."""
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
        """How many steps of the round every environment has taken."""
        return self._round.played(set(range(self.manager.n_workers)) - self._dropped)

    def _require_learners(self, frozen: Set[str]) -> None:
        could_learn = self.trainers.keys() if self.rounds is None else self.rounds.behaviors
        if could_learn and not could_learn - frozen:
            names = ", ".join(map(repr, sorted(could_learn)))
            when = "" if self.rounds is None else " in any round"
            raise UsageError(
                f"with {names} frozen nobody would learn{when}: let one of them learn, or stop the training."
            )

    def _obey_toggles(self) -> None:
        while self._toggles:
            behavior = self._toggles.popleft()
            try:
                self.freeze_only(self.frozen ^ {behavior}, cause="toggle")
            except UsageError as error:  # who asked has gone on long ago, so this cannot be raised to them
                _logger.warning("%s", error)


def _require_fixed_policies(trainers: Mapping[str, Trainer]) -> None:
    for behavior, trainer in trainers.items():
        if trainer.learns_while_playing:
            raise UsageError(
                f"the trainer of {behavior!r} learns while it plays, so no round has fixed policies: "
                "leave out `apart`, or the rounds."
            )
