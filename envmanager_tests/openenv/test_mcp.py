"""Servers of MCP as environments: a process for each session, or sessions at a URL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="mcp is not installed: pip install 'envmanager[mcp]'")

from envmanager import AsyncioEnvManager, ConnectionLost, EnvRecipe, LostEpisode, RestartPolicy, UsageError
from envmanager.kernel.pool import Pool
from envmanager.testing.fault_checks import is_gone, until

SERVER = [sys.executable, "-S", str(Path(__file__).with_name("mcp_server.py"))]
ALWAYS = RestartPolicy(max_restarts=10_000, on_exception="restart", backoff_s=0)


def ask(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def said(obs: Any) -> Any:
    return json.loads(obs["content"][0]["text"])


def play(main: Any, n_envs: int = 1, server: Any = SERVER, **env_kwargs: Any) -> Any:
    recipe = EnvRecipe({"mcp": server}, env_kwargs=env_kwargs)
    with AsyncioEnvManager(recipe, n_envs, restarts=ALWAYS) as manager:
        return asyncio.run(main(manager.pool()))


def test_tools_are_actions_and_their_results_observations() -> None:
    async def main(pool: Pool) -> None:
        async with pool.begin() as episode:
            assert {"add", "fail"} <= {tool["name"] for tool in episode.obs["tools"]}
            obs, reward, *ends, _ = await episode.step(ask("add", number=2))
            assert (said(obs), obs["isError"], reward, ends) == (2, False, 0.0, [False, False])
            obs, *_ = await episode.step({"name": "fail"})
            assert (obs["isError"], obs["content"][0]["text"]) == (True, "no page")
        async with pool.begin() as episode:
            assert said((await episode.step(ask("add")))[0]) == 1  # a new session

    play(main)


@pytest.mark.parametrize("reward", ["score", lambda _, result: (float(said(result)), said(result) >= 3)])
def test_the_reward_is_a_tools_or_a_functions(reward: Any) -> None:
    async def main(pool: Pool) -> list[Any]:
        async with pool.begin() as episode:
            return [(await episode.step(ask("add")))[1:3] for _ in range(3)]

    assert play(main, reward=reward) == [(1.0, False), (2.0, False), (3.0, True)]


def test_a_tool_that_begins_episodes_keeps_the_process_and_gets_the_options() -> None:
    async def main(pool: Pool) -> set[int]:
        pids = set()
        for start in range(3):
            async with pool.begin({"start": start}) as episode:
                assert said(episode.obs) == f"begun at {start}"
                assert said((await episode.step(ask("add")))[0]) == start + 1
                pids.add(said((await episode.step(ask("pid")))[0]))
        with pytest.raises(LostEpisode, match="no such level"):
            await pool.begin({"start": -1}).__aenter__()
        return pids

    assert len(play(main, reset="begin")) == 1


def test_a_server_that_dies_loses_its_own_episode_alone_and_no_process_is_left() -> None:
    pids, n_lost = [], 0

    async def agent(pool: Pool, n: int) -> Any:
        nonlocal n_lost
        for attempt in range(3):
            try:
                async with pool.begin({"start": n}) as episode:
                    pids.append(said((await episode.step(ask("pid")))[0]))
                    if n % 5 == 0 and not attempt:
                        await episode.step(ask("die"))
                    return [said((await episode.step(ask("add")))[0]) for _ in range(2)]
            except LostEpisode:
                n_lost += 1
        return None

    async def main(pool: Pool) -> Any:
        return await asyncio.gather(*(agent(pool, n) for n in range(40)))

    assert play(main, 8, reset="begin") == [[n + 1, n + 2] for n in range(40)]
    assert n_lost == 8
    assert all(map(is_gone, pids))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server at a URL, which is killed at the end."""
    command = [sys.executable, str(Path(__file__).with_name("mcp_http_server.py")), str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            until(lambda: is_answering(port))
            yield server
        finally:
            server.kill()


def is_answering(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("reset", ["begin", None])
def test_sessions_at_a_url_do_not_mix(reset: str | None) -> None:
    async def agent(pool: Pool, n: int) -> Any:
        async with pool.begin({"start": 0}) as episode:
            assert {"add", "score"} <= {tool["name"] for tool in episode.obs["tools"]}
            steps = [await episode.step(ask("add", number=n, sleep_s=0.05)) for _ in range(3)]
            obs, *_ = await episode.step({"name": "fail"})
            return [said(step[0]) for step in steps], obs["isError"]

    async def main(pool: Pool) -> Any:
        return await asyncio.gather(*(agent(pool, n) for n in range(12)))

    port = free_port()
    with serving(port):
        played = play(main, 4, f"http://127.0.0.1:{port}/mcp", reset=reset)
    assert played == [([n, 2 * n, 3 * n], True) for n in range(12)]


def test_the_reward_and_the_end_come_from_a_tool_at_a_url() -> None:
    async def main(pool: Pool) -> list[Any]:
        async with pool.begin({"start": 1}) as episode:
            return [(await episode.step(ask("add", number=1)))[1:3] for _ in range(2)]

    port = free_port()
    with serving(port):
        assert play(main, 1, f"http://127.0.0.1:{port}/mcp", reset="begin", reward="score") == [
            (2.0, False),
            (3.0, True),
        ]


@pytest.mark.parametrize("reset", ["begin", None])
@pytest.mark.parametrize("sleep_s", [60.0, 0.0])
def test_a_server_at_a_url_that_is_killed_loses_its_episode_and_the_next_goes_on_with_another(
    reset: str | None, sleep_s: float
) -> None:
    port = free_port()

    async def lost(pool: Pool) -> LostEpisode:
        with serving(port) as server:
            async with pool.begin({"start": 0}) as episode:
                assert said((await episode.step(ask("add", number=1)))[0]) == 1
                if not sleep_s:
                    server.kill()
                    server.wait()
                stepping = asyncio.ensure_future(episode.step(ask("add", number=1, sleep_s=sleep_s)))
                done, _ = await asyncio.wait([stepping], timeout=0.5)
                if not done:
                    server.kill()
                with pytest.raises(LostEpisode) as caught:
                    await stepping
        return caught.value

    async def main(pool: Pool) -> None:
        for _ in range(2):
            assert isinstance((await lost(pool)).cause, ConnectionLost)
        with serving(port):
            async with pool.begin({"start": 0}) as episode:
                assert said((await episode.step(ask("add", number=5)))[0]) == 5

    play(main, 1, f"http://127.0.0.1:{port}/mcp", reset=reset)


def test_a_session_that_a_server_does_not_know_any_more_is_lost() -> None:
    port = free_port()

    async def main(pool: Pool) -> None:
        with serving(port):
            episode = await pool.begin({"start": 0}).__aenter__()
        with serving(port):
            with pytest.raises(LostEpisode) as caught:
                await episode.step(ask("add", number=1))
            assert isinstance(caught.value.cause, ConnectionLost)
            await episode.__aexit__(None, None, None)
            async with pool.begin({"start": 2}) as episode:
                assert said((await episode.step(ask("add", number=1)))[0]) == 3

    play(main, 1, f"http://127.0.0.1:{port}/mcp", reset="begin")


_TRAINER = """
import asyncio, sys
from envmanager import AsyncioEnvManager
async def one(pool):
    async with pool.begin() as episode:
        obs, *_ = await episode.step({"name": "pid"})
        print(obs["content"][0]["text"], flush=True)
        await asyncio.sleep(600)
async def main(pool):
    await asyncio.gather(*(one(pool) for _ in range(3)))
with AsyncioEnvManager({"mcp": sys.argv[1:]}, n_envs=3) as manager:
    asyncio.run(main(manager.pool()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a server ends with its input, if it wants to")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stubborn_servers_do_not_outlive_a_trainer_that_is_killed(number: signal.Signals) -> None:
    command = [sys.executable, "-c", _TRAINER, *SERVER, "--stubborn"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            pids = [int(trainer.stdout.readline()) for _ in range(3)]
        finally:
            os.kill(trainer.pid, number)
    until(lambda: all(map(is_gone, pids)))


@pytest.mark.parametrize("server", ["", [], 7, {"url": 1}])
def test_what_is_no_command_and_no_url_is_refused(server: Any) -> None:
    with pytest.raises(UsageError, match="a command or a URL"):
        AsyncioEnvManager({"mcp": server}, 1)
