"""The server by OpenEnv's protocol, asked by WebSockets and HTTP without OpenEnv."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("websockets", reason="needs websockets")

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from envmanager import AsyncioEnvManager, SimpleEnvManager, make_manager
from envmanager.adapters.factories import call_factory, resolve
from envmanager.cli.plan import Plan
from envmanager.environment import EnvContext
from envmanager.errors import ConfigError, UsageError
from envmanager.interop.openenv import EnvServer, serve_env
from envmanager.testing.fault_checks import is_gone, until
from envmanager_tests.godot.fake_engine_manager import FakeEngineManager

TIMEOUT_S = 60.0


class Counter:
    """An environment of three steps whose actions may ask for faults. It waits, as one of a server does."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.n = 0
        if options == {"fails": True}:
            raise ValueError("there is no such level")
        return {"n": 0, "seed": seed, "options": options}, {}

    async def step(self, action: Any) -> Any:
        if action == "raise":
            raise RuntimeError("the calculator is broken")
        if action == "wait":
            await asyncio.sleep(TIMEOUT_S)
        self.n += 1
        return self.n, np.float32(0.5), self.n == 3, False, {"seen": np.arange(2), "odd": {1, 2}} if self.n == 2 else {}


class Fields(gymnasium.Env):  # type: ignore[misc]
    """An environment of fields. Its actions may end its process."""

    observation_space = gymnasium.spaces.Dict(
        {"pid": gymnasium.spaces.Discrete(2**30), "at": gymnasium.spaces.Box(-1, 1, (2,), np.float32)}
    )
    action_space = gymnasium.spaces.Dict({"dies": gymnasium.spaces.Discrete(2)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"pid": os.getpid(), "at": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        if action["dies"]:
            os._exit(3)
        return {"pid": os.getpid(), "at": np.ones(2, np.float32)}, 1.0, False, True, {}


@contextmanager
def serving(env: Any = Counter, n_envs: int = 1, kind: str = "asyncio", **arguments: Any) -> Iterator[EnvServer]:
    with serve_env({"kind": kind, "n_envs": n_envs, "restarts": {"backoff_s": 0}}, env, port=0, **arguments) as server:
        yield server


class Client:
    """A session, a context manager."""

    def __init__(self, server: EnvServer) -> None:
        self._connecting = connect(f"{server.url}/ws", proxy=None)

    async def __aenter__(self) -> Client:
        self.connection = await self._connecting
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close()

    async def ask(self, kind: str, data: Any = None) -> Any:
        await self.connection.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        return await self.answer()

    async def answer(self) -> Any:
        return json.loads(await self.connection.recv())["data"]

    async def step(self, action: Any) -> Any:
        return await self.ask("step", {"value": action})


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


def get(server: EnvServer, path: str, token: str = "", **headers: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.port}{path}"
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_session_plays_episodes_one_after_the_other():
    async def test(server):
        async with Client(server) as client:
            begun = await client.ask("reset", {"seed": 7, "episode_id": "mine", "level": 2})
            obs = {"n": 0, "seed": 7, "options": {"level": 2}}
            assert begun == {"observation": obs, "reward": None, "done": False}
            assert await client.step("go") == {"observation": {"value": 1}, "reward": 0.5, "done": False}
            assert (await client.step("go"))["metadata"] == {"seen": [0, 1], "odd": "{1, 2}"}
            assert await client.ask("state") == {"episode_id": "mine", "step_count": 2}
            assert (await client.step("go"))["done"] is True
            assert (await client.step("go"))["code"] == "EXECUTION_ERROR"
            assert (await client.ask("reset"))["observation"]["options"] is None
            assert (await client.ask("state"))["step_count"] == 0

    with serving() as server:
        run(test(server))


def test_a_bad_message_is_refused_with_a_code_and_the_episode_goes_on():
    async def test(server):
        async with Client(server) as client:
            assert (await client.step(1))["code"] == "EXECUTION_ERROR"
            pid = (await client.ask("reset"))["observation"]["pid"]
            for message, code in (
                ("{", "INVALID_JSON"),
                ("[" * 100_000, "INVALID_JSON"),
                ("[]", "UNKNOWN_TYPE"),
                ('{"type": "mcp"}', "UNKNOWN_TYPE"),
                ('{"type": "step", "data": 1}', "VALIDATION_ERROR"),
                ('{"type": "step", "data": {"dies": 7}}', "VALIDATION_ERROR"),
                ('{"type": "step", "data": {"lives": 0}}', "VALIDATION_ERROR"),
                ('{"type": "step", "data": {"dies": NaN}}', "VALIDATION_ERROR"),
                ('{"type": "step", "data": {"dies": {}}}', "VALIDATION_ERROR"),
            ):
                await client.connection.send(message)
                assert (await client.answer())["code"] == code, message[:100]
            end = await client.ask("step", {"dies": 0, "metadata": {}})
            assert end["observation"] == {"pid": pid, "at": [1.0, 1.0]}
            assert (end["done"], end["truncated"]) == (True, True)
            assert (await client.ask("reset", {"seed": -1}))["code"] == "VALIDATION_ERROR"

    with serving(Fields, kind="simple") as server:
        run(test(server))


def test_what_an_environment_raises_ends_its_episode_and_the_next_reset_begins_another():
    async def test(server):
        async with Client(server) as client, Client(server) as other:
            for each in (client, other):
                await each.ask("reset")
            raised = await client.step("raise")
            assert raised["code"] == "EXECUTION_ERROR"
            assert "the calculator is broken" in raised["message"]
            assert (await client.step("go"))["code"] == "EXECUTION_ERROR"
            assert "no such level" in (await client.ask("reset", {"fails": True}))["message"]
            assert (await client.ask("reset"))["observation"]["n"] == 0
            assert (await other.step("go"))["observation"] == {"value": 1}

    with serving(n_envs=2) as server:
        run(test(server))


def test_a_process_that_dies_ends_only_the_episodes_in_it():
    async def test(server):
        async with Client(server) as client, Client(server) as other:
            pids = [(await each.ask("reset"))["observation"]["pid"] for each in (client, other)]
            died = await client.ask("step", {"dies": 1})
            assert (died["code"], "died" in died["message"]) == ("SESSION_ERROR", True)
            assert (await other.ask("step", {"dies": 0}))["observation"]["pid"] == pids[1]
            assert (await client.ask("reset"))["observation"]["pid"] not in pids

    with serving(Fields, n_envs=2, kind="subprocess") as server:
        run(test(server))


def test_a_full_server_refuses_a_session_until_another_has_ended():
    async def test(server):
        async with Client(server) as client:
            await client.ask("reset")
            async with Client(server) as refused:
                full = await refused.answer()
                assert (full["code"], full["active_sessions"], full["max_sessions"]) == ("CAPACITY_REACHED", 1, 1)
                with pytest.raises(ConnectionClosed):
                    await refused.answer()
            await client.connection.send('{"type": "close"}')
            await client.connection.wait_closed()
            async with Client(server) as third:
                assert (await third.ask("reset"))["observation"]["n"] == 0

    with serving() as server:
        run(test(server))
        assert server.n_refused == 1


def test_a_client_that_goes_amid_a_step_makes_room():
    async def test(server):
        async with Client(server) as client:
            await client.ask("reset")
            await client.connection.send('{"type": "step", "data": {"value": "wait"}}')
            client.connection.transport.abort()
        while server.n_sessions:
            await asyncio.sleep(0)

    with serving() as server:
        run(test(server))


def test_health_schema_and_metrics_are_read_by_http():
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    with serving(Fields, n_envs=2, kind="simple") as server:
        status, health = get(server, "/health")
        assert (status, json.loads(health)["status"]) == (200, "healthy")
        schema = json.loads(get(server, "/schema")[1])
        assert schema["action"]["properties"]["dies"]["maximum"] == 1
        assert schema["observation"]["properties"]["at"]["items"]["minimum"] == -1
        assert "envmanager_sessions_max 2.0" in get(server, "/metrics")[1]
        assert get(server, "/nothing")[0] == 404


def post(server: EnvServer, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    text = body if isinstance(body, str) else json.dumps(body)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    with closing(connection):
        connection.request("POST", path, text, headers)
        answer = connection.getresponse()
        said = answer.read().decode()
        return answer.status, json.loads(said) if said.startswith("{") else said


def test_a_post_begins_or_steps_an_environment_of_its_own_and_leaves_it_to_the_next():
    with serving() as server:
        for seed in range(3):
            obs = {"n": 0, "seed": seed, "options": {"level": 2}}
            status, begun = post(server, "/reset", {"seed": seed, "episode_id": "mine", "level": 2})
            assert (status, begun) == (200, {"observation": obs, "reward": None, "done": False})
        assert post(server, "/reset", "")[1]["observation"]["seed"] is None
        for _ in range(4):
            stepped = {"observation": {"value": 1}, "reward": 0.5, "done": False}
            assert post(server, "/step", {"action": {"value": "go"}, "timeout_s": 3.0}) == (200, stepped)
        assert json.loads(get(server, "/state")[1]) == {"episode_id": None, "step_count": 0}
        assert server.n_sessions == 0


def test_a_post_that_fails_has_a_status_and_a_detail_and_the_next_one_goes_on():
    with serving() as server:
        for path, body, status, detail in (
            ("/reset", "{", 422, "Invalid JSON"),
            ("/reset", [], 422, "no mapping"),
            ("/reset", {"seed": -1}, 422, "seed"),
            ("/reset", {"fails": True}, 500, "no such level"),
            ("/step", {"value": "go"}, 422, "no mapping"),
            ("/step", {"action": {"value": "raise"}}, 500, "the calculator is broken"),
        ):
            refused, said = post(server, path, body)
            assert (refused, detail in said["detail"]) == (status, True), said
            assert post(server, "/step", {"action": {"value": "go"}})[0] == 200
        assert post(server, "/ws", {})[0] == get(server, "/reset")[0] == get(server, "/mcp")[0] == 404
        status, said = post(server, "/mcp", {})
        assert (status, said["error"]["code"]) == (200, -32600)


def test_posts_have_no_room_while_all_sessions_are_open_and_need_the_token():
    async def test(server):
        async with Client(server) as client:
            await client.ask("reset")
            status, said = await asyncio.to_thread(post, server, "/secret/reset", {})
            assert (status, "at capacity: 1/1" in said["detail"]) == (503, True)

    with serving(token="secret") as server:
        assert post(server, "/reset", {})[0] == 401
        assert post(server, "/reset", {}, Authorization="Bearer secret")[0] == 200
        assert post(server, "/secret/step", {"action": {"value": "go"}}, Origin="http://127.0.0.1")[0] == 403
        run(test(server))


def test_a_post_comes_in_parts_and_one_that_is_left_makes_room():
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        body = json.dumps({"level": "x" * 200_000}).encode()
        head = b"POST /reset HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-LENGTH: %d\r\n\r\n" % len(body)
        for part in (head[:3], head[3:50], head[50:] + body[:9], body[9:]):
            client.sendall(part)
        with client.makefile("rb") as answer:
            assert b" 200 " in answer.readline()
            assert b"x" * 200_000 in answer.read()
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            step = b'{"action": {"value": "wait"}}'
            leaving.sendall(b"POST /step HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(step) + step)
            until(lambda: server.n_sessions == 1)
        until(lambda: server.n_sessions == 0)
        assert post(server, "/step", {"action": {"value": "go"}})[0] == 200


def test_closing_answers_a_post_that_waits_at_once():
    with ThreadPoolExecutor() as threads:
        with serving() as server:
            posted = threads.submit(post, server, "/step", {"action": {"value": "wait"}})
            until(lambda: server.n_sessions == 1)
        assert posted.result(TIMEOUT_S)[0] == 503


def test_with_auto_there_are_as_many_environments_as_the_servers_have_sessions():
    with serving(n_envs=2, token="secret") as small, serving(n_envs=3) as large:
        with AsyncioEnvManager({"openenv": small.url}, n_envs="auto") as manager:
            assert manager.n_envs == 2
            manager.reset()
        config = {"kind": "asyncio", "env": {"openenv": [small.url, large.url]}, "n_envs": "auto"}
        with make_manager(config) as manager:
            assert manager.n_envs == 4  # two on each
            manager.reset()
        bare = f"ws://127.0.0.1:{small.port}"
        config = {"env": {"openenv": bare}, "env_kwargs": {"headers": {"Authorization": "Bearer secret"}}}
        assert Plan.parse({**config, "n_envs": "auto"}, {}).manager.n_envs == 2
        with pytest.raises(UsageError, match=r"n_envs.*401"):
            AsyncioEnvManager({"openenv": bare}, n_envs="auto")
    with pytest.raises(UsageError, match="Start it first, or give a number"):
        AsyncioEnvManager({"openenv": bare}, n_envs="auto")


@pytest.mark.parametrize("config", [{"env": "CartPole-v1"}, {"env": {"mcp": "python server.py"}}, {}])
def test_auto_is_refused_for_environments_that_have_no_sessions(config):
    with pytest.raises(ConfigError, match="n_envs"):
        make_manager({"kind": "asyncio", "n_envs": "auto", **config})


def test_the_command_refuses_auto_for_an_environment_without_sessions():
    command = [sys.executable, "-m", "envmanager", "run", "--env", "CartPole-v1", "--n-envs", "auto"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (refused.returncode, "openenv" in refused.stderr) == (2, True)


def test_other_names_and_web_pages_are_refused():
    with serving(kind="asyncio", names=["Trainer.example"]) as server:
        assert get(server, "/health", Host="evil.example")[0] == 403
        assert get(server, "/health", Host="trainer.example:80")[0] == 200
        assert get(server, "/health", Origin=f"http://127.0.0.1:{server.port}")[0] == 403

        async def test():
            with pytest.raises(InvalidStatus, match="403"):
                await connect(f"{server.url}/ws", proxy=None, origin="http://evil.example")

        run(test())


def test_a_token_is_needed_where_there_is_one_in_the_address_or_a_header():
    async def test(server):
        async with Client(server) as client:  # server.url has it
            await client.ask("reset")
        for path in ("/ws", "/wrong/ws"):
            with pytest.raises(InvalidStatus, match="401"):
                await connect(f"ws://127.0.0.1:{server.port}{path}", proxy=None)

    with serving(token="a/b") as server:
        run(test(server))
        assert get(server, "/health")[0] == 401
        assert get(server, "/health", Authorization="Bearer a/b")[0] == 200
        assert get(server, "/a%2Fb/health")[0] == 200
        assert "a/b" not in repr(server)


def test_other_machines_need_a_token():
    with serving(host="0.0.0.0") as server:
        assert server.token
        assert server.url.endswith(f"/{server.token}")
        assert get(server, "/health")[0] == 401


def test_our_own_client_reads_truncations_and_infos():
    async def test(server):
        env = call_factory(resolve({"openenv": server.url}), EnvContext(0, 0))
        obs, _ = await env.reset(seed=1)
        assert obs == {"pid": os.getpid(), "at": [0.0, 0.0]}
        _, reward, terminated, truncated, _ = await env.step({"dies": 0})
        assert (reward, terminated, truncated) == (1.0, False, True)
        await env.close()

    with serving(Fields, n_envs=2, kind="simple") as server:
        run(test(server))


def test_one_client_plays_all_agents_of_a_parallel_environment():
    pytest.importorskip("pettingzoo", reason="needs PettingZoo")

    async def test(server):
        async with Client(server) as client:
            assert (await client.ask("reset"))["observation"] == {"red": [0.0], "blue": [0.0]}
            moved = await client.ask("step", {"red": 1, "blue": 0})
            assert (moved["reward"], moved["metadata"]["rewards"]) == (1.0, {"red": 1.0, "blue": 0.0})
            assert (moved["observation"], moved["done"]) == ({"blue": [0.0]}, False)
            last = await client.ask("step", {"blue": 1})
            assert (last["reward"], last["done"], last["truncated"]) == (1.0, True, True)
            await client.ask("reset")
            assert (await client.ask("step", {"blue": 1}))["code"] == "EXECUTION_ERROR"

    with serve_env({"kind": "simple", "env": f"{__name__}:pair"}, port=0) as server:
        run(test(server))


def pair() -> Any:
    """Two agents, of which red leaves after a step and blue is cut off after two."""
    import pettingzoo

    class Pair(pettingzoo.ParallelEnv):  # type: ignore[misc]
        possible_agents = ("red", "blue")

        def observation_space(self, agent):
            return gymnasium.spaces.Box(0, 1, (1,), np.float32)

        def action_space(self, agent):
            return gymnasium.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.agents = ["red", "blue"]
            return {agent: np.zeros(1, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

        def step(self, actions):
            obs = {agent: np.full(1, action, np.float32) for agent, action in actions.items()}
            rewards = {agent: float(action) for agent, action in actions.items()}
            ended = {agent: agent == "red" for agent in actions}
            cut = dict.fromkeys(actions, "red" not in actions)
            for agent in actions:
                if ended[agent] or cut[agent]:
                    self.agents.remove(agent)
            return obs, rewards, ended, cut, {agent: {} for agent in actions}

    return Pair()


def test_engines_of_one_arena_are_served_and_begin_again_amid_an_episode():
    async def test(server):
        async with Client(server) as client, Client(server) as other:
            first = [
                (await each.ask("reset", {"seed": seed}))["observation"] for seed, each in enumerate((client, other))
            ]
            assert (await client.step(1))["reward"] == 1.0
            assert (await client.ask("reset", {"seed": 1}))["observation"] == first[1] != first[0]
            assert (await other.step(1))["reward"] == 1.0

    with EnvServer(FakeEngineManager("CartPole-v1", 2), port=0) as server:
        run(test(server))
    with FakeEngineManager("CartPole-v1", 2, n_workers=1) as manager, pytest.raises(UsageError, match="one arena"):
        manager.pool()


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing():
    with serving(kind="simple", env=Fields) as server:
        with pytest.raises(UsageError, match="cannot listen"), serve_env({}, Fields, port=server.port):
            pass
        with pytest.raises(UsageError, match="token"):
            serve_env({"kind": "simple"}, Fields, port=0, token="ü")


def test_closing_the_manager_ends_the_server():
    with SimpleEnvManager(Fields, n_envs=1) as manager:
        server = EnvServer(manager, port=0)
        manager.close()
        server.wait()
        server.close()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_workers_of_the_command_end_with_it(signum):
    command = [sys.executable, "-m", "envmanager", "serve-env", f"{__name__}:Fields", "--port", "0", "--sessions", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]

        async def pids():
            async with connect(f"{address}/ws", proxy=None) as first, connect(f"{address}/ws", proxy=None) as second:
                for each in (first, second):
                    await each.send('{"type": "reset"}')
                return [json.loads(await each.recv())["data"]["observation"]["pid"] for each in (first, second)]

        workers = run(pids())
        process.send_signal(signum)
        process.wait(TIMEOUT_S)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    until(lambda: all(map(is_gone, workers)))
