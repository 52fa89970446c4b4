"""``envmanager tune``: what is tried, which is best, what is written and shown; no process is started."""

from __future__ import annotations

import pytest
from rich.console import Console

from envmanager.cli.app import run_command_line
from envmanager.cli.config_files import load_config
from envmanager.cli.output import LiveOutput, PlainOutput
from envmanager.cli.tune import RESTARTS, TunePlan
from envmanager.cli.tune_display import TuneDisplay, by_speed, cells
from envmanager.cli.tuning import (
    Candidate,
    Trial,
    best,
    candidates,
    command_line,
    config_text,
    halve,
    n_rounds,
    remaining,
    restart_options,
    summarize_failures,
    trials_for,
)
from envmanager.errors import ConfigError, UsageError, WorkerDied
from envmanager.options import RestartPolicy
from envmanager.placing.placement import IN_PROCESS, Probe
from envmanager.registry import ManagerOptions, structure


def trial(steps_per_s=0.0, *, n_envs=8, n_workers=2, wait="any", **changes):
    return Trial(Candidate(n_envs, n_workers, wait), n_steps=int(steps_per_s), seconds=1.0, **changes)


# What is tried.


def test_a_given_number_of_environments_is_tried_in_this_process_and_in_many_workers():
    tried = candidates(8, 2)

    assert {candidate.n_envs for candidate in tried} == {8}
    assert {candidate.n_workers for candidate in tried} == {IN_PROCESS, 1, 2, 4, 8}


def test_the_number_of_cores_and_one_worker_each_are_always_tried():
    assert {3, 17} <= {candidate.n_workers for candidate in candidates(17, 3)}


def test_without_a_number_of_environments_several_are_tried():
    assert {candidate.n_envs for candidate in candidates(None, 2)} == {2, 8, 32}


def test_waiting_is_tried_where_it_can_make_a_difference():
    waits = {}
    for candidate in candidates(8, 2):
        waits.setdefault(candidate.n_workers, []).append(candidate.wait)

    assert waits == {IN_PROCESS: ["any"], 1: ["any"], 2: ["any", "all"], 4: ["any", 2, "all"], 8: ["any", 4, "all"]}


@pytest.mark.parametrize("n_envs", [1, 2, 3, 7, 64])
def test_every_candidate_is_a_manager_that_can_be_made(n_envs):
    tried = candidates(n_envs, 4)

    assert len(set(tried)) == len(tried)
    for candidate in tried:
        assert structure(ManagerOptions, {"env": "x", **candidate.options()}).n_envs == n_envs


def test_the_most_promising_comes_first():
    sleeping = Probe(wall_s=0.02, cpu_s=0.0)

    first, *_, last = trials_for(candidates(8, 2), sleeping, 2)

    assert first.candidate.n_workers == 8
    assert last.candidate.n_workers in (IN_PROCESS, 1)


def test_trials_that_can_share_a_manager_stand_together():
    order = [each.candidate.n_workers for each in trials_for(candidates(8, 2), Probe(wall_s=1e-3, cpu_s=1e-3), 2)]

    assert len([n for n, before in zip(order, [None, *order], strict=False) if n != before]) == len(set(order))


# Halving.


@pytest.mark.parametrize(("n_trials", "rounds"), [(1, 1), (2, 1), (3, 2), (8, 3), (10, 4)])
def test_two_meet_in_the_last_round(n_trials, rounds):
    trials = [trial(n) for n in range(1, n_trials + 1)]

    for _ in range(n_rounds(n_trials) - 1):
        halve(trials)

    assert n_rounds(n_trials) == rounds
    assert [left.steps_per_s for left in remaining(trials)] in ([n_trials], [n_trials, n_trials - 1][::-1])


def test_the_slower_half_is_out():
    slow, fast, middle, slowest = trials = [trial(20), trial(40), trial(30), trial(10)]

    halve(trials)

    assert remaining(trials) == [fast, middle]
    assert slow.is_out
    assert slowest.is_out


def test_what_failed_is_out_and_never_the_best():
    failed = trial(1000)
    failed.fail(UsageError("no room"))

    assert remaining([failed]) == []
    assert best([failed]) is None


def test_rounds_are_taken_together():
    tried = Trial(Candidate(8, 2))
    tried.add(100, 1.0)
    tried.add(500, 2.0)

    assert tried.steps_per_s == 200


# The best.


def test_the_fastest_is_best():
    trials = [trial(10), trial(30), trial(20)]

    assert best(trials) is trials[1]


def test_of_those_as_fast_the_lightest_is_best():
    fastest, lighter = trial(1000, n_workers=8), trial(990, n_workers=2)

    assert best([fastest, lighter, trial(500, n_workers=1)]) is lighter


def test_what_is_out_is_not_the_best_again():
    assert best([trial(1000, is_out=True), trial(900)]).steps_per_s == 900


def test_what_was_not_measured_is_not_the_best():
    assert best([Trial(Candidate(8, 2))]) is None
    assert best([trial(10, is_out=True), Trial(Candidate(8, 4))]).steps_per_s == 10


# What is written and shown.


@pytest.mark.parametrize("candidate", [Candidate(8, IN_PROCESS), Candidate(8, 2, "all"), Candidate(8, 4, 2)])
def test_the_config_says_what_was_tried(tmp_path, candidate):
    path = tmp_path / "best.toml"
    plan = TunePlan(env='envs:"Odd" ü', start_method="spawn")
    path.write_text(config_text(plan.settings(Trial(candidate)), remark="how it was found"))

    tables = load_config(path)

    assert tables["run"] == {}
    assert tables["manager"] == {"env": 'envs:"Odd" ü', **candidate.options(), "start_method": "spawn"}
    assert path.read_text().startswith("# how it was found\n")


def test_the_command_says_the_same():
    expected = "envmanager run --env a:b --manager subprocess --n-envs 8 --n-workers 2 --wait all"

    assert command_line(TunePlan(env="a:b").settings(trial(wait="all"))) == expected


def died(trial, exit="EXIT(3)", *, restarts):
    trial.restarts = restarts
    trial.last_failure = WorkerDied(worker_id=0, env_ids=[0], phase="step", exit=exit)
    return trial


def test_restarts_are_allowed_in_the_config_and_the_command_when_there_were_some(tmp_path):
    assert restart_options(trial(10), RESTARTS) == {}
    settings = {
        **TunePlan(env="a:b").settings(trial()),
        **restart_options(died(trial(10), restarts=5), RestartPolicy(max_restarts=7, backoff_s=0.0)),
    }
    (tmp_path / "best.toml").write_text(config_text(settings, remark="found"))

    assert load_config(tmp_path / "best.toml")["manager"]["restarts"] == {"max_restarts": 7, "backoff_s": 0.0}
    assert command_line(settings).endswith(
        "--wait any --set manager.restarts.max_restarts=7 --set manager.restarts.backoff_s=0.0"
    )


def test_restarts_are_counted_and_each_reason_of_a_failure_is_given_once():
    failed = [trial(n_workers=4), trial(n_workers=4, wait="all")]
    for each in failed:
        each.fail(UsageError("no room\nmore about it"))

    assert summarize_failures([trial(10)]) == []
    assert summarize_failures([died(trial(1000), restarts=2), died(trial(500), "SIGSEGV", restarts=1), *failed]) == [
        "failed: 2 placements: no room",
        "restarts: 3 in 1,500 environment steps; the last failure: SIGSEGV",
    ]


def test_failures_are_told_without_the_number_of_the_worker():
    failed = [trial(n_workers=4), trial(n_workers=8)]
    for worker_id, each in enumerate(failed):
        each.fail(WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit="SIGSEGV"))

    assert summarize_failures([trial(10), *failed]) == ["failed: 2 placements: died in step (SIGSEGV)"]
    assert summarize_failures([trial(10), failed[0]]) == [
        "failed: 8 environments in 4 workers, wait any: died in step (SIGSEGV)"
    ]


def test_a_reason_for_which_all_failed_is_left_to_the_error():
    failed = trial()
    failed.fail(UsageError("no room"))

    assert summarize_failures([failed]) == []


def test_without_a_probe_the_most_workers_come_first():
    order = [each.candidate.n_workers for each in trials_for(candidates(8, 2), None, 2)]

    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (Candidate(1, IN_PROCESS), "1 environment in this process"),
        (Candidate(8, 1), "8 environments in 1 worker, wait any"),
        (Candidate(8, 4, 2), "8 environments in 4 workers, wait 2"),
    ],
)
def test_a_candidate_says_what_it_is(candidate, text):
    assert str(candidate) == text


@pytest.mark.parametrize(
    ("shown", "row"),
    [
        (trial(1234), ("2", "8", "4", "any", "1,234", "", "")),
        (trial(1234, n_workers=IN_PROCESS), ("in process", "8", "8", "", "1,234", "", "")),
        (trial(10, n_workers=3, is_out=True), ("3", "8", "2-3", "any", "10", "", "out")),
        (trial(10, restarts=1200), ("2", "8", "4", "any", "10", "1,200", "")),
        (Trial(Candidate(8, 8, 4)), ("8", "8", "1", "4", "", "", "")),
    ],
)
def test_a_trial_is_a_row(shown, row):
    assert cells(shown, "") == row


def test_rows_come_by_speed_and_what_is_out_after_the_others():
    a, b, c = trial(10), trial(20), trial(30, is_out=True)

    assert by_speed([a, b, c]) == [b, a, c]


def test_plain_lines_name_the_best_and_what_failed(capsys):
    trials = [trial(10), died(trial(30), restarts=2), trial(n_workers=8)]
    trials[2].fail(UsageError("no room"))
    display = TuneDisplay(PlainOutput())

    with display.running(trials):
        for each in trials:
            display.update(each, is_done=False)
            display.update(each, is_done=True)
    display.show_result(trials, trials[1], ["best: …"], "envmanager run best.toml")
    display.show_notice("warning", "worker 0 is replaced")

    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len([line for line in lines if " s  8 environments" in line]) == 3
    assert any("failed: no room" in line for line in lines)
    assert lines[1].endswith("8 environments in 2 workers, wait any: 30 environment steps/s, 2 restarts")
    assert lines[5].split() == ["2", "8", "4", "any", "30", "2", "best"]
    assert lines[-2:] == ["best: …", "run it: envmanager run best.toml"]
    assert err == "Warning: worker 0 is replaced\n"


def test_a_terminal_is_redrawn_and_keeps_the_table(capsys):
    console = Console(record=True, width=100, height=8, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    trials = [trial(n) for n in range(1, 11)]
    display = TuneDisplay(LiveOutput(console, console))

    display.show_start("starting")
    with display.running(trials):
        display.update(trials[0], is_done=False)
        display.update(trials[1], is_done=True)
        display.show_notice("error", "worker 0 is dropped")
    display.show_result(trials, trials[-1], ["a line that is too long for this terminal " * 3], "envmanager run " * 9)

    console.file.close()
    text = console.export_text()
    assert "starting" in text
    assert "Error: worker 0 is dropped" in text
    assert "best" in text
    assert [len(line) <= 100 for line in text.splitlines() if "a line that" in line] == [True]
    assert capsys.readouterr().out == f"run it: {'envmanager run ' * 9}\n", "one line, to be copied"


# Mistakes in the call.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "best.json"], "let its name end in .toml"),
        (["--out", "no_such_folder/best.toml"], "no directory"),
        (["--start-method", "frok"], "start_method must be 'forkserver' or 'spawn'"),
        (["--env", "NoSuchEnv-v0"], "NoSuchEnv"),
    ],
)
def test_a_mistake_in_the_call_ends_with_2(capsys, arguments, text):
    assert run_command_line(["tune", "--env", "CartPole-v1", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_plan_is_checked_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"\.toml"):
        TunePlan(env="CartPole-v1", out=tmp_path / "best.yaml")


def test_on_a_cluster_actors_are_tried_and_no_more_than_there_is_room_for():
    tried = candidates(256, 4, "ray")

    assert {candidate.n_workers for candidate in tried} == {1, 2, 4}
    assert {candidate.options()["kind"] for candidate in tried} == {"ray"}
    assert {candidate.n_envs for candidate in candidates(None, 2, "ray")} == {8, 64, 256}
    first, *_ = trials_for(tried, Probe(wall_s=1e-6, cpu_s=1e-6), 4)
    assert first.candidate.n_workers == 1, "calls cost more than such steps"


@pytest.mark.parametrize(
    ("words", "message"),
    [({"kind": "godot"}, "subprocess or ray"), ({"kind": "ray", "start_method": "spawn"}, "Ray starts its processes")],
)
def test_what_cannot_be_tuned_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        TunePlan(env="CartPole-v1", **words)
