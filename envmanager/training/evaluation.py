"""Evaluation of policies over a fixed number of episodes, which is divided among the environments in advance.

Counting whichever episodes end first would favour short episodes. Instead, a fixed number of episodes is counted in
each environment, however long they take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AGENT_BITS
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.observe import events
from envmanager.observe.episodes import Episode, Episodes
from envmanager.options import plain
from envmanager.policy import Policy


@attrs.frozen
class Evaluation:
    """The result of an evaluation: for each behavior, the returns and lengths of its agents' evaluated episodes.

    A return is the sum of one agent's rewards in one episode; a length is the number of this agent's steps. The returns
    and lengths of a behavior are in the same order. ``n_episodes`` is the number of episodes evaluated, each of which
    has one return per agent.
    """

    returns_of: Mapping[str, list[float]]
    lengths_of: Mapping[str, list[int]] = attrs.field(factory=dict)
    n_episodes: int = 0

    @property
    def returns(self) -> list[float]:
        """Episode returns of all agents of all behaviors."""
        return [one for returns in self.returns_of.values() for one in returns]

    @property
    def lengths(self) -> list[int]:
        """Episode lengths of all agents of all behaviors."""
        return [one for lengths in self.lengths_of.values() for one in lengths]

    @property
    def mean(self) -> float:
        """Mean of the returns of all agents of all behaviors."""
        return mean_and_spread(self.returns)[0]

    @property
    def spread(self) -> float:
        """Standard deviation of the returns of all agents of all behaviors."""
        return mean_and_spread(self.returns)[1]


def mean_and_spread(returns: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation of ``returns``."""
    return float(np.mean(returns)), float(np.std(returns))


def shares(n_episodes: int, n_envs: int) -> list[int]:
    """Split ``n_episodes`` evenly among ``n_envs`` environments. Return the number of episodes for each environment."""
    each, rest = divmod(n_episodes, n_envs)
    return [each + (env_id < rest) for env_id in range(n_envs)]


def evaluate(
    manager: EnvManager,
    policies: Mapping[str, Policy],
    *,
    episodes_per_env: int | Sequence[int],
    config: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Reset ``manager``, play with ``policies`` until every agent has finished its episodes, and return the results.

    ``episodes_per_env`` is one number for all environments or a list with a number for each. ``config`` is passed to
    ``manager.reset``. Episodes lost with a failed worker are played again; episodes of a dropped worker are left out.
    Raises UsageError for an invalid ``episodes_per_env``.
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
    """Evaluate as ``evaluate`` does, but check ``is_over()`` before each step and return None once it is True."""
    given = plain(episodes_per_env)
    wanted = [given] * manager.n_envs if isinstance(given, int) else list(given)
    if len(wanted) != manager.n_envs or min(wanted) < 0 or not any(wanted):
        raise UsageError(f"episodes_per_env must be a number, or {manager.n_envs} of them, not {episodes_per_env}.")
    for behavior, policy in policies.items():
        manager.set_policy(behavior, policy)
    ended: dict[int, list[Episode]] = {}
    n_dropped = -1  # so that the first check includes workers dropped earlier

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
        if manager.events.count(events.Dropped) > n_dropped:
            n_dropped = manager.events.count(events.Dropped)
            for worker in manager.stats().workers:
                for env_id in worker.env_ids if worker.dropped else ():
                    wanted[env_id] = 0
    first = [episode for agent in seen.returns for episode in ended.get(agent, [])[: wanted[agent >> AGENT_BITS]]]
    return _evaluation(policies, first, sum(wanted))


def _evaluation(behaviors: Mapping[str, Any], episodes: Sequence[Episode], n_episodes: int) -> Evaluation:
    returns_of: dict[str, list[float]] = {behavior: [] for behavior in behaviors}
    lengths_of: dict[str, list[int]] = {behavior: [] for behavior in behaviors}
    for episode in episodes:
        returns_of.setdefault(episode.behavior, []).append(episode.total)
        lengths_of.setdefault(episode.behavior, []).append(episode.length)
    return Evaluation(returns_of, lengths_of, n_episodes)
