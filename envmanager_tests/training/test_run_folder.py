"""A training run destroys nothing: neither what an earlier one has left, nor what belongs to somebody else."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import NotWritten, UsageError
from envmanager.cli.app import run_command_line
from envmanager.training.policies.saved import find
from envmanager.training.runs import checkpoints
from envmanager.training.runs.figures import EPISODES, EpisodeEnd, EpisodeLog, read_episodes
from envmanager.training.runs.folder import LOCK
from envmanager.training.runs.plan import CHECKPOINTS
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

CONFIG: dict[str, Any] = {
    "manager": {"kind": "simple", "env": "CartPole-v1", "n_envs": 4, "wait": "all"},
    "training": {"steps": 300, "evaluation_episodes": 0, "device": "cpu"},
    "trainers": {"default": {"kind": "ppo", "rollout": 64, "epochs": 1, "minibatch": 64}},
}
FACTS: dict[str, Any] = {"run": "a", "arrays": {"controller": {}}, "parts": {"controller": {"n_steps": 1}}}


class Silent(Report):
    """Says nothing."""


def train(directory: Path, *, resume: bool = False, force: bool = False, **training: Any) -> TrainingRun:
    tables = {**CONFIG, "training": {**CONFIG["training"], **training}}
    run = TrainingRun(TrainingPlan.parse(tables, directory, resume=resume, force=force), Silent())
    run.go()
    return run


def save(directory: Path, n_steps: int, *, run: str = "a") -> Path:
    training = checkpoints.TrainingState(n_steps=n_steps)
    generators = {"torch": np.ones(3)}
    return checkpoints.save(directory, checkpoints.Checkpoint(run=run, training=training, generators=generators))


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def put_things_of_others(directory: Path) -> dict[str, bytes]:
    """Somebody else's files and folders in all places of a run's folder."""
    names = (
        "notes.txt",
        "data/big.bin",
        "checkpoints/notes.txt",
        "checkpoints/good/weights.safetensors",
        "checkpoints/000000000100/mine.txt",
        "checkpoints/000000000200/state.json",
        "checkpoints/x.unfinished/mine.txt",
    )
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"mine: {name}")
    return {name: (directory / name).read_bytes() for name in names}


def test_a_second_training_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path)
    before = files_of(tmp_path)

    with pytest.raises(UsageError) as caught:
        train(tmp_path)

    assert all(word in str(caught.value) for word in ("--resume", "--force", "--dir", CHECKPOINTS, EPISODES))
    assert files_of(tmp_path) == before


def test_it_is_refused_before_an_environment_is_made(tmp_path: Path) -> None:
    save(tmp_path / CHECKPOINTS, 1)
    tables = {**CONFIG, "manager": {"kind": "simple", "env": "never:made"}}
    plan = TrainingPlan.parse(tables, tmp_path)

    with pytest.raises(UsageError, match="holds a training run already"):
        TrainingRun(plan, Silent()).go()


def test_a_run_that_left_only_episodes_is_not_overwritten_either(tmp_path: Path) -> None:
    with EpisodeLog(tmp_path) as log:
        log.episode_ended(EpisodeEnd(10, 1.0, "default", 0, 2.0, 5))

    with pytest.raises(UsageError, match="no checkpoint: --resume cannot go on"):
        train(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "versions.json", EPISODES, "metrics.csv", "checkpoints"])
def test_what_is_under_a_name_of_ours_is_never_replaced_whoever_wrote_it(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text("mine")

    with pytest.raises(UsageError, match=f"holds a training run already: {name}"):
        train(run)
    assert files_of(run) == {name: b"mine"}
    train(run, force=True)
    assert files_of(tmp_path / "run.1") == {name: b"mine", LOCK: b""}


def test_force_begins_again_in_a_new_folder_and_renames_the_old_one(tmp_path: Path) -> None:
    run, before = tmp_path / "run", []
    others = put_things_of_others(run)
    for steps in (300, 200, 100):
        train(run, force=True, steps=steps)
        before.append(files_of(run))

    renamed = [files_of(tmp_path / f"run.{number}") for number in (1, 2)]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1", "run.2", "run.3"}
    assert renamed[0].items() >= others.items()
    assert [renamed[1], files_of(tmp_path / "run.3")] == before[:2]
    assert checkpoints.load_latest(run / CHECKPOINTS).training.n_steps == 100
    assert checkpoints.load_latest(tmp_path / "run.2" / CHECKPOINTS).training.n_steps == 300
    train(tmp_path / "run.2", resume=True, steps=400)


def test_the_number_of_a_renamed_folder_is_the_first_that_is_free(tmp_path: Path) -> None:
    (tmp_path / "run.1").write_text("mine")
    (tmp_path / "run.2").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run.4").mkdir()
    train(tmp_path / "run", steps=100)
    train(tmp_path / "run", steps=100, force=True)

    assert (tmp_path / "run.1").read_text() == "mine"
    assert (tmp_path / "run.3" / EPISODES).exists()


def test_force_renames_no_folder_without_a_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    train(run, force=True, steps=100)

    assert (run / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_training_that_cannot_begin_anew_says_where_the_earlier_one_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    train(run)
    before = files_of(run)
    tables = {**CONFIG, "manager": {"kind": "simple", "env": "never:made"}}

    for _ in range(2):
        with pytest.raises(UsageError, match="never"):
            TrainingRun(TrainingPlan.parse(tables, run, force=True), Silent()).go()

    assert files_of(tmp_path / "run.1") == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1"}, "the second time there was nothing to rename"
    assert [str(tmp_path / "run.1") in each.getMessage() for each in caplog.records] == [True]
    train(run, steps=100)


def test_the_target_of_a_link_is_renamed_and_the_link_leads_to_the_new_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    train(tmp_path / "run", steps=200)
    train(tmp_path / "run", steps=100, force=True)

    assert (tmp_path / "run").is_symlink()
    n_steps = [checkpoints.load_latest(tmp_path / name / CHECKPOINTS).training.n_steps for name in ("run", "disk.1")]
    assert n_steps == [100, 200]


def test_the_current_folder_is_not_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run", steps=100)
    (tmp_path / "run" / "below").mkdir()
    before = files_of(tmp_path / "run")

    for cwd, directory in ((tmp_path / "run", Path()), (tmp_path / "run" / "below", Path(".."))):
        monkeypatch.chdir(cwd)
        with pytest.raises(UsageError, match="current folder"):
            train(directory, force=True)
    assert files_of(tmp_path / "run") == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_cannot_be_renamed_is_told_and_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    train(run, steps=100)
    before = files_of(run)

    def busy(*_: Any) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", busy)  # as of a folder on which a disk is mounted
    with pytest.raises(NotWritten, match=r"cannot be renamed to .*run\.1: Device or resource busy"):
        train(run, force=True)
    assert files_of(run) == before


def test_resume_and_force_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not both"):
        TrainingPlan.parse(CONFIG, tmp_path, resume=True, force=True)


def test_checkpoints_on_the_way_remove_only_those_of_the_same_run(tmp_path: Path) -> None:
    others = put_things_of_others(tmp_path)
    another_run = save(tmp_path / "checkpoints", 7, run="another")

    for n_steps in (64, 128):
        latest = save(tmp_path / "checkpoints", n_steps)

    assert set(checkpoints.written(tmp_path / "checkpoints")) == {another_run, latest}
    found = files_of(tmp_path)
    assert {name: found[name] for name in others} == others


def test_what_others_put_into_a_checkpoint_outlives_it(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    (first / "notes.txt").write_text("a good one")

    save(tmp_path, 2)

    assert [path.name for path in first.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "name", ["my-good-one", "100", "000000000100.bak", "000000000100 (copy)", "0000000009999", "000000000100-1"]
)
def test_a_checkpoint_under_a_name_of_the_users_own_is_never_removed(tmp_path: Path, name: str) -> None:
    train(tmp_path, steps=100, keep=1)
    mine = shutil.copytree(tmp_path / "checkpoints" / "000000000100", tmp_path / "checkpoints" / name)
    before = files_of(mine)

    train(tmp_path, resume=True, steps=200, keep=1)
    assert files_of(mine) == before
    assert find(tmp_path, name) == mine, "it can be played all the same"


def test_a_resumed_training_removes_the_checkpoint_that_it_went_on_from(tmp_path: Path) -> None:
    train(tmp_path, steps=100, keep=1)
    train(tmp_path, resume=True, steps=200, keep=1)
    train(tmp_path, resume=True, steps=300, keep=1)

    assert [path.name for path in checkpoints.written(tmp_path / "checkpoints")] == ["000000000300"]


def test_a_training_that_goes_on_keeps_its_checkpoint_until_the_next_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_flush", full)
        with pytest.raises(OSError, match="No space"):
            train(tmp_path, resume=True, steps=400)
    assert checkpoints.load_latest(tmp_path / "checkpoints").generators

    train(tmp_path, resume=True, steps=400, keep=1)
    assert [path.name for path in checkpoints.written(tmp_path / "checkpoints")] == ["000000000400"]


TRAINS_ON_A_DISK_THAT_FILLS_UP = """
import resource, sys
from envmanager.cli.app import run_command_line
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(run_command_line(sys.argv[2:]))
"""


def test_a_full_disk_ends_the_command_with_one_line_and_a_code_of_its_own_and_the_last_checkpoint_stays(
    tmp_path: Path,
) -> None:
    table = {"kind": "dqn", "capacity": 3000, "learning_starts": 64, "train_every": 64, "hidden": [4]}
    options = {"steps": 3000, "checkpoint_every": 200, "evaluation_episodes": 0, "keep": 1}
    config = tmp_path / "dqn.json"
    config.write_text(json.dumps({**CONFIG, "training": options, "trainers": {"default": table}}))
    arguments = ["train", str(config), "--dir", str(tmp_path / "run"), "--plain"]
    command = [sys.executable, "-c", TRAINS_ON_A_DISK_THAT_FILLS_UP, "50000", *arguments]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    directory = tmp_path / "run" / "checkpoints"
    (last,) = (path for path in directory.iterdir() if path.is_dir())
    assert line.startswith("Error: the checkpoint after ")
    assert str(last) in line
    assert "--resume" in line
    n_steps = checkpoints.load_latest(directory).training.n_steps
    assert int(last.name) == n_steps > 0
    assert run_command_line([*arguments, "--resume", "--steps", str(n_steps + 10)]) == 0


def test_the_first_checkpoint_that_cannot_be_written_is_told_without_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_flush", full)
    with pytest.raises(
        NotWritten, match=r"after 300 agent steps cannot be written to .*: No space left on device\. There is"
    ):
        train(tmp_path)


def test_episodes_that_cannot_be_written_are_missing_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EpisodeLog(tmp_path) as log:
        log.episode_ended(EpisodeEnd(10, 1.0, "default", 0, 2.0, 5))
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / EPISODES).stat().st_size + 10, before[1]))
        try:
            for steps in (20, 30):
                log.episode_ended(EpisodeEnd(steps, 1.0, "default", 0, 2.0, 5))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.episode_ended(EpisodeEnd(40, 1.0, "default", 0, 2.0, 5))

    steps = [end.steps for end in read_episodes(tmp_path / EPISODES)]
    assert (steps[0], steps[-1]) == (10, 40), "once there is room again it goes on"
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_a_training_that_has_its_steps_is_resumed_without_starting_or_changing_anything(tmp_path: Path) -> None:
    train(tmp_path)
    before = {name: os.stat(tmp_path / name) for name in files_of(tmp_path)}
    tables = {
        **CONFIG, "manager": {"env": "never:made"},
        "training": {**CONFIG["training"], "steps": 200, "evaluation_episodes": 5},
    }  # fmt: skip

    result = TrainingRun(TrainingPlan.parse(tables, tmp_path, resume=True), Silent()).go()

    assert (result.ended, result.n_steps, result.n_steps_before, result.evaluation) == ("over", 300, 300, None)
    assert {name: os.stat(tmp_path / name) for name in files_of(tmp_path)} == before


def test_a_checkpoint_that_could_not_be_finished_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_flush", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_whose_run_was_killed_while_writing_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "000000000001.0a1b2c3d.unfinished").mkdir()
    (tmp_path / "000000000001.0a1b2c3d.unfinished" / "state.json").write_text(json.dumps(FACTS))
    (tmp_path / "000000000001.0a1b2c3d.unfinished" / "controller.safetensors").write_bytes(b"half")

    save(tmp_path, 1)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000000001", "latest"]


# Links and files that somebody has put where a training run writes.


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", [EPISODES, "config.json", "versions.json", "metrics.csv", "checkpoints"])
def test_a_link_under_a_name_of_ours_is_refused_or_moved_with_its_folder(
    tmp_path: Path, victim: Path, name: str
) -> None:
    place = tmp_path / "run" / name
    place.parent.mkdir()
    place.symlink_to(victim)

    with pytest.raises(UsageError, match="holds a training run already"):
        train(tmp_path / "run")
    assert place.is_symlink()
    train(tmp_path / "run", force=True)
    assert (tmp_path / "run.1" / name).is_symlink()


@pytest.mark.parametrize("name", [EPISODES, "checkpoints/latest", "checkpoints/best", "config.json", "versions.json"])
def test_a_resumed_training_writes_through_no_link(tmp_path: Path, name: str) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    train(run, evaluation_episodes=1)
    (run / name).rename(moved)
    (run / name).symlink_to(moved)
    before = moved.read_bytes()

    with contextlib.suppress(UsageError):  # the config, which is refused
        train(run, resume=True, steps=400, evaluation_episodes=1)
    assert moved.read_bytes() == before


def test_links_under_the_names_of_temporary_files_are_not_followed(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("latest.unfinished", ".latest.part", "000000000300.unfinished", "000000000300"):
        (tmp_path / "run" / name).symlink_to(victim)

    save(tmp_path / "run", 300)

    assert checkpoints.load_latest(tmp_path / "run").training.n_steps == 300


def test_a_link_to_a_checkpoint_of_the_same_run_is_not_removed_with_it(tmp_path: Path) -> None:
    first = save(tmp_path / "kept", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / first.name).symlink_to(first)

    save(tmp_path / "run", 2)

    assert checkpoints.written(tmp_path / "kept").keys() == {first}
    assert checkpoints.load_latest(tmp_path / "kept").generators


def test_a_name_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("../elsewhere/000000000001")

    with pytest.raises(UsageError):
        checkpoints.load_latest(tmp_path / "run")


@pytest.mark.parametrize("name", [EPISODES, "metrics.csv", "config.json"])
def test_what_somebody_has_put_in_the_place_of_a_file_is_not_replaced_on_a_resume(tmp_path: Path, name: str) -> None:
    train(tmp_path, metrics=["csv"])
    (tmp_path / name).write_text("season,episode\n1,2\n")

    with pytest.raises(UsageError, match=f"{name}.* [Rr]estore it, or delete it"):
        train(tmp_path, resume=True, steps=400, metrics=["csv"])
    assert (tmp_path / name).read_text() == "season,episode\n1,2\n"


def test_a_damaged_list_of_episodes_is_a_usage_error(tmp_path: Path) -> None:
    with EpisodeLog(tmp_path) as log:
        log.episode_ended(EpisodeEnd(10, 1.0, "default", 0, 2.0, 5))
    (tmp_path / EPISODES).write_text((tmp_path / EPISODES).read_text() + "x,y,z,a,b,c,d\n")

    with pytest.raises(UsageError, match="cannot be read as a list of episodes"):
        EpisodeLog(tmp_path, resumed_at=100)


def test_a_folder_that_is_a_file_is_a_usage_error(tmp_path: Path, victim: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        train(victim)
    with pytest.raises(NotWritten, match="cannot be written"):
        EpisodeLog(victim / "run")


def test_the_list_of_a_resumed_run_has_a_new_file_with_the_mode_of_the_umask(tmp_path: Path) -> None:
    with EpisodeLog(tmp_path) as log:
        log.episode_ended(EpisodeEnd(10, 1.0, "default", 0, 2.0, 5))
    os.chmod(tmp_path / EPISODES, 0o666)
    with (tmp_path / EPISODES).open() as reader, EpisodeLog(tmp_path, resumed_at=11) as log:
        log.episode_ended(EpisodeEnd(20, 2.0, "default", 0, 3.0, 5))
        assert len(reader.readlines()) == 2, "whoever reads the old file goes on reading the old file"
    mask = os.umask(0o022)
    os.umask(mask)
    assert (tmp_path / EPISODES).stat().st_mode & 0o777 == 0o666 & ~mask
    assert len((tmp_path / EPISODES).read_text().splitlines()) == 3


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_all_files_of_a_checkpoint_have_the_mode_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        save(tmp_path, 1)
    finally:
        os.umask(before)

    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == dict.fromkeys(("latest", "state.json", "controller.safetensors"), 0o666 & ~mask)


# The command.


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json.yaml"
    path.write_text(json.dumps(CONFIG))  # which is YAML
    return path


def test_the_command_run_twice_is_refused_resumed_or_forced(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(config), "--plain", "--dir", str(tmp_path / "run")]
    assert run_command_line(arguments) == 0
    before = files_of(tmp_path / "run")

    assert run_command_line(arguments) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("--resume", "--force", "--dir"))
    assert files_of(tmp_path / "run") == before

    assert run_command_line([*arguments, "--force", "--steps", "200"]) == 0
    assert run_command_line([*arguments, "--resume", "--force"]) == 2
    assert run_command_line([*arguments, "--resume"]) == 0
    there = [path.name for path in checkpoints.written(tmp_path / "run" / "checkpoints")]
    assert there == ["000000000200", "000000000300"]

    capsys.readouterr()
    before, out = files_of(tmp_path / "run"), tmp_path / "out.json"
    assert run_command_line([*arguments, "--resume", "--out", str(out)]) == 0
    assert files_of(tmp_path / "run") == before
    assert f"nothing to do: {tmp_path / 'run'} has taken 300 of 300 agent steps" in capsys.readouterr().out
    assert json.loads(out.read_text())["ended"] == "over"


def test_a_resumed_run_tells_its_own_speed(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", str(config), "--plain", "--dir", str(tmp_path / "run")]
    assert run_command_line(arguments) == 0
    out = tmp_path / "out.json"
    capsys.readouterr()

    assert run_command_line([*arguments, "--resume", "--steps", "400", "--out", str(out)]) == 0

    told = json.loads(out.read_text())
    assert (told["n_steps"], told["n_steps_before"]) == (400, 300)
    assert told["steps_per_s"] == pytest.approx(100 / told["wall_s"])
    assert "steps       100 agent steps in" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [10, 3])
def test_as_many_episodes_are_played_at_the_end_as_were_asked_for(
    tmp_path: Path, config: Path, asked: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["--plain", "--dir", str(tmp_path / "run"), "--out", str(out)]

    assert run_command_line(["train", str(config), *arguments, "--set", f"training.evaluation_episodes={asked}"]) == 0

    evaluation = json.loads(out.read_text())["evaluation"]
    assert evaluation["episodes"] == len(evaluation["returns"]["default"]) == asked
    lines = capsys.readouterr().out.splitlines()
    assert f"evaluating  {asked} episodes" in lines
    (told,) = [line for line in lines if line.startswith("evaluation  ")]
    assert told.endswith(f", {asked} episodes")


def test_returns_that_are_no_numbers_are_written_as_such(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("envmanager.training.evaluation.mean_and_spread", lambda _: (math.nan, math.inf))
    monkeypatch.setitem(CONFIG["training"], "evaluation_episodes", 1)
    config.write_text(json.dumps(CONFIG))
    out = tmp_path / "out.json"

    assert run_command_line(["train", str(config), "--plain", "--dir", str(tmp_path / "run"), "--out", str(out)]) == 0

    evaluation = json.loads(out.read_text())["evaluation"]
    assert (evaluation["mean"], evaluation["spread"]) == (None, None)


def test_a_resumed_run_has_returns_from_its_beginning(tmp_path: Path) -> None:
    first = train(tmp_path)
    assert first.controller is not None
    assert len(first.controller.episodes.recent) > 3
    seen: list[float] = []

    class Watching(Report):
        def started(self, run: TrainingRun) -> None:
            assert run.controller is not None
            seen.append(run.controller.episodes.mean_of_recent())

    tables = {**CONFIG, "training": {**CONFIG["training"], "steps": 304}}
    result = TrainingRun(TrainingPlan.parse(tables, tmp_path, resume=True), Watching()).go()

    assert seen == [first.controller.episodes.mean_of_recent()]
    assert result.mean_return == pytest.approx(seen[0], rel=0.5)
