"""What Godot's editor makes of a game with the addon: it loads it without a word, and what it exports is played."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from envmanager import RandomPolicy
from envmanager.godot.games import new_project
from envmanager.godot.manager import GodotEnvManager

EDITOR_S = 120.0
PRESETS = """
[preset.0]
name="Pack"
platform="{platform}"
runnable=true
export_filter="all_resources"
include_filter=""
exclude_filter=""
export_path=""

[preset.0.options]
custom_template/debug=""
custom_template/release=""
"""
INTS = {4: "PackedInt32Array", 3: "PoolIntArray"}
PLATFORM = {4: "Linux", 3: "Linux/X11"}
N_STEPS = 20
# Godot 3 opens the main scene and scans a new project's files in two threads, and says this of any script that
# another extends, with or without the addon. Once it has scanned them it says nothing.
RACE_OF_GODOT_3 = re.compile(r"Script isn't fully loaded|reload: Method failed|Another resource is loaded from path")
# What it says when a busy machine has it quit before it has scanned them.
QUITS_EARLY = "Scan thread aborted"
MOST_OPENED = 20


def editor(program: str, project: Path, *arguments: str) -> str:
    """What the editor prints, which opens the project without a window, does what it is told and quits."""
    home = {name: str(project.parent / name) for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    home["LANG"] = "en"  # Godot 3 complains of "C"
    command = [program, "--path", str(project), *arguments]
    ran = subprocess.run(
        command, env={**os.environ, **home}, capture_output=True, text=True, timeout=EDITOR_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def scanned(program: str, project: Path, *arguments: str) -> list[str]:
    """What the editor prints each time that it is opened, until it has scanned the files of the project."""
    printed = [editor(program, project, *arguments)]
    while QUITS_EARLY in printed[-1] and len(printed) < MOST_OPENED:
        printed.append(editor(program, project, *arguments))
    assert QUITS_EARLY not in printed[-1], f"it was opened {MOST_OPENED} times"
    return printed


def complaints(output: str) -> list[str]:
    said = [line for line in output.splitlines() if re.search(r"\b(ERROR|WARNING)\b", line)]
    return [line for line in said if QUITS_EARLY not in line]


def enable_plugin(game: Path) -> None:
    """Enable the plugin of the addon, as the settings of a project of Godot 3 do."""
    file = game / "project.godot"
    file.write_text(f'{file.read_text()}\n[editor_plugins]\n\nenabled=PoolStringArray( "envmanager" )\n')


def seen(game: Path, program: str) -> list[bytes]:
    """What the behaviors are, and what a policy sees, step by step."""
    with GodotEnvManager(str(game), 2, engine={"binary": program}) as manager:
        for behavior, spec in manager.behavior_specs.items():
            manager.set_policy(behavior, RandomPolicy(spec, 0))
        infos = manager.reset({"seed": 0})
        found = [str(manager.behavior_specs).encode()]
        for _ in range(N_STEPS):
            found.append(np.asarray(infos[0].current["default"].obs).tobytes())
            infos = manager.step("all")
    return found


def test_the_editor_opens_a_new_game_with_the_plugin_without_complaint(
    tmp_path: Path, program: str, major: int
) -> None:
    game = new_project(tmp_path / "game", major)
    opened = ["--headless", "--editor", "--quit"] if major == 4 else ["--editor", "--quit"]

    first = scanned(program, game, *opened)
    again = editor(program, game, *opened)

    said = [line for output in first for line in complaints(output)]
    assert [line for line in said if major == 4 or not RACE_OF_GODOT_3.search(line)] == []
    assert complaints(again) == []


def test_an_exported_pack_is_played_as_its_folder_is(tmp_path: Path, program: str, major: int) -> None:
    game = new_project(tmp_path / "game", major)
    (game / "export_presets.cfg").write_text(PRESETS.format(platform=PLATFORM[major]))
    scene = game / "game.tscn"
    chosen = f"continuous_size = 1\ndiscrete_choices = {INTS[major]}( 3, 2 )"
    scene.write_text(scene.read_text().replace("continuous_size = 1", chosen))
    (game / "policies").mkdir()
    (game / "policies" / "hero.policy").write_text("the weights")
    if major == 3:
        enable_plugin(game)
    pack = tmp_path / "game.pck"
    headless = ["--headless"] if major == 4 else []
    editor(program, game, *headless, "--export-pack", "Pack", str(pack))

    played = seen(pack, program)

    assert b"the weights" in pack.read_bytes()
    assert b"discrete" in played[0]
    assert played == seen(game, program)
    assert len(set(played)) > N_STEPS // 2, "something moves"


@pytest.mark.parametrize(("game", "scene"), [("coin_chase", None), ("games", "res://weather.tscn")])
def test_an_exported_pack_has_the_spaces_and_the_settings_of_its_folder(
    game: str, scene: str | None, tmp_path: Path, program: str, major: int, project_of: Callable[[str, int], Path]
) -> None:
    project = Path(shutil.copytree(project_of(game, major), tmp_path / "game"))
    (project / "export_presets.cfg").write_text(PRESETS.format(platform=PLATFORM[major]))
    pack = tmp_path / "game.pck"
    editor(program, project, *(["--headless"] if major == 4 else []), "--export-pack", "Pack", str(pack))

    engine = {"binary": program, "scene": scene}
    told = []
    for path in (pack, project):
        with GodotEnvManager(str(path), 1, engine=engine) as manager:
            told.append((manager.behavior_specs, manager.declared))

    assert told[0] == told[1]
    assert any(told[0][1].values())
