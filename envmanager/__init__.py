"""Run many reinforcement-learning environments side by side, and act on whichever steps are ready.

The rule: importing this package imports nothing else. Names are looked up when they are used, so that a worker's boot
module can set the environment up before NumPy is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envmanager.environment import EnvContext, EnvGroup, Environment, as_environment
    from envmanager.errors import (
        BadAction,
        BadObservation,
        ConfigError,
        EnvManagerError,
        EnvRaised,
        ManagerClosed,
        MissingExtra,
        RestartsExhausted,
        UsageError,
        WorkerDied,
        WorkerError,
        WorkerTimedOut,
    )
    from envmanager.options import ManagerOptions, ResetConfig, Timeouts, Wait
    from envmanager.policy import Policy, RandomPolicy
    from envmanager.seeding import derive_seed
    from envmanager.specs import ArraySpec, BehaviorSpec
    from envmanager.steps import (
        ActionInfo,
        AgentSteps,
        Batch,
        EnvironmentCommand,
        EnvironmentResponse,
        Lost,
        StepInfo,
        Transitions,
    )

_HOMES = {
    "env_manager": ["EnvManager", "EnvWorker", "ManagerStats", "WorkerStats"],
    "environment": ["EnvContext", "EnvGroup", "Environment", "as_environment"],
    "errors": [
        "BadAction",
        "BadObservation",
        "ConfigError",
        "EnvManagerError",
        "EnvRaised",
        "ManagerClosed",
        "MissingExtra",
        "RestartsExhausted",
        "UsageError",
        "WorkerDied",
        "WorkerError",
        "WorkerTimedOut",
    ],
    "options": ["ManagerOptions", "ResetConfig", "Timeouts", "Wait"],
    "policy": ["Policy", "RandomPolicy"],
    "registry": ["make_manager"],
    "seeding": ["derive_seed"],
    "simple_env_manager": ["SimpleEnvManager"],
    "specs": ["ArraySpec", "BehaviorSpec"],
    "steps": [
        "ActionInfo",
        "AgentSteps",
        "Batch",
        "EnvironmentCommand",
        "EnvironmentResponse",
        "Lost",
        "StepInfo",
        "Transitions",
    ],
    "subprocess_env_manager": ["SubprocessEnvManager"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'envmanager' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"envmanager.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
