"""How good a policy is: the same number of episodes in every environment.

Taking the first so many episodes that end would favour short ones; here an environment that is done waits for the
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe.episodes import Episodes
from envmanager.policy import Policy


@attrs.frozen
class Evaluation:
    """Returns of whole episodes, the first ones of every agent after a reset, by behavior."""

    returns_of: Mapping[str, list[float]]

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


def evaluate(
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int,
    config: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Reset ``manager``, then let ``policies`` play until every agent has ended so many episodes.

    Takes as long as the slowest environment needs for them; its episodes that were lost with a worker are played again.
    """
    if episodes_per_env < 1:
        raise UsageError(f"episodes_per_env must be at least 1, not {episodes_per_env}.")
    for behavior, policy in policies.items():
        manager.set_policy(behavior, policy)
    behavior_of: dict[int, str] = {}

    def remember(behavior: str, agent_id: int, _: float) -> None:
        behavior_of[agent_id] = behavior

    seen = Episodes(on_end=remember)
    for info in manager.reset(config):
        seen.add(info)
    while not seen.returns or min(map(len, seen.returns.values())) < episodes_per_env:
        for info in manager.step():
            seen.add(info)
    returns_of: dict[str, list[float]] = {behavior: [] for behavior in policies}
    for agent_id, returns in seen.returns.items():
        returns_of.setdefault(behavior_of[agent_id], []).extend(returns[:episodes_per_env])
    return Evaluation(returns_of)
