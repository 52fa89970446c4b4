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

    If the environment has a vectorised form, that form is probed as well, and used if equivalent and clearly faster.

    ``options``: the options of SubprocessEnvManager. Without ``n_workers`` the probe chooses the number; a given number
    is ignored with a SimpleEnvManager or a vector of fixed size. ``local_envs="auto"`` allows a local worker as well.
    ``stats().placement`` states the choice and the reason. The probe may raise the errors of ``reset`` and ``step``.
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
