"""Watching a training run: what plays, when a newer checkpoint is there, and what cannot be watched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envmanager import UsageError, make_manager
from envmanager.cli.app import run_command_line
from envmanager.training.learners import FreezeKeys
from envmanager.training.policies import watching
from envmanager.training.policies.saved import SavedTraining
from envmanager.training.policies.watching import Source, Watching, WatchPlan, manager_options
from envmanager.training.runs import checkpoints
from envmanager.training.runs.plan import SavedPlan
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun
from envmanager_tests.godot.driver import MISSING, find_engine
from envmanager_tests.training.puzzles import rewrite

COMMAND = "import sys; from envmanager.cli import main; sys.exit(main())"
END_S = 60.0
PPO = {"kind": "ppo", "rollout": 64, "epochs": 1, "minibatch": 64, "hidden": [8]}
CARTPOLE = {"kind": "simple", "env": "CartPole-v1", "n_envs": 2}


def train(
    folder: Path, manager: Mapping[str, Any], *, steps: int, resume: bool = False, parameters: Any = None
) -> None:
    tables = {
        "manager": manager,
        "training": {"steps": steps, "evaluation_episodes": 0, "device": "cpu", "parameters": parameters or {}},
        "trainers": {"*": PPO},
    }

    class Quiet(Report):
        pass

    TrainingRun(TrainingPlan.parse(tables, folder, resume=resume), Quiet()).go()


def ball_of(program: str) -> dict[str, Any]:
    """The table ``manager`` of a training run with the demo."""
    return {"kind": "godot", "env": "demo:rolling_ball", "n_envs": 8, "wait": "all", "engine": {"binary": program}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function: the folder of a training run by this engine, which has ended. It is for copying."""
    there: dict[str, Path] = {}

    def train_once(program: str) -> Path:
        if program not in there:
            there[program] = tmp_path_factory.mktemp("trained")
            train(there[program], ball_of(program), steps=300)
        return there[program]

    return train_once


@pytest.fixture
def run(tmp_path: Path, program: str, trained: Callable[[str], Path]) -> Path:
    """The folder of a training run that has ended, by each engine."""
    return shutil.copytree(trained(program), tmp_path / "run")


@pytest.fixture
def one_run(tmp_path: Path, trained: Callable[[str], Path]) -> Path:
    """The folder of a training run that has ended, by the first engine that is here."""
    program = find_engine(4) or find_engine(3)
    if program is None:
        pytest.skip(f"{MISSING[4]}; {MISSING[3]}")
    return shutil.copytree(trained(program), tmp_path / "run")


class Seen:
    """A report that remembers."""

    def __init__(self, when_it_plays: Callable[[], None] = lambda: None) -> None:
        self.played: list[str] = []
        self.n_steps: list[int] = []
        self.returns: list[float] = []
        self._when_it_plays = when_it_plays

    def plays(self, game: str, checkpoint: str) -> None:
        self.played.append(checkpoint)
        if len(self.played) == 1:
            self._when_it_plays()

    def ended(self, n_steps: int, returns: Mapping[str, list[float]]) -> None:
        self.n_steps.append(n_steps)
        self.returns += returns["default"]


def test_the_returns_of_episodes_are_told_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, CARTPOLE, steps=64)
    state = next((tmp_path / "checkpoints").glob("*/state.json"))
    rewrite(state, '"kind": "simple"', '"kind": "godot"')
    monkeypatch.setattr(watching, "make_manager", lambda _: make_manager({**CARTPOLE, "wait": "all"}))
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.0)
    seen = Seen()

    Watching(WatchPlan(directory=tmp_path, steps=1100), seen).go()  # at least two episodes of 500 steps at most

    assert len(seen.n_steps) > 1, "not only at the end"
    assert 1100 * 2 - 2 * 500 <= sum(seen.returns) <= 1100 * 2, "one for each step of an episode that has ended"


def test_episodes_have_the_parameters_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = {"kind": "simple", "env": "envmanager_tests.training.test_curriculum:Strict"}  # cannot be reset without
    train(tmp_path, strict, steps=64, parameters={"level": 7})
    rewrite(next((tmp_path / "checkpoints").glob("*/state.json")), '"kind": "simple"', '"kind": "godot"')
    monkeypatch.setattr(watching, "make_manager", lambda _: make_manager(strict))
    seen = Seen()

    Watching(WatchPlan(directory=tmp_path, steps=20), seen).go()

    assert set(seen.returns) == {3.0}


def test_the_policies_of_a_training_play_as_many_steps_as_wanted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["godot", "watch", str(run), "--headless", "--steps", "50", "--shown", "2"]) == 0
    assert capsys.readouterr().out.startswith("demo:rolling_ball: checkpoint 000000000")


@pytest.mark.skipif(
    shutil.which("xvfb-run") is None, reason="no virtual display: `apt-get install xvfb libgl1-mesa-dri` brings one"
)
@pytest.mark.parametrize("isolate", ["false", "true"])
def test_several_arenas_play_in_a_window(run: Path, program: str, major: int, isolate: str) -> None:
    with_window = program if major == 4 else shutil.which("godot3")
    if with_window is None:
        pytest.skip("no Godot 3 with a window: `apt-get install godot3` brings one")
    state = next((run / "checkpoints").glob("*/state.json"))
    rewrite(state, '"binary": ', f'"isolate": {isolate}, "binary": ')
    display = ["xvfb-run", "--auto-servernum", "--server-args=-screen 0 400x400x24"]
    arguments = ["godot", "watch", str(run), "--shown", "3", "--steps", "30", "--binary", with_window]

    watched = subprocess.run(
        [*display, sys.executable, "-c", COMMAND, *arguments],
        env={**os.environ, "LIBGL_ALWAYS_SOFTWARE": "1"},
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert watched.returncode == 0, watched.stdout + watched.stderr


def test_a_newer_checkpoint_is_picked_up_while_it_plays(run: Path, program: str) -> None:
    first = checkpoints.latest(run / "checkpoints").name
    seen = Seen(lambda: train(run, ball_of(program), steps=600, resume=True))

    Watching(WatchPlan(directory=run, headless=True, steps=40), seen).go()

    newest = checkpoints.latest(run / "checkpoints").name
    assert seen.played == [first, newest]
    assert first < newest


def test_a_checkpoint_that_was_named_is_played_all_the_time(one_run: Path) -> None:
    first = checkpoints.latest(one_run / "checkpoints")
    kept = first.rename(one_run / "kept")
    seen = Seen()

    Watching(WatchPlan(directory=one_run, checkpoint=str(kept), headless=True, steps=10), seen).go()

    assert seen.played == ["kept"]
    with pytest.raises(UsageError, match=r"there is no checkpoint 'another'.*There is: none"):
        Source(WatchPlan(directory=one_run, checkpoint="another")).first()


def test_a_newer_checkpoint_that_cannot_be_read_is_told_and_the_one_before_plays_on(
    one_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def break_it() -> None:
        (one_run / "checkpoints" / "latest").write_text("broken")

    seen = Seen(break_it)
    Watching(WatchPlan(directory=one_run, headless=True, steps=40), seen).go()

    assert len(seen.played) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_key_in_the_window_tells_where_to_freeze_a_behavior_instead(
    one_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FreezeKeys, "pressed", lambda _: ["default"])
    Watching(WatchPlan(directory=one_run, headless=True, steps=1), Ended()).go()

    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"frozen = ['default'] into {one_run / 'control.toml'}" in record.getMessage()


def test_it_plays_greedily_what_was_trained(one_run: Path) -> None:
    options = manager_options(SavedTraining.open(one_run), WatchPlan(directory=one_run, shown=5))

    assert (options.kind, options.env, options.n_envs) == ("godot", "demo:rolling_ball", 5)
    assert options.engine is not None
    assert (options.engine["window"], options.engine["speed"], options.engine["shown"]) == (True, "realtime", 5)


def test_ctrl_c_ends_it(one_run: Path) -> None:
    arguments = ["godot", "watch", str(one_run), "--headless"]
    with subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert "plays" in watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        assert watch.wait(END_S) == 130


@pytest.mark.parametrize("command", [["godot", "watch", "--headless"], ["evaluate", "--episodes", "1000000"]])
def test_the_end_of_its_input_ends_it(one_run: Path, command: list[str]) -> None:
    arguments = [*command, str(one_run), "--until-eof"]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert "checkpoint" in program.stdout.readline()
        program.stdin.close()
        assert program.wait(END_S) == 130


def test_a_game_that_was_closed_by_hand_ends_it_in_order(
    tmp_path: Path, program: str, major: int, project_of: Callable[[str, int], Path]
) -> None:
    quits = {"kind": "godot", "env": str(project_of("games", major)), "n_envs": 1, "engine": {"binary": program}}
    quits["engine"] |= {"scene": "res://troubled.tscn"}
    train(tmp_path, quits, steps=64)
    state = next((tmp_path / "checkpoints").glob("*/state.json"))
    rewrite(state, '"scene": ', '"parameters": {"fail": "close"}, "scene": ')

    Watching(WatchPlan(directory=tmp_path, headless=True), Ended()).go()


class Ended:
    """A report that remembers nothing."""

    def plays(self, game: str, checkpoint: str) -> None:
        pass

    def ended(self, n_steps: int, returns: Mapping[str, list[float]]) -> None:
        pass


def test_a_relative_path_means_what_it_did_where_the_training_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_game").mkdir()
    told = {
        "manager": {"kind": "godot", "env": "my_game", "engine": {"binary": "godot4"}},
        "trainers": {},
        "directory": str(tmp_path),
    }
    training = checkpoints.TrainingState(n_steps=1, plan=SavedPlan(**told))
    monkeypatch.chdir("/")

    saved = SavedTraining(tmp_path, checkpoints.Checkpoint(training=training))
    options = manager_options(saved, WatchPlan(directory=tmp_path))

    assert options.env == str(tmp_path / "my_game")
    assert options.engine is not None
    assert options.engine["binary"] == "godot4"


def test_a_checkpoint_that_is_replaced_while_it_is_read_gives_way_to_the_newer_one(
    one_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = checkpoints.latest(one_run / "checkpoints")
    latest = one_run / "checkpoints" / "latest"
    latest.write_text("removed")
    load = checkpoints.load

    def load_late(path: Path) -> checkpoints.Checkpoint:
        latest.write_text(newest.name)
        return load(path)

    monkeypatch.setattr(checkpoints, "load", load_late)
    source = Source(WatchPlan(directory=one_run))
    assert source.first().path == newest
    assert source.newer() is None

    latest.write_text("removed too")
    newer = source.newer()
    assert newer is not None
    assert newer.path == newest
    assert source.newer() is None


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_a_training_or_a_checkpoint_is_refused(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    with pytest.raises(UsageError, match=r"there is no checkpoint in .*run: name the folder"):
        Source(WatchPlan(directory=folder)).first()
    assert run_command_line(["godot", "watch", str(folder), "--headless"]) == 2


def test_what_is_no_godot_game_is_refused(tmp_path: Path) -> None:
    train(tmp_path, CARTPOLE, steps=64)
    with pytest.raises(UsageError, match="'CartPole-v1' with the manager 'simple', which is no Godot game"):
        Watching(WatchPlan(directory=tmp_path), Ended()).go()


def test_a_training_of_what_no_text_names_says_that_it_cannot_be_watched(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    train(tmp_path, {"kind": "simple", "env": lambda: gymnasium.make("CartPole-v1"), "n_envs": 2}, steps=64)
    with pytest.raises(UsageError, match="does not say what it plays"):
        Watching(WatchPlan(directory=tmp_path), Ended()).go()


def test_a_training_whose_directory_was_deleted_is_saved_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    plan = TrainingPlan.parse({"manager": CARTPOLE, "trainers": {"*": PPO}}, tmp_path)
    assert plan.saved() is None


def test_policies_that_do_not_fit_the_game_are_refused(tmp_path: Path) -> None:
    train(tmp_path, CARTPOLE, steps=64)
    checkpoint = checkpoints.load_latest(tmp_path / "checkpoints")
    with make_manager({"kind": "simple", "env": "Acrobot-v1"}) as manager, pytest.raises(UsageError, match="not fit"):
        SavedTraining(tmp_path, checkpoint).policies_for(manager.behavior_specs)
