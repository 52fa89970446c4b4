"""Rewards divided by the spread of the discounted return, whatever size an environment's rewards have.

::

    agent 3   reward 2  1  4 │ end │ 3        running return   2   1 + 2γ   4 + γ + 2γ²  │ 3

The rule: a return runs along one agent's episode. It begins at 0 with an episode, and after a step that was lost or a
reset of the environments; so it makes no difference whose steps came together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, StepInfo

LIMIT = 10.0
"""Normalized rewards are cut to between minus this and this, as by Stable-Baselines3's VecNormalize."""
_EPSILON = 1e-8


@attrs.define
class ReturnSpread:
    """The spread of the discounted returns of all agents so far, as Gymnasium's NormalizeReward takes it."""

    gamma: float
    enabled: bool = True
    """Whether it is used at all; else rewards stay as they are."""
    count: float = 1e-4
    mean: float = 0.0
    variance: float = 1.0
    _returns: dict[int, float] = attrs.field(factory=dict, init=False)

    @property
    def factor(self) -> float:
        """What a reward is multiplied by."""
        return 1.0 / math.sqrt(self.variance + _EPSILON)

    def normalized(self, reward: np.ndarray) -> np.ndarray:
        """Rewards of any time, by the spread that is known now; within ``LIMIT``."""
        if not self.enabled:
            return reward
        scaled: np.ndarray = (reward * self.factor).clip(-LIMIT, LIMIT)
        return scaled

    def add(self, info: StepInfo, behavior: str) -> None:
        """Take into account what one worker's step brought."""
        if not self.enabled:
            return
        now = info.current.get(behavior)
        before = None if info.previous is None else info.previous.get(behavior)
        if before is None or now is None or info.actions is None or info.lost is not None:
            for steps in (before, now):
                self._forget([] if steps is None else steps.agent_id.tolist())
            return
        acted = before.agent_id[before.acting_rows].tolist()
        self._forget(set(before.agent_id.tolist()).difference(now.agent_id.tolist()))
        found = self._run_on(now, set(acted))
        if found:
            self._take(np.array(found))

    def environments_were_reset(self) -> None:
        """All episodes begin anew."""
        self._returns.clear()

    def _run_on(self, now: AgentSteps, acted: set[int]) -> list[float]:
        """The running returns of those that acted, after this step."""
        found = []
        for agent_id, reward, ended in zip(now.agent_id.tolist(), now.reward.tolist(), now.ended.tolist(), strict=True):
            if agent_id in acted:
                self._returns[agent_id] = self.gamma * self._returns.get(agent_id, 0.0) + reward
                found.append(self._returns[agent_id])
            elif agent_id in self._returns:  # what comes in another's turn belongs to its last action
                self._returns[agent_id] += reward
            if ended:
                self._returns.pop(agent_id, None)
        return found

    def _forget(self, agent_ids: Any) -> None:
        for agent_id in agent_ids:
            self._returns.pop(agent_id, None)

    def _take(self, returns: np.ndarray) -> None:
        """Chan, Golub and LeVeque 1979: the mean and the variance of two sets together."""
        n = len(returns)
        total = self.count + n
        delta = float(returns.mean()) - self.mean
        spread = self.variance * self.count + float(returns.var()) * n + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.variance = spread / total
        self.count = total

    def state(self) -> dict[str, float] | None:
        """For a checkpoint. Returns that run are not in it: the environments begin anew."""
        return {"count": self.count, "mean": self.mean, "variance": self.variance} if self.enabled else None

    def restore(self, facts: Mapping[str, float] | None) -> None:
        """As ``state`` told. ValueError when rewards were normalized then and are not now, or the other way round."""
        if (facts is not None) != self.enabled:
            raise ValueError(f"it was written with normalize_rewards={str(facts is not None).lower()}")
        if facts is not None:
            self.count, self.mean, self.variance = facts["count"], facts["mean"], facts["variance"]
        self._returns.clear()
