"""Environments that are made as a config says, in every kind of manager and with every start method."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from envmanager import (
    EnvRaised,
    EnvRecipe,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
    make_manager,
)
from envmanager.options import Wait
from envmanager_tests.godot.fake_engine_manager import FakeEngineManager
from envmanager_tests.start_methods import MARKED_START_METHODS

IN_PROCESSES = [
    pytest.param({"kind": "subprocess", "start_method": each.values[0]}, marks=each.marks, id=each.values[0])
    if not isinstance(each, str)
    else pytest.param({"kind": "subprocess", "start_method": each}, id=each)
    for each in MARKED_START_METHODS
]
KINDS = [
    pytest.param({"kind": "simple"}, id="simple"),
    *IN_PROCESSES,
    pytest.param({"kind": "subprocess", "n_workers": 1, "local_envs": 1}, id="share"),
    pytest.param({"kind": "auto"}, id="auto"),
]

MY_ENVS = """
import gymnasium, numpy, os

class Room(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, size=3, render_mode=None):
        self.size, self.render_mode, self.pid = size, render_mode, os.getpid()
        self.other = None

    def reset(self, *, seed=None, options=None):
        if options:  # another environment, of this module too
            self.other = gymnasium.make(options["other"])
        return numpy.full(2, self.size, numpy.float32), {}

    def step(self, action):
        return numpy.full(2, self.size, numpy.float32), 1.0, False, False, {}

    def render(self):
        return numpy.full((2, 2, 3), self.size, numpy.uint8)

class PlusOne(gymnasium.ObservationWrapper):
    def observation(self, obs):
        return obs + 1

class Doubled(gymnasium.ObservationWrapper):
    def __init__(self, env, by=2):
        super().__init__(env)
        self.by = by

    def observation(self, obs):
        return obs * self.by
"""
REGISTERS = """
import gymnasium
from my_rooms import Room
gymnasium.register("my/Room-v0", "my_rooms:Room", kwargs={"size": 4}, max_episode_steps=3)
gymnasium.register("my/ByClass-v1", Room)
"""


@pytest.fixture(autouse=True)
def modules(write_module: Callable[[str, str], None]) -> Iterator[None]:
    """A user's modules, in a folder of their own; what they register here is forgotten."""
    write_module("my_rooms", MY_ENVS)
    write_module("registers_rooms", REGISTERS)
    yield
    for env_id in [each for each in gymnasium.registry if each.startswith("my/")]:
        del gymnasium.registry[env_id]


def first_obs(manager: Any) -> list[list[float]]:
    manager.reset(seed=0)
    obs: list[list[float]] = manager.recv(Wait.all()).obs.tolist()
    return obs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample
def test_arguments_render_mode_and_wrappers_reach_every_environment(kind: Mapping[str, Any]) -> None:
    wrappers = [{"my_rooms:Doubled": {"by": 3}}, "my_rooms:PlusOne"]
    how = {"env_kwargs": {"size": 2}, "render_mode": "rgb_array", "wrappers": wrappers}
    with make_manager({**kind, "env": "my_rooms:Room", "n_envs": 2, **how}) as manager:
        assert first_obs(manager) == [[7, 7]] * 2
        assert manager.get_attr("size") == [2, 2]
        assert [picture.max() for picture in manager.render()] == [2, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample("Room")
@pytest.mark.parametrize("env", ["my/Room-v0", "my/ByClass-v1"])
def test_an_id_that_an_imported_module_registers_is_known_in_every_process(kind: Mapping[str, Any], env: str) -> None:
    config = {**kind, "env": env, "n_envs": 2, "imports": ["registers_rooms"], "env_kwargs": {"size": 5}}
    with make_manager(config) as manager:
        assert first_obs(manager) == [[5, 5]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_before_an_id_and_the_wrappers_go_together(kind: Mapping[str, Any]) -> None:
    with make_manager(
        {**kind, "env": "registers_rooms:my/Room-v0", "n_envs": 2, "wrappers": ["my_rooms:Doubled"]}
    ) as manager:
        assert first_obs(manager) == [[8, 8]] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample
def test_ids_that_an_environment_itself_asks_for_are_known_where_they_are_imported(kind: Mapping[str, Any]) -> None:
    with make_manager({**kind, "env": "my_rooms:Room", "n_envs": 2, "imports": ["registers_rooms"]}) as manager:
        manager.reset(options={"other": "my/Room-v0"})
        assert manager.call(lambda env: env.other.unwrapped.size) == [4, 4]


@pytest.mark.parametrize("kind", IN_PROCESSES)
def test_an_id_that_only_the_trainer_has_registered_is_known_to_workers(kind: Mapping[str, Any]) -> None:
    import registers_rooms  # noqa: F401

    with make_manager({**kind, "env": "my/ByClass-v1", "n_envs": 2, "env_kwargs": {"size": 6}}) as manager:
        assert first_obs(manager) == [[6, 6]] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample
def test_an_id_that_an_environments_process_does_not_know_is_told_with_what_to_do(kind: Mapping[str, Any]) -> None:
    with make_manager({**kind, "env": "my_rooms:Room", "n_envs": 2}) as manager:
        with pytest.raises(EnvRaised, match="not registered in the process of this environment") as raised:
            manager.reset(options={"other": "my/Room-v0"})
        assert "imports: [my_envs]" in str(raised.value)
        assert raised.value.type_name in ("NameNotFound", "NamespaceNotFound")


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_function_that_makes_an_id_of_the_trainers_alone_is_told_what_to_do(start_method: str) -> None:
    import registers_rooms  # noqa: F401

    with pytest.raises(EnvRaised, match=r"(?s)at start: .*That id is not registered in the process"):
        SubprocessEnvManager(lambda: gymnasium.make("my/Room-v0"), 1, start_method=start_method)
    recipe = EnvRecipe(lambda: gymnasium.make("my/Room-v0"), imports=["registers_rooms"])
    with SubprocessEnvManager(recipe, 1, start_method=start_method) as manager:
        assert first_obs(manager) == [[4, 4]]


def test_a_module_that_only_the_trainer_can_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_here = "import os\nif os.getpid() != %d: raise ImportError('no licence here')\n"
    (tmp_path / "only_here.py").write_text(only_here % os.getpid())
    with pytest.raises(UsageError, match=r"imports: 'only_here' cannot be imported: .*no licence here"):
        make_manager({"kind": "subprocess", "env": "CartPole-v1", "imports": ["only_here"]})
    sys.modules.pop("only_here")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample
def test_wrappers_of_pettingzoo_go_around_its_environments(kind: Mapping[str, Any], tmp_path: Path) -> None:
    (tmp_path / "quiet_wrapper.py").write_text(
        "from pettingzoo.utils.wrappers import BaseParallelWrapper\n"
        "class Halved(BaseParallelWrapper):\n"
        "    def __init__(self, env, by):\n"
        "        super().__init__(env)\n"
        "        self.by = by\n"
        "    def step(self, actions):\n"
        "        obs, rewards, *rest = self.env.step(actions)\n"
        "        return obs, {agent: reward / self.by for agent, reward in rewards.items()}, *rest\n"
    )
    config = {**kind, "env": "mpe2.simple_spread_v3:parallel_env", "n_envs": 2, "env_kwargs": {"N": 2, "max_cycles": 9}}
    with make_manager({**config, "wrappers": [{"quiet_wrapper:Halved": {"by": 2.0}}]}) as manager:
        manager.reset(seed=0)
        assert manager.get_attr("by") == [2.0, 2.0]
        assert manager.call(lambda env: len(env.possible_agents)) == [2, 2]
    sys.modules.pop("quiet_wrapper", None)


@pytest.mark.parametrize("make", [SimpleEnvManager, SubprocessEnvManager, FakeEngineManager])
def test_any_manager_takes_a_recipe_as_its_factory(make: Callable[..., Any]) -> None:
    with make(EnvRecipe("CartPole-v1", wrappers=["gymnasium.wrappers:TimeAwareObservation"]), 2) as manager:
        manager.reset()
        assert manager.behavior_specs["default"].observation.shape == (5,)


def test_a_list_may_hold_recipes() -> None:
    rooms = [EnvRecipe("my_rooms:Room", env_kwargs={"size": size}) for size in (1, 2)]
    with SubprocessEnvManager(rooms, 2) as manager:
        assert first_obs(manager) == [[1, 1], [2, 2]]


@pytest.mark.parametrize("env", ["ale_py:ALE/Pong-v5", "ALE/Pong-v5"])
def test_atari_games_have_arguments_and_wrappers(env: str) -> None:
    wrappers = [{"gymnasium.wrappers:AtariPreprocessing": {"screen_size": 42}}]
    config = {"env": env, "env_kwargs": {"frameskip": 1}, "wrappers": wrappers}
    with make_manager({"kind": "subprocess", **config}) as manager:
        assert manager.behavior_specs["default"].observation.shape == (42, 42)


def test_what_a_replaced_worker_makes_is_the_same() -> None:
    config = {
        "kind": "subprocess",
        "env": "my/Room-v0",
        "imports": ["registers_rooms"],
        "wrappers": ["my_rooms:Doubled"],
    }
    with make_manager({**config, "restarts": RestartPolicy(backoff_s=0.0)}) as manager:
        assert first_obs(manager) == [[8, 8]]
        with pytest.raises(Exception, match="died"):
            manager.call(lambda env: os._exit(3))
        assert first_obs(manager) == [[8, 8]]
        assert [worker.generation for worker in manager.stats().workers] == [1]


def test_the_options_survive_json() -> None:
    """As a training run keeps them in its plan."""
    how = {"env_kwargs": {"size": 2}, "wrappers": [{"my_rooms:Doubled": {"by": 3}}], "imports": ["registers_rooms"]}
    with make_manager(json.loads(json.dumps({"kind": "simple", "env": "my/Room-v0", **how}))) as manager:
        assert first_obs(manager) == [[6, 6]]
