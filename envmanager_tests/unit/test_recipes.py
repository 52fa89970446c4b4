"""What may be said about how an environment is made, and what is said about the rest before one is made."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envmanager import ConfigError, EnvContext, EnvRecipe, UsageError, make_manager
from envmanager.adapters.factories import call_factory, check_travel, resolve
from envmanager.registry import ManagerOptions, structure

HERE = __name__
CONTEXT = EnvContext(env_id=3, worker_id=1)


class Room(gymnasium.Env):  # type: ignore[misc]
    """An environment with arguments."""

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}
    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(9)

    def __init__(self, size: int = 3, *, doors: Any = (), render_mode: str | None = None) -> None:
        self.size, self.doors, self.render_mode = size, doors, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, False, {}


def make_for(context: EnvContext, size: int, doors: Any = ()) -> Any:
    room = Room(size, doors=doors)
    room.context = context
    return room


def make_any(**arguments: Any) -> Any:
    room = Room()
    room.arguments = arguments
    return room


class Named(gymnasium.Wrapper):  # type: ignore[misc]
    """A wrapper with a name that must be given."""

    def __init__(self, env: Any, name: str, *, loud: bool = False) -> None:
        super().__init__(env)
        self.name, self.loud = name, loud


def forgets_to_return(env: Any) -> Any:
    pass


def breaks(env: Any) -> Any:
    raise RuntimeError("too heavy")


NO_CLASS = 3


def made(env: Any = f"{HERE}:Room", **options: Any) -> Any:
    return call_factory(resolve(EnvRecipe(env, **options)), CONTEXT)


@pytest.fixture
def a_module(write_module: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """As write_module; what the module registers is forgotten too."""
    registry = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry)
    monkeypatch.setattr(gymnasium, "registry", registry)
    return write_module


# Arguments.


def test_a_callable_is_called_with_the_arguments() -> None:
    room = made(env_kwargs={"size": 7}, render_mode="ansi")
    assert (room.size, room.render_mode) == (7, "ansi")


def test_a_callable_may_be_an_object() -> None:
    assert made(Room, env_kwargs={"size": 7}).size == 7
    assert made(lambda size: Room(size), env_kwargs={"size": 8}).size == 8


def test_who_takes_any_argument_is_given_them() -> None:
    assert made(make_any, env_kwargs={"a": 1}, render_mode="human").arguments == {"a": 1, "render_mode": "human"}


def test_who_wants_the_context_gets_it_besides() -> None:
    room = made(f"{HERE}:make_for", env_kwargs={"size": 7})
    assert (room.context, room.size) == (CONTEXT, 7)


def test_an_id_is_made_with_arguments_of_the_environment_and_of_gymnasium_make() -> None:
    env = made("FrozenLake-v1", env_kwargs={"is_slippery": False, "max_episode_steps": 5}, render_mode="ansi")
    assert env.spec.max_episode_steps == 5
    assert env.spec.kwargs["is_slippery"] is False
    assert env.render_mode == "ansi"
    env.close()


def test_each_environment_has_lists_and_dicts_of_its_own() -> None:
    factory = resolve(EnvRecipe(Room, env_kwargs={"doors": [{"at": [1]}]}))
    first, second = call_factory(factory, CONTEXT), call_factory(factory, CONTEXT)
    first.doors[0]["at"].append(2)
    assert second.doors == [{"at": [1]}]


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        (f"{HERE}:Room", {"sise": 3}, r"takes no argument 'sise'; did you mean size\? It takes: size, doors"),
        (
            "FrozenLake-v1",
            {"is_slipery": 3},
            r"'FrozenLake-v1' takes no argument 'is_slipery'; did you mean is_slippery",
        ),
        ("FrozenLake-v1", {"max_episode_step": 3}, r"did you mean max_episode_steps"),
        (f"{HERE}:Room", {"zzz": 3}, r"takes no argument 'zzz'\. It takes: size"),
        (lambda: Room(), {"size": 3}, r"takes no argument 'size'\. It takes none"),
    ],
)
def test_an_argument_that_is_not_taken_is_refused_with_the_nearest(env: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(EnvRecipe(env, env_kwargs=kwargs))


@pytest.mark.parametrize(
    ("env", "mode", "message"),
    [
        (
            f"{HERE}:Room",
            "rgb_aray",
            r"has no render_mode 'rgb_aray'; did you mean rgb_array\? It has: ansi, rgb_array",
        ),
        (f"{HERE}:Room", "human", r"has no render_mode 'human'"),
        ("CartPole-v1", "humann", r"'CartPole-v1' has no render_mode 'humann'; did you mean human\?"),
        (lambda: Room(), "ansi", r"takes no argument 'render_mode'"),
    ],
)
def test_a_render_mode_that_is_not_there_is_refused_with_the_nearest(env: Any, mode: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(EnvRecipe(env, render_mode=mode))


@pytest.mark.parametrize("mode", ["rgb_array", "rgb_array_list", "human"])
def test_what_gymnasium_makes_of_a_render_mode_is_one_too(mode: str) -> None:
    resolve(EnvRecipe("CartPole-v1", render_mode=mode))


def test_an_environment_whose_class_cannot_be_imported_here_is_left_to_the_worker(
    a_module: Callable[[str, str], None],
) -> None:
    a_module("only_there", "import gymnasium\ngymnasium.register('There-v0', 'a_library_that_is_only_there:Env')\n")
    resolve(EnvRecipe("There-v0", env_kwargs={"anything": 1}, imports=["only_there"]))


# Wrappers.


def test_wrappers_are_put_around_in_their_order() -> None:
    wrappers = ["gymnasium.wrappers:TimeAwareObservation", {f"{HERE}:Named": {"name": "outer", "loud": True}}]
    env = made("CartPole-v1", wrappers=wrappers)
    assert (env.name, env.loud) == ("outer", True)
    assert type(env.env).__name__ == "TimeAwareObservation"
    assert env.observation_space.shape == (5,)
    env.close()


def test_wrappers_may_be_callables() -> None:
    env = made(wrappers=[lambda env: Named(env, "inner"), {Named: {"name": "outer"}}])
    assert (env.name, env.env.name) == ("outer", "inner")


def test_a_wrapper_without_arguments_may_have_an_empty_table() -> None:
    assert type(made("CartPole-v1", wrappers=[{"gymnasium.wrappers:TimeAwareObservation": None}])).__name__ == (
        "TimeAwareObservation"
    )


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("gymnasium.wrappers:TimeAwareObservtion", r"cannot be found.*did you mean TimeAwareObservation\?"),
        ("no_such_module:Wrapper", "cannot be found: No module named 'no_such_module'"),
        (f"{HERE}:NO_CLASS", "is int 3, not a class or function that wraps"),
        ({f"{HERE}:Named": {"nam": "x"}}, r"takes no argument 'nam'; did you mean name\? It takes: name, loud\."),
        (f"{HERE}:Named", "cannot be called with an environment and {}: missing a required argument: 'name'"),
    ],
)
def test_a_wrapper_that_cannot_be_applied_is_refused_before_anything_is_made(wrapper: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(EnvRecipe("CartPole-v1", wrappers=[wrapper]))


def test_a_wrapper_that_returns_nothing_is_named() -> None:
    with pytest.raises(UsageError, match=r"the wrapper '.*:forgets_to_return' returned None"):
        made(wrappers=[f"{HERE}:forgets_to_return"])


def test_an_environment_whose_wrapper_raises_is_closed() -> None:
    closed = []

    class Closes(Room):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(RuntimeError, match="too heavy"):
        made(Closes, wrappers=[breaks])
    assert len(closed) == 1


# Imports.


def test_what_imports_name_is_imported_before_the_id_is_looked_up(a_module: Callable[[str, str], None]) -> None:
    a_module("my_rooms", f"import gymnasium\ngymnasium.register('MyRoom-v0', '{HERE}:Room')\n")
    with pytest.raises(UsageError, match=r"imports: \[module\]"):
        resolve("MyRoom-v0")
    env = made("MyRoom-v0", imports=["my_rooms"], env_kwargs={"size": 5})
    assert env.unwrapped.size == 5


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(UsageError, match=r"imports: 'my_roms' cannot be found: No module named .*must be on the path"):
        resolve(EnvRecipe("CartPole-v1", imports=["my_roms"]))


# Shapes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_kwargs": [1]}, "env_kwargs must be a mapping of arguments by name, not [1]"),
        ({"env_kwargs": {1: 2}}, "env_kwargs must have names as keys, not 1"),
        ({"wrappers": "gymnasium.wrappers:TimeAwareObservation"}, "wrappers must be a list"),
        ({"wrappers": [3]}, "wrappers[0] must be 'module:Class' or {'module:Class': {its arguments}}, not 3"),
        ({"wrappers": [{"a:B": {}, "c:D": {}}]}, "wrappers[0] must be"),
        ({"wrappers": ["TimeAwareObservation"]}, "such as 'gymnasium.wrappers:TimeAwareObservation'"),
        ({"wrappers": ["a:B", {"a:B": 3}]}, "wrappers[1], the arguments of 'a:B', must be a mapping"),
        ({"render_mode": ""}, "render_mode must be a text"),
        ({"imports": "my_envs"}, "imports must be a list of modules, such as [my_envs], not 'my_envs'"),
        ({"imports": ["my_envs:Env"]}, "imports must name modules, such as my_envs, not 'my_envs:Env'"),
        ({"render_mode": "human", "env_kwargs": {"render_mode": "ansi"}}, "render_mode is given twice"),
    ],
)
def test_what_has_another_shape_is_refused_at_birth(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        EnvRecipe("CartPole-v1", **options)
    assert message in str(raised.value)
    with pytest.raises(ConfigError) as in_config:
        structure(ManagerOptions, options, where="manager")
    assert str(in_config.value).startswith("manager.")
    assert message in str(in_config.value)


def test_a_recipe_in_a_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match="already"):
        EnvRecipe(EnvRecipe("CartPole-v1"))


# In a config.


def test_a_config_says_how_its_environment_is_made() -> None:
    config = {"kind": "simple", "env": f"{HERE}:Room", "n_envs": 2, "env_kwargs": {"size": 5}, "render_mode": "ansi"}
    with make_manager({**config, "wrappers": [{f"{HERE}:Named": {"name": "x"}}]}) as manager:
        assert manager.get_attr("size") == [5, 5]
        assert manager.get_attr("name") == ["x", "x"]
        assert manager.get_attr("render_mode") == ["ansi", "ansi"]


def test_a_config_says_it_of_an_environment_that_is_an_argument_and_of_each_of_a_list() -> None:
    with make_manager({"kind": "simple", "n_envs": 2, "env_kwargs": {"size": 5}}, [Room, f"{HERE}:Room"]) as manager:
        assert manager.get_attr("size") == [5, 5]


def test_a_recipe_and_options_about_the_same_are_refused() -> None:
    with pytest.raises(ConfigError, match="is an EnvRecipe, and imports set besides"):
        make_manager({"kind": "simple", "env": EnvRecipe(Room), "imports": ["math"]})


def test_a_game_of_godot_has_no_such_options() -> None:
    with pytest.raises(UsageError, match=r"env_kwargs, imports: this means nothing to the manager kind 'godot'"):
        make_manager({"kind": "godot", "env": "demo:rolling_ball", "env_kwargs": {"size": 5}, "imports": ["math"]})


def test_arguments_that_cannot_travel_are_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be pickled: .*'generator' object \(make → doors\)"):
        check_travel([resolve(EnvRecipe(Room, env_kwargs={"doors": (each for each in ())}))])


def helper() -> Any:
    """Return None; a test replaces this function."""


class WithHelper(Room):
    """An environment whose method uses a function of its module."""

    def open(self) -> Any:
        return helper()


@pytest.mark.parametrize(
    "kept", [threading.Lock(), threading.local(), (each for each in ())], ids=["lock", "local", "generator"]
)
def test_what_cannot_travel_is_named_with_what_uses_it(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[HERE], "helper", lambda: (factory, [kept for _ in (1, 2)]))

    def factory() -> Any:
        return WithHelper()

    cloudpickle.register_pickle_by_value(sys.modules[HERE])  # as a script is
    try:
        with pytest.raises(
            UsageError, match=rf"{type(kept).__name__}' object \(factory → WithHelper → open → helper → kept\)"
        ):
            check_travel([factory])
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[HERE])
