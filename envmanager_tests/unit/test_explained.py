"""The table of ``envmanager run --explain``: what a probe has measured, and the layouts that were compared."""

from __future__ import annotations

import logging

import pytest

from envmanager.cli import explained
from envmanager.cli.app import run_command_line
from envmanager.cli.display import RunDisplay
from envmanager.cli.explained import Explained
from envmanager.cli.output import PlainOutput
from envmanager.placing.placement import Placement, Probe, better_form, choose
from envmanager.ray_cluster import probing
from envmanager.registry import ManagerOptions

CHEAP = Probe(wall_s=10e-6, cpu_s=10e-6)
SLOW = Probe(wall_s=0.1, cpu_s=0.1)
VECTOR = Probe(wall_s=1e-6, cpu_s=1e-6, n_rows=8)


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(explained, "count_cores", lambda: 4)


def told(capsys, placement, **options):
    """The rows of the table, as words, after what was measured."""
    with Explained(ManagerOptions(**options), RunDisplay(PlainOutput())):
        logging.getLogger("envmanager").info("%s", placement)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("measured: ")], [
        line.split() for line in lines[len(placement.probes) :]
    ]


def test_layouts_stand_with_their_times_the_fastest_first_and_the_chosen_one_is_marked(capsys):
    measured, (heads, *rows) = told(capsys, choose(SLOW, 8, 4), kind="auto", n_envs=8)

    assert measured == [
        "measured: a step of an environment takes 100 ms and computes for 100% of that, a message 50 µs; 1 step"
    ]
    assert heads == ["form", "workers", "here", "a", "step", "of", "all", "env", "steps/s"]
    assert {row[1] for row in rows} == {"1", "2", "4", "8", "in"}
    assert [row[1] for row in rows if row[-1] == "chosen"] == [str(choose(SLOW, 8, 4).n_workers)]
    speeds = [float(row[-2 if row[-1] == "chosen" else -1]) for row in rows]
    assert speeds == sorted(speeds, reverse=True)


def test_the_vectorised_form_has_rows_of_its_own(capsys):
    placement = better_form(choose(CHEAP, 8, 4), CHEAP, choose(VECTOR, 8, 4), VECTOR)
    measured, (_, first, *rows) = told(capsys, placement, kind="auto", n_envs=8)

    assert len(measured) == 2
    assert (first[0], first[-1]) == ("vector", "chosen")
    assert [row[0] for row in rows].count("single") == 5


def test_only_what_was_to_be_chosen_is_compared(capsys):
    shared = choose(Probe(wall_s=2e-4, cpu_s=2e-4), 8, 2, in_process=False, local_envs="auto")
    assert shared.local_envs
    _, (_, *rows) = told(capsys, shared, n_envs=8, n_workers="auto", local_envs="auto")
    assert [row[1:3] for row in rows if row[-1] == "chosen"] == [[str(shared.n_workers), str(shared.local_envs)]]
    assert "process" not in {row[2] for row in rows}

    _, (_, *rows) = told(capsys, choose(SLOW, 8, 4, n_workers=3), kind="auto", n_envs=8, n_workers=3)
    assert {row[1] for row in rows} == {"3", "in"}


def test_actors_of_a_cluster_have_the_times_of_calls(capsys):
    _, (_, *rows) = told(capsys, probing.choose(SLOW, 8, 8), kind="ray", n_envs=8, n_workers="auto")

    assert rows[0][1] == "8"
    assert rows[0][3:5] == ["104", "ms"]


def test_where_nothing_was_measured_there_is_no_table(capsys):
    assert told(capsys, Placement("subprocess", 8, "one died"), kind="auto", n_envs=8) == ([], [])


def test_without_a_choice_there_is_nothing_to_explain(capsys):
    assert run_command_line(["run", "--env", "CartPole-v1", "--explain"]) == 2
    assert "--manager auto, or --workers auto" in capsys.readouterr().err
