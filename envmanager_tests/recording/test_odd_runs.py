"""Recordings of runs in which something odd happens: episodes that tell what was seen and done, orders that hold."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    ArraySpec,
    BehaviorSpec,
    Environment,
    EnvManager,
    EnvRaised,
    RandomPolicy,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
)
from envmanager.errors import EnvManagerError
from envmanager.recording.data import RecordedEpisode, episodes, table
from envmanager.recording.tape import ReplayDiverged
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager.testing import Raise, faulty
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
            resting = [env_id for env_id in (0, 1, 2) if not manager.tasks.seats.acts[env_id] and number % 5 != 2]
            if resting:
                manager.begin(resting)
            acting = np.flatnonzero(manager.tasks.seats.acts)
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


def by_options(manager: EnvManager, options: Any, n: int = 20) -> list[bytes]:
    """Run all environments with the same actions, and return the observations."""
    manager.reset(seed=1, options=options)
    seen = []
    for number in range(n):
        batch = manager.recv("all")
        seen.append(np.asarray(batch.obs["seen"] if isinstance(batch.obs, dict) else batch.obs).tobytes())
        manager.send(batch.env_ids + number, batch.env_ids)
    return seen


class Level:
    """An object of a user, without a comparison of its own."""

    def __init__(self, number: int) -> None:
        self.number, self.itself = number, self


@pytest.mark.parametrize(
    "make",
    [lambda: np.arange(3), lambda: Level(3), lambda: math.nan, lambda: [{"at": {1, 2}}, (slice(2), lambda x: x)]],
)
def test_options_of_any_kind_are_found_equal_in_a_replay(make: Any, path: str) -> None:
    with SubprocessEnvManager(Uneven, 2, record=path) as manager:
        recorded = by_options(manager, {"other": make()})
    for trust in (False, True):
        with ReplayEnvManager(recording=path, trust=trust) as manager:
            assert by_options(manager, {"other": make()}) == recorded


@pytest.mark.parametrize(
    ("before", "now"),
    [(Level(3), Level(4)), (partial(max, 1), partial(max, 2)), (0.0, -0.0), (np.zeros(2), np.zeros(3)), (1, 1.0)],
)
def test_other_options_are_found_in_a_replay(before: Any, now: Any, path: str) -> None:
    with SimpleEnvManager(Uneven, 2, record=path) as manager:
        by_options(manager, {"other": before})
    with ReplayEnvManager(recording=path, trust=True) as manager, pytest.raises(ReplayDiverged):
        by_options(manager, {"other": now})


def test_without_trust_an_object_of_the_recorded_class_is_as_recorded_and_another_is_not(path: str) -> None:
    with SimpleEnvManager(Uneven, 2, record=path) as manager:
        recorded = by_options(manager, {"other": Level(3)})
    with ReplayEnvManager(recording=path) as manager:
        assert by_options(manager, {"other": Level(4)}) == recorded
    for other in (partial(max, 1), 3, None):
        with ReplayEnvManager(recording=path) as manager, pytest.raises(ReplayDiverged):
            by_options(manager, {"other": other})


def test_a_worker_that_was_replaced_with_objects_in_its_options_is_replayed_without_trust(path: str) -> None:
    class Raises(Uneven):
        def step(self, action: Any) -> Any:
            if action == 9:
                raise ValueError(action)
            return super().step(action)

    policy = RestartPolicy(backoff_s=0.0, on_exception="restart")
    with SimpleEnvManager(Raises, 2, restarts=policy, record=path) as manager:
        recorded = by_options(manager, {"other": Level(3)})
        assert manager.stats().restarts == 2
    with ReplayEnvManager(recording=path) as manager:
        assert by_options(manager, {"other": Level(3)}) == recorded
        assert manager.stats().restarts == 2


class Locked(Uneven):
    """An environment whose infos have what cannot be pickled, and a set, whose order is another in each process."""

    def reset(self, **options: Any) -> Any:
        obs, _ = super().reset(**options)
        return obs, {"lock": threading.Lock(), "n": [self.n_steps], "words": set("abcdefgh")}

    def step(self, action: Any) -> Any:
        *step, _ = super().step(action)
        return *step, {"lock": [threading.Lock()], "n": [self.n_steps], "words": set("abcdefgh")}


def test_infos_are_recorded_but_for_what_cannot_be_pickled(path: str) -> None:
    infos: list[Any] = []
    for make in (
        partial(SimpleEnvManager, Locked, 2, infos=True, record=path),
        partial(ReplayEnvManager, recording=path),
    ):
        with make() as manager:
            by_options(manager, None)
            batch = manager.recv("all")
            assert batch.info is not None
            infos.append([(info["n"], info["words"]) for info in batch.info])
    assert infos[0] == infos[1]
    assert all(each.infos for each in episodes(path) if each.length)


class Worded(Locked):
    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        return obs, {"words": info["words"]}

    def step(self, action: Any) -> Any:
        *step, info = super().step(action)
        return *step, {"words": info["words"]}


def test_an_order_holds_with_sets_in_the_infos(path: str) -> None:
    seen = []
    for options in ({"record": path}, {"order": path}):
        with SubprocessEnvManager(Worded, 2, infos=True, start_method="spawn", **options) as manager:
            seen.append(by_options(manager, None))
    assert seen[0] == seen[1]


class Parted(Uneven):
    observation_space = gymnasium.spaces.Dict({"seen": Uneven.observation_space, "n": gymnasium.spaces.Discrete(100)})

    def obs(self) -> Any:
        return {"seen": super().obs(), "n": self.n_steps}


def test_observations_of_parts_may_be_left_out(path: str) -> None:
    with SimpleEnvManager(Parted, 2, record=path, record_observations=False) as manager:
        recorded = by_options(manager, None)
    assert {each.obs for each in episodes(path)} == {None}
    with SimpleEnvManager(Parted, 2, order=path) as manager:
        assert by_options(manager, None) == recorded


def test_what_cannot_be_sent_is_refused_again(path: str) -> None:
    for make in (
        partial(SubprocessEnvManager, Uneven, 2, record=path),
        partial(SubprocessEnvManager, Uneven, 2, order=path),
        partial(ReplayEnvManager, recording=path),
    ):
        with make() as manager:
            manager.reset(seed=1)
            with pytest.raises(UsageError, match="lock"):
                manager.set_attr("last", threading.Lock())
            assert manager.get_attr("last") == [0, 0]


SCRIPT = """
import sys
from envmanager import SimpleEnvManager
from envmanager_tests.recording.runs import Uneven
class Level:
    def __init__(self, number):
        self.number = number
with SimpleEnvManager(Uneven, 2, record=sys.argv[1]) as manager:
    manager.reset(options={"own": Level(3)})
    manager.recv()
    manager.send([1, 2], [0, 1])
    manager.recv()
"""


def test_a_recording_is_shown_where_its_classes_are_unknown_and_before_an_episode_has_ended(path: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, path], check=True)
    for flags in ([], ["--step", "0"]):
        command = [Path(sys.executable).with_name("envmanager"), "replay", path, *flags]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert ("Level" in shown.stdout) == bool(flags)
    assert [each.length for each in episodes(path)] == [1, 1]


def test_a_recording_without_steps_is_a_table_of_no_rows(path: str) -> None:
    with SimpleEnvManager(Uneven, 2, record=path):
        pass
    steps = table(path)
    assert {len(column) for column in steps.values()} == {0}
    assert steps["reward"].dtype == np.float32


def test_a_replay_ends_with_the_reset_that_raises_the_error_of_a_dropped_worker(path: str) -> None:
    def told(manager: EnvManager) -> list[str]:
        names = []
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], 1))
        manager.reset(seed=1)
        for call in (manager.step, manager.step, lambda: manager.reset(seed=2)):
            try:
                call()
            except EnvManagerError as error:
                names.append(type(error).__name__)
        return names

    policy = RestartPolicy(max_restarts=0, then="drop", on_exception="restart")
    with SimpleEnvManager(faulty(Raise(ValueError()), after=1), 1, restarts=policy, record=path) as manager:
        live = told(manager)
    with ReplayEnvManager(recording=path) as manager:
        assert told(manager) == live
    assert live[-1] == "EnvRaised"


def test_a_replay_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="recording="):
        ReplayEnvManager()
