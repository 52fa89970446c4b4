"""Keys in the window of a game, which freeze and unfreeze behaviors; in engines with a virtual display."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envmanager.godot.manager import GodotEnvManager
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.controller import TrainerController
from envmanager_tests.godot.displays import environ_of, with_window

KEYPAD_1 = {4: 4194439, 3: 16777351}
KEY_1 = 49


@pytest.fixture
def manager(major: int, display: str, project_of: Callable[[str, int], Path]) -> Iterator[GodotEnvManager]:
    engine = {"binary": with_window(major), "window": True, "scene": "res://crowd.tscn"}
    with GodotEnvManager(str(project_of("games", major)), 1, engine=engine, worker_env=environ_of(display)) as manager:
        yield manager


@pytest.mark.parametrize("with_ctrl", [False, True], ids=["keypad", "ctrl"])
def test_a_key_freezes_the_behavior_of_its_number_and_again_unfreezes_it(
    manager: GodotEnvManager, major: int, with_ctrl: bool
) -> None:
    trainers = {name: PPO(name, spec, PPOOptions(hidden=[8])) for name, spec in manager.behavior_specs.items()}
    controller = TrainerController(manager, trainers)
    first, second = trainers

    def press(number: int) -> None:
        manager.call("press", (KEY_1 if with_ctrl else KEYPAD_1[major]) + number - 1, with_ctrl)
        for _ in range(3):  # the engine hands out the key in the next tick; the note comes before a later step
            controller.step()

    controller.reset()
    press(2)
    assert controller.frozen == {second}
    assert controller.changes[-1].cause == "a key in the game's window"
    press(1)
    assert controller.frozen == {second}, "one of them has to learn"
    press(2)
    press(1)
    assert controller.frozen == {first}
    press(9)
    assert controller.frozen == {first}, "there is no ninth behavior"


def test_other_keys_do_nothing(manager: GodotEnvManager) -> None:
    trainers = {name: PPO(name, spec, PPOOptions(hidden=[8])) for name, spec in manager.behavior_specs.items()}
    controller = TrainerController(manager, trainers)
    controller.reset()
    for key, with_ctrl in ((KEY_1, False), (ord("A"), False), (ord("A"), True)):
        manager.call("press", key, with_ctrl)
        for _ in range(3):
            controller.step()
    assert controller.frozen == frozenset()
