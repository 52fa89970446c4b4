"""A small trainer's end for tests: starts one fake engine, and asks it one thing at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from envmanager.data.steps import AgentSteps
from envmanager.godot.codec import StepsDecoder, encode_step
from envmanager.godot.frames import Frame, FrameReader, Kind, pack
from envmanager.godot.messages import (
    EngineSpecs,
    Hello,
    call_body,
    configure_body,
    read_hello,
    read_specs,
    read_values,
    reset_body,
)
from envmanager.godot.options import EngineOptions, GodotOptions

PATIENCE_S = 120
"""A busy machine starts a program late; nothing waits for so long when all is well."""


class HungUp(Exception):
    """The engine has closed the connection."""


class EngineClient:
    """One engine process, and the connection to it once it has said hello with the right token."""

    def __init__(self, arenas: int = 2, *, infos: bool = False) -> None:
        self.arenas = arenas
        self.infos = infos
        self.token = secrets.token_hex(16)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        self.connections: list[socket.socket] = []
        """All that came, the engine's last."""
        self.n_busy = 0
        self.is_midway = False
        """Whether half a frame is here."""
        self.notes: list[bytes] = []
        self.late: list[int] = []
        """Tickets of answers to what was not asked last."""
        self.hello: Hello
        self.specs: EngineSpecs
        self.decoder: StepsDecoder
        self.process: subprocess.Popen[bytes]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with all else)
        self._ticket = 0
        self._reader = FrameReader()

    def launch(self, source: str, environ: Mapping[str, str]) -> None:
        """Start the program."""
        host, port = self.listener.getsockname()
        own = {"ENVMANAGER_ADDRESS": f"{host}:{port}", "ENVMANAGER_TOKEN": self.token}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "envmanager_tests.godot.fake_engine", source],
            env={**os.environ, **own, **environ},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def accept(self, *, hello_s: float = PATIENCE_S) -> Hello:
        """Wait for somebody to connect and be the engine; BadFrame, ValueError or TimeoutError says why it is not."""
        connection, _ = self.listener.accept()
        connection.settimeout(hello_s)
        self.connections.append(connection)
        self._reader = FrameReader(frozenset({Kind.HELLO}))
        self.hello = read_hello(self.frame().body)
        if self.hello.token != self.token:
            raise ValueError("wrong token")
        self._reader = FrameReader()
        connection.settimeout(PATIENCE_S)
        return self.hello

    def configure(self, *, seed: int = 0) -> EngineSpecs:
        """Have it make its arenas."""
        options = GodotOptions(engine=EngineOptions(ticks_per_action=1, shown=0), infos=self.infos)
        body = configure_body(options, arenas=self.arenas, seed=seed, may_spin=False)
        self.specs = read_specs(self.ask(Kind.CONFIGURE, body).body)
        self.decoder = StepsDecoder(self.specs, range(self.arenas), infos=self.infos)
        return self.specs

    def reset(self, seeds: Sequence[int | None] | None = None, options: Any = None) -> dict[str, AgentSteps]:
        """The first observations."""
        answer = self.ask(Kind.RESET, reset_body(seeds or [None] * self.arenas, options))
        return self.decoder.decode(answer.body, after_reset=True).steps

    def step(self, actions: Mapping[str, Any]) -> dict[str, AgentSteps]:
        """The steps that these actions lead to."""
        answer = self.ask(Kind.STEP, encode_step(self.specs, actions, self.decoder.acting))
        return self.decoder.decode(answer.body).steps

    def call(self, what: Any, name: str | None, *args: Any, arenas: Sequence[int] | None = None, **kwargs: Any) -> Any:
        """The values, one per arena."""
        chosen = list(range(self.arenas)) if arenas is None else arenas
        return read_values(self.ask(Kind.CALL, call_body(what, name, chosen, args, kwargs)).body, len(chosen))

    def ask(self, kind: Kind, body: bytes = b"") -> Frame:
        """The answer to a request: of that ticket, and no busy frame."""
        self.send(kind, body)
        while True:
            frame = self.frame()
            if frame.kind is Kind.NOTE:
                self.notes.append(bytes(frame.body))
            elif frame.ticket != self._ticket:
                self.late.append(frame.ticket)
            elif frame.kind is Kind.BUSY:
                self.n_busy += 1
            elif frame.kind is Kind.ERROR:
                raise Told(json.loads(bytes(frame.body)))
            else:
                return frame

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """A request, for whose answer nobody waits yet."""
        self._ticket += 1
        self.connections[-1].sendall(pack(kind, self._ticket, body))

    def frame(self) -> Frame:
        """The next frame; HungUp, BadFrame or TimeoutError when there is none."""
        while (frame := self._reader.next()) is None:
            n_bytes = self.connections[-1].recv_into(self._reader.space())
            if not n_bytes:
                raise HungUp
            self._reader.received(n_bytes)
            self.is_midway = True
        self.is_midway = False
        return frame

    def has_more_within(self, seconds: float) -> bool:
        """Whether the engine says anything more in this time, be it that it hangs up."""
        return bool(select.select([self.connections[-1]], [], [], seconds)[0])

    def exit_code(self) -> int:
        """That of the program, once it has ended."""
        return self.process.wait(PATIENCE_S)

    def output(self) -> str:
        """What the program has written so far."""
        return os.pread(self._output.fileno(), 1 << 20, 0).decode()  # the program writes at the same offset

    def close(self) -> None:
        """Give back everything."""
        for connection in (*self.connections, self.listener):
            connection.close()
        if hasattr(self, "process"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)
        self._output.close()


class Told(Exception):
    """The engine's error; ``args[0]`` is what the frame says."""

    @property
    def said(self) -> dict[str, Any]:
        """The object in the frame."""
        said: dict[str, Any] = self.args[0]
        return said


@contextlib.contextmanager
def engine(
    source: Any,
    folder: Path,
    *,
    arenas: int = 2,
    infos: bool = False,
    mode: str = "",
    once: Path | None = None,
    pause_s: float = 0.0,
    context: Mapping[str, Any] | None = None,
) -> Iterator[EngineClient]:
    """An engine that hosts ``source``: a text, or a factory that is pickled into ``folder``."""
    client = EngineClient(arenas, infos=infos)
    try:
        environ = {"ENVMANAGER_FAKE_MODE": mode, "ENVMANAGER_FAKE_PAUSE_S": str(pause_s)}
        if once is not None:
            environ["ENVMANAGER_FAKE_ONCE"] = str(once)
        if context is not None:
            environ["ENVMANAGER_FAKE_CONTEXT"] = json.dumps(context)
        if not isinstance(source, str):
            path = folder / "hosted.pickle"
            path.write_bytes(cloudpickle.dumps(source))
            source = str(path)
        client.launch(source, environ)
        yield client
    finally:
        client.close()
