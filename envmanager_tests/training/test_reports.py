"""What a display and TensorBoard are told of a training."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from envmanager.cli.train import Display, Reports, state_of
from envmanager.observe.episodes import Episodes
from envmanager.observe.stats import ManagerStats
from envmanager.training.controller import Update
from envmanager.training.learners import LearnersChanged


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))

    def steps_of(self, tag: str) -> list[int]:
        return [step for name, _, step in self.written if name == tag]


class Shown(Display):
    def __init__(self) -> None:
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
    recent: tuple[float, ...] = (),
    learning: tuple[str, ...] = ("speaker", "listener"),
) -> Any:
    """A run as far as reports look at it."""
    episodes = Episodes()
    episodes.recent.extend(recent)
    return SimpleNamespace(
        controller=SimpleNamespace(episodes=episodes, n_steps=n_steps, learning=learning, round=None),
        trainers=dict.fromkeys(("speaker", "listener")),
        manager=SimpleNamespace(stats=lambda: ManagerStats(())),
        plan=SimpleNamespace(training=SimpleNamespace(steps=1000)),
        began=0.0,
        n_steps_before=before,
    )


def update(behavior: str, n_steps: int) -> Update:
    return Update(behavior, 1, n_steps, {"loss": 0.5}, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("envmanager.cli.train.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_no_behavior_is_left_out_when_all_are_updated_at_once(clock: SimpleNamespace) -> None:
    writer, shown = Writer(), Shown()
    reports = Reports(shown, writer)

    for n_steps in (10, 20, 30):
        for behavior in ("speaker", "listener"):
            reports.updated(run_of(), update(behavior, n_steps))
        clock.now += 0.3

    assert writer.steps_of("speaker/loss") == writer.steps_of("listener/loss") == [10, 30]
    assert {behavior for behavior, _ in shown.updates} == {"speaker", "listener"}


def test_what_is_of_all_behaviors_is_written_once_at_a_time(clock: SimpleNamespace) -> None:
    writer = Writer()
    reports = Reports(Shown(), writer)

    for behavior in ("speaker", "listener"):
        reports.updated(run_of(recent=(1.0, 3.0)), update(behavior, 10))

    assert writer.steps_of("return/mean") == writer.steps_of("envmanager/steps") == [10]


def test_the_last_update_of_each_behavior_is_told_with_the_checkpoint(clock: SimpleNamespace) -> None:
    writer = Writer()
    reports = Reports(Shown(), writer)
    for n_steps in (10, 20):
        for behavior in ("speaker", "listener"):
            reports.updated(run_of(recent=(1.0,)), update(behavior, n_steps))

    reports.saved(Path("checkpoint"))
    reports.saved(Path("checkpoint"))

    assert writer.steps_of("speaker/loss") == writer.steps_of("listener/loss") == [10, 20]
    assert writer.steps_of("return/mean")[-1] == 20


def test_there_is_no_return_before_an_episode_has_ended(clock: SimpleNamespace) -> None:
    writer = Writer()
    reports = Reports(Shown(), writer)

    reports.updated(run_of(), update("default", 10))
    clock.now += 1
    reports.updated(run_of(recent=(2.0, 4.0)), update("default", 20))

    assert not any(math.isnan(value) for _, value, _ in writer.written)
    assert [(value, step) for tag, value, step in writer.written if tag == "return/mean"] == [(3.0, 20)]


def test_a_display_shows_the_speed_of_this_run() -> None:
    told = state_of(run_of(n_steps=900, before=800), update("default", 900), now=10.0)

    assert told["steps"] == "900/1,000"
    assert told["steps/s"] == "10"


def change(*, is_round: bool, n_steps: int) -> LearnersChanged:
    return LearnersChanged(
        frozen=("speaker",), unfrozen=(), learning=("listener",), n_steps=n_steps, cause="freeze", is_round=is_round
    )


def test_who_is_frozen_is_a_scalar_of_each_behavior_and_a_line_unless_it_is_only_the_next_round() -> None:
    writer, shown = Writer(), Shown()
    reports = Reports(shown, writer)

    reports.changed(run_of(learning=("listener",)), change(is_round=False, n_steps=10))
    reports.changed(run_of(learning=("speaker",)), change(is_round=True, n_steps=20))

    assert writer.written == [
        ("speaker/frozen", 1.0, 10),
        ("listener/frozen", 0.0, 10),
        ("speaker/frozen", 0.0, 20),
        ("listener/frozen", 1.0, 20),
    ]
    assert shown.lines == ["speaker frozen, listener learning from step 10 on (freeze)"]


def test_who_is_frozen_from_the_beginning_is_written_too() -> None:
    writer, shown = Writer(), Shown()
    shown.show_start = lambda run: None  # type: ignore[method-assign]

    Reports(shown, writer).started(run_of(learning=("listener",), n_steps=5))
    assert writer.written == [("speaker/frozen", 1.0, 5), ("listener/frozen", 0.0, 5)]


def test_a_display_says_who_learns_when_not_all_do() -> None:
    run = run_of(n_steps=900, learning=("listener",))
    assert state_of(run, update("listener", 900), now=10.0)["learning"] == "listener"
    assert "learning" not in state_of(run_of(), update("listener", 900), now=10.0)
