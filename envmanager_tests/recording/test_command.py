"""The command line records a run, and tells what a recording holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command line is an extra")

from envmanager.cli.app import run_command_line
from envmanager.recording.file import further_part


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.emrec")


def record(path: str, steps: int) -> None:
    command = f"run --env CartPole-v1 --manager simple --n-envs 2 --steps {steps} --seed 0 --plain --record {path}"
    assert run_command_line(command.split()) == 0


def test_a_recorded_run_is_summed_up(path: str, capsys: Any) -> None:
    record(path, 200)
    capsys.readouterr()

    assert run_command_line(["replay", path]) == 0
    told = capsys.readouterr().out
    assert "SimpleEnvManager, 2 environments, 1 workers" in told
    assert "100 of workers (100), 200 of agents" in told
    assert "finished, 0 lost, 2 cut" in told
    assert "in the mean" in told


def test_a_recording_without_a_finished_episode_is_summed_up(path: str, capsys: Any) -> None:
    record(path, 2)

    assert run_command_line(["replay", path]) == 0
    assert "0 finished, 0 lost, 2 cut" in capsys.readouterr().out


def test_what_happened_around_a_step_is_told(path: str, capsys: Any) -> None:
    record(path, 40)
    capsys.readouterr()

    assert run_command_line(["replay", path, "--step", "7"]) == 0
    told = capsys.readouterr().out.splitlines()
    marked = [line for line in told if line.startswith("▶")]
    assert "worker 0 step 7: actions default:" in marked[0]
    assert "worker 0 step 7 arrived: default: reward [1. 1.]" in marked[1]
    assert any("worker 0 step 6 arrived" in line for line in told)
    assert any("worker 0 step 8 arrived" in line for line in told)


def test_further_parts_are_summed_up_too(path: str, capsys: Any) -> None:
    record(path, 40)
    record(further_part(path, 0), 60)
    capsys.readouterr()

    assert run_command_line(["replay", path]) == 0
    told = capsys.readouterr().out
    assert "run.emrec, " in told
    assert "run.2.emrec: SimpleEnvManager" in told
    assert "50 of workers (50), 100 of agents" in told


def test_a_worker_without_a_step_is_an_error(path: str, capsys: Any) -> None:
    record(path, 4)

    assert run_command_line(["replay", path, "--worker", "0"]) == 2
    assert "--worker 0 needs --step" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--step", "999"], ["--worker", "5", "--step", "0"]])
def test_a_step_that_is_not_there_is_an_error(more: list[str], path: str, capsys: Any) -> None:
    record(path, 40)

    assert run_command_line(["replay", path, *more]) == 2
    assert "has no step" in capsys.readouterr().err


def test_a_file_that_is_no_recording_is_an_error(path: str, capsys: Any) -> None:
    assert run_command_line(["replay", path]) == 2
    assert "cannot be read" in capsys.readouterr().err
    Path(path).write_text("no recording at all")
    assert run_command_line(["replay", path]) != 0
    assert "is no recording" in capsys.readouterr().err
