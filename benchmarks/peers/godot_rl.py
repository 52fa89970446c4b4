"""godot_rl_agents: JSON over TCP between one engine and Python, with its own GodotEnv.

Observations stay the lists of dicts that GodotEnv returns; they are not converted to arrays. The plugin runs the same
scene in the same engine as this library's addon.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import socket
import subprocess
import tempfile
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from godot_rl.core.godot_env import GodotEnv

from benchmarks.contender import Contender, random_pushes
from benchmarks.games import TICKS, find_engine, make_peer_project
from benchmarks.roster import CannotTakePart

IMPORT_S = 100.0
END_S = 5.0


class OneEngine(Contender):
    """One engine. With ``speedup`` it runs at that multiple of real time; with ``framerate`` it never waits."""

    def __init__(self, env: str, n_envs: int, **options: Any) -> None:
        self._n_envs = n_envs
        self._folder = Path(tempfile.mkdtemp(prefix="envmanager-bench-"))
        try:
            game = _prepare(self._folder)
            options |= {"port": _free_port(), "action_repeat": TICKS[env], "arenas": n_envs}
            self._env = GodotEnv(str(game), **options)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._env.reset()
        self._actions = cycle([[own] for own in random_pushes(n_envs)])  # a list with one entry per kind of action

    def run(self, n_calls: int) -> int:
        step = self._env.step
        for actions in islice(self._actions, n_calls):
            step(actions)
        return n_calls * self._n_envs

    def close(self) -> None:
        self._env.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._env.proc.wait(END_S)
        self._env.proc.kill()
        self._env.proc.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _prepare(folder: Path) -> Path:
    """Import the project, so that the engine knows its classes; return the program that GodotEnv starts."""
    engine = find_engine()
    project = make_peer_project(folder / "game")
    command = [engine, "--headless", "--path", str(project), "--import"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=IMPORT_S, check=False)
    if done.returncode:
        raise CannotTakePart(f"the engine could not import its plugin: {done.stderr.decode(errors='replace')[-300:]}")
    program = folder / "game.x86_64"  # GodotEnv requires this suffix
    program.write_text(
        f'#!/bin/sh\nexec {shlex.quote(engine)} --path {shlex.quote(str(project))} --audio-driver Dummy "$@"\n'
    )
    program.chmod(0o755)
    return program


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
