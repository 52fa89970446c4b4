"""Case 16: a worker killed while it writes a large reply costs one episode of its own, and the others nothing.

Large infos go down the worker's own pipe: the trainer sees their first bytes arrive and kills the writer there. Large
observations go into shared memory: the environment has itself killed while its worker writes them. How many were caught
in the act is printed.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import stat
import struct
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    ArraySpec,
    BehaviorSpec,
    EnvContext,
    RestartPolicy,
    StepInfo,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    WorkerDied,
)
from envmanager.testing import FakeEnvironment
from envmanager_tests.faults import scripts
from envmanager_tests.faults.scripts import NO_RESTARTS, Zeros, pids_of
from envmanager_tests.start_methods import MARKED_START_METHODS

SUITE = "core start-methods faults"

N_KILLS = 50
N_WORKERS = 4
VICTIM = 0
FOUR_MIB = 4 << 20
ALWAYS = RestartPolicy(max_restarts=10**6, backoff_s=0)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with scripts.ending_what_is_left():
        yield


class Picture(gymnasium.Env):  # type: ignore[misc]
    """Its observation is four mebibytes, all of which say how many steps there have been.

    The victim's lie scattered in its memory, so that writing them where they belong takes a while. After the action 1
    it is killed, somewhen between the end of its step and the end of that.
    """

    N_NUMBERS = FOUR_MIB // 4
    observation_space = gymnasium.spaces.Box(0, 2**30, (N_NUMBERS,), np.int32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, context: EnvContext) -> None:
        spread = 16 if context.env_id == VICTIM else 1
        self._numbers = np.zeros((self.N_NUMBERS, spread), np.int32)[:, 0]
        self._n_steps = 0
        before = time.monotonic()
        self._numbers.copy()
        self._writing_s = time.monotonic() - before

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._n_steps = 0
        self._numbers[:] = 0
        return self._numbers, {}

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        self._numbers[:] = self._n_steps
        if action == 1:
            kill = [os.getpid(), signal.SIGKILL]
            threading.Timer(random.uniform(0.0, self._writing_s), os.kill, kill).start()
        return self._numbers, 0.0, False, False, {}


class Killing(Zeros):
    """The action 1 for the victim, when asked for."""

    kills = False

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(((steps.env_id == VICTIM) & self.kills).astype(np.int64))


class Counting(FakeEnvironment):
    """Its observation says how many steps there have been; the victim's info does too, at four mebibytes' length."""

    SPEC = BehaviorSpec(ArraySpec((1,), np.int32), ArraySpec((), np.int64))

    def __init__(self, context: EnvContext) -> None:
        super().__init__()
        self._n_numbers = FOUR_MIB // 4 if context.env_id == VICTIM else 1

    def _obs(self, action: int) -> np.ndarray:
        return np.full((1, 1), self._n_steps, np.int32)

    def step(self, actions: Any) -> Any:
        results = super().step(actions)
        results["default"].info = [{"numbers": np.full(self._n_numbers, self._n_steps, np.int32)}]
        return results


class Ledger:
    """Which step each worker is at; asserts that none is missing, doubled or torn."""

    def __init__(self) -> None:
        self.at: Counter[int] = Counter()
        self.lost: list[StepInfo] = []

    def enter(self, infos: list[StepInfo]) -> None:
        for info in infos:
            steps = info.current["default"]
            numbers = {int(steps.obs.min()), int(steps.obs.max())}
            if info.lost is None:
                self.at[info.worker_id] += 1
                if steps.info is not None:
                    told = steps.info[0]["numbers"]
                    numbers |= {int(told.min()), int(told.max())}
            else:
                self.lost.append(info)
                self.at[info.worker_id] = 0
            assert numbers == {self.at[info.worker_id]}, f"worker {info.worker_id}, lost: {info.lost}"


def most_bytes_waiting() -> int:
    """How many bytes wait to be read from that pipe or socket of this process which has most."""
    most = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            mode = os.fstat(int(entry)).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                most = max(most, struct.unpack("i", fcntl.ioctl(int(entry), termios.FIONREAD, bytes(4)))[0])
    return most


def is_writing_an_info() -> bool:
    """More has arrived than any record or header is long."""
    return most_bytes_waiting() > 4096


def started(factory: Any, restarts: RestartPolicy, **options: Any) -> SubprocessEnvManager:
    manager = SubprocessEnvManager(
        factory, N_WORKERS, restarts=restarts, timeouts=Timeouts(step_s=20.0, close_s=2.0), **options
    )
    manager.set_policy("default", Zeros())
    manager.reset()
    return manager


def step_until_writing(manager: SubprocessEnvManager, ledger: Ledger, within_s: float = 20.0) -> None:
    """Until the victim's pipe is full of an info that is not through, which may take several."""
    deadline = time.monotonic() + within_s
    while not is_writing_an_info():
        assert time.monotonic() < deadline
        ledger.enter(manager.step(Wait(timeout_s=0.0)))


def step_until_halfway(manager: SubprocessEnvManager, ledger: Ledger) -> None:
    """Until some of an info has been read, and its writer is stopped before the rest."""
    victim = psutil.Process(pids_of(manager)[VICTIM])
    while True:
        step_until_writing(manager, ledger)
        n_steps = ledger.at[VICTIM]
        victim.suspend()
        scripts.until(lambda: victim.status() == psutil.STATUS_STOPPED, "the victim is stopped")
        while is_writing_an_info():
            ledger.enter(manager.step(Wait(timeout_s=0.0)))
        ledger.enter(manager.step(Wait(timeout_s=0.0)))
        if ledger.at[VICTIM] == n_steps:
            return
        victim.resume()  # it was the end of an info that waited to be read


def step_until_lost(manager: SubprocessEnvManager, ledger: Ledger, n_lost: int, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while len(ledger.lost) < n_lost:
        assert time.monotonic() < deadline, "the loss is not told"
        ledger.enter(manager.step())


def check_the_end(manager: SubprocessEnvManager, ledger: Ledger) -> None:
    for _ in range(5):
        ledger.enter(manager.step(Wait.all()))
    assert [info.worker_id for info in ledger.lost] == [VICTIM] * N_KILLS
    assert [info.lost.generation for info in ledger.lost if info.lost] == list(range(1, N_KILLS + 1))
    assert {info.lost.cause.cause for info in ledger.lost if info.lost} == {"SIGKILL"}
    assert manager.stats().restarts == N_KILLS
    assert [worker.generation for worker in manager.stats().workers] == [N_KILLS, 0, 0, 0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("start_method", MARKED_START_METHODS)
def test_case_16_a_worker_killed_in_the_middle_of_an_info_is_an_error_and_the_others_miss_nothing(
    start_method: Any,
) -> None:
    ledger = Ledger()
    with started(Counting, NO_RESTARTS, infos=True, start_method=start_method) as manager:
        ledger.enter(manager.step(Wait.all()))
        step_until_halfway(manager, ledger)
        steps = ledger.at[VICTIM]
        os.kill(pids_of(manager)[VICTIM], signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        with pytest.raises(WorkerDied) as raised:  # noqa: PT012  (any of the calls may be the one)
            while time.monotonic() < deadline:
                ledger.enter(manager.step())
        for _ in range(10):
            ledger.enter(manager.step(Wait.all()))

        assert (raised.value.worker_id, raised.value.exit, raised.value.phase) == (VICTIM, "SIGKILL", "step")
        assert ledger.at[VICTIM] == steps
        assert len(manager.reset()) == N_WORKERS
        assert len(manager.step(Wait.all())) == N_WORKERS


@pytest.mark.load
@pytest.mark.timeout(600)
def test_case_16_fifty_workers_killed_while_they_write_an_info_cost_one_loss_each() -> None:
    ledger, chance = Ledger(), random.Random(3)
    with started(Counting, ALWAYS, infos=True) as manager:
        for n in range(N_KILLS):
            for _ in range(chance.randrange(1, 30)):
                ledger.enter(manager.step(Wait(timeout_s=0.0)))
            step_until_writing(manager, ledger)
            os.kill(pids_of(manager)[VICTIM], signal.SIGKILL)
            step_until_lost(manager, ledger, n + 1)
        check_the_end(manager, ledger)
        steps_lost = manager.stats().steps_lost
    print(f"{N_KILLS} kills during 4 MiB infos: {steps_lost} in the middle of one; others at {dict(ledger.at)}")
    assert steps_lost >= N_KILLS // 2, "most kills came when nothing was being written"


@pytest.mark.load
@pytest.mark.timeout(600)
def test_case_16_fifty_workers_killed_while_they_write_an_observation_cost_one_loss_each() -> None:
    ledger, policy = Ledger(), Killing()
    n_torn = 0
    with started(Picture, ALWAYS, zero_copy=True) as manager:
        manager.set_policy("default", policy)
        for n in range(N_KILLS):
            slots: list[np.ndarray] = []  # the victim writes its steps into three places by turns
            for _ in range(3):
                infos = manager.step(Wait.all())
                ledger.enter(infos)
                slots += [info.current["default"].obs[0] for info in infos if info.worker_id == VICTIM]
            victim = pids_of(manager)[VICTIM]
            policy.kills = True
            ledger.enter(manager.step(Wait.all(timeout_s=0.0)))
            policy.kills = False
            scripts.until_gone([victim], within_s=20.0)
            n_torn += any(slot[0] != slot[-1] for slot in slots)
            del slots, infos
            step_until_lost(manager, ledger, n + 1)
        check_the_end(manager, ledger)
    print(f"{N_KILLS} kills during 4 MiB observations: {n_torn} left a torn one behind; others at {dict(ledger.at)}")
    assert n_torn >= N_KILLS // 10, "hardly any kill came while something was being written"
