"""Folders with Godot projects; no engine is needed."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from envmanager.cli.godot import install_addon_command
from envmanager.errors import NotWritten, UsageError
from envmanager.godot.games import AUTOLOAD, copy_demo, demos, install_addon, new_project


@pytest.fixture
def game(tmp_path: Path) -> Path:
    """A game of somebody for Godot 4, who has heard of nothing."""
    text = 'config_version=5\n\n[application]\n\nconfig/name="Mine"\n\n[rendering]\n\nx=1\n'
    (tmp_path / "project.godot").write_text(text)
    return tmp_path


def test_the_addon_is_copied_and_becomes_an_autoload(game: Path) -> None:
    addon = install_addon(game)

    assert addon == game / "addons" / "envmanager"
    assert (addon / "bridge.gd").read_text().startswith("extends Node")
    text = (game / "project.godot").read_text()
    assert text.endswith(f"[autoload]\n\n{AUTOLOAD}\n")
    assert 'config/name="Mine"' in text


def test_a_second_time_changes_nothing_but_the_addon(game: Path) -> None:
    addon = install_addon(game)
    before = (game / "project.godot").read_text()
    (addon / "bridge.gd").write_text("# an older one")

    install_addon(str(game))

    assert (game / "project.godot").read_text() == before
    assert "extends Node" in (addon / "bridge.gd").read_text()


def test_files_of_an_older_addon_go_and_what_godot_made_for_the_others_stays(game: Path) -> None:
    addon = install_addon(game)
    old = [addon / name for name in ("sync.gd", "sync.gd.uid", "icons/old.svg", "icons/old.svg.import", "parts/a.gd")]
    kept = [addon / name for name in ("bridge.gd.uid", "icons/agent.svg.import", "notes.txt")]
    other = game / "addons" / "other" / "sync.gd"
    for file in [*old, *kept, other]:
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text("mine")

    install_addon(game)

    assert [file.name for file in old if file.exists()] == []
    assert [file.read_text() for file in [*kept, other]] == ["mine"] * 4


def test_the_command_says_what_comes_next(game: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_addon_command(game)

    said = capsys.readouterr().out
    assert "EnvManagerArena" in said
    assert f"envmanager godot check {game}" in said


@pytest.fixture
def at_most_100_kb() -> Iterator[None]:
    """Limits the length of files, as ``ulimit -f`` does: a disk that becomes full, for a test."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@pytest.mark.usefixtures("at_most_100_kb")
def test_a_project_file_that_cannot_be_written_stays_as_it_was(game: Path) -> None:
    file = game / "project.godot"
    before = file.read_text().ljust(99_990, ";")
    file.write_text(before)

    with pytest.raises(NotWritten, match=r"project\.godot cannot be written"):
        install_addon(game)
    assert file.read_text() == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(NotWritten, match="game cannot be written: Not a directory"):
        new_project(tmp_path / "file" / "game")


def test_other_autoloads_stay(game: Path) -> None:
    file = game / "project.godot"
    file.write_text(file.read_text() + '\n[autoload]\n\nMusic="*res://music.gd"\n')

    install_addon(game)

    assert file.read_text().count("[autoload]") == 1
    assert f"[autoload]\n\n{AUTOLOAD}\n" in file.read_text()
    assert 'Music="*res://music.gd"' in file.read_text()


PLUGIN = {4: '"res://addons/envmanager/plugin.cfg"', 3: '"envmanager"'}
KIND = {4: "PackedStringArray", 3: "PoolStringArray"}


@pytest.mark.parametrize("major", [4, 3])
@pytest.mark.parametrize("others", [None, "", '"res://addons/gut/plugin.cfg"'])
def test_the_plugin_is_enabled_beside_others(tmp_path: Path, major: int, others: str | None) -> None:
    file = tmp_path / "project.godot"
    before = "" if others is None else f"[editor_plugins]\n\nenabled={KIND[major]}({others})\n"
    file.write_text(f"config_version={major + 1}\n\n{before}")
    for _ in range(2):
        install_addon(tmp_path)
        all_of_them = f"{others}, {PLUGIN[major]}" if others else PLUGIN[major]
        assert file.read_text().count(f"[editor_plugins]\n\nenabled={KIND[major]}({all_of_them})\n") == 1
        assert file.read_text().count("plugins]") == 1


def test_a_project_of_godot_3_gets_the_addon_for_it(game: Path) -> None:
    (game / "project.godot").write_text("; a comment\nconfig_version=4\n")

    assert "PoolByteArray" in (install_addon(game) / "wire.gd").read_text()


@pytest.mark.parametrize("text", [None, "config_version=3\n", "no version\n", f"config_version={'5' * 5000}\n"])
def test_a_folder_without_a_project_of_these_versions_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "project.godot").write_text(text)

    with pytest.raises(UsageError, match=r"project\.godot"):
        install_addon(tmp_path)
    assert not (tmp_path / "addons").exists()


def test_an_autoload_of_the_same_name_is_not_written_over(game: Path) -> None:
    file = game / "project.godot"
    file.write_text(file.read_text() + '\n[autoload]\n\nEnvManager="*res://mine.gd"\n')

    with pytest.raises(UsageError, match="another name"):
        install_addon(game)
    assert not (game / "addons").exists()


def test_an_autoload_that_the_editor_named_by_its_uid_is_ours(game: Path) -> None:
    file = game / "project.godot"
    (install_addon(game) / "bridge.gd.uid").write_text("uid://b0r14csdorl7k\n")
    text = file.read_text().replace("res://addons/envmanager/bridge.gd", "uid://b0r14csdorl7k")
    file.write_text(text)

    install_addon(game)

    assert file.read_text() == text


@pytest.mark.parametrize("major", [4, 3])
@pytest.mark.parametrize("name", ["coin_chase", "rolling_ball"])
def test_a_demo_is_copied_with_the_addon(tmp_path: Path, name: str, major: int) -> None:
    project = copy_demo(name, major, tmp_path / "demo")

    assert (project / f"{name}.tscn").is_file()
    assert (project / "addons" / "envmanager" / "plugin.cfg").is_file()
    assert f"config_version={major + 1}" in (project / "project.godot").read_text()


def test_there_are_two_demos() -> None:
    assert demos() == ("coin_chase", "rolling_ball")


def test_an_unknown_demo_and_an_unknown_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="coin_chase, rolling_ball"):
        copy_demo("chess", 4, tmp_path)
    with pytest.raises(UsageError, match="Godot 5"):
        copy_demo("coin_chase", 5, tmp_path)


@pytest.mark.parametrize("major", [4, 3])
def test_a_new_project_has_the_name_of_its_folder(tmp_path: Path, major: int) -> None:
    project = new_project(tmp_path / "wumpus", major)

    text = (project / "project.godot").read_text()
    assert 'config/name="wumpus"' in text
    assert text.count(AUTOLOAD) == 1
    assert {"arena.gd", "player.gd", "game.tscn", "addons"} <= {path.name for path in project.iterdir()}


def test_a_new_project_writes_over_no_other(game: Path) -> None:
    with pytest.raises(UsageError, match="already"):
        new_project(game)
