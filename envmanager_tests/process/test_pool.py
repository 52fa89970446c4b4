"""A pool of environments for coroutines, on managers of all kinds whose episodes begin on demand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import selectors
import signal
import threading
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from pettingzoo import ParallelEnv

import envmanager.kernel.pool
from envmanager import (
    AsyncioEnvManager,
    BadAction,
    EnvManager,
    EnvRaised,
    LostEpisode,
    ManagerClosed,
    RestartPolicy,
    RestartsExhausted,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    Timeouts,
    UsageError,
    WorkerDied,
    WorkerTimedOut,
)
from envmanager.observe import events

SUITE = "waiting portable"

SOON_S = 60.0
ALWAYS = RestartPolicy(max_restarts=10_000, on_exception="restart", backoff_s=0)


class Level(gymnasium.Env[Any, Any]):
    """An observation has the level of the task, the number of steps, and the sum of the actions since the reset.

    The options of a task say what happens: the step before which the environment hangs, raises or dies.
    """

    observation_space = gymnasium.spaces.Box(-1e12, 1e12, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(1000)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.options = options or {}
        self.level, self.length = self.options.get("level", -1), self.options.get("length", 5)
        self.n_steps = self.total = 0
        self._happens()
        return self._obs(), {"level": self.level}

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        self.total += int(action)
        self._happens()
        is_end = self.n_steps >= self.length
        return self._obs(), float(self.level), is_end, False, {"level": self.level}

    def _obs(self) -> Any:
        return np.array([self.level, self.n_steps, self.total], np.float64)

    def _happens(self) -> None:
        time.sleep(self.options.get("pause", 0))
        for what, do in (("raises", self._raise), ("hangs", lambda: time.sleep(3600)), ("dies", lambda: os._exit(3))):
            if self.options.get(what) == self.n_steps:
                do()

    def _raise(self) -> None:
        raise ValueError("this level does not exist")


class AwaitedLevel:
    """A Level whose methods are coroutines."""

    observation_space, action_space = Level.observation_space, Level.action_space
    spec = None

    def __init__(self) -> None:
        self.env = Level()

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        if (options or {}).get("hangs") == 0:
            await asyncio.sleep(3600)
        return self.env.reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        if self.env.options.get("hangs") == self.env.n_steps + 1:
            await asyncio.sleep(3600)
        return self.env.step(action)


class Words:
    """An environment of texts, without spaces."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.said = list((options or {}).get("said", []))
        return {"said": self.said}, {}

    async def step(self, action: Any) -> Any:
        self.said = [*self.said, action]
        return {"said": self.said}, len(self.said), action == "bye", False, {}


def in_process(**options: Any) -> EnvManager:
    return SimpleEnvManager(Level, 3, seed=1, **options)


def one_each(**options: Any) -> EnvManager:
    return SubprocessEnvManager(Level, 3, seed=1, **options)


def all_in_one(**options: Any) -> EnvManager:
    return SubprocessEnvManager(Level, 3, n_workers=1, seed=1, **options)


def local_and_not(**options: Any) -> EnvManager:
    return SubprocessEnvManager(Level, 3, n_workers=2, local_envs=1, seed=1, **options)


def awaited(**options: Any) -> EnvManager:
    return AsyncioEnvManager(AwaitedLevel, 3, seed=1, **options)


def in_threads(**options: Any) -> EnvManager:
    return AsyncioEnvManager(Level, 3, seed=1, **options)


WAITING = (one_each, all_in_one, awaited)
"""Kinds in which a step of an environment blocks nothing else."""
KINDS = pytest.mark.parametrize("make", [in_process, local_and_not, in_threads, *WAITING])
PROCESSES = pytest.mark.parametrize("make", [one_each, all_in_one])


def run(coroutine: Any) -> Any:
    """What a coroutine returns. It leaves neither a task nor a watched descriptor in its event loop."""
    selector = selectors.DefaultSelector()
    loop = asyncio.SelectorEventLoop(selector)
    complaints: list[Any] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    n_watched = len(selector.get_map())
    try:
        result = loop.run_until_complete(asyncio.wait_for(coroutine, SOON_S))
        assert not asyncio.all_tasks(loop)
        assert len(selector.get_map()) == n_watched
        assert complaints == []
        return result
    finally:
        loop.close()


async def played(pool: Any, level: int, length: int = 5, **more: Any) -> list[Any]:
    """Play one episode with the level as each action. Return its observations."""
    async with pool.begin({"level": level, "length": length, **more}) as episode:
        seen = [episode.obs.tolist()]
        while not episode.is_over:
            obs, reward, terminated, truncated, _ = await episode.step(level)
            assert (reward, terminated, truncated) == (level, episode.is_over, False)
            assert obs is episode.obs
            seen.append(obs.tolist())
    return seen


def rows_of(level: int, length: int = 5) -> list[Any]:
    return [[level, k, k * level] for k in range(length + 1)]


async def all_are_free(pool: Any, n: int = 3) -> None:
    """Hold n episodes at once."""
    together = asyncio.Condition()
    n_begun = 0

    async def hold(k: int) -> None:
        nonlocal n_begun
        async with pool.begin({"level": k}) as episode:
            async with together:
                n_begun += 1
                together.notify_all()
                await together.wait_for(lambda: n_begun == n)
            assert (await episode.step(7))[0].tolist() == [k, 1, 7]

    await asyncio.gather(*(hold(k) for k in range(n)))


@KINDS
def test_many_coroutines_play_an_episode_each_with_the_rows_of_their_task(make: Any) -> None:
    async def test(pool: Any) -> None:
        lengths = [1 + k % 7 for k in range(60)]
        seen = await asyncio.gather(*(played(pool, k, lengths[k]) for k in range(60)))
        assert seen == [rows_of(k, lengths[k]) for k in range(60)]
        await all_are_free(pool)

    with make(infos=True) as manager:
        run(test(manager.pool()))
        assert [result.cut for result in manager.tasks.results[:60]] == [False] * 60
        assert manager.episodes.count == 60


@KINDS
def test_seeds_options_and_infos_are_those_of_the_task_and_the_reset(make: Any) -> None:
    async def test(pool: Any) -> None:
        async with pool.begin(Task(seed=4, options={"level": 8})) as episode:
            assert (episode.obs[0], episode.info, episode.task.seed) == (8, {"level": 8}, 4)
            assert (await episode.step(1))[4] == {"level": 8}
        async with pool.begin() as episode:
            assert episode.obs[0] == 2

    with make(infos=True) as manager:
        run(test(manager.pool(options={"level": 2})))


def test_observations_and_actions_may_be_any_objects() -> None:
    async def test(pool: Any) -> None:
        async with pool.begin({"said": ["hi"]}) as episode:
            assert episode.obs == {"said": ["hi"]}
            assert (await episode.step(["a", "list"]))[0] == {"said": ["hi", ["a", "list"]]}
            assert (await episode.step("bye"))[:3] == ({"said": ["hi", ["a", "list"], "bye"]}, 3.0, True)

    with AsyncioEnvManager(Words, 2) as manager:
        run(test(manager.pool()))


@KINDS
def test_those_that_wait_get_an_environment_in_the_order_of_their_coming(make: Any) -> None:
    async def test(pool: Any) -> None:
        begun: asyncio.Queue[int] = asyncio.Queue()
        may_leave = [asyncio.Event() for _ in range(9)]

        async def agent(k: int) -> None:
            async with pool.begin({"level": k}):
                begun.put_nowait(k)
                await may_leave[k].wait()

        agents = [asyncio.ensure_future(agent(k)) for k in range(9)]
        first = [await begun.get() for _ in range(3)]
        assert sorted(first) == [0, 1, 2]
        assert repr(pool).startswith("<Pool: 3 episodes, 0 environments free")
        for k in range(3, 9):
            may_leave[(k - 3) if k > 5 else first[k - 3]].set()
            assert await begun.get() == k
        for event in may_leave:
            event.set()
        await asyncio.gather(*agents)

    with make() as manager:
        run(test(manager.pool()))


@KINDS
def test_leaving_the_block_in_the_middle_or_by_an_exception_gives_the_environment_back(make: Any) -> None:
    async def leave_in_the_middle(pool: Any, episode: Any) -> None:
        async with episode:
            await episode.step(1)
            raise KeyError(episode)

    async def test(pool: Any) -> None:
        for k in range(10):
            episode = pool.begin({"level": k})
            with pytest.raises(KeyError):
                await leave_in_the_middle(pool, episode)
            assert episode.env_id is None
            with pytest.raises(UsageError, match="outside"):
                await episode.step(1)
        await all_are_free(pool)
        assert await played(pool, 3) == rows_of(3)

    with make() as manager:
        run(test(manager.pool()))


@pytest.mark.parametrize("n_turns", range(8))
@KINDS
def test_a_cancellation_at_any_moment_gives_the_environment_back(make: Any, n_turns: int) -> None:
    async def test(pool: Any) -> None:
        for k in range(10):
            agents = [asyncio.ensure_future(played(pool, level, 50)) for level in range(5)]
            for _ in range(n_turns):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0005 * k)
            for agent in agents:
                agent.cancel()
            ended = await asyncio.gather(*agents, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError | list) for each in ended), ended
        await all_are_free(pool)
        assert await played(pool, 3) == rows_of(3)

    with make() as manager:
        run(test(manager.pool()))


def test_an_episode_begins_while_others_in_its_worker_think_and_another_worker_is_busy() -> None:
    async def test(pool: Any) -> None:
        async with contextlib.AsyncExitStack() as blocks:
            begun = [await pool.begin({"level": k, "hangs": 2}).__aenter__() for k in range(4)]
            thinking, left, busy, _ = sorted(begun, key=lambda episode: episode.env_id)  # two in each worker
            for episode in (thinking, busy):
                blocks.push_async_exit(episode)
            await busy.step(1)
            step = asyncio.ensure_future(busy.step(1))
            await asyncio.sleep(0)
            await left.__aexit__(None, None, None)
            async with pool.begin({"level": 7}) as other:
                assert other.env_id == 1
                assert (await other.step(1))[0].tolist() == [7, 1, 1]
            assert (await thinking.step(4))[0].tolist() == [thinking.obs[0], 1, 4]
            step.cancel()

    with SubprocessEnvManager(Level, 4, n_workers=2, timeouts=Timeouts(close_s=0.5)) as manager:
        run(test(manager.pool()))


@pytest.mark.parametrize("make", [one_each, awaited])
def test_a_cancelled_step_ends_its_episode_and_its_environment_is_free_when_it_has_responded(make: Any) -> None:
    async def test(pool: Any) -> None:
        async with pool.begin({"hangs": 1}) as episode:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(episode.step(1), 0.05)
            with pytest.raises(UsageError, match="cancelled"):
                await episode.step(1)
        await all_are_free(pool)  # by its deadline, after which the worker is replaced

    with make(timeouts=Timeouts(step_s=0.3), restarts=ALWAYS) as manager:
        run(test(manager.pool()))
        assert manager.stats().restarts == 1


@pytest.mark.parametrize("make", [one_each, awaited])
@pytest.mark.parametrize("step", [0, 1])
def test_a_cancelled_step_that_goes_on_is_ended_after_its_grace_and_costs_no_restart(make: Any, step: int) -> None:
    async def test(pool: Any) -> None:
        for _ in range(4):
            async with pool.begin({"hangs": step}) if step else contextlib.nullcontext() as episode:
                coroutine = episode.step(1) if step else played(pool, 1, hangs=step)
                hanging = asyncio.ensure_future(coroutine)
                await asyncio.sleep(0)
                hanging.cancel()
            await all_are_free(pool)

    timeouts = Timeouts(step_s=3600, reset_s=3600, close_s=0.2)
    with make(timeouts=timeouts, restarts=RestartPolicy(max_restarts=0)) as manager:
        run(test(manager.pool(cancel_s=0.1)))
        assert manager.events.count(events.StepCancelled) == 4
        assert not any(map(manager.events.count, (events.Failed, events.Restarted, events.TaskLost)))
        assert manager.tasks.n_lost == 0
        assert [result.cut for result in manager.tasks.results[:1]] == [True]


@pytest.mark.parametrize("make", [one_each, awaited])
def test_a_cancelled_step_that_ends_within_its_grace_keeps_its_worker(make: Any) -> None:
    async def test(pool: Any) -> None:
        step = asyncio.ensure_future(played(pool, 1, pause=0.02))
        await asyncio.sleep(0.01)
        step.cancel()
        await all_are_free(pool)

    with make() as manager:
        run(test(manager.pool(cancel_s=SOON_S)))
        assert manager.stats().restarts == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_a_cancelled_step_costs_no_episode_of_its_neighbours(keeps: bool) -> None:
    async def test(pool: Any) -> None:
        slow = {"hangs": 1} if keeps else {"pause": 0.3}
        async with pool.begin({"level": 7, "length": 20}) as other, pool.begin({"level": 6}) as queued:
            await other.step(1)
            async with pool.begin(slow) as cancelled:
                steps = []
                for each in (cancelled, queued, other):
                    steps.append(asyncio.ensure_future(each.step(1)))
                    await asyncio.sleep(0)
                for step in steps[:2]:
                    step.cancel()
            assert (await steps[2])[0].tolist() == [7, 2, 2]
            await asyncio.gather(*steps, return_exceptions=True)
        await all_are_free(pool)

    restarts = RestartPolicy(keep_episodes=keeps, max_restarts=0)
    with all_in_one(restarts=restarts, timeouts=Timeouts(step_s=3600)) as manager:
        run(test(manager.pool(cancel_s=0.1)))
        assert manager.events.count(events.StepCancelled) == keeps
        assert manager.tasks.n_lost == 0


@pytest.mark.parametrize("make", WAITING)
@pytest.mark.parametrize("step", [0, 2])
def test_a_worker_that_hangs_is_an_episode_lost_by_its_deadline(make: Any, step: int) -> None:
    async def test(pool: Any) -> None:
        with pytest.raises(LostEpisode, match="did not respond within") as raised:
            await played(pool, 9, hangs=step)
        assert isinstance(raised.value.cause, WorkerTimedOut)
        assert raised.value.task.options["level"] == 9
        await all_are_free(pool)

    with make(timeouts=Timeouts(step_s=0.3), restarts=ALWAYS) as manager:
        run(test(manager.pool()))
        assert manager.stats().restarts == 1


def portable(**options: Any) -> EnvManager:
    return SubprocessEnvManager(Level, 3, transport="portable", seed=1, **options)


@pytest.mark.parametrize(
    ("make", "event"), [(one_each, ""), (one_each, "dies"), (portable, ""), (awaited, ""), (in_threads, "")]
)
def test_a_call_while_a_step_is_in_flight_keeps_no_coroutine_waiting(make: Any, event: str) -> None:
    async def test(manager: EnvManager) -> None:
        async with manager.pool().begin({"level": 1, "pause": 0.2, event: 1}) as episode:
            assert episode.env_id == 0
            step = asyncio.ensure_future(episode.step(1))
            for _ in range(5):
                await asyncio.sleep(0)  # the pool looks when it is told to, from now on
            with contextlib.suppress(WorkerDied):
                manager.get_attr("spec", env_ids=[0])  # which reads what the worker has sent before
            with contextlib.suppress(LostEpisode):
                await asyncio.wait_for(step, SOON_S / 3)

    with make(infos=True, restarts=ALWAYS, timeouts=Timeouts(step_s=600)) as manager:
        run(test(manager))


@PROCESSES
@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_worker_that_dies_loses_its_episodes_and_no_others(make: Any, step: int) -> None:
    async def test(pool: Any) -> list[Any]:
        doomed = [played(pool, 9, dies=step), *(played(pool, k, 400) for k in range(2))]
        ended = await asyncio.gather(*doomed, return_exceptions=True)
        await all_are_free(pool)
        return ended

    with make(restarts=ALWAYS) as manager:
        doomed, *others = run(test(manager.pool()))
        assert isinstance(doomed, LostEpisode)
        assert isinstance(doomed.cause, WorkerDied)
        assert manager.stats().restarts == 1
        if make is one_each:
            assert others == [rows_of(k, 400) for k in range(2)]
        else:
            assert {type(each) for each in others} == {LostEpisode}


@KINDS
@pytest.mark.parametrize("step", [0, 1])
def test_an_environment_that_raises_loses_the_episode_and_the_task_is_not_begun_again(make: Any, step: int) -> None:
    async def test(pool: Any) -> None:
        for _ in range(4):
            with pytest.raises(LostEpisode, match="this level does not exist") as raised:
                await played(pool, 9, raises=step)
            assert isinstance(raised.value.cause, EnvRaised)
        await all_are_free(pool)

    with make(restarts=ALWAYS) as manager:
        run(test(manager.pool()))
        assert manager.stats().restarts == 4


@KINDS
def test_recycling_loses_no_episode_of_a_pool(make: Any) -> None:
    async def left(pool: Any, level: int) -> None:
        async with pool.begin({"level": level}) as episode:
            await episode.step(level)

    async def main(pool: Any) -> list[Any]:
        levels = range(40)
        several = (left(pool, level) if level % 5 == 4 else played(pool, level, 1 + level % 7) for level in levels)
        return await asyncio.gather(*several)

    with make(restarts=RestartPolicy(recycle_after_steps=9)) as manager:
        seen = run(main(manager.pool()))

        for level, rows in enumerate(seen):
            assert rows == (None if level % 5 == 4 else rows_of(level, 1 + level % 7))
        assert manager.tasks.n_lost == 0
        assert all(worker.generation for worker in manager.stats().workers)
        run(all_are_free(manager.pool()))  # a worker that was old before the reset takes episodes


@pytest.mark.parametrize("make", [in_process, all_in_one])
def test_a_worker_to_be_recycled_takes_an_episode_for_which_those_that_play_there_wait(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envmanager.kernel.pool, "PATIENCE_S", 0.05)

    async def both(pool: Any) -> None:
        for level in range(4):
            async with pool.begin({"level": level}) as episode:
                await episode.step(0)
                assert await played(pool, level, 2) == rows_of(level, 2)
                assert await played(pool, level, 2) == rows_of(level, 2)

    with make(restarts=RestartPolicy(recycle_after_steps=2)) as manager:
        run(both(manager.pool()))
        assert manager.tasks.n_lost == 0
        assert manager.stats().workers[0].generation >= 3


@KINDS
def test_a_worker_that_is_given_up_leaves_the_pool_and_the_last_error_is_raised(make: Any) -> None:
    async def test(pool: Any, n_workers: int) -> None:
        for _ in range(n_workers):
            with pytest.raises(LostEpisode, match="this level does not exist"):
                await played(pool, 9, raises=1)
        with pytest.raises(EnvRaised, match="this level does not exist"):
            await played(pool, 1)

    with make() as manager:
        run(test(manager.pool(), manager.n_workers))


def test_those_that_wait_get_the_error_of_the_last_worker() -> None:
    async def test(pool: Any) -> list[Any]:
        agents = [played(pool, 9, raises=1) for _ in range(30)]
        return await asyncio.gather(*agents, return_exceptions=True)

    with one_each(restarts=RestartPolicy(max_restarts=1, on_exception="restart", backoff_s=0)) as manager:
        ended = run(test(manager.pool()))
        assert {type(each) for each in ended[:6]} == {LostEpisode}  # each worker was restarted once
        assert type(ended[-1]) is RestartsExhausted
    with one_each(restarts=RestartPolicy(max_restarts=1, on_exception="restart", then="drop")) as manager:
        assert LostEpisode in {type(each) for each in run(test(manager.pool()))}


@KINDS
def test_a_bad_action_is_refused_and_the_episode_goes_on(make: Any) -> None:
    async def test(pool: Any) -> None:
        async def agent(k: int) -> None:
            async with pool.begin({"level": k, "length": 30}) as episode:
                for n in range(1, 30):
                    if n % 3 == 0:
                        with pytest.raises(BadAction):
                            await episode.step(1001 if n % 2 else "left")
                    assert (await episode.step(k))[0].tolist() == [k, n, n * k]

        await asyncio.gather(*map(agent, range(6)))

    with make() as manager:
        run(test(manager.pool()))


@KINDS
def test_an_episode_takes_one_step_at_a_time_and_none_after_its_end(make: Any) -> None:
    async def test(pool: Any) -> None:
        async with pool.begin({"level": 1, "length": 2}) as episode:
            first = asyncio.ensure_future(episode.step(1))
            await asyncio.sleep(0)
            if not first.done():
                with pytest.raises(UsageError, match="awaits another step"):
                    await episode.step(1)
            assert (await first)[0][1] == 1
            await episode.step(1)
            with pytest.raises(UsageError, match="is over"):
                await episode.step(1)
        with pytest.raises(UsageError, match="entered once"):
            await episode.__aenter__()

    with make() as manager:
        run(test(manager.pool()))


@pytest.mark.parametrize("make", WAITING)
@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_closing_the_manager_ends_all_waits(make: Any, is_elsewhere: bool) -> None:
    async def test(manager: EnvManager, pool: Any) -> list[Any]:
        agents = [asyncio.ensure_future(played(pool, k, hangs=1)) for k in range(5)]
        await asyncio.sleep(0.05)
        if is_elsewhere:
            thread = threading.Thread(target=manager.close)
            thread.start()
        else:
            manager.close()
        ended = await asyncio.gather(*agents, return_exceptions=True)
        if is_elsewhere:
            thread.join()
        with pytest.raises(ManagerClosed):
            await played(pool, 1)
        return ended

    with make(timeouts=Timeouts(close_s=0.5)) as manager:
        ended = run(test(manager, manager.pool()))
        assert {type(each) for each in ended} <= {ManagerClosed, LostEpisode}
        assert ManagerClosed in {type(each) for each in ended}


def test_a_death_at_rest_is_found_by_the_next_episode_and_the_pool_serves_one_loop_after_another() -> None:
    async def test(pool: Any) -> list[Any]:
        return await asyncio.gather(*(played(pool, k) for k in range(3)), return_exceptions=True)

    with one_each(restarts=ALWAYS) as manager:
        pool = manager.pool()
        for _ in range(3):
            assert run(test(pool)) == [rows_of(k) for k in range(3)]
            pid = manager.stats().workers[1].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            ended = run(test(pool))
            assert all(each == rows_of(k) or isinstance(each, LostEpisode) for k, each in enumerate(ended))
        run(all_are_free(pool))
        assert manager.stats().restarts == 3


def test_a_pool_serves_one_loop_at_a_time() -> None:
    async def test(pool: Any) -> None:
        async with pool.begin({"level": 1, "hangs": 1}) as episode:
            step = asyncio.ensure_future(episode.step(1))
            await asyncio.sleep(0)
            with pytest.raises(UsageError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, played(pool, 2))
            step.cancel()

    with awaited() as manager:
        run(test(manager.pool()))


def test_a_pool_ends_with_a_reset_of_its_manager() -> None:
    with in_process() as manager:
        pool = manager.pool()
        manager.reset()
        with pytest.raises(UsageError, match="ended with a later reset"):
            run(played(pool, 1))
        assert run(played(manager.pool(), 2)) == rows_of(2)


class Two(ParallelEnv[Any, Any, Any]):
    metadata = {"name": "two"}
    possible_agents = ["a", "b"]

    def observation_space(self, agent: Any) -> Any:
        return Level.observation_space

    action_space = observation_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, np.zeros(3)), {agent: {} for agent in self.agents}


def test_a_pool_takes_environments_of_one_agent_that_are_stepped_one_by_one() -> None:
    with (
        SimpleEnvManager(lambda: gymnasium.make_vec("CartPole-v1", 2, "sync"), 2) as manager,
        pytest.raises(UsageError, match="one by one"),
    ):
        manager.pool()
    with SimpleEnvManager(Two, 2) as manager, pytest.raises(UsageError, match="wrap each in Together"):
        manager.pool()


def test_rollouts_64_at_once_lose_no_more_than_the_sessions_that_end_and_no_environment() -> None:
    n_at_once, n_rollouts = 64, 300

    async def rollout(pool: Any, k: int) -> bool:
        try:
            return await played(pool, k, 5, **({"raises": 1 + k % 4} if k % 100 == 37 else {})) == rows_of(k, 5)
        except LostEpisode:
            return False

    async def test(pool: Any) -> list[bool]:
        ended: list[bool] = []
        for first in range(0, n_rollouts, n_at_once):
            ks = range(first, min(first + n_at_once, n_rollouts))
            ended += await asyncio.gather(*(rollout(pool, k) for k in ks))
        await all_are_free(pool, n_at_once)
        return ended

    with AsyncioEnvManager(AwaitedLevel, n_at_once, seed=1, restarts=ALWAYS) as manager:
        ended = run(test(manager.pool()))
        assert ended == [k % 100 != 37 for k in range(n_rollouts)]
        assert manager.stats().restarts == ended.count(False) == 3


@pytest.mark.parametrize("make", WAITING)
def test_under_deaths_errors_hangs_and_cancellations_each_episode_has_its_own_rows(make: Any) -> None:
    ends = random.Random(7)

    async def agent(pool: Any, k: int) -> str:
        happens = ends.choice([{}, {}, {}, {"raises": 2}, {"raises": 0}, {"hangs": 3}, {"dies": 1}, {"cancel": True}])
        if make is awaited:
            happens.pop("dies", None)
        playing = asyncio.ensure_future(played(pool, k, 1 + k % 9, **happens))
        if "cancel" in happens:
            await asyncio.sleep(ends.random() / 50)
            playing.cancel()
        (ended,) = await asyncio.gather(playing, return_exceptions=True)
        if isinstance(ended, LostEpisode):
            assert ended.task.options["level"] == k
            return "lost"
        if isinstance(ended, asyncio.CancelledError):
            return "cancelled"
        assert ended == rows_of(k, 1 + k % 9)
        return "played"

    async def test(pool: Any) -> list[str]:
        ended = await asyncio.gather(*(agent(pool, k) for k in range(150)))
        await all_are_free(pool)
        return ended

    with make(timeouts=Timeouts(step_s=0.3), restarts=ALWAYS) as manager:
        ended = run(test(manager.pool()))
        assert {"lost", "played"} <= set(ended)
        if make is not all_in_one:  # there, one failure is the loss of all
            assert 0 <= manager.stats().restarts - ended.count("lost") <= ended.count("cancelled")
