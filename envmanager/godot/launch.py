"""Starts the process of one engine: in a group of its own, tied to the trainer's life, on a core of its own.

The rule: an engine is started at once and awaited by nobody here; it comes to the lobby when it is ready.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import attrs

from envmanager.errors import WorkerError
from envmanager.godot.engine_log import EngineLog
from envmanager.godot.engines import Game, command_for
from envmanager.godot.lobby import Lobby
from envmanager.godot.options import EngineOptions
from envmanager.hosts.link import WorkerPlan
from envmanager.hosts.spin import spin_ns
from envmanager.processes.starting import Process, execute
from envmanager.system.files import advice
from envmanager.system.processes import count_cores

ADDRESS, TOKEN = "ENVMANAGER_ADDRESS", "ENVMANAGER_TOKEN"
"""Environment variables from which an engine knows its trainer. Without them a game is just played."""
LONG_SPIN_NS = 1_000_000
"""Longest spin of a trainer with a core besides its engines'; a step of 64 arenas takes a third to two thirds."""


@attrs.frozen(kw_only=True)
class EnginePlan(WorkerPlan):
    """The parameters of an engine's start."""

    game: Game | None
    """The game to start; None for a game that the user starts."""
    options: EngineOptions
    seed: int
    infos: bool
    check_values: bool
    user_data: Path
    """A folder of its own for ``user://``."""
    core: int | None
    """Core to which the engine is pinned; None for any."""
    may_spin: bool
    """Whether it may keep its core busy for a moment while it waits for the next request."""
    environ: Mapping[str, str] | None = attrs.field(repr=False)  # it may hold secrets
    log_dir: str | None


def engines_may_spin(n_engines: int) -> bool:
    """Whether there is a core for each of so many engines, and another for the trainer.

    GDScript cannot yield: an engine that spins needs a core that nobody else of this training wants.
    """
    return n_engines < count_cores()


def trainer_spin_ns(n_engines: int) -> int:
    """Return how long the trainer may spin while it waits for its engines; 0: it sleeps."""
    return LONG_SPIN_NS if engines_may_spin(n_engines) else spin_ns(n_engines)


def launch(plan: EnginePlan, lobby: Lobby, log: EngineLog) -> Process:
    """Start the engine; WorkerError when it cannot be."""
    environ = {**(os.environ if plan.environ is None else plan.environ), ADDRESS: lobby.address, TOKEN: lobby.token}
    if plan.options.user_data == "private":
        for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
            environ[name] = str(plan.user_data / name.lower())
    assert plan.game is not None
    command = command_for(plan.game, plan.options)
    cores = os.sched_getaffinity(0) if plan.core is None else {plan.core}
    try:
        return execute(command, environ, log.write_fd, cores, time.monotonic() + plan.timeouts.start_s)
    except OSError as error:
        cause = f"{type(error).__name__}: {error}"
        raise WorkerError(
            f"the engine of worker {plan.worker_id} could not be started: {cause}. The command was: "
            f"{' '.join(command)}. {advice(error)}".rstrip(),
            worker_id=plan.worker_id,
            env_ids=plan.env_ids,
            phase="start",
            cause=cause,
        ) from error
