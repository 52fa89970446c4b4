"""GodotEnvManager with real engines: what they play, what becomes of them, and that nothing is left."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    BadObservation,
    BehaviorSpec,
    EnvRaised,
    RandomPolicy,
    RestartPolicy,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
    WorkerTimedOut,
)
from envmanager.data.steps import StepInfo
from envmanager.errors import WorkerError
from envmanager.godot.games import find_game, import_command, new_project
from envmanager.godot.manager import GodotEnvManager
from envmanager.godot.options import EngineOptions
from envmanager.observe.events import Died, Restarted
from envmanager.system import machine
from envmanager_tests.godot.endings import check_engines_end_with_their_trainer

TROUBLED = "res://troubled.tscn"
GAMES = Path(__file__).parent / "games"
SHORT = Timeouts(step_s=2.0, reset_s=5.0)
NEVER = RestartPolicy(max_restarts=0)

Play = Callable[..., GodotEnvManager]


@pytest.fixture
def play(program: str, major: int, project_of: Callable[[str, int], Path]) -> Play:
    """A function that starts a manager on a game, for an engine of this major version."""

    def start(game: str, n_envs: int, *, engine: dict[str, Any] | None = None, **options: Any) -> GodotEnvManager:
        chosen = {"binary": program, **(engine or {})}
        manager = GodotEnvManager(str(project_of(game, major)), n_envs, engine=chosen, **options)
        for behavior, spec in manager.behavior_specs.items():
            manager.set_policy(behavior, RandomPolicy(spec, 3))
        return manager

    return start


class Pushes:
    """A policy whose actions depend on the observations alone."""

    def __init__(self, spec: BehaviorSpec) -> None:
        self._spec = spec

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        action, shape = self._spec.action, (len(steps), *self._spec.action.shape)
        chosen = np.random.default_rng(zlib.crc32(steps.obs.tobytes()))
        drawn = chosen.uniform(-1, 1, shape) if action.dtype.kind == "f" else chosen.integers(0, 3, shape)
        return ActionInfo(drawn.astype(action.dtype))


def bits_of(infos: list[StepInfo]) -> dict[int, bytes]:
    """By environment, all that an agent of it saw and got."""
    found: dict[int, bytes] = {}
    for info in infos:
        for steps in info.current.values():
            for row, env_id in enumerate(steps.env_id.tolist()):
                mine = steps.obs[row].tobytes() + steps.reward[row].tobytes() + steps.terminated[row].tobytes()
                found[env_id] = found.get(env_id, b"") + mine
    return found


def take_steps(manager: GodotEnvManager, n_steps: int) -> None:
    for _ in range(n_steps):
        manager.step("all")


def played(manager: GodotEnvManager, n_steps: int) -> list[dict[int, bytes]]:
    with manager:
        return [bits_of(manager.reset({"seed": 0})), *(bits_of(manager.step("all")) for _ in range(n_steps))]


@pytest.mark.parametrize("n_envs", [1, 8])
def test_real_time_and_full_speed_give_the_same_bits(play: Play, n_envs: int) -> None:
    n_steps = 30  # 120 ticks, two seconds
    slowly = played(play("rolling_ball", n_envs, engine={"speed": "realtime"}), n_steps)
    fast = played(play("rolling_ball", n_envs), n_steps)

    assert slowly == fast
    assert len(set(map(str, fast))) > n_steps // 2, "something moves"


def test_the_environments_of_isolated_arenas_do_not_depend_on_how_many_engines_there_are(
    play: Play, major: int
) -> None:
    if major == 4:
        pytest.skip("isolated arenas of Godot 4 are tried by test_addon, which needs one engine less")
    one = played(play("rolling_ball", 4, engine={"isolate": True}), 40)
    two = played(play("rolling_ball", 4, n_workers=2, engine={"isolate": True}), 40)

    assert one == two


def test_two_behaviors_play_together_and_every_step_is_paired(play: Play) -> None:
    with play("coin_chase", 4, n_workers=2) as manager:
        assert set(manager.behavior_specs) == {"hero", "target"}
        manager.reset({"seed": 1})
        n_transitions = {"hero": 0, "target": 0}
        for _ in range(60):
            for info in manager.step():
                for behavior in n_transitions:
                    n_transitions[behavior] += len(info.transitions(behavior).reward)
        assert n_transitions["hero"] == n_transitions["target"] > 0


def test_send_and_recv_serve_a_game_of_one_agent_per_arena(play: Play) -> None:
    with play("rolling_ball", 4, n_workers=2) as manager:
        manager.reset({"seed": 0})
        batch = manager.recv("all")
        assert batch.obs.shape == (4, 6)
        manager.send(np.zeros((4, 2), np.float32), batch.env_ids)
        assert sorted(manager.recv("all").env_ids.tolist()) == [0, 1, 2, 3]
        with pytest.raises(Exception, match="move together"):
            manager.send(np.zeros((1, 2), np.float32), [0])


def test_methods_and_attributes_of_arenas_can_be_had(play: Play) -> None:
    with play("games", 3, engine={"scene": TROUBLED}) as manager:
        manager.reset()
        assert manager.get_attr("index") == [0, 1, 2]
        manager.set_attr("actions", [5, 6], env_ids=[2, 0])
        assert manager.get_attr("actions") == [6, 0, 5]
        manager.set_attr("actions", 7)
        assert manager.get_attr("actions") == [7, 7, 7]
        with pytest.raises(UsageError, match="cannot travel into an engine"):
            manager.call(print)
        with pytest.raises(EnvRaised):
            manager.call("no_such_method")
        with pytest.raises(EnvRaised, match="no arguments by name"):
            manager.call("observe", agent=0)
        with pytest.raises(UsageError, match="cannot travel into an engine"):
            manager.call("observe", agent=print)
        assert manager.step("all"), "the engine stays usable"


@pytest.mark.parametrize(
    ("fail", "place"),
    [
        ("size", r"troubled\.gd:\d+ in observe.*\n.*\n\n  File \"res://troubled\.gd\", line \d+, in observe\n"),
        ("stranger", r"rat\.gd\).*\n.*\n\n  File \"res://rat\.gd\"\n"),  # wrong in no particular line
    ],
)
def test_a_mistake_without_a_line_is_told_without_none(play: Play, fail: str, place: str) -> None:
    with play("games", 1, engine={"scene": TROUBLED}, restarts=NEVER) as manager:
        manager.reset({"options": {"fail": fail}})
        with pytest.raises(EnvRaised, match=place) as raised:
            take_steps(manager, 2)
        assert "None" not in str(raised.value)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("fail", "path"), [("nan", "obs"), ("nan reward", "reward")])
def test_numbers_that_are_not_finite_are_delivered_unless_values_are_checked(
    play: Play, fail: str, path: str, checked: bool
) -> None:
    with play("games", 2, engine={"scene": TROUBLED}, restarts=NEVER, check_values=checked) as manager:
        manager.reset({"options": {"fail": fail, "in": 1}})
        if checked:
            with pytest.raises(BadObservation, match="NaN or infinite") as raised:
                manager.step()
            assert (raised.value.path, raised.value.env_ids) == (path, (1,))
        else:
            (info,) = manager.step()
            numbers = getattr(info.current["default"], path)
            assert np.isfinite(numbers.reshape(2, -1)).all(axis=1).tolist() == [True, False]


def test_an_error_in_observe_is_told_with_its_own_line(play: Play, major: int) -> None:
    lines = (GAMES / str(major) / "troubled.gd").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.endswith("# in observe"))
    with play("games", 1, engine={"scene": TROUBLED}, restarts=NEVER) as manager:
        manager.reset({"options": {"fail": "observe"}})
        with pytest.raises(EnvRaised, match=rf"troubled\.gd:{line}\b"):
            take_steps(manager, 2)


@pytest.mark.parametrize("fail", ["act", "after_tick", "observe"])
def test_an_error_of_a_script_is_raised_with_its_place_and_a_reset_revives(play: Play, fail: str) -> None:
    with play("games", 2, n_workers=2, engine={"scene": TROUBLED}, restarts=NEVER) as manager:
        manager.reset({"options": {"fail": fail}})
        with pytest.raises(EnvRaised, match=r"troubled\.gd:\d+") as raised:
            take_steps(manager, 4)
        assert raised.value.type_name == "ScriptError"
        assert raised.value.phase == "step"
        manager.reset({"options": {}})
        for _ in range(4):
            manager.step("all")


def test_an_error_in_reset_is_raised_by_reset(play: Play) -> None:
    with play("games", 1, engine={"scene": TROUBLED}) as manager:
        with pytest.raises(EnvRaised, match=r"troubled\.gd:\d+") as raised:
            manager.reset({"options": {"fail": "reset"}})
        assert raised.value.phase == "reset"
        manager.reset()
        assert manager.step("all")


def test_what_has_the_wrong_size_is_named(play: Play) -> None:
    with play("games", 2, engine={"scene": TROUBLED}) as manager:
        manager.reset({"options": {"fail": "size", "in": 1}})
        with pytest.raises(WorkerError) as raised:
            take_steps(manager, 3)
        assert raised.value.env_ids == (1,)


HARM: dict[str, Callable[[int], None]] = {
    "SIGKILL": lambda pid: os.kill(pid, signal.SIGKILL),
    "SIGSEGV": lambda pid: os.kill(pid, signal.SIGSEGV),
    "SIGSTOP": lambda pid: os.kill(pid, signal.SIGSTOP),
}


@pytest.mark.parametrize("harm", HARM)
def test_an_engine_that_fails_is_replaced_and_the_other_goes_on(play: Play, harm: str) -> None:
    with play("rolling_ball", 4, n_workers=2, timeouts=SHORT) as manager:
        manager.reset({"seed": 0})
        manager.step("all")
        pid = manager.stats().workers[0].pid
        assert pid is not None
        HARM[harm](pid)

        deadline = time.monotonic() + 60
        while not any(info.lost is not None for info in manager.step()):
            assert time.monotonic() < deadline, "no lost step was told"
        assert manager.stats().restarts == 1
        assert [event.worker_id for event in manager.events if isinstance(event, Restarted)] == [0]
        for _ in range(5):
            assert len(manager.step("all")) == 2


@pytest.mark.parametrize(("harm", "error"), [("SIGKILL", WorkerDied), ("SIGSTOP", WorkerTimedOut)])
def test_without_restarts_the_fault_is_raised_and_a_reset_brings_a_new_engine(
    play: Play, harm: str, error: type[WorkerError]
) -> None:
    with play("rolling_ball", 2, n_workers=2, timeouts=SHORT, restarts=NEVER) as manager:
        manager.reset({"seed": 0})
        pid = manager.stats().workers[1].pid
        assert pid is not None
        HARM[harm](pid)
        with pytest.raises(error) as raised:
            take_steps(manager, 3)
        assert raised.value.worker_id == 1
        manager.reset({"seed": 0})
        assert len(manager.step("all")) == 2


def test_an_engine_that_is_given_up_leaves_the_others_alone(play: Play) -> None:
    restarts = RestartPolicy(max_restarts=0, then="drop")
    with play("rolling_ball", 2, n_workers=2, restarts=restarts) as manager:
        manager.reset({"seed": 0})
        pid = manager.stats().workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        seen = [info.worker_id for _ in range(6) for info in manager.step()]
        assert seen[-1] == 1


@pytest.mark.parametrize(("fail", "error"), [("loop", WorkerTimedOut), ("quit", WorkerDied)])
def test_a_game_that_loops_or_quits_is_a_fault(play: Play, fail: str, error: type[WorkerError]) -> None:
    with play("games", 1, engine={"scene": TROUBLED}, timeouts=SHORT, restarts=NEVER) as manager:
        manager.reset({"options": {"fail": fail}})
        with pytest.raises(error) as raised:
            take_steps(manager, 3)
        assert raised.value.phase == "step"
        if isinstance(raised.value, WorkerDied):
            assert raised.value.exit == "EXIT(3)"
        manager.reset({"options": {}})
        assert manager.step("all")


def test_a_scene_that_is_not_there_fails_the_start_with_its_name(play: Play) -> None:
    with pytest.raises(WorkerError, match=r"nowhere\.tscn"):
        play("games", 1, engine={"scene": "res://nowhere.tscn"}, timeouts=Timeouts(start_s=20.0))


TRAINER = """
import sys
from envmanager import RandomPolicy, Timeouts
from envmanager.godot.games import new_project
from envmanager.godot.manager import GodotEnvManager

game, binary, scene, doing = sys.argv[1:]
manager = GodotEnvManager(game, 2, n_workers=2, engine={"binary": binary, "scene": scene})
for behavior, spec in manager.behavior_specs.items():
    manager.set_policy(behavior, RandomPolicy(spec, 0))
manager.reset({"options": {"fail": "loop"} if doing == "loop" else {}})
print(*(worker.pid for worker in manager.stats().workers), flush=True)
while doing != "idle":
    manager.step()
sys.stdin.read()
"""


@pytest.mark.parametrize("doing", ["idle", "steps", "loop", "stopped"])
def test_when_the_trainer_is_killed_its_engines_end(
    program: str, major: int, project_of: Callable[[str, int], Path], doing: str
) -> None:
    game = str(project_of("games", major))
    check_engines_end_with_their_trainer(
        TRAINER, game, program, TROUBLED, doing, is_stopped=doing == "stopped", within_s=20.0
    )


def test_sixteen_engines_start_at_once_and_leave_nothing(play: Play) -> None:
    with play("rolling_ball", 64, n_workers=16) as manager:
        manager.reset({"seed": 0})
        infos = manager.step("all")
        assert sorted(info.worker_id for info in infos) == list(range(16))
        assert len(machine.descendants(os.getpid())) >= 16


def test_waiting_for_any_hands_out_the_fast_engine_while_the_slow_one_works(play: Play) -> None:
    with play("games", 2, n_workers=2, engine={"scene": TROUBLED, "ticks_per_action": 1}) as manager:
        manager.reset({"options": {"fail": "slow", "in": 0}})
        manager.set_attr("fail", [""], env_ids=[1])
        seen = [info.worker_id for _ in range(20) for info in manager.step(Wait.any())]
        assert seen.count(1) > seen.count(0)


def test_a_demo_is_not_imported_first(program: str, tmp_path: Path) -> None:
    assert import_command(find_game("demo:rolling_ball", EngineOptions(binary=program), tmp_path)) is None


@pytest.mark.parametrize(
    "how", [{"engine": {"script_errors": "warn"}}, {"restarts": RestartPolicy(on_exception="restart")}, {}]
)
def test_a_game_whose_autoload_has_an_error_plays_where_that_is_a_warning(
    program: str, major: int, tmp_path: Path, how: dict[str, Any]
) -> None:
    game = new_project(tmp_path / "game", major)
    (game / "oops.gd").write_text(
        'extends Node\n\nfunc _ready():\n\tvar music = get_node_or_null("Music")\n\tmusic.play()\n'
    )
    project = game / "project.godot"
    project.write_text(project.read_text().replace("[autoload]\n", '[autoload]\n\nOops="*res://oops.gd"'))
    options = how | {"engine": {"binary": program, **how.get("engine", {})}}
    if not how:
        with pytest.raises(EnvRaised, match=r"oops\.gd:5") as raised:
            GodotEnvManager(str(game), 2, **options)
        assert raised.value.phase == "start"
        return
    with GodotEnvManager(str(game), 2, **options) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], 3))
        manager.reset({"seed": 0})
        take_steps(manager, 3)
        assert manager.stats().restarts == 0


def test_script_errors_in_steps_are_warnings_where_they_are_and_what_is_missing_stays_an_error(play: Play) -> None:
    with play("games", 1, engine={"scene": TROUBLED, "script_errors": "warn"}, restarts=NEVER) as manager:
        for fail in ("act", "after_tick"):
            manager.reset({"options": {"fail": fail}})
            take_steps(manager, 4)
        manager.reset({"options": {"fail": "observe"}})
        with pytest.raises(EnvRaised, match=r"troubled\.gd:\d+"):
            take_steps(manager, 4)


@pytest.mark.parametrize("pictures", [False, True], ids=["a class", "a picture too"])
def test_a_fresh_clone_starts_with_its_classes_and_pictures(
    program: str, major: int, tmp_path: Path, pictures: bool
) -> None:
    game = new_project(tmp_path / "game", major)
    kind = "RefCounted" if major == 4 else "Reference"
    (game / "helper.gd").write_text(f"class_name Helper\nextends {kind}\nstatic func none() -> int:\n\treturn 0\n")
    if major == 3:  # which keeps its classes in the committed project.godot
        project = game / "project.godot"
        classes = '_global_script_classes=[{"base": "Reference", "class": "Helper", "language": "GDScript", "path": "res://helper.gd"}]'
        project.write_text(f'{classes}\n_global_script_class_icons={{"Helper": ""}}\n\n{project.read_text()}')
    arena = game / "arena.gd"
    text = arena.read_text().replace("\tticks = 0\n", "\tticks = Helper.none()\n", 1)
    if pictures:
        (game / "dot.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>')
        text = text.replace("Helper.none()", 'Helper.none() + int(load("res://dot.svg") == null)')
        if major == 4:
            (game / ".godot").mkdir()  # what is left of an import that was cut
    arena.write_text(text)
    with GodotEnvManager(str(game), 2, engine={"binary": program}) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"], 3))
        manager.reset({"seed": 0})
        take_steps(manager, 3)


@pytest.mark.parametrize("game", ["rolling_ball", "coin_chase"])
def test_kept_episodes_of_killed_engines_go_on_bit_for_bit(play: Play, game: str) -> None:
    kept = RestartPolicy(max_restarts=1000, backoff_s=0, keep_episodes=True)

    def played(*, kills: int) -> list[bytes]:
        with play(game, 2, n_workers=2, seed=1, restarts=kept) as manager:
            for behavior, spec in manager.behavior_specs.items():
                manager.set_policy(behavior, Pushes(spec))
            rows, infos = [b"", b""], manager.reset()
            for round_ in range(250):
                for info in infos:
                    assert info.lost is None
                    rows[info.worker_id] += b"".join(bits_of([info]).values())
                if kills and round_ % 60 == 45:
                    os.kill(manager.stats().workers[round_ // 60 % 2].pid or 0, signal.SIGKILL)
                infos = manager.step(Wait.all())
            stats = manager.stats()
            assert (manager.events.count(Died), stats.episodes_kept, stats.episodes_diverged) == (kills, kills, 0)
            return rows

    assert played(kills=4) == played(kills=0)


def test_another_manager_of_engines_goes_on_from_a_state_bit_for_bit(play: Play) -> None:
    kept = RestartPolicy(keep_episodes=True)

    def rows(manager: GodotEnvManager) -> list[dict[int, bytes]]:
        return [bits_of(manager.step(Wait.all())) for _ in range(100)]

    def started() -> GodotEnvManager:
        manager = play("rolling_ball", 2, n_workers=2, seed=1, restarts=kept)
        for behavior, spec in manager.behavior_specs.items():
            manager.set_policy(behavior, Pushes(spec))
        return manager

    with started() as manager:
        manager.reset()
        for _ in range(150):
            manager.step(Wait.all())
        state = manager.state()
        expected = rows(manager)
    with started() as other:
        other.reset(state=state)
        assert rows(other) == expected
        assert other.stats().episodes_diverged == 0


def test_episodes_of_several_arenas_in_an_engine_are_not_kept(play: Play) -> None:
    with pytest.raises(UsageError, match="engines of one arena"):
        play("rolling_ball", 2, restarts=RestartPolicy(keep_episodes=True))
