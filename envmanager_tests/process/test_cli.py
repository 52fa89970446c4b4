"""The installed command as a process: exit codes, files, signals, terminals and pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from envmanager.cli.app import run_command_line
from envmanager_tests.start_methods import MARKED_START_METHODS

SUITE = "cli portable start-methods faults"

COMMAND = str(Path(sys.executable).with_name("envmanager"))
TIMEOUT_S = 300
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

ENVS = """
import os
import gymnasium, numpy as np

class Announcing(gymnasium.Wrapper):
    '''Says when its second step is taken.'''
    n_steps = 0
    def step(self, action):
        self.n_steps += 1
        if self.n_steps == 2:
            print("stepping", flush=True)
        return super().step(action)

class AnnouncingInAPipe(gymnasium.Wrapper):
    '''Says the same in a pipe of that name: what an environment on trial prints is shown only when it fails.'''
    def step(self, action):
        if not os.path.exists("has_stepped"):
            os.mkdir("has_stepped")
            with open("stepping", "w") as pipe:
                pipe.write("stepping")
        return super().step(action)

class Stubborn(Announcing):
    '''Cannot be interrupted, and takes its time.'''
    def step(self, action):
        result = super().step(action)
        if self.n_steps == 2:
            import signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        return result

class Faulty(gymnasium.Wrapper):
    def step(self, action):
        raise ValueError("the robot fell over")

class Mortal(gymnasium.Wrapper):
    '''Ends its process in its third step.'''
    n_steps = 0
    def step(self, action):
        self.n_steps += 1
        if self.n_steps == 3:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

def mortal_once(context): return (announcing if context.generation or context.env_id else mortal)()
def mortal_for_ever(context): return (announcing if context.env_id else mortal)()
def mortal(): return Mortal(gymnasium.make("CartPole-v1"))

def slow_to_start():
    import time
    print("stepping", flush=True)
    time.sleep(1000)

def announcing(): return Announcing(gymnasium.make("CartPole-v1"))
def announcing_in_a_pipe(): return AnnouncingInAPipe(gymnasium.make("CartPole-v1"))
def stubborn(): return Stubborn(gymnasium.make("CartPole-v1"))
def faulty(): return Faulty(gymnasium.make("CartPole-v1"))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "some_envs.py").write_text(ENVS)
    return tmp_path


def command(*arguments):
    return [COMMAND, *map(str, arguments)]


def run(folder, *arguments):
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)


def start(folder, *arguments):
    """The command in a session of its own, as a shell's job has it; untraced, because it will get signals."""
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until_stepping(process):
    for line in process.stdout:
        if "stepping" in line:
            return
    pytest.fail(f"it ended before it took a step: {process.stderr.read()}")


def family_of(process):
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes):
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []


def test_a_run_ends_with_0_and_writes_the_same_returns_in_any_manager_for_a_seed(folder):
    summaries = []
    for kind in ("simple", "subprocess"):
        done = run(
            folder,
            *("run", "--env", "CartPole-v1", "--n-envs", 3, "--manager", kind),
            *("--steps", 300, "--seed", 1, "--wait", "all", "--out", "a.json"),
        )
        summary = json.loads((folder / "a.json").read_text())
        assert (done.returncode, done.stderr) == (0, "")
        assert all(character.isprintable() or character == "\n" for character in done.stdout), "it is no terminal"
        assert (summary["ended"], summary["env_steps"]) == ("done", 300)
        assert sorted(summary["episode_returns"]) == ["0", "1", "2"]
        summaries.append(summary)
    assert summaries[0]["episode_returns"] == summaries[1]["episode_returns"]


def test_python_runs_the_package_as_the_command(folder):
    arguments = [
        sys.executable,
        "-m",
        "envmanager",
        "run",
        "--env",
        "CartPole-v1",
        "--steps",
        "9",
        "--policy",
        "nothing",
    ]
    run = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 2
    assert "nothing" in run.stderr


def test_a_yaml_config_runs(folder):
    (folder / "run.yaml").write_text(
        "manager: {env: CartPole-v1, n_envs: 4, n_workers: 2, wait: all, timeouts: {step_s: 60}}\nrun: {steps: 100}\n"
    )

    done = run(folder, "run", "run.yaml")

    assert done.returncode == 0
    assert "4 environments in 2 workers, manager subprocess" in done.stdout


@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_worker_that_dies_is_replaced_and_the_run_goes_on(folder, start_method):
    done = run(
        folder,
        *("run", "--env", "some_envs:mortal_once", "--n-envs", 2, "--steps", 300, "--wait", "all", "--plain"),
        *("--start-method", start_method, "--out", "a.json"),
    )

    summary = json.loads((folder / "a.json").read_text())
    assert done.returncode == 0
    assert "Warning: worker 0 died in step (SIGKILL); restart 1 (at most 3 in 60 s)\n" in done.stderr
    assert "1 episode, 1 worker step" in done.stdout
    assert summary["ended"] == "done"
    assert (summary["restarts"], summary["episodes_lost"], summary["steps_lost"]) == (1, 1, 1)
    assert [worker["restarts"] for worker in summary["workers"]] == [1, 0]


def test_the_example_of_make_run_goes_on_after_its_crash(folder):
    config = "uneven_simulators.toml"
    for file in (EXAMPLES / config, EXAMPLES / "uneven_simulators.py"):
        shutil.copy(file, folder)

    done = run(folder, "run", config, "--steps", 3000, "--plain", "--out", "a.json")

    workers = json.loads((folder / "a.json").read_text())["workers"]
    assert done.returncode == 0
    assert "worker 2 died in step (SIGSEGV); restart 1 (at most " in done.stderr
    assert [worker["worker_id"] for worker in workers if worker["restarts"]] == [2]
    assert min(workers, key=lambda worker: worker["steps"])["worker_id"] == 5


def test_a_worker_may_be_dropped_and_the_run_goes_on(folder):
    (folder / "run.toml").write_text(
        '[manager]\nenv = "some_envs:mortal_for_ever"\nn_envs = 2\n[manager.restarts]\nthen = "drop"\nbackoff_s = 0.0\n'
    )

    done = run(folder, "run", "run.toml", "--restarts", 1, "--steps", 2000, "--out", "a.json")

    summary = json.loads((folder / "a.json").read_text())
    assert done.returncode == 0
    assert "Error: worker 0 is dropped" in done.stderr
    assert "1 of 2 workers" in done.stdout
    assert [(worker["restarts"], worker["dropped"]) for worker in summary["workers"]] == [(1, True), (0, False)]


@pytest.mark.parametrize(("restarts", "times"), [(0, 0), (2, 2)])
def test_without_restarts_left_the_run_ends_with_the_workers_error(folder, restarts, times):
    done = run(folder, "run", "--env", "some_envs:mortal", "--restarts", restarts, "--out", "a.json")

    assert done.returncode == 1
    assert json.loads((folder / "a.json").read_text())["restarts"] == times
    assert "Error: worker 0 (env 0) " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["run", "--env", "Nothing-v0"], 2, "Gymnasium knows no environment"),
        (["run", "--env", "CartPole-v1", "--out", "no/where.json"], 2, "there is no directory no"),
        (["check", "--env", "some_envs:nothing"], 2, "cannot be found"),
    ],
)
def test_what_goes_wrong_decides_the_exit_code(folder, arguments, exit_code, message, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert run_command_line(arguments) == exit_code
    assert message in capsys.readouterr().err
    sys.modules.pop("some_envs", None)


def test_the_exit_code_of_a_process_is_that_of_its_command(folder):
    done = run(folder, "run", "--no-such-option")

    assert done.returncode == 2
    assert "No such option" in done.stderr


def test_an_environments_error_comes_with_the_workers_traceback_and_no_other(folder):
    done = run(folder, "run", "--env", "some_envs:faulty", "--n-envs", 2)

    assert done.returncode == 1
    assert "ValueError: the robot fell over" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "some_envs.py" in done.stderr


def test_check_runs_an_environment_of_the_present_directory(folder):
    done = run(folder, "check", "--env", "some_envs:announcing", "--steps", 60)

    assert (done.returncode, done.stderr) == (0, "")
    assert "no problems found" in done.stdout


@pytest.mark.sample("2-130")
@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_a_signal_closes_everything_and_shows_what_was_done(folder, signum, exit_code, start_method):
    process = start(
        folder,
        *("run", "--env", "some_envs:announcing", "--n-envs", 2, "--steps", 10**9, "--out", "a.json"),
        *("--start-method", start_method),
    )
    with process:
        wait_until_stepping(process)
        family = family_of(process)
        os.killpg(process.pid, signum)
        out, err = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == exit_code
    assert "interrupted" in out
    assert err == ""
    assert json.loads((folder / "a.json").read_text())["ended"] == "interrupted"
    assert_gone(family)


@pytest.mark.parametrize("env", ["stubborn", "slow_to_start"])
def test_ctrl_c_ends_a_run_whose_environment_hangs(folder, env):
    process = start(folder, "run", "--env", f"some_envs:{env}", "--steps", 10**9)
    with process:
        wait_until_stepping(process)
        family = family_of(process)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)

    assert (process.returncode, err) == (130, "")
    assert_gone(family)


def test_ctrl_c_ends_a_check_without_a_traceback_and_its_worker_with_it(folder):
    os.mkfifo(folder / "stepping")
    process = start(folder, "check", "--env", "some_envs:announcing_in_a_pipe", "--steps", 10**8)
    with process:
        assert (folder / "stepping").read_text() == "stepping"
        family = family_of(process)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 130
    assert "Traceback" not in err
    assert_gone(family)


def test_a_reader_that_goes_away_ends_the_run_quietly(folder):
    process = start(folder, "run", "--env", "some_envs:announcing", "--steps", 10**9)
    with process:
        wait_until_stepping(process)
        family = family_of(process)
        process.stdout.close()
        process.wait(timeout=TIMEOUT_S)
        err = process.stderr.read()

    assert process.returncode == 1
    assert err == ""
    assert_gone(family)


def in_a_terminal(folder, *arguments):
    """The exit code and all that a terminal gets to see."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command(*arguments), cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # EIO: nobody has the other side open any more
            break
    os.close(ours)
    return process.wait(timeout=TIMEOUT_S), seen.decode()


def test_a_terminal_gets_a_live_display_and_what_happens_to_a_worker_is_told_above_it(folder):
    exit_code, seen = in_a_terminal(
        folder, *("run", "--env", "some_envs:mortal_once", "--n-envs", 2, "--steps", 300, "--wait", "all")
    )

    first = seen.index("Warning: worker 0 died in step (SIGKILL)")
    assert exit_code == 0
    assert re.search(r"(\x1b\[1A\x1b\[2K)+(\x1b\[\d+m)*$", seen[:first]), "the drawing was not taken away before"
    assert "/300 env steps" in seen[first:], "nor drawn again below"
    assert "\x1b[?25l" in seen[:first]  # the cursor is hidden while it draws …
    assert "\x1b[?25h" in seen[first:]  # … and shown again


@pytest.mark.parametrize("kind", ["subprocess", "simple"])
def test_what_environments_print_is_shown_above_the_live_display(folder, kind):
    arguments = ("run", "--env", "some_envs:announcing", "--n-envs", 2, "--manager", kind, "--steps", 300)
    exit_code, seen = in_a_terminal(folder, *arguments)

    before = [seen[: found.start()] for found in re.finditer("stepping\r\n", seen)]
    assert exit_code == 0
    assert len(before) == 2
    assert all(re.search(r"(\n|\x1b\[2K)(\x1b\[\d+m)*$", each) for each in before), "it stands in a line of the table"


def test_plain_is_plain_in_a_terminal_too(folder):
    exit_code, seen = in_a_terminal(folder, "run", "--env", "CartPole-v1", "--plain", "--steps", 100)

    assert exit_code == 0
    assert "100 of 100" in seen
    assert "\x1b" not in seen


def test_without_its_libraries_the_command_says_what_to_install(folder):
    code = "import sys; sys.modules['rich'] = None; from envmanager.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)

    assert done.returncode == 1
    assert "pip install 'envmanager[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_configs_are_understood_without_the_libraries_of_the_command_line():
    code = (
        "import sys, envmanager; m = envmanager.make_manager({'kind': 'simple', 'env': 'CartPole-v1'}); m.close();"
        "print({'typer', 'rich', 'yaml', 'click'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)

    assert (done.returncode, done.stdout.strip()) == (0, "set()")


INTERRUPTED = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    '''Ctrl-C in the moment in which a module is first asked for; a library may catch what comes of it.'''
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if CAUGHT:
                    return
                raise

MODULE = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupting())
from envmanager.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "caught"),
    [
        *((module, False) for module in ("typer", "numpy", "envmanager.registry", "envmanager.training.runs.run")),
        *((module, True) for module in ("rich.console", "envmanager.registry", "torch")),
    ],
)
def test_ctrl_c_while_a_command_loads_ends_it_without_a_word(folder, module, caught):
    if module == "torch":
        pytest.importorskip("torch")
    (folder / "train.yaml").write_text("manager: {env: CartPole-v1}\ntrainers: {default: {kind: ppo}}\n")
    code = INTERRUPTED.replace("CAUGHT", str(caught))

    done = subprocess.run(
        [sys.executable, "-c", code, module, "train", "train.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not (folder / "runs").exists()
