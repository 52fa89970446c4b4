"""What a run looks like: the live display, the plain lines and the words they share."""

from __future__ import annotations

import io

import attrs
import pytest
from rich.console import Console

from envmanager.cli.display import (
    LINES_AROUND_ROWS,
    WORKER_COLUMNS,
    Rate,
    RunDisplay,
    RunSummary,
    describe,
    describe_env_ids,
    describe_rest,
    describe_seconds,
    describe_start,
    summary_lines,
    worker_cells,
    write_json,
)
from envmanager.cli.output import LiveOutput, PlainOutput, Table
from envmanager.cli.plan import Plan
from envmanager.observe.episodes import Episodes, FinishedEpisode
from envmanager.observe.stats import ManagerStats, WorkerStats
from envmanager.observe.timing import WorkerTimes
from envmanager.registry import ManagerOptions

PLAN = Plan(ManagerOptions(env="CartPole-v1", n_envs=8, n_workers=4), steps=1000, seed=7)
PLAYED = Episodes(env_steps=420, count=2, returns={0: [10.0], 1 << 32: [30.0]})
PLAYED.recent.extend([FinishedEpisode("default", 0, 10.0, 200), FinishedEpisode("default", 1 << 32, 30.0, 220)])


def stats(n_workers, **changes):
    return ManagerStats(tuple(WorkerStats(i, (i,), steps=10, idle_share=0.25, **changes) for i in range(n_workers)))


def summary(n_workers=2, ended="done"):
    return RunSummary(PLAN, ended, PLAYED, 2.0, stats(n_workers))


def drawn(console):
    return console.file.getvalue()


def frame(live, console, stats):
    """What one update draws."""
    with live.running(100.0):
        before = len(drawn(console))
        live.update(102.0, PLAYED, stats)
        return drawn(console)[before:]


@pytest.fixture
def console():
    return Console(file=io.StringIO(), force_terminal=True, width=120, height=40, highlight=False)


@pytest.fixture
def live(console):
    display = RunDisplay(LiveOutput(console, console))
    display.show_start(PLAN)
    return display


def test_the_live_display_shows_progress_episodes_and_a_row_per_worker(console, live):
    text = frame(live, console, stats(3, failed=True))

    assert "420/1,000 env steps" in text
    assert "210/s" in text
    assert "2 episodes, mean return 20\n" in text
    assert text.count("failed") == 3


def test_restarts_and_dropped_workers_are_shown_per_worker(console, live):
    text = frame(live, console, stats(3, failed=True, dropped=True, restarts=17))

    assert text.count("dropped") == 3
    assert text.count("17") == 3
    assert "failed" not in text


def test_in_a_narrow_terminal_rows_become_columns_if_all_columns_matter():
    names = ["behavior", "value loss", "entropy", "learning rate"]
    table = Table(names, [["hero", "0.1", "0.2", "3e-4"], ["wolf", "0.3", "0.4", "5e-4"]])

    def lines(width):
        return [" ".join("".join(part.text for part in line).split()) for line in console_of(width).render_lines(table)]

    assert lines(60) == [" ".join(names), "hero 0.1 0.2 3e-4", "wolf 0.3 0.4 5e-4"]
    assert lines(35) == ["value learning", "behavior loss entropy rate", "hero 0.1 0.2 3e-4", "wolf 0.3 0.4 5e-4"]
    turned = ["behavior hero wolf", "value loss 0.1 0.3", "entropy 0.2 0.4", "learning rate 3e-4 5e-4"]
    assert lines(30) == lines(24) == turned


def console_of(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def test_a_notice_is_drawn_above_the_live_display_which_stays_whole(console, live):
    with live.running(100.0):
        live.update(102.0, PLAYED, stats(2))
        before = len(drawn(console))
        live.show_notice("warning", "worker 0 [env 0] ended (SIGKILL)\nlast words\n\n")
        text = drawn(console)[before:]

    assert "\x1b[33mWarning: worker 0 [env 0] ended (SIGKILL)\x1b[0m\n\x1b[33mlast words\x1b[0m\n" in text
    assert text.index("last words") < text.index("420/1,000 env steps") < text.index("restarts")


def test_notices_go_to_stderr_when_that_is_a_file(console):
    errors = Console(file=io.StringIO(), width=120)
    live = RunDisplay(LiveOutput(console, errors))
    live.show_start(PLAN)
    with live.running(100.0):
        live.show_notice("error", "worker 0 is dropped")

    assert drawn(errors) == "Error: worker 0 is dropped\n"
    assert "dropped" not in drawn(console)


def test_plain_notices_go_to_stderr(capsys):
    RunDisplay(PlainOutput()).show_notice("warning", "worker 0 ended (SIGKILL)\n")

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Warning: worker 0 ended (SIGKILL)\n")


def test_the_live_display_is_due_at_most_eight_times_a_second(live):
    with live.running(100.0):
        live.update(102.0, PLAYED, stats(1))

        assert live.due == 102.125


@pytest.mark.parametrize(
    ("width", "left_out"), [(120, set()), (60, {"memory"}), (44, {"memory", "p99", "idle", "envs"})]
)
def test_in_a_narrow_terminal_columns_are_left_out_but_nothing_is_cut(width, left_out):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=40)
    live = RunDisplay(LiveOutput(console, console))
    live.show_start(PLAN)

    text = frame(live, console, stats(3, step_time_p50_s=0.0123, step_time_p99_s=0.123, replacing=True, restarts=123))

    assert "…" not in text
    assert text.count("restarting") == text.count("12.3 ms") == 3
    assert {name for name in WORKER_COLUMNS if name.split()[0] not in text} == left_out


@pytest.mark.parametrize(("height", "n_rows"), [(40, 16), (LINES_AROUND_ROWS + 5, 5), (7, 1)])
def test_only_as_many_workers_are_drawn_as_there_is_room_for(height, n_rows):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=height)
    live = RunDisplay(LiveOutput(console, console))
    live.show_start(PLAN)

    text = frame(live, console, stats(64))

    assert text.count("ready") == n_rows
    assert f"and {64 - n_rows} more: " in text
    assert len(text.splitlines()) <= height


def test_the_live_summary_has_the_numbers_and_the_workers(console, live):
    live.show_summary(summary())

    text = drawn(console)
    assert "mean 20, min 10, max 30" in text
    assert "420 of 1,000" in text
    assert text.endswith("\n")


def test_plain_lines_come_every_two_seconds_and_hold_no_control_characters(capsys):
    display = RunDisplay(PlainOutput())
    display.show_start(PLAN)
    with display.running(100.0):
        assert display.due == 102.0
        display.update(102.0, PLAYED, stats(2))
        assert display.due == 104.0
    display.show_summary(summary(n_workers=20))

    out = capsys.readouterr().out
    assert "   2.0 s   42%  420 env steps  210/s  2 episodes, mean return 20\n" in out
    assert "and 4 more: 40 worker steps, 25% idle, 0 failed, 0 restarts" in out
    assert all(character.isprintable() or character == "\n" for character in out)


@pytest.mark.parametrize(
    ("ended", "words"),
    [("done", "all steps taken"), ("interrupted", "interrupted"), ("failed", "stopped by an error")],
)
def test_the_summary_says_how_the_run_ended(capsys, ended, words):
    RunDisplay(PlainOutput()).show_summary(summary(ended=ended))

    assert words in capsys.readouterr().out


def test_what_was_lost_is_said_only_when_a_worker_failed():
    lossless = dict(summary_lines(summary()))
    workers = stats(3, restarts=1).workers + stats(1, failed=True, dropped=True).workers
    lossy = RunSummary(PLAN, "done", attrs.evolve(PLAYED, lost=2), 2.0, ManagerStats(workers, restarts=3, steps_lost=1))

    assert not {"restarts", "lost", "dropped"} & lossless.keys()
    assert (
        dict(summary_lines(lossy)).items()
        >= {
            "restarts": "3",
            "lost": "2 episodes, 1 worker step",
            "dropped": "1 of 4 workers",
        }.items()
    )


@pytest.mark.parametrize(
    ("played", "text"),
    [
        (Episodes(), "no episode has ended yet"),
        (Episodes(lost=1), "no episode has ended yet, 1 lost"),
        (attrs.evolve(PLAYED, lost=3), "2 episodes, mean return 20, 3 lost"),
    ],
)
def test_lost_episodes_are_named_beside_those_that_ended(played, text):
    assert describe(played) == text


def test_the_rate_is_that_of_the_last_two_seconds():
    rate = Rate(0.0)

    told = [rate.at(now, n) for now, n in ((1.0, 100), (2.0, 200), (3.0, 1200), (4.0, 1200), (5.0, 1200))]
    assert told == [100.0, 100.0, 550.0, 500.0, 0.0]


def test_the_rate_is_that_since_the_last_time_where_that_is_longer_ago():
    rate = Rate(0.0, 50)

    assert [rate.at(now, n) for now, n in ((10.0, 150), (20.0, 1150))] == [10.0, 100.0]


def test_the_mean_is_of_the_last_episodes_once_there_are_more():
    many = attrs.evolve(PLAYED, count=12_345)

    assert describe(many) == "12,345 episodes, mean return 20 (last 2)"


def test_two_behaviors_have_a_mean_each_since_what_one_wins_the_other_may_lose():
    played = Episodes(count=2)
    played.recent.extend([FinishedEpisode("hero", 0, 1.5, 200), FinishedEpisode("target", 1, -1.5, 200)])

    assert describe(played) == "2 episodes, mean return of 'hero' 1.5, mean return of 'target' -1.5"


def test_the_rate_of_no_time_is_zero():
    assert Rate(1.0).at(1.0, 5) == 0.0


def test_what_is_started_is_said_in_one_line():
    assert describe_start(PLAN) == "CartPole-v1: 8 environments in 4 workers, manager subprocess, seed 7"


@pytest.mark.parametrize(("env_ids", "text"), [((3,), "3"), ((0, 1, 2), "0-2"), ((0, 4), "0, 4"), ((), "")])
def test_env_ids_are_written_short(env_ids, text):
    assert describe_env_ids(env_ids) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2.5 s"),
        (0.0123, "12.3 ms"),
        (0.0000123, "12.3 µs"),
        (0.0, "0 µs"),
        (1234.0, "1230 s"),
        (0.9999, "1 s"),
        (0.0009999, "1 ms"),
    ],
)
def test_times_are_written_in_the_unit_that_suits_them(seconds, text):
    assert describe_seconds(seconds) == text


def test_nothing_is_said_of_workers_that_are_all_shown():
    assert describe_rest(stats(3).workers, 3) == ""


def test_a_file_that_cannot_be_written_wholly_is_not_there_at_all(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("the one before")

    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"value": float("nan")})

    assert path.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_can_be_read_by_whom_the_umask_allows(tmp_path):
    beside = tmp_path / "beside"
    beside.write_text("")

    write_json(tmp_path / "a.json", {})

    assert (tmp_path / "a.json").stat().st_mode == beside.stat().st_mode


def test_the_usual_time_of_a_step_is_never_above_the_p99_beside_it():
    for times_ns in ([100_300_000] * 50, [1_000_000] * 999 + [10_000_000_000], [7]):
        times = WorkerTimes()
        for number, time_ns in enumerate(times_ns):
            times.stepped(time_ns, 10**12 * (number + 1))
        cells = dict(zip(WORKER_COLUMNS, worker_cells(WorkerStats(0, (0,), **times.shares(0))), strict=True))

        assert cells["median step"] == cells["p99"] == describe_seconds(times_ns[0] / 1e9)
