"""Pictures as observations, in engines with a virtual display: which tick they show, how often is drawn, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import EnvRaised, RandomPolicy, RestartPolicy, WorkerDied
from envmanager.cli.app import run_command_line
from envmanager.data.steps import Steps
from envmanager.godot.manager import GodotEnvManager
from envmanager_tests.godot.displays import environ_of, with_window
from envmanager_tests.godot.driver import find_engine

Play = Callable[..., GodotEnvManager]


@pytest.fixture
def play(major: int, project_of: Callable[[str, int], Path]) -> Play:
    """A function that starts a manager on a test game, in a window on a display ("": none)."""

    def start(scene: str, n_envs: int, display: str, **engine: Any) -> GodotEnvManager:
        chosen = {"binary": with_window(major), "window": True, "shown": 0, "scene": f"res://{scene}.tscn", **engine}
        never = RestartPolicy(max_restarts=0)
        game = str(project_of("games", major))
        manager = GodotEnvManager(game, n_envs, engine=chosen, worker_env=environ_of(display), restarts=never)
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], 0))
        return manager

    return start


def columns_of(pictures: np.ndarray) -> list[int]:
    """The brightest column of each picture, whose bar must be in the upper half."""
    upper, lower = pictures[:, :16].sum(axis=(1, 3), dtype=int), pictures[:, 16:].sum(axis=(1, 3), dtype=int)
    columns: list[int] = upper.argmax(axis=1).tolist()
    rows = range(len(columns))
    assert (upper[rows, columns] > lower[rows, columns]).all()
    return columns


def check(steps: Steps) -> None:
    """Each picture shows what the numbers beside it say, those at the end of an episode too."""
    assert columns_of(steps.obs["picture"]) == steps.obs["x"][:, 0].tolist()
    if steps.final_obs is not None and len(steps.final_obs["x"]):
        assert columns_of(steps.final_obs["picture"]) == steps.final_obs["x"][:, 0].tolist()


@pytest.mark.parametrize("scene", ["eye", "eye3d"])
@pytest.mark.parametrize("options", [{}, {"shown": 2}, {"isolate": True}], ids=["shown0", "shown2", "isolated"])
def test_a_picture_shows_the_tick_that_was_played(
    play: Play, display: str, scene: str, options: dict[str, Any]
) -> None:
    with play(scene, 5, display, ticks_per_action=3, **options) as manager:
        seen = manager.reset({"seed": 0, "options": {"end_at": 7}})
        check(seen[0].current["default"])
        n_ended, at = 0, set()
        for _ in range(12):
            (info,) = manager.step("all")
            steps = info.current["default"]
            check(steps)
            n_ended += int(steps.terminated.sum())
            at |= set(steps.obs["x"][:, 0].tolist())
        assert n_ended >= 5
        assert len(at) > 10


def test_all_arenas_are_drawn_at_once(play: Play, display: str) -> None:
    with play("eye", 4, display) as manager:
        manager.reset({"seed": 0})
        (before, *_) = manager.get_attr("drawn")
        for _ in range(5):
            manager.step("all")
        assert manager.get_attr("drawn") == [before + 5] * 4


def test_a_picture_without_a_renderer_is_an_error_that_says_what_to_do(play: Play, program: str) -> None:
    with (
        play("eye", 1, "", window=False, binary=program) as manager,
        pytest.raises(EnvRaised, match=r"pictures need a renderer.*window: true.*xvfb-run"),
    ):
        manager.reset({"seed": 0})


@pytest.mark.parametrize("name", ["", ":4095"], ids=["none", "no server"])
def test_a_window_without_a_display_is_an_error_that_says_what_to_do(play: Play, name: str) -> None:
    with pytest.raises(WorkerDied, match=r"(?s)needs a display.*xvfb-run"):
        play("eye", 1, name)


def test_a_game_with_pictures_is_checked_in_a_window(
    display: str, major: int, project_of: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ_of(display).items():
        monkeypatch.setenv(name, value)
    game = ["godot", "check", str(project_of("games", major)), "--scene", "res://eye.tscn", "--steps", "20"]
    assert run_command_line([*game, "--window", "--binary", with_window(major)]) == 0
    assert run_command_line([*game, "--binary", find_engine(major) or ""]) == 1


SCENE = """[gd_scene load_steps=3 format=3]
[ext_resource type="Script" path="res://addons/envmanager/arena.gd" id="1"]
[ext_resource type="Script" path="res://of_the_page.gd" id="2"]
[node name="Main" type="Node2D"]
[node name="Arena" type="Node" parent="."]
script = ExtResource("1")
[node name="Eye" type="SubViewport" parent="."]
size = Vector2i(84, 84)
[node name="Agent" type="Node" parent="."]
script = ExtResource("2")
continuous_size = 1
"""


def test_the_script_of_the_page_plays(
    play: Play, display: str, major: int, project_of: Callable[[str, int], Path]
) -> None:
    if major != 4:
        pytest.skip("the script of the page is for Godot 4")
    page = (Path(__file__).parents[2] / "docs" / "godot.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```gdscript\n(extends .*?)```", page, re.DOTALL)
    game = project_of("games", major)
    (game / "of_the_page.gd").write_text(script)
    (game / "of_the_page.tscn").write_text(SCENE)
    with play("of_the_page", 2, display) as manager:
        (info,) = manager.reset({"seed": 0})
        assert info.current["default"].obs.shape == (2, 84, 84, 3)
