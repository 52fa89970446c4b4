"""A library that runs many reinforcement-learning environments side by side and batches the steps that are ready.

The rule: importing the package imports no third-party library. Each name in ``__all__`` is imported on first use, so
that a worker can set environment variables before NumPy is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envmanager.adapters.choosing import as_environment
    from envmanager.adapters.recipes import EnvRecipe
    from envmanager.coroutines.manager import AsyncioEnvManager
    from envmanager.data.seeding import derive_seed
    from envmanager.data.specs import ArraySpec, BehaviorSpec
    from envmanager.data.steps import (
        ActionInfo,
        AgentSteps,
        Batch,
        EnvironmentCommand,
        EnvironmentResponse,
        Lost,
        StepInfo,
        Transitions,
    )
    from envmanager.env_manager import EnvManager, EnvWorker, WorkerHost
    from envmanager.environment import EnvContext, EnvGroup, Environment
    from envmanager.errors import (
        BadAction,
        BadObservation,
        CallStopped,
        ConfigError,
        ConnectionLost,
        EnvManagerError,
        EnvRaised,
        EpisodeNotBegun,
        ImportFailed,
        LostEpisode,
        ManagerClosed,
        MissingExtra,
        NotPlaced,
        NotWritten,
        ProtocolError,
        RestartsExhausted,
        ServerFull,
        StalePolicy,
        UsageError,
        WorkerDied,
        WorkerError,
        WorkerOutOfMemory,
        WorkerTimedOut,
    )
    from envmanager.observe.stats import ManagerStats, WorkerStats
    from envmanager.options import ResetConfig, RestartPolicy, Timeouts, Wait
    from envmanager.policy import Policy, RandomPolicy
    from envmanager.registry import ManagerOptions, make_manager
    from envmanager.rollouts import Rollout, Rollouts
    from envmanager.simple_env_manager import SimpleEnvManager
    from envmanager.subprocess_env_manager import SubprocessEnvManager
    from envmanager.system.guard import guarded
    from envmanager.system.interrupts import allow_interrupts
    from envmanager.tasks import GroupResult, Task, TaskResult, TaskSource, TaskTimes

__version__ = "0.1.0"
__all__ = [
    "ActionInfo", "AgentSteps", "ArraySpec", "AsyncioEnvManager", "BadAction", "BadObservation", "Batch",
    "BehaviorSpec", "CallStopped", "ConfigError", "ConnectionLost", "EnvContext", "EnvGroup", "EnvManager",
    "EnvManagerError", "EnvRaised", "EnvRecipe", "EnvWorker", "Environment", "EnvironmentCommand",
    "EnvironmentResponse", "EpisodeNotBegun", "GroupResult", "ImportFailed", "Lost", "LostEpisode", "ManagerClosed",
    "ManagerOptions", "ManagerStats", "MissingExtra", "NotPlaced", "NotWritten", "Policy", "ProtocolError",
    "RandomPolicy", "ResetConfig", "RestartPolicy", "RestartsExhausted", "Rollout", "Rollouts", "ServerFull",
    "SimpleEnvManager", "StalePolicy", "StepInfo", "SubprocessEnvManager", "Task", "TaskResult", "TaskSource",
    "TaskTimes", "Timeouts", "Transitions", "UsageError", "Wait", "WorkerDied", "WorkerError", "WorkerHost",
    "WorkerOutOfMemory", "WorkerStats", "WorkerTimedOut", "allow_interrupts", "as_environment", "derive_seed",
    "guarded", "make_manager",
]  # fmt: skip

_NAMES_OF = {
    "adapters.choosing": "as_environment",
    "adapters.recipes": "EnvRecipe",
    "coroutines.manager": "AsyncioEnvManager",
    "data.seeding": "derive_seed",
    "data.specs": "ArraySpec BehaviorSpec",
    "data.steps": "ActionInfo AgentSteps Batch EnvironmentCommand EnvironmentResponse Lost StepInfo Transitions",
    "env_manager": "EnvManager EnvWorker WorkerHost",
    "environment": "EnvContext EnvGroup Environment",
    "observe.stats": "ManagerStats WorkerStats",
    "options": "ResetConfig RestartPolicy Timeouts Wait",
    "policy": "Policy RandomPolicy",
    "registry": "ManagerOptions make_manager",
    "rollouts": "Rollout Rollouts",
    "simple_env_manager": "SimpleEnvManager",
    "subprocess_env_manager": "SubprocessEnvManager",
    "system.guard": "guarded",
    "system.interrupts": "allow_interrupts",
    "tasks": "GroupResult Task TaskResult TaskSource TaskTimes",
}
"""Public names by the module that defines them. All others are errors."""
_HOME_OF = dict.fromkeys(__all__, "errors") | {each: home for home, own in _NAMES_OF.items() for each in own.split()}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'envmanager' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"envmanager.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
