"""Faults in steps whose observation is a dict. The part before a name's colon is the path of the BadObservation."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from envmanager import ArraySpec, BehaviorSpec
from envmanager.data.steps import Steps
from envmanager.testing.bad_steps import changed
from envmanager.testing.fakes import EchoEnvironment
from envmanager.testing.faults import Change, FaultyEnvironment

BAD_KEYED_STEPS: Mapping[str, Change] = {
    "obs: missing key": changed(obs=lambda obs: {"echo": obs["echo"]}),
    "obs: extra key": changed(obs=lambda obs: {**obs, "extra": obs["echo"]}),
    "obs: no dict": changed(obs=lambda obs: obs["echo"]),
    "obs['place']: shape": changed(obs=lambda obs: {**obs, "place": obs["place"][:, :1]}),
    "obs['place']: dtype": changed(obs=lambda obs: {**obs, "place": obs["place"].astype(np.float64) + 1e300}),
    "obs['place']: None": changed(obs=lambda obs: {**obs, "place": None}),
}
"""Faults that break the spec of a KeyedFaultyEnvironment, by name."""

NOT_FINITE: Mapping[str, Change] = {
    "obs['place']: NaN": changed(obs=lambda obs: {**obs, "place": obs["place"] * np.nan}),
    "obs['place']: infinite": changed(obs=lambda obs: {**obs, "place": obs["place"] + np.inf}),
    "reward: NaN": changed(reward=lambda reward: reward * np.float32(np.nan)),
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
