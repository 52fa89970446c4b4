"""What Godot engines cost, where ``benchmarks`` has no figure for it. It is printed (``-rP``)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.contender import Contender
from benchmarks.engine import Codec
from benchmarks.godot import Drawn, Engines
from envmanager import make_manager
from envmanager.godot import engine_host
from envmanager.hosts import spin
from envmanager_tests.godot.driver import MISSING, find_engine

pytestmark = [pytest.mark.load, pytest.mark.timeout(1200)]

ROUNDS = 9
CALLS = 200


@pytest.fixture(autouse=True)
def _godot4(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_engine(4)
    if found is None:
        pytest.skip(MISSING[4])
    monkeypatch.setenv("ENVMANAGER_GODOT", found)


def engines(n_engines: int, arenas: int, **options: Any) -> Any:
    config = {"kind": "godot", "env": "demo:rolling_ball", "n_envs": n_engines * arenas, "n_workers": n_engines}
    return make_manager(config | options)


def lasted(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def cpu_us(make: Callable[[], Contender]) -> float:
    """CPU time of this process for one exchange, where nothing disturbed it."""
    contender = make()
    try:
        contender.run(CALLS)
        took = []
        for _ in range(ROUNDS):
            began = time.process_time()
            contender.run(CALLS)
            took.append((time.process_time() - began) / CALLS)
    finally:
        contender.close()
    return 1e6 * min(took)


@pytest.mark.parametrize(("n_engines", "start_s"), [(1, 0.2), (16, 5.0)])
def test_starting_and_closing(n_engines: int, start_s: float) -> None:
    starts, closes = [], []
    for _ in range(ROUNDS if n_engines == 1 else 3):
        began = time.perf_counter()
        manager = engines(n_engines, 4)
        starts.append(time.perf_counter() - began)
        manager.reset({"seed": 0})
        closes.append(lasted(manager.close))
    print(f"{n_engines} engines x 4 arenas: up in {statistics.median(starts):.3f} s (wanted: {start_s:g}), closed in")
    print(f"{statistics.median(closes):.3f} s (wanted: 0.2)")
    assert min(starts) < 5 * start_s
    assert min(closes) < 2.0


@pytest.mark.parametrize("arenas", [1, 8, 64])
def test_what_an_exchange_costs_the_trainer(arenas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without spinning, which is waiting. The budget is 25 µs for connection and codec."""
    monkeypatch.setattr(spin, "SPIN_NS", 0)
    monkeypatch.setattr(engine_host, "LONG_SPIN_NS", 0)
    codec = cpu_us(lambda: Codec("ball", arenas))
    step = cpu_us(lambda: Engines("ball", arenas))
    print(f"{arenas} arenas: connection and codec {codec:.0f} µs, step() with a policy {step:.0f} µs of CPU")
    assert codec < step


def test_what_an_agent_costs_in_gdscript() -> None:
    """The budget is 5 µs, with what the game itself does in a tick, and its physics."""
    busy_us = {}
    for arenas in (1, 64):
        with engines(1, arenas, engine={"ticks_per_action": 1}) as manager:
            manager.set_policy("default", Drawn())
            manager.reset({"seed": 0})
            for _ in range(20 * CALLS):
                manager.step()
            busy_us[arenas] = manager.stats().workers[0].step_time_p50_s * 1e6
    per_agent = (busy_us[64] - busy_us[1]) / 63
    print(f"busy {busy_us[1]:.0f} µs with 1 arena, {busy_us[64]:.0f} with 64: {per_agent:.2f} µs for each more")
    assert per_agent < 20
