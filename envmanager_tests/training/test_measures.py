"""Measures, such as success rates: named once, they are in metrics, evaluations, tables and what a run prints."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from envmanager import SimpleEnvManager, UsageError, make_manager
from envmanager.cli.app import run_command_line
from envmanager.policy import RandomPolicy
from envmanager.training.evaluation import evaluate
from envmanager_tests.serving.asking import Succeeding, succeeding
from envmanager_tests.training.puzzles import SMALL_PPO

ENV = "envmanager_tests.serving.asking:Succeeding"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tables = {
        "manager": {"kind": "simple", "env": ENV, "n_envs": 2, "measures": ["is_success"]},
        "training": {"steps": 400, "evaluate_every": 200, "evaluation_episodes": 4, "metrics": ["csv"]},
        "trainers": {"*": SMALL_PPO},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tables))
    return path


def test_a_training_tells_them_in_metrics_and_evaluations_and_at_its_end(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    assert run_command_line(["train", str(config), "--dir", str(tmp_path / "run"), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert re.search(r"is_success 0\.\d+ while training", capsys.readouterr().out)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        metrics = list(csv.DictReader(file))

    assert result["measures_of"]["default"]["is_success"] == pytest.approx(0.5, abs=0.1)
    assert result["evaluation"]["measures"] == {"default": {"is_success": 0.5}}
    names = {row["name"]: float(row["value"]) for row in metrics}
    assert names["default/is_success"] == pytest.approx(0.5, abs=0.1)
    assert names["default/evaluation_is_success"] == 0.5

    assert (
        run_command_line(["evaluate", str(tmp_path / "run"), "--episodes", "4", "--out", str(tmp_path / "a.csv")]) == 0
    )
    assert "is_success 0.5" in capsys.readouterr().out
    with (tmp_path / "a.csv").open() as file:
        assert sorted(row["is_success"] for row in csv.DictReader(file)) == ["0.0", "0.0", "1.0", "1.0"]


def test_a_resumed_training_has_the_measures_of_the_last_episodes(tmp_path: Path, config: Path) -> None:
    out, command = tmp_path / "result.json", ["train", str(config), "--dir", str(tmp_path / "run"), "--out"]
    assert run_command_line([*command, str(out), "--plain"]) == 0
    assert run_command_line([*command, str(out), "--resume", "--steps", "402"]) == 0
    assert json.loads(out.read_text())["measures_of"] == {"default": {"is_success": pytest.approx(0.5, abs=0.02)}}


def test_numbers_in_infos_may_be_arrays_without_dimensions() -> None:
    class Measured(Succeeding):
        def step(self, action: Any) -> Any:
            *step, info = super().step(action)
            return *step, {**info, "rate": np.array(0.25, np.float32), "text": np.str_("3"), "huge": 10**400}

    with SimpleEnvManager(Measured, measures=["rate", "text", "huge"]) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
        episodes = manager.episodes
        manager.reset()
        while not episodes.count:
            manager.step()
        assert episodes.means_of_measures() == {"rate": 0.25}


@pytest.mark.parametrize("given", [{"tasks": range(6)}, {"episodes_per_env": 3}], ids=["tasks", "shares"])
def test_an_evaluation_has_the_mean_of_the_episodes_that_have_the_measure(given: dict[str, Any]) -> None:
    with SimpleEnvManager(succeeding, 2, measures=["is_success", "of_no_episode"]) as manager:
        policies = {name: RandomPolicy(spec) for name, spec in manager.behavior_specs.items()}
        evaluation = evaluate(manager, policies, **given)

    assert evaluation.means_of_measures("default") == {"is_success": pytest.approx(4 / 6)}
    assert [row["is_success"] for row in evaluation.rows()].count(1.0) == 4
    assert "of_no_episode" not in next(iter(evaluation.rows()))


def test_a_measure_that_no_info_has_is_told_with_those_there_are(
    tmp_path: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = ["--set", "manager.measures=[is_succes]", "--set", "training.evaluate_every=null"]
    assert run_command_line(["train", str(config), "--dir", str(tmp_path / "run"), "--plain", *chosen]) == 0
    (told,) = [each.getMessage() for each in caplog.records if "measure" in each.getMessage()]
    assert "'is_succes'" in told
    assert "is_success" in told


@pytest.mark.parametrize("wrong", ["is_success", [1], {"is_success": 1}, ["return"], ["seed"], ["frozen"]])
def test_measures_are_a_list_of_names_that_no_table_has_anyway(wrong: Any) -> None:
    with pytest.raises(UsageError, match="measures"):
        SimpleEnvManager(succeeding, measures=wrong)
    with pytest.raises(UsageError, match="measures"):
        make_manager({"kind": "simple", "env": ENV, "measures": wrong})
