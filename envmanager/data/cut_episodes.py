"""Functions that build the first step after a worker was replaced, in which old episodes end and new ones begin.

The rule: an episode of one generation of a worker never continues in the next. Each agent whose episode is cut has one
row, in which the episode ends with its last observation. Observations to act on come from the new generation.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AgentSteps, Steps, concat_steps
from envmanager.data.trees import copy_tree


def lost(last: Steps, *, with_new: bool = True) -> dict[str, AgentSteps]:
    """Return rows, by behavior, that truncate a worker's episodes with reward 0. ``last``: the worker's last steps.

    An agent whose episode ended in ``last`` has a row only if a new episode began at once and ``with_new`` is True.
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
    """Return ``old``, the result of ``lost``, joined with ``first``, the first steps of the new generation.

    ``final_obs`` has the last observations of old episodes. For acting agents, ``obs`` has the first observations of
    new episodes. Acting agents are in the order of ``first``, because the new generation expects actions in that order.
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
    """Return ``old``, whose agents are all gone, with no agent acting and with ``obs`` copied from ``final_obs``."""
    no_infos: list[Any] | None = None if old.info is None else [{} for _ in range(len(old))]
    return attrs.evolve(old, obs=copy_tree(old.final_obs), acting=np.zeros(len(old), np.bool_), reset_info=no_infos)


def _begun_again(old: AgentSteps, first: AgentSteps) -> AgentSteps:
    """Return ``old`` with the ``obs``, ``acting`` and reset infos of ``first``. Both have equal ``agent_id`` arrays."""
    return attrs.evolve(old, obs=copy_tree(first.obs), acting=copy_tree(first.acting), reset_info=first.info)


def _joined(old: AgentSteps, first: AgentSteps) -> AgentSteps:
    """Return one row per agent of ``old`` or ``first``, in the order of ``first``. Agents only in ``old`` come last."""
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
