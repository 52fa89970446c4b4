"""Pools whose environments find no room on their server, or are given up."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from envmanager import AsyncioEnvManager, EnvRaised, LostEpisode, RestartPolicy, ServerFull, Timeouts
from envmanager.kernel.pool import Pool
from envmanager.observe.events import PoolShrunk

SUITE = "waiting"


class Server:
    """A server with so many sessions, each taken by an environment until that is closed."""

    def __init__(self, n_sessions: int) -> None:
        self.n_sessions = n_sessions
        self.taken: list[Any] = []
        self.played: list[Any] = []


class Client:
    def __init__(self, server: Server) -> None:
        self.server = server

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0.001)
        if self not in self.server.taken:
            if len(self.server.taken) >= self.server.n_sessions:
                raise ServerFull("all sessions are taken")
            self.server.taken.append(self)
        self.task = options
        return "begun", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0.005)
        if action == "raise":
            raise RuntimeError("tool server said 503")
        self.server.played.append(self.task["n"])
        return "done", 1.0, True, False, {}

    async def close(self) -> None:
        if self in self.server.taken:
            self.server.taken.remove(self)


async def play(pool: Pool, n: int, action: str = "ask") -> Any:
    try:
        async with pool.begin({"n": n}) as episode:
            await episode.step(action)
            return episode.obs
    except LostEpisode as lost:
        return lost.cause


@pytest.mark.parametrize(("n_sessions", "n_envs", "n_episodes"), [(1, 6, 20), (32, 64, 400)])
def test_episodes_of_a_full_server_are_played_by_the_environments_that_have_a_session(
    n_sessions: int, n_envs: int, n_episodes: int
) -> None:
    server = Server(n_sessions)

    async def run(pool: Pool) -> list[Any]:
        return await asyncio.gather(*(play(pool, n) for n in range(n_episodes)))

    with AsyncioEnvManager(lambda: Client(server), n_envs, timeouts=Timeouts(start_s=60)) as manager:
        pool = manager.pool()
        assert asyncio.run(run(pool)) == ["done"] * n_episodes
        assert f"{n_envs - n_sessions} without a session on their server" in repr(pool)
        assert manager.stats().restarts == 0
    assert sorted(server.played) == [*range(n_episodes)]


def test_an_environment_gets_the_session_that_another_client_has_given_back() -> None:
    server = Server(1)
    server.taken.append("another client")

    async def run(pool: Pool) -> Any:
        asyncio.get_running_loop().call_later(0.3, server.taken.clear)
        return await play(pool, 0)

    with AsyncioEnvManager(lambda: Client(server), 2, timeouts=Timeouts(start_s=60)) as manager:
        assert asyncio.run(run(manager.pool())) == "done"


def test_a_server_without_any_room_costs_all_that_wait_their_episodes_after_start_s() -> None:
    async def run(pool: Pool) -> list[Any]:
        return await asyncio.gather(*(play(pool, n) for n in range(50)))

    with AsyncioEnvManager(lambda: Client(Server(0)), 2, timeouts=Timeouts(start_s=0.3)) as manager:
        causes = asyncio.run(run(manager.pool()))
    assert all("ServerFull" in str(cause) for cause in causes)


def test_a_pool_that_loses_an_environment_for_good_says_so_and_in_the_end_why(caplog: pytest.LogCaptureFixture) -> None:
    async def run(pool: Pool) -> None:
        for n in range(2):
            await play(pool, n, "raise")
            assert f"{n + 1} of 2 out" in repr(pool)
        with pytest.raises(EnvRaised, match="tool server said 503"):
            await play(pool, 3)

    with caplog.at_level(logging.WARNING), AsyncioEnvManager(lambda: Client(Server(9)), 2) as manager:
        asyncio.run(run(manager.pool()))
        shrunk = [event for event in manager.events if isinstance(event, PoolShrunk)]
    assert [(event.n_left, event.n_envs) for event in shrunk] == [(1, 2), (0, 2)]
    assert len(caplog.records) == 2


def test_a_pool_whose_environments_are_replaced_has_not_shrunk() -> None:
    async def run(pool: Pool) -> None:
        for n in range(4):
            await play(pool, n, "raise")
        assert await play(pool, 5) == "done"
        assert "out" not in repr(pool)

    restarts = RestartPolicy(max_restarts=100, on_exception="restart", backoff_s=0)
    with AsyncioEnvManager(lambda: Client(Server(9)), 2, restarts=restarts) as manager:
        asyncio.run(run(manager.pool()))
        assert not manager.events.count(PoolShrunk)
