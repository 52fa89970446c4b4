"""Processes that environments start, and that do not outlive a trainer that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from envmanager import guarded
from envmanager.testing.fault_checks import is_gone, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")

SLEEPER = [sys.executable, "-S", "-c", "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"]
TRAINER = """
import asyncio, sys
from envmanager import AsyncioEnvManager, guarded

class Sandbox:
    async def reset(self, *, seed=None, options=None):
        self.process = await asyncio.create_subprocess_exec(*guarded(sys.argv[1:]))
        return "ready", {}
    async def step(self, action):
        await asyncio.sleep(600)

with AsyncioEnvManager(Sandbox, 4) as manager:
    manager.reset()
    manager.recv("all")
    manager.send([0] * 4, range(4))
    manager.recv("all")
"""


def test_guarded_processes_of_environments_do_not_outlive_a_killed_trainer() -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINER, *SLEEPER], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            pids = [int(trainer.stdout.readline()) for _ in range(4)]
            assert not any(map(is_gone, pids))
        finally:
            os.kill(trainer.pid, signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)))


def test_a_guarded_command_is_the_command_itself() -> None:
    command = guarded([sys.executable, "-S", "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "-x"])
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("['a b', '-x']\n", 7)


def test_a_command_that_does_not_exist_is_named() -> None:
    ended = subprocess.run(guarded(["no-such-command"]), stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert "no-such-command: No such file" in ended.stderr


def test_a_guarded_process_of_an_event_loop_can_be_awaited() -> None:
    async def run() -> int:
        process = await asyncio.create_subprocess_exec(*guarded(["true"]))
        return await process.wait()

    assert asyncio.run(run()) == 0
