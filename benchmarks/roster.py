"""All contenders by name, with their classes and the packages that they need.

This module has names only: each library is imported by the zygote that needs it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envmanager.system.machine import count_cores

if TYPE_CHECKING:
    from benchmarks.contender import Contender


class CannotTakePart(Exception):
    """Raised by a contender that cannot run here; the text says why."""


@dataclass(frozen=True)
class Family:
    """Contenders that need the same library: their module here, the library, and the package to install."""

    module: str
    library: str
    package: str


@dataclass(frozen=True)
class Entry:
    """A contender: its label in tables and plots, its class in its family's module, and ``options`` for the class."""

    label: str
    maker: str
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "bare": Family("bare", "gymnasium", "gymnasium"),
    "ours": Family("ours", "gymnasium", "gymnasium"),
    "gymnasium": Family("peers.gymnasium_vector", "gymnasium", "gymnasium"),
    "sb3": Family("peers.stable_baselines3", "stable_baselines3", "stable-baselines3"),
    "tianshou": Family("peers.tianshou", "tianshou", "tianshou"),
    "pufferlib": Family("peers.pufferlib", "pufferlib", "pufferlib-core"),
    "torchrl": Family("peers.torchrl", "torchrl", "torchrl"),
    "rllib": Family("peers.rllib", "ray", "ray[rllib]"),
    "ray": Family("peers.ray_actors", "ray", "ray"),
    "envpool": Family("peers.envpool", "envpool", "envpool"),
    "godot_rl": Family("peers.godot_rl", "godot_rl", "godot-rl"),
}

ROSTER = {
    "bare": Entry("the bare environment, alone", "make_bare"),
    # In this process; one environment per process; several per process, as many processes as cores.
    "ours-simple": Entry("envmanager (in process)", "InProcess"),
    "ours-simple-view": Entry("envmanager (in process, zero_copy)", "InProcess", {"zero_copy": True}),
    "ours-processes": Entry("envmanager (a worker each)", "Processes"),
    "ours-processes-view": Entry("envmanager (a worker each, zero_copy)", "Processes", {"zero_copy": True}),
    "ours-workers": Entry("envmanager ({cores} workers)", "Workers"),
    "ours-workers-view": Entry("envmanager ({cores} workers, zero_copy)", "Workers", {"zero_copy": True}),
    # Waiting for any worker, or for half of the workers.
    "ours-any": Entry("envmanager (a worker each, any)", "Processes", {"wait": "any"}),
    "ours-half": Entry("envmanager (a worker each, half)", "Processes", {"wait": "half"}),
    # Two processes per core that take turns.
    "ours-turns": Entry("envmanager ({twice} workers, half)", "Turns"),
    # With a share of the environments in the trainer's process; with a placement chosen by the manager.
    "ours-share": Entry("envmanager ({rest} + local)", "Share"),
    "ours-auto": Entry("envmanager (auto)", "Auto"),
    "ours-auto-local": Entry("envmanager (auto, local)", "Auto", {"local_envs": "auto", "wait": "all"}),
    # step() and a trivial policy, instead of send() and recv().
    "ours-step": Entry("envmanager (a worker each, step())", "Stepped"),
    "ours-forkserver": Entry("envmanager (forkserver)", "Processes", {"start_method": "forkserver"}),
    "ours-spawn": Entry("envmanager (spawn)", "Processes", {"start_method": "spawn"}),
    # Godot: one engine without a manager, engines with step() and a policy, engines of which every other one is slower.
    "ours-codec": Entry("envmanager (connection and codec)", "Codec"),
    "ours-engine": Entry("envmanager (1 engine)", "Engines"),
    "ours-engine-frames": Entry("envmanager (1 engine, a frame per tick)", "Engines", {"fixed_fps": None}),
    "ours-engines-2": Entry("envmanager (2 engines)", "Engines", {"n_engines": 2}),
    "ours-engines-4": Entry("envmanager (4 engines)", "Engines", {"n_engines": 4}),
    "ours-engines-16": Entry("envmanager (16 engines)", "Engines", {"n_engines": 16}),
    "ours-uneven-any": Entry("envmanager (uneven engines, any)", "Uneven", {"n_engines": 2, "wait": "any"}),
    "ours-uneven-all": Entry("envmanager (uneven engines, all)", "Uneven", {"n_engines": 2, "wait": "all"}),
    "gymnasium-sync": Entry("Gymnasium SyncVectorEnv", "Vector", {"kind": "SyncVectorEnv"}),
    "gymnasium-sync-view": Entry(
        "Gymnasium SyncVectorEnv, no copy", "Vector", {"kind": "SyncVectorEnv", "copy": False}
    ),
    "gymnasium-async": Entry("Gymnasium AsyncVectorEnv", "Vector", {"kind": "AsyncVectorEnv"}),
    "sb3-dummy": Entry("SB3 DummyVecEnv", "Vector", {"kind": "DummyVecEnv"}),
    "sb3-subproc": Entry("SB3 SubprocVecEnv", "Vector", {"kind": "SubprocVecEnv", "start_method": "fork"}),
    "tianshou-dummy": Entry("Tianshou Dummy", "Vector", {"kind": "DummyVectorEnv"}),
    "tianshou-subproc": Entry("Tianshou Subproc", "Vector", {"kind": "SubprocVectorEnv"}),
    "tianshou-shmem": Entry("Tianshou Shmem", "Vector", {"kind": "ShmemVectorEnv"}),
    "tianshou-shmem-any": Entry("Tianshou Shmem (any)", "Vector", {"kind": "ShmemVectorEnv", "wait": "any"}),
    "tianshou-shmem-half": Entry("Tianshou Shmem (half)", "Vector", {"kind": "ShmemVectorEnv", "wait": "half"}),
    "pufferlib-serial": Entry("PufferLib (in process)", "Vector", {"kind": "Serial"}),
    "pufferlib-processes": Entry("PufferLib (a worker each)", "Vector", {"kind": "Multiprocessing"}),
    "pufferlib-workers": Entry("PufferLib ({cores} workers)", "Vector", {"kind": "Multiprocessing", "per_core": True}),
    "pufferlib-any": Entry("PufferLib (any)", "Vector", {"kind": "Multiprocessing", "wait": "any"}),
    "pufferlib-half": Entry("PufferLib (half)", "Vector", {"kind": "Multiprocessing", "wait": "half"}),
    "torchrl-serial": Entry("TorchRL SerialEnv", "Vector", {"kind": "SerialEnv"}),
    "torchrl-parallel": Entry("TorchRL ParallelEnv", "Vector", {"kind": "ParallelEnv"}),
    "rllib-sync": Entry("RLlib (sync)", "Runner", {"mode": "sync"}),
    "rllib-async": Entry("RLlib (async)", "Runner", {"mode": "async"}),
    "rllib-actors": Entry("RLlib (an actor each)", "Runners"),
    "rllib-actors-2": Entry("RLlib (2 actors)", "Runners", {"n_workers": 2}),
    # This library on a Ray cluster of one machine, and actors written by hand.
    "ray-ours": Entry("envmanager (Ray, an actor each)", "Actors"),
    "ray-ours-2": Entry("envmanager (Ray, 2 actors)", "Actors", {"n_workers": 2}),
    "ray-hand": Entry("Ray by hand (an actor each)", "ByHand"),
    "ray-hand-2": Entry("Ray by hand (2 actors)", "ByHand", {"n_workers": 2}),
    "envpool-sync": Entry("EnvPool (sync)", "Synchronous"),
    "envpool-async": Entry("EnvPool (async)", "Asynchronous"),
    # Eight times real time, its default; never waiting for real time; and both, with eight ticks per frame.
    "godot_rl-default": Entry("godot_rl_agents (speedup 8)", "OneEngine", {"speedup": 8}),
    "godot_rl-fixed": Entry("godot_rl_agents (fixed-fps)", "OneEngine", {"framerate": 60}),
    "godot_rl-fastest": Entry("godot_rl_agents (fixed-fps, speedup 8)", "OneEngine", {"framerate": 60, "speedup": 8}),
}
"""All contenders. The part of a name before the first hyphen is the family."""

OUT_OF_REACH = {
    "mlagents": "it runs Unity builds, not these environments",
}
"""Libraries that are not measured, with the reason."""


def label_of(contender: str, n_envs: int) -> str:
    """Return the label for tables and plots: ``"envmanager (2 workers)"`` for ``"ours-workers"`` on two cores."""
    cores = count_cores()
    return ROSTER[contender].label.format(
        cores=min(cores, n_envs), twice=min(2 * cores, n_envs), rest=_counted(max(1, cores - 1))
    )


def _counted(n_workers: int) -> str:
    return "1 worker" if n_workers == 1 else f"{n_workers} workers"


def family_of(contender: str) -> str:
    """Return the family of a contender: ``"ours"`` for ``"ours-simple"``."""
    return contender.partition("-")[0]


def load_family(family: str) -> Any:
    """Import the module of a family, which imports the library; raise ImportError if that is not installed."""
    return importlib.import_module(f"benchmarks.{FAMILIES[family].module}")


def make_contender(name: str, env: str, n_envs: int) -> Contender:
    """Return the contender ``name``, started with ``n_envs`` environments."""
    entry = ROSTER[name]
    maker = getattr(load_family(family_of(name)), entry.maker)
    made: Contender = maker(env, n_envs, **entry.options)
    return made
