"""A small trainer for one engine, in plain blocking Python: the addon's tests need no other code of this package.

The rule: it shares nothing with the package's own trainer side, so a mistake there cannot hide the same one here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HELLO, SPECS, STEPS, VALUE, ERROR, BUSY, NOTE = 1, 2, 3, 4, 5, 6, 7
CONFIGURE, RESET, STEP, CALL, CLOSE = 65, 66, 67, 68, 69
SAME, SOME_ENDED, ALL_ACT = 1, 2, 4
TERMINATED, TRUNCATED, ACTING = 1, 2, 4
ANSWER_S = 60.0
END_S = 10.0

MISSING = {
    4: "no Godot 4 here: `tools/get_godot4.sh DIR` fetches one, then set ENVMANAGER_GODOT4 to it",
    3: "no Godot 3 here: `apt-get install godot3-server` brings one",
}


def find_engine(major: int) -> str | None:
    """The program of an engine of this major version, or None."""
    named = os.environ.get(f"ENVMANAGER_GODOT{major}")
    if named:
        return named
    for name in {4: ("godot4", "godot"), 3: ("godot3-server", "godot3")}[major]:
        found = shutil.which(name)
        if found:
            return found
    return None


class EngineError(Exception):
    """An error frame: what the engine answers instead."""

    def __init__(self, frame: dict[str, Any]) -> None:
        super().__init__(frame["message"])
        self.frame = frame


class EngineGone(Exception):
    """The connection ended."""


@dataclass
class Rows:
    """The rows of one behavior in one steps frame; ``final`` has one row for each that ended."""

    arena: np.ndarray
    k: np.ndarray
    obs: list[np.ndarray]
    reward: np.ndarray
    bits: np.ndarray
    final: list[np.ndarray]
    was_same: bool

    @property
    def terminated(self) -> np.ndarray:
        return (self.bits & TERMINATED) != 0

    @property
    def truncated(self) -> np.ndarray:
        return (self.bits & TRUNCATED) != 0

    @property
    def acting(self) -> np.ndarray:
        return (self.bits & ACTING) != 0

    def bytes(self) -> bytes:
        """All of it, to compare runs bit for bit."""
        arrays = [self.arena, self.k, *self.obs, self.reward, self.bits, *self.final]
        return b"".join(array.tobytes() for array in arrays)


@dataclass
class Steps:
    """One steps frame."""

    rows: dict[str, Rows]
    busy_us: int
    infos: dict[str, Any]

    def __getitem__(self, behavior: str) -> Rows:
        return self.rows[behavior]

    def bytes(self) -> bytes:
        return b"".join(name.encode() + rows.bytes() for name, rows in sorted(self.rows.items()))


@dataclass
class _Cut:
    """A body that is read from front to back."""

    body: bytes
    at: int = 0

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        array = np.frombuffer(self.body, dtype, count, self.at)
        size = array.nbytes
        self.at += size + -size % 4
        return array


@dataclass
class _Behavior:
    name: str
    observations: list[tuple[tuple[int, ...], str]]
    last: Rows | None = None
    agents: tuple[np.ndarray, np.ndarray] = field(default_factory=lambda: (np.zeros(0, np.uint32),) * 2)


class Engine:
    """An engine with a game, started, greeted and configured."""

    def __init__(
        self,
        program: str,
        project: Path,
        home: Path,
        *,
        arenas: int = 1,
        ticks: int = 4,
        seed: int = 1,
        fixed_fps: int | None = 60,
        isolate: bool = False,
        infos: bool = False,
        shown: int = 0,
        scene: str | None = None,
        may_spin: bool = False,
        protocol: tuple[int, int] = (1, 0),
    ) -> None:
        self.notes: list[dict[str, Any]] = []
        self.log_file = home / "log.txt"
        self._ticket = 0
        token = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(ANSWER_S)
            self.process = launch(program, project, home, listener.getsockname()[1], token, fixed_fps=fixed_fps)
            try:
                self._peer = listener.accept()[0]
                self._peer.settimeout(ANSWER_S)
                self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                kind, ticket, body = self._receive()
                assert (kind, ticket) == (HELLO, 0)
                self.hello = json.loads(body)
                assert self.hello["token"] == token
                self.specs = self._configure(
                    protocol=protocol, arenas=arenas, ticks_per_action=ticks, seed=seed, isolate=isolate, shown=shown,
                    infos=infos, scene=scene, may_spin=may_spin,
                )  # fmt: skip
            except BaseException:
                self.kill()
                raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def reset(
        self,
        seeds: list[int | None] | None = None,
        options: dict[str, Any] | None = None,
        arenas: list[int] | None = None,
    ) -> Steps:
        return self._steps(self._ask_json(RESET, {"seeds": seeds, "options": options or {}, "arenas": arenas}, STEPS))

    def step(self, actions: dict[str, list[np.ndarray]] | None = None) -> Steps:
        """One action of every agent; behaviors that are left out play by their heuristic."""
        return self._steps(self._ask(STEP, self.step_body(actions or {}), STEPS))

    def step_body(self, actions: dict[str, list[np.ndarray]]) -> bytes:
        names = [behavior.name for behavior in self._behaviors]
        parts = [struct.pack("<I", len(actions))]
        for name, arrays in actions.items():
            parts.append(struct.pack("<HHI", names.index(name), 0, len(arrays[0])))
            for array in arrays:
                data = array.tobytes()
                parts.append(data + bytes(-len(data) % 4))
        return b"".join(parts)

    def call(self, arenas: list[int] | None = None, **request: Any) -> list[Any]:
        arenas = list(range(self._arenas)) if arenas is None else arenas
        values = json.loads(self._ask_json(CALL, {**request, "arenas": arenas}, VALUE))["values"]
        assert isinstance(values, list)
        return values

    def close(self) -> float:
        """Asks the engine to quit; how many seconds that took. It must go with exit code 0."""
        begun = time.monotonic()
        self._send(CLOSE, b"")
        code = self.process.wait(END_S)
        took = time.monotonic() - begun
        assert code == 0, f"exit code {code}\n{self.log()}"
        return took

    def hang_up(self) -> int:
        """Ends the connection without a word; the engine's exit code."""
        self._peer.close()
        return self.process.wait(END_S)

    def kill(self) -> None:
        if hasattr(self, "_peer"):
            self._peer.close()
        self.process.kill()
        self.process.wait(END_S)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def script_errors(self) -> list[str]:
        return re.findall(r"SCRIPT ERROR.*(?:\n .*)*", self.log())

    def _configure(self, *, arenas: int, **config: Any) -> dict[str, Any]:
        self._arenas = arenas
        self._behaviors: list[_Behavior] = []
        specs = json.loads(self._ask_json(CONFIGURE, {"arenas": arenas, **config}, SPECS))
        for spec in specs["behaviors"]:
            observations = [(tuple(one["shape"]), one["dtype"]) for one in spec["observations"]]
            self._behaviors.append(_Behavior(spec["name"], observations))
        assert isinstance(specs, dict)
        return specs

    def _steps(self, body: bytes) -> Steps:
        cut = _Cut(body)
        busy_us, sections = (int(number) for number in cut.numbers("<u4", 2))
        rows = {}
        for _ in range(sections):
            number, flags, zero, n = struct.unpack_from("<HBBI", body, cut.at)
            cut.at += 8
            assert zero == 0
            behavior = self._behaviors[number]
            assert behavior.name not in rows
            rows[behavior.name] = self._rows(cut, behavior, flags, n)
        size = int(cut.numbers("<u4", 1)[0])
        infos = json.loads(cut.numbers("u1", size).tobytes()) if size else {}
        assert cut.at == len(body), "bytes left over"
        return Steps(rows, busy_us, infos)

    def _rows(self, cut: _Cut, behavior: _Behavior, flags: int, n: int) -> Rows:
        if not flags & SAME:
            pairs = cut.numbers("<u4", 2 * n).reshape(n, 2)
            behavior.agents = pairs[:, 0], pairs[:, 1]
            assert len(set(map(tuple, pairs.tolist()))) == n, "an agent twice"
        arena, k = behavior.agents
        assert len(arena) == n
        obs = self._observations(cut, behavior, n)
        reward = cut.numbers("<f4", n)
        bits = cut.numbers("u1", n)
        ended = int(((bits & (TERMINATED | TRUNCATED)) != 0).sum())
        assert bool(flags & SOME_ENDED) == (ended > 0)
        assert bool(flags & ALL_ACT) == bool(((bits & ACTING) != 0).all())
        final = self._observations(cut, behavior, ended) if ended else []
        return Rows(arena, k, obs, reward, bits, final, bool(flags & SAME))

    def _observations(self, cut: _Cut, behavior: _Behavior, n: int) -> list[np.ndarray]:
        arrays = []
        for shape, dtype in behavior.observations:
            array = cut.numbers(np.dtype(dtype).newbyteorder("<").str, n * int(np.prod(shape)))
            arrays.append(array.reshape(n, *shape))
        return arrays

    def _ask_json(self, kind: int, body: dict[str, Any], wanted: int) -> bytes:
        return self._ask(kind, json.dumps(body).encode(), wanted)

    def _ask(self, kind: int, body: bytes, wanted: int) -> bytes:
        self._send(kind, body)
        while True:
            got, ticket, answer = self._receive()
            if got == NOTE:
                assert ticket == 0
                self.notes.append(json.loads(answer))
                continue
            assert ticket == self._ticket, f"ticket {ticket}, not {self._ticket}"
            if got == ERROR:
                raise EngineError(json.loads(answer))
            if got != BUSY:
                assert got == wanted, f"a frame of kind {got}, not {wanted}"
                return answer

    def _send(self, kind: int, body: bytes) -> None:
        # Tickets above 2**31 too: Godot 3 has signed integers only.
        self._ticket = (self._ticket + 0x70000001) % 2**32
        self._peer.sendall(struct.pack("<IBBHI", len(body), kind, 0, 0, self._ticket) + body)

    def _receive(self) -> tuple[int, int, bytes]:
        size, kind, zero, zeros, ticket = struct.unpack("<IBBHI", self._read(12))
        assert (zero, zeros) == (0, 0)
        return kind, ticket, self._read(size)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._peer.recv(size - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EngineGone(self.log())
            data += part
        return bytes(data)


def launch(
    program: str, project: Path, home: Path, port: int | None, token: str, *, fixed_fps: int | None
) -> subprocess.Popen[bytes]:
    """Starts an engine with a game; without a port nobody trains it."""
    home.mkdir(parents=True, exist_ok=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith("ENVMANAGER_")}
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        env[name] = str(home)
    if port is not None:
        env |= {"ENVMANAGER_ADDRESS": f"127.0.0.1:{port}", "ENVMANAGER_TOKEN": token}
    command = [program, "--path", str(project)]
    if "config_version=5" in (project / "project.godot").read_text():
        command.append("--headless")
    if fixed_fps is not None:
        command += ["--fixed-fps", str(fixed_fps)]
    with (home / "log.txt").open("wb") as log:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
