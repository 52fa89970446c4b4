"""What a training run ran with is beside its checkpoints, and nobody's own file of such a name is touched."""

from __future__ import annotations

import json
import math
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import ConfigError, ManagerOptions, UsageError, Wait
from envmanager.cli.app import run_command_line
from envmanager.cli.config_files import TRAINING_TABLES, load_config, run_folder_of
from envmanager.options import RestartPolicy
from envmanager.training.runs import checkpoints, records
from envmanager.training.runs.metrics import Metrics
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun
from envmanager_tests.training.test_run_folder import files_of, put_things_of_others

TABLES: dict[str, Any] = {
    "manager": {"kind": "simple", "env": "CartPole-v1", "n_envs": 2, "wait": "all", "worker_env": {"TOKEN": "secret"}},
    "training": {"steps": 128, "evaluation_episodes": 2, "device": "cpu", "seed": 7},
    "trainers": {"*": {"kind": "ppo", "rollout": 64, "epochs": 1, "minibatch": 64, "learning_rate": 1e-5}},
}
OURS = ("config.json", "versions.json", "episodes.csv", "metrics.csv")


class Silent(Report):
    """Says nothing."""


def with_tables(**changes: dict[str, Any]) -> dict[str, Any]:
    return {name: {**table, **changes.get(name, {})} for name, table in TABLES.items()}


def train(directory: Path, tables: dict[str, Any], **how: bool) -> TrainingRun:
    run = TrainingRun(TrainingPlan.parse(tables, directory, **how), Silent())
    run.go()
    return run


def test_the_whole_config_is_there_with_every_default(tmp_path: Path) -> None:
    train(tmp_path, TABLES)
    found = load_config(tmp_path / "config.json", TRAINING_TABLES)

    assert found["training"]["seed"] == 7
    assert found["training"]["keep"] == 3
    assert found["manager"]["n_envs"] == 2
    assert found["manager"]["timeouts"]["step_s"] == 60.0
    assert found["trainers"].keys() == {"default"}, "by behavior, as they are known now"
    assert found["trainers"]["default"]["learning_rate"] == 1e-5
    assert found["trainers"]["default"]["gamma"] == 0.99


def test_a_training_from_what_another_left_is_the_same_training(tmp_path: Path) -> None:
    first = train(tmp_path / "first", with_tables(training={"rounds": {"steps": 16, "train": [["default"]]}}))
    tables = load_config(tmp_path / "first" / "config.json", TRAINING_TABLES)
    second = train(tmp_path / "second", tables)

    for name, array in first.trainers["default"].state()[0].items():
        np.testing.assert_array_equal(array, second.trainers["default"].state()[0][name], err_msg=name)
    left = [records.read(tmp_path / name) for name in ("first", "second")]
    assert left[0] is not None
    assert left[0] == left[1]


def test_who_changes_the_seed_of_such_a_config_changes_that_of_the_environments(tmp_path: Path) -> None:
    train(tmp_path, TABLES)
    tables = load_config(tmp_path / "config.json", TRAINING_TABLES)
    tables["training"]["seed"] = 8

    assert TrainingPlan.parse(tables, tmp_path).manager.seed == 8


def test_what_may_be_secret_is_not_written(tmp_path: Path) -> None:
    train(tmp_path, TABLES)

    assert not any(b"secret" in content for content in files_of(tmp_path).values())


def test_the_versions_are_there(tmp_path: Path) -> None:
    train(tmp_path, TABLES)
    told = json.loads((tmp_path / "versions.json").read_text())

    assert told["python"] == platform.python_version()
    for name in ("numpy", "torch", "gymnasium", "attrs"):
        assert told["packages"][name] == version(name)


def test_what_no_config_can_say_is_named() -> None:
    assert records.plain(TrainingPlan) == "envmanager.training.runs.plan:TrainingPlan"
    assert records.plain(Path("a/b")) == "a/b"
    assert records.plain(np.arange(2)) == [0, 1]
    assert records.plain(Wait.any()) == "any"
    assert records.plain(Wait.any(max_lead=3))["max_lead"] == 3
    assert records.plain((Metrics("csv"), Metrics("wandb", {"project": "x"}))) == ["csv", {"wandb": {"project": "x"}}]
    assert json.dumps(records.plain({1: object(), "b": b"x", "c": {3}, "d": np.float32(0.5)}))


def test_what_is_written_of_a_manager_makes_the_same_manager() -> None:
    options = ManagerOptions(
        env="a:b",
        n_envs=4,
        n_workers="auto",
        local_envs=1,
        wait=Wait.any(timeout_s=2.0),
        restarts=RestartPolicy(within_s=math.inf),
    )
    tables = {"manager": json.loads(json.dumps(records.plain(options))), "trainers": {"*": {"kind": "ppo"}}}

    assert TrainingPlan.parse(tables, Path()).manager == options


def test_the_command_reads_it_and_goes_on_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(run, TABLES)
    config = str(run / "config.json")

    assert run_command_line(["train", config, "--plain"]) == 2, "it holds a training run"
    assert "--resume" in capsys.readouterr().err
    assert run_command_line(["train", config, "--plain", "--resume", "--steps", "256"]) == 0
    assert run_command_line(["train", config, "--plain", "--dir", str(tmp_path / "again"), "--steps", "64"]) == 0
    n_steps = [checkpoints.load_latest(path / "checkpoints").training.n_steps for path in (run, tmp_path / "again")]
    assert n_steps == [256, 64]
    assert json.loads((run / "config.json").read_text())["training"]["steps"] == 256


def test_somebodys_own_config_json_goes_where_others_go(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TABLES))

    assert run_folder_of(tmp_path / "config.json") == Path("runs/config")
    assert run_folder_of(tmp_path / "ppo.yaml") == Path("runs/ppo")


# Files of others.


def test_a_folder_with_ones_own_files_in_it_survives_every_command(tmp_path: Path) -> None:
    run, config = tmp_path / "run", tmp_path / "config.yaml"
    tables = with_tables(
        manager={"worker_env": None},
        training={"evaluate_every": 64, "checkpoint_every": 32, "keep": 1, "metrics": ["csv", "tensorboard"]},
    )
    config.write_text(json.dumps(tables).replace("1e-05", "1.0e-05"))  # which is YAML
    own = ("tensorboard/events.out.tfevents.1.mine", "control.toml", "config.toml", "notes.txt", "data/big.bin")
    others = {name: f"# mine: {name}".encode() for name in own}
    for name, content in others.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)

    arguments = [str(config), "--plain", "--dir", str(run)]
    for more, exit_code in (
        ([], 0),
        ([], 2),
        (["--resume", "--steps", "256"], 0),
        (["--force"], 0),
        (["--force", "--seed", "3", "--steps", "64"], 0),
        (["--resume", "--force"], 2),
        (["--resume", "--seed", "3", "--steps", "96"], 0),
    ):
        if more == ["--resume", "--steps", "256"]:
            others |= put_things_of_others(run)
        assert run_command_line(["train", *arguments, *more]) == exit_code, more
        found = files_of(tmp_path / "run.1" if (tmp_path / "run.1").exists() else run)
        assert {name: found.get(name) for name in others} == others, more
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "run", "run.1", "run.2"}
    assert {path.name for path in run.iterdir()} >= {*OURS, "checkpoints", "tensorboard"}
    n_events = [len(list((tmp_path / name / "tensorboard").glob("events*"))) for name in ("run", "run.1", "run.2")]
    assert n_events == [2, 3, 1], "of a training and its second part, in run.1 beside mine"


def test_they_are_written_anew_with_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    train(tmp_path, TABLES)
    os.chmod(tmp_path / "config.json", 0o666)
    train(tmp_path, with_tables(training={"steps": 256}), resume=True)

    mask = os.umask(0o022)
    os.umask(mask)
    for name in ("config.json", "versions.json", "checkpoints/best"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~mask


# Going on with another config.


def test_another_seed_or_another_kind_of_trainer_is_refused_before_an_environment_is_made(tmp_path: Path) -> None:
    train(tmp_path, TABLES)
    before = files_of(tmp_path)
    tables = with_tables(manager={"env": "never:made"}, training={"seed": 8})
    tables["trainers"] = {"default": {"kind": "dqn"}}

    with pytest.raises(UsageError) as caught:
        train(tmp_path, tables, resume=True)

    assert "training.seed was 7 and is 8, trainers.default.kind was 'ppo' and is 'dqn'" in str(caught.value)
    assert all(word in str(caught.value) for word in ("config.json", "--force", "--dir"))
    assert files_of(tmp_path) == before


def test_what_does_not_fit_the_checkpoint_is_told_with_what_has_changed(tmp_path: Path) -> None:
    train(tmp_path, TABLES)
    tables = with_tables(training={"steps": 256})
    tables["trainers"] = {"*": {**TABLES["trainers"]["*"], "hidden": [8]}}

    with pytest.raises(UsageError, match=r"trainers\.default\.hidden was \[64, 64\] and is \[8\]"):
        train(tmp_path, tables, resume=True)


def test_what_may_change_is_told_and_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, TABLES)
    tables = with_tables(manager={"n_envs": 4, "env": "gymnasium:CartPole-v1"}, training={"steps": 256})
    tables["trainers"] = {"*": {**TABLES["trainers"]["*"], "gamma": 0.9}}
    caplog.clear()
    train(tmp_path, tables, resume=True)

    (told,) = [each.getMessage() for each in caplog.records if "goes on with a changed config" in each.getMessage()]
    assert "manager.env was 'CartPole-v1' and is 'gymnasium:CartPole-v1'" in told
    assert "trainers.default.gamma was 0.99 and is 0.9" in told
    assert "n_envs" not in told
    saved = records.read(tmp_path)
    assert saved is not None
    assert saved["trainers"]["default"]["gamma"] == 0.9


def test_the_same_config_goes_on_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, TABLES)
    train(tmp_path, with_tables(training={"steps": 256}), resume=True)

    assert not [each for each in caplog.records if "config" in each.getMessage()]


def test_a_training_of_before_there_were_such_files_goes_on(tmp_path: Path) -> None:
    train(tmp_path, TABLES)
    (tmp_path / "config.json").unlink()
    (tmp_path / "versions.json").unlink()
    train(tmp_path, with_tables(training={"steps": 256}), resume=True)

    assert records.read(tmp_path) is not None


def test_a_mistake_in_the_metrics_is_named_before_anything_is_made(tmp_path: Path) -> None:
    for given, words in (
        ("csv", "metrics should be a list"),
        (["tensorbord"], "did you mean tensorboard"),
        (["csv", "csv"], "names 'csv' twice"),
        ([{"wandb": 3}], "metrics.wandb should be a mapping"),
        ([{"wandb": {}, "csv": {}}], "is in it"),
    ):
        with pytest.raises(ConfigError, match=words):
            TrainingPlan.parse(with_tables(training={"metrics": given}), tmp_path)
    with pytest.raises(UsageError, match=r"no option metrics\.tensorboard\.dir; did you mean directory"):
        train(
            tmp_path, with_tables(manager={"env": "never:made"}, training={"metrics": [{"tensorboard": {"dir": "x"}}]})
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chosen", [["csv", "unreachable"], ["unreachable", "csv"]])
def test_a_service_that_cannot_be_reached_is_known_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[str]
) -> None:
    from envmanager.training.runs import metrics

    find = metrics._find

    def unreachable(facts: metrics.RunFacts) -> metrics.MetricsWriter:
        raise ConnectionError("nobody answers")

    monkeypatch.setitem(metrics.KINDS, "unreachable", ("no:matter", None))
    monkeypatch.setattr(metrics, "_find", lambda kind: unreachable if kind == "unreachable" else find(kind))

    with pytest.raises(UsageError, match="metrics of unreachable cannot be opened: ConnectionError: nobody answers"):
        train(tmp_path, with_tables(training={"metrics": chosen}))
    train(tmp_path, TABLES)
