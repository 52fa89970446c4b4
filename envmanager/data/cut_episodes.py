"""Makes the step that a trainer gets when a worker was replaced: how old episodes ended, and how the new ones begin.

The rule: an episode of one generation never continues in the next. Each agent of the old generation gets one row in
which its episode ends, with the last observation it had; the observation to act on next comes from the new generation.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, Steps, concat_steps
from envmanager.data.tree_rows import copy_tree, take_rows, with_rows


def lost(last: Steps) -> dict[str, AgentSteps]:
    """The last steps that were handed out of a worker that failed, as truncated episodes that brought no reward.

    Only agents that were still playing have an episode to cut: all but those that ended and do not play on.
    """
    playing = {name: steps.take(_rows_playing(steps)) for name, steps in last.items()}
    return {name: _cut(steps) for name, steps in playing.items() if len(steps)}


def _rows_playing(steps: AgentSteps) -> np.ndarray:
    return np.arange(len(steps)) if steps.acting is None else np.flatnonzero(steps.acting | ~steps.ended)


def _cut(steps: AgentSteps) -> AgentSteps:
    n = len(steps)
    return AgentSteps(
        steps.agent_id,
        steps.obs,
        np.zeros(n, np.float32),
        np.zeros(n, np.bool_),
        np.ones(n, np.bool_),
        final_obs=copy_tree(steps.obs),
        info=None if steps.info is None else [{} for _ in range(n)],
    )


def truncated(steps: Steps, playing: Steps) -> dict[str, AgentSteps]:
    """The last steps of a healthy worker, with the episodes that had not ended truncated there.

    ``playing`` are the steps before them: an agent that is not in them has only just joined, and has nothing to cut.
    Those who play in them and took no step now (environments to which nothing was sent) are cut as if the worker had
    failed.
    """
    found = {}
    for name, own in steps.items():
        before = playing.get(name)
        rows = np.flatnonzero(np.isin(own.agent_id, before.agent_id)) if before is not None else np.arange(0)
        if len(rows):
            found[name] = _truncated(own.take(rows))
    unstepped = {name: before.take(_rows_without(before, steps.get(name))) for name, before in playing.items()}
    return _side_by_side(found, lost(unstepped))


def _rows_without(steps: AgentSteps, others: AgentSteps | None) -> np.ndarray:
    """The rows of the agents that are not among ``others``."""
    if others is None:
        return np.arange(len(steps))
    return np.flatnonzero(~np.isin(steps.agent_id, others.agent_id))


def _side_by_side(some: dict[str, AgentSteps], others: dict[str, AgentSteps]) -> dict[str, AgentSteps]:
    """The rows of both; where a behavior is in both, in order of agent_id, which is that of the environments."""
    joined = {**some, **others}
    for name in some.keys() & others.keys():
        steps = concat_steps([some[name], others[name]])
        joined[name] = steps.take(np.argsort(steps.agent_id, kind="stable"))
    return joined


def _truncated(steps: AgentSteps) -> AgentSteps:
    ended = np.flatnonzero(steps.ended)
    final_obs = with_rows(steps.obs, ended, steps.final_obs) if len(ended) else copy_tree(steps.obs)
    return attrs.evolve(steps, truncated=steps.truncated | ~steps.ended, final_obs=final_obs, reset_info=None)


def followed_by(old: Steps, first: Steps) -> dict[str, AgentSteps]:
    """Rows that have all ended, with what the new generation's first observations say about what to act on next."""
    names = dict.fromkeys([*old, *first])
    return {name: _followed_by(old.get(name), first.get(name)) for name in names}


def _followed_by(old: AgentSteps | None, first: AgentSteps | None) -> AgentSteps:
    if old is None:
        assert first is not None
        return first.copy()
    if first is None:
        nobody = np.zeros(len(old), np.bool_)
        no_infos: list[Any] | None = None if old.info is None else [{} for _ in range(len(old))]
        return attrs.evolve(old, obs=copy_tree(old.final_obs), acting=nobody, reset_info=no_infos)
    if np.array_equal(old.agent_id, first.agent_id):
        return attrs.evolve(old, obs=copy_tree(first.obs), acting=copy_tree(first.acting), reset_info=first.info)
    return _joined(old, first)


def _joined(old: AgentSteps, first: AgentSteps) -> AgentSteps:
    """As above when the agents differ: some do not come back, others are new."""
    place = {agent_id: row for row, agent_id in enumerate(first.agent_id.tolist())}
    back = [place.get(agent_id, -1) for agent_id in old.agent_id.tolist()]
    returns = np.array(back) >= 0
    from_first = np.array(back)[returns]
    obs = with_rows(old.final_obs, returns, take_rows(first.obs, from_first))
    acting = returns.copy()
    if first.acting is not None:
        acting[returns] = first.acting[from_first]
    reset_info = None
    if first.info is not None:
        reset_info = [first.info[row] if row >= 0 else {} for row in back]
    continued = attrs.evolve(old, obs=obs, acting=acting, reset_info=reset_info)
    joined = np.setdiff1d(np.arange(len(first)), from_first)
    return concat_steps([continued, first.take(joined)]) if len(joined) else continued
