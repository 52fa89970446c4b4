"""Who can take part: the names of all contenders, what is behind them, and what must be installed for them.

The rule: names only. Nothing is imported before a zygote needs it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envmanager.bench.contender import Contender


class CannotTakePart(Exception):
    """Raised by a contender that is not to be had here; the text says why."""


@dataclass(frozen=True)
class Family:
    """Contenders that need the same library: the module here, the library, and the package that brings it."""

    module: str
    library: str
    package: str


@dataclass(frozen=True)
class Entry:
    """A contender: a class in its family's module, made with ``options``."""

    maker: str
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "bare": Family("contender", "gymnasium", "gymnasium"),
    "ours": Family("ours", "gymnasium", "gymnasium"),
    "gymnasium": Family("peers.gymnasium_vector", "gymnasium", "gymnasium"),
    "sb3": Family("peers.stable_baselines3", "stable_baselines3", "stable-baselines3"),
    "tianshou": Family("peers.tianshou", "tianshou", "tianshou"),
    "pufferlib": Family("peers.pufferlib", "pufferlib", "pufferlib-core"),
    "torchrl": Family("peers.torchrl", "torchrl", "torchrl"),
    "rllib": Family("peers.rllib", "ray", "ray[rllib]"),
    "envpool": Family("peers.envpool", "envpool", "envpool"),
}

ROSTER = {
    "bare": Entry("Bare"),
    # In this process; one environment per process; several per process, as many processes as cores.
    "ours-simple": Entry("InProcess"),
    "ours-simple-view": Entry("InProcess", {"zero_copy": True}),
    "ours-processes": Entry("Processes"),
    "ours-processes-view": Entry("Processes", {"zero_copy": True}),
    "ours-workers": Entry("Workers"),
    "ours-workers-view": Entry("Workers", {"zero_copy": True}),
    # Not waiting for all: for any, or for half of the workers.
    "ours-any": Entry("Processes", {"wait": "any"}),
    "ours-half": Entry("Processes", {"wait": "half"}),
    # Two processes per core that take turns.
    "ours-turns": Entry("Turns"),
    # Placed by the manager: with a share in the trainer's process, and whatever it finds best.
    "ours-share": Entry("Share"),
    "ours-auto": Entry("Auto"),
    # step() and a policy that does nothing, against send() and recv().
    "ours-step": Entry("Stepped"),
    "ours-forkserver": Entry("Processes", {"start_method": "forkserver"}),
    "ours-spawn": Entry("Processes", {"start_method": "spawn"}),
    "ours-fork": Entry("Processes", {"start_method": "fork"}),
    "gymnasium-sync": Entry("Vector", {"kind": "SyncVectorEnv"}),
    "gymnasium-sync-view": Entry("Vector", {"kind": "SyncVectorEnv", "copy": False}),
    "gymnasium-async": Entry("Vector", {"kind": "AsyncVectorEnv"}),
    "sb3-dummy": Entry("Vector", {"kind": "DummyVecEnv"}),
    "sb3-subproc": Entry("Vector", {"kind": "SubprocVecEnv", "start_method": "fork"}),
    "tianshou-dummy": Entry("Vector", {"kind": "DummyVectorEnv"}),
    "tianshou-subproc": Entry("Vector", {"kind": "SubprocVectorEnv"}),
    "tianshou-shmem": Entry("Vector", {"kind": "ShmemVectorEnv"}),
    "tianshou-shmem-any": Entry("Vector", {"kind": "ShmemVectorEnv", "wait": "any"}),
    "tianshou-shmem-half": Entry("Vector", {"kind": "ShmemVectorEnv", "wait": "half"}),
    "pufferlib-serial": Entry("Vector", {"kind": "Serial"}),
    "pufferlib-processes": Entry("Vector", {"kind": "Multiprocessing"}),
    "pufferlib-workers": Entry("Vector", {"kind": "Multiprocessing", "per_core": True}),
    "pufferlib-any": Entry("Vector", {"kind": "Multiprocessing", "wait": "any"}),
    "pufferlib-half": Entry("Vector", {"kind": "Multiprocessing", "wait": "half"}),
    "torchrl-serial": Entry("Vector", {"kind": "SerialEnv"}),
    "torchrl-parallel": Entry("Vector", {"kind": "ParallelEnv"}),
    "rllib-sync": Entry("Runner", {"mode": "sync"}),
    "rllib-async": Entry("Runner", {"mode": "async"}),
    "envpool-sync": Entry("Synchronous"),
    "envpool-async": Entry("Asynchronous"),
}
"""All contenders. The part of a name before the first hyphen is the family."""

OUT_OF_REACH = {
    "mlagents": "it runs Unity builds, not these environments",
}
"""Libraries that one would expect here, and why they are not."""


def family_of(contender: str) -> str:
    """``"ours"`` for ``"ours-simple"``."""
    return contender.partition("-")[0]


def load_family(family: str) -> Any:
    """The module of a family, its library imported; ImportError when there is none."""
    return importlib.import_module(f"envmanager.bench.{FAMILIES[family].module}")


def make_contender(name: str, env: str, n_envs: int) -> Contender:
    """The contender ``name`` on ``n_envs`` environments, running."""
    entry = ROSTER[name]
    maker = getattr(load_family(family_of(name)), entry.maker)
    made: Contender = maker(env, n_envs, **entry.options)
    return made
