"""What `envmanager godot check` finds, in games for real engines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from envmanager.check.environment import Finding
from envmanager.check.game import check_game
from envmanager.godot.games import THREADS, new_project
from envmanager.godot.messages import MAX_NUMBERS

Check = Callable[[], list[Finding]]


@pytest.fixture
def game(tmp_path: Path, major: int) -> Path:
    return new_project(tmp_path / "game", major)


@pytest.fixture
def check(game: Path, program: str) -> Check:
    return lambda: list(check_game(str(game), engine={"binary": program}, n_steps=20))


def rewrite(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def by_question(findings: list[Finding]) -> dict[str, str]:
    return {finding.question: finding.outcome for finding in findings}


def test_nothing_is_wrong_with_a_new_game(check: Check) -> None:
    found = by_question(check())
    assert set(found.values()) == {"ok"}
    assert set(found) == {"starts", "settings", "behaviors", "steps", "episodes", "seeding"}


def test_an_agent_script_that_is_preloaded_may_say_what_its_functions_return(game: Path, check: Check) -> None:
    extends = 'extends "res://addons/envmanager/arena.gd"\n'
    rewrite(game / "arena.gd", extends, f'{extends}const Player = preload("res://player.gd")\n')
    player = game / "player.gd"
    assert re.search(r"func observe\(\) -> P\w+Array:", player.read_text())
    player.write_text(f"{player.read_text()}\n\nfunc info() -> Dictionary:\n\treturn {{}}\n")
    assert set(by_question(check()).values()) == {"ok"}


def test_a_game_for_godot_4_whose_engine_starts_a_thread_per_core_is_told(game: Path, check: Check, major: int) -> None:
    file = game / "project.godot"
    file.write_text(re.sub(rf"^{THREADS}=.*\n", "", file.read_text(), flags=re.MULTILINE))
    assert by_question(check()).get("threads") == ("note" if major == 4 else None)


def test_a_game_without_the_addon_is_told_how_to_get_it(game: Path, check: Check) -> None:
    (game / "addons" / "envmanager" / "bridge.gd").unlink()
    (only,) = check()
    assert (only.question, only.outcome) == ("starts", "problem")
    assert f"envmanager godot install-addon {game}" in only.advice


def test_bodies_that_stand_at_the_same_place_in_all_copies_are_found(game: Path, check: Check) -> None:
    scene = game / "game.tscn"
    scene.write_text(scene.read_text() + '\n[node name="Door" type="Area2D" parent="."]\n')
    assert set(by_question(check()).values()) == {"ok"}
    first = re.search(r'^\[node name="\w+" type="Node2D"\]', scene.read_text(), re.MULTILINE)
    assert first is not None
    rewrite(scene, first[0], first[0].replace("Node2D", "Node"))

    (only,) = check()
    assert (only.question, only.outcome) == ("starts", "problem")
    assert "Door is at the same place in all copies" in only.text


def test_a_fresh_clone_with_a_font_is_imported(game: Path, check: Check) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    shutil.copy(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", game)
    (game / "picture.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>')
    assert set(by_question(check()).values()) == {"ok"}


def test_random_numbers_that_are_not_the_arenas_own_are_found(game: Path, check: Check, major: int) -> None:
    rewrite(game / "arena.gd", "from.randf_range(", {4: "randf_range(", 3: "randi() * rand_range("}[major])
    (found,) = (finding for finding in check() if finding.question == "seeding")
    assert found.outcome == "problem"
    number = r"(-?[\d.]+(?:e[+-]\d+)?)"
    said = rf"from the reset on: obs\[0\] of 'default' in environment 0 is {number}, and {number} when it is repeated\."
    values = re.search(said, found.text)
    assert values is not None, found.text
    assert float(values[1]) != float(values[2])


def test_a_number_that_an_episode_changes_and_no_reset_puts_back_is_named(game: Path, check: Check, major: int) -> None:
    array = {4: "PackedFloat32Array", 3: "PoolRealArray"}[major]
    player = game / "player.gd"
    rewrite(player, f"return {array}([", f"seen += 1\n\treturn {array}([seen, ")
    rewrite(player, "velocity = 0.0\n", "velocity = 0.0\nvar seen = 0\n")
    rewrite(game / "game.tscn", "observation_size = 1", "observation_size = 2")
    (found,) = (finding for finding in check() if finding.question == "seeding")
    assert re.search(r"obs\[0\] of 'default' in environment 0 is \d+, and \d+ when", found.text), found.text


def test_more_numbers_than_a_frame_may_have_are_told_with_what_to_do(game: Path, check: Check) -> None:
    rewrite(game / "game.tscn", "observation_size = 1", f"observation_size = {MAX_NUMBERS // 4 + 1}")
    (only,) = check()
    assert only.outcome == "problem"
    assert f"4 agents of behavior 'default' have {MAX_NUMBERS + 4} numbers" in only.text
    assert "fewer arenas into each engine" in only.text
    assert "install-addon" not in only.text


def test_an_error_of_a_script_is_told_with_its_place(game: Path, check: Check) -> None:
    rewrite(game / "arena.gd", "player.begin_at(", "player.no_such_method(")
    last = check()[-1]
    assert (last.question, last.outcome) == ("steps", "problem")
    assert "arena.gd" in last.text
