"""Bodies are where a game has put them, also without a renderer, in real engines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from envmanager_tests.godot.driver import Engine

Start = Callable[..., Engine]
MOVING = "res://moving.tscn"
TICK = [np.zeros((1, 1), "<f4")]


@pytest.mark.parametrize("where", ["reset", "act", "after_tick", "_physics_process", "_process"])
def test_a_plain_write_of_a_position_moves_a_body_in_every_episode(engine: Start, where: str) -> None:
    one = engine("games", scene=MOVING, ticks=1)
    for _ in range(3):
        one.reset(options={"where": where})
        heights = [one.step({"default": TICK})["default"].obs[0][0, 0] for _ in range(10)]
        assert np.diff(heights)[4:] == pytest.approx(np.ones(5), abs=1e-3), "it flies on by itself"
        assert 10 < heights[-1] <= 21


@pytest.mark.parametrize("scene", [MOVING, "res://moving_3d.tscn"])
def test_a_body_that_follows_the_physics_is_where_it_was_placed_at_once(engine: Start, major: int, scene: str) -> None:
    if major == 3 and scene != MOVING:
        pytest.skip("Godot 3.2 has no body in 3D that is synchronised with the physics")
    one = engine("games", scene=scene, ticks=1)
    for _ in range(3):
        first = one.reset()["default"].obs[0][0, 1]
        heights = [first, *(one.step({"default": TICK})["default"].obs[0][0, 1] for _ in range(6))]
        assert heights == pytest.approx([10, 15, 20, 25, 30, 35, 40], abs=1e-3)


@pytest.mark.parametrize("how", ["signal, place_2d", "signal, deferred"])
def test_a_body_that_a_signal_of_the_physics_puts_elsewhere_is_there(engine: Start, how: str) -> None:
    one = engine("games", scene=MOVING, ticks=1)
    one.reset(options={"where": how})
    heights = [one.step({"default": TICK})["default"].obs[0][0, 0] for _ in range(50)]
    assert max(heights) < 24, "the gate is not passed"
    assert (np.diff(heights) < 0).sum() >= 3
