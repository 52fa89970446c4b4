"""Godot's editor with a game open, driven by a plugin that presses what a person would press in the dock "Training".

The plugin reads one command a line from a file, and writes into another what it sees.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

START_S = 180.0
LOOK_S = 0.1

PROBE = """@tool
extends EditorPlugin

var _n_done := 0
var _due_s := 0.0
var _spawned := []


func _process(delta):
	_due_s -= delta
	if _due_s > 0.0 or get_editor_interface().get_resource_filesystem().is_scanning():
		return
	_due_s = 0.1
	var dock = get_editor_interface().get_base_control().find_child("Training", true, false)
	if dock == null:
		return
	var asked = FileAccess.get_file_as_string("res://addons/probe/asked").split("\\n", false)
	for line in asked.slice(_n_done):
		_n_done += 1
		var words = JSON.parse_string(line)
		match words[0]:
			"press":
				_press(dock.find_child(words[1], true, false))
			"choose":
				dock.find_child(words[1], true, false).get_popup().index_pressed.emit(int(words[2]))
			"write":
				var field = dock.find_child(words[1], true, false)
				field.text = words[2]
				field.text_changed.emit(field.text)
			"spawn":
				_spawned.append(OS.create_process(words[1], words.slice(2)))
			"play":
				get_editor_interface().play_main_scene()
			"open":
				get_editor_interface().open_scene_from_path(words[1])
			"select":
				var root = get_editor_interface().get_edited_scene_root()
				get_editor_interface().edit_node(root.get_node(words[1]))
			"front":
				var tab = _tab_of(dock)
				tab.get_parent().current_tab = tab.get_parent().get_tab_idx_from_control(tab)
			"disable":
				get_editor_interface().set_plugin_enabled("envmanager", false)
			"picture":
				get_viewport().get_texture().get_image().save_png(words[1])
			"quit":
				get_tree().quit()
	var seen = {"n_done": _n_done, "spawned": _spawned, "can_press": [], "texts": {}}
	if is_instance_valid(dock) and dock.is_inside_tree():
		seen.tab = _tab_of(dock).get_index()
		for each in dock.find_children("*", "", true, false):
			if each is BaseButton and not each.disabled:
				seen.can_press.append(each.name)
			if each is RichTextLabel:
				seen.texts[each.name] = each.get_parsed_text()
			elif "text" in each:
				seen.texts[each.name] = each.text
			if each is ProgressBar:
				seen.progress = each.value
				seen.goal = each.max_value
			if each.has_method("returns"):
				seen.returns = each.returns()
	var file = FileAccess.open("res://addons/probe/seen.new", FileAccess.WRITE)
	file.store_string(JSON.stringify(seen))
	file.close()
	DirAccess.rename_absolute("res://addons/probe/seen.new", "res://addons/probe/seen")


func _tab_of(dock):
	while not dock.get_parent() is TabContainer:
		dock = dock.get_parent()
	return dock


func _press(button):
	if not button.disabled:
		button.button_pressed = not button.button_pressed
		button.pressed.emit()
"""
ABOUT = '[plugin]\n\nname="p"\ndescription=""\nauthor=""\nversion="1"\nscript="probe.gd"\n'
ENABLED = '"res://addons/envmanager/plugin.cfg"'
Seen = dict[str, Any]


class Editor:
    """An editor of Godot 4 with a game open. It is killed at the end of the context."""

    def __init__(
        self, program: str, game: Path, *arguments: str, output: Path, environ: dict[str, str] | None = None
    ) -> None:
        """Write the plugin into the game and start the editor, without a window if no ``arguments`` are given."""
        self.probe, self.output = game / "addons" / "probe", output
        self.probe.mkdir(exist_ok=True)
        (self.probe / "plugin.cfg").write_text(ABOUT)
        (self.probe / "probe.gd").write_text(PROBE)
        for name in ("asked", "seen"):
            (self.probe / name).unlink(missing_ok=True)
        self._asked = (self.probe / "asked").open("a", buffering=1)
        self._n_asked = 0
        file = game / "project.godot"
        file.write_text(file.read_text().replace(f"({ENABLED})", f'({ENABLED}, "res://addons/probe/plugin.cfg")'))
        names = ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
        home = {name: str(output.parent / "home") for name in names}
        command = [program, *(arguments or ["--headless"]), "--editor", "--path", str(game)]
        with output.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **(environ or {}), **home, "ENVMANAGER_GODOT": program},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._asked.close()
        self.process.kill()
        self.process.wait()
        for pid in json.loads((self.probe / "seen").read_text())["spawned"] if (self.probe / "seen").exists() else ():
            os.kill(pid, signal.SIGKILL)

    def ask(self, *words: object) -> None:
        """Have the plugin do something, such as ``"press", "Train"``, and wait until it is done."""
        self._n_asked += 1
        self._asked.write(json.dumps(words) + "\n")
        self.wait_until(lambda seen: seen["n_done"] >= self._n_asked)

    def press(self, button: str) -> None:
        """Press a button, once it may be pressed."""
        self.wait_until(lambda seen: button in seen["can_press"])
        self.ask("press", button)

    def wait_until(self, is_so: Callable[[Seen], bool], within_s: float = START_S) -> Seen:
        """Wait until the dock looks so, and return what is seen."""
        until, seen = time.monotonic() + within_s, None
        while time.monotonic() < until and self.process.poll() is None:
            if (self.probe / "seen").exists():
                seen = json.loads((self.probe / "seen").read_text())
                if is_so(seen):
                    return seen
            time.sleep(LOOK_S)
        raise AssertionError(f"the dock does not get there: {seen}\n{self.output.read_text(errors='replace')[-4000:]}")
