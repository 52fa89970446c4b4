"""Sessions of OpenEnv beside a server that does what a server should not.

``envmanager_tests/openenv`` has what a real one does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import sys
from contextlib import asynccontextmanager

import numpy as np
import pytest

pytest.importorskip("websockets", reason="websockets is not installed")
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from envmanager import EnvContext, EnvRecipe, MissingExtra, ServerFull, UsageError
from envmanager.adapters.factories import call_factory, resolve
from envmanager.adapters.openenv import OpenEnvError
from envmanager.data.specs import SpecMismatch

SUITE = "core openenv"

SOON_S = 30.0


class Server:
    """A server whose sessions answer by ``answer(session, message)``: a text, or None for no answer."""

    def __init__(self, answer):
        self.answer = answer
        self.sessions = []
        """The messages of each session, in the order in which they were opened."""
        self.ended = 0
        self.changed = asyncio.Condition()

    async def serve(self, connection):
        received = []
        self.sessions.append(received)
        try:
            async for text in connection:
                message = json.loads(text)
                received.append(message)
                if message["type"] == "close":
                    break
                answer = self.answer(self, message)
                answer = await answer if asyncio.iscoroutine(answer) else answer
                if answer is not None:
                    await connection.send(answer)
        except ConnectionClosed:
            pass
        finally:
            async with self.changed:
                self.ended += 1
                self.changed.notify_all()

    async def has_ended(self, n):
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: self.ended >= n), SOON_S)


@asynccontextmanager
async def serving(answer, **options):
    server = Server(answer)
    async with serve(server.serve, "127.0.0.1", 0, **options) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        server.url = f"ws://127.0.0.1:{server.port}"
        server.listening = listening
        yield server


def observation(obs, reward=None, done=False, **more):
    return json.dumps({"type": "observation", "data": {"observation": obs, "reward": reward, "done": done, **more}})


def echo(server, message):
    """The message itself as the observation, and the number of the session."""
    return observation({"got": message["data"], "session": len(server.sessions)})


def error(code, said="no", **more):
    return json.dumps({"type": "error", "data": {"code": code, "message": said, **more}})


def session_of(factory, env_id=0, **arguments):
    return call_factory(
        resolve(EnvRecipe(factory, env_kwargs=arguments) if arguments else factory), EnvContext(env_id, 0)
    )


def run(test):
    asyncio.run(asyncio.wait_for(test(), SOON_S))


def test_options_and_seed_of_an_episode_go_into_the_data_of_its_reset():
    async def test():
        async with serving(echo) as server:
            env = session_of({"openenv": server.url})
            obs, info = await env.reset(seed=3, options={"task": "add", "n": np.int64(2)})
            assert (obs["got"], info) == ({"seed": 3, "task": "add", "n": 2}, {})
            assert (await env.reset(seed=None, options=None))[0]["got"] == {}
            assert (await env.reset(seed=3, options={"seed": 5}))[0]["got"] == {"seed": 5}
            await env.close()
            assert [len(messages) for messages in server.sessions] == [
                4,
                1,
            ]  # the other one asked whether there is room

    run(test)


def test_a_step_has_reward_end_and_metadata_and_no_reward_is_zero():
    def answer(_, message):
        if message["type"] == "reset":
            return observation("first", metadata={"level": 1})
        return observation("next", reward=message["data"]["reward"], done=message["data"]["reward"] is not None)

    async def test():
        async with serving(answer) as server:
            env = session_of({"openenv": server.url})
            assert await env.reset() == ("first", {"level": 1})
            assert await env.step({"reward": None}) == ("next", 0.0, False, False, {})
            assert await env.step({"reward": True}) == ("next", 1.0, True, False, {})
            await env.close()

    run(test)


@pytest.mark.parametrize("comes", ["before the next request", "beside it"])
def test_a_second_answer_ends_the_session_before_a_third_step(comes):
    async def test():
        async def answer(server, message):
            if message["data"].get("n") != 1:
                return observation(message["data"])
            await server.connection.send(observation(message["data"]))
            if comes == "before the next request":
                return observation(message["data"])
            server.late = observation(message["data"])
            return None

        async def with_connection(server, connection):
            vars(server).setdefault("connection", connection)
            await Server.serve(server, connection)

        server = Server(answer)
        async with serve(lambda connection: with_connection(server, connection), "127.0.0.1", 0) as listening:
            env = session_of({"openenv": f"ws://127.0.0.1:{listening.sockets[0].getsockname()[1]}"})
            await env.reset()
            assert (await env.step({"n": 1}))[0] == {"n": 1}
            if comes == "beside it":
                await server.connection.send(server.late)
            await asyncio.sleep(0.05)
            with pytest.raises(ConnectionError, match="an answer to no request"):
                await env.step({"n": 2})
            with pytest.raises(ConnectionError, match="an answer came to no request"):
                await env.step({"n": 3})
            await env.close()

    run(test)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reward": float("nan")}, "reward should be finite, but is nan"),
        ({"reward": "0.5"}, "reward should be a real number, but is str '0.5'"),
        ({"done": "false"}, "done should be a bool, but is str 'false'"),
        ({"done": 2}, "done should be a bool, but is int 2"),
    ],
)
def test_a_reward_that_is_no_number_and_an_end_that_is_no_bool_are_refused(given, expected):
    async def test():
        async with serving(lambda *_: observation("next", **{"reward": 1.0, "done": False, **given})) as server:
            env = session_of({"openenv": server.url})
            with pytest.raises(SpecMismatch, match=expected):
                await env.reset()
            await env.close()

    run(test)


def test_functions_turn_actions_into_json_and_answers_into_results():
    def decode(data):
        return data["observation"]["got"].get("text", "begun"), 7.0, False, True, {"all": data}

    async def test():
        async with serving(echo) as server:
            arguments = {"encode": lambda action: {"text": action}, "decode": decode}
            env = session_of({"openenv": server.url}, **arguments)
            assert (await env.reset())[0] == "begun"
            assert (await env.step("hello"))[:4] == ("hello", 7.0, False, True)
            await env.close()

    run(test)


def test_an_action_without_a_form_in_json_is_refused_before_anything_is_sent():
    async def test():
        async with serving(echo) as server:
            env = session_of({"openenv": server.url})
            await env.reset()
            for action in ("go", {"value": object()}):
                with pytest.raises(TypeError, match=r"action|JSON"):
                    await env.step(action)
            assert (await env.step({"array": np.arange(3)}))[0]["got"] == {"array": [0, 1, 2]}
            await env.close()

    run(test)


def test_a_cancelled_step_ends_its_session_and_its_late_answer_is_never_read():
    async def test():
        go_on, is_asked = asyncio.Event(), asyncio.Event()

        async def answer(server, message):
            if message["type"] == "step":
                is_asked.set()
                await go_on.wait()
            return echo(server, message)

        async with serving(answer) as server:
            env = session_of({"openenv": server.url})
            await env.reset()
            step = asyncio.ensure_future(env.step({"n": 1}))
            await is_asked.wait()
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            go_on.set()
            await server.has_ended(2)  # with the question whether there is room
            for call in (env.reset(), env.step({"n": 2})):
                with pytest.raises(ConnectionError, match="cancelled"):
                    await call
            assert len(server.sessions) == 2
            await env.close()

    run(test)


@pytest.mark.parametrize("during", ["reset", "step"])
def test_a_server_that_dies_is_a_connection_error_and_no_other_session_takes_its_place(during):
    async def test():
        async def answer(server, message):
            if message["type"] == during and (during == "step" or message["data"]):
                for connection in list(server.listening.connections):
                    connection.transport.abort()
                return None
            return echo(server, message)

        async with serving(answer) as server:
            env = session_of({"openenv": server.url})
            await env.reset()
            with pytest.raises(ConnectionError, match=f"ended before {during} was answered"):
                await (env.step({}) if during == "step" else env.reset(options={"again": 1}))
            for call in (env.step({}), env.reset()):
                with pytest.raises(ConnectionError, match="there is no session"):
                    await call
            await env.close()
            assert len(server.sessions) == 2

    run(test)


def test_a_first_reset_that_fails_may_be_tried_again_until_there_is_a_server():
    async def test():
        async with serving(echo) as server:
            url, port = server.url, server.port
        env = session_of({"openenv": url})
        for _ in range(3):
            with pytest.raises(ConnectionError, match="there is no connection to the OpenEnv server ws://127"):
                await env.reset()
        tried = []

        async def answer(server, message):
            tried.append(message)
            if len(tried) == 1:
                for connection in list(listening.connections):
                    await connection.close()
            return echo(server, message)

        server = Server(answer)
        async with serve(server.serve, "127.0.0.1", port) as listening:
            with pytest.raises(ConnectionError, match="ended before reset was answered"):
                await env.reset()
            assert (await env.reset(seed=1))[0]["got"] == {"seed": 1}
            await env.close()

    run(test)


def test_a_full_server_is_told_from_one_that_is_gone():
    async def test():
        async def refuse(connection):
            await connection.send(error("CAPACITY_REACHED", active_sessions=4, max_sessions=4))

        async with serve(refuse, "127.0.0.1", 0) as listening:
            env = session_of({"openenv": f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"})
            for _ in range(2):
                with pytest.raises(ServerFull, match="4 of 4 are taken") as raised:
                    await env.reset()
            await env.close()
        assert isinstance(raised.value, ConnectionError)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)

    run(test)


@pytest.mark.parametrize("n_slots", [2, 3])
def test_a_server_without_a_session_to_spare_is_warned_of(n_slots, caplog):
    async def test():
        server = Server(echo)

        async def limited(connection):
            if len(server.sessions) - server.ended >= n_slots:
                await connection.send(error("CAPACITY_REACHED", active_sessions=n_slots, max_sessions=n_slots))
            else:
                await server.serve(connection)

        async with serve(limited, "127.0.0.1", 0) as listening:
            factory = resolve({"openenv": f"ws://127.0.0.1:{listening.sockets[0].getsockname()[1]}"})
            envs = [call_factory(factory, EnvContext(env_id, env_id)) for env_id in range(2)]
            for env in envs:
                await env.reset()
            for env in envs:
                await env.reset()
                await env.close()

    with caplog.at_level(logging.WARNING, logger="envmanager"):
        run(test)
    assert [record.args for record in caplog.records if "to spare for" in record.msg][1:] == []
    assert ("to spare for 2" in caplog.text) == (n_slots == 2)


def test_an_error_of_the_environment_leaves_the_session_and_its_pairs_as_they_are():
    def answer(server, message):
        if message["data"].get("fails"):
            return error("EXECUTION_ERROR", "the browser has crashed")
        if message["data"].get("unknown"):
            return error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["unknown"], "msg": "Extra inputs"}])
        return echo(server, message)

    async def test():
        async with serving(answer) as server:
            env = session_of({"openenv": server.url})
            await env.reset()
            with pytest.raises(OpenEnvError, match="EXECUTION_ERROR: the browser has crashed") as raised:
                await env.step({"fails": True})
            assert pickle.loads(pickle.dumps(raised.value)).code == "EXECUTION_ERROR"
            with pytest.raises(OpenEnvError, match="unknown: Extra inputs"):
                await env.step({"unknown": True})
            assert (await env.step({"n": 4}))[0] == {"got": {"n": 4}, "session": 2}
            await env.close()

    run(test)


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR"])
def test_an_environment_that_the_server_cannot_make_is_an_error_and_no_wait(code):
    async def test():
        async with serving(lambda *_: error(code, "no module named chess")) as server:
            env = session_of({"openenv": server.url})
            with pytest.raises(OpenEnvError, match="no module named chess") as raised:
                await env.reset()
            assert not isinstance(raised.value, ConnectionError)
            await env.close()

    run(test)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '"observation"',
        '{"type": "observation"}',
        '{"type": "state", "data": {}}',
        b"\xff\x00",
        '{"type": "observation", "data": []}',
    ],
)
def test_what_the_protocol_does_not_allow_ends_the_session(text):
    async def test():
        async with serving(
            lambda server, message: echo(server, message) if message["type"] == "reset" else text
        ) as server:
            env = session_of({"openenv": server.url})
            await env.reset()
            with pytest.raises(OpenEnvError, match="answered step by what is no observation"):
                await env.step({})
            with pytest.raises(ConnectionError, match="the protocol does not allow"):
                await env.step({})
            await env.close()

    run(test)


def test_an_address_where_there_is_no_such_server_is_an_error_and_a_server_that_starts_a_wait():
    async def test():
        for status, kind in ((404, OpenEnvError), (403, OpenEnvError), (503, ConnectionError)):

            def respond(connection, request, status=status):
                return connection.respond(status, "no")

            async with serving(echo, process_request=respond) as server:
                env = session_of({"openenv": server.url})
                with pytest.raises(kind, match=str(status)):
                    await env.reset()
                await env.close()

    run(test)


def test_headers_go_with_the_request_and_no_password_is_in_a_message():
    async def test():
        async with serving(echo) as server:
            seen = []
            server.answer = lambda server, message: seen.extend(server.listening.connections) or echo(server, message)
            env = session_of({"openenv": server.url}, headers={"Authorization": "Bearer abc"})
            await env.reset()
            assert next(iter(seen)).request.headers["Authorization"] == "Bearer abc"
            await env.close()
            env = session_of({"openenv": f"ws://me:secret@127.0.0.1:{server.port}"})
            await env.reset()
            await env.close()
            with pytest.raises(ConnectionError, match="it was closed") as raised:
                await env.step({})
            assert "secret" not in str(raised.value)

    run(test)


def test_closing_waits_until_the_server_has_ended_its_session():
    async def test():
        async with serving(echo) as server:
            env = session_of({"openenv": server.url})
            await env.reset()
            await env.close()
            await env.close()
            assert server.ended == len(server.sessions) == 2

    run(test)


def test_a_server_that_leaves_pings_unanswered_is_gone():
    async def test():
        def answer(server, message):
            for connection in server.listening.connections:
                connection.transport.pause_reading()
            return echo(server, message)

        async with serving(answer) as server:
            server.answer = echo
            env = session_of({"openenv": server.url}, ping_s=0.2)
            await env.reset()
            server.answer = answer
            await env.step({})
            with pytest.raises(ConnectionError, match="ended before step was answered"):
                await env.step({})
            await env.close()
            for connection in server.listening.connections:
                connection.transport.abort()

    run(test)


def test_environments_are_spread_over_the_addresses():
    async def test():
        async with serving(echo) as first, serving(echo) as second:
            factory = resolve({"openenv": [first.url, f"{second.url}/ws"]})
            for env_id in range(4):
                env = call_factory(factory, EnvContext(env_id, env_id))
                await env.reset(seed=env_id)
                await env.close()
            for server, seeds in ((first, [0, 2]), (second, [1, 3])):
                asked = [
                    message["data"]
                    for messages in server.sessions
                    for message in messages
                    if message["type"] == "reset"
                ]
                assert asked == [{"seed": seed} for seed in seeds]

    run(test)


@pytest.mark.parametrize(
    "address",
    ["localhost:8000", "", 7, [], ["ws://a", "b"], {"url": "ws://a"}, "ftp://a", "ws://", "ws://a:b", "ws://a:99999"],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UsageError, match="address"):
        resolve({"openenv": address})


def test_without_websockets_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'envmanager\[openenv\]'"):
        resolve({"openenv": "ws://localhost:1"})
