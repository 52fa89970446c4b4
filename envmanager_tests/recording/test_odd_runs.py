"""Recordings of runs in which something odd happens: episodes that tell what was seen and done, orders that hold."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    ArraySpec,
    BehaviorSpec,
    Environment,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    WorkerDied,
)
from envmanager.recording.data import RecordedEpisode, episodes
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager_tests.recording.runs import Uneven, by_rows, kill


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.emrec")


def require_consistent(read: list[RecordedEpisode]) -> None:
    """Check that each action is the one that the environment was sent after the observation before it."""
    for each in read:
        assert each.obs[:, 1].tolist() == list(range(each.length + 1))
        if each.length:
            assert each.obs[1:, 2].tolist() == each.actions.tolist()
            assert (each.actions % 7 == each.rewards).all()


def test_actions_to_some_environments_of_a_worker_are_those_of_their_episodes(path: str) -> None:
    with SubprocessEnvManager(Uneven, 4, n_workers=1, record=path) as manager:
        manager.reset(seed=1)
        manager.recv()
        for number in range(60):
            env_ids = [number % 4] if number % 3 else [3, 0, 2, 1]
            manager.send(np.arange(len(env_ids)) + 10 * number, env_ids)
            manager.recv()

    read = list(episodes(path))
    require_consistent(read)
    assert sum(each.length for each in read) == 20 * 4 + 40


def test_episodes_that_begin_amid_others_have_their_own_actions(path: str) -> None:
    with SubprocessEnvManager(Uneven, 3, n_workers=1, episodes="on_demand", record=path) as manager:
        manager.reset(seed=1)
        manager.recv()
        for number in range(60):
            if number % 5 == 2:
                manager.begin([1], [{"level": number}])
            resting = [env_id for env_id in (0, 1, 2) if not manager.tasks.acts[env_id] and number % 5 != 2]
            if resting:
                manager.begin(resting)
            acting = np.flatnonzero(manager.tasks.acts)
            if len(acting):
                manager.send(acting + 10 * number, acting)
            manager.recv()

    require_consistent(list(episodes(path)))


class InTurns(Environment):
    """Two agents that see a clock, and act in turns."""

    behavior_specs = {"default": BehaviorSpec(ArraySpec((1,)), ArraySpec((), np.int64))}
    max_agents = {"default": 2}

    def reset(self, *, seeds: Any, options: Any) -> Any:
        self.clock = 0
        return self.seen(0.0)

    def seen(self, reward: float) -> Any:
        is_over, clock = self.clock == 6, np.full((2, 1), self.clock, np.float32)
        steps = AgentSteps.stepped(
            agent_id=np.arange(2),
            obs=np.zeros((2, 1), np.float32) if is_over else clock,
            reward=np.full(2, reward, np.float32),
            terminated=np.full(2, is_over),
            truncated=np.zeros(2, np.bool_),
            final_obs=clock if is_over else None,
            acting=np.arange(2) == (0 if is_over else self.clock % 2),
        )
        self.clock = 0 if is_over else self.clock
        return {"default": steps}

    def step(self, actions: Any) -> Any:
        self.clock += 1
        return self.seen(1.0)

    def close(self) -> None:
        pass


class OwnClock:
    def get_action(self, steps: Any) -> ActionInfo:
        return ActionInfo(steps.obs[:, 0].astype(np.int64))


def test_an_agent_that_waits_for_its_turn_acts_on_what_it_sees_then(path: str) -> None:
    with SimpleEnvManager(InTurns, 1, record=path) as manager:
        manager.set_policy("default", OwnClock())
        manager.reset()
        for _ in range(6):
            manager.step()

    first, second = (each for each in episodes(path) if not each.is_cut)
    assert (first.obs[:, 0].tolist(), first.actions.tolist()) == ([0, 2, 4, 6], [0, 2, 4])
    assert (second.obs[:, 0].tolist(), second.actions.tolist()) == ([1, 3, 5, 6], [1, 3, 5])
    assert (first.rewards.tolist(), second.rewards.tolist()) == ([2, 2, 2], [2, 2, 1])


def test_episodes_of_a_worker_that_a_call_finds_dead_are_lost_with_that_error(path: str) -> None:
    with SubprocessEnvManager(Uneven, 2, restarts=RestartPolicy(max_restarts=9), record=path) as manager:
        manager.reset(seed=1)
        manager.recv("all")
        kill(manager, 1)
        with pytest.raises(WorkerDied):
            manager.call("obs", env_ids=[1])
        assert manager.recv().lost.tolist() == [True]

    errors = {each.env_id: each.error for each in episodes(path) if each.generation == 0}
    assert isinstance(errors[1], WorkerDied)
    assert errors[0] is None


def test_episodes_of_a_worker_that_was_recycled_are_lost(path: str) -> None:
    restarts = RestartPolicy(recycle_after_steps=5)
    with SubprocessEnvManager(Uneven, 4, n_workers=2, restarts=restarts, record=path) as manager:
        by_rows(manager, 1)
        assert manager.stats().restarts == 0

    lost = [each.error for each in episodes(path) if each.error is not None]
    assert lost
    assert {getattr(error, "phase", "") for error in lost} == {"recycled"}


@pytest.mark.parametrize("found_by", ["call", "recv"])
def test_an_order_holds_when_a_worker_was_found_dead_and_is_again(found_by: str, path: str) -> None:
    class Fatal(Uneven):
        def step(self, action: Any) -> Any:
            if action == 13:
                os._exit(1)
            return super().step(action)

    seen = []
    for options in ({"record": path}, {"order": path}):
        with SubprocessEnvManager(Fatal, 2, restarts=RestartPolicy(max_restarts=0), **options) as manager:
            manager.reset(seed=1)
            manager.recv("all")
            manager.send(np.array([1, 13]), [0, 1])
            with pytest.raises(WorkerDied):
                manager.call("obs") if found_by == "call" else manager.recv("all")
            manager.reset(seed=2)
            seen.append(manager.recv("all").obs.tobytes())
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [SimpleEnvManager, SubprocessEnvManager])
def test_an_order_holds_when_an_environment_raises_again(kind: Any, path: str) -> None:
    class Picky(Uneven):
        def step(self, action: Any) -> Any:
            if action == 13:
                raise ValueError(action)
            return super().step(action)

    seen = []
    for options in ({"record": path}, {"order": path}):
        with kind(Picky, 2, **({} if kind is SimpleEnvManager else {"n_workers": 1}), **options) as manager:
            manager.reset(seed=1)
            for number in range(10):
                manager.recv("all")
                manager.send(np.array([1, 13 if number == 9 else 2]), [0, 1])
            with pytest.raises(EnvRaised):
                manager.recv("all")
            manager.reset()  # goes on with the generators, also of environment 0, which has taken its step
            seen.append(manager.recv("all").obs.tobytes())
    assert seen[0] == seen[1]


def test_an_order_holds_when_a_step_came_while_a_call_waited(path: str) -> None:
    seen = []
    for options in ({"record": path}, {"order": path}):
        timeouts = Timeouts(step_s=math.inf)
        with SubprocessEnvManager(Uneven, 2, infos=True, timeouts=timeouts, **options) as manager:
            manager.reset(seed=1)
            manager.recv("all")
            manager.send(np.arange(2), [0, 1])
            manager.get_attr("last")
            seen.append(manager.recv("all").obs.tobytes())
    assert seen[0] == seen[1]


def test_a_recording_ends_with_the_last_look_even_if_that_found_nothing(path: str) -> None:
    lengths = []
    for make in (lambda: SubprocessEnvManager(Slow, 1, record=path), lambda: ReplayEnvManager(recording=path)):
        with make() as manager:
            manager.reset(seed=1)
            manager.recv()
            manager.send(np.zeros(1, np.int64), [0])
            lengths.append([len(manager.recv(Wait.any(timeout_s=0))) for _ in range(3)])
    assert lengths == [[0, 0, 0]] * 2


class Slow(Uneven):
    def step(self, action: Any) -> Any:
        signal.pause()
