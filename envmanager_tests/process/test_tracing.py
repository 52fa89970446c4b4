"""Traces of real worker processes, read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from envmanager import RandomPolicy, SubprocessEnvManager
from envmanager.testing import Die, FakeEnvironment, Sleep, Step, faulty
from envmanager.testing.fault_checks import until

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    found: list[Event] = json.loads(path.read_text(encoding="utf-8"))
    return found


def spans_by_track(told: list[Event]) -> dict[int, list[tuple[int, int, str]]]:
    """Begin and end in nanoseconds, and name, in order, for each track."""
    tracks = defaultdict(list)
    for event in told:
        if event["ph"] == "X":
            began_ns = round(event["ts"] * 1e3)
            tracks[event["tid"]].append((began_ns, began_ns + round(event["dur"] * 1e3), event["name"]))
    return {number: sorted(spans) for number, spans in tracks.items()}


def assert_apart(spans: list[tuple[int, int, str]]) -> None:
    for (_, ended_ns, name), (began_ns, _, next_name) in pairwise(spans):
        assert ended_ns <= began_ns, f"{name} overlaps {next_name}"


def assert_nested(spans: list[tuple[int, int, str]]) -> None:
    """Each span is after the one before, or within it: else a viewer cannot draw them."""
    around: list[int] = []
    for began_ns, ended_ns, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] <= began_ns:
            around.pop()
        assert not around or ended_ns <= around[-1], f"{name} is cut by what is around it"
        around.append(ended_ns)


def uneven(context: Any) -> FakeEnvironment:
    return FakeEnvironment([Sleep(0.001 * (1 + context.env_id)), Step()])


def test_each_step_is_drawn_once_and_nothing_overlaps(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with SubprocessEnvManager(uneven, 4, n_workers=3, trace=str(path)) as manager:
        manager.set_policy("default", RandomPolicy(FakeEnvironment.SPEC))
        manager.reset()
        for _ in range(40):
            manager.step()
        manager.step("all")
        manager.get_attr("closed")
        stats = manager.stats()
        manager.reset()

    told = read(path)
    tracks = spans_by_track(told)
    assert_nested(tracks.pop(0))
    for worker in stats.workers:
        spans = tracks[1 + worker.worker_id]
        assert_apart(spans)
        names = Counter(name for _, _, name in spans)
        assert names["step"] == worker.steps
        assert (names["start"], names["reset"], names["get_attr"]) == (1, 2, 1)
        inside_ns = sum(ended_ns - began_ns for began_ns, ended_ns, name in spans if name == "step")
        assert inside_ns / 1e9 / worker.steps == pytest.approx(worker.step_time_s)
    calls = Counter(event["name"] for event in told if event["tid"] == 0)
    assert (calls["step"], calls["reset"], calls["policy default"]) == (41, 2, 41)
    assert calls["wait for workers"] > 0


def test_send_and_recv_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with SubprocessEnvManager(uneven, 2, trace=str(path)) as manager:
        manager.reset()
        for _ in range(10):
            batch = manager.recv()
            manager.send(batch.env_ids * 0, batch.env_ids)

    tracks = spans_by_track(read(path))
    assert_nested(tracks[0])
    assert Counter(name for _, _, name in tracks[0]).items() >= {"send": 10, "recv": 10}.items()


def test_a_workers_death_and_its_next_generation_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    factory = faulty(Die(exit_code=3), after=5, only_env=1, only_generation=0)
    with SubprocessEnvManager(factory, 2, wait="all", trace=str(path)) as manager:
        manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
        manager.reset()
        for _ in range(12):
            manager.step()
        stats = manager.stats()

    told = [event for event in read(path) if event["tid"] == 2]
    assert [event["name"] for event in told if event["ph"] == "i"] == ["Died", "Restarted"]
    assert [event["args"]["generation"] for event in told if event["name"] == "start"] == [0, 1]
    assert {event["args"]["generation"] for event in told if event["name"] == "step"} == {0, 1}
    assert_apart(spans_by_track(told)[2])
    assert sum(event["name"] == "step" for event in told) == stats.workers[1].steps


PROGRAM = """
from envmanager import RandomPolicy, SubprocessEnvManager
from envmanager.testing import FakeEnvironment

manager = SubprocessEnvManager(FakeEnvironment, 2, trace={path!r})
manager.set_policy("default", RandomPolicy(FakeEnvironment.SPEC))
manager.reset()
n = 0
while True:
    manager.step()
    n += 1
    if n == 2000:
        print("enough", flush=True)
"""


def test_a_run_that_is_killed_leaves_a_trace_that_lacks_only_the_bracket(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with subprocess.Popen([sys.executable, "-c", PROGRAM.format(path=str(path))], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        os.kill(program.pid, signal.SIGKILL)

    told = json.loads(path.read_text() + "]")
    assert Counter(event["name"] for event in told)["step"] > 1000


def test_starts_are_measured_for_each_worker(tmp_path: Path) -> None:
    quick_is_made = tmp_path / "made"

    def starts_slowly(context: Any) -> FakeEnvironment:
        if context.env_id == 0:
            until(quick_is_made.exists)
            time.sleep(1.0)
        else:
            quick_is_made.touch()
        return FakeEnvironment()

    with SubprocessEnvManager(starts_slowly, 2) as manager:
        slow, quick = (worker.start_s for worker in manager.stats().workers)

    assert slow > 1.0
    assert quick < slow
