"""Bridges from a manager to the interfaces of other libraries: Gymnasium, Stable-Baselines3, ML-Agents.

::

    envs = as_vector_env(manager)          # obs, infos = envs.reset(seed=1);  envs.step(actions)
    vec_env = as_sb3_vec_env(manager)      # PPO("MlpPolicy", vec_env).learn(100_000)

Gymnasium and Stable-Baselines3 have no partial steps, so each step of their bridges waits for all environments. A
bridge is imported, together with the library that it needs, on first use. Closing a bridge closes its manager.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.importing import needed_by

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode

    from envmanager.interop.mlagents import MlagentsEnvManager
    from envmanager.interop.sb3 import ManagerVecEnv
    from envmanager.interop.vector_env import ManagerVectorEnv

__all__ = ["MlagentsEnvManager", "as_sb3_vec_env", "as_vector_env"]


def as_vector_env(manager: EnvManager, *, autoreset_mode: AutoresetMode | str = "NextStep") -> ManagerVectorEnv:
    """Return ``manager`` as a ``gymnasium.vector.VectorEnv`` with the same results, seeds and infos as a SyncVectorEnv.

    Raises UsageError for several behaviors, an unknown mode, Gymnasium before 1.1, and ``"Disabled"`` with environments
    that cannot begin episodes on demand; MissingExtra without Gymnasium. Where an environment has several agents,
    ``reset`` raises UsageError.

    Args:
        manager: The manager, which needs ``infos=True`` for the environments' infos. Closed with the result.
        autoreset_mode: An ``AutoresetMode`` or its value: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``.
    """
    with needed_by("as_vector_env", extra="gymnasium"):
        gymnasium = importlib.import_module("gymnasium")
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        raise UsageError("as_vector_env needs Gymnasium 1.1 or newer: pip install -U gymnasium")
    bridge = importlib.import_module("envmanager.interop.vector_env")
    return bridge.ManagerVectorEnv(manager, autoreset_mode)  # type: ignore[no-any-return]


def __getattr__(name: str) -> Any:
    if name == "MlagentsEnvManager":  # imported on first use, since its base class is ML-Agents'
        return importlib.import_module("envmanager.interop.mlagents").MlagentsEnvManager
    raise AttributeError(f"module 'envmanager.interop' has no attribute {name!r}")


def as_sb3_vec_env(manager: EnvManager) -> ManagerVecEnv:
    """Return ``manager`` as a Stable-Baselines3 ``VecEnv`` with the same results, seeds and infos as a ``DummyVecEnv``.

    Raises UsageError for several behaviors, MissingExtra without Stable-Baselines3. Where an environment has several
    agents, ``reset`` raises UsageError.

    Args:
        manager: The manager, which needs ``infos=True`` for the environments' infos. Closed with the result. The
            entries that Stable-Baselines3 adds (``terminal_observation``, ``TimeLimit.truncated``) are always there.
    """
    with needed_by("as_sb3_vec_env", extra=None):
        importlib.import_module("stable_baselines3")
    bridge = importlib.import_module("envmanager.interop.sb3")
    return bridge.ManagerVecEnv(manager)  # type: ignore[no-any-return]
