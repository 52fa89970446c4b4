"""Faults that make a FaultyEnvironment return steps that break the spec.

In a name such as ``"obs: shape"``, the part before the colon is the
``path`` of the BadObservation that must be raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from envmanager.testing.faults import Change


def changed(**columns: Callable[[Any], Any]) -> Change:
    """Return a fault that applies each function in ``columns`` to the field of AgentSteps that has the same name."""
    return Change(lambda steps: attrs.evolve(steps, **{k: make(getattr(steps, k)) for k, make in columns.items()}))


BAD_STEPS: Mapping[str, Change] = {
    "obs: shape": changed(obs=lambda obs: obs[:, :-1]),
    "obs: rows": changed(obs=lambda obs: np.concatenate([obs, obs])),
    "obs: dtype": changed(obs=lambda obs: obs + 0.5),
    "obs: objects": changed(obs=lambda obs: obs.astype(object)),
    "obs: a list": changed(obs=lambda obs: obs.tolist()),
    "obs: a dict": changed(obs=lambda obs: {"echo": obs}),
    "obs: None": changed(obs=lambda _: None),
    "reward: dtype": changed(reward=lambda reward: reward.astype(np.complex64)),
    "reward: not a scalar": changed(reward=lambda reward: reward[:, np.newaxis]),
    "reward: None": changed(reward=lambda _: None),
    "terminated: not a bool": changed(terminated=lambda terminated: terminated + 2),
    "truncated: a Python bool": changed(truncated=lambda _: False),
    "final_obs: missing": changed(terminated=np.ones_like, final_obs=lambda _: None),
    "agent_id: twice": changed(agent_id=lambda ids: np.zeros(len(ids) + 1, np.int64)),
    "the result: None": Change(lambda _: None),
}
