"""Trainers of a Duel that only take down what they are given, and check it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envmanager import ActionInfo, AgentSteps, ArraySpec, StepInfo
from envmanager.training.algorithms.store import NOWHERE, StepStore
from envmanager.training.trainer import Arrays, Trainer
from envmanager_tests.envs import Duel

GREEDY, DRAWN = 0, 1


class Acts:
    """Always the same action; who is not greedy says how likely it was."""

    def __init__(self, action: int) -> None:
        self.action = action
        self.n_calls = 0

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        self.n_calls += 1
        n = len(steps)
        outputs = {} if self.action == GREEDY else {"log_prob": np.zeros(n, np.float32)}
        return ActionInfo(np.full(n, self.action), outputs)


class Keeps(Trainer):
    """Is ready after so many steps; keeps all of them as PPO does, so one without a log_prob is an error."""

    def __init__(self, behavior: str, every: int = 10**9) -> None:
        self.behavior = behavior
        self.policy: Acts = Acts(DRAWN)
        self.greedy = Acts(GREEDY)
        self.every = every
        self.n = 0
        self.n_new = 0
        self.learned: list[int] = []
        self.n_resets = self.n_pauses = 0
        self.store = StepStore(Duel.SEEN, {"log_prob": ArraySpec((), np.float32)}, 10_000)

    def add(self, info: StepInfo) -> int:
        assert not self.frozen
        assert info.actions is None or (info.actions[self.behavior].action == DRAWN).all()
        n = len(self.store.add(info, self.behavior))
        self.n += n
        self.n_new += n
        return n

    def is_ready(self) -> bool:
        return self.n_new >= self.every

    def can_update(self) -> bool:
        return self.n_new > 0

    def update(self, progress: float) -> dict[str, float]:
        assert not self.frozen
        self.learned.append(self.n_new)
        self.n_new = 0
        self.version += 1
        return {}

    def greedy_policy(self) -> Acts:
        return self.greedy

    def environments_were_reset(self) -> None:
        self.n_resets += 1
        self.store.abandon_all()

    def pause(self) -> None:
        self.n_pauses += 1

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return {"n": np.array([self.n])}, {"version": self.version}

    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        self.version = facts["version"]

    def check_chains(self) -> None:
        """Every step of a chain is the next one of the same environment."""
        store = self.store
        for row in np.flatnonzero(store.acted[: store.n_rows]):
            after = store.successor[row]
            if after != NOWHERE:
                assert store.obs[after][0] == store.obs[row][0] + 1, "a transition spans a gap"
