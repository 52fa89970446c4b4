"""Ratios that docs/performance.md tells and ``benchmarks`` has no contenders for. They are printed (``-rP``)."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.contender import env_fns
from envmanager import EnvManager, SubprocessEnvManager, Wait
from envmanager.hosts import spin

pytestmark = [pytest.mark.load, pytest.mark.timeout(1200)]

ROUNDS = 9
SECONDS = 1.5
N_ENVS = 8


def steps_per_s(manager: EnvManager) -> float:
    """Of ``send`` and ``recv``, all workers waited for."""
    with manager:
        manager.reset({"seed": 0})
        env_ids = manager.recv(Wait.all()).env_ids
        actions = np.zeros(N_ENVS, np.int64)
        rates = []
        for seconds in (0.2, SECONDS):  # the first is a warm-up
            n_steps, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                for _ in range(20):
                    manager.send(actions, env_ids)
                    manager.recv(Wait.all())
                n_steps += 20 * N_ENVS
            rates.append(n_steps / (time.perf_counter() - began))
    return rates[-1]


def ratios(ours: Callable[[], EnvManager], other: Callable[[], EnvManager]) -> list[float]:
    """Of the steps per second of two managers, round by round, each first in every other round."""
    found = []
    for number in range(ROUNDS):
        pair = [ours, other] if number % 2 else [other, ours]
        rates = {make: steps_per_s(make()) for make in pair}
        found.append(rates[ours] / rates[other])
    return found


def told(what: str, found: list[float]) -> None:
    each = " ".join(f"{ratio:.3f}" for ratio in sorted(found))
    print(f"{what}: median {statistics.median(found):.3f} of {len(found)} rounds ({each})")


@contextmanager
def busy_process() -> Iterator[None]:
    """Something that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("env", "n_workers"), [("noop", 8), ("noop", 2), ("cartpole", 2), ("pong", 8)])
def test_spinning_beside_a_busy_process(env: str, n_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking again before sleeping, against sleeping at once, while another process keeps a core busy."""

    def spinning(spin_ns: int) -> Callable[[], EnvManager]:
        def make() -> EnvManager:
            monkeypatch.setattr(spin, "SPIN_NS", spin_ns)  # the manager and its workers have it from now on
            return SubprocessEnvManager(env_fns(env, N_ENVS), N_ENVS, n_workers=n_workers)

        return make

    at_work = spin.SPIN_NS
    told(f"{env}, {n_workers} workers, spinning / not, idle machine", ratios(spinning(at_work), spinning(0)))
    with busy_process():
        found = ratios(spinning(at_work), spinning(0))
    told(f"{env}, {n_workers} workers, spinning / not, beside a busy process", found)
    assert statistics.median(found) > 0.5, "it must not collapse"


def test_what_a_trace_costs_on_pong(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")

    def pong(**options: Any) -> Callable[[], EnvManager]:
        return lambda: SubprocessEnvManager(env_fns("pong", N_ENVS), N_ENVS, n_workers=2, **options)

    found = ratios(pong(trace=str(tmp_path / "run.json")), pong())
    told("pong, 2 workers, traced / not", found)
    assert statistics.median(found) > 0.9
