"""How good a policy is: the same number of episodes in every environment.

Taking the first so many episodes that end would favour short ones; here an environment that is done waits for the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe.episodes import Episode, Episodes
from envmanager.policy import Policy


@attrs.frozen
class Evaluation:
    """Returns and lengths of whole episodes, the first ones of every agent after a reset, by behavior."""

    returns_of: Mapping[str, list[float]]
    lengths_of: Mapping[str, list[int]] = attrs.field(factory=dict)

    @property
    def returns(self) -> list[float]:
        """Those of all behaviors."""
        return [one for returns in self.returns_of.values() for one in returns]

    @property
    def lengths(self) -> list[int]:
        """Those of all behaviors."""
        return [one for lengths in self.lengths_of.values() for one in lengths]

    @property
    def mean(self) -> float:
        """The mean return of all."""
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
    evaluation = evaluate_until(lambda: False, manager, policies, episodes_per_env=episodes_per_env, config=config)
    assert evaluation is not None
    return evaluation


def evaluate_until(
    is_over: Callable[[], bool],
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int,
    config: Mapping[str, Any] | None = None,
) -> Evaluation | None:
    """The same; None when ``is_over()``, which is asked before each step, came first."""
    if episodes_per_env < 1:
        raise UsageError(f"episodes_per_env must be at least 1, not {episodes_per_env}.")
    for behavior, policy in policies.items():
        manager.set_policy(behavior, policy)
    ended: dict[int, list[Episode]] = {}

    def note(episode: Episode) -> None:
        ended.setdefault(episode.agent_id, []).append(episode)

    seen = Episodes(on_end=note)
    for info in manager.reset(config):
        seen.add(info)
    while not seen.returns or min(map(len, seen.returns.values())) < episodes_per_env:
        if is_over():
            return None
        for info in manager.step():
            seen.add(info)
    first = [episode for agent_id in seen.returns for episode in ended[agent_id][:episodes_per_env]]
    return _evaluation(policies, first)


def _evaluation(behaviors: Mapping[str, Any], episodes: Sequence[Episode]) -> Evaluation:
    returns_of: dict[str, list[float]] = {behavior: [] for behavior in behaviors}
    lengths_of: dict[str, list[int]] = {behavior: [] for behavior in behaviors}
    for episode in episodes:
        returns_of.setdefault(episode.behavior, []).append(episode.total)
        lengths_of.setdefault(episode.behavior, []).append(episode.length)
    return Evaluation(returns_of, lengths_of)
