"""Cases 47 and 48: a hundred workers on few cores, and a thousand restarts. The figures are printed (``-rP``)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from envmanager import ActionInfo, AgentSteps, RestartPolicy, StepInfo, SubprocessEnvManager, Timeouts, Wait
from envmanager.options import START_METHODS
from envmanager.testing import EchoEnvironment
from envmanager_tests.faults import scripts
from envmanager_tests.faults.scripts import NO_RESTARTS, pids_of

pytestmark = [pytest.mark.load, pytest.mark.timeout(1200)]

N_WORKERS = 100
N_STEPS = 1_000
START_WITHIN_S = {"forkserver": 30.0, "spawn": 90.0}
STEPS_WITHIN_S = 120.0
CLOSE_WITHIN_S = 15.0
N_RESTARTS = 1_000
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with scripts.ending_what_is_left():
        yield


@attrs.frozen
class Usage:
    """What this process uses now."""

    descriptors: int
    threads: int
    rss_bytes: int

    @classmethod
    def now(cls) -> Usage:
        return cls(len(os.listdir("/proc/self/fd")) - 1, threading.active_count(), memory_of(os.getpid())["Rss"])


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by the kernel's names: ``Rss``, and ``Pss``, in which a page that n processes share counts 1/n."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in map(str.split, lines)}


class Numbering:
    """Actions that are never the same twice."""

    def __init__(self) -> None:
        self._next = 1

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        action = np.arange(self._next, self._next + len(steps))
        self._next += len(steps)
        return ActionInfo(action)


class Ledger:
    """Which step each worker is at; asserts that each is handed out once and belongs to its action."""

    def __init__(self) -> None:
        self.at: Counter[int] = Counter()
        self.lost: list[StepInfo] = []

    def enter(self, infos: list[StepInfo]) -> None:
        for info in infos:
            worker_id, steps = info.worker_id, info.current["default"]
            if info.lost is None:
                assert info.actions is not None
                self.at[worker_id] += 1
                assert steps.obs[0, 3] == info.actions["default"].action[0]
                assert steps.reward[0] == steps.obs[0, 3] % 1000
            else:
                self.lost.append(info)
                self.at[worker_id] = 0
            assert (steps.obs[0, 0], steps.obs[0, 2]) == (worker_id, self.at[worker_id])


@pytest.mark.parametrize("start_method", START_METHODS)
def test_case_47_a_hundred_workers_start_take_a_thousand_steps_each_and_close(start_method: Any) -> None:
    before = Usage.now()
    with SubprocessEnvManager(EchoEnvironment, 1, start_method=start_method) as manager:
        manager.reset()
        with_one = Usage.now()
    clock = time.monotonic
    started_at = clock()
    manager = SubprocessEnvManager(
        EchoEnvironment, N_WORKERS, start_method=start_method, restarts=NO_RESTARTS, timeouts=Timeouts(close_s=10.0)
    )
    with manager:
        start_s = clock() - started_at
        manager.set_policy("default", Numbering())
        manager.reset()
        running = Usage.now()
        per_worker = (running.descriptors - with_one.descriptors) / (N_WORKERS - 1)
        memory = [memory_of(pid) for pid in pids_of(manager)]

        ledger, steps_at = Ledger(), clock()
        while min(ledger.at[worker_id] for worker_id in range(N_WORKERS)) < N_STEPS:
            ledger.enter(manager.step())
            assert clock() - steps_at < STEPS_WITHIN_S
        steps_s = clock() - steps_at
        after = Usage.now()
        ledger.enter(manager.step(Wait.all()))

        manager.set_attr("_sleep_s", [2.0] * N_WORKERS)
        cpu, waited_at = time.process_time(), clock()
        ledger.enter(manager.step(Wait.all()))
        idle_share = (time.process_time() - cpu) / (clock() - waited_at)
        closed_at = clock()
    close_s = clock() - closed_at

    rss, pss = (sum(each[name] for each in memory) / N_WORKERS / MIB for name in ("Rss", "Pss"))
    print(
        f"{N_WORKERS} workers, {start_method}: start {start_s:.2f} s, close {close_s:.2f} s, "
        f"{ledger.at.total() / steps_s:.0f} steps/s; trainer {running.rss_bytes / MIB:.0f} MiB at the start, "
        f"{after.rss_bytes / MIB:.0f} MiB after {ledger.at.total()} steps, {per_worker:.2f} descriptors per worker, "
        f"{idle_share:.1%} of a core while it waits; a worker {rss:.1f} MiB RSS, {pss:.1f} MiB PSS"
    )
    assert start_s < START_WITHIN_S[start_method]
    assert close_s < CLOSE_WITHIN_S
    assert per_worker <= 3
    assert running.threads == after.threads == before.threads
    assert after.descriptors == running.descriptors
    assert idle_share < 0.05


def test_case_48_a_thousand_restarts_among_a_hundred_thousand_steps_leave_the_trainer_as_it_was() -> None:
    n_workers, rounds_between = 4, 25
    usage: dict[int, Usage] = {}
    ledger = Ledger()
    restarts = RestartPolicy(max_restarts=10**6, backoff_s=0)
    started_at = time.monotonic()
    with SubprocessEnvManager(EchoEnvironment, n_workers, restarts=restarts) as manager:
        manager.set_policy("default", Numbering())
        manager.reset()
        n_steps = 0
        for n in range(1, N_RESTARTS + 1):
            victim = n % n_workers
            os.kill(pids_of(manager)[victim], signal.SIGKILL)
            deadline = time.monotonic() + 30.0
            while len(ledger.lost) < n:
                assert time.monotonic() < deadline, f"loss {n} is not told"
                ledger.enter(manager.step())
            assert ledger.lost[-1].worker_id == victim
            for _ in range(rounds_between):
                infos = manager.step(Wait.all())
                n_steps += len(infos)
                ledger.enter(infos)
            ledger.lost[-1] = attrs.evolve(ledger.lost[-1], previous=None, current={})  # the test's own memory
            if n in (100, 400, N_RESTARTS):
                usage[n] = Usage.now()
        stats = manager.stats()
    seconds = time.monotonic() - started_at

    growth = (usage[N_RESTARTS].rss_bytes - usage[100].rss_bytes) / MIB
    late_growth = (usage[N_RESTARTS].rss_bytes - usage[400].rss_bytes) / MIB
    print(
        f"{N_RESTARTS} restarts, {n_steps} steps in {seconds:.0f} s: after 100 restarts "
        f"{usage[100]}, at the end {usage[N_RESTARTS]}: {growth:+.2f} MiB, of which {late_growth:+.2f} since the 400th"
    )
    assert n_steps >= 90_000
    assert len(ledger.lost) == stats.restarts == N_RESTARTS
    assert {usage[n].descriptors for n in usage} == {usage[100].descriptors}
    assert {usage[n].threads for n in usage} == {usage[100].threads}
    assert growth < 16, "the last thousand events are kept, but no more"
    assert late_growth < 4
