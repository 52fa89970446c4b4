"""The step that a trainer receives when a worker was replaced: old episodes end, new ones begin.

The rule: an episode of one generation never continues in the next. Each agent of the old generation gets one row in
which its episode ends, with the last observation it had; the observation to act on next comes from the new generation.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, Steps, concat_steps
from envmanager.data.trees import copy_tree


def lost(last: Steps, *, with_new: bool = True) -> dict[str, AgentSteps]:
    """Return the last delivered steps of a replaced worker as the truncated ends of its episodes, with reward 0.

    Agents whose episode had ended without a new one are left out. ``with_new``: also cut new episodes that have no
    step yet.
    """
    ends = {}
    for name, steps in last.items():
        plays = ~steps.ended
        if with_new:
            plays |= True if steps.acting is None else steps.acting
        own = steps.take(np.flatnonzero(plays))
        n = len(own)
        if n:
            ends[name] = AgentSteps.stepped(
                agent_id=own.agent_id,
                obs=own.obs,
                reward=np.zeros(n, np.float32),
                terminated=np.zeros(n, np.bool_),
                truncated=np.ones(n, np.bool_),
                final_obs=copy_tree(own.obs),
                info=None if own.info is None else [{} for _ in range(n)],
            )
    return ends


def followed_by(old: Steps, first: Steps) -> dict[str, AgentSteps]:
    """Join the ends of the old episodes with the new generation's first observations.

    ``final_obs`` is the last observation of an old episode, ``obs`` the first one of a new episode. The rows of agents
    that act are in the order of ``first``, in which the new generation expects their actions.
    """
    names = dict.fromkeys([*old, *first])
    return {name: _followed_by(old.get(name), first.get(name)) for name in names}


def _followed_by(old: AgentSteps | None, first: AgentSteps | None) -> AgentSteps:
    if old is None:
        assert first is not None
        return first.copy()
    if first is None:
        return _ended(old)
    if np.array_equal(old.agent_id, first.agent_id):
        return _begun_again(old, first)
    return _joined(old, first)


def _ended(old: AgentSteps) -> AgentSteps:
    """Return the final rows of agents that are not in the new generation."""
    no_infos: list[Any] | None = None if old.info is None else [{} for _ in range(len(old))]
    return attrs.evolve(old, obs=copy_tree(old.final_obs), acting=np.zeros(len(old), np.bool_), reset_info=no_infos)


def _begun_again(old: AgentSteps, first: AgentSteps) -> AgentSteps:
    """Return the rows of agents that are in both generations, in the same order."""
    return attrs.evolve(old, obs=copy_tree(first.obs), acting=copy_tree(first.acting), reset_info=first.info)


def _joined(old: AgentSteps, first: AgentSteps) -> AgentSteps:
    """Join generations with different agents: the rows of ``first``, then the old agents that are gone."""
    old_row = {agent_id: row for row, agent_id in enumerate(old.agent_id.tolist())}
    old_rows = np.array([old_row.get(agent_id, -1) for agent_id in first.agent_id.tolist()], np.int64)
    returning, new = np.flatnonzero(old_rows >= 0), np.flatnonzero(old_rows < 0)
    gone = np.setdiff1d(np.arange(len(old)), old_rows)
    parts = []
    if len(returning):
        parts.append(_begun_again(old.take(old_rows[returning]), first.take(returning)))
    if len(new):
        parts.append(first.take(new))
    if len(gone):
        parts.append(_ended(old.take(gone)))
    in_order = np.argsort(np.concatenate([returning, new, len(first) + gone]))
    return concat_steps(parts).take(in_order)
