"""Checks of how engines end that several test modules share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from envmanager.hosts.descriptors import wait_for
from envmanager_tests.godot.driver import launch


def check_engines_end_with_their_trainer(script: str, *arguments: str, is_stopped: bool, within_s: float) -> None:
    """Kill a trainer of two engines, whose script prints their pids, and check that the engines end.

    ``is_stopped``: whether to stop the engines first.
    """
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
        fds = [os.pidfd_open(pid) for pid in pids]
        if is_stopped:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        trainer.kill()
        for fd in fds:
            assert wait_for([fd], within_s), "the engine lives on"
            os.close(fd)


def log_of_a_game_that_quits(program: str, project: Path, home: Path) -> str:
    """Play a game without a trainer until it quits, and return what it printed, which has no error of a script."""
    process = launch(program, project, home, None, "", fixed_fps=60)
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    log = (home / "log.txt").read_text()
    assert "SCRIPT ERROR" not in log
    return log
