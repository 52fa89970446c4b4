"""Sessions of a real OpenEnv server, which the tests start on this machine."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("openenv", reason="OpenEnv is not installed: make test-openenv")

from envmanager import EnvContext, EnvRecipe, ServerFull
from envmanager.adapters.factories import call_factory, resolve
from envmanager.adapters.openenv import OpenEnvError

SOON_S = 60.0


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A server in a process of its own, which can be killed and started again at the same port."""

    def __init__(self, n_sessions):
        self.n_sessions, self.port = n_sessions, free_port()
        self.start()

    def start(self):
        command = [sys.executable, "-m", "envmanager_tests.openenv.server", str(self.port), str(self.n_sessions)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "listens\n"

    def kill(self):
        self.process.kill()
        self.process.communicate()

    @property
    def url(self):
        return f"ws://127.0.0.1:{self.port}"


@contextmanager
def serving(n_sessions):
    server = Server(n_sessions)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server():
    with serving(8) as server:
        yield server


def session_of(url, **arguments):
    return call_factory(resolve(EnvRecipe({"openenv": url}, env_kwargs=arguments)), EnvContext(0, 0))


def run(test):
    asyncio.run(asyncio.wait_for(test(), SOON_S))


def test_an_episode_begins_with_its_options_and_seed_and_ends_when_the_server_says_so(server):
    async def test():
        env = session_of(server.url)
        obs, info = await env.reset(seed=3, options={"goal": 5, "start": 1})
        assert obs == {"total": 1, "begun_with": {"goal": 5, "start": 1, "seed": 3}, "metadata": {}}
        assert info == {}
        obs, *rest = await env.step({"add": 2})
        assert (obs["total"], rest) == (3, [2.0, False, False, {}])
        obs, *rest = await env.step({"add": 2})
        assert (obs["total"], rest) == (5, [2.0, True, False, {}])
        assert (await env.reset())[0]["begun_with"] == {"seed": None}
        await env.close()

    run(test)


def test_typed_actions_and_results_come_from_functions(server):
    from envmanager_tests.openenv.server import Sum, Total

    def decode(data):
        return Total(**data["observation"]), data["reward"], data["done"], False, {}

    async def test():
        env = session_of(server.url, decode=decode)
        await env.reset()
        obs, *rest = await env.step(Sum(add=10))
        assert (obs.total, rest) == (10, [10.0, True, False, {}])
        await env.close()

    run(test)


def test_errors_of_the_environment_and_of_actions_leave_the_session_usable(server):
    async def test():
        env = session_of(server.url)
        await env.reset()
        with pytest.raises(OpenEnvError, match="the calculator is broken") as raised:
            await env.step({"add": 1, "fails": True})
        assert raised.value.code == "EXECUTION_ERROR"
        with pytest.raises(OpenEnvError, match=r"VALIDATION_ERROR.*subtract"):
            await env.step({"subtract": 1})
        assert (await env.step({"add": 4}))[0]["total"] == 4
        with pytest.raises(OpenEnvError, match="this level does not exist"):
            await env.reset(options={"fails": True})
        assert (await env.reset(options={"start": 2}))[0]["total"] == 2
        await env.close()

    run(test)


def test_a_cancelled_step_ends_its_session_and_the_next_one_has_answers_of_its_own(server):
    async def test():
        env = session_of(server.url)
        await env.reset(options={"start": 1})
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.step({"add": 1, "sleep_s": 0.5}), 0.1)
        with pytest.raises(ConnectionError, match="cancelled"):
            await env.step({"add": 1})
        await env.close()
        env = session_of(server.url)
        assert (await env.reset(options={"start": 5}))[0]["total"] == 5
        assert (await env.step({"add": 1, "sleep_s": 0.6}))[0]["total"] == 6
        await env.close()

    run(test)


def test_a_full_server_says_so_and_a_session_that_was_closed_has_made_room(caplog):
    async def test():
        with serving(2) as server:
            factory = resolve({"openenv": server.url})
            envs = [call_factory(factory, EnvContext(env_id, env_id)) for env_id in range(3)]
            for env in envs[:2]:
                await env.reset()
            for _ in range(2):
                with pytest.raises(ServerFull, match="2 of 2 are taken"):
                    await envs[2].reset()
            for nth in range(20):  # at once, since close() returns when the server has ended its session
                await envs[nth % 3].close()
                envs[nth % 3] = call_factory(factory, EnvContext(nth % 3, nth % 3))
                await envs[(nth + 2) % 3].reset(seed=nth)
            for env in envs:
                await env.close()

    run(test)


@pytest.mark.parametrize("n_sessions", [2, 3])
def test_a_server_with_as_many_sessions_as_environments_is_warned_of(n_sessions, caplog):
    async def test():
        with serving(n_sessions) as server:
            factory = resolve({"openenv": server.url})
            envs = [call_factory(factory, EnvContext(env_id, env_id)) for env_id in range(2)]
            for env in envs:
                await env.reset()
            for env in envs:
                await env.close()

    with caplog.at_level(logging.WARNING, logger="envmanager"):
        run(test)
    assert ("max_concurrent_envs" in caplog.text) == (n_sessions == 2)


def test_a_server_that_is_killed_ends_its_sessions_and_another_at_its_port_begins_new_ones():
    async def test():
        with serving(4) as server:
            env = session_of(server.url)
            await env.reset(options={"start": 3})
            step = asyncio.ensure_future(env.step({"add": 1, "sleep_s": 60}))
            await asyncio.sleep(0)
            server.kill()
            with pytest.raises(ConnectionError, match="ended before step was answered"):
                await step
            new = session_of(server.url)
            with pytest.raises(ConnectionError, match="no connection"):
                await new.reset()
            server.start()
            assert (await new.reset())[0]["total"] == 0
            with pytest.raises(ConnectionError, match="there is no session"):
                await env.step({"add": 1})
            await env.close()
            await new.close()

    run(test)
