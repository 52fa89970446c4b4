"""What a display and metrics writers are told of a training run."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch")

from envmanager.cli.display import Rate
from envmanager.cli.output import LiveOutput, PlainOutput
from envmanager.cli.train import TrainDisplay, state_of
from envmanager.observe.episodes import Episodes, FinishedEpisode
from envmanager.observe.stats import ManagerStats
from envmanager.training.controller import Update
from envmanager.training.curriculum import Curriculum
from envmanager.training.evaluation import Evaluation
from envmanager.training.learners import LearnersChanged
from envmanager.training.runs.figures import Figures


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []
        self.closed = False
        self.fails = False

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        self.written += [(name, value, step) for name, value in scalars.items()]

    def close(self) -> None:
        self.closed = True

    def steps_of(self, tag: str) -> list[int]:
        return [step for name, _, step in self.written if name == tag]

    def values_of(self, tag: str) -> list[float]:
        return [value for name, value, _ in self.written if name == tag]


class Shown(TrainDisplay):
    def __init__(self) -> None:
        super().__init__(PlainOutput())
        self.updates: list[tuple[str, int]] = []
        self.lines: list[str] = []

    def show_line(self, text: str) -> None:
        self.lines.append(text)

    def show_update(self, run: Any, update: Update, now: float) -> None:
        self.updates.append((update.behavior, update.n_steps))


def run_of(
    *,
    n_steps: int = 0,
    before: int = 0,
    recent: tuple[FinishedEpisode, ...] = (),
    learning: tuple[str, ...] = ("speaker", "listener"),
) -> Any:
    """A run as far as reports look at it."""
    episodes = Episodes()
    episodes.recent.extend(recent)
    trainers, manager = dict.fromkeys(("speaker", "listener")), SimpleNamespace(stats=lambda: ManagerStats(()))
    controller = SimpleNamespace(
        manager=manager, trainers=trainers, episodes=episodes, n_steps=n_steps, learning=learning, round=None
    )
    return SimpleNamespace(
        controller=controller,
        trainers=trainers,
        manager=manager,
        plan=SimpleNamespace(training=SimpleNamespace(steps=1000)),
        began=0.0,
        n_steps_before=before,
        curriculum=None,
    )


def update(behavior: str, n_steps: int) -> Update:
    return Update(behavior, 1, n_steps, {"loss": 0.5}, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    for module in ("cli.train", "training.runs.figures"):
        monkeypatch.setattr(f"envmanager.{module}.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def figures_of(writer: Writer, **facts: Any) -> Figures:
    """Figures of a run as of ``run_of``."""
    return Figures(run_of(**facts).controller, {"ours": writer})


@pytest.mark.usefixtures("clock")
def test_no_behavior_is_left_out_when_all_are_updated_at_once(clock: SimpleNamespace) -> None:
    writer, shown = Writer(), Shown()
    figures = figures_of(writer)

    for n_steps in (10, 20, 30):
        for behavior in ("speaker", "listener"):
            shown.updated(run_of(), update(behavior, n_steps))
            figures.updated(None, update(behavior, n_steps))
        clock.now += 0.3

    assert writer.steps_of("speaker/loss") == writer.steps_of("listener/loss") == [10, 30]
    assert shown.updates == [(behavior, n) for n in (10, 30) for behavior in ("speaker", "listener")]


SPOKEN = FinishedEpisode("speaker", 0, 1.0, 10)
HEARD = FinishedEpisode("listener", 1, 3.0, 20)


@pytest.mark.usefixtures("clock")
def test_what_is_of_all_behaviors_is_written_once_at_a_time() -> None:
    figures = figures_of(writer := Writer(), recent=(SPOKEN, HEARD))

    for behavior in ("speaker", "listener"):
        figures.updated(None, update(behavior, 10))

    assert writer.steps_of("return/mean") == writer.steps_of("envmanager/steps") == [10]
    assert (writer.values_of("return/mean"), writer.values_of("length/mean")) == ([2.0], [15.0])


@pytest.mark.usefixtures("clock")
def test_each_behavior_has_a_return_and_a_length_of_its_own() -> None:
    figures = figures_of(writer := Writer(), recent=(SPOKEN, HEARD))

    for behavior in ("speaker", "listener"):
        figures.updated(None, update(behavior, 10))

    told = {name: value for name, value, _ in writer.written}
    assert (told["speaker/return"], told["speaker/length"]) == (1.0, 10.0)
    assert (told["listener/return"], told["listener/length"]) == (3.0, 20.0)


@pytest.mark.usefixtures("clock")
def test_the_last_update_of_each_behavior_is_told_with_the_checkpoint() -> None:
    figures, shown = figures_of(writer := Writer(), recent=(SPOKEN,)), Shown()
    for n_steps in (10, 20):
        for behavior in ("speaker", "listener"):
            shown.updated(run_of(), update(behavior, n_steps))
            figures.updated(None, update(behavior, n_steps))

    for _ in range(2):
        figures.saved(Path("checkpoint"))
        shown.saved(Path("checkpoint"))

    assert writer.steps_of("speaker/loss") == writer.steps_of("listener/loss") == [10, 20]
    assert writer.steps_of("return/mean")[-1] == 20
    assert shown.updates == [(behavior, n) for n in (10, 20) for behavior in ("speaker", "listener")]


def test_lessons_and_the_last_values_of_parameters_are_shown_and_written(clock: SimpleNamespace) -> None:
    until = {"measure": "reward", "threshold": 1}
    run, writer = run_of(), Writer()
    lessons = [{"value": 0.5, "until": until}, {"value": "high"}]
    run.curriculum = Curriculum({"wall": {"lessons": lessons}, "size": 3}, seed=0)
    figures = Figures(run.controller, {"ours": writer}, run.curriculum)

    run.curriculum.next_task(0)
    figures.updated(run, update("speaker", 10))

    shown = state_of(run, Rate(0.0), 1.0)
    assert (shown["wall"], shown["size"]) == ("0.5 (lesson 1/2)", "3")
    names = ("curriculum/wall/lesson", "curriculum/wall/value", "curriculum/size/value")
    assert [writer.values_of(name) for name in names] == [[1], [0.5], [3]]


def test_a_narrow_terminal_does_not_part_a_name_from_its_value() -> None:
    for width in range(40, 120, 5):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, height=40, highlight=False)
        output = LiveOutput(console, console)
        run = run_of()
        run.curriculum = Curriculum({f"parameter {k}": k + 0.25 for k in range(5)}, seed=0)
        run.curriculum.next_task(0)
        run.manager.placement = ""
        run.plan.manager = SimpleNamespace(env_name="walls", n_envs=1, kind="simple", engine=None)
        display = TrainDisplay(output)
        display.started(run)
        with display.drawing():
            display.updated(run, update("speaker", 10))
            text = console.file.getvalue()
        for k in range(5):
            assert f"parameter {k} {k}.25" in text, width


def test_there_is_no_return_before_an_episode_has_ended(clock: SimpleNamespace) -> None:
    run = run_of()
    figures = Figures(run.controller, {"ours": (writer := Writer())})

    figures.updated(run, update("speaker", 10))
    clock.now += 1
    run.controller.episodes.recent.extend((SPOKEN, HEARD))
    figures.updated(run, update("speaker", 20))

    assert not any(math.isnan(value) for _, value, _ in writer.written)
    assert [(value, step) for tag, value, step in writer.written if tag == "return/mean"] == [(2.0, 20)]


@pytest.mark.usefixtures("clock")
def test_a_loss_that_is_no_number_is_written_as_such() -> None:
    figures = figures_of(writer := Writer())

    figures.updated(None, Update("speaker", 1, 10, {"loss": math.nan}, 0.0))

    assert math.isnan(writer.values_of("speaker/loss")[0])


def test_the_speed_is_that_of_this_run_since_it_was_last_told(clock: SimpleNamespace) -> None:
    run = run_of(n_steps=80_000, before=80_000)
    figures = Figures(run.controller, {"ours": (writer := Writer())})
    figures.started(run)

    for n_steps in (80_100, 80_700):
        clock.now += 2
        run.controller.n_steps = n_steps
        figures.updated(run, update("speaker", n_steps))

    assert writer.values_of("training/steps_per_s") == [50.0, 300.0]


def test_an_evaluation_is_written_for_all_and_for_each_behavior() -> None:
    figures = figures_of(writer := Writer(), n_steps=500)

    evaluation = Evaluation({"a": [1.0, 3.0], "{b}": [8.0]}, {"a": [10, 20], "{b}": [30]}, lost=2)
    figures.evaluated(None, evaluation, is_best=True)
    on_the_way = list(writer.written)
    figures.evaluated_at_the_end(None, evaluation)

    assert writer.written[len(on_the_way) :] == on_the_way
    assert on_the_way == [
        ("evaluation/return", 4.0, 500),
        ("evaluation/length", 20.0, 500),
        ("a/evaluation_return", 2.0, 500),
        ("a/evaluation_length", 15.0, 500),
        ("{b}/evaluation_return", 8.0, 500),
        ("{b}/evaluation_length", 30.0, 500),
        ("evaluation/lost", 2, 500),
    ]


def test_a_writer_that_fails_is_left_out_loudly_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Writer(), Writer()
    bad.fails = True
    with Figures(run_of().controller, {"bad": bad, "good": good}) as figures:
        for n_steps in (10, 20):
            figures.changed(None, change(is_round=False, n_steps=n_steps))

    assert good.steps_of("speaker/frozen") == [10, 20]
    assert good.closed
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "metrics of bad end here" in told
    assert "No space left" in told


def test_a_display_shows_the_speed_of_this_run() -> None:
    told = state_of(run_of(n_steps=900, before=800, recent=(SPOKEN,)), Rate(0.0, 800), now=10.0)

    assert told["agent steps"] == "900/1,000 (10/s)"
    assert (told["return of 'speaker'"], told["return of 'listener'"], told["length"]) == ("1", "–", "10")


def test_the_speed_that_is_shown_is_that_of_the_last_seconds() -> None:
    rate = Rate(0.0, 0)
    shown = [
        state_of(run_of(n_steps=n_steps), rate, now=now)["agent steps"].partition("(")[2]
        for now, n_steps in ((1.0, 900), (2.0, 900), (3.0, 900), (4.0, 950), (104.0, 1000))
    ]

    assert shown == ["900/s)", "450/s)", "0/s)", "25/s)", "0/s)"]


def test_a_display_says_what_evaluations_brought_and_which_is_the_best() -> None:
    shown = Shown()
    shown.evaluated(run_of(n_steps=3000), Evaluation({"default": [1.0, 3.0]}, n_episodes=2), is_best=True)
    shown.evaluated(run_of(n_steps=4000), Evaluation({"a": [1.0, 2.0], "b": [2.0]}, n_episodes=1), is_best=False)
    shown.evaluated(run_of(n_steps=5000), Evaluation({"default": [4.0]}, n_episodes=1, lost=3), is_best=False)

    assert shown.lines == [
        "evaluation  2 ± 1, from 1 to 3, 2 episodes, after 3,000 agent steps, the best so far",
        "evaluation  1.5 ± 0.5, from 1 to 2, 1 episode of 'a', 2 returns, after 4,000 agent steps",
        "evaluation  2, 1 episode of 'b', after 4,000 agent steps",
        "evaluation  4, 1 episode, 3 lost (incomplete), after 5,000 agent steps",
    ]


def change(*, is_round: bool, n_steps: int) -> LearnersChanged:
    return LearnersChanged(
        frozen=("speaker",), unfrozen=(), learning=("listener",), n_steps=n_steps, cause="freeze", is_round=is_round
    )


def test_who_is_frozen_is_a_scalar_of_each_behavior_and_a_line_unless_it_is_only_the_next_round() -> None:
    run, writer, shown = run_of(), Writer(), Shown()

    figures = Figures(run.controller, {"ours": writer})
    for learning, n_steps in (("listener", 10), ("speaker", 20)):
        run.controller.learning = (learning,)
        changed = change(is_round=n_steps == 20, n_steps=n_steps)
        figures.changed(run, changed)
        shown.changed(run, changed)

    assert writer.written == [
        ("speaker/frozen", 1.0, 10),
        ("listener/frozen", 0.0, 10),
        ("speaker/frozen", 0.0, 20),
        ("listener/frozen", 1.0, 20),
    ]
    assert shown.lines == ["speaker frozen, listener learning from agent step 10 on (freeze)"]


def test_who_is_frozen_from_the_beginning_is_written_too() -> None:
    figures_of(writer := Writer(), learning=("listener",), n_steps=5).started(None)
    assert writer.written == [("speaker/frozen", 1.0, 5), ("listener/frozen", 0.0, 5)]


def test_a_display_says_who_learns_when_not_all_do() -> None:
    run = run_of(n_steps=900, learning=("listener",))
    assert state_of(run, Rate(0.0), now=10.0)["learning"] == "listener"
    assert "learning" not in state_of(run_of(), Rate(0.0), now=10.0)
