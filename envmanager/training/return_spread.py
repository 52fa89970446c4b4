"""Normalization of rewards by the spread (standard deviation) of the discounted returns.

::

    agent 3   reward 2  1  4 │ end │ 3        running return   2   1 + 2γ   4 + γ + 2γ²  │ 3

The rule: each agent has its own running return, so it makes no difference which agents' steps arrive together. The
running return restarts at 0 with each episode, after a lost step, and after a reset of the environments.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, StepInfo

LIMIT = 10.0
"""Absolute bound to which normalized rewards are clipped, as in VecNormalize of Stable-Baselines3."""
_EPSILON = 1e-8


@attrs.frozen(kw_only=True)
class SpreadState:
    """The number, mean and variance of returns in a ReturnSpread, as saved in a checkpoint."""

    count: float
    mean: float
    variance: float


@attrs.define
class ReturnSpread:
    """A running estimate of the standard deviation of agents' discounted returns, as in Gymnasium's NormalizeReward."""

    gamma: float
    enabled: bool = True
    """Whether rewards are normalized. If not, rewards are unchanged and no spread is computed."""
    count: float = 1e-4
    mean: float = 0.0
    variance: float = 1.0
    _returns: dict[int, float] = attrs.field(factory=dict, init=False)

    @property
    def factor(self) -> float:
        """Factor by which a reward is multiplied to normalize it."""
        return 1.0 / math.sqrt(self.variance + _EPSILON)

    def normalized(self, reward: np.ndarray) -> np.ndarray:
        """Return ``reward`` divided by the current spread and clipped to ±``LIMIT``; unchanged if not ``enabled``."""
        if not self.enabled:
            return reward
        scaled: np.ndarray = (reward * self.factor).clip(-LIMIT, LIMIT)
        return scaled

    def add(self, info: StepInfo, behavior: str) -> None:
        """Update the running returns and the spread with the rewards of one worker's step."""
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
        """Restart all running returns at 0."""
        self._returns.clear()

    def _run_on(self, now: AgentSteps, acted: set[int]) -> list[float]:
        """Discount the running returns of ``acted``, add the rewards in ``now``, and return the sums for ``acted``."""
        found = []
        for agent_id, reward, ended in zip(now.agent_id.tolist(), now.reward.tolist(), now.ended.tolist(), strict=True):
            if agent_id in acted:
                self._returns[agent_id] = self.gamma * self._returns.get(agent_id, 0.0) + reward
                found.append(self._returns[agent_id])
            elif agent_id in self._returns:  # received in another agent's turn, for this agent's last action
                self._returns[agent_id] += reward
            if ended:
                self._returns.pop(agent_id, None)
        return found

    def _forget(self, agent_ids: Any) -> None:
        for agent_id in agent_ids:
            self._returns.pop(agent_id, None)

    def _take(self, returns: np.ndarray) -> None:
        """Update the count, mean and variance with ``returns`` (Chan, Golub and LeVeque 1979)."""
        n = len(returns)
        total = self.count + n
        delta = float(returns.mean()) - self.mean
        spread = self.variance * self.count + float(returns.var()) * n + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.variance = spread / total
        self.count = total

    def state(self) -> SpreadState | None:
        """Return the spread for a checkpoint; None unless ``enabled``. A resume restarts the running returns at 0."""
        if not self.enabled:
            return None
        return SpreadState(count=self.count, mean=self.mean, variance=self.variance)

    def restore(self, state: SpreadState | None) -> None:
        """Restore the spread from ``state``. Clear all running returns. Raises ValueError if ``enabled`` changed."""
        if (state is not None) != self.enabled:
            raise ValueError(f"it was written with normalize_rewards={str(state is not None).lower()}")
        if state is not None:
            self.count, self.mean, self.variance = state.count, state.mean, state.variance
        self._returns.clear()
