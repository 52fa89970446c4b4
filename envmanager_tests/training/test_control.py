"""The file by which a person changes a training run while it runs: carried out once, or reported once and ignored."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envmanager import UsageError
from envmanager.training.learners import LearnersState
from envmanager.training.runs import checkpoints
from envmanager.training.runs.control import EVERY_S, LARGEST, Control, ControlFile
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun
from envmanager_tests.envs import Duel


class Looking:
    """Looks at a file again and again, a second later each time; every write is a change of its time."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path = folder / "control.toml"
        self.asked: list[Control] = []
        self.file = ControlFile(self.path, ["hero", "target"], **options)
        self.now = 100.0
        self._writes = 0

    def write(self, text: str) -> None:
        self._writes += 1
        self.path.write_text(text)
        os.utime(self.path, ns=(self._writes, self._writes))

    def look(self, after_s: float = EVERY_S) -> list[Control]:
        """What was asked for since the last time."""
        self.now += after_s
        self.file.obey(self.carry_out, self.now)
        asked, self.asked = self.asked, []
        return asked

    def carry_out(self, control: Control) -> None:
        self.asked.append(control)


@pytest.fixture
def looking(tmp_path: Path) -> Looking:
    return Looking(tmp_path)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def since() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        return texts

    return since


def test_without_a_file_nothing_is_asked_for(looking: Looking) -> None:
    assert looking.look() == []
    assert looking.file.state is None


def test_a_file_is_carried_out_once_each_time_it_is_changed(looking: Looking) -> None:
    looking.write('frozen = ["target"]\ncheckpoint = true\n')
    assert looking.look() == [Control(frozenset({"target"}), checkpoint=True)]
    assert looking.look() == looking.look() == []
    looking.write('frozen = ["target"]\ncheckpoint = true\n')
    assert looking.look() == [Control(frozenset({"target"}), checkpoint=True)]


def test_what_is_not_in_the_file_is_not_asked_for(looking: Looking) -> None:
    looking.write("")
    assert looking.look() == [Control(None, checkpoint=False)]
    looking.write("frozen = []")
    assert looking.look() == [Control(frozenset(), checkpoint=False)]


def test_a_file_that_is_gone_changes_nothing(looking: Looking) -> None:
    looking.write('frozen = ["target"]')
    looking.look()
    looking.path.unlink()
    assert looking.look() == []


def test_it_is_looked_at_once_a_second_at_the_most(looking: Looking) -> None:
    looking.look()
    looking.write("checkpoint = true")
    assert looking.look(after_s=0.5 * EVERY_S) == []
    assert looking.look(after_s=0.5 * EVERY_S) == [Control(None, checkpoint=True)]


def test_what_was_carried_out_before_a_training_was_resumed_is_not_again(looking: Looking, tmp_path: Path) -> None:
    looking.write("checkpoint = true")
    looking.look()
    again = Looking(tmp_path, seen=looking.file.state)
    assert again.look() == []
    os.utime(looking.path)
    assert again.look() == [Control(None, checkpoint=True)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("checkpoint = true\nfrozen = [", "not valid TOML"),
        ("frozen = ['target'\ncheckpoint = true", "not valid TOML: Unclosed array (at line 2, column 1)"),
        ("\nfrozen = 'target'", "frozen should be a list of behaviors, but is str 'target'"),
        ("# all\nfrozen = [1]", "frozen should be a list of behaviors"),
        ("checkpoint = true\nfrozen = [\n  'hero',\n  'targte',\n]", "'targte', which is not known; did you mean"),
        ("# checkpoint\n\ncheckpoint = 'now'", "checkpoint should be true or false, but is str 'now'"),
        ("frozen = []\nfroze = ['hero']", "there is no option 'froze'"),
        ("[run]\nfrozen = []", "there is no option 'run'"),
    ],
    ids=range(8),
)
def test_a_broken_file_is_reported_once_and_ignored(
    looking: Looking, warnings: Callable[[], list[str]], text: str, words: str
) -> None:
    looking.write(text)
    assert looking.look() == looking.look() == []
    (warning,) = warnings()
    assert f"{looking.path}: " in warning
    assert words in warning
    assert 'Allowed are frozen = ["a behavior", …] and checkpoint = true or false' in warning

    looking.write("frozen = ['hero']")
    assert looking.look() == [Control(frozenset({"hero"}))]
    assert warnings() == []


def test_what_the_training_refuses_is_reported_as_a_mistake_in_the_file(
    looking: Looking, warnings: Callable[[], list[str]]
) -> None:
    def refuse(control: Control) -> None:
        raise UsageError("nobody would learn.")

    looking.carry_out = refuse  # type: ignore[method-assign]
    looking.write("# both\nfrozen = ['hero', 'target']")
    looking.look()
    looking.look()
    (warning,) = warnings()
    assert f"{looking.path}: nobody would learn. Allowed are" in warning


def test_what_is_no_small_file_of_text_is_not_read(looking: Looking, warnings: Callable[[], list[str]]) -> None:
    os.mkfifo(looking.path)  # to open it would wait for ever
    assert looking.look() == []
    looking.path.unlink()
    looking.write("#" * (LARGEST + 1))
    assert looking.look() == []
    looking.path.write_bytes(b"\xff\xfe")
    assert looking.look() == []
    assert ["not a file of at most" in text or "cannot be read" in text for text in warnings()] == [True] * 3


@pytest.mark.parametrize(
    "text",
    ["frozen = " + "1" * 5000, "checkpoint = 0x" + "f" * 5000, "frozen = " + "[" * 3000 + "]" * 3000],
    ids=["digits", "hexadecimal digits", "deep"],
)
def test_what_the_parser_itself_cannot_take_is_reported_once_and_ignored(
    looking: Looking, warnings: Callable[[], list[str]], text: str
) -> None:
    looking.write(text)
    assert looking.look() == looking.look() == []
    assert len(warnings()) == 1


# Whole training runs.

PPO_TABLE = {"kind": "ppo", "rollout": 32, "epochs": 1, "minibatch": 32, "hidden": [8]}


class Steered(Report):
    """Writes the file when so many updates were made, and remembers what became of it."""

    def __init__(self, path: Path, texts: dict[int, str], *, stop_after: int | None = None) -> None:
        self.path = path
        self.texts = texts
        self.n_updates = 0
        self.stop_after = stop_after
        self.versions: list[tuple[int, int]] = []
        self.changes: list[Any] = []
        self.saves: list[int] = []
        self.learning_at_start: tuple[str, ...] = ()

    def started(self, run: Any) -> None:
        self.learning_at_start = run.controller.learning

    def updated(self, run: Any, update: Any) -> None:
        self.n_updates += 1
        self.versions.append((run.trainers["hero"].version, run.trainers["target"].version))
        text = self.texts.pop(self.n_updates, None)
        if text is not None:
            self.path.write_text(text)
        if self.n_updates == self.stop_after:
            run.stop()

    def changed(self, run: Any, change: Any) -> None:
        self.changes.append((change.cause, change.learning, self.n_updates))

    def saved(self, path: Path) -> None:
        self.saves.append(self.n_updates)


@pytest.fixture
def looked_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envmanager.training.runs.control.EVERY_S", 0.0)


def tables_of(*, kind: str = "simple", steps: int = 1200, frozen: bool = False) -> dict[str, Any]:
    return {
        "manager": {"kind": kind, "env": Duel, "n_envs": 4, "n_workers": 2, "wait": "all"},
        "training": {"steps": steps, "evaluation_episodes": 0, "device": "cpu"},
        "trainers": {"hero": PPO_TABLE, "target": {**PPO_TABLE, "frozen": frozen}},
    }


@pytest.mark.usefixtures("looked_at_each_step")
@pytest.mark.parametrize("kind", ["simple", "subprocess"])
def test_a_person_freezes_a_behavior_has_a_checkpoint_written_and_lets_it_learn_again(
    tmp_path: Path, kind: str
) -> None:
    texts = {4: "frozen = ['target']\ncheckpoint = true", 10: "frozen = []"}
    report = Steered(tmp_path / "control.toml", texts)
    result = TrainingRun(TrainingPlan.parse(tables_of(kind=kind), tmp_path), report).go()

    assert result.ended == "done"
    assert report.changes == [
        ("control.toml", ("hero",), 4),
        ("control.toml", ("hero", "target"), 10),
    ]
    assert report.saves[:-1] == [4]
    between = report.versions[3:9]
    assert len({target for _, target in between}) == 1, "frozen it was not updated"
    assert len({hero for hero, _ in between}) == 6
    assert report.versions[-1][1] > between[0][1], "it learned again"


@pytest.mark.usefixtures("looked_at_each_step")
def test_a_broken_file_does_not_end_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = Steered(tmp_path / "control.toml", {2: "frozen = ['hero', 'target']", 4: "nonsense"})
    result = TrainingRun(TrainingPlan.parse(tables_of(), tmp_path), report).go()
    assert result.ended == "done"
    assert report.changes == []
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["no behavior would learn" in text for text in texts] == [True, False]
    assert "not valid TOML" in texts[1]


def test_a_file_that_is_there_before_the_first_step_is_carried_out_then(tmp_path: Path) -> None:
    (tmp_path / "control.toml").write_text("frozen = ['target']")
    report = Steered(tmp_path / "control.toml", {})
    run = TrainingRun(TrainingPlan.parse(tables_of(steps=300), tmp_path), report)
    run.go()
    assert run.trainers["target"].version == 0
    assert run.trainers["target"].state()[1]["n_in_rollout"] == 0
    assert (tmp_path / "control.toml").exists()


@pytest.mark.usefixtures("looked_at_each_step")
def test_who_was_frozen_still_is_when_a_training_is_resumed_and_the_file_is_not_carried_out_again(
    tmp_path: Path,
) -> None:
    first = Steered(tmp_path / "control.toml", {2: "frozen = ['target']\ncheckpoint = true"}, stop_after=8)
    TrainingRun(TrainingPlan.parse(tables_of(), tmp_path), first).go()
    again = Steered(tmp_path / "control.toml", {3: "frozen = ['hero']"})
    TrainingRun(TrainingPlan.parse(tables_of(steps=2000), tmp_path, resume=True), again).go()
    assert again.learning_at_start == ("hero",)
    assert again.changes == [("resumed", ("hero",), 0), ("control.toml", ("target",), 3)]
    assert len(again.saves) == 1, "at the end"
    assert len({target for _, target in again.versions[:3]}) == 1
    told = checkpoints.load_latest(tmp_path / "checkpoints").training.changes
    assert [(change.cause, change.frozen) for change in told] == [
        ("control.toml", ("target",)),
        ("control.toml", ("hero",)),
    ], "all of the training, without that it went on"


def test_what_has_changed_in_the_config_since_a_checkpoint_holds(tmp_path: Path) -> None:
    TrainingRun(TrainingPlan.parse(tables_of(steps=200, frozen=True), tmp_path), Silent()).go()
    saved = checkpoints.load_latest(tmp_path / "checkpoints").training
    assert saved.learners == LearnersState(frozen=("target",))
    again = TrainingRun(TrainingPlan.parse(tables_of(steps=600), tmp_path, resume=True), Silent())
    again.go()
    assert again.trainers["target"].version > 0


def test_force_moves_a_persons_file_with_the_folder(tmp_path: Path) -> None:
    TrainingRun(TrainingPlan.parse(tables_of(steps=200), tmp_path / "run"), Silent()).go()
    (tmp_path / "run" / "control.toml").write_text("frozen = ['target']")
    run = TrainingRun(TrainingPlan.parse(tables_of(steps=200), tmp_path / "run", force=True), Silent())
    run.go()
    assert (tmp_path / "run.1" / "control.toml").exists()
    assert run.trainers["target"].version > 0


class Silent(Report):
    """Says nothing."""
