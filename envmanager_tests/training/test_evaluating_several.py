"""``envmanager evaluate`` of several runs, on seeds or on tasks from a file, with a table of all episodes."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import Task, UsageError
from envmanager.cli.app import run_command_line
from envmanager.cli.task_files import read_tasks, tasks_of_seeds
from envmanager.training.policies.saved import SavedTraining
from envmanager.training.runs.plan import TrainingPlan
from envmanager.training.runs.run import TrainingRun
from envmanager_tests.envs import Duel
from envmanager_tests.training.puzzles import SMALL_PPO, Quiet, trained

END_S = 300
HERE = __name__


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three trainings of CartPole, which differ in their seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        trained(folder / str(seed), "CartPole-v1", {"default": SMALL_PPO}, seed=seed)
    return [folder / str(seed) for seed in range(3)]


def table_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def evaluate(*arguments: Any) -> int:
    return run_command_line(["evaluate", *map(str, arguments)])


@pytest.mark.parametrize("kind", ["simple", "subprocess"])
def test_several_policies_play_what_a_plain_loop_plays(
    runs: list[Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    assert evaluate(*runs, "--seeds", "5:15", "--out", out, "--manager", kind) == 0

    expected = []
    env = gymnasium.make("CartPole-v1")
    for run in runs:
        training = SavedTraining.open(run)
        policy = training.policy()
        for seed in range(5, 15):
            obs, _ = env.reset(seed=seed)
            total, length, terminated, truncated = 0.0, 0, False, False
            while not (terminated or truncated):
                obs, reward, terminated, truncated, _ = env.step(policy(obs))
                total, length = total + float(reward), length + 1
            expected.append((str(run), training.path.name, str(seed), str(total), str(length), str(terminated)))
    names = ("run", "checkpoint", "seed", "return", "length", "terminated")
    assert [tuple(row[name] for name in names) for row in table_of(out)] == expected
    assert len({row["return"] for row in table_of(out)}) > 5
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"CartPole-v1: 3 checkpoints, 3 environments, manager {kind}"
    assert [line.partition("  ")[0] for line in lines[1:]] == [str(SavedTraining.open(run).path) for run in runs]


def test_runs_in_different_environments_have_a_manager_each_and_the_table_is_in_the_order_of_the_runs(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "acrobot", "Acrobot-v1", {"*": SMALL_PPO})
    out = tmp_path / "out.csv"
    given = [runs[0], tmp_path / "acrobot", runs[1], runs[0]]
    assert evaluate(*given, "--seeds", "3,4", "--out", out, "--n-envs", 2) == 0

    rows = table_of(out)
    assert [row["run"] for row in rows] == [str(run) for run in given for _ in range(2)]
    assert [row["return"] for row in rows[:2]] == [row["return"] for row in rows[-2:]], "the same run twice"
    lines = capsys.readouterr().out.splitlines()
    starts = [line for line in lines if ", manager " in line]
    assert [line.partition(":")[0] for line in starts] == ["CartPole-v1", "Acrobot-v1"]
    assert len({line.rindex("  ") for line in lines if line not in starts}) == 1, "the returns are in one column"


def test_seeds_without_the_environment_parameters_of_the_training_are_noted(
    tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {
        "manager": {"kind": "simple", "env": "CartPole-v1", "n_envs": 2, "wait": "all"},
        "training": {"steps": 64, "evaluation_episodes": 0, "device": "cpu", "parameters": {"low": -0.01, "high": 0}},
        "trainers": {"default": SMALL_PPO},
    }
    TrainingRun(TrainingPlan.parse(tables, tmp_path / "run"), Quiet()).go()
    (tmp_path / "tasks.csv").write_text("low,high\n-0.01,0\n")

    noted = []
    for arguments in ([runs[0], "--seeds", "1"], [tmp_path / "run", "--seeds", "1", "--json"]):
        assert evaluate(*arguments) == 0
        noted.append("environment parameters" in capsys.readouterr().err)
    for arguments in (["--tasks", tmp_path / "tasks.csv"], ["--episodes", 2]):
        assert evaluate(tmp_path / "run", *arguments) == 0
        noted.append("environment parameters" in capsys.readouterr().err)
    assert noted == [False, True, False, False]


def test_json_has_an_object_per_run(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert evaluate(*runs[:2], "--seeds", "0:2", "--json", "--out", out) == 0

    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(out.read_text())
    assert [each["run"] for each in told["runs"]] == [str(run) for run in runs[:2]]
    (first, second), one = told["runs"][0]["results"], told["runs"][0]["behaviors"]["default"]
    assert [first["return"], second["return"]] == one["returns"]
    assert (first["task"], first["seed"], second["seed"], first["error"]) == (0, 0, 1, None)


def test_the_same_seed_gives_the_same_tasks_whatever_plays_them(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for seed, n_envs in ((1, 1), (1, 4), (2, 4)):
        assert evaluate(runs[0], "--episodes", 6, "--seed", seed, "--n-envs", n_envs, "--out", tmp_path / "a.csv") == 0
        tables.append([(row["seed"], row["return"]) for row in table_of(tmp_path / "a.csv")])
    assert tables[0] == tables[1] != tables[2]
    assert len({seed for seed, _ in tables[0]}) == 6


# Tasks from a file.


class Levels(gymnasium.Env):  # type: ignore[misc]
    """Its only step brings the number of the level, plus 100 if it is hard. Ends its process in level 13."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        options = options or {}
        self._worth = options.get("level", 0) + 100 * (options.get("how") == "hard")
        self._dies = options.get("level") == 13
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(4, np.float32), self._worth, True, False, {}


class MortalDuel(Duel):
    """The process of environment 1 ends in its second episode."""

    def step(self, actions: Any) -> Any:
        if self._n_steps == 8 and self._length == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)


CSV = "\ufeffseed,id,level,how\r\n7,first,3,hard\r\n\r\n,007,4,\r\n,,,\r\n8,,,\r\n"
JSONL = (
    '\ufeff{"seed": 7, "id": "first", "level": 3, "how": "hard"}\n\n'
    '{"id": "007", "options": {"level": 4}}\n   \n{"seed": 8}\n'
)


@pytest.mark.parametrize(("name", "text"), [("levels.csv", CSV), ("levels.JSONL", JSONL)], ids=["csv", "jsonl"])
def test_a_file_has_a_task_per_row(runs: list[Path], tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")

    assert read_tasks(tmp_path / name) == [
        Task(7, {"level": 3, "how": "hard"}, "first"),
        Task(None, {"level": 4}, "007"),
        Task(8),
    ]
    out = tmp_path / "out.csv"
    assert evaluate(runs[0], "--tasks", tmp_path / name, "--env", f"{HERE}:Levels", "--out", out) == 0
    rows = table_of(out)
    assert [(row["id"], float(row["return"])) for row in rows] == [("first", 103), ("007", 4), ("", 0)]
    assert (rows[0]["seed"], rows[2]["seed"], rows[0]["options"]) == ("7", "8", '{"level": 3, "how": "hard"}')
    assert rows[1]["seed"], "a seed derived from --seed"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "seed,level\n1,2\nx,3\n", ["line 3", "column seed", "'x'"]),
        ("a.csv", "seed,level\n1,2\n-1,3\n", ["line 3", "column seed"]),
        ("a.csv", "seed,options\n1,2\n", ["line 2", "column options"]),
        ("a.csv", 'seed,options,level\n1,"{""a"": 1}",2\n', ["line 2", "column level"]),
        ("a.csv", 'seed,options\n1,"{""a"": 1, ""a"": 2}"\n', ["line 2", "column options", "'a' comes twice"]),
        ("a.csv", "seed,level\n1\n", ["line 2", "1 cells", "2 columns"]),
        ("a.csv", "seed,seed\n1,2\n", ["line 1", "column 1", "'seed'"]),
        ("a.csv", "seed;level\n1;2\n", ["line 1", "column 1", "Commas"]),
        ("a.csv", 'seed\n"1\n', ["line 2"]),
        ("a.csv", "seed,level\n", ["has no tasks"]),
        ("a.csv", "", ["has no tasks"]),
        ("a.jsonl", '{"seed": 1}\n{"seed": 1\n', ["line 2", "column", "JSON"]),
        ("a.jsonl", '{"seed": 1}\n[1]\n', ["line 2", "object"]),
        ("a.jsonl", '{"seed": 1.5}\n', ["line 1", "column seed", "1.5"]),
        ("a.jsonl", '{"options": [1]}\n', ["line 1", "column options"]),
        ("a.txt", "seed\n", [".csv or .jsonl"]),
        ("a.csv", None, ["cannot be read", "No such file"]),
    ],
    ids=range(17),
)
def test_mistakes_in_a_file_are_named(
    runs: list[Path], tmp_path: Path, name: str, text: str | None, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert evaluate(runs[0], "--tasks", tmp_path / name) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in [str(tmp_path / name), *words]), told


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"seed\n\xff\n")
    with pytest.raises(UsageError, match="cannot be read"):
        read_tasks(tmp_path / "a.csv")


def test_seeds_are_numbers_and_ranges_without_their_ends() -> None:
    assert tasks_of_seeds("0:3, 7,5:6") == [Task(seed) for seed in (0, 1, 2, 7, 5)]
    for text in ("", "3,", "5:5", "7:3", "-1", "1:", "a", "1.5", "0:3:2", "١"):
        with pytest.raises(UsageError, match="--seeds"):
            tasks_of_seeds(text)


# When things go wrong.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0:3", "--episodes", "3"], "one of --episodes, --seeds and --tasks"),
        (["--seeds", "0:3", "--n-envs", "4"], "--n-envs 4 is more than the number of tasks, 3"),
        (["--seeds", "0:3", "--out", "no/such/folder/a.csv"], "there is no directory"),
        (["--seeds", "0:3", "--env", "Acrobot-v1"], "does not fit"),
        (["--seeds", "0:3", "--env", "envmanager_tests.envs:Duel"], "cannot begin on demand"),
        (["--seeds", "0:3", "--env", "no game", "--manager", "godot"], "cannot begin on demand"),
    ],
    ids=range(6),
)
def test_mistakes_are_named(
    runs: list[Path], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(*runs, *arguments) == 2
    assert words in capsys.readouterr().err


def test_environments_that_cannot_begin_on_demand_play_a_share_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "duel", "envmanager_tests.envs:Duel", {"*": SMALL_PPO})
    assert evaluate(tmp_path / "duel", "--episodes", 4, "--n-envs", 2, "--out", tmp_path / "out.csv") == 0

    rows = table_of(tmp_path / "out.csv")
    assert len([row for row in rows if row["behavior"] == "hero"]) == 4
    assert {row["task"] for row in rows} == {""}
    assert ", 4 episodes of 'hero'" in capsys.readouterr().out


def test_a_damaged_run_among_several_is_named_before_anything_is_played(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs[1], tmp_path / "damaged")
    (state,) = (tmp_path / "damaged").glob("checkpoints/*/state.json")
    state.write_text(state.read_text()[:-40])
    assert evaluate(runs[0], tmp_path / "damaged", runs[2], "--seeds", "0:3", "--out", tmp_path / "out.csv") == 2

    told = capsys.readouterr()
    assert str(state.parent) in told.err
    assert told.out == ""
    assert not (tmp_path / "out.csv").exists()


def test_a_lost_task_is_told_loudly_and_has_its_row(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("level\n1\n13\n3\n")
    options = ["--tasks", tmp_path / "a.csv", "--env", f"{HERE}:Levels", "--manager", "subprocess", "--n-envs", 1]
    assert evaluate(runs[0], *options, "--restarts", 100, "--out", tmp_path / "out.csv") == 0

    told = capsys.readouterr()
    assert "1 of 3 tasks were lost" in told.err
    assert "SIGKILL" in told.err.partition("tasks were lost")[2]
    assert "2 episodes, 1 lost (incomplete)" in told.out
    rows = table_of(tmp_path / "out.csv")
    assert [(row["return"], row["attempts"]) for row in rows] == [("1.0", "1"), ("", "3"), ("3.0", "1")]
    assert "SIGKILL" in rows[1]["error"]
    assert evaluate(runs[0], *options, "--restarts", 100, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["lost"], data["complete"], data["behaviors"]["default"]["episodes"]) == (1, False, 2)


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_what_was_played_until_an_error_is_printed_and_written(
    runs: list[Path], tmp_path: Path, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("level\n1\n13\n3\n")
    options = ["--tasks", tmp_path / "a.csv", "--env", f"{HERE}:Levels", "--manager", "subprocess", "--n-envs", 1]
    out = tmp_path / ("out.json" if as_json else "out.csv")
    assert evaluate(*runs[:2], *options, "--restarts", 1, "--out", out, *(["--json"] if as_json else [])) == 1

    told = capsys.readouterr()
    assert "restarted once" in told.err
    if as_json:
        data = json.loads(told.out)["runs"]
        assert data == json.loads(out.read_text())["runs"]
        assert [[each[name] for name in ("lost", "unplayed", "complete")] for each in data] == [
            [0, 2, False],
            [0, 3, False],
        ]
        rows = [row for each in data for row in each["results"]]
    else:
        assert "1, 1 episode, 2 not played (incomplete)" in told.out
        assert "no return, 0 episodes, 3 not played (incomplete)" in told.out
        rows = table_of(out)
    assert [row["error"] or "" for row in rows if not (row["error"] or "").startswith("not played: ")] == [
        "",
        "not finished in env 0: worker 0 was restarted once within 60 s and failed again: worker 0 died in step "
        "(SIGKILL)",
    ]
    assert [row.get("env_id") or "" for row in rows[1:]] == [""] * 5
    assert [json.loads(str(row["task"])) for row in rows] == [0, 1, 2, 0, 1, 2]
    assert all("SIGKILL" in row["error"] for row in rows[2:])
    assert [float(row["return"]) for row in rows if row.get("return")] == [1.0]


def test_an_error_in_a_later_run_leaves_the_results_of_the_earlier_ones(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "duel", "envmanager_tests.envs:Duel", {"*": SMALL_PPO})
    given = [runs[0], tmp_path / "duel", "--seeds", "0:3", "--out", tmp_path / "out.csv"]
    assert evaluate(*given) == 2
    rows = table_of(tmp_path / "out.csv")
    assert [bool(row["return"]) for row in rows] == [True] * 3 + [False] * 3
    assert all("cannot begin on demand" in row["error"] for row in rows[3:])


def test_shares_that_an_error_cuts_are_told_too(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "duel", "envmanager_tests.envs:Duel", {"*": SMALL_PPO})
    options = ["--env", f"{HERE}:MortalDuel", "--episodes", 6, "--n-envs", 2, "--restarts", 0]
    assert evaluate(tmp_path / "duel", *options, "--manager", "subprocess", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    n_returns = {len(own["returns"]) for own in data["behaviors"].values()}
    assert 0 < data["unplayed"] < 6
    assert data["behaviors"]["hero"]["episodes"] + data["unplayed"] == 6
    assert max(n_returns) <= 4


def test_a_name_that_says_no_format_is_refused_before_anything_starts(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("results.txt", "results", "results.jsonl"):
        assert evaluate(runs[0], "--seeds", "0:3", "--out", tmp_path / name) == 2
        told = capsys.readouterr()
        assert ".csv or .json" in told.err
        assert told.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_what_was_played_in_the_table(
    runs: list[Path], tmp_path: Path, signum: int, exit_code: int
) -> None:
    trained(tmp_path / "acrobot", "Acrobot-v1", {"*": SMALL_PPO})
    command = "import sys; from envmanager.cli import main; sys.exit(main())"
    out = tmp_path / "out" / "table.csv"
    out.parent.mkdir()
    arguments = ["evaluate", runs[0], runs[0], tmp_path / "acrobot", "--seeds", "0:200", "--n-envs", "1"]
    arguments += ["--manager", "subprocess", "--out", out]
    with subprocess.Popen(
        [sys.executable, "-c", command, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        told = [next(lines)]
        while not told[-1].startswith("Acrobot-v1: checkpoint"):
            told.append(next(lines))
        process.send_signal(signum)
        told += lines
        assert process.wait(END_S) == exit_code
    assert ["200 episodes" in line for line in told[:4]] == [False, True, True, False]
    assert [path.name for path in out.parent.iterdir()] == ["table.csv"]
    rows = table_of(out)
    assert [(row["run"], row["task"]) for row in rows] == [
        (str(run), str(task)) for run in (runs[0], runs[0], tmp_path / "acrobot") for task in range(200)
    ]
    assert all(row["return"] for row in rows[:400])
    assert rows[-1]["error"] == "not played: interrupted"
    assert "not played (incomplete)" in told[-1]
