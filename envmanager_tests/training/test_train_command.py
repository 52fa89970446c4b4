"""``envmanager train``: what it says when a training run cannot be ended as planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envmanager.cli.app import run_command_line

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


def test_when_only_the_evaluation_fails_all_steps_are_said_to_be_saved(
    tmp_path: Path, write_module: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    write_module("short_episodes", ENV)
    (tmp_path / "config.toml").write_text(CONFIG)

    code = run_command_line(["train", str(tmp_path / "config.toml"), "--dir", str(tmp_path / "run"), "--plain"])

    assert code == 1
    assert capsys.readouterr().err.endswith("\nIts last checkpoint has all its agent steps.\n")
