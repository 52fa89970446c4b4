"""OpenEnv's own client, and ours, beside the server of this library."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-openenv")

import gymnasium
import numpy as np
from openenv.core.generic_client import GenericAction, GenericEnvClient

from envmanager import AsyncioEnvManager, LostEpisode, RestartPolicy
from envmanager.interop.openenv import serve_env

SOON_S = 60.0


class Told(gymnasium.Env):
    """An environment whose observation is its process and the last action."""

    observation_space = gymnasium.spaces.Dict(
        {"pid": gymnasium.spaces.Discrete(2**30), "said": gymnasium.spaces.Discrete(100)}
    )
    action_space = gymnasium.spaces.Dict({"say": gymnasium.spaces.Discrete(100)})

    def reset(self, *, seed=None, options=None):
        self.n = (options or {}).get("start", 0)
        return {"pid": os.getpid(), "said": 0}, {}

    def step(self, action):
        if action["say"] == 99:
            raise RuntimeError("it does not say that")
        self.n += 1
        return {"pid": os.getpid(), "said": action["say"]}, np.float64(0.5), self.n == 3, False, {}


def serving(n_envs, kind="subprocess", env: Any = Told):
    return serve_env({"kind": kind, "n_envs": n_envs, "restarts": {"backoff_s": 0}}, env, port=0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SOON_S))


def test_openenvs_client_plays_episodes_and_reads_the_state():
    with serving(1) as server, GenericEnvClient(base_url=server.url.replace("ws:", "http:")).sync() as client:
        for start in (0, 1):
            begun = client.reset(seed=1, start=start)
            assert (begun.observation["said"], begun.reward, begun.done) == (0, None, False)
            for n in range(1, 4 - start):
                result = client.step(GenericAction(say=7))
                assert (result.observation["said"], result.reward, result.done) == (7, 0.5, n == 3 - start)
            assert client.state()["step_count"] == 3 - start


def test_openenvs_client_goes_on_after_errors_of_all_kinds():
    with serving(1) as server, GenericEnvClient(base_url=server.url).sync() as client:
        pids = {client.reset().observation["pid"]}
        with pytest.raises(RuntimeError, match=r"\(code: VALIDATION_ERROR\)"):
            client.step({"say": 100})
        with pytest.raises(RuntimeError, match=r"it does not say that.*\(code: EXECUTION_ERROR\)"):
            client.step({"say": 99})
        pid = client.reset().observation["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"died.*\(code: SESSION_ERROR\)"):
            client.step({"say": 1})
        assert client.reset().observation["pid"] not in {*pids, pid}
        assert client.step({"say": 1}).observation["said"] == 1


def test_sessions_of_openenvs_client_do_not_mix_and_one_too_many_is_refused():
    async def play(client, say):
        await client.reset()
        return [(await client.step({"say": say})).observation["said"] for _ in range(3)]

    async def test(server):
        clients = [GenericEnvClient(base_url=server.url) for _ in range(8)]
        for client in clients:
            await client.connect()
        assert await asyncio.gather(*map(play, clients, range(8))) == [[say] * 3 for say in range(8)]
        late = GenericEnvClient(base_url=server.url)
        with pytest.raises(RuntimeError, match=r"\(code: CAPACITY_REACHED\)"):
            await late.reset()
        for client in (*clients, late):
            await client.close()

    with serving(8, kind="simple") as server:
        run(test(server))


def test_a_pool_on_our_server_loses_what_plays_in_a_process_that_is_killed_and_goes_on():
    async def play(pool, say):
        async with pool.begin({"start": 0}) as episode:
            pid = episode.obs["pid"]
            if say == 0:
                os.kill(pid, signal.SIGKILL)
            for _ in range(3):
                obs, *_ = await episode.step({"say": say})
            return obs["said"]

    async def test(pool):
        played = await asyncio.gather(*(play(pool, say) for say in range(4)), return_exceptions=True)
        assert isinstance(played[0], LostEpisode)
        assert played[1:] == [1, 2, 3]
        assert await asyncio.gather(*(play(pool, say) for say in range(1, 5))) == [1, 2, 3, 4]

    restarts = RestartPolicy(on_exception="restart", backoff_s=0)
    with serving(5) as server, AsyncioEnvManager({"openenv": server.url}, n_envs=4, restarts=restarts) as manager:
        run(test(manager.pool()))
