"""The Godot workloads: the contenders play, and the peer's game is the demo's scene."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import games
from benchmarks.bare import make_bare
from benchmarks.engine import BareEngine
from benchmarks.games import TICKS, find_engine, find_plugin, make_peer_project
from benchmarks.roster import ROSTER, CannotTakePart, make_contender
from benchmarks.workloads import ALL
from envmanager_tests.godot.driver import MISSING
from envmanager_tests.godot.driver import find_engine as find_any

OURS = [name for name, entry in ROSTER.items() if entry.maker in ("Codec", "Engines", "Uneven") and "16" not in name]


@pytest.fixture
def _godot4(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_any(4)
    if found is None:
        pytest.skip(MISSING[4])
    monkeypatch.setenv("ENVMANAGER_GODOT", found)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the plugin would be."""
    addon = tmp_path / "plugin" / "addons" / "godot_rl_agents"
    addon.mkdir(parents=True)
    (addon / "sync.gd").touch()
    monkeypatch.setenv(games.PLUGIN, str(tmp_path / "plugin"))
    return addon


@pytest.mark.usefixtures("_godot4")
@pytest.mark.parametrize("name", OURS)
def test_engines_of_ours_play(name: str) -> None:
    contender = make_contender(name, "ball", 2)
    try:
        assert contender.run(5) >= 10 / 2
    finally:
        contender.close()


@pytest.mark.usefixtures("_godot4")
def test_the_bare_one_is_an_engine_where_the_workload_is_a_game() -> None:
    bare = make_bare("ball8", 3)
    try:
        assert isinstance(bare, BareEngine)
        assert bare.run(4) == 12
    finally:
        bare.close()


def test_every_game_of_a_workload_has_its_ticks_per_action() -> None:
    assert {workload.env for workload in ALL.values() if workload.name.startswith("godot")} == set(TICKS)


def test_the_peers_scene_is_the_demos_but_for_who_acts(plugin: Path, tmp_path: Path) -> None:
    project = make_peer_project(tmp_path / "game")

    theirs = (project / "arena.tscn").read_text()
    ours = games._SCENE.read_text()
    nodes = re.compile(r"^\[node .*(?:\n(?!\[).*)*", re.MULTILINE)
    bodies = [[node for node in nodes.findall(text) if 'name="Arena"' not in node] for text in (ours, theirs)]
    assert bodies[0] == bodies[1]
    assert len(bodies[0]) > 8
    assert '[node name="Arena" type="Node2D" parent="."]\nscript = ExtResource("1")\n' in theirs
    assert 'path="res://ball.gd"' in theirs
    assert (project / "ball.gd").exists()
    assert (project / "addons" / plugin.name / "sync.gd").exists()


def test_without_the_plugin_the_peer_is_left_out_and_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(games.PLUGIN, raising=False)
    with pytest.raises(CannotTakePart, match="make bench-godot"):
        find_plugin()
    monkeypatch.setenv(games.PLUGIN, str(tmp_path))
    with pytest.raises(CannotTakePart, match="no addons/godot_rl_agents"):
        find_plugin()


@pytest.mark.parametrize("given", ["/no/such/engine", "/usr/bin/godot3-server"])
def test_without_godot_4_nobody_takes_part(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVMANAGER_GODOT", given)
    with pytest.raises(CannotTakePart, match="get_godot4"):
        find_engine()
