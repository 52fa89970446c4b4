"""The dock "Training" in the editor of Godot 4: from an opened game to a training run, without a terminal."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envmanager.godot.games import new_project
from envmanager.hosts.descriptors import wait_for
from envmanager_tests.godot.driver import MISSING, find_engine
from envmanager_tests.godot.editors import Editor, Seen

COMMAND = f"{sys.prefix}/bin/envmanager"
ENDS_S = 40.0


@pytest.fixture
def n_steps() -> int:
    """The agent steps of a training: it does not end by itself."""
    return 10**9


@pytest.fixture
def game(tmp_path: Path, n_steps: int) -> Path:
    """A new game in a folder with a space in its name."""
    game = new_project(tmp_path / "my game", 4)
    scene = game / "game.tscn"
    scene.write_text(re.sub("steps = [0-9]+", f"steps = {n_steps}", scene.read_text()))
    return game


@pytest.fixture
def editor(game: Path, tmp_path: Path) -> Iterator[Editor]:
    """An editor without a window in which the game is open, and the command envmanager is named."""
    program = find_engine(4)
    if program is None:
        pytest.skip(MISSING[4])
    with Editor(program, game, output=tmp_path / "editor.txt") as one:
        one.ask("write", "Command", COMMAND)
        yield one


def is_learning(seen: Seen) -> bool:
    return "agent steps" in seen["texts"]["Output"] and bool(seen["returns"])


def has_ended(seen: Seen) -> bool:
    return "Stop" not in seen["can_press"]


def steps_of(run: Path) -> int:
    """The agent steps of the last checkpoint."""
    return int((run / "checkpoints" / "latest").read_text())


def children_of(pid: int) -> list[int]:
    """The pidfds of all processes below this one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        todo += (own := [child for child, its in parents.items() if its == parent])
        found += own
    return [os.pidfd_open(child) for child in found]


def peak_mb(pid: int) -> float:
    """The most memory that the process has had."""
    found = re.search("VmHWM:\\s*([0-9]+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize("n_steps", [8000])
def test_a_training_runs_to_its_end_and_another_gets_a_folder_of_its_own(editor: Editor, game: Path) -> None:
    editor.press("Train")
    seen = editor.wait_until(lambda seen: has_ended(seen) and "Watch" in seen["can_press"])

    assert seen["progress"] >= 0.95 * seen["goal"] > 0
    assert list(seen["returns"]) == ["default"]
    assert "checkpoint" in seen["texts"]["Output"]
    assert seen["texts"]["Line"].endswith(f"train '{game}' --dir '{game}/runs/my game' --until-eof --plain")
    assert (game / "runs" / "my game" / ".gdignore").exists()

    editor.press("Evaluate")
    editor.wait_until(lambda seen: "episodes" in seen["texts"]["Output"] and has_ended(seen))
    editor.ask("choose", "Export", 0)
    editor.wait_until(lambda _: (game / "my game.policy").exists())

    editor.press("Train")
    editor.wait_until(is_learning)
    assert (game / "runs" / "my game-2" / "config.json").exists()
    editor.press("Stop")
    editor.wait_until(has_ended)


def test_a_stopped_training_leaves_no_process_and_goes_on_when_resumed(editor: Editor, game: Path) -> None:
    editor.press("Train")
    editor.wait_until(is_learning)
    left = children_of(editor.process.pid)
    assert len(left) >= 2, "the trainer and an engine at least"

    # What the editor starts meanwhile, such as the game, does not keep the training alive.
    editor.ask("spawn", "sleep", "600")
    editor.press("Stop")
    for fd in left:
        assert wait_for([fd], ENDS_S)
        os.close(fd)
    before = steps_of(game / "runs" / "my game")
    seen = editor.wait_until(has_ended)
    assert "was stopped" in seen["texts"]["State"]

    editor.press("Resume")
    editor.wait_until(is_learning)
    editor.press("Stop")
    editor.wait_until(has_ended)
    assert steps_of(game / "runs" / "my game") > before


@pytest.mark.parametrize("how", ["killed", "closed", "disabled"])
def test_an_editor_that_ends_takes_its_training_with_it(editor: Editor, game: Path, how: str) -> None:
    editor.press("Train")
    editor.wait_until(is_learning)
    left = children_of(editor.process.pid)
    editor.ask("spawn", "sleep", "600")

    if how == "killed":
        editor.process.kill()
    else:
        editor.ask({"closed": "quit", "disabled": "disable"}[how])
    for fd in left:
        assert wait_for([fd], ENDS_S)
        os.close(fd)
    assert steps_of(game / "runs" / "my game") > 0


def test_an_error_of_the_command_is_shown_in_the_tab_beside_the_inspector(editor: Editor, game: Path) -> None:
    editor.wait_until(lambda seen: seen.get("tab") == 1)
    (game / "arena.gd").write_text((game / "arena.gd").read_text() + "\n\nfunc broken(:\n")
    editor.press("Train")
    seen = editor.wait_until(has_ended)
    assert seen["texts"]["State"].startswith("Error: ")
    assert "arena.gd" in seen["texts"]["State"]


def test_a_command_that_is_not_there_can_be_installed_into_the_project(
    editor: Editor, game: Path, tmp_path: Path
) -> None:
    wheel = tmp_path / "envmanager-0-py3-none-any.whl"
    about = "envmanager-0.dist-info/"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("stand_in.py", "def main():\n    print('Error: stands in for the command')\n    return 1\n")
        file.writestr(f"{about}METADATA", "Metadata-Version: 2.1\nName: envmanager\nVersion: 0\n")
        file.writestr(f"{about}WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}entry_points.txt", "[console_scripts]\nenvmanager = stand_in:main\n")
        file.writestr(f"{about}RECORD", "")

    editor.ask("write", "Command", str(tmp_path / "nowhere"))
    seen = editor.wait_until(lambda seen: "nowhere" in seen["texts"]["State"])
    assert "Train" not in seen["can_press"]
    editor.ask("write", "Command", "")
    editor.ask("write", "Requirement", f"--no-index '{wheel}'")
    seen = editor.wait_until(lambda seen: str(wheel) in seen["texts"]["Commands"])
    assert f"python3 -m venv '{game}/.venv'" in seen["texts"]["Commands"]

    editor.press("Install")
    editor.wait_until(lambda seen: has_ended(seen) and "Train" in seen["can_press"])
    assert (game / ".venv" / ".gdignore").exists()
    editor.press("Train")
    seen = editor.wait_until(lambda seen: "stands in" in seen["texts"]["State"])
    assert f"'{game}/.venv/bin/envmanager' train" in seen["texts"]["Line"]


def test_a_folder_of_runs_that_cannot_be_written_is_said(editor: Editor, game: Path) -> None:
    (game / "runs").write_text("a file")
    editor.press("Train")
    seen = editor.wait_until(has_ended)

    assert f"{game}/runs/my game/output.txt cannot be written" in seen["texts"]["State"]


def test_of_a_flood_of_output_the_end_is_shown_and_the_editor_stays_small(editor: Editor, tmp_path: Path) -> None:
    program = tmp_path / "flood"
    program.write_text(
        "#!/bin/sh\nyes 'a line that says nothing at all' | head -c 100000000\necho; echo the end\nexit 7\n"
    )
    program.chmod(0o755)
    editor.ask("write", "Command", str(program))
    before = peak_mb(editor.process.pid)
    editor.press("Train")
    seen = editor.wait_until(lambda seen: "exit code 7" in seen["texts"]["State"])

    assert seen["texts"]["Output"].endswith("the end\n")
    assert peak_mb(editor.process.pid) - before < 100
