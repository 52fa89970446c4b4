"""Construction of the step that a trainer receives after the replacement of a worker: old episodes end, new ones begin.

The rule: an episode of one generation of a worker never continues in the next. Each agent whose episode is cut has one
row, in which the episode ends with its last observation. Observations to act on are those of the new generation.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, Steps, concat_steps
from envmanager.data.trees import copy_tree


def lost(last: Steps, *, with_new: bool = True) -> dict[str, AgentSteps]:
    """Return rows that truncate a replaced worker's episodes, with reward 0, by behavior. ``last``: its last steps.

    There is no row for an agent whose episode has ended, if no new one has begun. ``with_new``: whether to truncate
    also episodes that have begun but have no step yet.
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
    """Return the result of ``lost`` (``old``) joined with the new generation's first observations (``first``).

    In the result, ``final_obs`` has the last observations of old episodes, and ``obs`` the first ones of new episodes.
    The rows of acting agents are in the order of ``first``, because the new generation expects actions in this order.
    """
    joined = {}
    for name in dict.fromkeys([*old, *first]):
        before, now = old.get(name), first.get(name)
        if before is None:
            joined[name] = first[name].copy()
        elif now is None:
            joined[name] = _ended(before)
        else:
            join = _begun_again if np.array_equal(before.agent_id, now.agent_id) else _joined
            joined[name] = join(before, now)
    return joined


def _ended(old: AgentSteps) -> AgentSteps:
    """Return the rows of agents that are not in the new generation: no agent acts, and ``obs`` equals ``final_obs``."""
    no_infos: list[Any] | None = None if old.info is None else [{} for _ in range(len(old))]
    return attrs.evolve(old, obs=copy_tree(old.final_obs), acting=np.zeros(len(old), np.bool_), reset_info=no_infos)


def _begun_again(old: AgentSteps, first: AgentSteps) -> AgentSteps:
    """Return the rows of ``old`` with the observations of ``first``, which has the same agents in the same order."""
    return attrs.evolve(old, obs=copy_tree(first.obs), acting=copy_tree(first.acting), reset_info=first.info)


def _joined(old: AgentSteps, first: AgentSteps) -> AgentSteps:
    """Return joined rows of generations whose agents differ: agents in ``first``, then agents only in ``old``."""
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
