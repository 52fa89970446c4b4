"""The host of engines: finds the game, starts engines that play it, replaces and ends them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envmanager.data.seeding import derive_seed
from envmanager.errors import UsageError
from envmanager.godot.engines import Game, find_game, import_command
from envmanager.godot.frames import dump_json
from envmanager.godot.launch import EnginePlan, engines_may_spin, trainer_spin_ns
from envmanager.godot.options import EngineOptions, GodotOptions
from envmanager.godot.worker import EngineLink
from envmanager.hosts.link_host import LinkHost, Resources
from envmanager.hosts.poller import Poller
from envmanager.kernel.host import EnvWorker, HostContext
from envmanager.kernel.table import Entry
from envmanager.options import ResetConfig

_ENGINE_SEEDS = 2**31
"""Number in place of an environment's for the seed of what an engine draws before the first reset with a seed."""


class EngineResources(Resources[EngineLink]):
    """The links of engines, and a folder for what games write."""

    def __init__(self, close_s: float, *, spin_ns: int) -> None:
        super().__init__(close_s, Poller(spin_ns=spin_ns))
        self.scratch = Path(tempfile.mkdtemp(prefix="envmanager-godot-"))

    def _close_own(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)


class EngineHost(LinkHost[EngineLink]):
    """Engines that play one game, each with several arenas of it."""

    steps_some_rows = False

    options: GodotOptions

    def __init__(self, env: str, options: GodotOptions) -> None:
        super().__init__(env, options)
        self._engine = options.engine
        self._env = env
        self._game: Game | None = None
        self._cores = sorted(os.sched_getaffinity(0)) if options.engine.pin else []
        self.rewrites_arrays = False  # each answer has arrays of its own

    def open(self, context: HostContext) -> None:
        self._engines_may_spin = self._engine.attach is None and engines_may_spin(len(context.entries))
        super().open(context)

    def _make_resources(self) -> EngineResources:
        return EngineResources(self.options.timeouts.close_s, spin_ns=trainer_spin_ns(len(self.context.entries)))

    @property
    def game(self) -> Game:
        """The game that is played."""
        if self._game is None:
            self._game = self._find_game(self._resources.scratch)
            _import_assets(self._game, self.options.timeouts.start_s)
        return self._game

    def _find_game(self, scratch: Path) -> Game:
        return find_game(self._env, self._engine, scratch)

    def make_worker(self, worker_id: int) -> EnvWorker:
        """Start an engine."""
        self.context.calls.require_open("the start of a worker")
        entry, options = self.context.entries[worker_id], self.options
        user_data = self._resources.scratch / f"user-{worker_id}"
        user_data.mkdir(exist_ok=True)
        plan = EnginePlan(
            worker_id=worker_id,
            env_ids=entry.env_ids,
            generation=entry.generation,
            timeouts=options.timeouts,
            game=None if self._engine.attach is not None else self.game,
            options=self.engine_options(worker_id),
            seed=self._engine_seed(entry),
            infos=options.infos,
            check_values=options.check_values,
            user_data=user_data,
            core=self._cores[worker_id % len(self._cores)] if self._cores else None,
            may_spin=self._engines_may_spin,
            environ=self._environ(entry),
            log_dir=options.log_dir,
        )
        return self.care_for(lambda: EngineLink(plan, self.context.events, entry.times))

    def engine_options(self, worker_id: int) -> EngineOptions:
        """Options for starting and driving this engine."""
        return self._engine

    def _environ(self, entry: Entry) -> Mapping[str, str] | None:
        """The environment variables of its engine; None: the trainer's."""
        return self.options.worker_env

    def _engine_seed(self, entry: Entry) -> int:
        if self.options.seed is None:
            return int(np.random.SeedSequence().generate_state(1)[0] >> 1)
        return derive_seed(self.options.seed, _ENGINE_SEEDS + entry.worker_id, entry.generation)

    def check_can_travel(self, payload: Any) -> None:
        """All but actions travels as JSON."""
        if isinstance(payload, list):
            for own in payload:
                self._check_call(own)
        elif payload is not None:
            _check_json(ResetConfig.of(payload).options, "the reset options")

    def _check_call(self, payload: Any) -> None:
        if isinstance(payload, tuple):
            name, *rest = payload
            if callable(name):
                raise UsageError(
                    f"call() got the function {getattr(name, '__name__', name)!r}, which cannot travel into an engine: "
                    "name a method of the arena's script."
                )
            args, kwargs = (rest[0] if len(rest) > 1 else []), (rest[2] if len(rest) > 2 else {})
            _check_json({"args": args, "kwargs": kwargs}, f"the arguments for {name!r}")


def _check_json(value: Any, what: str) -> None:
    try:
        dump_json({"value": None if value is None else dict(value)})
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} cannot travel into an engine: {error}. Only what JSON can say does: numbers, texts, true, false, "
            "None, lists and dicts of these."
        ) from error


def _import_assets(game: Game, within_s: float) -> None:
    """Once per project, whoever comes first: without it a game lacks its images and sounds."""
    if import_command(game) is None:
        return
    folder = os.open(game.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        command = import_command(game)  # another program may have done it meanwhile
        if command is not None:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=min(within_s, 600.0), check=False
            )
    finally:
        os.close(folder)
