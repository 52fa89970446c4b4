"""What is told of a start that fails, and imports that were cut; a program plays the engine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from envmanager import EnvRaised, RestartPolicy, Timeouts, UsageError, WorkerDied
from envmanager.cli.godot import check_command
from envmanager.godot.manager import GodotEnvManager
from envmanager.hosts.descriptors import wait_for
from envmanager.testing.contract import NumberedActions
from envmanager.testing.fakes import EchoEnvironment
from envmanager_tests.godot.fake_engine_manager import FakeEngineManager

ERROR = "SCRIPT ERROR: Parse Error: no such thing.\n   at: GDScript::reload (res://hero.gd:7)\n"
HANGS = "exec sleep 1000;"
Start = Callable[..., GodotEnvManager]


@pytest.fixture(params=[4, 3], ids=["godot4", "godot3"])
def game(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A game with a picture, in a fresh clone."""
    folder = tmp_path / "game"
    folder.mkdir()
    (folder / "icon.png").touch()
    (folder / "project.godot").write_text(f"config_version={request.param + 1}\n")
    return folder


@pytest.fixture
def program(game: Path, tmp_path: Path) -> Callable[[str, str], str]:
    """A function that makes an engine: a program with one script of the shell to play and one to import."""

    def make(plays: str, imports: str = "") -> str:
        version, path = game.joinpath("project.godot").read_text()[-2], tmp_path / "engine"
        done = f"mkdir -p {game}/.godot/editor {game}/.import; touch {game}/.godot/editor/filesystem_cache10; exit"
        path.unlink(missing_ok=True)
        path.write_text(f"""#!/bin/sh
case "$*" in
--version) echo {int(version) - 1}.2;;
*--import* | *--editor*) echo import >> {tmp_path}/imports; {imports} {done};;
*) {plays}
esac
""")
        path.chmod(0o700)
        return str(path)

    return make


@pytest.fixture
def start(game: Path, program: Callable[[str, str], str]) -> Start:
    """A function that starts the game in such a program."""

    def start(*, plays: str, imports: str = "", **options: Any) -> GodotEnvManager:
        return GodotEnvManager(str(game), 1, engine={"binary": program(plays, imports)}, **options)

    return start


def n_imports(tmp_path: Path) -> int:
    return len((tmp_path / "imports").read_text().splitlines())


def test_an_error_of_a_script_is_told_when_it_is_printed(start: Start) -> None:
    plays = f"echo a line; printf %s {shlex.quote(ERROR)}; {HANGS}"
    with pytest.raises(EnvRaised, match=r"no such thing.*hero\.gd:7") as raised:
        start(plays=plays, timeouts=Timeouts(start_s=math.inf))
    assert raised.value.phase == "start"
    assert "script_errors" in str(raised.value)


def test_a_game_in_csharp_is_named_as_such_in_an_engine_without_it(start: Start) -> None:
    with pytest.raises(WorkerDied, match=r"C#.*without \.NET"):
        start(plays="echo 'ERROR: No loader found for resource: res://Hero.cs (expected type: Script)'")


def test_an_import_that_was_cut_is_made_again_by_the_next_start(start: Start, game: Path, tmp_path: Path) -> None:
    half = f"mkdir {game}/.godot {game}/.import; {HANGS}"
    with pytest.raises(UsageError, match=r"not imported within 0\.5 s"):
        start(imports=half, plays="", timeouts=Timeouts(start_s=0.5))
    assert n_imports(tmp_path) == 1
    for _ in range(2):
        with pytest.raises(WorkerDied):
            start(plays="exit 3")
        assert n_imports(tmp_path) == 2


def test_an_import_that_dies_is_made_again_by_the_next_start(start: Start, game: Path, tmp_path: Path) -> None:
    half = f"mkdir {game}/.godot; kill -KILL $$;"
    for n_before in range(2):
        with pytest.raises(WorkerDied):
            start(imports="" if n_before else half, plays="exit 3")
        assert n_imports(tmp_path) == n_before + 1


def test_a_ctrl_c_ends_the_import_with_the_start(start: Start, tmp_path: Path) -> None:
    imports = f"echo $$ > {tmp_path}/pid; kill -INT {os.getpid()}; {HANGS}"
    with pytest.raises(KeyboardInterrupt):
        start(imports=imports, plays="")
    with contextlib.suppress(ProcessLookupError):
        importing = os.pidfd_open(int((tmp_path / "pid").read_text()))
        assert wait_for([importing], 60.0), "it goes on"
        os.close(importing)
    with pytest.raises(WorkerDied):
        start(plays="exit 3")
    assert n_imports(tmp_path) == 2


def test_a_check_says_at_once_what_it_does(
    program: Callable[[str, str], str], game: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (game / "addons" / "envmanager").mkdir(parents=True)
    (game / "addons" / "envmanager" / "bridge.gd").touch()
    with pytest.raises(typer.Exit):
        check_command(str(game), binary=program("exit 3", ""))
    said = capsys.readouterr()
    assert said.out.startswith(f"{game}: an engine is started\n")
    assert "is imported" in said.err


class Loud(EchoEnvironment):
    """Prints an error of a script, as Godot does, when it is made, and in each step two of one line."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._print("made")

    def step(self, actions: Any) -> Any:
        self._print("step")
        self._print("step")
        return super().step(actions)

    def _print(self, function: str) -> None:
        print(
            f"SCRIPT ERROR: oh, {function} {self._n_steps}\n   at: {function} (res://{function}.gd:3)", file=sys.stderr
        )


class LoudStart(Loud):
    """Prints an error only when it is made."""

    def step(self, actions: Any) -> Any:
        return EchoEnvironment.step(self, actions)


def played(env: Any, n_envs: int = 1, **options: Any) -> FakeEngineManager:
    with FakeEngineManager(env, n_envs, **options) as manager:
        manager.set_policy("default", NumberedActions())
        manager.reset()
        for _ in range(3):
            manager.step("all")
        return manager


def test_an_error_that_an_engine_only_prints_ends_the_start_by_default() -> None:
    with pytest.raises(EnvRaised, match="oh, made") as raised:
        played(LoudStart)
    assert raised.value.phase == "start"


def test_with_warnings_a_game_goes_on_and_each_line_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "envmanager"):
        manager = played(Loud, 2, engine={"script_errors": "warn"})
    assert manager.stats().restarts == 0
    assert [text[text.index("oh") :].split()[1] for text in caplog.messages if "oh, " in text] == ["made", "step"]


def test_where_exceptions_restart_an_error_at_the_start_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "envmanager"):
        manager = played(LoudStart, restarts=RestartPolicy(on_exception="restart"))
    assert manager.stats().restarts == 0
    assert sum("oh, made" in text for text in caplog.messages) == 1
