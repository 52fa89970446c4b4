"""Gymnasium environments as people write and name them, over every manager."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envmanager import (
    ActionInfo,
    BadAction,
    BadObservation,
    EnvManager,
    EnvRaised,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
)
from envmanager.options import Wait

ALL = Wait.all()


def shared_worker(env_factory: Any, n_envs: int = 1, **options: Any) -> EnvManager:
    return SubprocessEnvManager(env_factory, n_envs, n_workers=1, **options)


MANAGERS = {"simple": SimpleEnvManager, "worker each": SubprocessEnvManager, "one worker": shared_worker}
managers = pytest.mark.parametrize("make_manager", MANAGERS.values(), ids=MANAGERS)


class Sloppy(gymnasium.Env):  # type: ignore[misc]
    """As most are written by hand; ``result`` and ``first`` put in worse."""

    observation_space: Any = spaces.Box(-9, 9, (2,), np.float32)
    action_space: Any = spaces.Discrete(9)

    def __init__(self, result: Any = None, first: Any = None) -> None:
        self._result = (np.array([0.5, 1.5]), True, 0, 0, {}) if result is None else result
        self._first = (np.zeros(2), {}) if first is None else first

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._first

    def step(self, action: Any) -> Any:
        return self._result


@managers
def test_what_most_people_return_is_cast(make_manager: Any) -> None:
    with make_manager(Sloppy, 2) as manager:
        manager.reset()
        batch = manager.recv(ALL)
        for _ in range(3):
            manager.send(np.zeros(2, np.int64), batch.env_ids)
            batch = manager.recv(ALL)
            assert (batch.obs.dtype, batch.obs.tolist()) == (np.float32, [[0.5, 1.5]] * 2)
            assert (batch.reward.tolist(), batch.terminated.tolist()) == ([1.0, 1.0], [False, False])


class Sums(gymnasium.Env):  # type: ignore[misc]
    """Its actions are graphs, which cannot be hashed; the reward is the sum of their nodes."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Graph(spaces.Box(0, 9, (2,)), None)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), float(action.nodes.sum()), False, False, {}


@managers
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_env_ids_may_have_any_integer_dtype(make_manager: Any, dtype: Any) -> None:
    with make_manager(Sloppy, 3) as manager:
        manager.reset()
        manager.recv(ALL)
        manager.send(np.zeros(2, np.int64), np.array([2, 0], dtype))
        assert sorted(manager.recv(ALL).env_ids.tolist()) == [0, 2]


@managers
def test_graphs_are_actions(make_manager: Any) -> None:
    def graphs(*n_nodes: int) -> Any:
        made = np.empty(len(n_nodes), object)
        made[:] = [spaces.GraphInstance(np.ones((n, 2), np.float32), None, None) for n in n_nodes]
        return made

    with make_manager(Sums, 2) as manager:
        manager.reset()
        manager.send(graphs(1, 2), manager.recv(ALL).env_ids)
        assert manager.recv(ALL).reward.tolist() == [2.0, 4.0]

    policy = types.SimpleNamespace(get_action=lambda steps: ActionInfo(graphs(*[3] * len(steps))))
    with make_manager(Sums, 2) as manager:
        manager.set_policy("default", policy)
        manager.reset()
        rewards = np.concatenate([info.current["default"].reward for info in manager.step(ALL)])
        assert rewards.tolist() == [6.0, 6.0]


@managers
def test_an_end_that_is_said_by_a_number_ends_the_episode(make_manager: Any) -> None:
    with make_manager(lambda: Sloppy((np.array([0.5, 1.5]), 1.0, 1, np.bool_(False), {})), 3) as manager:
        manager.reset()
        manager.recv(ALL)
        manager.send(np.zeros(2, np.int64), [2, 0])
        batch = manager.recv(ALL)

        assert batch.terminated.tolist() == [True, True]
        assert batch.final_obs.tolist() == [[0.5, 1.5]] * 2
        assert batch.obs.tolist() == [[0.0, 0.0]] * 2


@managers
def test_check_values_refuses_what_would_be_cast(make_manager: Any) -> None:
    with make_manager(Sloppy, 2, check_values=True) as manager:
        with pytest.raises(BadObservation) as raised:
            manager.reset()
        assert (raised.value.path, raised.value.got) == ("obs", "float64[2]")


@managers
@pytest.mark.parametrize(("info", "infos"), [(None, False), ([], True)], ids=["None", "a list"])
def test_an_info_that_is_no_dict_is_refused(make_manager: Any, infos: bool, info: Any) -> None:
    obs = np.zeros(2, np.float32)

    def in_step(context: Any) -> Sloppy:
        return Sloppy((obs, 0.0, False, False, info if context.env_id == 1 else {}), (obs, {}))

    with make_manager(in_step, 2, infos=infos) as manager:
        manager.reset()
        manager.recv(ALL)
        manager.send(np.zeros(2, np.int64), [0, 1])
        with pytest.raises(BadObservation) as raised:  # noqa: PT012  (with a worker each the other comes first)
            manager.recv(ALL)
            manager.recv(ALL)
        assert (raised.value.path, raised.value.env_ids) == ("info", (1,))
    with make_manager(lambda: Sloppy(first=(obs, info)), infos=infos) as manager:
        with pytest.raises(BadObservation) as raised:
            manager.reset()
        assert raised.value.path == "info of reset"


ACTIONS = [
    (spaces.MultiBinary(3), np.array([[0, 1, 1]], np.float32)),
    (spaces.MultiBinary(3), np.array([[False, True, True]])),
    (spaces.MultiBinary(3), np.array([[0, 1, 1]], np.int64)),
    (spaces.Discrete(3), np.array([2.0], np.float32)),
    (spaces.MultiDiscrete([2, 3], dtype=np.int8), np.array([[1.0, 2.0]])),
    (spaces.Box(0, 255, (2,), np.uint8), np.array([[0.0, 255.0]], np.float32)),
    (spaces.Box(0, 5, (2,), np.int32), np.array([[0.0, 5.0]])),
    (spaces.Box(-1, 1, (2,), np.float32), np.array([[0, 1]])),
    (spaces.Dict(), {}),
    (spaces.Tuple([]), ()),
]


class Recalls(Sloppy):
    """Its observation says whether the action was of its space, and what it adds up to."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.action_space = space

    def step(self, action: Any) -> Any:
        total = np.sum(action) if isinstance(action, np.ndarray | np.generic) else 0
        return np.array([action in self.action_space, total / 100], np.float32), 0.0, False, False, {}


@managers
@pytest.mark.parametrize(("space", "action"), ACTIONS, ids=str)
def test_an_action_that_survives_a_cast_arrives_as_its_space_wants_it(
    make_manager: Any, space: Any, action: Any
) -> None:
    with make_manager(lambda: Recalls(space)) as manager:
        manager.reset()
        manager.recv(ALL)
        manager.send(action, [0])
        (obs,) = manager.recv(ALL).obs.tolist()
        assert obs == pytest.approx([1, np.sum(action) / 100 if isinstance(action, np.ndarray) else 0])


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.MultiBinary(1), np.array([[2.0]])),
        (spaces.MultiBinary(1), np.array([[0.5]])),
        (spaces.Discrete(3), np.array([np.nan])),
        (spaces.Discrete(3), np.array([3.0])),
        (spaces.Discrete(3), np.array(["1"])),
        (spaces.Box(0, 255, (1,), np.uint8), np.array([[300.0]])),
    ],
    ids=str,
)
def test_an_action_that_would_become_another_is_refused(space: Any, action: Any) -> None:
    with SimpleEnvManager(lambda: Recalls(space)) as manager:
        manager.reset()
        manager.recv(ALL)
        with pytest.raises(BadAction, match="Nothing was sent"):
            manager.send(action, [0])


# Resets.


class Bare(Sloppy):
    def reset(self) -> Any:  # type: ignore[override]
        return self._first


class OnlySeed(Sloppy):
    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        self.seed = seed
        return self._first


class PassesOn(gymnasium.Env):  # type: ignore[misc]
    """As Stable-Baselines3's Monitor."""

    observation_space, action_space = Sloppy.observation_space, Sloppy.action_space

    def __init__(self) -> None:
        self.inner = Bare()

    def reset(self, **arguments: Any) -> Any:
        return self.inner.reset(**arguments)

    def step(self, action: Any) -> Any:
        return self.inner.step(action)


@managers
@pytest.mark.parametrize("kind", [Bare, OnlySeed, PassesOn])
def test_an_environment_whose_reset_takes_no_options_works_without_any(make_manager: Any, kind: type) -> None:
    with make_manager(kind, 2) as manager:
        manager.reset({"seed": 5} if kind is OnlySeed else None)
        manager.recv(ALL)
        manager.send(np.zeros(2, np.int64), [0, 1])
        assert len(manager.recv(ALL)) == 2
        if kind is OnlySeed:
            assert len(set(manager.get_attr("seed"))) == 2


@managers
@pytest.mark.parametrize(
    ("kind", "config", "what"),
    [
        (Bare, {"seed": 5}, "seed"),
        (Bare, {"options": {"level": 2}}, "options"),
        (OnlySeed, {"options": {"a": 1}}, "opt"),
    ],
)
def test_what_a_reset_cannot_take_is_said(make_manager: Any, kind: type, config: Any, what: str) -> None:
    with make_manager(kind) as manager:
        with pytest.raises(EnvRaised, match=f"has no parameter '{what}") as raised:
            manager.reset(config)
        assert raised.value.type_name == "UsageError"
        manager.reset()


# The same environment twice.


@managers
@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: env,
        lambda env: gymnasium.wrappers.TimeLimit(env, 50),
        lambda env: gymnasium.wrappers.TimeLimit(gymnasium.wrappers.TransformReward(env, abs), 50),
    ],
    ids=["itself", "wrapped", "wrapped twice"],
)
def test_one_environment_behind_two_wrappers_is_refused(make_manager: Any, wrap: Callable[[Any], Any]) -> None:
    env = Sloppy()
    if make_manager is SubprocessEnvManager:  # each worker has a copy of its own
        make_manager(lambda: wrap(env), 2).close()
        return
    with pytest.raises(UsageError, match="the same environment twice"):
        make_manager(lambda: wrap(env), 2)


def test_wrapped_environments_of_their_own_may_share_a_simulator() -> None:
    class Simulated(Sloppy):
        def __init__(self, simulator: Any) -> None:
            super().__init__()
            self.env = self.simulator = simulator

        @property
        def unwrapped(self) -> Any:
            return self.simulator

    SimpleEnvManager([lambda: Simulated(sys), lambda: Simulated(sys)], 2).close()


# Registered ids.


class Mine(Sloppy):
    def __init__(self, size: int = 3, render_mode: str | None = None) -> None:
        super().__init__(first=(np.zeros(2, np.float32), {}))
        self.size = size


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    names = []

    def register(name: str, *args: Any, **kwargs: Any) -> None:
        names.append(name)
        gymnasium.register(name, *args, **kwargs)

    yield register
    for name in names:
        gymnasium.registry.pop(name, None)


@managers
@pytest.mark.parametrize(
    "entry_point", [Mine, lambda size: Mine(size), f"{__name__}:Mine"], ids=["class", "lambda", "text"]
)
def test_an_id_that_this_process_registered_is_known_to_workers(
    make_manager: Any, register: Any, entry_point: Any
) -> None:
    register("Mine-v0", entry_point, kwargs={"size": 7}, max_episode_steps=11)
    with make_manager("Mine-v0", 2) as manager:
        manager.reset()
        assert manager.get_attr("size") == [7, 7]
        assert [spec.max_episode_steps for spec in manager.get_attr("spec")] == [11, 11]


@managers
def test_an_id_whose_class_is_in_the_main_module_is_known_to_workers(
    make_manager: Any, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "MineInMain", Mine, raising=False)
    register("InMain-v0", "__main__:MineInMain")
    with make_manager("InMain-v0") as manager:
        assert manager.get_attr("size") == [3]


def test_an_id_registered_with_what_cannot_be_pickled_is_refused_before_anything_starts(register: Any) -> None:
    register("Locked-v0", Mine, kwargs={"size": threading.Lock()})
    with pytest.raises(UsageError, match=r"EnvSpec that Gymnasium has registered .* cannot be pickled"):
        SubprocessEnvManager("Locked-v0")


@managers
@pytest.mark.parametrize(
    "text", ["registers_ids:Brought-v0", "registers_ids:space/Brought-v1", "registers_ids:Unversioned"]
)
def test_a_module_before_an_id_is_imported_first(
    make_manager: Any, text: str, write_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(
        "registers_ids",
        f"import gymnasium\nfrom {__name__} import Mine\n"
        "for name in ('Brought-v0', 'space/Brought-v1', 'Unversioned'):\n    gymnasium.register(name, Mine)\n",
    )
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    with make_manager(text) as manager:
        assert manager.get_attr("size") == [3]


def test_a_name_in_a_module_is_that_name_also_where_an_id_is_called_the_same(
    register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("has_both")
    module.Both = lambda: Mine(5)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "has_both", module)
    register("Both", Mine)
    with SimpleEnvManager("has_both:Both") as manager:
        assert manager.get_attr("size") == [5]


@pytest.mark.parametrize(
    ("text", "message"),
    [("math:NoSuch-v0", "knows no environment 'math:NoSuch-v0'"), ("math:no_such", "cannot be found")],
)
def test_a_module_that_brings_no_such_thing_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SimpleEnvManager(text)
