"""Tools for your own tests: fakes, contracts (test classes to inherit), faults, chaos, leak checks, environment checks.

The contracts need pytest. The fakes need no further library and start no process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from envmanager.importing import needed_by

if TYPE_CHECKING:
    from envmanager.check.environment import Finding, check_environment
    from envmanager.testing.contract import EnvironmentContract, ManagerContract
    from envmanager.testing.fakes import Die, EchoEnvironment, FakeEnvironment, FakeWorker, Fault, Raise, Sleep, Step
    from envmanager.testing.fault_contract import FaultContract
    from envmanager.testing.faults import FaultyEnvironment, faulty
    from envmanager.testing.injection import ChaosReport, Injection, chaos
    from envmanager.testing.leaks import Traces, nothing_left_behind
    from envmanager.testing.rewards import Verdict, check_lost_rollouts

_HOMES = {
    "contract": ["EnvironmentContract", "ManagerContract"],
    "envmanager.check.environment": ["Finding", "check_environment"],
    "fakes": ["Die", "EchoEnvironment", "FakeEnvironment", "FakeWorker", "Fault", "Raise", "Sleep", "Step"],
    "fault_contract": ["FaultContract"],
    "faults": ["FaultyEnvironment", "faulty"],
    "injection": ["ChaosReport", "Injection", "chaos"],
    "leaks": ["Traces", "nothing_left_behind"],
    "rewards": ["Verdict", "check_lost_rollouts"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  (in the order of the docs)
    "FakeWorker",
    "FakeEnvironment",
    "Step",
    "Sleep",
    "Raise",
    "Die",
    "EchoEnvironment",
    "ManagerContract",
    "EnvironmentContract",
    "FaultContract",
    "FaultyEnvironment",
    "Fault",
    "faulty",
    "chaos",
    "ChaosReport",
    "Injection",
    "check_environment",
    "Finding",
    "check_lost_rollouts",
    "Verdict",
    "Traces",
    "nothing_left_behind",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'envmanager.testing' has no attribute {name!r}")
    with needed_by(f"envmanager.testing.{name}", extra=None):
        return getattr(importlib.import_module(home if "." in home else f"envmanager.testing.{home}"), name)
