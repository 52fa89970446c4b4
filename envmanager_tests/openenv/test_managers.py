"""Managers whose environments are sessions of a real OpenEnv server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-openenv")

from envmanager import (
    AsyncioEnvManager,
    EnvRaised,
    LostEpisode,
    RestartPolicy,
    Timeouts,
    UsageError,
    WorkerTimedOut,
    make_manager,
)
from envmanager.observe.events import ServerBack, ServerGone
from envmanager_tests.openenv.test_sessions import SOON_S, Server, serving

N = 16
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server():
    with serving(N + 1) as server:
        yield server


class Player:
    """A trainer that steps all environments as they come. Each total is the sum of the actions since the reset."""

    def __init__(self, manager):
        self.manager, self.batch = manager, manager.recv()
        self.totals = {}

    def play(self, n_lost):
        """Step until all have taken 20 steps and ``n_lost`` rows were lost. Return the ids of these."""
        lost, taken = [], dict.fromkeys(range(N), 0)
        while len(lost) < n_lost or min(taken.values()) < 20:
            batch = self.batch
            for obs, env_id, is_lost in zip(batch.obs, batch.env_ids.tolist(), batch.lost.tolist(), strict=True):
                if is_lost:
                    lost.append(env_id)
                    self.totals[env_id] = 0
                assert obs["total"] == self.totals.setdefault(env_id, 0)
                self.totals[env_id] += 1
                taken[env_id] += 1
            self.manager.send([{"add": 1}] * len(batch), batch.env_ids)
            self.batch = self.manager.recv()
        return lost


def test_sessions_play_tasks_from_a_config_with_the_rows_of_each(server):
    config = {"kind": "asyncio", "n_envs": N, "env": {"openenv": server.url}}
    with make_manager(config) as manager:
        manager.reset(tasks=[{"goal": 3 + k % 4, "start": 1} for k in range(100)])
        while not manager.tasks.done:
            batch = manager.recv()
            manager.send([{"add": 1}] * len(batch), batch.env_ids)
        results = manager.tasks.results
        assert [result.total for result in results] == [2 + k % 4 for k in range(100)]
        assert {result.attempts for result in results} == {1}


def test_auto_is_refused_since_openenvs_own_server_tells_no_number_of_sessions(server):
    with pytest.raises(UsageError, match="does not say how many sessions it has"):
        AsyncioEnvManager({"openenv": server.url}, n_envs="auto")


def test_a_step_that_hangs_on_the_server_loses_its_episode_alone(server):
    with AsyncioEnvManager({"openenv": server.url}, N, timeouts=Timeouts(step_s=0.5)) as manager:
        manager.reset(options={"goal": 10**6})
        batch = manager.recv("all")
        actions = [{"add": 1, "sleep_s": 1.0 if env_id == 5 else 0.0} for env_id in range(N)]
        manager.send(actions, batch.env_ids)
        batch = manager.recv("all")
        assert np.flatnonzero(batch.lost).tolist() == [5]
        assert [obs["total"] for obs in batch.obs] == [int(env_id != 5) for env_id in range(N)]
        for nth in range(1, 10):
            manager.send([{"add": 1}] * N, batch.env_ids)
            batch = manager.recv("all")
            assert [obs["total"] for obs in batch.obs] == [nth + (env_id != 5) for env_id in range(N)]
        assert manager.stats().restarts == 1


def test_an_error_of_the_environment_is_raised_with_what_the_server_says(server):
    with AsyncioEnvManager({"openenv": server.url}, 2) as manager:
        manager.reset()
        manager.recv("all")
        manager.send([{"add": 1}, {"add": 1, "fails": True}], [0, 1])
        with pytest.raises(EnvRaised, match="the calculator is broken") as raised:
            manager.recv("all")
        assert raised.value.env_ids == (1,)
        assert manager.recv().obs[0]["total"] == 1


@pytest.mark.parametrize("n_sessions", [N, N + 1])
def test_a_server_that_is_killed_and_back_costs_one_episode_each_and_no_restart_of_the_budget(n_sessions):
    once = RestartPolicy(max_restarts=1)
    with serving(n_sessions) as server, AsyncioEnvManager({"openenv": server.url}, N, restarts=once) as manager:
        manager.reset(options={"goal": 10**6})
        player = Player(manager)
        assert player.play(0) == []
        server.kill()
        back = threading.Thread(target=server.start)
        back.start()
        try:
            assert sorted(player.play(N)) == list(range(N))
        finally:
            back.join()
        assert player.play(0) == []
        assert manager.events.count(ServerGone) == manager.events.count(ServerBack) == 1


def test_environments_wait_for_a_server_that_starts_later():
    with serving(2) as server:
        server.kill()
        back = threading.Thread(target=server.start)
        with AsyncioEnvManager({"openenv": server.url}, 2) as manager:
            back.start()
            manager.reset(options={"start": 3})
            assert [obs["total"] for obs in manager.recv("all").obs] == [3, 3]
            back.join()


def test_coroutines_play_over_a_server_that_hangs_is_killed_and_comes_back():
    async def agent(pool, k):
        """Play until an episode was not lost. Return the number of those that were."""
        for n_lost in range(100):
            try:
                async with pool.begin({"start": k, "goal": k + 5}) as episode:
                    assert episode.obs["total"] == k
                    while not episode.is_over:
                        sleep_s = 2.0 if (k, n_lost, episode.obs["total"]) == (7, 0, 9) else 0.01
                        total = episode.obs["total"]
                        obs, *_ = await episode.step({"add": 1, "sleep_s": sleep_s})
                        assert obs["total"] == total + 1
                    return n_lost
            except LostEpisode:
                pass
        raise AssertionError("lost a hundred times")

    async def test(pool, server: Server):
        agents = [asyncio.ensure_future(agent(pool, k)) for k in range(60)]
        while not any(each.done() for each in agents):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        return await asyncio.wait_for(asyncio.gather(*agents), SOON_S)

    with serving(N + 2) as server:
        timeouts = Timeouts(step_s=1.0)
        with AsyncioEnvManager({"openenv": server.url}, N, timeouts=timeouts) as manager:
            lost = asyncio.run(test(manager.pool(), server))
            assert lost[7] >= 1
            assert sum(lost) >= N
            assert manager.stats().restarts >= sum(lost)


def test_the_example_plays_on_500_sessions():
    with serving(501) as server:
        command = [sys.executable, "docs/examples/agents_on_openenv.py", server.url, '{"add": 3}']
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True, cwd=ROOT)
    assert done.stdout.startswith("2000 episodes, mean return 12.0, ")
    assert done.stdout.endswith(" steps/s, 0 lost\n")
    assert done.stderr == ""


def test_a_hang_is_a_lost_episode_with_its_deadline():
    async def test(pool):
        async with pool.begin() as episode:
            began = time.monotonic()
            with pytest.raises(LostEpisode) as raised:
                await episode.step({"add": 1, "sleep_s": 1.0})
            assert isinstance(raised.value.cause, WorkerTimedOut)
            assert time.monotonic() - began < SOON_S
        async with pool.begin() as episode:
            assert (await episode.step({"add": 1}))[0]["total"] == 1

    with serving(2) as server, AsyncioEnvManager({"openenv": server.url}, 1, timeouts=Timeouts(step_s=0.3)) as manager:
        asyncio.run(test(manager.pool()))
