"""The numbers behind the plots, that they can be drawn, and the tables."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.figures import bars, step_times, worker_step_costs
from benchmarks.machine import cpu_name, facts
from benchmarks.plots import draw_all
from benchmarks.report import to_json
from benchmarks.schedule import LeftOut, Pace, Results
from benchmarks.summary import CellSummary
from benchmarks.tables import cell_table, left_out_lines, target_table, warning_of
from benchmarks.targets import outcomes
from envmanager_tests.benchmarks.turns import turn

pytestmark = pytest.mark.usefixtures("fonts_are_open")


def scaling(n_envs, **rates):
    names = {"bare": 100, **{f"ours-{name}": rate for name, rate in rates.items()}}
    return CellSummary.of([turn(name, rate, workload="scaling", n_envs=n_envs) for name, rate in names.items()])


def sleepers(n_envs, cores):
    turns = [turn(name, 1000, workload="sleepers", n_envs=n_envs, cores=cores) for name in ("bare", "ours-any")]
    return CellSummary.of(turns)


NOOP = CellSummary.of([turn("bare", 100), turn("ours-simple", 50), turn("gymnasium-sync", 25), turn("sb3-dummy", 75)])


def test_a_step_of_all_environments_takes_as_many_as_there_are():
    sequential, processes, linear = step_times([scaling(4, simple=100, processes=200), scaling(2, simple=100)])

    assert sequential.points == ((2, 0.02), (4, 0.04))
    assert processes.points == ((4, 0.02),)
    assert linear.points == ((2, 0.02), (4, 0.04))
    assert "linear" in linear.label


def test_a_worker_step_costs_the_trainers_time_through_its_steps():
    assert worker_step_costs([sleepers(16, 0.2), sleepers(8, 0.1)]).points == ((8, 100.0), (16, 200.0))


def test_bars_stand_in_order_of_speed_and_know_whose_they_are():
    waiting = CellSummary.of([turn(name, 20, workload="waiting") for name in ("bare", "ours-any", "sb3-subproc")])
    (group,) = bars([NOOP, scaling(4, simple=100), waiting])

    assert group.names == ("SB3 DummyVecEnv", "envmanager (in process)", "Gymnasium SyncVectorEnv")
    assert group.rates == (75, 50, 25)
    assert group.ours == (False, True, False)


def test_what_was_measured_is_drawn_and_the_rest_is_not(tmp_path):
    all_of_it = [NOOP, scaling(2, simple=100), scaling(4, simple=90), sleepers(8, 0.1), sleepers(16, 0.2)]

    drawn = draw_all(all_of_it, tmp_path)

    assert [path.name for path in drawn] == ["time-per-step.png", "worker-step-cost.png", "steps-per-second-noop-8.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert draw_all([], tmp_path) == []


def printed(*things):
    console = Console(file=io.StringIO(), width=140)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()


def test_the_table_of_a_workload_has_everyone_the_best_first():
    text = printed(cell_table(NOOP))

    assert text.index("DummyVecEnv") < text.index("envmanager (in process)") < text.index("SyncVectorEnv")
    assert [line.split() for line in text.splitlines() if "Gymnasium" in line] == [
        ["Gymnasium", "SyncVectorEnv", "25", "0.25", "2", "0.50", "1.00"]
    ]


@pytest.mark.parametrize(("workload", "shown"), [("start", "seconds"), ("waiting", "of the limit")])
def test_a_table_shows_what_its_workload_is_about(workload, shown):
    summary = CellSummary.of([turn("bare", 20, workload=workload), turn("ours-any", 100, workload=workload)])

    assert shown in printed(cell_table(summary))


@pytest.mark.parametrize(("rates", "said"), [((100, 110), False), ((100, 190), True)])
def test_a_machine_that_was_not_quiet_is_told(rates, said):
    turns = [turn("bare", rate, round=number) for number, rate in enumerate(rates)]

    assert ("quiet machine" in str(warning_of(CellSummary.of(turns)))) is said


def test_targets_are_met_not_met_or_not_measured():
    text = printed(target_table(outcomes([NOOP])))

    (in_process,) = (line for line in text.splitlines() if "noop 8 " in line and "SyncVectorEnv" in line)
    assert in_process.split()[-5:] == ["2", "envmanager", "(in", "process)", "met"]
    assert "not measured" in text


def test_a_cost_below_nothing_is_not_shown_as_met():
    turns = [turn("bare", 1), turn("ours-processes", 50_000), turn("ours-step", 100_000)]

    text = printed(target_table(outcomes([CellSummary.of(turns)])))

    (of_step,) = (line for line in text.splitlines() if "step() above" in line)
    assert of_step.endswith("lost in the noise")


def test_reasons_are_said_once():
    out = [LeftOut("noop", n, f"sb3-{kind}", "missing", "No module") for n in (8, 64) for kind in ("dummy", "subproc")]
    out += [LeftOut("noop", n, "ours-any", "failed", "it hung") for n in (8, 64)]
    out += [LeftOut("pong", 0, "", "missing", "pong needs ale_py")]

    assert left_out_lines(out) == [
        "skipped: sb3: No module",
        "failed: ours-any (noop 8), ours-any (noop 64): it hung",
        "skipped: pong needs ale_py",
    ]


def test_everything_can_be_said_in_json():
    results = Results([turn("bare", 100), turn("ours-simple", 50)], [LeftOut("noop", 8, "sb3-dummy", "missing", "why")])
    summaries = [CellSummary.of(results.turns)]

    said = to_json(
        *(results, summaries, outcomes(summaries)),
        ended="done",
        pace=Pace(),
        machine=facts(),
        versions={"ours": {"numpy": "2"}},
    )

    again = json.loads(json.dumps(said, allow_nan=False))
    assert again["summary"][0]["contenders"][0]["times_bare"] == 0.5
    assert again["turns"][1]["steps_per_s"] == 50
    assert again["left_out"][0]["reason"] == "why"
    assert again["machine"]["cpus"] >= again["machine"]["cpus_usable"] >= 1


def test_a_processor_without_a_name_has_its_kind(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor: 0\nmodel name\t: Fast One\nmodel name\t: Fast One\n")

    assert cpu_name(tmp_path / "cpuinfo") == "Fast One"
    assert cpu_name(tmp_path / "missing")
