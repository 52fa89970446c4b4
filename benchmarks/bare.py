"""The baseline of all measurements: one environment alone, or for a Godot game one engine with all arenas."""

from __future__ import annotations

from benchmarks.contender import Bare, Contender
from benchmarks.engine import BareEngine
from benchmarks.games import TICKS


def make_bare(env: str, n_envs: int) -> Contender:
    """Return the baseline of a workload, started."""
    return BareEngine(env, n_envs) if env in TICKS else Bare(env, n_envs)
