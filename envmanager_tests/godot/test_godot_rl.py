"""Games made for godot_rl_agents, unchanged: small ones with a stand-in for its plugin, which speaks its protocol."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager import (
    BadObservation,
    EnvRaised,
    ProtocolError,
    RandomPolicy,
    RestartPolicy,
    Timeouts,
    UsageError,
    WorkerDied,
    WorkerTimedOut,
)
from envmanager.check.game import check_game
from envmanager.data.specs import SpecMismatch
from envmanager.data.steps import AGENT_BITS, StepInfo
from envmanager.errors import WorkerError
from envmanager.godot.frames import BadFrame
from envmanager.godot.games import install_addon, protocol_of
from envmanager.godot.godot_rl import Agents
from envmanager.godot.manager import GodotEnvManager
from envmanager.observe.events import Restarted
from envmanager.testing import nothing_left_behind
from envmanager_tests.godot.attaching import free_port, when_awaited
from envmanager_tests.godot.driver import END_S
from envmanager_tests.godot.endings import check_engines_end_with_their_trainer
from envmanager_tests.godot.test_exports import PLATFORM, PRESETS, editor

SCRIPTS = Path(__file__).parent / "godot_rl_games"
SHORT = Timeouts(step_s=2.0, reset_s=5.0, start_s=20.0)
NEVER = RestartPolicy(max_restarts=0)
LENGTH = 4
"""Number of actions in an episode of agent 0; those of agent i are i longer."""
NUMBER, EPISODE, ACTED, FIRST, SECOND, DRAW, TICKS = range(7)
"""What agents observe."""
GAMES: dict[str, list[dict[str, Any]]] = {
    "continuous": [{}],
    "discrete": [{"kind": "discrete"}] * 3,
    "mixed": [{"kind": "mixed"}] * 2,
    "policies": [
        {"policy_name": "cat"},
        {"policy_name": "rat", "kind": "discrete"},
        {"policy_name": "cat"},
        {"policy_name": "rat", "kind": "discrete"},
    ],
    "camera": [{"kind": "camera"}] * 2,
    "late": [{"resets_late": True}] * 2,
    "clash": [{}, {"kind": "discrete"}],
    "faulty": [{"kind": "faulty"}],
    "empty": [],
}
"""The agents of each game, in the order in which the game sends them."""

Play = Callable[..., GodotEnvManager]
Infos = list[StepInfo]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function: the project with all games for a major version."""
    there: dict[int, Path] = {}

    def find(major: int) -> Path:
        if major not in there:
            there[major] = make_project(tmp_path_factory.mktemp(f"godot_rl{major}"), major)
        return there[major]

    return find


def make_project(to: Path, major: int) -> Path:
    plugin = to / "addons" / "godot_rl_agents"
    plugin.mkdir(parents=True)
    (plugin / "sync.gd").write_bytes((SCRIPTS / str(major) / "sync.gd").read_bytes())
    (to / "agent.gd").write_bytes((SCRIPTS / str(major) / "agent.gd").read_bytes())
    main = '[application]\n\nconfig/name="Games"\nrun/main_scene="res://continuous.tscn"\n'
    (to / "project.godot").write_text(f"config_version={major + 1}\n\n{main}")
    for name, agents in GAMES.items():
        (to / f"{name}.tscn").write_text(scene(agents, major))
        (to / f"{name}_old.tscn").write_text(scene(agents, major, is_old=True))
    return to


def scene(agents: list[dict[str, Any]], major: int, *, is_old: bool = False) -> str:
    number = {4: '"{}"', 3: "{}"}[major]
    reference = {4: 'ExtResource("{}")', 3: "ExtResource( {} )"}[major]
    lines = [f"[gd_scene format={major - 1}]"]
    for index, path in enumerate(["res://addons/godot_rl_agents/sync.gd", "res://agent.gd"], 1):
        lines.append(f'[ext_resource type="Script" path="{path}" id={number.format(index)}]')
    lines += ['[node name="Game" type="Node"]', '[node name="Sync" type="Node" parent="."]']
    lines += [f"script = {reference.format(1)}", f"is_old = {str(is_old).lower()}"]
    for index, agent in enumerate(agents):
        lines += [f'[node name="Agent{index}" type="Node" parent="."]', f"script = {reference.format(2)}"]
        for name, value in {**agent, "number": index}.items():
            lines.append(f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}".replace("'", '"'))
    return "\n".join([*lines, ""])


@pytest.fixture
def play(program: str, major: int, made: Callable[[int], Path]) -> Play:
    """A function that starts a manager on a game, for an engine of this major version."""

    def start(game: str, n_envs: int = 1, *, engine: dict[str, Any] | None = None, **options: Any) -> GodotEnvManager:
        chosen = {"binary": program, "scene": f"res://{game}.tscn", "ticks_per_action": 4, **(engine or {})}
        project = made(major)
        if major >= 4 and not (project / ".godot").exists():  # here, because a busy machine takes longer than SHORT
            subprocess.run([program, "--headless", "--path", project, "--import"], timeout=120, capture_output=True)
        manager = GodotEnvManager(str(project), n_envs, engine=chosen, **{"wait": "all", **options})
        for behavior, spec in manager.behavior_specs.items():
            manager.set_policy(behavior, RandomPolicy(spec, 3))
        return manager

    return start


def observed(infos: Infos, behavior: str = "shared_policy") -> np.ndarray:
    """The rows of the observation ``obs``, by engine."""
    trees = [info.current[behavior].obs for info in sorted(infos, key=lambda info: info.worker_id)]
    return np.concatenate([tree["obs"] if isinstance(tree, dict) else tree for tree in trees])


def taken(infos: Infos, behavior: str = "shared_policy") -> Any:
    (info,) = infos
    assert info.actions is not None
    return info.actions[behavior].action


def take_steps(manager: GodotEnvManager, n_steps: int) -> None:
    for _ in range(n_steps):
        manager.step("all")


def check_rows(infos: Infos, behavior: str, numbers: list[int]) -> None:
    (info,) = infos
    steps = info.current[behavior]
    assert (steps.agent_id - (info.worker_id << AGENT_BITS)).tolist() == numbers
    assert observed(infos, behavior)[:, NUMBER].tolist() == numbers


# What games look like.


def test_continuous_actions_reach_the_agent_and_its_rewards_come_back(play: Play) -> None:
    with play("continuous") as manager:
        spec = manager.behavior_specs["shared_policy"]
        assert (str(spec.observation), str(spec.action)) == ("float32[7]", "float32[2] in [-1, 1]")
        first = observed(manager.reset())
        assert first[0, [NUMBER, EPISODE, ACTED]].tolist() == [0, 1, 0]
        manager.step("all")  # the plugin gives the first action to a game that has gone on since the reset
        for n_acted in (2, 3):
            infos = manager.step("all")
            check_rows(infos, "shared_policy", [0])
            assert observed(infos)[0, ACTED] == n_acted
            assert observed(infos)[0, [FIRST, SECOND]] == pytest.approx(
                taken(infos)[0], abs=1e-6
            )  # Godot 3 writes six digits
            assert infos[0].current["shared_policy"].reward.tolist() == [1.0]


def test_discrete_actions_of_several_agents_reach_each_its_own(play: Play) -> None:
    with play("discrete") as manager:
        assert str(manager.behavior_specs["shared_policy"].action) == "int64[] in [0, 3]"
        manager.reset()
        for _ in range(3):
            infos = manager.step("all")
            check_rows(infos, "shared_policy", [0, 1, 2])
            assert observed(infos)[:, FIRST].tolist() == taken(infos).tolist()
            assert infos[0].current["shared_policy"].reward.tolist() == [1.0, 2.0, 3.0]


def test_several_observations_and_actions_are_dicts(play: Play) -> None:
    with play("mixed") as manager:
        spec = manager.behavior_specs["shared_policy"]
        assert {name: str(own) for name, own in spec.action.items()} == {
            "push": "float32[2] in [-1, 1]",
            "move": "int64[] in [0, 3]",
        }
        assert {name: str(own) for name, own in spec.observation.items()} == {
            "obs": "float32[7]",
            "mode": "int64[] in [0, 2]",
        }
        manager.reset()
        for n_acted in (1, 2, 3):
            infos = manager.step("all")
            check_rows(infos, "shared_policy", [0, 1])
            assert observed(infos)[:, SECOND].tolist() == taken(infos)["move"].tolist()
            assert observed(infos)[:, FIRST] == pytest.approx(taken(infos)["push"][:, 0], abs=1e-6)
            assert infos[0].current["shared_policy"].obs["mode"].tolist() == [n_acted % 3] * 2


def test_a_policy_name_is_a_behavior_and_keeps_its_agents_in_order(play: Play) -> None:
    with play("policies") as manager:
        assert {name: str(own.action) for name, own in manager.behavior_specs.items()} == {
            "cat": "float32[2] in [-1, 1]",
            "rat": "int64[] in [0, 3]",
        }
        manager.reset()
        infos = manager.step("all")
        check_rows(infos, "cat", [0, 2])
        check_rows(infos, "rat", [1, 3])
        assert observed(infos, "cat")[:, [FIRST, SECOND]] == pytest.approx(taken(infos, "cat"), abs=1e-6)
        assert observed(infos, "rat")[:, FIRST].tolist() == taken(infos, "rat").tolist()
        assert infos[0].current["rat"].reward.tolist() == [2.0, 4.0]


def test_a_camera_is_an_array_of_bytes(play: Play) -> None:
    with play("camera") as manager:
        assert str(manager.behavior_specs["shared_policy"].observation["camera_2d"]) == "uint8[3, 4, 3] in [0, 255]"
        manager.reset()
        (info,) = manager.step("all")
        picture = info.current["shared_policy"].obs["camera_2d"]
        assert picture.shape == (2, 3, 4, 3)
        assert picture[1].reshape(12, 3).tolist() == [[1, 1, 255]] * 12


@pytest.mark.parametrize("game", ["continuous", "discrete", "mixed", "camera"])
def test_an_older_plugin_sends_the_spaces_of_one_agent(play: Play, game: str) -> None:
    numbers = list(range(len(GAMES[game])))
    with play(f"{game}_old", infos=True) as manager:
        manager.reset()
        infos = manager.step("all")
        check_rows(infos, "shared_policy", numbers)
        assert infos[0].current["shared_policy"].info == [{}] * len(numbers)


def test_infos_come_when_they_are_asked_for(play: Play) -> None:
    with play("discrete", infos=True) as manager:
        assert manager.reset()[0].current["shared_policy"].info == [{"number": 0.0}, {"number": 1.0}, {"number": 2.0}]
        assert manager.step("all")[0].current["shared_policy"].info == [{"number": n} for n in range(3)]
    with play("discrete") as manager:
        assert manager.reset()[0].current["shared_policy"].info is None


# Episodes.


def test_the_end_of_an_episode_terminates_it_with_the_observation_that_the_game_sent(play: Play) -> None:
    with play("discrete", infos=True) as manager:
        manager.reset()
        ends = []
        for at in range(1, 9):
            (info,) = manager.step("all")
            steps = info.current["shared_policy"]
            assert not steps.truncated.any()
            rows = np.flatnonzero(steps.terminated)
            ends += [(at, row) for row in rows.tolist()]
            if len(rows):  # the plugin sends one observation, here the first of the next episode
                assert steps.final_obs.tolist() == steps.obs[rows].tolist()
                assert steps.obs[rows][:, ACTED].tolist() == [0] * len(rows)
                assert steps.reset_info == [{}] * len(rows)
            else:
                assert steps.final_obs is None
        assert ends == [(4, 0), (5, 1), (6, 2), (8, 0)]


def test_a_game_that_resets_after_its_plugin_has_sent_ends_with_the_last_observation(play: Play) -> None:
    with play("late", engine={"ticks_per_action": 1}) as manager:
        manager.reset()
        for _ in range(3):
            manager.step("all")
        (info,) = manager.step("all")
        steps = info.current["shared_policy"]
        assert steps.terminated.tolist() == [True, False]
        assert steps.final_obs[0, [EPISODE, ACTED]].tolist() == [1, 4]
        assert observed(manager.step("all"))[0, EPISODE] == 2


def test_a_reset_begins_an_episode_of_every_agent(play: Play) -> None:
    with play("discrete", 2) as manager:
        manager.reset()
        take_steps(manager, 2)
        again = observed(manager.reset())
        assert again[:, [NUMBER, EPISODE, ACTED]].tolist() == [[n, 2, 0] for n in (0, 1, 2)] * 2
        info, other = sorted(manager.step("all"), key=lambda info: info.worker_id)
        assert (info.worker_id, other.worker_id) == (0, 1)
        assert other.current["shared_policy"].env_id.tolist() == [1] * 3


def test_the_ticks_of_an_action_are_those_of_the_option_or_else_of_the_game(play: Play) -> None:
    for asked, expected in ((2, 2), (None, 8)):
        with play("continuous", engine={"ticks_per_action": asked}) as manager:
            before = observed(manager.reset())[0, TICKS]
            assert observed(manager.step("all"))[0, TICKS] - before in (expected, 2 * expected)
            before = observed(manager.step("all"))[0, TICKS]
            assert observed(manager.step("all"))[0, TICKS] - before == expected


# Seeds, and what else the command line says.


def drawn(play: Play, seed: int | None, n_envs: int = 2) -> list[float]:
    with play("continuous", n_envs, seed=seed) as manager:
        found = observed(manager.reset())[:, DRAW].tolist()
        for _ in range(5):
            found += observed(manager.step("all"))[:, DRAW].tolist()
    return found


def test_engines_are_seeded_once_from_the_managers_seed(play: Play) -> None:
    first = drawn(play, 5)
    assert drawn(play, 5) == first
    assert set(drawn(play, 6)).isdisjoint(first)
    assert first[0] != first[1], "engines have seeds of their own"


def test_the_seed_of_a_reset_is_refused_once_by_a_warning(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    with play("continuous", seed=5) as manager, caplog.at_level(logging.WARNING, "envmanager"):
        manager.reset()
        assert not caplog.records
        manager.reset(seed=7)
        manager.reset(seed=8)
        assert len(caplog.records) == 1


def test_parameters_are_arguments_of_the_command_line(play: Play) -> None:
    with play("discrete") as manager:
        manager.reset()
        assert manager.call("pace") == [[[1, 60]] * 3]
    with play("discrete", engine={"parameters": {"speedup": 4, "loud": True}}) as manager:
        manager.reset()
        assert manager.call("pace") == [[[4, 240]] * 3]
        assert manager.call("who") == [[0, 1, 2]]
        assert len(manager.step("all")) == 1


def test_real_time_takes_its_time(play: Play) -> None:
    with play("continuous", engine={"speed": "realtime", "ticks_per_action": 12}) as manager:
        manager.reset()
        manager.step("all")
        began = time.monotonic()
        take_steps(manager, 3)  # 36 ticks
        assert time.monotonic() - began > 0.4


# What cannot be said.


def test_what_the_protocol_has_no_message_for_is_a_usage_error(play: Play) -> None:
    with play("discrete") as manager:
        with pytest.raises(UsageError, match=r"engine\.parameters"):
            manager.reset(options={"level": 3})
        manager.reset()
        for refused in (
            lambda: manager.set_attr("number", 3),
            lambda: manager.get_attr("number"),
            lambda: manager.render(),
            lambda: manager.call("who", 1),
            lambda: manager.call("who", loudly=True),
            lambda: manager.call(print),
        ):
            with pytest.raises(UsageError):
                refused()
        assert manager.call("who") == [[0, 1, 2]], "the engine stays usable"
        assert manager.step("all")


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"n_workers": 1}, {}),
        ({}, {"isolate": True}),
        ({}, {"attach": "127.0.0.1:4321"}),
        ({}, {"parameters": {"levels": [1, 2]}}),
    ],
)
def test_what_an_engine_of_one_environment_cannot_do_is_a_usage_error(
    play: Play, options: dict[str, Any], engine: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"godot_rl_agents|one environment"):
        play("continuous", 2, engine=engine, **options)


def test_every_behavior_needs_a_policy(play: Play, made: Callable[[int], Path], major: int, program: str) -> None:
    engine = {"binary": program, "scene": "res://policies.tscn"}
    with GodotEnvManager(str(made(major)), engine=engine) as manager:
        manager.set_policy("cat", RandomPolicy(manager.behavior_specs["cat"]))
        manager.reset()
        with pytest.raises(UsageError, match="rat"):
            manager.step()


def test_agents_of_one_policy_with_different_spaces_are_named(play: Play) -> None:
    with pytest.raises(ProtocolError, match=r"agents 0 and 1 .*policy_name"):
        play("clash")


def test_an_error_of_a_script_explains_the_answer_that_it_spoilt(play: Play) -> None:
    with pytest.raises(EnvRaised, match=r"agent\.gd:\d+") as raised:
        play("faulty")
    assert (raised.value.type_name, raised.value.phase) == ("ScriptError", "start")


def test_a_game_without_agents_to_train_is_a_time_out_that_says_what_to_look_for(play: Play) -> None:
    with pytest.raises(WorkerTimedOut, match="Sync node"):
        play("empty", timeouts=Timeouts(start_s=3.0))


# Which protocol a game speaks.


def test_the_protocol_is_found_out_by_the_plugin_unless_the_addon_is_installed(tmp_path: Path, major: int) -> None:
    game = make_project(tmp_path / "game", major)
    assert protocol_of(str(game)) == "godot_rl"
    install_addon(game)
    assert protocol_of(str(game)) == "envmanager"
    (game / "addons/envmanager/bridge.gd.uid").write_text("uid://b0r14csdorl7k\n")
    file = game / "project.godot"  # as Godot's editor writes it when the plugin is enabled there
    file.write_text(file.read_text().replace("res://addons/envmanager/bridge.gd", "uid://b0r14csdorl7k"))
    assert protocol_of(str(game)) == "envmanager"
    assert protocol_of("demo:rolling_ball") == "envmanager"
    assert protocol_of(str(tmp_path / "nowhere")) == "envmanager"


def test_the_protocol_of_an_exported_game_is_found_out(tmp_path: Path) -> None:
    program, pack = tmp_path / "game.x86_64", tmp_path / "game.pck"
    program.write_bytes(b"\x7fELF, an engine")
    pack.write_bytes(b"GDPC\x02 res://addons/godot_rl_agents/sync.gdc res://main.tscn")
    assert [protocol_of(str(each)) for each in (program, pack)] == ["godot_rl"] * 2
    pack.write_bytes(pack.read_bytes() + b"res://addons/envmanager/bridge.gd")
    assert protocol_of(str(program)) == "envmanager"


def test_a_pack_and_a_program_are_played_as_their_folder_is(
    program: str, major: int, made: Callable[[int], Path], tmp_path: Path
) -> None:
    game, pack, script = make_project(tmp_path / "game", major), tmp_path / "game.pck", tmp_path / "game.x86_64"
    (game / "export_presets.cfg").write_text(PRESETS.format(platform=PLATFORM[major]))
    editor(program, game, *(["--headless"] if major == 4 else []), "--export-pack", "Pack", str(pack))
    script.write_text(f'#!/bin/sh\nexec "{program}" --path "{game}" "$@"\n')
    script.chmod(0o755)

    seen = []
    for path, engine in ((game, {}), (pack, {}), (script, {"protocol": "godot_rl"})):
        chosen = {"ticks_per_action": 4, **engine, **({} if path is script else {"binary": program})}
        with GodotEnvManager(str(path), engine=chosen, seed=1) as manager:
            manager.set_policy("shared_policy", RandomPolicy(manager.behavior_specs["shared_policy"], 3))
            infos = [manager.reset(), *(manager.step("all") for _ in range(6))]
            seen.append([observed(each).tolist() for each in infos])
    assert seen[0] == seen[1] == seen[2]


# Messages that no plugin sends.

KEYS = ["type", "n_agents", "agent_policy_names", "observation_space", "action_space", "obs", "camera_2d", "mode"]
KEYS += ["space", "size", "low", "action_type", "reward", "done", "info"]
WORDS = ["box", "discrete", "continuous", "ff00", "a"]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS)
JSON = st.recursive(
    VALUES,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(KEYS), below, max_size=4),
    max_leaves=20,
)
SPACES = {
    "obs": {"size": [2], "space": "box", "low": -1.0},
    "camera_2d": {"size": [2], "space": "box"},
    "mode": {"size": 3, "space": "discrete"},
}
ACTIONS = {"push": {"size": 2, "action_type": "continuous"}, "move": {"size": 3, "action_type": "discrete"}}
ENV_INFO = {"n_agents": 2, "observation_space": SPACES, "action_space": ACTIONS}
SEEN = {"obs": [0.5, 1.5], "camera_2d": "ff00", "mode": 2}


@given(changes=st.dictionaries(st.sampled_from([*ENV_INFO, "agent_policy_names"]), JSON))
def test_any_env_info_is_read_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(BadFrame):
        assert Agents.of({**ENV_INFO, **changes}).n > 0


@given(
    changes=st.dictionaries(
        st.sampled_from(["obs", "reward", "done", "info"]), JSON | st.lists(JSON, min_size=2, max_size=2)
    )
)
def test_any_step_is_read_or_refused(changes: dict[str, Any]) -> None:
    message = {"type": "step", "obs": [SEEN, SEEN], "reward": [1, 2], "done": [False, True], "info": [{}, {}]}
    agents = Agents.of(ENV_INFO)
    whole = agents.steps(message, 3, infos=True)["shared_policy"]
    assert whole.obs["camera_2d"].tolist() == [[255, 0]] * 2
    assert whole.agent_id.tolist() == [3 << AGENT_BITS, (3 << AGENT_BITS) + 1]
    with contextlib.suppress(BadFrame, SpecMismatch), np.errstate(over="ignore"):
        steps = agents.steps({**message, **changes}, 3, infos=True)["shared_policy"]
        assert [len(array) for array in (steps.obs["obs"], steps.obs["mode"], steps.reward, steps.terminated)] == [
            2
        ] * 4


# Faults.

TROUBLE: dict[str, tuple[type[WorkerError], str]] = {
    "quit": (WorkerDied, r"EXIT\(3\)"),
    "loop": (WorkerTimedOut, "step"),
    "script": (EnvRaised, r"sync\.gd:\d+"),
    "garbage": (ProtocolError, "4294967295 bytes"),
    "text": (ProtocolError, "no JSON"),
    "twice": (ProtocolError, "answers no command"),
    "short": (ProtocolError, "'reward' should be a list of 3"),
    "size": (BadObservation, r"obs\['obs'\] of agent 2"),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_fault_of_the_game_is_an_error_of_its_kind_and_a_reset_revives(play: Play, trouble: str) -> None:
    error, text = TROUBLE[trouble]
    engine = {"parameters": {"trouble": trouble}}
    with play("discrete", 2, engine=engine, timeouts=SHORT, restarts=NEVER) as manager:
        manager.reset()
        take_steps(manager, 2)
        with pytest.raises(error, match=text) as raised:
            take_steps(manager, 3)
        assert raised.value.phase in ("step", "idle")
        if trouble == "size":
            return  # the agent stays as it is
        manager.reset()
        assert len(manager.step("all")) == 2


def test_an_answer_too_many_that_comes_after_its_step_is_not_taken_for_that_of_the_next() -> None:
    """The messages have no tickets. A game in a thread sends the second answer while the trainer has none in flight."""
    address = ("127.0.0.1", free_port())
    stepped, has_sent = threading.Event(), threading.Event()
    answers = {
        "env_info": {"type": "env_info", **ENV_INFO},
        "reset": {"type": "reset", "obs": [SEEN, SEEN]},
        "action": {"type": "step", "obs": [SEEN, SEEN], "reward": [1, 2], "done": [False, False]},
    }

    def game() -> None:
        reset = contextlib.suppress(ConnectionError)  # the manager ends it
        with reset, socket.create_connection(address, END_S) as connection, connection.makefile("rwb") as stream:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while length := stream.read(4):
                asked = json.loads(stream.read(int.from_bytes(length, "little")))["type"]
                if asked in answers:
                    send(stream, answers[asked])
                if asked == "action":
                    assert stepped.wait(END_S)
                    send(stream, answers[asked])
                    has_sent.set()

    def send(stream: BinaryIO, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        stream.write(len(body).to_bytes(4, "little") + body)
        stream.flush()

    thread = threading.Thread(target=game)
    engine = {"attach": ":".join(map(str, address)), "protocol": "godot_rl"}
    try:
        with when_awaited(lambda _: thread.start()):
            manager = GodotEnvManager("my game", 1, engine=engine, restarts=NEVER)
        with manager:
            manager.set_policy("shared_policy", RandomPolicy(manager.behavior_specs["shared_policy"], 3))
            manager.reset()
            manager.step()
            stepped.set()
            assert has_sent.wait(END_S)
            with pytest.raises(ProtocolError, match="answers no command"):
                manager.step()
    finally:
        stepped.set()
        thread.join(END_S)


def test_numbers_that_are_not_finite_are_found(play: Play) -> None:
    engine = {"parameters": {"trouble": "nan"}}
    with play("discrete", engine=engine, check_values=True, restarts=NEVER) as manager:
        manager.reset()
        with pytest.raises((BadObservation, ProtocolError)):  # some engines write nan, which is no JSON
            take_steps(manager, 4)


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_fails_is_replaced_and_the_other_goes_on(play: Play, harm: signal.Signals) -> None:
    with play("discrete", 2, timeouts=SHORT, wait="any", seed=1) as manager:
        before = observed(manager.reset())[0, DRAW]
        manager.step("all")
        pid = manager.stats().workers[0].pid
        assert pid is not None
        os.kill(pid, harm)

        deadline = time.monotonic() + 60
        lost: Infos = []
        while not lost:
            assert time.monotonic() < deadline, "no lost step was told"
            lost = [info for info in manager.step() if info.lost is not None]
        assert [event.worker_id for event in manager.events if isinstance(event, Restarted)] == [0]
        assert lost[0].current["shared_policy"].truncated.all()
        assert observed(lost)[0, DRAW] != before, "a replacement has a seed of its own"
        for _ in range(5):
            assert len(manager.step("all")) == 2


TRAINER = """
import sys
from envmanager import RandomPolicy
from envmanager.godot.manager import GodotEnvManager

game, binary, doing = sys.argv[1:]
trouble = {"trouble": "loop"} if doing == "loop" else {}
manager = GodotEnvManager(game, 2, engine={"binary": binary, "parameters": trouble})
for behavior, spec in manager.behavior_specs.items():
    manager.set_policy(behavior, RandomPolicy(spec, 0))
manager.reset()
print(*(worker.pid for worker in manager.stats().workers), flush=True)
while doing != "idle":
    manager.step()
sys.stdin.read()
"""


@pytest.mark.parametrize("doing", ["idle", "steps", "loop", "stopped"])
def test_when_the_trainer_is_killed_its_engines_end(
    program: str, major: int, made: Callable[[int], Path], doing: str
) -> None:
    check_engines_end_with_their_trainer(
        TRAINER, str(made(major)), program, doing, is_stopped=doing == "stopped", within_s=END_S
    )


def test_closing_asks_the_games_to_quit_and_leaves_nothing(play: Play) -> None:
    play("continuous").close()  # starts the helper, which stays
    with nothing_left_behind(), play("discrete", 2) as manager:
        manager.reset()
        take_steps(manager, 2)
        began = time.monotonic()
        manager.close()
        assert time.monotonic() - began < 2.0, "they were killed"


# Around it.


def test_a_game_that_is_played_in_the_editor_is_attached(
    program: str, major: int, made: Callable[[int], Path], tmp_path: Path
) -> None:
    port = free_port()
    games = []

    def play_in_editor(_: logging.LogRecord) -> None:
        command = [program, "--path", str(made(major)), *(["--headless"] if major == 4 else [])]
        command += ["--fixed-fps", "60", f"--port={port}", "--env_seed=1", "--speedup=1"]
        environ = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
        games.append(subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))

    try:
        engine = {"attach": f"127.0.0.1:{port}", "protocol": "godot_rl"}
        with when_awaited(play_in_editor), GodotEnvManager("my game", 1, engine=engine) as manager:
            manager.set_policy("shared_policy", RandomPolicy(manager.behavior_specs["shared_policy"], 3))
            manager.reset()
            take_steps(manager, 5)
        assert games[0].wait(END_S) == 0
    finally:
        for game in games:
            game.kill()
            game.wait(END_S)


def test_check_plays_such_a_game_with_one_engine(program: str, major: int, made: Callable[[int], Path]) -> None:
    engine = {"binary": program, "scene": "res://policies.tscn", "parameters": {"speedup": 1}}
    found = {finding.question: finding.outcome for finding in check_game(str(made(major)), engine=engine, n_steps=20)}
    assert found.pop("threads", "note") == "note"
    assert found == {"starts": "ok", "behaviors": "ok", "steps": "ok", "episodes": "ok", "seeding": "note"}
