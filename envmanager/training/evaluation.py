"""How good a policy is: so many episodes, as many in every environment.

Taking the first so many episodes that end would favour short ones; here how many each environment plays is known
before, and one that is done waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AGENT_BITS
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe.episodes import Episode, Episodes
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
    evaluation = evaluate_until(lambda: False, manager, policies, episodes_per_env=episodes_per_env, config=config)
    assert evaluation is not None
    return evaluation


def evaluate_until(
    is_over: Callable[[], bool],
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int | Sequence[int],
    config: Mapping[str, Any] | None = None,
) -> Evaluation | None:
    """The same; None when ``is_over()``, which is asked before each step, came first."""
    wanted = [episodes_per_env] * manager.n_envs if isinstance(episodes_per_env, int) else list(episodes_per_env)
    if len(wanted) != manager.n_envs or min(wanted) < 1:
        raise UsageError(f"episodes_per_env must be at least 1 in each of {manager.n_envs}, not {episodes_per_env}.")
    for behavior, policy in policies.items():
        manager.set_policy(behavior, policy)
    ended: dict[int, list[Episode]] = {}

    def note(episode: Episode) -> None:
        ended.setdefault(episode.agent_id, []).append(episode)

    seen = Episodes(on_end=note)
    for info in manager.reset(config):
        seen.add(info)
    while not seen.returns or any(len(own) < wanted[agent >> AGENT_BITS] for agent, own in seen.returns.items()):
        if is_over():
            return None
        for info in manager.step():
            seen.add(info)
    first = [episode for agent_id in seen.returns for episode in ended[agent_id][: wanted[agent_id >> AGENT_BITS]]]
    return _evaluation(policies, first)


def _evaluation(behaviors: Mapping[str, Any], episodes: Sequence[Episode]) -> Evaluation:
    returns_of: dict[str, list[float]] = {behavior: [] for behavior in behaviors}
    lengths_of: dict[str, list[int]] = {behavior: [] for behavior in behaviors}
    for episode in episodes:
        returns_of.setdefault(episode.behavior, []).append(episode.total)
        lengths_of.setdefault(episode.behavior, []).append(episode.length)
    return Evaluation(returns_of, lengths_of)
