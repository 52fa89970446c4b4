"""What may be said about engines, and what is said about mistakes in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envmanager import ConfigError, UsageError, make_manager
from envmanager.godot import games
from envmanager.godot.games import UNFINISHED, Game, command_for, find_engine, find_game, import_command
from envmanager.godot.options import EngineOptions, GodotOptions


def program(path: Path, version: str = "") -> str:
    """Make a program that reports this version, as an engine does, and counts in a file how often it was started."""
    path.write_text(f"#!/bin/sh\necho started >> {path}.log\necho {version}\n")
    path.chmod(0o700)
    return str(path)


def project(folder: Path, *, version: int = 5, more: str = "") -> Path:
    folder.mkdir()
    (folder / "project.godot").write_text(f"config_version={version}\n\n[physics]\n\n{more}\n")
    return folder


def test_a_mapping_becomes_options() -> None:
    assert GodotOptions(engine={"ticks_per_action": 8, "speed": "realtime"}).engine.ticks_per_action == 8
    assert GodotOptions().engine == EngineOptions()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"tick_per_action": 8}, "did you mean engine.ticks_per_action"),
        ({"ticks_per_action": 0}, "ticks_per_action must be a whole number of at least 1"),
        ({"speed": "fast"}, "speed must be 'max' or 'realtime'"),
        ({"attach": "10.0.0.1:4000"}, "attach must be"),
        ({"attach": "127.0.0.1:99999"}, "attach must be"),
        ({"attach": f"127.0.0.1:{'9' * 5000}"}, "attach must be"),
        ({"parameters": {"when": object()}}, "parameters cannot travel into an engine"),
        ({"window": 1}, "true or false"),
    ],
)
def test_a_mistake_is_named_with_its_path(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GodotOptions(engine=value)


def test_other_kinds_of_managers_refuse_an_engine() -> None:
    with pytest.raises(ConfigError, match="'simple' has no option engine"):
        make_manager({"kind": "simple", "env": "CartPole-v1", "engine": {"speed": "max"}})


def test_a_pack_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "game.pck").write_text("no pack")

    with pytest.raises(UsageError, match="is no exported pack, or is damaged"):
        find_game(str(tmp_path / "game.pck"), EngineOptions(), tmp_path)


def test_a_game_that_is_not_there_is_named_with_what_there_could_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no Godot game.*demo:rolling_ball"):
        find_game(str(tmp_path / "nothing"), EngineOptions(), tmp_path)
    with pytest.raises(UsageError, match="there is no demo 'chess'"):
        find_game("demo:chess", EngineOptions(binary=program(tmp_path / "godot")), tmp_path)


def test_a_folder_without_a_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no project\.godot"):
        find_game(str(tmp_path), EngineOptions(), tmp_path)


def test_a_file_that_is_no_game_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("?")
    with pytest.raises(UsageError, match="nor a program that may be run"):
        find_game(str(tmp_path / "notes.txt"), EngineOptions(), tmp_path)


@pytest.mark.parametrize(("version", "name"), [(5, "godot4"), (4, "godot3-server")])
def test_the_engine_that_fits_the_project_is_found_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, name: str
) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    found = program(bin_folder / name)
    monkeypatch.delenv(games.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(bin_folder))

    game = find_game(str(project(tmp_path / "game", version=version)), EngineOptions(), tmp_path)

    assert (game.binary, game.major) == (found, version - 1)


def test_without_an_engine_the_error_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(games.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt-get install godot3-server"):
        find_engine(major=3)
    with pytest.raises(UsageError, match=r"godotengine\.org"):
        find_game("demo:rolling_ball", EngineOptions(), tmp_path)


def test_an_engine_that_was_chosen_comes_before_the_variable_and_that_before_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, variable = program(tmp_path / "chosen"), program(tmp_path / "variable")
    monkeypatch.setenv(games.VARIABLE, variable)
    assert find_engine(chosen, 4) == (4, chosen)
    assert find_engine(major=4) == (4, variable)
    with pytest.raises(UsageError, match=r"engine\.binary is .*no program"):
        find_engine(str(tmp_path / "nothing"), 4)


def test_an_engine_is_what_it_reports_and_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official = program(tmp_path / "Godot_v4.6.3-stable_linux.x86_64", "4.6.3.stable.official.7d41c59c4")
    monkeypatch.setenv(games.VARIABLE, official)
    assert games.find_major() == 4
    assert find_game("demo:rolling_ball", EngineOptions(), tmp_path / "scratch").major == 4
    assert find_engine(major=4) == (4, official)
    assert Path(f"{official}.log").read_text() == "started\n"


def test_the_variable_is_left_aside_where_it_names_an_engine_of_the_other_major(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(games, "BY_MAJOR", {4: ("my-godot4", "my-godot"), 3: ("my-godot3", "my-godot")})
    four = program(tmp_path / "four", "4.6.3.stable")
    monkeypatch.setenv(games.VARIABLE, four)
    with pytest.raises(
        UsageError, match=r"\$ENVMANAGER_GODOT is '.*four', an engine of Godot 4\.6\.3, but .* Godot 3, and none is"
    ):
        find_engine(major=3)
    program(tmp_path / "bin" / "my-godot", "4.2.stable")
    with pytest.raises(UsageError, match="but the game is for Godot 3"):
        find_engine(major=3)  # "godot" may be either, and is of Godot 4 here
    three = program(tmp_path / "bin" / "my-godot3", "3.5.2.stable.debian")
    assert find_engine(major=3) == (3, three)
    with pytest.raises(
        UsageError, match=r"engine\.binary is '.*four', an engine of Godot 4.*Name an engine of Godot 3"
    ):
        find_engine(four, 3)


def test_the_simulated_time_is_the_projects_own(tmp_path: Path) -> None:
    godot4 = project(tmp_path / "four", more="common/physics_ticks_per_second=120")
    godot3 = project(tmp_path / "three", version=4, more="common/physics_fps=30")
    options = EngineOptions(binary=program(tmp_path / "godot"))

    assert "--fixed-fps 120" in " ".join(command_for(find_game(str(godot4), options, tmp_path), options))
    assert "--fixed-fps 30" in " ".join(command_for(find_game(str(godot3), options, tmp_path), options))


def test_real_time_and_a_window_are_asked_of_the_engine(tmp_path: Path) -> None:
    game = Game(tmp_path, "godot4", 4, 60)
    assert "--headless" in command_for(game, EngineOptions())
    command = command_for(game, EngineOptions(window=True, speed="realtime"))
    assert "--headless" not in command
    assert "--fixed-fps" not in command


def test_an_engine_without_a_window_is_refused_where_one_is_wanted(tmp_path: Path) -> None:
    folder = project(tmp_path / "game", version=4)
    server = program(tmp_path / "godot3-server")
    assert find_game(str(folder), EngineOptions(binary=server), tmp_path).major == 3
    with pytest.raises(UsageError, match="godot3-server has no window"):
        find_game(str(folder), EngineOptions(binary=server, window=True), tmp_path)


def test_a_project_of_godot_4_is_imported_when_it_is_a_fresh_clone(tmp_path: Path) -> None:
    folder = project(tmp_path / "game")
    game = Game(folder, "godot4", 4, 60)
    assert import_command(game) is not None
    (folder / ".godot" / "editor").mkdir(parents=True)
    assert import_command(game) is not None, "an import that was cut leaves a part of the folder"
    (folder / ".godot" / "editor" / "filesystem_cache10").touch()
    assert import_command(game) is None


def test_a_project_of_godot_3_is_imported_when_it_has_something_to_import(tmp_path: Path) -> None:
    folder = project(tmp_path / "game", version=4)
    game = Game(folder, "godot3", 3, 60)
    assert import_command(game) is None
    (folder / "icon.png").write_text("")
    assert import_command(game) is not None
    (folder / ".import").mkdir()
    assert import_command(game) is None
    (folder / ".import" / UNFINISHED).touch()
    assert import_command(game) is not None
