"""What a step may cost, counted in Python calls and objects and not in time: the same on every machine, however busy.

A figure that has to go up needs a reason, and a look at `python -m benchmarks`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Wait,
)
from envmanager.observe.episodes import Episodes

SUITE = "core"

N_ENVS = 8
ALL = Wait.all()


class Noop(gymnasium.Env):  # type: ignore[misc]
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        return self._obs, 1.0, False, False, {}


class NoopVector(gymnasium.vector.VectorEnv):  # type: ignore[misc]
    """Eight environments that do nothing."""

    num_envs = N_ENVS
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    single_observation_space, single_action_space = Noop.observation_space, Noop.action_space

    def __init__(self) -> None:
        self._result = np.zeros((N_ENVS, 4), np.float32), np.ones(N_ENVS), *(np.zeros(N_ENVS, bool) for _ in "ab"), {}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._result[0], {}

    def step(self, actions: Any) -> Any:
        return self._result


class Zeros:
    action = np.zeros(N_ENVS, np.int64)

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(self.action[: len(steps)])


def sending(manager: EnvManager) -> Callable[[], Any]:
    """One ``send`` and one ``recv`` of all environments."""
    manager.reset()
    env_ids = manager.recv(ALL).env_ids
    actions = np.zeros(N_ENVS, np.int64)

    def go_on() -> None:
        manager.send(actions, env_ids)
        manager.recv(ALL)

    return go_on


def stepping(manager: EnvManager) -> Callable[[], Any]:
    """One ``step()`` of all environments."""
    manager.set_policy("default", Zeros())
    manager.reset()
    return lambda: manager.step(ALL)


def n_left_behind(go_on: Callable[[], Any]) -> int:
    """How many blocks of memory more there are after 250 steps."""
    for _ in range(50):
        go_on()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(250):
        go_on()
    gc.collect()
    return sys.getallocatedblocks() - before


def n_calls(function: Callable[[], Any], n_times: int = 150, enough: float = 0) -> int:
    """How many calls of Python functions one call of ``function`` makes, those of environments and tests aside.

    The least of so many times: how often a wait looks again depends on how busy the machine is. ``enough``: a number
    of calls that ends the search.
    """
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename != __file__

    for _ in range(3):
        function()
    counts = []
    sys.setprofile(note)
    try:
        for _ in range(n_times):
            before = count
            function()
            counts.append(count - before)
            if counts[-1] <= enough:
                break
    finally:
        sys.setprofile(None)
    return min(counts)


@pytest.mark.parametrize(("begin", "limit"), [(sending, 29), (stepping, 40)], ids=["send-recv", "step"])
def test_a_batch_in_this_process_takes_so_many_calls(begin: Any, limit: int) -> None:
    with SimpleEnvManager(Noop, N_ENVS) as manager:
        assert n_calls(begin(manager)) <= limit


@pytest.mark.parametrize(("begin", "limit"), [(sending, 31), (stepping, 42)], ids=["send-recv", "step"])
def test_a_batch_of_a_vector_in_this_process_takes_two_calls_more(begin: Any, limit: int) -> None:
    with SimpleEnvManager(NoopVector, N_ENVS) as manager:
        assert n_calls(begin(manager)) <= limit


@pytest.mark.parametrize(("begin", "limit"), [(sending, 11), (stepping, 21)], ids=["send-recv", "step"])
def test_a_worker_step_takes_so_many_calls_in_the_trainer(begin: Any, limit: int) -> None:
    with SubprocessEnvManager(Noop, N_ENVS) as manager:
        # On a busy machine, most waits look for responses once more.
        assert n_calls(begin(manager), 4000, enough=limit * N_ENVS) / N_ENVS <= limit


KEPT = RestartPolicy(keep_episodes=True)


@pytest.mark.parametrize(("begin", "limit"), [(sending, 1), (stepping, 2)], ids=["send-recv", "step"])
@pytest.mark.parametrize("kind", [SimpleEnvManager, SubprocessEnvManager])
def test_kept_episodes_take_so_many_calls_more_for_all_workers(kind: Any, begin: Any, limit: int) -> None:
    with kind(Noop, N_ENVS) as manager, kind(Noop, N_ENVS, restarts=KEPT) as keeping:
        usual = n_calls(begin(manager), 1000)
        assert n_calls(begin(keeping), 4000, enough=usual + limit) <= usual + limit


@pytest.mark.parametrize("begin", [sending, stepping])
@pytest.mark.parametrize("kind", [SimpleEnvManager, AsyncioEnvManager, SubprocessEnvManager])
def test_steps_leave_no_objects_behind(kind: Any, begin: Any) -> None:
    with kind(Noop, N_ENVS) as manager:
        assert n_left_behind(begin(manager)) < 125, "half an object or more per step stays"


@pytest.mark.parametrize("kind", [SimpleEnvManager, AsyncioEnvManager, SubprocessEnvManager])
def test_steps_make_no_cycles_for_the_collector(kind: Any) -> None:
    with kind(Noop, N_ENVS) as manager:
        go_on = sending(manager)
        go_on()
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                go_on()
            assert gc.collect() == 0
        finally:
            gc.enable()


@pytest.mark.parametrize(("begin", "limit"), [(sending, 16), (stepping, 16)], ids=["send-recv", "step"])
def test_counting_episodes_takes_so_many_calls_more_and_only_once_somebody_asked(begin: Any, limit: int) -> None:
    with SimpleEnvManager(Noop, N_ENVS) as manager:
        go_on = begin(manager)
        before = n_calls(go_on)
        assert manager.episodes.count == 0
        assert n_calls(go_on) - before <= limit


@pytest.mark.parametrize("begin", [sending, stepping])
def test_counting_episodes_leaves_no_objects_behind(begin: Any) -> None:
    with SimpleEnvManager(Noop, N_ENVS) as manager:
        assert manager.episodes.count == 0
        assert n_left_behind(begin(manager)) < 125


@pytest.mark.parametrize("begin", [sending, stepping])
def test_a_step_of_a_manager_that_is_served_makes_the_same_calls(begin: Any) -> None:
    with SimpleEnvManager(Noop, N_ENVS) as manager:
        go_on = begin(manager)
        before = n_calls(go_on)
        manager.serve(episodes=Episodes())
        assert n_calls(go_on) == before
