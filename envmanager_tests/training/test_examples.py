"""Every example of docs/examples runs, shortened."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

import envmanager
from envmanager import EnvContext, RestartPolicy, SubprocessEnvManager, TaskResult
from envmanager.cli.config_files import TRAINING_TABLES, load_config
from envmanager.godot.games import find_major
from envmanager.observe.episodes import FinishedEpisode
from envmanager.testing.fault_checks import until
from envmanager.training.runs.figures import EpisodeEnd, EpisodeLog
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NEEDS = {
    "connect_four": ["pettingzoo.classic.connect_four.connect_four"],
    "dqn_pong": ["ale_py"],
    "dqn_speedups": ["ale_py"],
    "ppo_halfcheetah": ["mujoco", "imageio"],
    "ppo_lunarlander": ["Box2D"],
    "speaker_listener": ["mpe2"],
    "tag_in_rounds": ["mpe2"],
}
STEPS = {
    "dqn_pong": 120,
    "dqn_cartpole": 300,
    "tag_in_rounds": 50 * 16 * (3 + 1),
    "godot_coin_chase": 64 * 64 * 3,
    "sac_pendulum": 60,
}
"""How many steps to take; others take as many as a rollout has."""
SHORTER: dict[str, dict[str, Any]] = {
    "dqn_pong": {"learning_starts": 100},
    "dqn_cartpole": {"learning_starts": 100, "train_every": 64, "updates": 4},
    "ppo_lunarlander": {"rollout": 512},
    "sac_pendulum": {"learning_starts": 20},
}


class Silent(Report):
    """Says nothing."""


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_trains(path: Path, tmp_path: Path) -> None:
    for library in NEEDS.get(path.stem, ()):
        pytest.importorskip(library)
    if path.stem.startswith("godot") and find_major() is None:
        pytest.skip("there is no Godot here: `apt-get install godot3-server` brings one")
    tables = load_config(path, TRAINING_TABLES)
    for trainer in tables["trainers"].values():
        trainer.update(SHORTER.get(path.stem, {}))
        n_behaviors = 2 if path.stem == "speaker_listener" else 1
        tables["training"]["steps"] = STEPS.get(path.stem, n_behaviors * trainer.get("rollout", 0))
    tables["training"]["evaluation_episodes"] = 0
    run = TrainingRun(TrainingPlan.parse(tables, tmp_path), Silent())
    result = run.go()
    assert result.ended == "done"
    assert all(trainer.version > 0 for trainer in run.trainers.values())


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        pytest.param(
            "async_stragglers",
            "--seeds 1 --n-envs 3 --goal 10 --most-steps 150",
            "waiting for any is",
            marks=pytest.mark.load,
        ),
        pytest.param("dqn_speedups", "--steps 40 --rounds 1", "(d) fast preprocessing", marks=pytest.mark.load),
        ("connect_four", "--steps 4200 --games 3 --manager simple", "second: wins"),
        ("level_replay", "--levels 5 --episodes 30", "episodes, mean return"),
        ("own_trainer", "--steps 800 --manager simple", "updates, mean return"),
        ("ppo_send_recv", "--steps 1200", "steps in"),
    ],
)
def test_a_script_runs(
    name: str,
    arguments: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    run_script(name, arguments, monkeypatch)
    assert told in capsys.readouterr().out


def test_a_loop_of_ones_own_survives_that_a_worker_is_replaced_when_its_rollout_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Renewed(gymnasium.Env):  # type: ignore[misc]
        """Env 1 fills its rollout in one episode, and env 0 waits in step 100 until that of env 1 is new."""

        observation_space = gymnasium.spaces.Box(-9, 9, (4,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, context: EnvContext) -> None:
            self.waits, self.n_steps = context.env_id == context.generation == 0, 0
            if context.generation:
                (tmp_path / "new").touch()

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(4, np.float32), {}

        def step(self, action: Any) -> Any:
            self.n_steps += 1
            if self.waits and self.n_steps == 100:
                until((tmp_path / "new").exists)
            return np.zeros(4, np.float32), 1.0, False, self.n_steps % 128 == 0, {}

    def manager(_: str, n_envs: int, **options: Any) -> SubprocessEnvManager:
        options |= {"n_workers": n_envs, "restarts": RestartPolicy(recycle_after_steps=100)}
        return SubprocessEnvManager(Renewed, n_envs, **options)

    monkeypatch.setattr(envmanager, "SubprocessEnvManager", manager)
    run_script("ppo_send_recv", "--steps 256 --n-envs 2", monkeypatch)
    assert "256 steps in" in capsys.readouterr().out


KILLED = """
import itertools, os, runpy, signal, sys

kept, number = os.replace, itertools.count()
n_saved = int(sys.argv.pop(1))

def replace(*paths):
    if next(number) == n_saved:
        os.kill(os.getpid(), signal.SIGKILL)  # the new file is written, and not in its place
    kept(*paths)

os.replace = replace
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize(
    ("name", "arguments"), [("sb3_that_resumes", "--steps 2500"), ("loop_that_resumes", "--updates 9")]
)
def test_a_trainer_of_others_that_is_killed_and_resumed_has_the_same_weights(
    name: str, arguments: str, tmp_path: Path
) -> None:
    if name == "sb3_that_resumes":
        pytest.importorskip("stable_baselines3")

    def told(file: str, n_saved: int, *more: str) -> tuple[int, str]:
        command = [sys.executable, "-c", KILLED, str(n_saved), str(EXAMPLES / f"{name}.py"), file]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [*command, *arguments.split(), *more], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode, done.stdout.splitlines()[-1] if done.stdout else ""

    code, weights = told("one.pt", 1000)
    assert code == 0
    assert [told("other.pt", n, *more)[0] for n, more in ((3, ()), (2, ("--n-workers", "4")))] == [-9, -9]
    assert told("other.pt", 1000) == (0, weights)


def test_levels_whose_return_was_not_expected_are_replayed_and_old_ones_are_not_forgotten() -> None:
    source = runpy.run_path(str(EXAMPLES / "level_replay.py"))["LevelReplay"]([70, 71, 72, 73])
    drawn = []
    for number in range(400):
        task = source.next_task(0)
        drawn.append(task.seed)
        total = 10.0 * (number % 2) if task.seed == 72 else 5.0  # only the return of 72 varies
        source.ended(TaskResult(number, task, 0, True, 1, episodes=(FinishedEpisode("default", 0, total, 1),)))

    counts = {level: drawn[40:].count(level) for level in source.levels}
    assert counts[72] > 3 * max(counts[level] for level in (70, 71, 73))
    assert min(counts.values()) > 0


@pytest.mark.usefixtures("fonts_are_open")
def test_the_returns_of_a_training_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EpisodeLog(tmp_path / "run") as log:
        log.episode_ended(EpisodeEnd(100, 1.0, "talker", 0, -20.0, 5))
        log.episode_ended(EpisodeEnd(200, 2.0, "walker", 1, -10.0, 5))
    run_script("plot_returns", f"{tmp_path / 'run'} --out {tmp_path / 'returns.png'} --goal -15", monkeypatch)
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_behaviors_that_share_their_returns_are_one_line() -> None:
    lines_of = runpy.run_path(str(EXAMPLES / "plot_returns.py"))["lines_of"]
    shared = [EpisodeEnd(100, 1.0, name, 0, -20.0, 5) for name in ("speaker", "listener")]
    alone = EpisodeEnd(100, 1.0, "judge", 0, 3.0, 5)
    assert lines_of([*shared, alone], None) == {(-20.0,): ["speaker", "listener"], (3.0,): ["judge"]}
    assert lines_of([*shared, alone], "listener") == {(-20.0,): ["listener"]}


def run_script(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    runpy.run_path(script, run_name="__main__")
