"""First steps on a system that has no pytest: ``python -m envmanager_tests.first_steps``, as ``make test-wine`` does.

Each check prints a line, and its traceback if it fails. The exit code is the number of checks that failed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "envmanager"
LINUX_ONLY = {
    *(f"processes.{name}" for name in ("helper", "native", "starting")),
    *(f"godot.{name}" for name in ("engine_host", "engine_link")),
}
"""Modules that need what Windows lacks. Each is imported when processes are started, and not before."""
COMMAND = [sys.executable, "-c", "import sys; from envmanager.cli import main; sys.exit(main())"]
"""The command ``envmanager``."""
LIMIT_S = 300


def modules() -> list[str]:
    """Return the names of all modules of the package."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in sorted(PACKAGE.rglob("*.py")))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def failing_imports() -> dict[str, str]:
    """Return the modules that cannot be imported here, and why, except those whose libraries are not installed."""
    failed = {}
    for name in modules():
        try:
            importlib.import_module(name)
        except Exception as error:
            if type(error).__name__ != "MissingExtra":
                failed[name.removeprefix("envmanager.")] = f"{type(error).__name__}: {error}"
    return failed


def every_module_can_be_imported() -> None:
    allowed = LINUX_ONLY if sys.platform == "win32" else set()
    failed = {name: error for name, error in failing_imports().items() if name not in allowed}
    assert not failed, failed


def environments_step_in_this_process() -> None:
    from envmanager import SimpleEnvManager
    from envmanager.policy import RandomPolicy

    with SimpleEnvManager("CartPole-v1", 2) as manager:
        for name, spec in manager.behavior_specs.items():
            manager.set_policy(name, RandomPolicy(spec, seed=0))
        manager.reset(seed=0)
        assert sum(len(manager.step()) for _ in range(200)) == 200
        step_s = manager.stats().workers[0].step_time_p50_s
        assert 0 < step_s < 1, f"a step takes {step_s} s: the clock is too coarse"


def worker_processes_say_what_they_need() -> None:
    if sys.platform == "linux":
        return
    from envmanager import SubprocessEnvManager, UsageError

    told = "no UsageError was raised"
    try:
        SubprocessEnvManager("CartPole-v1", 2)
    except UsageError as error:
        told = str(error)
    assert "SimpleEnvManager" in told, told


def an_interrupt_is_deferred() -> None:
    from envmanager.system.interrupts import defer_interrupts

    went_on = was_raised = False
    try:
        with defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            went_on = True
    except KeyboardInterrupt:
        was_raised = True
    assert went_on, "the interrupt was raised in the middle of the block"
    assert was_raised, "the interrupt was lost"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def all_processes_have_one_clock() -> None:
    before_ns = time.perf_counter_ns()
    told = output_of([sys.executable, "-c", "import time; print(time.perf_counter_ns())"])
    assert before_ns < int(told) < time.perf_counter_ns(), f"{told} is not after {before_ns}"


def the_quickstart_runs_without_a_guard() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert "SubprocessEnvManager" in script
    assert "__main__" not in script
    if sys.platform != "linux":
        script = script.replace("SubprocessEnvManager", "SimpleEnvManager")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quickstart.py"
        path.write_text(script, encoding="utf-8")
        assert "terminated" in output_of([sys.executable, str(path)])


def the_command_line_runs_and_checks_environments() -> None:
    told = output_of(
        [*COMMAND, *["run", "--env", "CartPole-v1", "--n-envs", "2", "--manager", "simple", "--steps", "200"]]
    )
    assert "200 of 200 environment steps" in told, told
    told = output_of([*COMMAND, *["check", "--env", "CartPole-v1"]])
    assert "no problems found" in told, told


def files_are_replaced_and_folders_locked() -> None:
    from envmanager.observe.files import write_anew
    from envmanager.training import run_lock

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run" / "config.toml"
        with run_lock.held(path.parent):
            for text in ("first", "µ"):
                write_anew(path, text)
        assert path.read_text(encoding="utf-8") == "µ"


def the_contract_of_managers_holds_in_this_process() -> None:
    if any(importlib.util.find_spec(library) is None for library in ("pytest", "pytest_mock", "hypothesis")):
        raise Skipped("pytest, pytest-mock or hypothesis is not installed")
    # The interpreter under Wine has an older Typer.
    options = "-p no:cacheprovider -W ignore::DeprecationWarning envmanager_tests/contract/test_managers.py"
    told = output_of([sys.executable, "-m", "pytest", *options.split(), "-k", "TestSimpleEnvManager"])
    assert " passed" in told, told


CONFIG = """
[manager]
kind = "simple"
env = "CartPole-v1"
n_envs = 2
wait = "all"

[training]
steps = 400
evaluation_episodes = 1
checkpoint_every = 100

[trainers.default]
kind = "dqn"
hidden = [8]
learning_starts = 20
capacity = 1000
"""


def a_training_writes_checkpoints_and_can_be_played() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Skipped("PyTorch is not installed")
    with tempfile.TemporaryDirectory() as folder:
        config, run = Path(folder) / "config.toml", Path(folder) / "run"
        config.write_text(CONFIG, encoding="utf-8")
        output_of([*COMMAND, "train", str(config), "--dir", str(run)])
        assert list((run / "checkpoints").glob("*/state.json"))
        told = output_of([*COMMAND, "evaluate", str(run), "--episodes", "2"])
        assert "return" in told, told


class Skipped(Exception):
    """Raised by a check that needs what is not installed."""


def output_of(command: list[str]) -> str:
    """Return what a command prints. Raises AssertionError with the end of its errors if its exit code is not 0."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env=environ,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


CHECKS: tuple[Callable[[], None], ...] = (
    every_module_can_be_imported,
    environments_step_in_this_process,
    worker_processes_say_what_they_need,
    an_interrupt_is_deferred,
    all_processes_have_one_clock,
    the_quickstart_runs_without_a_guard,
    the_command_line_runs_and_checks_environments,
    files_are_replaced_and_folders_locked,
    the_contract_of_managers_holds_in_this_process,
    a_training_writes_checkpoints_and_can_be_played,
)


def main() -> int:
    """Run all checks; return how many failed."""
    print(f"Python {sys.version.split()[0]} on {sys.platform}")
    n_failed = 0
    for check in CHECKS:
        began = time.perf_counter()
        try:
            check()
        except Skipped as reason:
            verdict = f"skipped, {reason}"
        except Exception:
            n_failed += 1
            verdict = f"FAILED\n{traceback.format_exc()}"
        else:
            verdict = "ok"
        print(f"{time.perf_counter() - began:6.2f} s  {check.__name__.replace('_', ' ')}: {verdict}", flush=True)
    return n_failed


if __name__ == "__main__":
    sys.exit(main())
