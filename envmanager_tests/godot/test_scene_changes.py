"""Games that reload or change their scene, or free their arena, in real engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from envmanager.godot.manager import GodotEnvManager
from envmanager.policy import RandomPolicy
from envmanager_tests.godot.driver import Engine, EngineError, EngineGone, Steps
from envmanager_tests.godot.endings import log_of_a_game_that_quits

Start = Callable[..., Engine]

CHANGING = "res://changing.tscn"
TEAM = "res://changing_team.tscn"
"""Two agents, one before the arena in the tree and one after it."""
QUIT_IN_THE_FOURTH_EPISODE = """
	ticks = 0
	var begun = get_tree().get_meta("begun") if get_tree().has_meta("begun") else 0
	get_tree().set_meta("begun", begun + 1)
	if begun == 3:
		get_tree().quit(0)
"""


def step(engine: Engine) -> list[tuple[list[float], float, int]]:
    """Take a step of four ticks. Return observation, reward and bits of each row."""
    rows = engine.step()["default"]
    return list(zip(rows.obs[0].tolist(), rows.reward.tolist(), rows.bits.tolist(), strict=True))


@pytest.mark.parametrize(
    ("change", "bits", "level"), [("reload", 5, 1), ("truncate", 6, 1), ("level", 5, 2), ("by hand", 5, 2)]
)
def test_a_change_of_the_scene_ends_the_episode_of_a_single_arena(
    engine: Start, change: str, bits: int, level: int
) -> None:
    one = engine("games", scene=CHANGING, infos=True)
    first = one.reset([7], {"change": change})["default"]
    one.step()
    last = one.step()
    then = one.step()["default"]

    rows = last["default"]
    assert (rows.arena.tolist(), rows.k.tolist()) == ([0], first.k.tolist()), "the agent of the new scene goes on"
    assert rows.bits.tolist() == [bits]
    assert rows.reward.tolist() == [2.0]
    assert rows.final[0][0].tolist() == [6, first.obs[0][0, 1], 1]
    assert last.infos["default"] == {"info": [{"ticks": 6}], "reset_info": [{"ticks": 0}]}
    ticks, drawn, is_level = rows.obs[0][0].tolist()
    assert (ticks, is_level) == (0, level), "the new scene begins by a reset() of its arena"
    assert drawn == pytest.approx(one.call(get="drawn")[0])
    assert drawn != first.obs[0][0, 1], "its random numbers go on"
    assert (then.reward.tolist(), then.bits.tolist(), then.obs[0][0, 0]) == ([4.0], [4], 4)
    assert one.script_errors() == []


@pytest.mark.parametrize("arenas", [1, 3])
def test_another_arena_in_the_same_scene_ends_the_episode_of_its_copy_alone(engine: Start, arenas: int) -> None:
    one = engine("games", scene=CHANGING, arenas=arenas)
    first = one.reset(options={"change": "swap"})["default"]
    one.call([0], set="ticks", args=[3])
    rows = one.step()["default"]

    order = np.argsort(rows.arena)
    assert rows.k[order].tolist() == first.k.tolist()
    assert rows.bits[order].tolist() == [5] + [4] * (arenas - 1)
    assert rows.reward[order].tolist() == [3.0] + [4.0] * (arenas - 1)
    assert rows.final[0][:, 0].tolist() == [6]
    assert rows.obs[0][order, 0].tolist() == [0] + [4] * (arenas - 1)


def test_agents_that_stay_keep_their_episodes_end_when_the_arena_is_another(engine: Start) -> None:
    one = engine("games", scene=TEAM)
    first = one.reset(options={"change": "swap"})["default"]
    one.step()
    rows = one.step()["default"]

    assert (rows.k.tolist(), rows.bits.tolist()) == (first.k.tolist(), [5, 5])
    assert rows.obs[0][:, 1].tolist() == [0, 0]
    assert step(one)[0][2] == 4


def test_one_arena_that_is_isolated_may_change_its_scene_too(engine: Start) -> None:
    last = played(engine("games", scene=CHANGING, isolate=True), "reload")[2]["default"]
    assert (last.bits.tolist(), last.reward.tolist()) == ([5], [2.0])


def test_the_same_seed_repeats_episodes_of_a_game_that_reloads(engine: Start) -> None:
    one = engine("games", scene=CHANGING)
    first, again = ([steps.bytes() for steps in played(one, "reload")] for _ in range(2))
    assert first == again
    assert len(set(first)) > 6


def test_each_agent_of_a_new_scene_goes_on_for_its_own_predecessor(engine: Start) -> None:
    one = engine("games", scene=TEAM)
    first = one.reset(options={"change": "reload"})["default"]
    number = dict(zip(first.k.tolist(), first.obs[0][:, 0].tolist(), strict=True))
    one.step()
    for _ in range(3):
        rows = one.step()["default"]
        assert dict(zip(rows.k.tolist(), rows.obs[0][:, 0].tolist(), strict=True)) == number
        assert [final[0] for final in rows.final[0]] == [number[k] for k in rows.k.tolist()]
        assert rows.terminated.all()
        one.step()


def test_a_change_by_a_call_ends_the_episode_with_the_next_step(engine: Start) -> None:
    one = engine("games", scene=CHANGING)
    first = one.reset()["default"]
    one.call(method="make_change", args=["level"])

    rows = one.step()["default"]
    assert (rows.k.tolist(), rows.bits.tolist(), rows.obs[0][0, 2]) == (first.k.tolist(), [5], 2)


GONE = "the arena is gone"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("menu", GONE),
        ("free", GONE),
        ("free root", GONE),
        ("in reset", "the game has changed or reloaded its scene in"),
    ],
)
def test_a_change_after_which_no_arena_can_go_on_is_an_error_that_says_what_to_do(
    engine: Start, change: str, text: str
) -> None:
    one = engine("games", scene=CHANGING)
    with pytest.raises(EngineError) as raised:
        played(one, change)

    message = raised.value.frame["message"]
    assert message.startswith(text)
    assert "everything back" in message
    assert one.script_errors() == []


def played(engine: Engine, change: str) -> list[Steps]:
    return [engine.reset([3], {"change": change}), *(engine.step() for _ in range(9))]


def test_after_an_arena_has_gone_the_engine_quits_so_that_it_is_replaced(engine: Start) -> None:
    one = engine("games", scene=CHANGING, arenas=2)
    one.reset(options={"change": "free"})
    one.step()
    with pytest.raises(EngineError):
        one.step()

    with pytest.raises(EngineGone):
        one.reset()
    assert "the arena is gone" in one.log()


@pytest.mark.parametrize("change", ["reload", "level", "by hand"])
def test_with_several_arenas_a_change_of_the_scene_is_an_error_and_a_reset_revives(engine: Start, change: str) -> None:
    one = engine("games", scene=CHANGING, arenas=3)
    one.reset(options={"change": change})
    one.step()
    with pytest.raises(EngineError, match=r"n_workers = n_envs"):
        one.step()

    rows = one.reset(options={"change": ""})["default"]
    assert sorted(rows.arena.tolist()) == [0, 1, 2]
    assert [row[1:] for row in step(one)] == [(4.0, 4)] * 3


def test_a_game_that_reloads_can_be_played_by_send_and_recv(
    program: str, major: int, project_of: Callable[[str, int], Path]
) -> None:
    game = str(project_of("games", major))
    with GodotEnvManager(game, 2, n_workers=2, engine={"binary": program, "scene": CHANGING}) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], 0))
        manager.reset({"options": {"change": "reload"}})
        ended = np.zeros(2, int)
        manager.recv("all")
        for _ in range(6):
            manager.send(np.zeros(2, np.int32), [0, 1])
            batch = manager.recv("all")
            ended[batch.env_ids] += batch.terminated
        assert ended.tolist() == [3, 3]


def test_a_person_can_play_a_game_that_reloads(
    program: str, project_of: Callable[[str, int], Path], major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHANGE", "reload")
    project = tmp_path / "project"
    shutil.copytree(project_of("games", major), project)
    for file, old, new in (
        ("project.godot", "res://crowd.tscn", "res://changing.tscn"),
        ("changing.gd", "\tticks = 0\n", QUIT_IN_THE_FOURTH_EPISODE),
    ):
        (project / file).write_text((project / file).read_text().replace(old, new))
    log = log_of_a_game_that_quits(program, project, tmp_path / "home")
    assert log.count("(default): reward 6.000, terminated") == 3
