"""The addon as others get it: a zip that is unpacked into a game, and what the editor then shows of it."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import attrs
import pytest

from envmanager.godot.games import Game, import_command, new_project
from envmanager_tests.godot.test_exports import editor, seen

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from make_addon import make_addon  # noqa: E402

PROJECT = """config_version={version}

[application]

config/name="Empty"
run/main_scene="res://main.tscn"

[autoload]

EnvManager="*res://addons/envmanager/bridge.gd"
"""
SCENE = """[gd_scene load_steps=2 format={format}]

[ext_resource path="res://{script}.gd" type="Script" id=1]

[node name="Main" type="Node"]

[node name="Arena" type="Node" parent="."]
script = ExtResource( 1 )
observation_size = 2
discrete_choices = {ints}( 3 )
"""
ARENA = """extends {base}

var ticks = 0


func reset(from, _options):
	ticks = from.randi() % 10


func observe():
	return {floats}([ticks, 1])


func act(_continuous, discrete):
	ticks += discrete[0]


func after_tick():
	if ticks > 20:
		end_episode()
"""
BY_PATH = '"res://addons/envmanager/arena.gd"'


def unpacked(major: int, tmp_path: Path, base: str = BY_PATH) -> Path:
    """An empty project into which the zip was unpacked, with an arena whose script extends this."""
    game = tmp_path / "game"
    zipfile.ZipFile(make_addon(major, tmp_path)).extractall(game)
    ints, floats = ("PackedInt32Array", "PackedFloat32Array") if major == 4 else ("PoolIntArray", "PoolRealArray")
    (game / "project.godot").write_text(PROJECT.format(version=major + 1))
    (game / "main.tscn").write_text(SCENE.format(format=major - 1, script="arena", ints=ints))
    (game / "arena.gd").write_text(ARENA.format(base=base, floats=floats))
    return game


@pytest.mark.parametrize("version", [4, 3])
class TestZip:
    def test_everything_is_in_the_folder_that_the_asset_library_wants(self, version: int, tmp_path: Path) -> None:
        packed = zipfile.ZipFile(make_addon(version, tmp_path))
        folder = "addons/envmanager/"

        names = set(packed.namelist())
        assert all(name.startswith(folder) for name in names)
        assert {folder + name for name in ("plugin.cfg", "README.md", "icons/agent.svg", "icons/arena.svg")} <= names
        assert packed.read(f"{folder}LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert Path(packed.filename or "").name == f"envmanager-godot{version}-addon-1.0.0.zip"

    def test_the_same_files_give_the_same_bytes(self, version: int, tmp_path: Path) -> None:
        first, second = (make_addon(version, tmp_path / name).read_bytes() for name in ("first", "second"))

        assert first == second


def test_a_game_with_the_unpacked_addon_is_played(major: int, program: str, tmp_path: Path) -> None:
    observed = seen(unpacked(major, tmp_path), program)

    assert len(set(observed)) > 1


def test_a_script_may_extend_by_name_once_the_editor_has_seen_the_addon(
    major: int, program: str, tmp_path: Path
) -> None:
    game = unpacked(major, tmp_path, base="EnvManagerArena")
    if major == 3:  # it keeps the names in project.godot, and imports for pictures only
        editor(program, game, "--editor", "--quit")

    assert len(set(seen(game, program))) > 1


def test_the_icons_of_the_addon_need_no_import_in_godot_3(tmp_path: Path) -> None:
    project = new_project(tmp_path / "envmanager", 3)
    game = Game(project, "godot3", 3, 60)

    assert import_command(game) is None
    (project / "ball.png").touch()
    assert import_command(game) is not None
    assert import_command(attrs.evolve(game, major=4)) is not None


PROBE = {
    4: """@tool
extends EditorPlugin

const Checks := preload("res://addons/envmanager/checks.gd")

var _frames := 0


func _process(_delta):
	_frames += 1
	if _frames == 5:
		get_editor_interface().open_scene_from_path("res://scene.tscn")
	if _frames == 1000:  # it could not be opened
		get_tree().quit()
	var root = get_editor_interface().get_edited_scene_root()
	if root == null or root.scene_file_path != "res://scene.tscn":
		return
	for node in root.get_children():
		var asked = Array(node._get_configuration_warnings()) if node.get_script().is_tool() else null
		print("\\nFOUND ", JSON.stringify([node.name, Array(Checks.warnings_of(node)), Checks.uses_sizes(node), asked]))
	get_tree().quit()
""",
    3: """tool
extends EditorPlugin

const Checks = preload("res://addons/envmanager/checks.gd")

var _frames = 0


func _process(_delta):
	_frames += 1
	if _frames == 5:
		get_editor_interface().open_scene_from_path("res://scene.tscn")
	if _frames == 1000:  # it could not be opened
		get_tree().quit()
	var root = get_editor_interface().get_edited_scene_root()
	if root == null or root.filename != "res://scene.tscn":
		return
	for node in root.get_children():
		var asked = null
		if node.get_script().is_tool():
			asked = Array(node._get_configuration_warning().split("\\n", false))
		print("\\nFOUND ", JSON.print([node.name, Array(Checks.warnings_of(node)), Checks.uses_sizes(node), asked]))
	get_tree().quit()
""",
}
ENABLED = {
    4: 'enabled=PackedStringArray("res://addons/envmanager/plugin.cfg", "res://addons/probe/plugin.cfg")',
    3: 'enabled=PoolStringArray( "envmanager", "probe" )',
}


def shown(major: int, program: str, game: Path, **scripts: str) -> dict[str, list[object]]:
    """What the editor has to say of a scene with a node for each script: warnings, whether sizes count, triangle."""
    parts = [f"[gd_scene load_steps={1 + len(scripts)} format={major - 1}]"]
    parts += [f'[ext_resource path="res://{path}" type="Script" id={i}]' for i, path in enumerate(scripts.values())]
    parts.append('[node name="Main" type="Node"]')
    for i, name in enumerate(scripts):
        parts.append(f'[node name="{name}" type="Node" parent="."]\nscript = ExtResource( {i} )')
    (game / "scene.tscn").write_text("\n\n".join(parts) + "\n")
    if major == 3:  # when it opens a game for the first time, two of its threads read the same scripts
        editor(program, game, "--editor", "--quit")
    probe = game / "addons" / "probe"
    probe.mkdir(exist_ok=True)
    (probe / "probe.gd").write_text(PROBE[major])
    keys = 'name="probe"\ndescription=""\nauthor=""\nversion="1"\nscript="probe.gd"\n'
    (probe / "plugin.cfg").write_text(f"[plugin]\n\n{keys}")
    file = game / "project.godot"
    text = file.read_text().replace("res://main.tscn", "res://scene.tscn")
    file.write_text(f"{text}\n[editor_plugins]\n\n{ENABLED[major]}\n")
    opened = ["--headless", "--editor"] if major == 4 else ["--editor"]
    printed = editor(program, game, *opened)
    found = [json.loads(line.removeprefix("FOUND ")) for line in printed.splitlines() if line.startswith("FOUND ")]
    assert found, printed
    return {name: said for name, *said in found}


class TestEditor:
    def test_an_agent_without_sizes_and_arena_is_told_what_is_missing(
        self, major: int, program: str, tmp_path: Path
    ) -> None:
        game = unpacked(major, tmp_path)
        (game / "agent.gd").write_text('extends "res://addons/envmanager/agent.gd"\n')

        found = shown(major, program, game, Agent="agent.gd", Bare="addons/envmanager/agent.gd")

        warnings, uses_sizes, asked = found["Agent"]
        assert [word in str(warnings) for word in ("no arena", "Observation Size", "Continuous Size")] == [True] * 3
        assert uses_sizes
        assert asked is None  # the engine asks no script without @tool: the inspector shows the warnings
        assert "Extend it" in str(found["Bare"][0])
        assert found["Bare"][2] == found["Bare"][0]

    def test_a_scene_that_can_be_trained_gives_no_warning_and_the_arena_beside_agents_uses_no_sizes(
        self, major: int, program: str, tmp_path: Path
    ) -> None:
        game = unpacked(major, tmp_path)
        sizes = "func _init():\n\tobservation_size = 2\n\tcontinuous_size = 1\n"
        (game / "agent.gd").write_text(f'extends "res://addons/envmanager/agent.gd"\n\n\n{sizes}')

        found = shown(major, program, game, Arena="arena.gd", Agent="agent.gd")

        assert found == {"Arena": [[], False, None], "Agent": [[], True, None]}

    def test_a_second_arena_is_one_too_many(self, major: int, program: str, tmp_path: Path) -> None:
        game = unpacked(major, tmp_path)

        found = shown(major, program, game, First="arena.gd", Second="arena.gd")

        assert ["2 arenas" in str(warnings) for warnings, *_ in found.values()] == [True, True]
        assert [uses_sizes for _, uses_sizes, _ in found.values()] == [True, True]
