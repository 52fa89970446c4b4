"""How good a policy is: so many episodes, as many in every environment.

Taking the first so many episodes that end would favour short ones; here how many each environment plays is known
before, and one that is done waits for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AGENT_BITS, StepInfo
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe.episodes import Episodes
from envmanager.policy import Policy


@attrs.frozen
class Evaluation:
    """Whole episodes, the first ones of every agent after a reset, by behavior: returns, and how many steps they took.

    Both are in the same order.
    """

    returns_of: Mapping[str, list[float]]
    lengths_of: Mapping[str, list[int]] = attrs.field(factory=dict)

    @property
    def returns(self) -> list[float]:
        """Those of all behaviors."""
        return [one for returns in self.returns_of.values() for one in returns]

    @property
    def mean(self) -> float:
        """The mean of all."""
        return mean_and_spread(self.returns)[0]

    @property
    def spread(self) -> float:
        """The standard deviation of all."""
        return mean_and_spread(self.returns)[1]


def mean_and_spread(returns: Sequence[float]) -> tuple[float, float]:
    """The mean and the standard deviation."""
    return float(np.mean(returns)), float(np.std(returns))


def shares(n_episodes: int, n_envs: int) -> list[int]:
    """How many of so many episodes each environment plays: as many each, and the first ones the rest."""
    each, rest = divmod(n_episodes, n_envs)
    return [each + (env_id < rest) for env_id in range(n_envs)]


def evaluate(
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int | Sequence[int],
    config: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Reset ``manager``, then let ``policies`` play until every agent has ended so many episodes.

    ``episodes_per_env``: one number, or one of each environment. Takes as long as the slowest environment needs for
    them; its episodes that were lost with a worker are played again.
    """
    wanted = [episodes_per_env] * manager.n_envs if isinstance(episodes_per_env, int) else list(episodes_per_env)
    if len(wanted) != manager.n_envs or min(wanted) < 1:
        raise UsageError(f"episodes_per_env must be at least 1 in each of {manager.n_envs}, not {episodes_per_env}.")
    for behavior, policy in policies.items():
        manager.set_policy(behavior, policy)
    behavior_of: dict[int, str] = {}

    def remember(behavior: str, agent_id: int, _: float) -> None:
        behavior_of[agent_id] = behavior

    seen, lengths = Episodes(on_end=remember), Lengths()
    for info in manager.reset(config):
        seen.add(info)
        lengths.add(info)
    while not seen.returns or any(len(own) < wanted[agent >> AGENT_BITS] for agent, own in seen.returns.items()):
        for info in manager.step():
            seen.add(info)
            lengths.add(info)
    returns_of: dict[str, list[float]] = {behavior: [] for behavior in policies}
    lengths_of: dict[str, list[int]] = {behavior: [] for behavior in policies}
    for agent_id, returns in seen.returns.items():
        behavior, n_wanted = behavior_of[agent_id], wanted[agent_id >> AGENT_BITS]
        returns_of.setdefault(behavior, []).extend(returns[:n_wanted])
        lengths_of.setdefault(behavior, []).extend(lengths.of.get(agent_id, [])[:n_wanted])
    return Evaluation(returns_of, lengths_of)


class Lengths:
    """How many steps the episodes of each agent took, in the order in which they ended, by agent_id in ``of``."""

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}
        self._running: dict[int, int] = {}

    def add(self, info: StepInfo) -> None:
        """Count one StepInfo; one without a step taken (after a reset or a loss) begins episodes instead."""
        begins = info.previous is None or info.lost is not None
        for steps in info.current.values():
            acting = [True] * len(steps) if steps.acting is None else steps.acting.tolist()
            for agent_id, ended, plays_on in zip(steps.agent_id.tolist(), steps.ended.tolist(), acting, strict=True):
                if begins or agent_id not in self._running:
                    self._running[agent_id] = 0
                    continue
                self._running[agent_id] += 1
                if ended:
                    self.of.setdefault(agent_id, []).append(self._running.pop(agent_id))
                    if plays_on:  # from the first observation of its next episode, which is in the same row
                        self._running[agent_id] = 0
