"""Who may come in, and who is left outside."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envmanager.godot.frames import Kind, dump_json, pack
from envmanager.godot.lobby import Arrival, Lobby
from envmanager.hosts import descriptors


@pytest.fixture
def lobby() -> Iterator[Lobby]:
    made = Lobby()
    yield made
    made.close()


def connect(lobby: Lobby) -> socket.socket:
    host, _, port = lobby.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def hello(token: str, major: int = 1) -> bytes:
    message = {"protocol": [major, 0], "token": token, "engine": "4.6", "addon": "1.0", "ticks_per_second": 60}
    return pack(Kind.HELLO, 0, dump_json(message))


def arrives(lobby: Lobby, within_s: float = 10.0) -> Arrival:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        descriptors.wait_for([lobby.fd], deadline - time.monotonic())
        arrival = lobby.look()
        if arrival is not None:
            return arrival
    raise AssertionError("nobody arrived")


def test_who_knows_the_token_gets_in(lobby: Lobby) -> None:
    with connect(lobby) as engine:
        engine.sendall(hello(lobby.token))
        arrival = arrives(lobby)
        assert arrival.hello.token == lobby.token
        os.write(arrival.fd, b"welcome")
        assert engine.recv(7) == b"welcome"
        descriptors.close(arrival.fd)


def test_where_a_game_of_the_editor_is_awaited_any_hello_gets_in_and_nothing_else() -> None:
    lobby = Lobby("127.0.0.1:0")
    with connect(lobby) as stranger, connect(lobby) as game:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        game.sendall(hello(""))
        arrival = arrives(lobby)
        with socket.socket(fileno=os.dup(arrival.fd)) as ours:
            assert game.getsockname() == ours.getpeername()
        descriptors.close(arrival.fd)
    lobby.close()


@pytest.mark.parametrize(
    "says",
    [
        lambda _: b"GET / HTTP/1.1\r\n\r\n",
        lambda _: hello("0" * 32),
        lambda lobby: pack(Kind.SPECS, 0, b"{}") + hello(lobby.token),
        lambda _: b"",
    ],
    ids=["http", "wrong token", "another frame", "nothing"],
)
def test_a_stranger_is_left_outside_and_the_engine_comes_after_him(
    lobby: Lobby, says: Callable[[Lobby], bytes]
) -> None:
    with connect(lobby) as stranger, connect(lobby) as engine:
        stranger.sendall(says(lobby))
        engine.sendall(hello(lobby.token))
        arrival = arrives(lobby)
        with socket.socket(fileno=os.dup(arrival.fd)) as ours:
            assert engine.getsockname() == ours.getpeername()
        descriptors.close(arrival.fd)


def test_a_hello_in_many_pieces_is_a_hello(lobby: Lobby) -> None:
    with connect(lobby) as engine:
        whole = hello(lobby.token)

        def trickle() -> None:
            for byte in whole:
                engine.sendall(bytes([byte]))

        thread = threading.Thread(target=trickle)
        thread.start()
        descriptors.close(arrives(lobby).fd)
        thread.join()


def test_a_crowd_of_silent_strangers_keeps_nobody_out(lobby: Lobby) -> None:
    strangers = []
    try:
        for _ in range(40):
            strangers.append(connect(lobby))
            lobby.look()
        with connect(lobby) as engine:
            engine.sendall(hello(lobby.token))
            descriptors.close(arrives(lobby).fd)
    finally:
        for stranger in strangers:
            stranger.close()


def test_after_its_end_nobody_can_connect(lobby: Lobby) -> None:
    host, _, port = lobby.address.rpartition(":")
    lobby.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=10)
    lobby.close()


def test_what_an_engine_writes_wakes_a_wait_once(lobby: Lobby, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as log:
        lobby.watch_writes(log.fileno())
        assert not descriptors.wait_for([lobby.fd], 0.0)
        for _ in range(2):
            log.write(b"a line\n")
            assert descriptors.wait_for([lobby.fd], 10.0)
            assert lobby.look() is None
            assert not descriptors.wait_for([lobby.fd], 0.0)
