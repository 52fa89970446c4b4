"""Who learns and who only acts, and what each trainer is given of the steps.

::

    frozen, or not in this round ──▶ its greedy policy acts; it is given nothing
    learns                       ──▶ its own policy acts; it is given every step that this policy chose

The rule: a trainer is given a step only if its own policy chose it, and only after what it was chosen on. So a trainer
that was frozen begins new chains, as after a reset, and steps that were in flight then are kept from it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, StepInfo, Steps
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.training.rounds import unknown_behavior
from envmanager.training.trainer import Trainer

KEPT = 1000
"""How many changes are kept; older ones live on in the log."""
_NOTHING: Mapping[str, int] = {}
_logger = logging.getLogger("envmanager")


@attrs.frozen(kw_only=True)
class LearnersChanged:
    """Some behaviors were frozen, others learn again; ``learning`` are all that learn from now on.

    ``cause`` is in words: ``"control.toml"``, ``"freeze"``, ``"round 3"``. ``is_round``: nobody asked for it, it was
    the next round's turn.
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
        return f"{frozen}{later}{', '.join(self.learning)} learning from step {self.n_steps:,} on ({self.cause})"


@attrs.define
class InFlight:
    """Which version of which learning trainers each worker's step in flight was chosen by."""

    versions: dict[int, dict[str, int]] = attrs.field(factory=dict)

    def sent(self, worker_ids: Collection[int], versions: dict[str, int]) -> None:
        """These workers have been given actions, or will be by the next step of the manager."""
        for worker_id in worker_ids:
            self.versions[worker_id] = versions

    def came(self, worker_id: int) -> Mapping[str, int]:
        """What the worker's step was chosen by; it is in flight no more."""
        return self.versions.pop(worker_id, _NOTHING)

    def forget(self, behavior: str) -> None:
        """Nobody learns from what the policy of this behavior has chosen."""
        for versions in self.versions.values():
            versions.pop(behavior, None)

    def oldest(self, behavior: str) -> float:
        """``inf`` when nothing is in flight."""
        return min((versions.get(behavior, math.inf) for versions in self.versions.values()), default=math.inf)


class Learners:
    """The trainers of one manager. ``frozen``: by whoever asked for it; ``resting``: until it is their round."""

    def __init__(self, manager: EnvManager, trainers: Mapping[str, Trainer]) -> None:
        self.trainers = dict(trainers)
        self.frozen = {behavior for behavior, trainer in self.trainers.items() if trainer.frozen}
        self.resting: Set[str] = frozenset()
        self.in_flight = InFlight()
        self.changes: deque[LearnersChanged] = deque(maxlen=KEPT)
        self.on_change: Callable[[LearnersChanged], Any] | None = None
        self._manager = manager
        self._seen: dict[str, set[int]] = {behavior: set() for behavior in self.trainers}
        """The workers of which a trainer has seen what the next step is chosen on."""

    @property
    def learning(self) -> tuple[str, ...]:
        """The behaviors whose trainers learn now."""
        return tuple(behavior for behavior, trainer in self.trainers.items() if not trainer.frozen)

    def require_known(self, behavior: str) -> None:
        """UsageError, which names the nearest one, when there is no trainer for it."""
        if behavior not in self.trainers:
            raise UsageError(f"there is no trainer for {unknown_behavior(behavior, list(self.trainers))}")

    def begin(self) -> None:
        """The environments are about to be reset: new chains everywhere, and the manager gets the policies."""
        self.in_flight.versions.clear()
        for behavior, trainer in self.trainers.items():
            trainer.environments_were_reset()
            self._seen[behavior].clear()
            self._manager.set_policy(behavior, trainer.greedy_policy() if trainer.frozen else trainer.policy)

    def change(self, *, frozen: Set[str], resting: Set[str], n_steps: int, cause: str, is_round: bool = False) -> None:
        """Freeze these and let all others learn. What comes of a step that is in flight is for none that changed."""
        only_act = frozen | resting
        stopped = [name for name, trainer in self.trainers.items() if name in only_act and not trainer.frozen]
        resumed = [name for name, trainer in self.trainers.items() if name not in only_act and trainer.frozen]
        for behavior in stopped:
            self._stop(behavior)
        for behavior in resumed:
            self._resume(behavior)
        # Who rests and is frozen now, or is not any more, goes on as before; but it was asked for.
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
        """These workers are about to be given actions."""
        versions = {name: trainer.version for name, trainer in self.trainers.items() if not trainer.frozen}
        self.in_flight.sent(worker_ids, versions)

    def give(self, info: StepInfo) -> int:
        """Give the trainers that learn what they may have of it; how many steps they can learn from."""
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
    """``steps`` as if the environments had just been reset to what is seen in them."""
    own = {behavior: _unrewarded(steps[behavior])} if behavior in steps else {}
    return StepInfo(None, own, None, info.worker_id, None, info.specs)


def _unrewarded(steps: AgentSteps) -> AgentSteps:
    n = len(steps)
    return AgentSteps(
        steps.agent_id,
        steps.obs,
        np.zeros(n, np.float32),
        np.zeros(n, np.bool_),
        np.zeros(n, np.bool_),
        acting=steps.acting,
    )
