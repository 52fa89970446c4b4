"""The addon in real engines of both major versions, by a driver of its own."""

from __future__ import annotations

import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from envmanager.godot.games import install_addon, new_project
from envmanager_tests.godot.driver import END_S, Engine, EngineError, EngineGone, Rows, Steps, launch
from envmanager_tests.godot.endings import log_of_a_game_that_quits

GAMES = Path(__file__).parent / "games"

Start = Callable[..., Engine]


def pushes(n: int, steps: int, seed: int = 3) -> list[np.ndarray]:
    """Actions for the rolling ball: another push for each arena in each step."""
    return list(np.random.default_rng(seed).uniform(-1, 1, (steps, n, 2)).astype("<f4"))


def played(engine: Engine, actions: list[np.ndarray], seeds: list[int]) -> list[Steps]:
    """A reset and these actions."""
    return [engine.reset(list(seeds)), *(engine.step({"default": [action]}) for action in actions)]


def bits_of(episode: list[Steps]) -> bytes:
    return b"".join(steps.bytes() for steps in episode)


def choices(rows: Rows, choice: int = 0) -> list[np.ndarray]:
    return [np.full(rows.acting.sum(), choice, "<i4")]


def line_of(version: int, comment: str) -> int:
    lines = (GAMES / str(version) / "troubled.gd").read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.endswith(f"# {comment}"))


class TestSpecs:
    def test_the_engine_says_who_it_is(self, engine: Start, major: int) -> None:
        hello = engine("rolling_ball").hello

        assert hello["protocol"] == [1, 0]
        assert hello["engine"].startswith(f"{major}.")
        assert hello["addon"] == "1.0.0"
        assert hello["ticks_per_second"] == 60

    def test_an_arena_without_agents_is_the_agent(self, engine: Start) -> None:
        specs = engine("rolling_ball", arenas=3).specs

        assert specs.pop("begins_on_demand")
        assert specs.pop("declared")["training"]["node"] == "RollingBall/Arena"
        assert specs == {
            "behaviors": [
                {
                    "name": "default",
                    "observations": [{"name": "obs", "shape": [6], "dtype": "float32", "low": None, "high": None}],
                    "actions": [{"name": "continuous", "shape": [2], "dtype": "float32", "low": -1, "high": 1}],
                }
            ],
            "max_agents": {"default": 3},
        }

    def test_two_behaviors_have_their_own_sizes(self, engine: Start) -> None:
        specs = engine("coin_chase", arenas=2).specs

        hero, target = specs["behaviors"]
        assert (hero["name"], hero["observations"][0]["shape"]) == ("hero", [12])
        assert (target["name"], target["observations"][0]["shape"]) == ("target", [6])
        assert target["actions"] == [{"name": "discrete", "shape": [], "dtype": "int32", "low": 0, "high": 4}]
        assert specs["max_agents"] == {"hero": 2, "target": 2}

    def test_a_behavior_that_comes_later_is_declared(self, engine: Start) -> None:
        specs = engine("games", arenas=2).specs

        cat, rat = specs["behaviors"]
        assert cat["name"] == "cat"
        assert [one["dtype"] for one in rat["observations"]] == ["uint8", "float32", "int32"]
        assert rat["observations"][0]["high"] == 255
        assert rat["actions"][1] == {"name": "discrete", "shape": [2], "dtype": "int32", "low": 0, "high": [2, 1]}
        assert specs["max_agents"] == {"cat": 2, "rat": 8}

    @pytest.mark.parametrize(
        ("scene", "message"),
        [("res://nowhere.tscn", "no scene"), ("res://empty.tscn", "no arena"), ("res://mute.tscn", "no actions")],
    )
    def test_a_scene_that_cannot_be_trained_is_named(self, engine: Start, scene: str, message: str) -> None:
        with pytest.raises(EngineError, match=message):
            engine("games", scene=scene)

    def test_another_major_version_of_the_protocol_is_refused(self, engine: Start) -> None:
        with pytest.raises(EngineError, match="install-addon"):
            engine("rolling_ball", protocol=(2, 0))

    def test_a_game_that_loads_slowly_says_so(self, engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        kinds = []
        receive = Engine._receive

        def noted(self: Engine) -> tuple[int, int, bytes]:
            frame = receive(self)
            kinds.append(frame[0])
            return frame

        monkeypatch.setattr(Engine, "_receive", noted)
        engine("games", scene="res://slow.tscn", arenas=4)

        assert kinds[0] == 1
        assert set(kinds[1:-1]) == {6}
        assert kinds[-1] == 2


class TestSteps:
    def test_the_same_actions_give_the_same_bits_at_any_speed(self, engine: Start) -> None:
        actions = pushes(8, 15)
        runs = [engine("rolling_ball", arenas=8, fixed_fps=fps) for fps in (None, 60, 1)]

        first, *others = (bits_of(played(run, actions, list(range(8)))) for run in runs)
        assert others == [first, first]

    @pytest.mark.load
    @pytest.mark.parametrize("arenas", [1, 8])
    def test_the_same_actions_give_the_same_bits_at_any_speed_for_600_ticks(self, engine: Start, arenas: int) -> None:
        actions = pushes(arenas, 150)
        runs = [engine("rolling_ball", arenas=arenas, fixed_fps=fps) for fps in (None, 60, 1)]

        first, *others = (bits_of(played(run, actions, list(range(arenas)))) for run in runs)
        assert others == [first, first]

    @pytest.mark.parametrize("arenas", [1, 8])
    def test_the_same_command_gives_the_same_bits(self, engine: Start, arenas: int) -> None:
        actions = pushes(arenas, 200)

        first, second = (
            bits_of(played(engine("rolling_ball", arenas=arenas), actions, list(range(arenas)))) for _ in range(2)
        )
        assert first == second

    def test_a_seed_repeats_its_episode(self, engine: Start) -> None:
        one = engine("rolling_ball")
        actions = pushes(1, 40)

        first = bits_of(played(one, actions, [7]))
        other = bits_of(played(one, actions, [8]))
        again = bits_of(played(one, actions, [7]))
        assert again == first
        assert other != first

    def test_without_seeds_episodes_go_on_from_the_seed_of_the_engine(self, engine: Start) -> None:
        first, same, other = (engine("rolling_ball", arenas=4, seed=seed).reset().bytes() for seed in (5, 5, 6))

        assert first == same
        assert first != other

    def test_four_ticks_per_action_are_every_fourth_of_one(self, engine: Start) -> None:
        slow, fast = engine("rolling_ball", ticks=4), engine("rolling_ball", ticks=1)
        actions = pushes(1, 30)

        by_four = played(slow, actions, [2])
        by_one = played(fast, [action for action in actions for _ in range(4)], [2])
        for i, steps in enumerate(by_four):
            assert steps["default"].obs[0].tobytes() == by_one[4 * i]["default"].obs[0].tobytes()

    def test_the_agent_sees_the_end_and_the_new_beginning_in_one_reply(self, engine: Start) -> None:
        one = engine("games", arenas=2)
        before = one.reset()
        assert before["cat"].acting.all()
        replies = [one.step() for _ in range(5)]

        assert not any(reply["cat"].terminated.any() for reply in replies[:4])
        last = replies[4]["cat"]
        assert last.terminated.all()
        assert last.acting.all()
        assert last.reward.tolist() == [2.0, 2.0]  # what came after the end does not count
        assert last.final[0].tolist() == [[1, 5], [1, 5]]
        assert last.k.tolist() == before["cat"].k.tolist()
        assert one.step()["cat"].reward.tolist() == [0, 0]

    def test_the_ball_is_where_the_reset_put_it(self, engine: Start) -> None:
        one = engine("rolling_ball", ticks=1)
        still = [np.zeros((1, 2), "<f4")]
        for seed in range(5):
            first = one.reset([seed])["default"].obs[0]
            then = one.step({"default": still})["default"].obs[0]
            np.testing.assert_allclose(then, first, atol=1e-6)
            one.step({"default": [np.ones((1, 2), "<f4")]})

    def test_some_arenas_can_be_reset_alone(self, engine: Start) -> None:
        one = engine("rolling_ball", arenas=4)
        one.reset()
        one.step()

        rows = one.reset([11, 12], arenas=[1, 3])["default"]
        assert rows.arena.tolist() == [1, 3]
        assert not rows.was_same
        full = engine("rolling_ball", arenas=4).reset([None, 11, None, 12])["default"]
        np.testing.assert_allclose(rows.obs[0], full.obs[0][[1, 3]], atol=1e-5)

    def test_rows_that_stay_the_same_are_not_sent_again(self, engine: Start) -> None:
        one = engine("rolling_ball", arenas=2)

        assert not one.reset()["default"].was_same
        assert one.step()["default"].was_same
        assert not one.reset()["default"].was_same

    def test_the_engine_says_how_long_it_was_busy(self, engine: Start) -> None:
        one = engine("games", scene="res://troubled.tscn")
        one.reset(options={"fail": "slow"})
        begun = time.monotonic()
        steps = one.step()

        assert 50_000 <= steps.busy_us <= 1e6 * (time.monotonic() - begun)


class TestSpins:
    @pytest.mark.parametrize("may_spin", [False, True])
    def test_a_trainer_that_takes_its_time_is_waited_for_asleep(self, engine: Start, may_spin: bool) -> None:
        one = engine("rolling_ball", fixed_fps=1, may_spin=may_spin)
        one.reset()
        for _ in range(200):
            one.step()
        process = psutil.Process(one.process.pid)
        before = process.cpu_times()
        time.sleep(0.5)  # what the trainer takes
        after = process.cpu_times()

        assert after.user + after.system - before.user - before.system < 0.1
        assert one.step()["default"].acting.all()

    def test_the_same_actions_give_the_same_bits(self, engine: Start) -> None:
        runs = [engine("rolling_ball", arenas=8, may_spin=may_spin) for may_spin in (False, True)]
        first, second = (played(one, pushes(8, 40), list(range(8))) for one in runs)

        assert bits_of(first) == bits_of(second)

    def test_a_trainer_that_hangs_up_meanwhile_ends_the_engine(self, engine: Start) -> None:
        one = engine("rolling_ball", may_spin=True)
        one.reset()
        for _ in range(200):
            one.step()

        assert one.hang_up() == 0


class TestAgents:
    def test_agents_join_and_leave(self, engine: Start) -> None:
        one = engine("games", arenas=2)
        first = one.reset()["rat"]
        assert (first.arena.tolist(), first.k.tolist()) == ([0, 0, 1, 1], [1, 2, 1, 2])
        joined, left, restarted, quiet, ended = (one.step()["rat"] for _ in range(5))

        assert ids(joined) == {(a, k) for a in (0, 1) for k in (1, 2, 3)}
        assert joined.reward.tolist() == [0] * 6
        assert joined.acting.all()

        assert row(left, 0, 1) == (5.0, 1)  # its reward, terminated, not acting
        assert row(left, 1, 1) == (5.0, 1)
        assert row(left, 0, 2) == (0.0, 4)
        gone = (left.arena == 0) & (left.k == 1)
        assert [part[gone].tolist() for part in left.obs] == [part[:1].tolist() for part in left.final]

        assert ids(restarted) == {(a, k) for a in (0, 1) for k in (2, 3)}
        assert row(restarted, 0, 2) == (0.0, 2 | 4)
        assert restarted.final[2].tolist() == [3, 3]
        assert quiet.was_same

        assert row(ended, 0, 2) == row(ended, 1, 3) == (0.0, 1)
        assert row(ended, 0, 4) == row(ended, 0, 5) == (0.0, 4)
        assert ids(one.step()["rat"]) == {(a, k) for a in (0, 1) for k in (4, 5, 6)}

    def test_every_kind_of_number_arrives(self, engine: Start) -> None:
        one = engine("games", arenas=1)
        rats = one.reset()["rat"]
        assert rats.obs[0].tolist() == [[[1, 2, 3], [4, 5, 250]]] * 2
        continuous = np.array([[0.25], [-7.5]], "<f4")
        discrete = np.array([[2, 1], [1, 0]], "<i4")

        rats = one.step({"rat": [continuous, discrete]})["rat"]

        assert rats.obs[1].tolist() == [[0.25, 21], [-7.5, 10], [0, 0]]
        assert rats.obs[2].tolist() == [1, 1, 0]

    def test_behaviors_without_actions_play_by_their_heuristic(self, engine: Start) -> None:
        one = engine("games", arenas=1)
        cat = one.reset()["cat"]

        first = one.step({"cat": choices(cat, 0)})
        second = one.step()

        assert first["cat"].obs[0].tolist() == [[0, 0]]
        assert first["rat"].obs[1].tolist()[:2] == [[-0.5, 21]] * 2
        assert second["cat"].obs[0].tolist() == [[1, 1]]

    def test_an_agent_that_wants_no_action_gets_none(self, engine: Start) -> None:
        one = engine("games", arenas=1)
        cat = one.reset(options={"sleeps_from": 6})["cat"]

        awake = one.step({"cat": choices(cat, 0)})["cat"]
        asleep = one.step({"cat": choices(awake, 0)})["cat"]
        still = one.step({"cat": choices(asleep, 1)})["cat"]

        assert (awake.bits.tolist(), asleep.bits.tolist(), still.bits.tolist()) == ([4], [0], [0])
        assert still.obs[0].tolist() == [[0, 0]]

    def test_infos_come_when_they_are_asked_for(self, engine: Start) -> None:
        one = engine("games", infos=True)
        assert one.reset().infos["rat"]["info"] == [{"age": 0, "restarts": 0}] * 2
        one.step()
        assert one.step().infos["rat"] == {
            "info": [{"age": 2, "restarts": 0}, {"age": 1, "restarts": 0}, {"age": 2, "restarts": 0}],
            "reset_info": [None],
        }
        assert one.step().infos["rat"] == {
            "info": [{"age": 3, "restarts": 0}, {"age": 2, "restarts": 0}],
            "reset_info": [{"age": 0, "restarts": 1}],
        }

    def test_more_agents_than_declared_are_an_error(self, engine: Start) -> None:
        one = engine("games")

        with pytest.raises(EngineError, match="6 agents of behavior 'rat', max_agents allows 4"):
            one.reset(options={"rats": 6})
        assert len(one.reset()["rat"].reward) == 2

    def test_a_behavior_that_nobody_declared_is_an_error(self, engine: Start) -> None:
        one = engine("games", scene="res://troubled.tscn")
        one.reset(options={"fail": "stranger"})

        with pytest.raises(EngineError, match="behavior 'rat' is new"):
            one.step()


def ids(rows: Rows) -> set[tuple[int, int]]:
    return set(zip(rows.arena.tolist(), rows.k.tolist(), strict=True))


def row(rows: Rows, arena: int, k: int) -> tuple[float, int]:
    (i,) = np.flatnonzero((rows.arena == arena) & (rows.k == k))
    return float(rows.reward[i]), int(rows.bits[i])


class TestErrors:
    @pytest.mark.parametrize("where", ["observe", "act", "reset", "after_tick"])
    def test_a_script_error_is_reported_with_its_place(self, engine: Start, major: int, where: str) -> None:
        one = engine("games", scene="res://troubled.tscn", arenas=2)
        one.reset()
        error = fails(one, where)
        line = line_of(major, "in observe" if where == "observe" else "in _call_nobody")

        if major == 3:  # the engine tells nobody but its log
            (logged, *_) = one.script_errors()
            assert "troubled.gd" in logged
            assert f":{line}" in logged
        else:
            assert error is not None
            assert error["script"] == "res://troubled.gd"
            assert error["line"] == line
            assert error["function"] == ("observe" if where == "observe" else "_call_nobody")
        assert one.reset()["default"].acting.all()
        assert one.step()["default"].obs[0].tolist() == [[1, 0], [1, 1]]

    @pytest.mark.parametrize(
        ("mistake", "got"),
        [
            ("size", "Array of 3, not a P[a-z]+(Float32|Real)Array of 2"),
            ("type", "returned a"),
            ("array", "of 2, not a P"),
        ],
    )
    def test_a_wrong_observation_is_an_error_with_arena_script_and_line(
        self, engine: Start, major: int, mistake: str, got: str
    ) -> None:
        one = engine("games", scene="res://troubled.tscn", arenas=3)
        one.reset(options={"fail": mistake, "in": 2})

        with pytest.raises(EngineError, match=got) as raised:
            one.step()

        assert raised.value.frame["arena"] == 2
        assert raised.value.frame["function"] == "observe"
        assert raised.value.frame["script"] == "res://troubled.gd"
        assert raised.value.frame["line"] == line_of(major, "observe() is here")
        with pytest.raises(EngineError, match="reset must come before"):
            one.step()
        assert one.reset()["default"].acting.all()

    def test_a_step_before_the_first_reset_is_an_error(self, engine: Start) -> None:
        with pytest.raises(EngineError, match="reset must come before"):
            engine("rolling_ball").step()

    @pytest.mark.parametrize("rows", [1, 3])
    def test_actions_for_other_agents_than_those_there_are_an_error(self, engine: Start, rows: int) -> None:
        one = engine("rolling_ball", arenas=2)
        one.reset()

        with pytest.raises(EngineError, match=f"{rows} rows"):
            one.step({"default": [np.zeros((rows, 2), "<f4")]})

    @pytest.mark.parametrize("width", [1, 3])
    def test_actions_of_another_size_are_an_error(self, engine: Start, width: int) -> None:
        one = engine("rolling_ball", arenas=2)
        one.reset()

        with pytest.raises(EngineError, match="bytes"):
            one.step({"default": [np.zeros((2, width), "<f4")]})

    def test_a_frame_that_nobody_knows_ends_the_engine(self, engine: Start) -> None:
        one = engine("rolling_ball")

        with pytest.raises(EngineGone):
            one._ask(99, b"", 3)
        assert one.process.wait(END_S) == 1
        assert "kind 99" in one.log()

    def test_a_script_that_cannot_be_read_ends_the_start(
        self, program: str, project_of: Callable[[str, int], Path], major: int, tmp_path: Path
    ) -> None:
        project = tmp_path / "project"
        shutil.copytree(project_of("games", major), project)
        with (project / "troubled.gd").open("a") as script:
            script.write("func (\n")

        with pytest.raises(EngineError) as raised:
            Engine(program, project, tmp_path / "home", scene="res://troubled.tscn")

        if major == 4:
            assert raised.value.frame["script"] == "res://troubled.gd"
        else:
            assert "no arena" in raised.value.frame["message"]
        assert "troubled.gd" in (tmp_path / "home" / "log.txt").read_text()

    def test_a_paused_game_still_answers(self, engine: Start) -> None:
        one = engine("games")
        one.reset()
        assert one.call(method="pause") == [None]

        assert one.step()["cat"].acting.all()


def fails(engine: Engine, where: str) -> dict[str, Any] | None:
    """Has the game of arena 1 go wrong; the error frame, or None when the engine went on."""
    try:
        engine.reset(options={"fail": where, "in": 1})
        engine.step()
    except EngineError as error:
        return error.frame
    return None


class TestCalls:
    def test_methods_are_called_in_the_arenas_named(self, engine: Start, major: int) -> None:
        one = engine("games", arenas=3)
        one.reset()

        assert one.call(method="count_rats", args=[10]) == [20, 20, 20]
        assert one.call([2], method="count_rats", args=[2]) == [4]
        if major == 4:
            assert one.call([0], method="count_rats") == [2]

    def test_properties_are_read_and_written(self, engine: Start) -> None:
        one = engine("games", arenas=3)

        one.call([0, 2], set="label", args=["first", "third"])

        assert one.call(get="label") == ["first", "none", "third"]
        assert one.call([1, 2], get="index") == [1, 2]

    def test_values_without_a_json_of_their_own_are_made_plain_and_notes_come_between(self, engine: Start) -> None:
        one = engine("games")

        assert one.call(method="shout", args=["hé"]) == [{"said": "hé", "where": [[3, 4], None]}]
        assert one.notes == [{"name": "shout", "text": "hé", "at": [1, 2]}]

    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ({"method": "nobody"}, "no method 'nobody'"),
            ({"method": "count_rats", "args": [1, 2, 3]}, "argument"),
            ({"method": "count_rats", "kwargs": {"times": 2}}, "by name"),
            ({"get": "nothing"}, "no property 'nothing'"),
            ({"set": "nothing", "args": [1]}, "no property 'nothing'"),
            ({"set": "label", "args": []}, "0 values for 1"),
            ({"render": True}, "rendered"),
        ],
    )
    def test_a_call_that_makes_no_sense_is_an_error_and_nothing_else(
        self, engine: Start, request_: dict[str, Any], message: str
    ) -> None:
        one = engine("games")
        one.reset()

        with pytest.raises(EngineError, match=message) as raised:
            one.call(**request_)
        assert raised.value.frame["arena"] == 0
        assert one.step()["cat"].acting.all()

    def test_arenas_beyond_those_shown_are_invisible(self, engine: Start) -> None:
        one = engine("games", arenas=4, shown=2)

        assert one.call(get="shown") == [True, True, False, False]
        assert one.call(method="is_visible") == [True, True, False, False]

    def test_a_script_error_in_a_call_is_named(self, engine: Start, major: int) -> None:
        one = engine("games")
        if major == 4:
            with pytest.raises(EngineError) as raised:
                one.call(method="call_nobody", args=[1])
            assert raised.value.frame["script"] == "res://crowd.gd"
        else:
            assert one.call(method="call_nobody", args=[1]) == [None]
        assert "crowd.gd" in one.script_errors()[0]


class TestWorlds:
    @pytest.mark.parametrize("isolate", [False, True])
    def test_many_arenas_play_in_3d(self, engine: Start, isolate: bool) -> None:
        one = engine("games", scene="res://falling.tscn", arenas=3, isolate=isolate)
        episode = played(one, pushes(3, 16), [1, 2, 3])

        assert episode[15]["default"].truncated.all()
        assert episode[14]["default"].obs[0][:, 1] == pytest.approx([1, 1, 1], abs=0.05)  # on the floor

    @pytest.mark.parametrize(("game", "scene"), [("rolling_ball", None), ("games", "res://falling.tscn")])
    def test_an_isolated_arena_does_not_depend_on_how_many_there_are(
        self, engine: Start, major: int, game: str, scene: str | None
    ) -> None:
        actions = pushes(5, 14)
        of_many = played(engine(game, scene=scene, arenas=5, isolate=True), actions, [1, 2, 3, 4, 5])

        for n in (1, 2):
            few = engine(game, scene=scene, arenas=n, isolate=True)
            of_few = played(few, [action[:n] for action in actions], [1, 2][:n])
            for a, b in zip(of_few, of_many, strict=True):
                assert a["default"].obs[0].tobytes() == b["default"].obs[0][:n].tobytes()
                assert a["default"].reward.tobytes() == b["default"].reward[:n].tobytes()


class TestEnds:
    def test_close_quits_at_once(self, engine: Start) -> None:
        one = engine("rolling_ball", arenas=8)
        one.reset()
        one.step()

        assert one.close() < 2.0
        assert one.script_errors() == []

    @pytest.mark.load
    def test_close_takes_a_fifth_of_a_second(self, engine: Start) -> None:
        one = engine("rolling_ball", arenas=8)
        one.reset()

        assert one.close() < 0.2

    def test_the_engine_quits_when_the_trainer_is_gone(self, engine: Start) -> None:
        one = engine("coin_chase", arenas=4)
        one.reset()
        one.step()

        assert one.hang_up() == 0
        assert one.script_errors() == []

    def test_the_engine_quits_when_the_trainer_goes_in_the_middle_of_a_frame(self, engine: Start) -> None:
        one = engine("rolling_ball")
        one.reset()
        one._peer.sendall(struct.pack("<IBBHI", 1000, 67, 0, 0, 1) + b"half")

        assert one.hang_up() == 0

    def test_without_anybody_at_the_address_the_engine_says_so_and_quits(
        self, program: str, project_of: Callable[[str, int], Path], major: int, tmp_path: Path
    ) -> None:
        process = launch(program, project_of("rolling_ball", major), tmp_path, 1, "", fixed_fps=60)
        try:
            assert process.wait(END_S) == 1
        finally:
            process.kill()
            process.wait()
        assert "no trainer listens at 127.0.0.1:1" in (tmp_path / "log.txt").read_text()


class TestGames:
    @pytest.mark.parametrize("game", ["rolling_ball", "coin_chase"])
    def test_without_an_address_the_game_plays_by_itself(
        self, program: str, project_of: Callable[[str, int], Path], major: int, tmp_path: Path, game: str
    ) -> None:
        project = tmp_path / "project"
        shutil.copytree(project_of(game, major), project)
        quit_after_an_episode(project / f"{game}.gd")

        log = log_of_a_game_that_quits(program, project, tmp_path / "home")
        assert re.search(r"^\w+ \((default|hero)\): reward -?\d+\.\d+, (terminated|truncated)$", log, re.MULTILINE)

    @pytest.mark.parametrize("game", ["rolling_ball", "coin_chase"])
    def test_the_heuristic_reaches_the_goal_in_most_episodes(self, engine: Start, game: str) -> None:
        one = engine(game, arenas=32)
        one.reset(list(range(32)))
        replies = [one.step() for _ in range(130)]

        name = "default" if game == "rolling_ball" else "hero"
        reached = sum(reply[name].terminated.sum() for reply in replies)
        missed = sum(reply[name].truncated.sum() for reply in replies)
        assert reached >= 32
        assert reached >= 9 * missed

    def test_what_the_hero_wins_the_target_loses(self, engine: Start) -> None:
        one = engine("coin_chase", arenas=8)
        one.reset()
        replies = [one.step() for _ in range(60)]

        assert any(reply["hero"].terminated.any() for reply in replies)
        for reply in replies:
            np.testing.assert_array_equal(reply["hero"].reward, -reply["target"].reward)

    def test_observations_are_small_numbers(self, engine: Start) -> None:
        for game in ("rolling_ball", "coin_chase"):
            one = engine(game, arenas=8)
            for reply in (one.reset(), *(one.step() for _ in range(40))):
                for rows in reply.rows.values():
                    assert np.abs(rows.obs[0]).max() <= 2

    def test_a_new_project_can_be_trained_at_once(self, program: str, major: int, tmp_path: Path) -> None:
        project = new_project(tmp_path / "my game", major)
        with Engine(program, project, tmp_path / "home", arenas=4) as one:
            one.reset()
            replies = [one.step() for _ in range(30)]
            assert one.close() < END_S

        assert any(reply["default"].terminated.any() for reply in replies)
        assert one.script_errors() == []

    def test_the_game_is_still_one_after_the_addon_came_twice(
        self, program: str, major: int, tmp_path: Path, project_of: Callable[[str, int], Path]
    ) -> None:
        project = tmp_path / "project"
        shutil.copytree(project_of("rolling_ball", major), project)
        install_addon(project)
        with Engine(program, project, tmp_path / "home") as one:
            assert one.reset()["default"].acting.all()


def quit_after_an_episode(script: Path) -> None:
    """Has the game of a script quit when its second episode begins."""
    text = script.read_text()
    counted = text.replace("\tticks = 0\n", "\tticks = 0\n\tbegun += 1\n\tif begun == 2:\n\t\tget_tree().quit(0)\n")
    script.write_text(counted.replace("\nfunc reset", "\nvar begun = 0\n\n\nfunc reset"))
