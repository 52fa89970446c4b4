"""Exported policies that real engines evaluate, without Python and beside a trainer."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

pytest.importorskip("torch")
from envmanager import BehaviorSpec
from envmanager.check.game import check_game
from envmanager.cli.app import run_command_line
from envmanager.data.specs import ArraySpec
from envmanager.data.trees import build, map_tree
from envmanager.training.algorithms.networks import pick_device
from envmanager.training.algorithms.trainers import make_trainer
from envmanager.training.policies.exporting import export_policy
from envmanager.training.policies.saved import SavedPolicy
from envmanager_tests.godot.driver import Engine, EngineError
from envmanager_tests.godot.endings import log_of_a_game_that_quits
from envmanager_tests.training.puzzles import SMALL_PPO, rewrite
from envmanager_tests.training.puzzles import trained as train

N_SEEN = 10
TICKS = 6
NORMALIZED = {"normalize_observations": True}
INTS = {4: "PackedInt32Array", 3: "PoolIntArray"}
EMPTY = {4: "", 3: " "}


@attrs.frozen
class Player:
    """An agent of the game, and the table of the trainer of its policy; without one it plays by heuristic()."""

    trainer: Mapping[str, Any] | None = None
    continuous: int = 0
    choices: tuple[int, ...] = ()
    policy: str | None = None
    """Path that the agent names; the policy's own if unset."""
    script: str = "mirror.gd"

    @property
    def n_acts(self) -> int:
        return self.continuous + len(self.choices)

    @property
    def spec(self) -> BehaviorSpec:
        leaves = {}
        if self.continuous:
            leaves["continuous"] = ArraySpec((self.continuous,), np.float32, -1, 1)
        if self.choices:
            shape = () if len(self.choices) == 1 else (len(self.choices),)
            high = np.array(self.choices, np.int32).reshape(shape) - 1
            leaves["discrete"] = ArraySpec(shape, np.int32, 0, high)
        action = leaves if len(leaves) > 1 else next(iter(leaves.values()))
        numbers = ArraySpec((N_SEEN + self.n_acts,), np.float32)
        whole = {"counts": ArraySpec((2,), np.int32), "levels": ArraySpec((3,), np.uint8, 0, 255)}
        return BehaviorSpec(numbers if self.script == "mirror.gd" else {**whole, "obs": numbers}, action)


PLAYERS = {
    "ppo_discrete": Player({"kind": "ppo", "policy_gain": 3.0}, choices=(5,)),
    "ppo_several": Player({"kind": "ppo", "policy_gain": 3.0, "hidden": [33, 18]}, choices=(3, 4, 2)),
    "ppo_continuous": Player({"kind": "ppo", "policy_gain": 1.0, **NORMALIZED}, continuous=3),
    "ppo_both": Player({"kind": "ppo", "policy_gain": 1.0, "hidden": [256, 256], **NORMALIZED}, 2, (3, 2)),
    "ppo_linear": Player({"kind": "ppo", "policy_gain": 1.0, "hidden": []}, continuous=4),
    "dqn": Player({"kind": "dqn", **NORMALIZED}, choices=(6,)),
    "dqn_plain": Player({"kind": "dqn", "duelling": False, "hidden": [31], **NORMALIZED}, choices=(4,)),
    "ppo_parts": Player({"kind": "ppo", "policy_gain": 1.0, **NORMALIZED}, continuous=2, script="parts.gd"),
    "sac": Player({"kind": "sac", "hidden": [64, 30], **NORMALIZED}, continuous=3),
}
CONTINUOUS = PLAYERS["ppo_continuous"]


def observations(player: Player, n: int) -> Any:
    """Random observations of a player."""
    seen = np.random.default_rng(2).normal(1, 3, (n, N_SEEN + player.n_acts)).astype(np.float32)
    if player.script == "mirror.gd":
        return seen
    return {
        "counts": (9 * seen[:, :2]).astype(np.int32),
        "levels": (20 * abs(seen[:, :3])).astype(np.uint8),
        "obs": seen,
    }


def policy_of(name: str, player: Player) -> SavedPolicy:
    """A policy with random weights, normalized by random statistics."""
    trainer: Any = make_trainer(name, player.spec, {**(player.trainer or {})}, seed=1, device="cpu")
    encoder = trainer.model.actor.encoder if name == "sac" else trainer.model.encoder
    encoder.learn_scale(encoder.tensors(observations(player, 500), pick_device("cpu")))
    return SavedPolicy(name, player.spec, trainer, 0)


@pytest.fixture
def make_game(
    major: int, project_of: Callable[[str, int], Path], tmp_path: Path
) -> Callable[[Mapping[str, Player]], tuple[Path, dict[str, SavedPolicy]]]:
    """A function: a game whose agents are these, and the policies that were exported into it."""

    def make(players: Mapping[str, Player]) -> tuple[Path, dict[str, SavedPolicy]]:
        game = tmp_path / "game"
        shutil.copytree(project_of("games", major), game)
        policies = {name: policy_of(name, each) for name, each in players.items() if each.trainer is not None}
        for name, policy in policies.items():
            seen = observations(players[name], 100)
            export_policy(policy, game / f"{name}.policy", to="godot", observations=seen, ticks_per_action=TICKS)
        write_scene(game, major, players)
        return game, policies

    return make


def write_scene(game: Path, major: int, players: Mapping[str, Player]) -> None:
    e = EMPTY[major]
    id_of = {4: 'id="{}"', 3: "id={}"}[major].format
    resource = {4: 'ExtResource("{}")', 3: "ExtResource( {} )"}[major].format
    lines = [f"[gd_scene load_steps=4 format={major - 1}]", ""]
    lines += [f'[ext_resource path="res://{file}" type="Script" {id_of(i)}]' for i, file in enumerate(SCRIPTS, 1)]
    lines += ["", '[node name="Mirrors" type="Node2D"]']
    for name, player in players.items():
        path = player.policy if player.policy is not None else f"res://{name}.policy" if player.trainer else ""
        lines += [
            "",
            f'[node name="{name}" type="Node" parent="."]',
            f"script = {resource(1 + SCRIPTS.index(player.script))}",
        ]
        lines += [f'behavior = "{name}"', f"observation_size = {N_SEEN + player.n_acts}", f'policy = "{path}"']
        lines += [f"continuous_size = {player.continuous}"]
        lines += [f"discrete_choices = {INTS[major]}({e}{', '.join(map(str, player.choices))}{e})"]
    lines += ["", '[node name="Arena" type="Node" parent="."]', f"script = {resource(2)}", ""]
    (game / "mirrors.tscn").write_text("\n".join(lines))
    project = game / "project.godot"
    project.write_text(re.sub(r"run/main_scene=.*", 'run/main_scene="res://mirrors.tscn"', project.read_text()))


SCRIPTS = ("mirror.gd", "mirrors.gd", "parts.gd")

MakeGame = Callable[[Mapping[str, Player]], tuple[Path, dict[str, SavedPolicy]]]


def as_rows(player: Player, action: Any) -> np.ndarray:
    """The numbers of actions ``[n, …]``, the continuous ones first."""
    leaves = list(action.values()) if isinstance(action, dict) else [action]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1).astype(np.float64)


def difference(player: Player, policy: SavedPolicy, seen: Any, did: np.ndarray) -> float:
    """The largest difference of continuous actions; the discrete ones are the same."""
    wanted = as_rows(player, policy(map_tree(np.copy, seen)))
    n = player.continuous
    np.testing.assert_array_equal(did[:, n:], wanted[:, n:])
    return float(np.abs(did[:, :n] - wanted[:, :n]).max(initial=0.0))


def test_policies_act_in_the_game_as_in_python_on_1000_observations(
    make_game: MakeGame, program: str, tmp_path: Path
) -> None:
    game, policies = make_game(PLAYERS)

    with Engine(program, game, tmp_path / "home", arenas=20) as engine:
        frames = [engine.reset(list(range(20))), *(engine.step() for _ in range(50))]
        assert engine.call(method="heuristics") == [[0] * len(PLAYERS)] * 20
        assert engine.script_errors() == []

    differences = {}
    for name, player in PLAYERS.items():
        parts = [np.concatenate(part) for part in zip(*(frame[name].obs for frame in frames[:-1]), strict=True)]
        seen = build(player.spec.observation, parts)
        did = np.concatenate([frame[name].obs[-1][:, N_SEEN:] for frame in frames[1:]])
        assert len(did) == 1000
        assert len(np.unique(did, axis=0)) > 1
        differences[name] = difference(player, policies[name], seen, did)
    print(differences)
    assert max(differences.values()) <= 1e-5


def lines_of(log: str, name: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Each line of a mirror: the tick, what it saw and what it did."""
    found = []
    for tick, text in re.findall(rf"^{name} in tick (\d+): (.*)$", log, re.MULTILINE):
        before, after = np.frombuffer(base64.b64decode(text), "<f4").reshape(2, 1, -1)
        found.append((int(tick), before, after[:, N_SEEN:]))
    return found


def test_a_player_plays_against_a_policy_in_the_rhythm_of_the_training(
    make_game: MakeGame, program: str, tmp_path: Path
) -> None:
    game, policies = make_game({"player": Player(None, 2, (3,)), "sac": PLAYERS["sac"]})

    log = log_of_a_game_that_quits(program, game, tmp_path / "home")

    by_hand, by_policy = lines_of(log, "player"), lines_of(log, "sac")
    assert len(by_hand) == 20
    assert {number for *_, did in by_hand for number in did.ravel().tolist()} == {0.0}
    assert 19 <= len(by_policy) <= 20
    for _, seen, did in by_policy:
        assert difference(PLAYERS["sac"], policies["sac"], seen, did) <= 1e-5
    ticks = [tick for tick, *_ in by_hand]
    assert set(np.diff(ticks).tolist()) == {TICKS}


def test_a_trainer_decides_unless_it_leaves_the_behavior_out(make_game: MakeGame, program: str, tmp_path: Path) -> None:
    game, _ = make_game({"ppo_continuous": CONTINUOUS, "sac": PLAYERS["sac"]})

    with Engine(program, game, tmp_path / "home", arenas=2) as engine:
        engine.reset([1, 2])
        steps = engine.step({"sac": [np.full((2, 3), 0.25, "<f4")]})
        assert engine.call(method="heuristics") == [[0, 0], [0, 0]]

    np.testing.assert_array_equal(steps["sac"].obs[0][:, N_SEEN:], 0.25)
    assert (steps["ppo_continuous"].obs[0][:, N_SEEN:] != 0.25).all()


def damage(file: Path) -> None:
    text = file.read_text()
    at = text.index('"weights": "') + 30
    file.write_text(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :])


def renumber(file: Path) -> None:
    file.write_text(file.read_text().replace('"version": 1', '"version": 2', 1))


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "is not there. `envmanager export RUN --to godot` writes it"),
    "damaged": (damage, "is damaged; export it again"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-300]), "is damaged"),
    "another version": (
        renumber,
        "has version 2 of the format, and this addon reads 1. `envmanager godot install-addon`",
    ),
    "a picture": (lambda file: file.write_bytes(bytes(range(256))), "is no policy for a game"),
    "no checksum": (
        lambda file: file.write_text(file.read_text().replace('"sha256"', '"other"', 1)),
        "is damaged",
    ),
    "no version": (
        lambda file: file.write_text(file.read_text().replace('"version"', '"other"', 1)),
        "is no policy for a game",
    ),
    "no JSON object": (lambda file: file.write_text("[1]\n[2]\n"), "is no policy for a game"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_an_error_that_says_what_to_do(
    make_game: MakeGame, program: str, tmp_path: Path, wrong: str
) -> None:
    spoil, words = WRONG[wrong]
    game, _ = make_game({"player": Player(None, 2), "ppo_continuous": CONTINUOUS})
    spoil(game / "ppo_continuous.policy")

    log = log_of_a_game_that_quits(program, game, tmp_path / "home")
    assert log.count(f"EnvManager: the policy res://ppo_continuous.policy {words}") == 1
    assert lines_of(log, "ppo_continuous") == []
    with Engine(program, game, tmp_path / "home") as engine:
        engine.reset([1])
        led = {"ppo_continuous": [np.zeros((1, 3), "<f4")], "player": [np.zeros((1, 2), "<f4")]}
        engine.step(led)
        with pytest.raises(EngineError, match=re.escape(words)):
            engine.step()


def test_a_policy_for_other_sizes_is_found_by_the_check(
    make_game: MakeGame, program: str, tmp_path: Path, major: int
) -> None:
    other = attrs.evolve(CONTINUOUS, continuous=2, policy="res://ppo_continuous.policy")
    game, _ = make_game({"ppo_continuous": CONTINUOUS, "other": other})

    found = [each for each in check_game(str(game), engine={"binary": program}, n_steps=5) if each.outcome == "problem"]

    (only,) = (each for each in found if each.question == "policies")
    assert "is for observations of [13] numbers, continuous_size 3, discrete_choices []; the agent has" in only.text
    assert "(node other)" in only.text


def test_policies_of_two_rhythms_are_an_error(make_game: MakeGame, program: str, tmp_path: Path) -> None:
    game, _ = make_game({"player": Player(None, 2), "ppo_continuous": CONTINUOUS, "sac": PLAYERS["sac"]})
    policy = policy_of("sac", PLAYERS["sac"])
    seen = np.zeros((3, 13), np.float32)
    export_policy(policy, game / "sac.policy", to="godot", observations=seen, ticks_per_action=TICKS + 2)

    log = log_of_a_game_that_quits(program, game, tmp_path / "home")
    assert f"trained with {TICKS} ticks per action and another with {TICKS + 2}" in log


def test_one_file_serves_several_behaviors(make_game: MakeGame, program: str, tmp_path: Path) -> None:
    twin = attrs.evolve(CONTINUOUS, trainer=None, policy="res://ppo_continuous.policy")
    game, policies = make_game({"ppo_continuous": CONTINUOUS, "twin": twin})

    with Engine(program, game, tmp_path / "home", arenas=4) as engine:
        first, second = engine.reset([1, 2, 3, 4]), engine.step()

    did = second["twin"].obs[0][:, N_SEEN:]
    assert difference(twin, policies["ppo_continuous"], first["twin"].obs[0], did) <= 1e-5


def test_an_arena_that_is_the_agent_plays_by_its_policy(
    project_of: Callable[[str, int], Path], major: int, program: str, tmp_path: Path
) -> None:
    game = tmp_path / "game"
    shutil.copytree(project_of("rolling_ball", major), game)
    spec = BehaviorSpec(ArraySpec((6,)), ArraySpec((2,), np.float32, -1, 1))
    trainer = make_trainer("default", spec, {"kind": "ppo", "policy_gain": 1.0}, seed=1, device="cpu")
    policy = SavedPolicy("default", spec, trainer, 0)
    export_policy(policy, game / "ball.policy", to="godot", observations=np.zeros((3, 6), np.float32))
    scene = game / "rolling_ball.tscn"
    scene.write_text(
        scene.read_text().replace("observation_size = 6", 'observation_size = 6\npolicy = "res://ball.policy"')
    )

    games = []
    for is_led in (True, False):
        with Engine(program, game, tmp_path / f"home{is_led}", arenas=3) as engine:
            frames = [engine.reset([1, 2, 3])]
            for _ in range(30):
                actions = {"default": [policy(frames[-1]["default"].obs[0].copy()).astype("<f4")]} if is_led else {}
                frames.append(engine.step(actions))
        games.append(np.stack([frame["default"].obs[0] for frame in frames]))
    np.testing.assert_allclose(*games, atol=1e-3)
    assert np.ptp(games[0], axis=0).max() > 0.1


def test_the_command_exports_all_policies_of_a_game_also_if_it_was_trained_in_the_editor(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {"binary": program, "ticks_per_action": 8}
    train(tmp_path / "chase", "demo:coin_chase", {"*": SMALL_PPO}, kind="godot", engine=engine)
    state = next((tmp_path / "chase" / "checkpoints").glob("*/state.json"))
    rewrite(state, '"binary": ', '"attach": "127.0.0.1:4321", "binary": ')

    assert run_command_line(["export", str(tmp_path / "chase"), "--to", "godot", "--out", str(tmp_path)]) == 0

    assert capsys.readouterr().out.count("same actions on 30") == 2
    for name, sizes in (("hero", [12]), ("target", [6])):
        body = json.loads((tmp_path / f"chase-{name}.policy").read_text().splitlines()[1])
        assert (body["behavior"], body["observation_sizes"], body["ticks_per_action"]) == (name, sizes, 8)


def test_the_file_is_text_that_says_what_it_is(make_game: MakeGame) -> None:
    game, _ = make_game({"sac": PLAYERS["sac"]})

    first, second = map(json.loads, (game / "sac.policy").read_text().splitlines())
    assert (first["format"], first["version"]) == ("envmanager.policy", 1)
    assert (second["behavior"], second["observation_sizes"], second["ticks_per_action"]) == ("sac", [13], TICKS)
