"""How good a policy is: the same number of episodes in every environment.

Taking the first so many episodes that end would favour short ones; here an environment that is done waits for the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.env_manager import EnvManager
from envmanager.episodes import Episodes
from envmanager.errors import UsageError
from envmanager.policy import Policy


@attrs.frozen
class Evaluation:
    """Returns of whole episodes, the first ones of every agent after a reset."""

    returns: list[float]

    @property
    def mean(self) -> float:
        """Their mean."""
        return sum(self.returns) / len(self.returns)

    @property
    def spread(self) -> float:
        """Their standard deviation."""
        mean = self.mean
        return float((sum((each - mean) ** 2 for each in self.returns) / len(self.returns)) ** 0.5)


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
    seen = Episodes()
    for info in manager.reset(config):
        seen.add(info)
    while not seen.returns or min(map(len, seen.returns.values())) < episodes_per_env:
        for info in manager.step():
            seen.add(info)
    return Evaluation([one for returns in seen.returns.values() for one in returns[:episodes_per_env]])
