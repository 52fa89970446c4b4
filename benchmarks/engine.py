"""One Godot engine driven by hand: the minimum for a trainer written in Python, with this library's addon.

There is no manager, no worker and no epoll. BareEngine measures engine and socket, Codec these and the codec.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from benchmarks.contender import Contender, random_pushes
from benchmarks.games import TICKS, find_engine
from envmanager.godot.codec import StepsDecoder, encode_step
from envmanager.godot.engine_host import engines_may_spin, trainer_spin_ns
from envmanager.godot.engine_link import ADDRESS, TOKEN
from envmanager.godot.frames import HEADER, FrameReader, Kind, pack
from envmanager.godot.games import command_for, find_game
from envmanager.godot.lobby import Lobby
from envmanager.godot.messages import configure_body, read_specs, reset_body
from envmanager.godot.options import EngineOptions, GodotOptions
from envmanager.hosts import descriptors
from envmanager.hosts.spin import Spinner

START_S = 60.0
END_S = 5.0
FRAME_PER_SECOND = 1
"""Frames of the main loop per simulated second. One is fastest: that frame runs all ticks of the second."""


class Engine:
    """An engine with ``n_envs`` arenas, configured and reset. ``first``: the body of its response to the reset."""

    def __init__(self, env: str, n_envs: int) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="envmanager-bench-"))
        options = EngineOptions(binary=find_engine(), fixed_fps=FRAME_PER_SECOND, ticks_per_action=TICKS[env], shown=0)
        command = command_for(find_game("demo:rolling_ball", options, self._scratch), options)
        lobby = Lobby()
        environ = {**os.environ, ADDRESS: lobby.address, TOKEN: lobby.token}
        with open(self._scratch / "log.txt", "wb") as log:
            self._process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        os.sched_setaffinity(self._process.pid, {min(os.sched_getaffinity(0))})  # as the manager does
        self.socket = _arrival(lobby)
        self._poll = select.poll()
        self._poll.register(self.socket, select.POLLIN)
        self._spinner = Spinner(trainer_spin_ns(1))
        lobby.close()
        may_spin = engines_may_spin(1)
        configuration = configure_body(GodotOptions(engine=options), arenas=n_envs, seed=0, may_spin=may_spin)
        self.specs = read_specs(self.ask(Kind.CONFIGURE, configuration))
        self.first = self.ask(Kind.RESET, reset_body([None] * n_envs, {}))

    def ask(self, kind: Kind, body: bytes) -> bytes:
        """Send a request and return the body of the response."""
        self.socket.sendall(pack(kind, 1, body))
        return self.read()

    def await_bytes(self) -> None:
        """Wait for bytes in the same way as the manager, which spins first."""
        if not self._spinner.spin(self._has_bytes):
            self._poll.poll()
            self._spinner.slept()

    def _has_bytes(self) -> bool:
        return bool(self._poll.poll(0))

    def read(self) -> bytes:
        """Return the body of the next frame."""
        self.await_bytes()
        length, *_ = HEADER.unpack(self.socket.recv(HEADER.size, socket.MSG_WAITALL))
        return self.socket.recv(length, socket.MSG_WAITALL)

    def close(self) -> None:
        """Close the connection, so that the engine exits; kill the engine if it does not."""
        self.socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _arrival(lobby: Lobby) -> socket.socket:
    """Wait for the engine to connect, and return the connection."""
    while (arrival := lobby.look()) is None:
        if not select.select([lobby.fd], [], [], START_S)[0]:
            raise TimeoutError(f"no engine has connected within {START_S:g} s")
    descriptors.forget(arrival.fd)
    connection = socket.socket(fileno=arrival.fd)
    connection.setblocking(True)
    return connection


class BareEngine(Contender):
    """An upper limit for all trainers: requests are encoded beforehand, and responses are read and discarded."""

    def __init__(self, env: str, n_envs: int) -> None:
        self._n_envs = n_envs
        self._engine = Engine(env, n_envs)
        decoder = StepsDecoder(self._engine.specs, range(n_envs))
        decoder.decode(self._engine.first, after_reset=True)
        bodies = (encode_step(self._engine.specs, {"default": own}, decoder.acting) for own in random_pushes(n_envs))
        self._frames = cycle([pack(Kind.STEP, 1, body) for body in bodies])

    def run(self, n_calls: int) -> int:
        send, read = self._engine.socket.sendall, self._engine.read
        for frame in islice(self._frames, n_calls):
            send(frame)
            read()
        return n_calls * self._n_envs

    def close(self) -> None:
        self._engine.close()


class Codec(Contender):
    """Connection and codec: actions are encoded to frames, and frames are decoded to AgentSteps, with all checks."""

    def __init__(self, env: str, n_envs: int) -> None:
        self._n_envs = n_envs
        self._engine = Engine(env, n_envs)
        self._decoder = StepsDecoder(self._engine.specs, range(n_envs))
        self._decoder.decode(self._engine.first, after_reset=True)
        self._reader = FrameReader(frozenset({Kind.STEPS, Kind.ERROR}))
        self._actions: Iterator[np.ndarray] = cycle(list(random_pushes(n_envs)))

    def run(self, n_calls: int) -> int:
        specs, decoder, connection, n_steps = self._engine.specs, self._decoder, self._engine.socket, 0
        for actions in islice(self._actions, n_calls):
            body = encode_step(specs, {"default": actions}, decoder.acting)
            connection.sendall(pack(Kind.STEP, 1, body))
            n_steps += len(decoder.decode(self._read()).steps["default"])
        return n_steps

    def _read(self) -> memoryview:
        reader, connection = self._reader, self._engine.socket
        while (frame := reader.next()) is None:
            self._engine.await_bytes()
            reader.received(connection.recv_into(reader.space()))
        return frame.body

    def close(self) -> None:
        self._engine.close()
