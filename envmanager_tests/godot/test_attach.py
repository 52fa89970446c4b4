"""A game that is started elsewhere, as the editor does, and attached."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envmanager import RandomPolicy, RestartPolicy, Timeouts, UsageError, WorkerDied, WorkerTimedOut
from envmanager.godot import engine_host, messages
from envmanager.godot.manager import GodotEnvManager
from envmanager_tests.godot.attaching import free_port, when_awaited
from envmanager_tests.godot.driver import END_S

PLAYED_BY = ("environment", "argument")

Game = subprocess.Popen[bytes]


@pytest.fixture
def port() -> int:
    return free_port()


class Editor:
    """Plays a game each time the manager says that it waits for one."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        self.said: list[str] = []
        self.games: list[Game] = []
        self._command, self._environ, self._log = command, environ, log

    def play(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        with self._log.open("ab") as log:
            self.games.append(
                subprocess.Popen(
                    self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip


@pytest.fixture
def play_in_editor(
    program: str, major: int, project_of: Callable[[str, int], Path], tmp_path: Path, port: int
) -> Iterator[Callable[..., Editor]]:
    """A function that has a game played, as an editor does, whenever one is awaited at ``port``."""
    editors: list[Editor] = []
    awaited = contextlib.ExitStack()

    def play(game: str, told_by: str = "environment") -> Editor:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ENVMANAGER_")}
        environ |= dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), str(tmp_path))
        command = [program, "--path", str(project_of(game, major)), "--fixed-fps", "60"]
        if major == 4:
            command.append("--headless")
        if told_by == "environment":
            environ["ENVMANAGER_ADDRESS"] = f"127.0.0.1:{port}"
        else:
            command.append(f"--envmanager=127.0.0.1:{port}")
        editor = Editor(command, environ, tmp_path / "editor.txt")
        awaited.enter_context(when_awaited(editor.play))
        editors.append(editor)
        return editor

    with awaited:
        yield play
    for editor in editors:
        for game in editor.games:
            game.kill()
            game.wait(END_S)


def attached(port: int, n_envs: int = 1, **options: Any) -> GodotEnvManager:
    manager = GodotEnvManager("my game", n_envs, engine={"attach": f"127.0.0.1:{port}"}, **options)
    for behavior, spec in manager.behavior_specs.items():
        manager.set_policy(behavior, RandomPolicy(spec, 3))
    return manager


def take_steps(manager: GodotEnvManager, n_steps: int) -> None:
    for _ in range(n_steps):
        manager.step("all")


@pytest.mark.parametrize("told_by", PLAYED_BY)
def test_a_game_that_is_played_elsewhere_is_trained_and_asked_to_close(
    play_in_editor: Callable[..., Editor], port: int, told_by: str
) -> None:
    editor = play_in_editor("rolling_ball", told_by)
    with attached(port, 3) as manager:
        assert [f"127.0.0.1:{port}" in said for said in editor.said] == [True]
        manager.reset({"seed": 0})
        for _ in range(20):
            assert [len(info.current["default"]) for info in manager.step("all")] == [3]
        (worker,) = manager.stats().workers
        assert (worker.pid, worker.core_wait_share) == (None, 0.0)
        assert worker.steps == 20
    assert editor.games[0].wait(END_S) == 0


def test_a_game_that_is_played_elsewhere_never_spins(
    play_in_editor: Callable[..., Editor], port: int, mocker: Any
) -> None:
    mocker.patch.object(engine_host, "count_cores", return_value=64)
    configured = mocker.spy(messages, "configure_body")
    play_in_editor("rolling_ball")
    with attached(port):
        assert [call.kwargs["may_spin"] for call in configured.call_args_list] == [False]


def test_the_end_of_its_connection_is_its_death_and_a_reset_awaits_it_again(
    play_in_editor: Callable[..., Editor], port: int
) -> None:
    editor = play_in_editor("rolling_ball")
    with attached(port, 2, restarts=RestartPolicy(max_restarts=5)) as manager:
        manager.reset({"seed": 0})
        manager.step("all")
        editor.games[0].kill()
        with pytest.raises(WorkerDied) as raised:
            take_steps(manager, 3)
        assert (raised.value.exit, raised.value.worker_id) == ("EOF", 0)
        assert manager.stats().restarts == 0
        assert len(editor.games) == 1, "nobody is awaited before the reset"

        manager.reset({"seed": 0})
        assert len(manager.step("all")) == 1
        assert len(editor.games) == 2


def test_a_game_that_does_not_answer_is_given_up_and_not_killed(
    play_in_editor: Callable[..., Editor], port: int
) -> None:
    editor = play_in_editor("games")
    engine = {"attach": f"127.0.0.1:{port}", "scene": "res://troubled.tscn"}
    with GodotEnvManager("my game", 1, engine=engine, timeouts=Timeouts(step_s=1.0)) as manager:
        for behavior, spec in manager.behavior_specs.items():
            manager.set_policy(behavior, RandomPolicy(spec, 3))
        manager.reset({"options": {"fail": "loop"}})
        with pytest.raises(WorkerTimedOut):
            take_steps(manager, 3)
    assert editor.games[0].poll() is None, "it loops on"


def test_where_no_game_comes_the_start_ends_in_time_and_says_what_was_awaited(port: int) -> None:
    with pytest.raises(WorkerTimedOut, match=re.escape(f"no game has connected to 127.0.0.1:{port}")):
        attached(port, timeouts=Timeouts(start_s=0.3))


def test_an_interrupt_while_it_waits_for_a_game_ends_that_at_once(port: int) -> None:
    begun = time.monotonic()

    def interrupt(*_: object) -> None:
        threading.Timer(0.2, signal_main).start()

    def signal_main() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with when_awaited(interrupt), pytest.raises(KeyboardInterrupt):
        attached(port, timeouts=Timeouts(start_s=60.0, close_s=30.0))
    assert time.monotonic() - begun < 10.0


def test_one_game_is_one_worker_and_never_replaced_by_the_manager(port: int) -> None:
    with pytest.raises(UsageError, match=r"n_workers=2 with engine\.attach"):
        attached(port, 4, n_workers=2)


def test_a_port_that_is_taken_is_named(port: int) -> None:
    taken = re.escape(f"cannot listen for a game at 127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError, match=taken):
        attached(port)
