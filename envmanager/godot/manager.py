"""The manager of environments in Godot engines.

::

    trainer                                engine 0              engine 1
    GodotEnvManager ── TCP, one each ──▶   arenas 0 1 2 3        arenas 4 5 6 7
          ▲                                   │                     │
          └── one step queue ◀── steps ───────┴─────────────────────┘

Each engine is a worker and connects to the trainer directly. Its arenas are the worker's environments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from envmanager.adapters.recipes import RECIPE_OPTIONS, EnvRecipe
from envmanager.data.env_rows import split_evenly
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.godot.games import protocol_of
from envmanager.godot.options import GodotOptions
from envmanager.options import takes
from envmanager.system.machine import count_cores

if TYPE_CHECKING:
    from envmanager.godot.engine_host import EngineHost

_LEAST_ARENAS = 16  # minimum number of arenas per engine if ``n_workers`` is "auto" and there are several engines


class GodotEnvManager(EnvManager):
    """A manager that runs ``n_envs`` arenas of a Godot game in ``n_workers`` engines (by default one). It needs Linux.

    ``env``: a folder with ``project.godot``, a ``.pck``, an exported game, or a demo such as ``"demo:rolling_ball"``.
    The game needs this library's addon (``envmanager godot install-addon``) or the plugin godot_rl_agents. With this
    plugin each environment has its own engine; otherwise ``n_workers="auto"`` is one per 16 arenas, up to one per core.
    ``engine``: an EngineOptions or a mapping of its fields. ``worker_env``: environment variables of the engines,
    instead of the trainer's. ``log_dir``: folder for the engines' output. Other parameters: see SubprocessEnvManager.

    With ``engine.attach`` no engine is started, and ``env`` need not exist. The user plays the game in the editor. The
    game is one worker. When its connection ends, WorkerDied ("EOF") is raised, and a reset waits for a new connection.

    All arenas of an engine step together, so ``send`` needs actions for all of them. Reset options,
    ``engine.parameters`` and the arguments of ``call`` and ``set_attr`` must be JSON values. An error in a script
    raises EnvRaised, usually with the file and line. A message that breaks the protocol raises ProtocolError.

    The constructor waits until all engines are ready, at most ``timeouts.start_s``. It raises UsageError if the game or
    an engine for the game is not found. If an engine cannot start, the others are stopped and WorkerError is raised.
    """

    ends_episodes = False

    @takes(GodotOptions)
    def __init__(self, env: str, options: GodotOptions) -> None:
        if sys.platform != "linux":
            raise UsageError(
                "GodotEnvManager needs Linux (memfd, pidfd and epoll): run this program on Linux, in a Linux container "
                'or in WSL 2. Environments in Python work on this system, with the kinds "simple" and "subprocess".'
            )
        if isinstance(env, EnvRecipe):
            given = ", ".join(name for name in RECIPE_OPTIONS if getattr(env, name)) or "an EnvRecipe"
            raise UsageError(
                f"{given}: this means nothing to the manager kind 'godot', whose environments are made by the game. "
                "Leave it out; engine.parameters are what a game can be given."
            )
        if not isinstance(env, str):
            raise UsageError(f'a Godot game is named by a text, its path or "demo:…", not by {env!r}.')
        protocol = options.engine.protocol or protocol_of(env)
        options = attrs.evolve(options, engine=attrs.evolve(options.engine, protocol=protocol))
        if protocol == "godot_rl":
            options = _with_an_engine_each(options)
        n_workers = options.n_workers
        if options.engine.attach is not None:  # one game, which only the user can start again
            if n_workers not in (None, "auto", 1):
                raise UsageError(f"n_workers={n_workers} with engine.attach: one game is attached, so it must be 1.")
            n_workers = 1
            restarts = attrs.evolve(options.restarts, max_restarts=0, recycle_after_steps=None)
            options = attrs.evolve(options, restarts=restarts)
        elif n_workers == "auto":
            n_workers = max(1, min(count_cores(), options.n_envs // _LEAST_ARENAS))
        self._engines: EngineHost
        super().__init__(
            split_evenly(options.n_envs, n_workers or 1),
            zero_copy=True,  # each answer comes in new arrays
            **options.of_the_manager,
        )
        self._engines = self.make_host(env, options)
        self.start(self._engines)

    @property
    def declared(self) -> Mapping[str, Any]:
        """What the scene declares about its training: see ``envmanager.godot.declared``. {} for an older addon."""
        declared: Mapping[str, Any] = self._engines.workers[0].declared
        return declared

    def make_host(self, env: str, options: GodotOptions) -> EngineHost:
        """Return a new host, which starts and replaces the engines. A subclass may override this method."""
        from envmanager.godot import engine_host, godot_rl  # importable only on Linux

        kind = godot_rl.GodotRLHost if options.engine.protocol == "godot_rl" else engine_host.EngineHost
        return kind(env, options)


def _with_an_engine_each(options: GodotOptions) -> GodotOptions:
    """Return ``options`` with one engine per environment. Raises UsageError for options unsupported by godot_rl."""
    n_envs, engine = options.n_envs, options.engine
    if options.n_workers not in (None, "auto", n_envs):
        raise UsageError(
            f"n_workers={options.n_workers} with n_envs={n_envs}: an engine with a game of godot_rl_agents is one "
            "environment, so n_envs is the number of engines; leave n_workers out."
        )
    if engine.attach is not None and n_envs > 1:
        raise UsageError(
            f"n_envs={n_envs} with engine.attach: one game of godot_rl_agents is attached, so it must be 1."
        )
    if engine.isolate:
        raise UsageError(
            "engine.isolate is not possible with a game of godot_rl_agents, whose scene has its copies already."
        )
    odd = [name for name, value in engine.parameters.items() if not isinstance(value, str | int | float)]
    if odd:
        raise UsageError(
            f"engine.parameters has {odd[0]!r}, which is no number, text or bool: with a game of godot_rl_agents they "
            "are arguments of its command line."
        )
    return attrs.evolve(options, n_workers=n_envs)
