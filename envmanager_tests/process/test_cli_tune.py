"""``envmanager tune`` as a process: it ends in time, leaves a config that runs, and can be stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envmanager.cli.app import run_command_line
from envmanager.cli.config_files import load_config
from envmanager.cli.tune import RESTARTS
from envmanager.errors import WorkerDied
from envmanager.placing.probing import ProbeEnded

COMMAND = str(Path(sys.executable).with_name("envmanager"))
TIMEOUT_S = 300

ENVS = """
import gymnasium, math, numpy as np, os, random, time

class Noop(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None): return np.zeros(4, np.float32), {}
    def step(self, action): return np.zeros(4, np.float32), 0.0, False, False, {}

class Sleeping(Noop):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)

class Slow(Noop):
    def step(self, action):
        time.sleep(3)
        return super().step(action)

class Faulty(Noop):
    def step(self, action): raise ValueError("the robot fell over")

class Rarely(Noop):
    n_steps = 0
    def step(self, action):
        self.n_steps += 1
        if self.n_steps == 300: os._exit(3)  # by count, so that the probe finds it on a busy machine too
        return super().step(action)

class Later(Noop):
    '''Outlives a probe of half a second.'''
    n_steps = 0
    def step(self, action):
        time.sleep(0.005)
        self.n_steps += 1
        if self.n_steps == 120: os._exit(3)
        return super().step(action)

class DyingInReset(Noop):
    def reset(self, *, seed=None, options=None): os._exit(5)

class HangingInReset(Noop):
    def reset(self, *, seed=None, options=None): time.sleep(10_000)

class Telling(Noop):
    '''Says when it has been tried for so long that something was measured; a probe takes half a second.'''
    said_at = math.inf
    def reset(self, **options):
        self.said_at = time.monotonic() + 2
        return super().reset(**options)
    def step(self, action):
        if time.monotonic() > self.said_at:
            self.said_at = math.inf
            print("stepping", flush=True)
        return super().step(action)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "some_envs.py").write_text(ENVS)
    return tmp_path


def tune(folder, *arguments):
    words = [COMMAND, "tune", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.load  # `make test` runs what docs/command-line.md says of it
def test_the_best_is_written_as_a_config_that_runs(folder):
    started = time.monotonic()
    done = tune(folder, "--env", "some_envs:Noop", "--n-envs", 4, "--seconds", 5, "--out", "best.toml")
    took_s = time.monotonic() - started

    assert (done.returncode, done.stderr) == (0, "")
    assert took_s < 5 + 120, "a busy machine may take long to start a process, but not for ever"
    assert load_config(folder / "best.toml")["manager"]["n_envs"] == 4
    assert "run it: envmanager run best.toml" in done.stdout
    run = subprocess.run(
        [COMMAND, "run", "best.toml", "--steps", "100"], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.load
def test_without_a_file_the_command_is_said(folder):
    done = tune(folder, "--env", "some_envs:Noop", "--n-envs", 2, "--seconds", 4)

    assert done.returncode == 0, done.stderr
    assert "run it: envmanager run --env some_envs:Noop --manager " in done.stdout


def test_when_the_time_is_too_short_for_a_step_that_is_said(folder):
    started = time.monotonic()
    done = tune(folder, "--env", "some_envs:Slow", "--n-envs", 2, "--seconds", 1)

    assert done.returncode == 2
    assert "--seconds" in done.stderr
    assert time.monotonic() - started < 120


def test_an_environment_that_fails_ends_it_with_1(folder):
    done = tune(folder, "--env", "some_envs:Faulty", "--n-envs", 2, "--seconds", 5)

    assert done.returncode == 1
    assert "the robot fell over" in done.stderr


def tune_here(monkeypatch, folder, *arguments):
    """The exit code of the command, run in this process."""
    monkeypatch.chdir(folder)
    return run_command_line(["tune", "--plain", *map(str, arguments)])


def tune_for_long_enough(monkeypatch, folder, capsys, *arguments, seconds, until):
    """What the command printed, given more time while ``until(printed)`` is false: the machine may be busy."""
    for factor in (1, 4, 16):
        (folder / "died").unlink(missing_ok=True)  # by which an environment knows that it has died
        code = tune_here(monkeypatch, folder, *arguments, "--n-envs", 2, "--seconds", factor * seconds)
        out, err = capsys.readouterr()
        if code == 0 and until(out):
            break
    assert code == 0, err
    assert until(out), out
    return out, err


def test_workers_that_die_after_some_hundred_steps_are_replaced_and_counted(folder, monkeypatch, capsys):
    def has_restarted(out):
        return "restarts: " in out and "restarts" in load_config(folder / "best.toml")["manager"]

    arguments = "--env", "some_envs:Rarely", "--out", "best.toml"
    out, err = tune_for_long_enough(monkeypatch, folder, capsys, *arguments, seconds=2, until=has_restarted)

    assert "In process that would end the trainer, so only workers are tried." in err
    assert "best: 2 environments in " in out
    assert "in process" not in out
    assert load_config(folder / "best.toml")["manager"]["restarts"]["max_restarts"] == RESTARTS.max_restarts
    assert err.count("Warning: ") <= 2, "the probe, and the first of perhaps thousands of restarts"


def test_an_environment_that_would_end_this_process_does_not_end_the_command(folder, monkeypatch, capsys):
    told = "2 environments in this process: a failure in process would have ended the trainer (EXIT(3))"
    arguments = "--env", "some_envs:Later"
    out, _ = tune_for_long_enough(monkeypatch, folder, capsys, *arguments, seconds=4, until=lambda out: told in out)

    assert re.search(r"best: 2 environments in \d worker", out)


def test_an_environment_that_always_dies_ends_it_with_1_and_the_reason(folder, monkeypatch, capsys):
    (folder / "dying.py").write_text(ENVS.replace('raise ValueError("the robot fell over")', "os._exit(3)"))

    assert tune_here(monkeypatch, folder, "--env", "dying:Faulty", "--n-envs", 1, "--seconds", 1) == 1
    out, err = capsys.readouterr()
    assert "failed" in out
    assert err.count("worker 0 (env 0) died in step (EXIT(3)") == 1


def test_workers_that_died_in_one_round_and_live_in_the_next_do_not_end_it(folder, monkeypatch, capsys):
    """A trial is measured in each round by another manager, which may see no restart."""
    (folder / "once.py").write_text(
        ENVS + "class Once(Noop):\n"
        "    def step(self, action):\n"
        "        time.sleep(0.01)\n"
        "        if not os.path.exists('died'):\n"
        "            open('died', 'w').close()\n"
        "            os._exit(3)\n"
        "        return super().step(action)\n"
    )
    monkeypatch.setattr("envmanager.cli.tune.measure", ends_in_a_step)

    arguments = "--env", "once:Once"
    tune_for_long_enough(monkeypatch, folder, capsys, *arguments, seconds=1, until=lambda out: "restarts: " in out)


def ends_in_a_step(*_):
    raise ProbeEnded(WorkerDied(worker_id=0, env_ids=[0], phase="step", exit="EXIT(3)"), "step 1")


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("DyingInReset", "Error: worker 0 (env 0) died in reset (EXIT(5)"),
        ("HangingInReset", "its reset took longer than 1 s. If it is only slow, give it more time with --seconds"),
    ],
)
def test_an_environment_that_fails_in_its_first_reset_is_not_tried_for_ever(folder, monkeypatch, capsys, env, told):
    monkeypatch.setattr("envmanager.cli.tune.LEAST_PATIENCE_S", 1.0)

    assert tune_here(monkeypatch, folder, "--env", f"some_envs:{env}", "--n-envs", 2, "--seconds", 1) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.load)])
def test_stopped_it_keeps_the_best_so_far(folder, signum):
    words = [COMMAND, "tune", "--env", "some_envs:Telling", "--n-envs", "2", "--seconds", "600", "--out", "best.toml"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("stepping" in line for line in process.stdout), "it ended by itself"
        process.send_signal(signum)
        out, err = process.communicate(timeout=TIMEOUT_S)

    assert (process.returncode, err) == (128 + signum, "")
    assert "best: 2 environments" in out
    assert load_config(folder / "best.toml")["manager"]["n_envs"] == 2
