"""The scripts for Godot 3, which tools/addon3.py writes from those for Godot 4."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envmanager.godot.games import copy_demo, demos, new_project
from envmanager_tests.godot.driver import MISSING, find_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import addon3

FOUR = """@tool
@icon("res://icon.svg")
class_name Named
extends RefCounted
## Counts.

const Other := preload("res://other.gd")
const MOST := 9

## How many.
@export_range(0, 9, 1, "or_greater") var size := 0
@export var others: Array[Other] = []
var chosen := PackedInt32Array()

@onready var window: Viewport = null


## The sum of all.
static func total(of: PackedInt32Array, from := 0) -> int:
	for number: int in of:
		var most := mini(maxi(number, from), (MOST))
		from = most
	return from if not of.is_empty() else 0


func some() -> Array[Other]:
	get_tree().node_added.connect(_on_added)
	var sizes: Array = others.map(func(each: Other) -> int: return each.size)
	return sizes.filter(func(each) -> bool: return each > 0)
"""
THREE = """tool
class_name Named, "res://icon.svg"
extends Reference
# Counts.

const MOST := 9

# How many.
export(int, 0, 900) var size = 0
export(Array, Resource) var others = []
var chosen := PoolIntArray()

onready var window: Viewport = null


# The sum of all.
static func total(of: PoolIntArray, from := 0) -> int:
	for number in of:
		var most = int(min(int(max(number, from)), (MOST)))
		from = most
	return from if not of.empty() else 0


func some() -> Array:
	get_tree().connect("node_added", self, "_on_added")
	var sizes = []
	for each in others:
		sizes.append(each.size)
	var found = []
	for each in sizes:
		if each > 0:
			found.append(each)
	return found
"""

LOAD_ALL = """extends SceneTree


func _init():
	_load_below("res://")
	print("all loaded")
	quit()


func _load_below(folder):
	var entries = Directory.new()
	entries.open(folder)
	entries.list_dir_begin(true, true)
	var entry = entries.get_next()
	while entry != "":
		if entries.current_is_dir():
			_load_below(folder.plus_file(entry))
		elif entry.get_extension() == "gd" and not load(folder.plus_file(entry)).can_instance():
			print("cannot be used: ", folder.plus_file(entry))
		entry = entries.get_next()
"""


def test_a_script_gets_the_words_and_the_syntax_of_godot_3() -> None:
    assert addon3.script_for_3(FOUR, "") == THREE


def test_an_override_takes_the_place_of_one_piece_and_keeps_its_comment() -> None:
    own = "# Without: window\n\nconst NAME = 1\n\n\nstatic func total(of, from):\n\treturn 1\n\n\nfunc new():\n\tpass\n"

    script = addon3.script_for_3(FOUR, own)

    assert script == (
        THREE.replace("\nonready var window: Viewport = null\n", "")
        .replace("MOST := 9\n", "MOST := 9\nconst NAME = 1\n")
        .replace(
            THREE[THREE.index("static func") : THREE.index("\n\nfunc some")],
            "static func total(of, from):\n\treturn 1\n",
        )
        + "\n\nfunc new():\n\tpass\n"
    )


@pytest.mark.parametrize("own", ["# Without: nothing\n", "const MOST := 9\n"])
def test_an_override_without_effect_is_refused(own: str) -> None:
    with pytest.raises(ValueError, match=r"nothing|MOST"):
        addon3.script_for_3(FOUR, own)


def test_a_check_names_each_script_that_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    godot = tmp_path / "envmanager" / "godot"
    shutil.copytree(addon3.GODOT, godot, ignore=shutil.ignore_patterns("*.py"))
    monkeypatch.setattr(addon3, "GODOT", godot)
    monkeypatch.setattr(sys, "argv", ["addon3.py", "--check"])
    addon3.main()
    with (godot / "addon4" / "wire.gd").open("a") as changed:
        changed.write("\n\nfunc more() -> void:\n\tpass\n")
    (godot / "addon3" / "agent.gd").unlink()
    (godot / "addon3" / "old.gd").touch()

    with pytest.raises(SystemExit) as told:
        addon3.main()

    assert [line.split(" is stale")[0] for line in str(told.value).splitlines()] == [
        str(godot / "addon3" / name) for name in ("agent.gd", "old.gd", "wire.gd")
    ]
    monkeypatch.setattr(sys, "argv", ["addon3.py"])
    addon3.main()
    assert "\n\nfunc more() -> void:\n\tpass\n" in (godot / "addon3" / "wire.gd").read_text()
    assert not (godot / "addon3" / "old.gd").exists()


def test_godot_3_can_use_every_script(tmp_path: Path) -> None:
    program = find_engine(3)
    if program is None:
        pytest.skip(MISSING[3])
    games = [new_project(tmp_path / "new", 3), *(copy_demo(name, 3, tmp_path / name) for name in demos())]
    for game in games:
        (game / "load_all.gd").write_text(LOAD_ALL)
        command = [program, "--no-window", "--path", str(game), "--script", "load_all.gd"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

        assert "all loaded" in output
        assert "cannot be used" not in output
