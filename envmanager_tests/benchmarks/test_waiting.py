"""The measurement of environments that wait."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks import sleepers, waiting
from benchmarks.sleepers import WAYS, Record, Sleeper
from envmanager import AsyncioEnvManager


@pytest.mark.parametrize("way", ["envmanager", "bare", "threads"])
def test_each_way_steps_sleepers_nearly_all_the_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleepers, "WARM_UP_S", 0.05)
    monkeypatch.setattr(sleepers, "_DURATIONS", iter([0.05] * 10_000))
    record = Record(20, 0.5)
    monkeypatch.setattr(Sleeper, "record", record, raising=False)
    WAYS[way](20, record)
    figures = record.figures
    assert 0.1 < figures["share"] <= 1.001
    assert 20 <= figures["steps"] <= 220
    assert figures["cpu_us"] > 0


def test_only_the_part_of_a_sleep_in_the_stretch_counts() -> None:
    record = Record(1, 10.0)
    record.slept(time.monotonic(), 5.0)
    assert record.slept_s == 0.0
    record.start, record.end = 100.0, 110.0
    for began, takes_s in ((95.0, 10.0), (109.0, 3.0), (104.0, 2.0), (90.0, 5.0), (110.0, 5.0)):
        record.slept(began, takes_s)
    assert record.slept_s == 5.0 + 1.0 + 2.0


def test_rollouts_that_die_are_lost_and_give_their_environments_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "N_ROLLOUTS", 150)
    with AsyncioEnvManager(waiting.Tool, waiting.N_AT_ONCE, restarts=waiting.ALWAYS) as manager:
        assert asyncio.run(waiting.play_rollouts(manager.pool())) == (2, 0, waiting.N_AT_ONCE)
        assert manager.stats().restarts == 2


def test_a_server_of_openenv_is_left_out_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = waiting.parsed(["--openenv", "/bin/false"])
    waiting.server(arguments)
    assert "left out" in capsys.readouterr().err
