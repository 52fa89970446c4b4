"""Which trainers learn and which only act, and which steps each trainer gets.

::

    frozen, or not in this round ──▶ its greedy policy acts; the trainer gets no steps
    learning                     ──▶ its own policy acts; the trainer gets every step that this policy chose

The rule: a trainer gets a step only if its own policy chose the actions, and if it has got the observations that they
were chosen for. So an unfrozen trainer begins new chains, as after a reset, and never gets the steps that were in
flight when it was frozen or unfrozen.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

import attrs

from envmanager.data.steps import AgentSteps, StepInfo, Steps
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.training.rounds import RoundCount, unknown_behavior
from envmanager.training.trainer import Trainer

KEPT = 1000
"""Number of changes kept in memory. The log has all."""
_NOTHING: Mapping[str, int] = {}
_logger = logging.getLogger("envmanager")


@attrs.frozen(kw_only=True)
class LearnersChanged:
    """A change of what learns: behaviors that were frozen or unfrozen. ``learning`` are all that learn from now on.

    ``cause`` is in words: ``"control.toml"``, ``"freeze"``, ``"round 3"``. ``is_round``: the next round began; nothing
    was asked to change.
    """

    frozen: tuple[str, ...]
    unfrozen: tuple[str, ...]
    learning: tuple[str, ...]
    n_steps: int
    cause: str
    is_round: bool = False

    def __str__(self) -> str:
        frozen = f"{', '.join(self.frozen)} frozen, " if self.frozen else ""
        waiting = [behavior for behavior in self.unfrozen if behavior not in self.learning]
        later = f"{', '.join(waiting)} learning in a later round, " if waiting else ""
        return f"{frozen}{later}{', '.join(self.learning)} learning from agent step {self.n_steps:,} on ({self.cause})"


@attrs.frozen(kw_only=True)
class LearnersState:
    """The frozen behaviors and the progress of the round, for a checkpoint. ``round`` is None without rounds."""

    frozen: tuple[str, ...]
    round: RoundCount | None = None


@attrs.define
class InFlight:
    """The steps in flight: by worker, the version of each learning trainer whose policy chose the actions."""

    versions: dict[int, dict[str, int]] = attrs.field(factory=dict)

    def sent(self, worker_ids: Collection[int], versions: dict[str, int]) -> None:
        """Record that the next step of these workers is chosen by trainers of these versions."""
        for worker_id in worker_ids:
            self.versions[worker_id] = versions

    def came(self, worker_id: int) -> Mapping[str, int]:
        """Take the worker's step off the steps in flight; return the versions that chose it."""
        return self.versions.pop(worker_id, _NOTHING)

    def forget(self, behavior: str) -> None:
        """Drop a behavior from all steps in flight: its trainer will not learn from them."""
        for versions in self.versions.values():
            versions.pop(behavior, None)

    def oldest(self, behavior: str) -> float:
        """Return the oldest version of a behavior in flight; ``inf`` when there is none."""
        return min((versions.get(behavior, math.inf) for versions in self.versions.values()), default=math.inf)


class Learners:
    """The trainers of one manager. ``frozen`` behaviors were frozen on request; ``resting`` ones until their round."""

    def __init__(self, manager: EnvManager, trainers: Mapping[str, Trainer]) -> None:
        self.trainers = dict(trainers)
        self.frozen = {behavior for behavior, trainer in self.trainers.items() if trainer.frozen}
        self.resting: Set[str] = frozenset()
        self.in_flight = InFlight()
        self.changes: deque[LearnersChanged] = deque(maxlen=KEPT)
        self.on_change: Callable[[LearnersChanged], Any] | None = None
        self._manager = manager
        self._seen: dict[str, set[int]] = {behavior: set() for behavior in self.trainers}
        """Workers whose latest observations a trainer has got, by behavior."""

    @property
    def learning(self) -> tuple[str, ...]:
        """The behaviors whose trainers learn now."""
        return tuple(behavior for behavior, trainer in self.trainers.items() if not trainer.frozen)

    def require_known(self, behavior: str) -> None:
        """Raise UsageError, which suggests a similar name, for a behavior without a trainer."""
        if behavior not in self.trainers:
            raise UsageError(f"there is no trainer for {unknown_behavior(behavior, list(self.trainers))}")

    def begin(self) -> None:
        """Prepare for a reset of all environments: begin new chains, and set the policies of the manager."""
        self.in_flight.versions.clear()
        for behavior, trainer in self.trainers.items():
            trainer.environments_were_reset()
            self._seen[behavior].clear()
            self._manager.set_policy(behavior, trainer.greedy_policy() if trainer.frozen else trainer.policy)

    def change(self, *, frozen: Set[str], resting: Set[str], n_steps: int, cause: str, is_round: bool = False) -> None:
        """Freeze these behaviors and let all others learn. No changed trainer gets the steps in flight."""
        only_act = frozen | resting
        stopped = [name for name, trainer in self.trainers.items() if name in only_act and not trainer.frozen]
        resumed = [name for name, trainer in self.trainers.items() if name not in only_act and trainer.frozen]
        for behavior in stopped:
            self._stop(behavior)
        for behavior in resumed:
            self._resume(behavior)
        # A resting behavior that is frozen or unfrozen goes on resting, but the request is reported.
        newly = [name for name in self.trainers if name in stopped or name in frozen - self.frozen]
        again = [name for name in self.trainers if name in resumed or name in self.frozen - frozen]
        self.frozen, self.resting = set(frozen), frozenset(resting)
        if newly or again:
            self._tell(
                LearnersChanged(
                    frozen=tuple(newly),
                    unfrozen=tuple(again),
                    learning=self.learning,
                    n_steps=n_steps,
                    cause=cause,
                    is_round=is_round,
                )
            )

    def sent(self, worker_ids: Collection[int]) -> None:
        """Record that these workers are about to get actions from the policies of now."""
        versions = {name: trainer.version for name, trainer in self.trainers.items() if not trainer.frozen}
        self.in_flight.sent(worker_ids, versions)

    def give(self, info: StepInfo) -> int:
        """Pass the steps to each learning trainer that may have them; return how many agent steps it can learn from."""
        chosen_by = self.in_flight.came(info.worker_id)
        return sum(
            self._give_to(trainer, behavior, info, behavior in chosen_by)
            for behavior, trainer in self.trainers.items()
            if not trainer.frozen
        )

    def _give_to(self, trainer: Trainer, behavior: str, info: StepInfo, is_own: bool) -> int:
        seen = self._seen[behavior]
        if info.previous is not None and not is_own:
            seen.add(info.worker_id)
            return trainer.add(_beginning(info, info.current, behavior))
        if info.previous is not None and info.worker_id not in seen:
            trainer.add(_beginning(info, info.previous, behavior))
        seen.add(info.worker_id)
        return trainer.add(info)

    def _stop(self, behavior: str) -> None:
        trainer = self.trainers[behavior]
        trainer.pause()
        self._manager.set_policy(behavior, trainer.greedy_policy())
        self.in_flight.forget(behavior)
        trainer.frozen = True

    def _resume(self, behavior: str) -> None:
        trainer = self.trainers[behavior]
        self._manager.set_policy(behavior, trainer.policy)
        trainer.environments_were_reset()
        self._seen[behavior].clear()
        trainer.frozen = False

    def _tell(self, change: LearnersChanged) -> None:
        self.changes.append(change)
        _logger.log(logging.DEBUG if change.is_round else logging.INFO, "%s", change)
        if self.on_change is not None:
            self.on_change(change)


def _beginning(info: StepInfo, steps: Steps, behavior: str) -> StepInfo:
    """Return ``steps`` as if the environments had just been reset to these observations."""
    seen = steps.get(behavior)
    first = None if seen is None else AgentSteps.first(agent_id=seen.agent_id, obs=seen.obs, acting=seen.acting)
    own = {} if first is None else {behavior: first}
    return StepInfo(None, own, None, info.worker_id, None, info.specs)
