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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from envmanager import EnvManager

AnError = TypeVar("AnError", bound=Exception)

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "envmanager"
LINUX_ONLY = {
    *(f"processes.{name}" for name in ("helper", "native", "starting")),
    *(f"godot.{name}" for name in ("engine_host", "engine_link", "godot_rl")),
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


def the_transport_that_needs_linux_is_refused_elsewhere() -> None:
    if sys.platform == "linux":
        return
    from envmanager import SubprocessEnvManager, UsageError

    told = "no UsageError was raised"
    try:
        SubprocessEnvManager("CartPole-v1", 2, transport="native")
    except UsageError as error:
        told = str(error)
    assert 'transport="native" needs Linux' in told, told


def workers_step_as_environments_of_this_process_do() -> None:
    from envmanager import SimpleEnvManager, SubprocessEnvManager

    told: list[dict[int, list[Any]]] = []
    for make in (SimpleEnvManager, partial(SubprocessEnvManager, n_workers=2)):
        with make("CartPole-v1", 4, wait="all") as manager:
            play_at_random(manager)
            paths: dict[int, list[Any]] = defaultdict(list)
            for _ in range(50):
                for info in manager.step():
                    steps = info.current["default"]
                    for agent_id, obs in zip(steps.agent_id.tolist(), steps.obs.tolist(), strict=True):
                        paths[agent_id].append(obs)
            told.append(paths)
    assert sorted(map(len, told[1].values())) == [50] * 4
    assert told[0] == told[1], "the observations differ"


def an_error_of_an_environment_is_raised() -> None:
    from envmanager import EnvRaised
    from envmanager.testing.fakes import Raise
    from envmanager.testing.faults import faulty

    error = error_of(faulty(Raise(ValueError("gear 7 broke")), after=3, only_env=1), EnvRaised)
    assert (error.type_name, error.env_ids) == ("ValueError", (1,)), error
    assert "Traceback" in error.remote_traceback


def a_death_is_reported_with_the_exit_code() -> None:
    from envmanager import WorkerDied
    from envmanager.testing.fakes import Die
    from envmanager.testing.faults import faulty

    error = error_of(faulty(Die(7), after=3, only_env=1), WorkerDied)
    assert (error.cause, error.env_ids) == ("EXIT(7)", (1,)), error


def a_hang_is_ended_at_its_deadline() -> None:
    from envmanager import Timeouts, WorkerTimedOut
    from envmanager.testing.fakes import Sleep
    from envmanager.testing.faults import faulty

    began = time.perf_counter()
    error = error_of(faulty(Sleep(600), after=3, only_env=1), WorkerTimedOut, timeouts=Timeouts(step_s=5))
    assert (error.timeout_s, error.env_ids) == (5, (1,)), error
    assert time.perf_counter() - began < 60


def a_dead_worker_is_replaced_and_the_other_goes_on() -> None:
    from envmanager import SubprocessEnvManager
    from envmanager.testing.fakes import Die
    from envmanager.testing.faults import faulty

    with SubprocessEnvManager(faulty(Die(7), after=3, only_env=1, only_generation=0), 2) as manager:
        play_at_random(manager)
        n_steps, lost = Counter[int](), []
        while min(n_steps[0], n_steps[1]) < 20:
            for info in manager.step():
                n_steps[info.worker_id] += 1
                lost += [] if info.lost is None else [info.worker_id]
        generations = [worker.generation for worker in manager.stats().workers]
    assert (lost, generations) == ([1], [0, 1]), (lost, generations)


def no_process_is_left_after_close() -> None:
    pids = [int(word) for word in output_of([sys.executable, "-c", f"{STARTS}\nmanager.close()"]).split()]
    assert len(pids) == 2
    await_end(pids)


def workers_end_with_a_trainer_that_is_killed() -> None:
    with script_running(f"{STARTS}\nmanager.step()") as trainer:
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 2
        trainer.kill()
        trainer.wait(LIMIT_S)
        await_end(pids)


STARTS = """
import os
from envmanager import SubprocessEnvManager, Timeouts
from envmanager.policy import RandomPolicy
from envmanager.testing.fakes import Sleep
from envmanager.testing.faults import faulty

manager = SubprocessEnvManager(faulty(Sleep(600)), 2, timeouts=Timeouts(step_s=600))
manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
manager.reset()
print(*manager.call(lambda env: os.getpid()), flush=True)
"""
"""Starts two workers that hang in their first step, and prints their numbers."""
INTERRUPTED = """
import functools, signal, threading, time

def interrupt():
    time.sleep(1)
    INTERRUPT

threading.Thread(target=interrupt).start()
began = time.perf_counter()
try:
    manager.step()
except KeyboardInterrupt:
    print("interrupted", time.perf_counter() - began < 60)
manager.close()
"""


def a_ctrl_c_ends_a_wait_for_workers() -> None:
    interrupt = (
        "signal.raise_signal(signal.SIGINT)" if sys.platform == "win32" else "os.kill(os.getpid(), signal.SIGINT)"
    )
    told = output_of([sys.executable, "-c", (STARTS + INTERRUPTED).replace("INTERRUPT", interrupt)])
    assert "interrupted True" in told, told


def a_ctrl_c_of_the_console_reaches_the_trainer_alone() -> None:
    if sys.platform == "win32":
        script = (STARTS + INTERRUPTED).replace("INTERRUPT", "os.kill(0, signal.CTRL_C_EVENT)")
        options = {"creationflags": subprocess.CREATE_NEW_CONSOLE}
    else:
        script = (STARTS + INTERRUPTED).replace("INTERRUPT", "os.killpg(0, signal.SIGINT)")
        options = {"start_new_session": True}
    with script_running(script, **options) as trainer:
        told, _ = trainer.communicate(timeout=LIMIT_S)
    assert "interrupted True" in told, f"exit code {trainer.returncode}: {told}"


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


def the_scripts_of_readme_and_quickstart_run_without_a_guard() -> None:
    for page, printed in (
        (ROOT / "README.md", "episodes, mean return"),
        (ROOT / "docs" / "quickstart.md", "terminated"),
    ):
        script = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
        assert "SubprocessEnvManager" in script
        assert "__main__" not in script
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "script.py"
            path.write_text(script, encoding="utf-8")
            assert printed in output_of([sys.executable, str(path)])


def the_command_line_runs_checks_and_explains() -> None:
    for kind in ("simple", "subprocess"):
        options = ["--env", "CartPole-v1", "--n-envs", "2", "--manager", kind, "--steps", "200"]
        told = output_of([*COMMAND, "run", *options])
        assert "all steps taken" in told, told
    told = output_of([*COMMAND, "check", "--env", "CartPole-v1"])
    assert "no problems found" in told, told
    told = output_of([*COMMAND, "run", "--env", "CartPole-v1", "--manager", "auto", "--explain", "--steps", "200"])
    assert "measured: a step of an environment takes" in told, told


def files_are_replaced_and_folders_locked() -> None:
    from envmanager import UsageError
    from envmanager.observe.files import write_atomically
    from envmanager.training.runs import folder

    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        with folder.held(run, resume=False, force=False):
            for text in ("first", "µ"):
                write_atomically(run / "config.json", text)
            told = "two training runs may write into one folder"
            try:
                with folder.held(run, resume=False, force=True):
                    pass
            except UsageError as error:
                told = str(error)
            assert f"a training run is in progress in {run}" in told, told
        with folder.held(run, resume=False, force=True):
            assert not (run / "config.json").exists()
        assert (Path(temporary) / "run.1" / "config.json").read_text(encoding="utf-8") == "µ"


def the_contract_of_managers_holds_in_this_process() -> None:
    if any(importlib.util.find_spec(library) is None for library in ("pytest", "pytest_mock", "hypothesis")):
        raise Skipped("pytest, pytest-mock or hypothesis is not installed")
    # The interpreter under Wine has an older Typer.
    options = "-p no:cacheprovider -W ignore::DeprecationWarning envmanager_tests/contract/test_managers.py"
    told = output_of([sys.executable, "-m", "pytest", *options.split(), "-k", "TestSimpleEnvManager"])
    assert " passed" in told, told


CONFIG = """
[manager]
kind = "{kind}"
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
    for kind in ("simple", "subprocess"):
        with tempfile.TemporaryDirectory() as folder:
            config, run = Path(folder) / "config.toml", Path(folder) / "run"
            config.write_text(CONFIG.replace("{kind}", kind), encoding="utf-8")
            output_of([*COMMAND, "train", str(config), "--dir", str(run)])
            assert list((run / "checkpoints").glob("*/state.json"))
            told = output_of([*COMMAND, "evaluate", str(run), "--episodes", "2"])
            assert "return" in told, told


class Skipped(Exception):
    """Raised by a check that needs what is not installed."""


def play_at_random(manager: EnvManager) -> None:
    """Reset the manager, after it got a policy of random actions."""
    from envmanager.policy import RandomPolicy

    for name, spec in manager.behavior_specs.items():
        manager.set_policy(name, RandomPolicy(spec, seed=0))
    manager.reset(seed=0)


def error_of(factory: Any, error_class: type[AnError], **options: Any) -> AnError:
    """Return the error that steps of two workers raise, without restarts."""
    from envmanager import RestartPolicy, SubprocessEnvManager

    with SubprocessEnvManager(factory, 2, restarts=RestartPolicy(max_restarts=0), **options) as manager:
        play_at_random(manager)
        try:
            until = time.monotonic() + LIMIT_S
            while time.monotonic() < until:
                manager.step()
        except error_class as error:
            return error
    raise AssertionError(f"no {error_class.__name__} was raised")


def await_end(pids: list[int]) -> None:
    """Wait until these processes have ended. Raises AssertionError after LIMIT_S."""
    from envmanager.testing.leaks import state_of

    assert state_of(os.getpid())
    limit = time.monotonic() + LIMIT_S
    while running := [pid for pid in pids if state_of(pid) not in ("", "Z")]:
        assert time.monotonic() < limit, f"{running} still run"
        time.sleep(0.1)


@contextmanager
def script_running(script: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a script until the context ends, with its output in a pipe."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


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
    the_transport_that_needs_linux_is_refused_elsewhere,
    workers_step_as_environments_of_this_process_do,
    an_error_of_an_environment_is_raised,
    a_death_is_reported_with_the_exit_code,
    a_hang_is_ended_at_its_deadline,
    a_dead_worker_is_replaced_and_the_other_goes_on,
    no_process_is_left_after_close,
    workers_end_with_a_trainer_that_is_killed,
    an_interrupt_is_deferred,
    a_ctrl_c_ends_a_wait_for_workers,
    a_ctrl_c_of_the_console_reaches_the_trainer_alone,
    all_processes_have_one_clock,
    the_scripts_of_readme_and_quickstart_run_without_a_guard,
    the_command_line_runs_checks_and_explains,
    files_are_replaced_and_folders_locked,
    the_contract_of_managers_holds_in_this_process,
    a_training_writes_checkpoints_and_can_be_played,
)


def main(*words: str) -> int:
    """Run all checks, or those whose names contain one of ``words``; return how many failed."""
    print(f"Python {sys.version.split()[0]} on {sys.platform}")
    n_failed = 0
    for check in CHECKS:
        if words and not any(word in check.__name__ for word in words):
            continue
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
    sys.exit(main(*sys.argv[1:]))
