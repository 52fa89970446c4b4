"""Kept episodes amid which ``call`` and ``set_attr`` came: a run with faults is compared with the same run without."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvContext,
    EnvManager,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
    WorkerTimedOut,
)
from envmanager.observe import events
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager_tests.process.test_kept_episodes import Team

SUITE = "core"

ALL = Wait.all()
KEPT = RestartPolicy(max_restarts=1000, backoff_s=0, keep_episodes=True, on_exception="restart")


class Levels(gymnasium.Env):  # type: ignore[misc]
    """Numbers that depend on the seed, all actions, the level at the reset and in each step, and what was pushed."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)
    level = 0

    def __init__(self, counter: str = "", raises_at: tuple[int, ...] = ()) -> None:
        self._counter, self._raises_at, self._n_steps = counter, raises_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n, self._length, self._begun_at = 0, int(self.np_random.integers(8, 25)), self.level
        self._x = float(self.np_random.random())
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        if self._n_steps in self._raises_at:
            with contextlib.suppress(FileExistsError):  # not twice in all copies
                Path(f"{self._counter}-{self._n_steps}").touch(exist_ok=False)
                raise ValueError("a fault")
        self._n += 1
        self._x = (self._x * 3.7 + int(action) + float(self.np_random.random()) + self.level * 0.3) % 10.0
        return self._obs(), float(action), self._n >= self._length, False, {}

    def push(self, x: float, *, times: int = 1) -> float:
        """Change the state. The result depends on it, too."""
        self._x += x * times + float(self.np_random.random())
        return self._x

    def fail(self, how: str) -> None:
        self._x += 1.0
        if how == "raise":
            raise ValueError("a fault")
        if how == "interrupt":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def _obs(self) -> Any:
        return np.array([self._x, float(self._n), float(self._begun_at)])


@attrs.frozen
class Failing:
    """A level that is set, and then fails."""

    level: int
    how: str


class LevelsThatMayFail(Levels):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.level if isinstance(value, Failing) else value)
        if isinstance(value, Failing):
            self.fail(value.how)


class LevelsOfCoroutines(Levels):
    async def reset(self, **arguments: Any) -> Any:  # type: ignore[override]
        return Levels.reset(self, **arguments)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return Levels.step(self, action)

    async def push(self, x: float, *, times: int = 1) -> float:  # type: ignore[override]
        await asyncio.sleep(0)
        return Levels.push(self, x, times=times)


def add(env: Any, x: float) -> None:
    """Change the state, as a function that is sent to the environments."""
    env.unwrapped._x += x


def digest_of(
    manager: EnvManager, kill: Callable[[int], None] = lambda _: None, n_rounds: int = 36, **reset: Any
) -> list[str]:
    """Play with calls between the steps and while they are in flight, and return a digest of each environment's rows.

    Kills come when a step is in flight, and when none is.
    """
    n_envs = manager.n_envs
    hashes = [hashlib.sha256() for _ in range(n_envs)]
    manager.set_attr("level", 1)
    manager.reset(**reset)
    batch = manager.recv(ALL)
    for round_ in range(n_rounds):
        assert not batch.lost.any()
        for row, env_id in enumerate(batch.env_ids.tolist()):
            hashes[env_id].update(
                batch.obs[row].tobytes() + batch.reward[row].tobytes() + batch.truncated[row].tobytes()
            )
        if round_ % 3 == 0:
            for env_id, x in enumerate(manager.call("push", 0.5, times=round_)):
                hashes[env_id].update(np.float64(x).tobytes())
        if round_ % 5 == 1:
            manager.set_attr("level", [round_ + env_id for env_id in range(n_envs)])
        if round_ % 4 == 2:
            manager.set_attr("level", round_, env_ids=[round_ % n_envs])
        kill(2 * round_)
        manager.send([round_ % 3] * len(batch), batch.env_ids)
        if round_ % 7 == 3:
            manager.call(add, 0.25, env_ids=[0, n_envs - 1])
        if round_ % 11 == 4:
            manager.set_attr("level", 0)
        kill(2 * round_ + 1)
        batch = manager.recv(ALL)
        notice(manager)
    assert manager.events.count(events.EpisodesNotKept) == 0
    return [each.hexdigest() for each in hashes]


def notice(manager: EnvManager) -> None:
    """Let the manager take note of the workers that have died since their step: a call to them raises, once."""
    for env_id in range(manager.n_envs):
        with contextlib.suppress(WorkerDied):
            manager.get_attr("level", [env_id])


def killer(manager: EnvManager, every: int = 9) -> Callable[[int], None]:
    def kill(moment: int) -> None:
        if moment % every == every - 1:
            worker = manager.stats().workers[moment // every % manager.n_workers]
            if worker.pid is not None and not worker.replacing:
                os.kill(worker.pid, signal.SIGKILL)

    return kill


def undisturbed(**reset: Any) -> list[str]:
    with SimpleEnvManager(Levels, 4, seed=1, restarts=KEPT) as manager:
        return digest_of(manager, **reset)


@pytest.mark.parametrize("transport", ["native", "portable"])
@pytest.mark.parametrize("tasks", [False, True], ids=["automatic", "tasks"])
def test_rows_of_a_run_with_calls_and_kills_are_those_of_the_run_without_kills(transport: Any, tasks: bool) -> None:
    if transport == "native" and sys.platform != "linux":
        pytest.skip("needs Linux")
    endless = {"tasks": (Task(seed=k) for k in range(10_000)), "prefetch": True} if tasks else {}
    with SubprocessEnvManager(Levels, 4, n_workers=2, seed=1, restarts=KEPT, transport=transport) as manager:
        own = digest_of(manager, killer(manager), **endless)
        assert manager.events.count(events.Died) == manager.events.count(events.EpisodesKept) >= 6
        assert (manager.stats().steps_lost, manager.stats().episodes_diverged) == (0, 0)
    again = {"tasks": (Task(seed=k) for k in range(10_000)), "prefetch": True} if tasks else {}
    assert own == undisturbed(**again)


@pytest.mark.parametrize("kind", [SimpleEnvManager, AsyncioEnvManager], ids=["simple", "asyncio"])
def test_environments_that_are_made_anew_in_this_process_repeat_the_calls(kind: Any, tmp_path: Path) -> None:
    made, path = Levels if kind is SimpleEnvManager else LevelsOfCoroutines, str(tmp_path / "steps")
    with kind(lambda: made(path, (5, 11, 12, 30)), 4, seed=1, restarts=KEPT) as manager:
        own = digest_of(manager)
        assert manager.events.count(events.Raised) == 4
        assert manager.stats().episodes_diverged == 0
    assert own == undisturbed()


class TeamOfLevels(Team):
    """Agents that come and go, whose numbers depend on the level too."""

    level = 0

    def step(self, actions: dict[str, Any]) -> Any:
        for agent in actions:
            self._x[agent] += self.level
        return super().step(actions)

    def push(self, x: float) -> None:
        self._x = {agent: own + x for agent, own in self._x.items()}


def test_calls_amid_episodes_of_many_agents_are_repeated_in_their_place() -> None:
    class Own:
        def get_action(self, steps: AgentSteps) -> ActionInfo:
            return ActionInfo((np.abs(steps.obs.sum(1)) * 7).astype(np.int64) % 3)

    def digests(*, kills: bool) -> list[str]:
        with SubprocessEnvManager(TeamOfLevels, 4, n_workers=2, seed=1, restarts=KEPT) as manager:
            manager.set_policy("default", Own())
            infos, own, kill = manager.reset(), [hashlib.sha256() for _ in range(4)], killer(manager)
            for round_ in range(40):
                for info in infos:
                    assert info.lost is None
                    for steps in info.current.values():
                        for row, env_id in enumerate(steps.env_id.tolist()):
                            own[env_id].update(steps.agent_id[row].tobytes() + steps.obs[row].tobytes())
                if round_ % 3 == 1:
                    manager.call("push", 0.5, env_ids=[round_ % 4])
                if round_ % 4 == 1:
                    manager.set_attr("level", [round_, 1, 2, 3])
                if kills:
                    kill(round_)
                infos = manager.step(ALL)
                notice(manager)
            assert manager.events.count(events.Died) >= 4 * kills
            return [each.hexdigest() for each in own]

    assert digests(kills=True) == digests(kills=False)


# What is not repeated.


def stepped(manager: EnvManager, action: int = 1) -> Any:
    """Step all environments. Return the batch."""
    manager.send(np.full(manager.n_envs, action), range(manager.n_envs))
    return manager.recv(ALL)


def begun(manager: EnvManager) -> Any:
    manager.reset()
    manager.recv(ALL)
    return stepped(manager)


def kill(manager: EnvManager, worker_id: int = 0) -> None:
    os.kill(manager.stats().workers[worker_id].pid or 0, signal.SIGKILL)


def not_kept(manager: EnvManager) -> list[tuple[tuple[int, ...], str]]:
    return [(each.env_ids, each.why) for each in manager.events if isinstance(each, events.EpisodesNotKept)]


def test_after_a_call_that_is_not_to_be_repeated_the_episode_is_not_kept() -> None:
    with SubprocessEnvManager(Levels, 2, n_workers=1, seed=1, restarts=KEPT) as manager:
        begun(manager)
        manager.call("push", 0.5, env_ids=[1], repeat=False)
        assert not_kept(manager) == [((1,), "call('push', …) is not to be repeated")]
        with pytest.raises(UsageError, match="EpisodesNotKept"):
            manager.positions([1])
        kill(manager)
        assert stepped(manager).lost.tolist() == [False, True]
        kill(manager)
        assert not stepped(manager).lost.any()


def test_a_call_in_flight_that_is_not_to_be_repeated_is_of_the_episode_that_the_step_begins() -> None:
    with SimpleEnvManager(Levels, 1, seed=1, restarts=KEPT) as manager:
        batch = begun(manager)
        while not batch.terminated.any():
            manager.send([1], [0])
            manager.call("push", 0.5, repeat=False)
            batch = manager.recv(ALL)
        with pytest.raises(UsageError, match="EpisodesNotKept"):
            manager.positions()
        while not stepped(manager).terminated.any():
            pass
        (position,) = manager.positions()
        assert position is not None
        assert position.calls == ()


def test_after_a_call_that_raises_the_episode_is_not_kept() -> None:
    with SubprocessEnvManager(Levels, 2, n_workers=1, seed=1, restarts=KEPT) as manager:
        begun(manager)
        manager.get_attr("level")
        with pytest.raises(EnvRaised):
            manager.call("fail", "raise", env_ids=[0])
        with pytest.raises(EnvRaised):
            manager.get_attr("missing")
        assert not_kept(manager) == [((0,), "call('fail', …) has not succeeded, and may have changed it")]
        kill(manager)
        assert stepped(manager).lost.tolist() == [True, False]


def test_an_episode_amid_which_an_interrupted_call_came_is_not_kept() -> None:
    with SimpleEnvManager(Levels, 2, seed=1, restarts=KEPT) as manager:
        begun(manager)
        with pytest.raises(KeyboardInterrupt):
            manager.call("fail", "interrupt", env_ids=[1])
        assert [env_ids for env_ids, _ in not_kept(manager)] == [(1,)]


@pytest.mark.parametrize("how", ["raise", "interrupt"])
@pytest.mark.parametrize("resets", [False, True])
def test_until_an_attribute_is_set_that_may_have_been_set_no_episode_is_kept(how: str, resets: bool) -> None:
    with SimpleEnvManager(LevelsThatMayFail, 2, seed=1, restarts=KEPT) as manager:
        begun(manager)
        manager.set_attr("level", 1)
        with pytest.raises(EnvRaised if how == "raise" else KeyboardInterrupt):
            manager.set_attr("level", Failing(2, how), env_ids=[1])
        if resets:
            manager.reset()
            manager.recv(ALL)
        else:
            while not stepped(manager).terminated[1]:
                pass
        stepped(manager)
        assert manager.positions([0]) != [None]
        with pytest.raises(UsageError, match="EpisodesNotKept"):
            manager.positions([1])
        while not stepped(manager).terminated[1]:
            pass
        manager.set_attr("level", 3)
        with pytest.raises(UsageError, match="EpisodesNotKept"):
            manager.positions([1])
        while not stepped(manager).terminated[1]:
            pass
        manager.set_attr("level", 4)
        stepped(manager)
        (position,) = manager.positions([1])
        assert position is not None
        assert [(call.after, call.args) for call in position.calls] == [(-1, (3,)), (0, (4,))]


def test_a_new_environment_has_the_value_that_was_set_last_so_its_episodes_are_kept() -> None:
    with SubprocessEnvManager(LevelsThatMayFail, 2, n_workers=1, seed=1, restarts=KEPT) as manager:
        begun(manager)
        manager.set_attr("level", 1)
        with pytest.raises(EnvRaised):
            manager.set_attr("level", Failing(2, "raise"), env_ids=[1])
        kill(manager)
        assert stepped(manager).lost.tolist() == [False, True]
        kill(manager)
        batch = stepped(manager)
        assert not batch.lost.any()
        assert batch.obs[1][2] == 1


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_worker_that_fails_in_a_call_keeps_its_episodes_without_it(how: str, in_flight: bool) -> None:
    limits = Timeouts(call_s=1.0)
    with SubprocessEnvManager(Levels, 4, n_workers=2, seed=1, restarts=KEPT, timeouts=limits) as manager:
        begun(manager)
        manager.set_attr("level", [1, 2, 3, 4])
        if in_flight:
            manager.send(np.ones(4, np.int64), range(4))
            manager.call("push", 0.5)
        with pytest.raises(WorkerDied if how == "kill" else WorkerTimedOut):
            manager.call("fail", how, env_ids=[1])
        batch = manager.recv(ALL) if in_flight else stepped(manager)
        seen = [batch.obs.tolist(), stepped(manager).obs.tolist()]
        assert not_kept(manager) == []
        assert manager.stats().episodes_kept == 2
    with SimpleEnvManager(Levels, 4, seed=1, restarts=KEPT) as manager:
        begun(manager)
        manager.set_attr("level", [1, 2, 3, 4])
        expected = [stepped(manager).obs.tolist()]
        if in_flight:
            manager.call("push", 0.5)
        assert seen == [*expected, stepped(manager).obs.tolist()]


def test_more_calls_than_keep_at_most_are_not_kept_though_no_step_comes() -> None:
    with SimpleEnvManager(Levels, 2, seed=1, restarts=attrs.evolve(KEPT, keep_at_most=500)) as manager:
        begun(manager)
        for _ in range(1100):
            manager.call("push", 0.5, env_ids=[1])
        assert [env_ids for env_ids, _ in not_kept(manager)] == [(1,)]


def test_an_attribute_that_was_set_amid_an_episode_holds_in_an_environment_that_rests() -> None:
    with SubprocessEnvManager(Levels, 3, n_workers=1, seed=1, restarts=KEPT, episodes="on_demand") as manager:
        manager.reset()
        batch = manager.recv(ALL)
        while not batch.terminated.any():
            batch = stepped(manager)
        rests = batch.env_ids[batch.terminated].tolist()
        manager.set_attr("level", 7)
        kill(manager)
        notice(manager)
        assert manager.get_attr("level") == [7, 7, 7]
        manager.begin(rests, [Task(seed=1)] * len(rests))
        others = [env_id for env_id in range(3) if env_id not in rests]
        manager.send(np.ones(len(others), np.int64), others)
        begun_now = manager.recv(ALL)
        assert set(begun_now.obs[begun_now.first, 2].tolist()) == {7.0}
        assert set(begun_now.obs[~begun_now.first, 2].tolist()) == {0.0}


@pytest.mark.parametrize("how", ["ends", "raises", "differs"])
def test_an_attribute_that_was_set_amid_an_episode_holds_where_it_has_diverged(how: str) -> None:
    class Other(Levels):
        """Does something else in the first step of env 1 in the second generation."""

        def __init__(self, context: EnvContext) -> None:
            super().__init__()
            self._is_other = context.generation == 1 and context.env_id == 1

        def step(self, action: Any) -> Any:
            obs, reward, ended, truncated, info = super().step(action)
            is_other, self._is_other = self._is_other, False
            self._x += is_other
            if is_other and how == "raises":
                raise ValueError("a fault")
            return obs, reward, ended or (is_other and how == "ends"), truncated, info

    policy = attrs.evolve(KEPT, on_exception="raise")
    with SubprocessEnvManager(Other, 3, n_workers=1, seed=1, restarts=policy) as manager:
        begun(manager)
        manager.set_attr("level", 7)
        stepped(manager)
        kill(manager)
        notice(manager)
        assert manager.get_attr("level") == [7, 7, 7]
        batch = stepped(manager)
        assert batch.lost.tolist() == [False, True, False]
        assert batch.obs[:, 1:].tolist() == [[3.0, 0.0], [0.0, 7.0], [3.0, 0.0]]


# Deadlines.


def test_a_repetition_that_takes_longer_than_restore_s_has_failed() -> None:
    class Slow(Levels):
        """Stops for ever in a step that is repeated."""

        def __init__(self, context: EnvContext) -> None:
            super().__init__()
            self._generation = context.generation

        def step(self, action: Any) -> Any:
            if self._generation == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().step(action)

    limits = Timeouts(reset_s=1.0, step_s=1000.0, restore_s=0.5)
    with SubprocessEnvManager(Slow, 2, n_workers=1, seed=1, restarts=KEPT, timeouts=limits) as manager:
        begun(manager)
        kill(manager)
        assert not stepped(manager).lost.any()
        (late,) = [each for each in manager.events if isinstance(each, events.TimedOut)]
        assert late.error.timeout_s == 1.5  # type: ignore[attr-defined]


# Positions.


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_episode_begun_at_a_position_has_the_calls_amid_it(in_flight: bool) -> None:
    def of_begun(batch: Any) -> Any:
        return batch.obs[np.isin(batch.env_ids, [0, 3])].tolist()

    with SubprocessEnvManager(Levels, 4, n_workers=2, seed=1, restarts=KEPT, episodes="on_demand") as manager:
        begun(manager)
        manager.set_attr("level", 3, env_ids=[0, 1])
        manager.call("push", 0.5, env_ids=[1])
        stepped(manager)
        manager.set_attr("level", 4)
        batch = stepped(manager)
        manager.call("push", 0.75)
        if in_flight:  # neither counts yet
            manager.send(np.ones(4, np.int64), range(4))
            manager.set_attr("level", 9, env_ids=[1])
        (here,) = manager.positions([1])
        assert here is not None
        assert [call.after for call in here.calls] == [-1, 1, 1, 2, 3]
        if in_flight:
            manager.recv(ALL)
            manager.set_attr("level", 4, env_ids=[1])
        manager.begin([0, 3], [Task.from_dict(here.to_dict())] * 2)
        manager.send(np.ones(2, np.int64), [1, 2])
        first = manager.recv(ALL)
        first = first if first.first.sum() == 2 else manager.recv(ALL)
        assert of_begun(first) == [batch.obs[1].tolist()] * 2
        assert manager.positions([0, 3]) == [here, here]
        kill(manager, 0)
        kill(manager, 1)
        after = stepped(manager)
        assert not after.lost.any()
        assert of_begun(after)[0] == of_begun(after)[1]
        assert manager.get_attr("level") == [4, 4, 4, 4]


@pytest.mark.parametrize("keeps", [True, False])
def test_an_attribute_that_is_set_while_a_position_is_begun_is_set_after_what_the_position_has_set(keeps: bool) -> None:
    policy = attrs.evolve(KEPT, keep_episodes=keeps)
    there = Task(seed=5, actions=[1, 1], calls=[(1, "set_attr", "level", [2])])
    with SubprocessEnvManager(Levels, 2, n_workers=1, seed=1, restarts=policy, episodes="on_demand") as manager:
        begun(manager)
        manager.begin([0], [there])
        manager.send([1], [1])
        manager.set_attr("level", 3)
        assert manager.recv(ALL).first.tolist() == [True, False]
        manager.begin([0], [Task(seed=6)])
        manager.send([1], [1])
        assert manager.recv(ALL).obs[0][2] == 3
        kill(manager)
        with contextlib.suppress(WorkerDied):
            manager.get_attr("level")
        assert manager.get_attr("level") == [3, 3]
        if keeps:
            assert not stepped(manager).lost.any()


def test_calls_where_no_step_is_in_flight_are_part_of_positions_and_states() -> None:
    def made() -> EnvManager:
        return SubprocessEnvManager(Levels, 2, n_workers=1, seed=1, restarts=KEPT)

    with made() as manager:
        begun(manager)
        manager.send([1], [1])
        manager.call("push", 0.5, env_ids=[0])
        (here,) = manager.positions([0])
        assert here is not None
        assert [(call.after, call.name) for call in here.calls] == [(1, "push")]
        state = manager.state()
        manager.recv(ALL)
        expected = stepped(manager).obs.tolist()
    with made() as manager:
        manager.reset(state=state)
        manager.recv(ALL)
        assert stepped(manager).obs.tolist() == expected


@pytest.mark.parametrize("name", ["call", "set_attr"])
def test_an_episode_with_a_call_after_a_step_in_flight_is_lost_with_a_state(name: str) -> None:
    with SubprocessEnvManager(Levels, 2, n_workers=1, seed=1, restarts=KEPT) as manager:
        begun(manager)
        manager.send([1, 1], [0, 1])
        if name == "call":
            manager.call("push", 0.5, env_ids=[0])
        else:
            manager.set_attr("level", 3, env_ids=[0])
        state = manager.state()
        expected = manager.recv(ALL).obs[1].tolist()
    with SubprocessEnvManager(Levels, 2, n_workers=1, seed=1, restarts=KEPT) as manager:
        manager.reset(state=state)
        batch = manager.recv(ALL)
        assert batch.lost.tolist() == [True, False]
        assert batch.obs[1].tolist() == expected


def test_a_state_is_refused_between_a_call_after_a_begin_and_the_first_observation() -> None:
    with SimpleEnvManager(Levels, 2, n_workers=1, seed=1, restarts=KEPT, episodes="on_demand") as manager:
        begun(manager)
        manager.begin([0], [Task(seed=4)])
        manager.send([1], [1])
        manager.call("push", 0.5, env_ids=[0])
        with pytest.raises(UsageError, match="env 0, whose first observation"):
            manager.state()
        manager.recv(ALL)
        manager.state()


def test_a_position_with_a_function_is_begun_but_is_no_plain_data() -> None:
    with SimpleEnvManager(Levels, 2, seed=1, restarts=KEPT, episodes="on_demand") as manager:
        batch = begun(manager)
        manager.call(add, 0.5, env_ids=[0])
        (here,) = manager.positions([0])
        assert here is not None
        with pytest.raises(UsageError, match="no plain data"):
            here.to_dict()
        manager.begin([1], [here])
        manager.send([1], [0])
        ahead = manager.recv(ALL)
        first = ahead if ahead.first.any() else manager.recv(ALL)
        assert first.obs[first.first].tolist() == [batch.obs[0].tolist()]


def test_what_a_tasks_calls_have_set_holds_in_the_next_generation() -> None:
    calls = [(1, "set_attr", "level", [5])]
    with SubprocessEnvManager(Levels, 1, seed=1, restarts=attrs.evolve(KEPT, keep_episodes=False)) as manager:
        manager.reset(tasks=[Task(seed=1, actions=[1, 2], calls=calls)])
        manager.recv(ALL)
        kill(manager)
        with contextlib.suppress(WorkerDied):
            manager.get_attr("level")
        assert manager.get_attr("level") == [5]


def test_vectors_refuse_tasks_with_calls() -> None:
    def vector() -> Any:
        return gymnasium.vector.SyncVectorEnv([Levels, Levels])

    with SimpleEnvManager(vector, 2, n_workers=1) as manager, pytest.raises(UsageError, match="actions of a task"):
        manager.reset(tasks=[Task(calls=[(0, "set_attr", "level", [5])])])


def test_a_recording_of_a_kept_run_with_calls_can_be_replayed(tmp_path: Path) -> None:
    path = str(tmp_path / "run.emrec")
    with SubprocessEnvManager(Levels, 4, n_workers=2, seed=1, restarts=KEPT, record=path) as manager:
        own = digest_of(manager, killer(manager), 20)
        assert manager.events.count(events.EpisodesKept) >= 2
    with ReplayEnvManager(recording=path, trust=True) as manager:
        assert digest_of(manager, n_rounds=20) == own


def test_a_call_right_after_the_reset_stands_in_the_position() -> None:
    with SimpleEnvManager(Levels, 1, seed=1, restarts=KEPT) as manager:
        manager.reset()
        manager.set_attr("level", 5)
        (here,) = manager.positions()
        assert here is not None
        assert (here.actions, [call.after for call in here.calls]) == (None, [-1, 0])
        manager.reset(tasks=[here])
        assert manager.get_attr("level") == [5]
        assert manager.positions() == [here]
