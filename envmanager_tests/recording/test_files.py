"""Files of recordings: damaged ones are refused, two writers share none, and a disk that stalls holds up nobody."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np
import pytest

from envmanager import SimpleEnvManager, UsageError
from envmanager.recording import recorder
from envmanager.recording.file import BadRecording, read_records
from envmanager_tests.interrupting import interrupts_from_outside
from envmanager_tests.recording.runs import Uneven, by_steps


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.emrec")


def test_a_damaged_header_is_found_even_if_the_rest_can_be_read(path: str) -> None:
    with SimpleEnvManager(Uneven, 4, record=path) as manager:
        by_steps(manager, 1)
    data, chance = Path(path).read_bytes(), random.Random(1)
    whole = [repr(each.content) for each in read_records(path)]
    heads, at = [], 8
    while at < len(data) - 8:
        heads.append(at)
        at += 9 + unpack_from("<Q", data, at + 1)[0]
    for _ in range(300):
        damaged = bytearray(data)
        damaged[min(chance.choice(heads) + chance.randrange(31), len(data) - 1)] ^= 1 << chance.randrange(8)
        Path(path).write_bytes(damaged)
        with contextlib.suppress(BadRecording):
            assert [repr(each.content) for each in read_records(path)] == whole


def test_a_file_has_one_writer_and_can_be_read_by_its_owner_alone(path: str) -> None:
    with SimpleEnvManager(Uneven, 1, record=path):
        with pytest.raises(UsageError, match="another manager"):
            SimpleEnvManager(Uneven, 1, record=path)
        assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="name another file"):
        SimpleEnvManager(Uneven, 1, record=path, order=path)
    with SimpleEnvManager(Uneven, 1, record=path):
        pass


@pytest.fixture
def stalled(path: str) -> Any:
    """Make a file that takes a few bytes and then no more: a pipe that nobody reads."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield
    os.close(reader)


def run(manager: Any, n: int) -> None:
    for _ in range(n):
        batch = manager.recv("all")
        manager.send(np.arange(4), batch.env_ids)


@pytest.mark.usefixtures("stalled")
def test_a_disk_that_stalls_ends_the_recording_and_not_the_run(path: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(recorder, "LONGEST_STALL_S", 0.5)
    with SimpleEnvManager(Uneven, 4, record=path) as manager:
        manager.reset(seed=1)
        manager.set_attr("slow_s", 0.0)
        for _ in range(200):
            run(manager, 100)
            if "RecordingFailed" in manager.events.counts():
                break
        assert manager.events.counts()["RecordingFailed"] == 1


@pytest.mark.usefixtures("stalled")
def test_an_interrupt_ends_the_wait_for_a_disk_that_stalls(path: str, monkeypatch: Any) -> None:
    manager = SimpleEnvManager(Uneven, 4, record=path)
    manager.reset(seed=1)
    manager.set_attr("slow_s", 0.0)
    with interrupts_from_outside(signal.default_int_handler, 3.0, 3.1), pytest.raises(KeyboardInterrupt):
        run(manager, 1_000_000)
    monkeypatch.setattr(recorder, "LONGEST_STALL_S", 0.5)
    manager.close()
    assert manager.events.counts()["RecordingFailed"] == 1
