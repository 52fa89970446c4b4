"""A GodotEnvManager whose engines are Python programs, so that tests can use any Python environment as its game.

The manager is the real one: processes, sockets, protocol, supervision. Only the program that it starts is not Godot.
"""

from __future__ import annotations

import shlex
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle

from envmanager.adapters.factories import EnvFactory, factories_for
from envmanager.godot.engine_host import EngineHost
from envmanager.godot.games import DEFAULT_TICKS_PER_SECOND, Game
from envmanager.godot.manager import GodotEnvManager
from envmanager.godot.options import GodotOptions
from envmanager.kernel.table import Entry

_PROGRAM = "#!/bin/sh\nexec {python} -m envmanager_tests.godot.fake_engine\n"


class _FakeHost(EngineHost):
    mode: str | None

    @cached_property
    def game(self) -> Game:
        program: Path = self._scratch / "fake-engine"
        program.write_text(_PROGRAM.format(python=shlex.quote(sys.executable)))
        program.chmod(0o700)
        return Game(program, str(program), 4, DEFAULT_TICKS_PER_SECOND)

    def _environ(self, entry: Entry) -> dict[str, str]:
        path = self._scratch / f"factory-{entry.worker_id}-{entry.generation}"
        path.write_bytes(cloudpickle.dumps(self.group_factory(entry), protocol=5))
        environ = super()._environ(entry) | {"ENVMANAGER_FAKE_ENV": str(path)}
        return environ if self.mode is None else environ | {"ENVMANAGER_FAKE_MODE": self.mode}


class FakeEngineManager(GodotEnvManager):
    """A manager of fake engines, made like any other: ``FakeEngineManager(env_factory, n_envs, n_workers=…)``.

    By default there is one engine per environment. ``mode``: the engines' fault, see
    ``envmanager_tests.godot.engine_misbehaviour``. Other options are those of GodotEnvManager.
    """

    def __init__(self, env_factory: EnvFactory, n_envs: int = 1, *, mode: str | None = None, **options: Any) -> None:
        self.factories = factories_for(env_factory, n_envs)
        self._mode = mode
        options["n_workers"] = options.get("n_workers") or n_envs
        super().__init__("fake", n_envs, **options)

    def make_host(self, env: str, options: GodotOptions) -> EngineHost:
        host = _FakeHost(env, options)
        host.factories, host.mode = self.factories, self._mode
        return host
