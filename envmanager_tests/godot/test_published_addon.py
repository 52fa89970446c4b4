"""The addon as others get it: a zip that is unpacked into a game, and what the editor then shows of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

import attrs
import numpy as np
import pytest

from envmanager.godot.games import Game, import_command, new_project
from envmanager_tests.godot.test_exports import editor, scanned, seen

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
        scanned(program, game, "--editor", "--quit")

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

var _left := ["untold", "whole", "double", "clever", "quarrel"]
var _frames := 0


func _process(_delta):
	_frames += 1
	if _left.is_empty() or _frames > 500:
		get_tree().quit()
		return
	var path = "res://%s.tscn" % _left[0]
	var root = get_editor_interface().get_edited_scene_root()
	if root == null or root.scene_file_path != path:
		if _frames % 20 == 5:
			get_editor_interface().open_scene_from_path(path)
		return
	for node in root.get_children():
		var asked = Array(node._get_configuration_warnings()) if node.get_script().is_tool() else null
		var said = [_left[0], node.name, Array(Checks.warnings_of(node)), Checks.uses_sizes(node), asked]
		print("\\nFOUND ", JSON.stringify(said))
	_left.pop_front()
""",
    3: """tool
extends EditorPlugin

const Checks = preload("res://addons/envmanager/checks.gd")

var _left = ["untold", "whole", "double", "clever", "quarrel"]
var _frames = 0


func _process(_delta):
	_frames += 1
	if _left.empty() or _frames > 500:
		get_tree().quit()
		return
	var path = "res://%s.tscn" % _left[0]
	var root = get_editor_interface().get_edited_scene_root()
	if root == null or root.filename != path:
		if _frames % 20 == 5:
			get_editor_interface().open_scene_from_path(path)
		return
	for node in root.get_children():
		var asked = null
		if node.get_script().is_tool():
			asked = Array(node._get_configuration_warning().split("\\n", false))
		var said = [_left[0], node.name, Array(Checks.warnings_of(node)), Checks.uses_sizes(node), asked]
		print("\\nFOUND ", JSON.print(said))
	_left.pop_front()
""",
}
ENABLED = {
    4: 'enabled=PackedStringArray("res://addons/envmanager/plugin.cfg", "res://addons/probe/plugin.cfg")',
    3: 'enabled=PoolStringArray( "envmanager", "probe" )',
}
SCENES = {
    "untold": {"Agent": "agent.gd", "Bare": "addons/envmanager/agent.gd"},
    "whole": {"Arena": "arena.gd", "Agent": "sized.gd"},
    "double": {"First": "arena.gd", "Second": "arena.gd"},
    "clever": {"Arena": "arena.gd", "Fitting": "agent.gd", "Other": "agent.gd", "Lost": "agent.gd"},
}
"""Nodes of each scene and their scripts. The first is the main scene."""
FIELDS = {
    "Fitting": ["observation_size = 2", "continuous_size = 1", 'policy = "res://hero.policy"'],
    "Other": ["observation_size = 3", "continuous_size = 1", 'policy = "res://hero.policy"'],
    "Lost": ["observation_size = 2", "continuous_size = 1", 'policy = "res://lost.policy"'],
}
EXTENDING = 'extends "res://addons/envmanager/agent.gd"\n'
FILES = {
    "agent.gd": EXTENDING,
    "sized.gd": f"{EXTENDING}\n\nfunc _init():\n\tobservation_size = 2\n\tcontinuous_size = 1\n",
    "addons/probe/plugin.cfg": '[plugin]\n\nname="p"\ndescription=""\nauthor=""\nversion="1"\nscript="probe.gd"\n',
}
QUARREL = """[gd_scene load_steps=9 format={format}]

[ext_resource path="res://arena.gd" type="Script" id=1]
[ext_resource path="res://sized.gd" type="Script" id=2]
[ext_resource path="res://addons/envmanager/behavior.gd" type="Script" id=3]
[ext_resource path="res://addons/envmanager/training.gd" type="Script" id=4]
[ext_resource path="res://addons/envmanager/parameter.gd" type="Script" id=5]

[sub_resource type="Resource" id=1]
script = ExtResource( 3 )
gamma = 0.5

[sub_resource type="Resource" id=2]
script = ExtResource( 3 )
gamma = 0.6

[sub_resource type="Resource" id=3]
script = ExtResource( 5 )

[sub_resource type="Resource" id=4]
script = ExtResource( 4 )
parameters = {parameters}

[node name="Main" type="Node"]

[node name="Arena" type="Node" parent="."]
script = ExtResource( 1 )
training = SubResource( 4 )

[node name="One" type="Node" parent="."]
script = ExtResource( 2 )
settings = SubResource( 1 )

[node name="Two" type="Node" parent="."]
script = ExtResource( 2 )
settings = SubResource( 2 )
"""
"""A scene whose agents have one behavior and two settings, and whose training has a parameter without a name."""
PARAMETERS = {4: "Array[ExtResource( 5 )]([SubResource( 3 )])", 3: "[ SubResource( 3 ) ]"}
Said = dict[tuple[str, str], list[object]]


def policy_file() -> str:
    """A policy for two numbers that acts by one."""
    weights, biases = (base64.b64encode(np.ones(n, "<f4").tobytes()).decode() for n in (2, 1))
    layer = {"inputs": 2, "outputs": 1, "activation": "linear", "weights": weights, "biases": biases}
    sizes = {"observation_sizes": [2], "continuous_size": 1, "discrete_choices": [], "ticks_per_action": 4}
    second = json.dumps({**sizes, "normalization": None, "layers": [layer]})
    checksum = hashlib.sha256(second.encode()).hexdigest()
    return f"{json.dumps({'format': 'envmanager.policy', 'version': 1, 'sha256': checksum})}\n{second}\n"


_known: dict[int, Said] = {}


@pytest.fixture
def said(major: int, program: str, tmp_path: Path) -> Said:
    """What the editor says of each node of the scenes: the warnings, whether its sizes count, and the triangle's."""
    if major not in _known:
        game = unpacked(major, tmp_path)
        for scene, scripts in SCENES.items():
            parts = [f"[gd_scene load_steps={1 + len(scripts)} format={major - 1}]"]
            for i, script in enumerate(scripts.values(), 1):
                parts.append(f'[ext_resource path="res://{script}" type="Script" id={i}]')
            parts.append('[node name="Main" type="Node"]')
            for i, name in enumerate(scripts, 1):
                fields = [f"script = ExtResource( {i} )", *FIELDS.get(name, [])]
                parts.append("\n".join([f'[node name="{name}" type="Node" parent="."]', *fields]))
            (game / f"{scene}.tscn").write_text("\n\n".join(parts) + "\n")
        (game / "quarrel.tscn").write_text(QUARREL.format(format=major - 1, parameters=PARAMETERS[major]))
        (game / "addons" / "probe").mkdir()
        for name, text in {**FILES, "addons/probe/probe.gd": PROBE[major], "hero.policy": policy_file()}.items():
            (game / name).write_text(text)
        if major == 3:  # when it opens a game for the first time, two of its threads read the same scripts
            scanned(program, game, "--editor", "--quit")
        text = (game / "project.godot").read_text().replace("res://main.tscn", "res://untold.tscn")
        (game / "project.godot").write_text(f"{text}\n[editor_plugins]\n\n{ENABLED[major]}\n")
        printed = editor(program, game, *(["--headless", "--editor"] if major == 4 else ["--editor"]))
        lines = [json.loads(line.removeprefix("FOUND ")) for line in printed.splitlines() if line.startswith("FOUND ")]
        assert lines, printed
        _known[major] = {(scene, name): found for scene, name, *found in lines}
    return _known[major]


class TestEditor:
    def test_an_agent_without_sizes_and_arena_is_told_what_is_missing(self, said: Said) -> None:
        warnings, uses_sizes, triangle = said["untold", "Agent"]

        assert [word in str(warnings) for word in ("no arena", "Observation Size", "Continuous Size")] == [True] * 3
        assert uses_sizes
        assert triangle is None  # the engine asks no script without @tool: the inspector shows the warnings

    def test_a_node_with_the_script_of_the_addon_itself_has_the_warning_in_the_tree(self, said: Said) -> None:
        warnings, _, triangle = said["untold", "Bare"]

        assert "Extend it" in str(warnings)
        assert triangle == warnings

    def test_a_scene_that_can_be_trained_gives_no_warning(self, said: Said) -> None:
        assert [said["whole", name][0] for name in ("Arena", "Agent")] == [[], []]

    def test_an_arena_beside_agents_uses_no_sizes(self, said: Said) -> None:
        assert [said["whole", name][1] for name in ("Arena", "Agent")] == [False, True]

    def test_a_second_arena_is_one_too_many(self, said: Said) -> None:
        assert ["2 arenas" in str(said["double", name][0]) for name in ("First", "Second")] == [True, True]

    def test_a_policy_that_is_not_there_or_does_not_fit_is_named(self, said: Said) -> None:
        fitting, other, lost = (said["clever", name][0] for name in ("Fitting", "Other", "Lost"))

        assert fitting == []
        assert "observations of [2] numbers, continuous_size 1, discrete_choices []; the agent has [3], 1, []" in str(
            other
        )
        assert "The policy res://lost.policy is not there. `envmanager export RUN --to godot` writes it" in str(lost)

    def test_two_settings_of_one_behavior_are_told_at_both_nodes(self, said: Said) -> None:
        assert [said["quarrel", name][0] for name in ("One", "Two")] == [
            [f"{other} has the same behavior and other Settings: let both refer to the same."]
            for other in ("Two", "One")
        ]

    def test_a_parameter_without_a_name_is_told_at_the_arena(self, said: Said) -> None:
        assert "needs a name of its own" in str(said["quarrel", "Arena"][0])


ENABLING = """
extends EditorPlugin

var _frames = 0


func _process(_delta):
	if get_editor_interface().get_resource_filesystem().is_scanning():
		return  # a thread loads the addon's scripts; nobody enables a plugin that is not in the list yet
	_frames += 1
	if _frames % 20 == 0 and not get_editor_interface().is_plugin_enabled("envmanager"):
		get_editor_interface().set_plugin_enabled("envmanager", true)
	if 'EnvManager="*' in _text() or _now() > 60000:  # the editor writes it some time later
		get_tree().quit()


func _text():
"""
READING = {
    4: """\treturn FileAccess.get_file_as_string("res://project.godot")


func _now():
	return Time.get_ticks_msec()
""",
    3: """\tvar file = File.new()
	file.open("res://project.godot", File.READ)
	return file.get_as_text()


func _now():
	return OS.get_ticks_msec()
""",
}


def test_enabling_the_plugin_adds_the_autoload(major: int, program: str, tmp_path: Path) -> None:
    game = unpacked(major, tmp_path)
    (game / "addons" / "probe").mkdir()
    (game / "addons" / "probe" / "plugin.cfg").write_text(FILES["addons/probe/plugin.cfg"])
    (game / "addons" / "probe" / "probe.gd").write_text(("@tool" if major == 4 else "tool") + ENABLING + READING[major])
    file = game / "project.godot"
    enabled = ENABLED[major].replace('"res://addons/envmanager/plugin.cfg", ', "").replace('"envmanager", ', "")
    file.write_text(f"{file.read_text().partition('[autoload]')[0]}[editor_plugins]\n\n{enabled}\n")

    printed = editor(program, game, *(["--headless", "--editor"] if major == 4 else ["--editor"]))

    assert re.search(r'^EnvManager="\*(res|uid)://', file.read_text(), re.MULTILINE), printed
