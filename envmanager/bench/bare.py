"""What everything is measured by: the environment alone; of a Godot game, one engine with all arenas, by hand."""

from __future__ import annotations

from envmanager.bench.contender import Bare, Contender
from envmanager.bench.engine import BareEngine
from envmanager.bench.games import TICKS


def make_bare(env: str, n_envs: int) -> Contender:
    """The measure of a workload, running."""
    return BareEngine(env, n_envs) if env in TICKS else Bare(env, n_envs)
