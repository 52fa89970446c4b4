"""Numbers in the JSON of godot_rl_agents: those that their arrays cannot hold are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmanager.data.specs import SpecMismatch
from envmanager.godot.godot_rl import Agents

AGENTS = Agents.of(
    {
        "n_agents": 1,
        "observation_space": {"obs": {"space": "box", "size": [2]}, "mode": {"space": "discrete", "size": 3}},
        "action_space": {"move": {"action_type": "discrete", "size": 2}},
    }
)


def steps_of(obs: Any = (0.5, 1), mode: Any = 2, reward: Any = 1.5) -> Any:
    message = {"type": "step", "obs": [{"obs": list(obs), "mode": mode}], "reward": [reward], "done": [False]}
    (steps,) = AGENTS.steps(message, 0, infos=False).values()
    return steps


def test_numbers_that_fit_their_arrays_arrive() -> None:
    steps = steps_of(mode=2.0)
    assert (steps.obs["obs"].tolist(), steps.obs["mode"].tolist()) == ([[0.5, 1.0]], [2])
    assert steps.reward.tolist() == [1.5]
    assert (steps.obs["obs"].dtype, steps.reward.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize(
    ("values", "path"), [({"obs": [0, 1e39]}, "obs"), ({"mode": 1.5}, "mode"), ({"reward": -1e39}, "reward")]
)
def test_numbers_that_would_become_others_are_refused(values: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecMismatch, match=path):
        steps_of(**values)
