"""Files of recordings: damaged ones are refused, two writers share none, and a disk that stalls holds up nobody."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np
import pytest

from envmanager import SimpleEnvManager, UsageError
from envmanager.errors import EnvManagerError
from envmanager.recording import recorder
from envmanager.recording.data import episodes, table
from envmanager.recording.file import BadRecording, RecordWriter, further_part, parts_of, read_records
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager.testing import Raise, faulty
from envmanager_tests.interrupting import interrupts_from_outside
from envmanager_tests.recording.runs import Uneven, by_steps

HEAD, START = 8, 24
"""Numbers of bytes before the first record, and before the content of each, which begin with its length."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.emrec")


def test_a_damaged_header_is_found_even_if_the_rest_can_be_read(path: str) -> None:
    with SimpleEnvManager(Uneven, 4, record=path) as manager:
        by_steps(manager, 1)
    data, chance = Path(path).read_bytes(), random.Random(1)
    whole = [each.data for each in read_records(path)]
    heads, at = [0], HEAD
    while at < len(data):
        heads.append(at)
        at += START + unpack_from("<Q", data, at)[0]
    for _ in range(300):
        damaged = bytearray(data)
        damaged[min(chance.choice(heads) + chance.randrange(START), len(data) - 1)] ^= 1 << chance.randrange(8)
        Path(path).write_bytes(damaged)
        with contextlib.suppress(BadRecording):
            assert [each.data for each in read_records(path)] == whole


def test_a_file_has_one_writer_and_can_be_read_by_its_owner_alone(path: str) -> None:
    with SimpleEnvManager(Uneven, 1, record=path):
        with pytest.raises(UsageError, match="another manager"):
            SimpleEnvManager(Uneven, 1, record=path)
        assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="name another file"):
        SimpleEnvManager(Uneven, 1, record=path, order=path)
    with SimpleEnvManager(Uneven, 1, record=path):
        pass


def recorded(path: str, seed: int) -> None:
    with SimpleEnvManager(Uneven, 2, record=path) as manager:
        by_steps(manager, seed, n=12)


def returns(path: str) -> list[float]:
    return [each.total for each in episodes(path)]


def test_an_earlier_recording_is_renamed_with_its_further_parts_and_nothing_is_lost(
    path: str, tmp_path: Path, caplog: Any
) -> None:
    recorded(path, 1)
    first = returns(path)
    for seed in (2, 3):
        recorded(further_part(path, 0), seed)
    whole = returns(path)
    assert [Path(each).name for each in parts_of(path)] == ["run.emrec", "run.2.emrec", "run.3.emrec"]
    assert whole == first + returns(str(tmp_path / "run.2.emrec")) + returns(str(tmp_path / "run.3.emrec"))
    assert {each.part for each in episodes(path)} == set(table(path)["part"]) == {1, 2, 3}
    Path(tmp_path / "run.2.emrec.1").write_text("of the user")

    recorded(path, 4)
    assert f"{path}.2" in caplog.text
    assert [Path(each).name for each in parts_of(f"{path}.2")] == ["run.emrec.2", "run.2.emrec.2", "run.3.emrec.2"]
    assert returns(f"{path}.2") == whole
    assert parts_of(path) == [path]
    recorded(str(tmp_path / "run.2.emrec"), 5)  # another run, and no part
    assert parts_of(path) == [path]
    recorded(further_part(path, 0), 6)
    assert parts_of(path) == [path, str(tmp_path / "run.2.emrec")]
    assert (tmp_path / "run.2.emrec.1").read_text() == "of the user"
    assert len(returns(str(tmp_path / "run.2.emrec.2"))) > 0


def test_a_manager_that_does_not_start_leaves_the_earlier_recording(path: str) -> None:
    def start() -> None:
        with pytest.raises(EnvManagerError, match="cannot be made"):
            SimpleEnvManager(faulty(Raise(ValueError("cannot be made")), at="start"), 1, record=path)

    start()
    assert list(episodes(path)) == []
    recorded(path, 1)
    recorded(further_part(path, 0), 2)
    whole = returns(path)
    for _ in range(2):
        start()
    assert returns(path) == whole
    assert sorted(os.listdir(os.path.dirname(path))) == ["run.2.emrec", "run.emrec", "run.emrec.1"]


@pytest.mark.skipif(sys.platform == "win32", reason="renames no open file, and locks none")
def test_a_recording_has_one_writer_also_among_processes(path: str) -> None:
    code = f"from envmanager.recording.file import RecordWriter; RecordWriter({path!r})"
    with SimpleEnvManager(Uneven, 2, record=path) as manager:
        by_steps(manager, 1, n=12)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "is being written by another manager" in done.stderr
    assert len(returns(path)) > 0


@pytest.mark.parametrize("size", [0, 1, 7, 9])
def test_a_file_without_a_whole_record_is_a_bad_recording(size: int, path: str) -> None:
    Path(path).write_bytes(b"\x89EMREC2\n\x02"[:size])
    for read in (lambda: list(episodes(path)), lambda: ReplayEnvManager(recording=path), lambda: parts_of(path)):
        with pytest.raises(BadRecording):
            read()


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


def test_a_file_that_ends_anywhere_in_a_record_ends_with_the_record_before(path: str, tmp_path: Path) -> None:
    recorded(path, 1)
    data, at, ends = Path(path).read_bytes(), HEAD, []
    while at < len(data):
        at += START + unpack_from("<Q", data, at)[0]
        ends.append(at)
    whole = [each.data for each in read_records(path)]
    cut = tmp_path / "cut.emrec"
    for end in ends[-7:-1]:
        for size in [*range(end, end + START + 2), end + 40]:
            cut.write_bytes(data[:size])
            read = [each.data for each in read_records(cut)]
            assert read
            assert read == whole[: len(read)]


def test_records_that_are_missing_doubled_or_in_another_order_are_damage(path: str, tmp_path: Path) -> None:
    writer = RecordWriter(path)
    for number in range(5):
        writer.add(number, [("now", -1, bytes([number]))])
    writer.finish()
    writer.close()
    data, at, records = Path(path).read_bytes(), HEAD, []
    while at < len(data):
        size = START + unpack_from("<Q", data, at)[0]
        records.append(data[at : at + size])
        at += size
    first, *middle, end = records
    assert len(middle) == 4
    changed = tmp_path / "changed.emrec"
    for others in (middle[1:], middle[:-1], [*middle, middle[-1]], middle[::-1], [], [*middle, end]):
        changed.write_bytes(b"".join([data[:HEAD], first, *others, end]))
        with pytest.raises(BadRecording):
            list(read_records(changed))
    changed.write_bytes(b"".join([data[:HEAD], *records, b"more"]))
    with pytest.raises(BadRecording):
        list(read_records(changed))


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
