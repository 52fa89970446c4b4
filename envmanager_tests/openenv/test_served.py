"""OpenEnv's own client, and ours, beside the server of this library."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-openenv")

import gymnasium
import numpy as np
from openenv.core.generic_client import GenericAction, GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

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


# Tools.

TOOLS = {"mcp": [sys.executable, "-S", str(Path(__file__).with_name("mcp_server.py"))]}


def serving_tools(n_envs, **more):
    return serve_env({"kind": "asyncio", "n_envs": n_envs, "env": TOOLS, **more}, port=0)


def asked(server, method, **params):
    body = json.dumps({"jsonrpc": "2.0", "id": 5, "method": method, "params": params}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/mcp", data=body, timeout=SOON_S) as response:
        answer = json.load(response)
    assert (answer["jsonrpc"], answer["id"]) == ("2.0", 5)
    return answer.get("result") or answer["error"]


def test_openenvs_client_of_tools_calls_those_of_an_mcp_server_and_shares_its_session():
    with serving_tools(2) as server, MCPToolClient(base_url=server.url).sync() as client:
        client.reset()
        assert "add" in [tool.name for tool in client.list_tools()]
        assert [client.call_tool("add", number=n) for n in (1, 2)] == ["1", "3"]
        assert client.state().step_count == 2
        with pytest.raises(RuntimeError, match="no page"):
            client.call_tool("fail")
        client.reset()  # in a new process
        assert client.state().step_count == 0
        assert client.call_tool("add") == "1"


def test_clients_of_tools_do_not_mix_and_leave_room_when_they_go():
    async def play(url, number):
        async with MCPToolClient(base_url=url) as client:
            await client.reset()
            return [await client.call_tool("add", number=number) for _ in range(3)]

    async def test(server):
        for _ in range(2):
            played = await asyncio.gather(*(play(server.url, number) for number in range(1, 5)))
            assert played == [[str(n * number) for n in (1, 2, 3)] for number in range(1, 5)]
        assert server.n_sessions == 0

    with serving_tools(4) as server:
        run(test(server))


def test_a_tool_that_kills_its_server_costs_the_episode_and_another_session_begins_anew():
    with serving_tools(1) as server:
        session_id = asked(server, "openenv/session/create")["session_id"]
        assert asked(server, "tools/call", session_id=session_id, name="add")["data"] == "1"
        lost = asked(server, "tools/call", session_id=session_id, name="die")
        assert lost["code"] == -32603
        assert "has ended" in lost["message"]
        again = asked(server, "tools/call", session_id=session_id, name="add")  # what it has added up is gone
        assert "lost" in again["message"]
        asked(server, "openenv/session/close", session_id=session_id)
        session_id = asked(server, "openenv/session/create")["session_id"]
        assert asked(server, "tools/call", session_id=session_id, name="add")["data"] == "1"


def test_requests_about_tools_that_cannot_be_met_say_why():
    with serving_tools(1) as server:
        session_id = asked(server, "openenv/session/create")["session_id"]
        assert asked(server, "openenv/session/create")["code"] == -32000
        assert asked(server, "tools/call", session_id="another", name="add")["code"] == -32602
        assert asked(server, "tools/call", session_id=session_id)["code"] == -32602
        assert asked(server, "resources/list", session_id=session_id)["code"] == -32601
        assert asked(server, "openenv/session/close", session_id=session_id)["closed"] is True
        assert asked(server, "openenv/session/close", session_id=session_id)["code"] == -32602
        assert "session_id" in asked(server, "openenv/session/create")
    with serving(1) as server:
        session_id = asked(server, "openenv/session/create")["session_id"]
        assert asked(server, "tools/list", session_id=session_id)["message"] == "Environment does not support MCP"


def test_openenvs_actions_call_tools_by_http_and_by_a_websocket():
    with serving_tools(1) as server, GenericEnvClient(base_url=server.url).sync() as client:
        client.reset()
        call = {"type": "call_tool", "tool_name": "add", "arguments": {"number": 4}}
        told = client.step(call).observation
        assert (told["tool_name"], told["result"]["data"], told["error"]) == ("add", "4", None)
        assert client.step({**call, "tool_name": "fail"}).observation["error"]["message"] == "no page"
        assert "add" in [tool["name"] for tool in client.step({"type": "list_tools"}).observation["tools"]]
        assert client.state()["step_count"] == 2
