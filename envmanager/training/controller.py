"""The loop between a manager and the trainers of its behaviors.

::

    manager.step() ── StepInfo ──▶ the trainer of each behavior ── enough? ──▶ update ──▶ policy, version + 1
          ▲                                                                                     │
          └──────────────────── acts from the next step on ─────────────────────────────────────┘

The rule: a trainer is updated only when no step that is still in flight would then be staler than ``max_policy_lag``
versions; until then the trainer collects. Nothing is thrown away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from envmanager.data.steps import StepInfo
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe.episodes import Episodes
from envmanager.options import ResetConfig, Wait
from envmanager.training.trainer import Trainer


@attrs.frozen
class Update:
    """One update of one trainer, and when it was. ``figures`` are what the trainer said of it."""

    behavior: str
    version: int
    n_steps: int
    figures: Mapping[str, float]
    seconds: float


@attrs.define
class _InFlight:
    """Which version of the policies each worker's step in flight was chosen by."""

    versions: dict[int, dict[str, int]] = attrs.field(factory=dict)

    def sent(self, worker_ids: list[int], versions: dict[str, int]) -> None:
        for worker_id in worker_ids:
            self.versions[worker_id] = versions

    def came(self, worker_id: int) -> None:
        self.versions.pop(worker_id, None)

    def oldest(self, behavior: str) -> float:
        """``inf`` when nothing is in flight."""
        return min((versions.get(behavior, math.inf) for versions in self.versions.values()), default=math.inf)


class TrainerController:
    """Trains every behavior of a manager, each by a trainer of its own.

    Behaviors without a trainer need a policy in the manager. ``max_policy_lag``: by how many versions a step may have
    been chosen before it is learned from; 0 waits for all steps before each update, and each trainer has a default.
    ``on_update`` is told of each update.
    Exceptions of the manager (a worker that failed for good, a bad action) come out of ``step`` and ``train``.
    """

    def __init__(
        self,
        manager: EnvManager,
        trainers: Mapping[str, Trainer],
        *,
        wait: Wait | str | int | None = None,
        max_policy_lag: int | None = None,
        on_update: Callable[[Update], Any] | None = None,
    ) -> None:
        if max_policy_lag is not None and max_policy_lag < 0:
            raise UsageError(f"max_policy_lag must be at least 0, not {max_policy_lag}.")
        self.manager = manager
        self.trainers = dict(trainers)
        self.episodes = Episodes(keeps_returns=False)
        self.n_steps = 0
        """How many steps of agents the trainers have learned from or will."""
        self._wait = None if wait is None else Wait.parse(wait)
        self._max_policy_lag = max_policy_lag
        self._on_update = on_update
        self._in_flight = _InFlight()
        self._ready: list[int] = []
        self._goal = 0

    def reset(self, config: ResetConfig | Mapping[str, Any] | None = None) -> None:
        """Begin new episodes everywhere, and hand the policies to the manager."""
        for behavior, trainer in self.trainers.items():
            trainer.environments_were_reset()
            self.manager.set_policy(behavior, trainer.policy)
        infos = self.manager.reset(config)
        self._in_flight.versions.clear()
        self._ready = []
        self._take(infos)

    def train(self, n_steps: int, *, until: Callable[[], bool] | None = None) -> None:
        """Step and update until ``n_steps`` steps of agents in all have been taken, or ``until()``."""
        self._goal = n_steps
        if not self._ready and not self._in_flight.versions:
            self.reset()
        while self.n_steps < n_steps and not (until is not None and until()):
            self.step()

    def step(self, wait: Wait | None = None) -> list[Update]:
        """One step of the manager, and the updates for which that was enough. ``wait``: other than usual."""
        self._step(self._wait if wait is None else wait)
        updates = []
        for trainer in self.trainers.values():
            while trainer.is_ready():  # many environments may bring enough for several at once
                updates.append(self._update(trainer))
        return updates

    def _step(self, wait: Wait | None) -> None:
        versions = {behavior: trainer.version for behavior, trainer in self.trainers.items()}
        self._in_flight.sent(self._ready, versions)
        self._ready = []
        self._take(self.manager.step(wait))

    def _take(self, infos: list[StepInfo]) -> None:
        for info in infos:
            self._in_flight.came(info.worker_id)
            self._ready.append(info.worker_id)
            self.episodes.add(info)
            for trainer in self.trainers.values():
                if not trainer.frozen:
                    self.n_steps += trainer.add(info)

    def _update(self, trainer: Trainer) -> Update:
        most = trainer.max_policy_lag if self._max_policy_lag is None else self._max_policy_lag
        while trainer.version + 1 - self._in_flight.oldest(trainer.behavior) > most:
            self._step(Wait.all())
        began = time.monotonic()
        figures = trainer.update(min(1.0, self.n_steps / self._goal) if self._goal else 0.0)
        seconds = time.monotonic() - began
        update = Update(trainer.behavior, trainer.version, self.n_steps, figures, seconds)
        if self._on_update is not None:
            self._on_update(update)
        return update
