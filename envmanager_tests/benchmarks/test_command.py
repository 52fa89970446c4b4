"""``python -m benchmarks`` in this process, with a launcher that measures nothing."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from benchmarks import run as run_module
from benchmarks.command import app
from benchmarks.launcher import NotMeasured
from benchmarks.plan import plan_bench
from benchmarks.protocol import Measured
from envmanager.cli.app import run_command_line


class FakeLauncher:
    """Every contender takes a hundred steps in a second; those named in ``failing`` fail."""

    failing: dict[str, NotMeasured | BaseException] = {}

    def __init__(self, pythons):
        self.versions = {"ours": {"numpy": "2"}}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, job):
        if job.contender in self.failing:
            raise self.failing[job.contender]
        return Measured(100, 1.0, 0.5, 0.75, 0.1)


@pytest.fixture(autouse=True)
def failing(monkeypatch):
    monkeypatch.setattr(run_module, "Launcher", FakeLauncher)
    monkeypatch.setattr(FakeLauncher, "failing", {})
    return FakeLauncher.failing


def measure(console=None, **words):
    console = console or Console(file=io.StringIO(), width=80)
    exit_code = run_module.run(plan_bench(quick=True, contenders=["ours,gymnasium"], **words), console)
    return exit_code, console.file.getvalue()


def test_what_was_measured_is_shown_written_and_drawn(tmp_path, mocker):
    mocker.patch("benchmarks.plots.draw_all", autospec=True, return_value=[tmp_path / "a.png"])

    exit_code, text = measure(out=tmp_path / "a.json", plot=tmp_path)

    said = json.loads((tmp_path / "a.json").read_text())
    assert exit_code == 0
    assert re.search(r"envmanager \(in process\) +100 +1 ", text)
    assert (said["ended"], len(said["turns"]), said["versions"]) == ("done", 6, {"ours": {"numpy": "2"}})
    assert "drawn: " in text


@pytest.mark.parametrize("goals", [False, True])
def test_the_goals_of_this_project_are_shown_to_those_who_ask_for_them(goals, tmp_path):
    _, text = measure(out=tmp_path / "a.json", goals=goals)

    assert ("Goals of this project" in text) is goals
    assert ("not measured" in text or "met" in text.split()) is goals
    assert ("targets" in json.loads((tmp_path / "a.json").read_text())) is goals


def test_lines_for_a_file_are_not_cut_at_the_width_of_a_terminal():
    _, text = measure()

    assert max(map(len, text.splitlines())) > 80


@pytest.mark.parametrize(("kind", "exit_code"), [("failed", 1), ("missing", 0), ("unable", 0)])
def test_only_a_failure_is_a_failure(failing, kind, exit_code):
    failing["ours-processes"] = NotMeasured(kind, "it fell over")

    assert measure()[0] == exit_code
    assert ": it fell over" in measure()[1]


def test_an_interrupt_leaves_what_was_measured(failing, tmp_path):
    failing["gymnasium-async"] = run_module.Stopped(2)

    exit_code, text = measure(out=tmp_path / "a.json")

    assert exit_code == 130
    assert "interrupted" in text
    assert json.loads((tmp_path / "a.json").read_text())["ended"] == "interrupted"


def test_a_terminal_sees_who_ran_last_until_the_table_comes():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)

    _, text = measure(console)

    assert "1/6 the bare environment, alone: 100 env steps/s" in text
    assert re.search(r"\r {79}\r\nnoop, 8 environments", text)


def test_the_command_takes_lists_with_commas_and_refuses_what_it_does_not_know(capsys, tmp_path):
    arguments = ["--quick", "--contenders", "ours-simple,gymnasium", "--out", str(tmp_path / "a.json")]

    assert run_command_line(arguments, app) == 0
    assert "Gymnasium SyncVectorEnv" in capsys.readouterr().out
    assert run_command_line(["--workload", "nop"], app) == 2
    assert "did you mean 'noop'" in capsys.readouterr().err
    assert run_command_line(["--out", str(tmp_path)], app) == 2
