"""A Ctrl-C at any moment, caught, and going on: no step is paired with another's action, nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    EnvContext,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Wait,
)
from envmanager_tests.envs import EchoGym

pytestmark = pytest.mark.untraced

SENDER = """
import os, random, signal, sys, time
random.seed(3)
while True:
    time.sleep(random.uniform(0.005, 0.03))
    try:
        os.kill(int(sys.argv[1]), signal.SIGINT)
    except OSError:
        break
"""


class Numbering:
    def __init__(self) -> None:
        self._next = 1

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        action = np.arange(self._next, self._next + len(steps))
        self._next += len(steps)
        return ActionInfo(action)


class Interrupts:
    """Raises KeyboardInterrupt while armed; another process sends a signal every few hundredths of a second."""

    armed = False

    def __call__(self, *_: Any) -> None:
        if self.armed:
            raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    handler = Interrupts()
    before = signal.signal(signal.SIGINT, handler)
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(os.getpid())])
    try:
        yield handler
    finally:
        sender.kill()
        sender.wait()
        signal.signal(signal.SIGINT, before)


def slow_echo(context: EnvContext) -> EchoGym:
    return EchoGym(context, sleep_s=0.001)


def check(info: Any) -> None:
    made = info.transitions()
    assert (made.next_obs[:, 3] == made.action).all()
    assert (made.next_obs[:, 2] == made.obs[:, 2] + 1).all()


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
@pytest.mark.parametrize("wait", [Wait.all(), Wait.any()], ids=["all", "any"])
def test_steps_stay_paired_when_interrupts_are_caught_at_any_moment(wait: Wait, zero_copy: bool) -> None:
    n_interrupts = n_steps = 0
    idle = threading.Event()  # another thread, to which the kernel may hand the signal
    other = threading.Thread(target=idle.wait)
    other.start()
    try:
        with SubprocessEnvManager(slow_echo, 3, zero_copy=zero_copy) as manager, interrupts() as handler:
            manager.set_policy("default", Numbering())
            manager.reset()
            while n_interrupts < 60 or n_steps < 100:
                infos: list[Any] = []
                try:
                    handler.armed = True
                    infos = manager.step(wait)
                except KeyboardInterrupt:
                    n_interrupts += 1
                finally:
                    handler.armed = False
                n_steps += len(infos)
                for info in infos:
                    check(info)
            assert manager.stats().late_replies == 0
    finally:
        idle.set()
        other.join()


def test_an_environment_in_this_process_that_was_interrupted_asks_for_a_reset() -> None:
    class Interrupted(EchoGym):
        def step(self, action: Any) -> Any:
            if action == 3:
                raise KeyboardInterrupt
            return super().step(action)

    with SimpleEnvManager(Interrupted, 1) as manager:
        manager.set_policy("default", Numbering())
        manager.reset()
        manager.step()
        manager.step()
        with pytest.raises(KeyboardInterrupt):
            manager.step()
        with pytest.raises(Exception, match="KeyboardInterrupt"):
            manager.step()
        manager.reset()
        check(manager.step()[0])


@pytest.mark.parametrize("make", [SimpleEnvManager, SubprocessEnvManager])
def test_resets_calls_and_sends_may_be_interrupted_and_repeated(make: Any) -> None:
    n_interrupts = 0
    with make(slow_echo, 2) as manager, interrupts() as handler:
        for round_ in range(60):
            try:
                handler.armed = True
                reset_call_and_step(manager, round_)
            except KeyboardInterrupt:
                n_interrupts += 1
            finally:
                handler.armed = False
        assert n_interrupts > 5
        reset_call_and_step(manager, 99)


def reset_call_and_step(manager: EnvManager, number: int) -> None:
    manager.reset()
    batch = manager.recv(Wait.all())
    for step in range(1, 8):
        before = batch.obs[:, 2].copy()
        manager.send(np.full(2, number * 10 + step), batch.env_ids)
        assert len(manager.get_attr("spec")) == 2
        batch = manager.recv(Wait.all())
        assert (batch.obs[:, 3] == number * 10 + step).all() or batch.terminated.any()
        assert (batch.obs[:, 2] == before + 1).all()


def test_a_close_that_was_interrupted_can_be_repeated() -> None:
    class Lingers(EchoGym):
        def close(self) -> None:
            threading.Event().wait()

    manager = SubprocessEnvManager(Lingers, 2)
    manager.reset()
    with interrupts() as handler, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        handler.armed = True
        manager.close()
    manager.close()


def test_an_interrupt_while_environments_in_this_process_are_made_again_asks_for_a_reset() -> None:
    class Interrupted(EchoGym):
        def __init__(self, context: EnvContext) -> None:
            super().__init__(context)
            self._generation = context.generation

        def step(self, action: Any) -> Any:
            if self._generation == 0:
                raise ValueError("make me again")
            return super().step(action)

        def reset(self, **arguments: Any) -> Any:
            if self._generation == 1:
                raise KeyboardInterrupt
            return super().reset(**arguments)

    with SimpleEnvManager(Interrupted, 1, restarts=RestartPolicy(on_exception="restart")) as manager:
        manager.set_policy("default", Numbering())
        manager.reset()
        with pytest.raises(KeyboardInterrupt):
            manager.step()
        (info,) = manager.step()
        assert info.lost is not None
        assert manager.stats().workers[0].generation == 2
