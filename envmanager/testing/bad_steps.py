"""Faults that make FaultyEnvironment or KeyedFaultyEnvironment return steps that break the spec.

Each dict in this module maps names to faults. In a name such as ``"obs: shape"``, the part before the colon is the
``path`` of the BadObservation that must be raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import Steps
from envmanager.testing.fakes import EchoEnvironment
from envmanager.testing.faults import Change, FaultyEnvironment


def _with(**columns: Callable[[Any], Any]) -> Change:
    """Return a fault that applies each function in ``columns`` to the field of AgentSteps that has the same name."""
    return Change(lambda steps: attrs.evolve(steps, **{k: make(getattr(steps, k)) for k, make in columns.items()}))


BAD_STEPS: Mapping[str, Change] = {
    "obs: shape": _with(obs=lambda obs: obs[:, :-1]),
    "obs: rows": _with(obs=lambda obs: np.concatenate([obs, obs])),
    "obs: dtype": _with(obs=lambda obs: obs + 0.5),
    "obs: objects": _with(obs=lambda obs: obs.astype(object)),
    "obs: a list": _with(obs=lambda obs: obs.tolist()),
    "obs: a dict": _with(obs=lambda obs: {"echo": obs}),
    "obs: None": _with(obs=lambda _: None),
    "reward: dtype": _with(reward=lambda reward: reward.astype(np.complex64)),
    "reward: not a scalar": _with(reward=lambda reward: reward[:, np.newaxis]),
    "reward: None": _with(reward=lambda _: None),
    "terminated: not a bool": _with(terminated=lambda terminated: terminated + 2),
    "truncated: a Python bool": _with(truncated=lambda _: False),
    "final_obs: missing": _with(terminated=np.ones_like, final_obs=lambda _: None),
    "agent_id: twice": _with(agent_id=lambda ids: np.zeros(len(ids) + 1, np.int64)),
    "the result: None": Change(lambda _: None),
}
"""Faults that break the spec of a FaultyEnvironment, by name."""

BAD_KEYED_STEPS: Mapping[str, Change] = {
    "obs: missing key": _with(obs=lambda obs: {"echo": obs["echo"]}),
    "obs: extra key": _with(obs=lambda obs: {**obs, "extra": obs["echo"]}),
    "obs: no dict": _with(obs=lambda obs: obs["echo"]),
    "obs['place']: shape": _with(obs=lambda obs: {**obs, "place": obs["place"][:, :1]}),
    "obs['place']: dtype": _with(obs=lambda obs: {**obs, "place": obs["place"].astype(np.float64) + 1e300}),
    "obs['place']: None": _with(obs=lambda obs: {**obs, "place": None}),
}
"""Faults that break the spec of a KeyedFaultyEnvironment, by name."""

NOT_FINITE: Mapping[str, Change] = {
    "obs['place']: NaN": _with(obs=lambda obs: {**obs, "place": obs["place"] * np.nan}),
    "obs['place']: infinite": _with(obs=lambda obs: {**obs, "place": obs["place"] + np.inf}),
    "reward: NaN": _with(reward=lambda reward: reward * np.float32(np.nan)),
}
"""Faults of a KeyedFaultyEnvironment, by name. A manager raises BadObservation only with ``check_values=True``."""


class KeyedFaultyEnvironment(FaultyEnvironment):
    """A FaultyEnvironment whose observation is a dict: ``echo`` int64[5] and ``place`` float32[2]."""

    SPEC = BehaviorSpec({"echo": EchoEnvironment.SPEC.observation, "place": ArraySpec((2,))}, ArraySpec((), np.int64))

    def _steps(self, obs: np.ndarray, action: np.ndarray, ended: bool, final_obs: np.ndarray | None) -> Steps:
        steps = super()._steps(obs, action, ended, final_obs)["default"]
        final = None if final_obs is None else _keyed(final_obs)
        return {"default": attrs.evolve(steps, obs=_keyed(obs), final_obs=final)}


def _keyed(obs: np.ndarray) -> dict[str, np.ndarray]:
    return {"echo": obs, "place": obs[:, :2].astype(np.float32)}
