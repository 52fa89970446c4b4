"""The manager kind "auto": a function that probes an environment and makes the manager that should be faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envmanager.adapters.factories import EnvFactory, vectorised
from envmanager.options import ProcessOptions
from envmanager.placing.probing import place
from envmanager.simple_env_manager import SimpleEnvManager
from envmanager.subprocess_env_manager import SubprocessEnvManager

if TYPE_CHECKING:
    from envmanager.env_manager import EnvManager


def auto_env_manager(env_factory: EnvFactory, n_envs: int = 1, **options: Any) -> EnvManager:
    """Probe the first environment and return a SimpleEnvManager or SubprocessEnvManager, whichever should be faster.

    If the environment has a vectorised form, that form is probed as well, and used if it is equivalent and faster.

    ``options``: the options of SubprocessEnvManager. A number as ``n_workers`` is ignored if a SimpleEnvManager is
    chosen. ``local_envs="auto"`` allows some environments in this process and the others in workers. The manager's
    ``stats().placement`` says what was chosen and why. The probe raises the same errors as the constructors.
    """
    checked = ProcessOptions(n_envs=n_envs, **options)
    vector_factory = vectorised(env_factory)
    placement = place(SubprocessEnvManager, env_factory, checked, in_process=True, vectorised=vector_factory)
    chosen = vector_factory if placement.is_vectorised else env_factory
    options["n_workers"], options["local_envs"] = placement.n_workers, placement.local_envs
    kind = SimpleEnvManager if placement.kind == "simple" else SubprocessEnvManager
    manager: EnvManager = kind(chosen, n_envs, **options)
    manager.placement = str(placement)
    return manager
