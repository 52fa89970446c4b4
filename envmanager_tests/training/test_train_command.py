"""``envmanager train``: how a training run ends that is not ended as planned, and what it says then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envmanager.cli.app import run_command_line
from envmanager.hosts.descriptors import wait_for
from envmanager.training.runs import checkpoints

CONFIG = """
[manager]
kind = "simple"
env = "short_episodes:make"
n_envs = 2
[training]
steps = 64
evaluation_episodes = 2
[trainers.default]
kind = "ppo"
rollout = 64
hidden = [4]
"""

ENV = """
import gymnasium

class Wears(gymnasium.wrappers.TimeLimit):
    n_steps = 0
    def step(self, action):
        Wears.n_steps += 1
        if Wears.n_steps > 70: raise ValueError("worn out")
        return super().step(action)

def make():
    return Wears(gymnasium.make("CartPole-v1"), 10)
"""


def test_an_evaluation_may_have_more_restarts_than_the_training(
    tmp_path: Path, write_module: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_module("short_episodes", ENV.replace("> 70", "== 70"))
    restarts = 'restarts = { max_restarts = 0, on_exception = "restart" }'
    (tmp_path / "config.toml").write_text(
        CONFIG.replace("n_envs = 2", f"n_envs = 2\n{restarts}").replace("episodes = 2", "episodes = 0")
    )
    run = str(tmp_path / "run")
    assert run_command_line(["train", str(tmp_path / "config.toml"), "--dir", run, "--plain"]) == 0

    assert run_command_line(["evaluate", run, "--episodes", "2", "--restarts", "1"]) == 0
    assert "worn out; restart 1 (at most 1 in 60 s)" in capsys.readouterr().err


TALKS = """
import os
import gymnasium

class Talks(gymnasium.Wrapper):
    n_steps = 0
    def step(self, action):
        self.n_steps += 1
        print("step", self.n_steps, flush=True)
        if self.n_steps == 9: os._exit(3)
        return super().step(action)

def make(): return Talks(gymnasium.make("CartPole-v1"))
def silent(): return gymnasium.make("CartPole-v1")
"""


def test_what_workers_print_is_kept_in_the_runs_folder_and_its_end_is_in_the_error(
    tmp_path: Path, write_module: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    write_module("talks", TALKS)
    config, run = tmp_path / "config.toml", tmp_path / "run"
    one = CONFIG.replace("n_envs = 2", "n_envs = 1")  # of two workers, the other may be the first to die
    config.write_text(one.replace('"simple"', '"subprocess"').replace("short_episodes:make", "talks:make"))
    command = ["train", str(config), "--dir", str(run), "--plain", "--restarts", "0"]

    assert run_command_line(command) == 1
    out, err = capfd.readouterr()
    assert "step" not in out.replace("agent steps", "")
    assert "The end of its output:\nstep 1\n" in err
    assert "step 9\n" in (run / "logs" / "train" / "worker-0-0.log").read_text()
    assert "log_dir" not in json.loads((run / "config.json").read_text())["manager"]

    own = [
        sys.executable,
        "-m",
        "envmanager",
        *command,
        "--force",
        "--set",
        "manager.log_dir=",
    ]
    done = subprocess.run(
        own, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 1
    assert "step 9\n" in done.stdout
    assert not (run / "logs").exists()

    command = [*command, "--force", "--env", "talks:silent", "--set", "training.evaluation_episodes=0"]
    assert run_command_line(command) == 0
    assert "output" not in capfd.readouterr().out
    assert not (run / "logs").exists()


def test_a_training_is_traced(
    tmp_path: Path, write_module: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_module("short_episodes", ENV)
    (tmp_path / "config.toml").write_text(CONFIG.replace("episodes = 2", "episodes = 0"))
    trace = tmp_path / "t.json"

    assert (
        run_command_line(["train", f"{tmp_path}/config.toml", "--dir", f"{tmp_path}/run", "--trace", str(trace)]) == 0
    )
    assert json.loads(trace.read_text())
    assert f"trace       {trace}, for https://ui.perfetto.dev" in capsys.readouterr().out


def test_when_only_the_evaluation_fails_all_steps_are_said_to_be_saved(
    tmp_path: Path, write_module: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_module("short_episodes", ENV)
    (tmp_path / "config.toml").write_text(CONFIG)

    code = run_command_line(["train", str(tmp_path / "config.toml"), "--dir", str(tmp_path / "run"), "--plain"])

    assert code == 1
    assert capsys.readouterr().err.endswith("\nIts last checkpoint has all its agent steps.\n")


ENDLESS = """
manager: {kind: subprocess, env: CartPole-v1, n_envs: 2}
training: {steps: 100000000, checkpoint_every: 500}
trainers: {default: {kind: ppo, rollout: 64, hidden: [4]}}
"""

PARENT = """
import os, signal, subprocess, sys
training = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(training.pid, flush=True)
for line in training.stdout:
    if line.startswith("checkpoint"):
        print(flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
"""


class TestTheEndOfInput:
    @pytest.fixture
    def command(self, tmp_path: Path) -> list[str]:
        (tmp_path / "endless.yaml").write_text(ENDLESS)
        run = ["train", str(tmp_path / "endless.yaml"), "--dir", str(tmp_path / "run"), "--plain", "--until-eof"]
        return [sys.executable, "-c", "import sys; from envmanager.cli import main; sys.exit(main())", *run]

    def test_it_stops_a_training_as_a_ctrl_c_does(self, command: list[str], tmp_path: Path) -> None:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
            assert training.stdin is not None
            assert training.stdout is not None
            told = next(line for line in training.stdout if line.startswith("checkpoint"))
            training.stdin.close()
            rest = training.stdout.read()

            assert training.wait(60) == 130
        assert "stopped; resume with --resume" in rest
        assert str(checkpoints.latest(tmp_path / "run" / "checkpoints")) not in told

    def test_it_stops_one_whose_parent_is_killed_which_saves_and_leaves_no_process(
        self, command: list[str], tmp_path: Path
    ) -> None:
        with subprocess.Popen([sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pidfd = os.pidfd_open(int(parent.stdout.readline()))
            parent.stdout.readline()
            before = checkpoints.load_latest(tmp_path / "run" / "checkpoints").training.n_steps
            parent.send_signal(signal.SIGKILL)
        try:
            assert wait_for([pidfd], 60.0), "the training runs on"
        finally:
            os.close(pidfd)
        folder = tmp_path / "run" / "checkpoints"
        last, former = (checkpoints.load(path).training.n_steps for path in sorted(folder.glob("0*"))[-1:-3:-1])
        assert last > before
        assert last - former < 500, "it was not written because the training was stopped"

    def test_without_it_the_input_does_not_matter(self, tmp_path: Path) -> None:
        (tmp_path / "short.yaml").write_text(ENDLESS.replace("100000000", "200, evaluation_episodes: 0"))
        command = ["train", str(tmp_path / "short.yaml"), "--dir", str(tmp_path / "run"), "--plain"]

        assert run_command_line(command) == 0
