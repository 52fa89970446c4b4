"""What works on Windows and macOS, as far as a simulation tells: on Windows, worker processes cannot be simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import envmanager
from envmanager_tests.other_systems import SYSTEMS, lacking, lacking_modules, run_on

OTHERS = ("gymnasium", "mpe2", "pettingzoo", "psutil", "pytest", "hypothesis", "rich", "typer", "yaml")
"""Other people's modules, but for those that need PyTorch: these are tried with the trainings."""
NEED_TORCH = ("torch", "stable_baselines3", "ray", "mlagents", "mlagents_envs")
LINUX_ONLY = {
    *(f"processes.{name}" for name in ("helper", "native", "starting")),
    *(f"godot.{name}" for name in ("engine_host", "engine_link")),
}
"""Modules that need what Windows lacks. Each is imported when processes are started, and not before."""

SCRIPT = """
import importlib, json, sys

failed = {}
for name in MODULES:
    try:
        importlib.import_module(name)
    except Exception as error:
        if type(error).__name__ != "MissingExtra":
            failed[name] = f"{type(error).__name__}: {error}"

from envmanager import SimpleEnvManager, SubprocessEnvManager, UsageError, make_manager
from envmanager.policy import RandomPolicy

def play(manager):
    with manager:
        for name, spec in manager.behavior_specs.items():
            manager.set_policy(name, RandomPolicy(spec, seed=0))
        manager.reset()
        return sum(len(manager.step()) for _ in range(50))

def refusal(make):
    try:
        make()
    except UsageError as error:
        return str(error)

told = {
    "failed": failed,
    "simple": play(SimpleEnvManager("CartPole-v1", 2)),
    "auto": play(make_manager({"kind": "auto", "env": "CartPole-v1", "n_envs": 2})),
    "portable": sys.platform == "darwin" and play(SubprocessEnvManager("CartPole-v1", 2, wait="all")),
    "native": refusal(lambda: SubprocessEnvManager("CartPole-v1", 2, transport="native")),
    "godot": refusal(lambda: make_manager({"kind": "godot", "env": "demo:rolling_ball"})),
}
print(json.dumps(told))
"""


def modules() -> list[str]:
    root = Path(envmanager.__file__).parent
    paths = (path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py")))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("system", SYSTEMS)
def test_managers_work_and_what_needs_linux_says_so(system: str) -> None:
    script = f"MODULES = {modules()!r}\n{SCRIPT}"
    told = json.loads(run_on(system, script, preloaded=OTHERS, absent=NEED_TORCH))

    failed = {name.removeprefix("envmanager."): error for name, error in told["failed"].items()}
    allowed = LINUX_ONLY if system == "windows" else set()
    assert {name: error for name, error in failed.items() if name not in allowed} == {}
    assert told["simple"] == told["auto"] == 50
    assert told["portable"] == (100 if system == "macos" else False)
    assert 'transport="native" needs Linux' in told["native"]
    assert "GodotEnvManager needs Linux" in told["godot"]


def test_the_simulation_takes_away_what_is_known_to_be_lacking() -> None:
    windows, macos = lacking("win32"), lacking("darwin")
    assert {"fork", "register_at_fork", "pidfd_open", "eventfd", "memfd_create", "geteuid"} <= set(windows["os"])
    assert {"poll", "epoll"} <= set(windows["select"])
    assert {"SIGKILL", "SIGUSR1", "SIGRTMAX", "pthread_sigmask"} <= set(windows["signal"])
    assert {"fcntl", "resource"} <= set(lacking_modules("win32"))
    assert {"pidfd_open", "eventfd", "memfd_create", "sched_getaffinity"} <= set(macos["os"])
    assert {"SIGRTMIN", "SIGRTMAX"} <= set(macos["signal"])
    assert "epoll" in macos["select"]
    assert "SIGUSR1" not in macos["signal"]
    assert lacking_modules("darwin") == []
