"""Environments that are made as a config says, in actors: what is imported here is imported there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envmanager import EnvRaised, make_manager

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

HALLS = """
import gymnasium, numpy

class Hall(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size=3):
        self.size = size

    def reset(self, *, seed=None, options=None):
        if options:
            gymnasium.make(options["other"])
        return numpy.full(2, self.size, numpy.float32), {}

    def step(self, action):
        return numpy.full(2, self.size, numpy.float32), 1.0, False, False, {}

class Doubled(gymnasium.ObservationWrapper):
    def observation(self, obs):
        return obs * 2
"""


@pytest.fixture
def halls(tmp_path: Path, write_module: Callable[[str, str], None]) -> dict[str, Any]:
    """A user's modules, where the trainer finds them; and for the actors their folder on the path."""
    write_module("my_halls", HALLS)
    write_module(
        "registers_halls",
        "import gymnasium\ngymnasium.register('my/Hall-v0', 'my_halls:Hall', kwargs={'size': 4})\n",
    )
    return {"kind": "ray", "n_envs": 2, "cluster": {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}}}


def test_imports_arguments_and_wrappers_reach_the_environments_of_actors(halls: dict[str, Any]) -> None:
    how = {"imports": ["registers_halls"], "env_kwargs": {"size": 3}, "wrappers": ["my_halls:Doubled"]}
    with make_manager({**halls, "env": "my/Hall-v0", **how}) as manager:
        manager.reset(seed=0)
        assert manager.recv("all").obs.tolist() == [[6, 6]] * 2


def test_an_id_that_an_actor_does_not_know_is_told_with_what_to_do(halls: dict[str, Any]) -> None:
    unknown = pytest.raises(EnvRaised, match="not registered in the process of this environment")
    with make_manager({**halls, "env": "my_halls:Hall"}) as manager, unknown:
        manager.reset(options={"other": "your/Hall-v0"})
