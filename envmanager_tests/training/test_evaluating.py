"""``envmanager evaluate``: whole episodes, as many as wanted, by the policies of a training run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import pytest

torch = pytest.importorskip("torch")

from envmanager import RandomPolicy, RestartPolicy, SimpleEnvManager, SubprocessEnvManager, UsageError
from envmanager.cli.app import run_command_line
from envmanager.training.evaluation import evaluate, shares
from envmanager_tests.envs import Duel
from envmanager_tests.training.puzzles import PUZZLE, SMALL_PPO, SPEAKERS, trained

END_S = 300


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trained(tmp_path / "run", "CartPole-v1", {"default": SMALL_PPO})
    return tmp_path / "run"


def told(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert run_command_line(["evaluate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_it_says_returns_and_lengths_of_as_many_episodes_as_wanted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = told(capsys, run, "--episodes", 7)["behaviors"]["default"]

    assert figures["episodes"] == len(figures["returns"]) == 7
    assert figures["returns"] == figures["lengths"]  # CartPole gives 1 for each step
    assert figures["return"]["min"] == min(figures["returns"])
    assert figures["return"]["mean"] == pytest.approx(sum(figures["returns"]) / 7)
    assert run_command_line(["evaluate", str(run), "--episodes", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    mean = f"{figures['return']['mean']:.4g}"
    assert re.fullmatch(rf"CartPole-v1: checkpoint {run}/checkpoints/0+201, 3 environments, manager simple", lines[0])
    assert re.fullmatch(rf"return +{re.escape(mean)} ± .*, from .* to .*, 7 episodes", lines[1])
    assert re.fullmatch(rf"length +{re.escape(mean)} ± .*, from .* to .* agent steps", lines[2])


def test_the_same_seed_gives_the_same_episodes_whatever_runs_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, other = (told(capsys, run, "--episodes", 6, "--seed", seed)["behaviors"] for seed in (1, 1, 2))
    processes = told(capsys, run, "--episodes", 6, "--seed", 1, "--manager", "subprocess")

    assert first == again == processes["behaviors"]
    assert first != other


def test_with_fewer_episodes_than_environments_each_plays_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, run, "--episodes", 2)["n_envs"] == 2


def test_the_data_is_written_too(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"

    assert told(capsys, run, "--episodes", 2, "--out", out) == json.loads(out.read_text())


@pytest.mark.usefixtures("speakers")
def test_every_behavior_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, SPEAKERS, {"*": SMALL_PPO})

    behaviors = told(capsys, tmp_path, "--episodes", 4)["behaviors"]
    assert {name: own["lengths"] for name, own in behaviors.items()} == {"speaker": [25] * 4, "listener": [25] * 4}
    assert run_command_line(["evaluate", str(tmp_path), "--episodes", "1"]) == 0
    assert "1 episode of 'listener'" in capsys.readouterr().out


def test_it_plays_in_another_environment_that_looks_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, lambda: gymnasium.make("CartPole-v1"), {"*": SMALL_PPO})

    assert run_command_line(["evaluate", str(tmp_path)]) == 2
    assert "its environment was given as an object or a function" in capsys.readouterr().err
    assert told(capsys, tmp_path, "--episodes", 3, "--env", "CartPole-v1")["env"] == "CartPole-v1"
    assert run_command_line(["evaluate", str(tmp_path), "--env", "Acrobot-v1"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_observations_and_actions_may_be_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, PUZZLE, {"*": SMALL_PPO})

    assert told(capsys, tmp_path, "--episodes", 4, "--n-envs", 2)["behaviors"]["default"]["lengths"] == [4, 5, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", "best"], "there is no checkpoint 'best'"),
        (["--episodes", "3", "--n-envs", "4"], "--n-envs 4 is more than --episodes 3"),
        (["--manager", "sinple"], "did you mean simple"),
        (["--env", "CartPole-v7"], "Gymnasium knows no environment 'CartPole-v7'"),
        (["--out", "/no/such/folder/file.json"], "there is no directory /no/such/folder"),
    ],
    ids=str,
)
def test_mistakes_are_named(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run_command_line(["evaluate", str(run), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_nothing_in_the_folder_changes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    told(capsys, run, "--episodes", 2)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_ctrl_c_ends_it(run: Path) -> None:
    command = "import sys; from envmanager.cli import main; sys.exit(main())"
    arguments = ["evaluate", str(run), "--episodes", "1000000"]
    with subprocess.Popen([sys.executable, "-c", command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "CartPole-v1: checkpoint" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 130


# In Python.


def test_each_environment_plays_its_share() -> None:
    assert shares(7, 3) == [3, 2, 2]
    assert shares(2, 2) == [1, 1]
    with SimpleEnvManager(Duel, n_envs=3) as manager:
        policies = {behavior: RandomPolicy(spec) for behavior, spec in manager.behavior_specs.items()}
        evaluation = evaluate(manager, policies, episodes_per_env=shares(7, 3))
    assert Counter(evaluation.lengths_of["hero"]) == {5: 3, 6: 2, 7: 2}
    assert Counter(evaluation.lengths_of["target"]) == {5: 6, 6: 4, 7: 4}
    assert [len(own) for own in evaluation.returns_of.values()] == [7, 14]
    assert evaluation.n_episodes == 7


@pytest.mark.parametrize("episodes", [0, [0, 0], [1, -1], [1, 2, 3]])
def test_episodes_that_cannot_be_dealt_are_refused(episodes: Any) -> None:
    with SimpleEnvManager(Duel, n_envs=2) as manager, pytest.raises(UsageError, match="must be a number, or 2 of them"):
        evaluate(manager, {}, episodes_per_env=episodes)


def test_environments_without_a_share_are_waited_for_by_nobody() -> None:
    with SimpleEnvManager(Duel, n_envs=3) as manager:
        policies = {behavior: RandomPolicy(spec) for behavior, spec in manager.behavior_specs.items()}
        evaluation = evaluate(manager, policies, episodes_per_env=shares(2, 3))
    assert evaluation.lengths_of["hero"] == [5, 6]
    assert evaluation.n_episodes == 2


def mortal(context: Any) -> Any:
    return Fragile(context, for_ever=True) if context.env_id == 1 else gymnasium.make("CartPole-v1")


@pytest.mark.timeout(60)
def test_nobody_waits_for_the_episodes_of_a_worker_that_is_dropped() -> None:
    restarts = RestartPolicy(max_restarts=0, then="drop")
    with SubprocessEnvManager(mortal, n_envs=2, seed=3, restarts=restarts) as manager:
        policies = {"default": RandomPolicy(manager.behavior_specs["default"])}
        evaluation = evaluate(manager, policies, episodes_per_env=2)
    assert (evaluation.n_episodes, len(evaluation.returns)) == (2, 2)


class Fragile(gymnasium.Wrapper):  # type: ignore[misc]
    """Ends its process in its third step, once or in every generation."""

    def __init__(self, context: Any, *, for_ever: bool = False) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._n_left = 3 if for_ever or context.generation == 0 else -1

    def step(self, action: Any) -> Any:
        self._n_left -= 1
        if self._n_left == 0:
            import os

            os._exit(3)
        return super().step(action)


def fragile(context: Any) -> Any:
    return Fragile(context)


def test_an_episode_that_was_lost_counts_neither_as_return_nor_as_length() -> None:
    with SubprocessEnvManager(fragile, n_envs=1, seed=3) as manager:
        policies = {"default": RandomPolicy(manager.behavior_specs["default"])}
        evaluation = evaluate(manager, policies, episodes_per_env=2)
        assert manager.stats().restarts == 1
    assert evaluation.lengths_of["default"] == evaluation.returns_of["default"]
