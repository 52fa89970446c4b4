"""A recording is data: no code of a file runs when it is read, unless the reader trusts it."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import SimpleEnvManager, UsageError, make_manager
from envmanager.errors import RestartsExhausted, WorkerDied
from envmanager.recording import Apart, BadRecording, about, episodes, table
from envmanager.recording.codec import packed, unpacked
from envmanager.recording.file import RecordWriter, read_records
from envmanager.recording.tape import same
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager_tests.recording.runs import Uneven


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.emrec")


class Runs:
    """An object whose pickle runs a command where it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class Hostile(Uneven):
    """Its infos have such an object beside a number."""

    command = ""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.command = (options or {}).get("command", Runs("")).command
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        *step, _ = super().step(action)
        return *step, {"n": self.n_steps, "object": Runs(self.command)}


def run(manager: Any, marker: Path) -> None:
    manager.reset(seed=1, options={"command": Runs(f"touch {marker}"), "level": 1})
    for _ in range(6):
        manager.recv("all")
        manager.send(np.arange(2), [0, 1])


@pytest.fixture
def marker(path: str, tmp_path: Path) -> Path:
    """Record a run with pickles that would make a file, and return the path of that file."""
    marker = tmp_path / "it ran".replace(" ", "_")
    with SimpleEnvManager(Hostile, 2, infos=True, record=path) as manager:
        run(manager, marker)
    assert not marker.exists()
    return marker


def test_nothing_runs_where_a_recording_is_read_and_the_rest_of_it_is_there(path: str, marker: Path) -> None:
    read = list(episodes(path))
    infos = [info for each in read for info in each.infos or ()]
    assert {info["n"] for info in infos} >= {1, 2, 3}
    assert {repr(info["object"]) for info in infos} == {f"<{__name__}.Runs, pickled: trust=True reads it>"}
    assert all(isinstance(info["object"], Apart) for info in infos)
    assert sum(each.total for each in read) == table(path)["reward"].sum() > 0
    assert about(path)["n_envs"] == 2
    assert not marker.exists()


def test_a_replay_tells_what_to_do_before_it_delivers_such_an_object(path: str, marker: Path) -> None:
    with ReplayEnvManager(recording=path) as manager, pytest.raises(UsageError, match=r"Runs.*trust=True"):
        run(manager, marker)
    assert not marker.exists()


@pytest.mark.parametrize("read", ["episodes", "replay", "config"])
def test_what_is_trusted_is_read_whole(read: str, path: str, marker: Path) -> None:
    if read == "episodes":
        infos = [info for each in episodes(path, trust=True) for info in each.infos or ()]
        assert {info["object"] for info in infos} == {0}
    else:
        config = {"kind": "replay", "recording": path, "trust": True}
        with make_manager(config) if read == "config" else ReplayEnvManager(recording=path, trust=True) as manager:
            manager.reset(seed=1, options={"command": 0, "level": 1})
            manager.recv("all")
            manager.send(np.arange(2), [0, 1])
            assert manager.recv("all").info[0]["object"] == 0
    assert marker.exists()


def test_the_command_line_trusts_only_when_it_is_told(path: str, marker: Path, capsys: Any) -> None:
    pytest.importorskip("typer")
    from envmanager.cli.app import run_command_line

    for flags in ([], ["--step", "0"]):
        assert run_command_line(["replay", path, *flags]) == 0
        assert not marker.exists()
    assert "Runs, pickled" in capsys.readouterr().out
    assert run_command_line(["replay", path, "--step", "0", "--trust"]) == 0
    assert marker.exists()


def forged(marker: Path) -> dict[str, Any]:
    """Return pickles that are no recorded forms, by what they try."""
    command = f"touch {marker}"
    made = b"cenvmanager.recording.codec\n_made\n"
    return {
        "a class": pickle.dumps(Runs(command), protocol=5),
        "a name": f"cos\nsystem\n(S'{command}'\ntR.".encode(),
        "an instance": f"(ios\nsystem\nS'{command}'\n.".encode(),
        "a maker that is none": made + b"(S'__import__'\nS'os'\ntR.",
        "a class of another module": made + b"(S'own'\nS'Popen'\n}tR.",
        "an error that is none": made + b"(S'error'\nS'eval'\n(S'1'\nt}tR.",
        "objects of bytes": made + b"(S'array'\nS'|O'\n(I1\ntC\x0800000000tR.",
        "attributes of the maker": made + b"(N}S'__code__'\nI1\nstb.",
    }


@pytest.mark.parametrize("kind", forged(Path("x")))
@pytest.mark.parametrize("place", ["about", "fact", "content"])
def test_what_was_forged_runs_nothing(kind: str, place: str, path: str, tmp_path: Path, monkeypatch: Any) -> None:
    marker = tmp_path / "ran"
    data = forged(marker)[kind]
    first = packed({"observations": True, "part_of": 0, "env_ids": [[0]]})
    records = {
        "about": [data],
        "fact": [first, data],
        "content": [first, packed([("take", -1, data), ("send", 0, data)])],
    }[place]
    monkeypatch.setattr("envmanager.recording.file.packed", lambda content: content)
    writer = RecordWriter(path)
    for each in records:
        writer.add(1, each)
    writer.finish()
    writer.close()
    assert [each.data for each in read_records(path)] == records
    with pytest.raises(BadRecording):
        list(episodes(path))
    assert not marker.exists()


VALUES: list[Callable[[], Any]] = [
    lambda: [None, True, 1, -(2**70), 0.1, -0.0, math.nan, math.inf, "text", b"bytes", bytearray(b"more")],
    lambda: {1: (2, [3, (4,)]), ("a", 1): {"b"}, "c": frozenset({2.5}), "d": complex(1, -0.0)},
    lambda: [np.arange(6).reshape(2, 3)[:, ::2], np.zeros((0, 3), np.float16), np.array(3.0), np.array(["ab", ""])],
    lambda: [np.float32(0.1), np.int8(-3), np.bool_(True), np.str_(""), np.str_("ab"), np.datetime64("2020-01-01")],
    lambda: [np.array([{"a": np.ones(2)}, None, "text", [1]], object), np.array("2020-01-01", "M8[D]")],
    lambda: [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array([1, 2], ">i4"), np.array([1 + 2j])],
]


@pytest.mark.parametrize("make", VALUES)
def test_plain_values_and_arrays_come_back_as_they_were(make: Callable[[], Any]) -> None:
    def refuse(apart: Apart) -> Any:
        raise AssertionError(apart)

    value = make()
    read = unpacked(packed(value), refuse)
    assert same(read, value)
    assert repr(read) == repr(value)


def test_a_container_that_holds_itself_and_the_same_object_twice_is_written_once() -> None:
    value: list[Any] = [np.zeros(1000)] * 2
    value.append(value)
    assert len(packed(value)) < 9000
    read = unpacked(packed(value))
    assert read[2] is read
    assert read[0] is read[1]


def test_errors_of_workers_come_back_with_their_attributes() -> None:
    died = WorkerDied(exit="SIGKILL", output="last words", worker_id=1, env_ids=[2, 3], phase="step")
    error = RestartsExhausted(first=died, last=died, restarts=3, within_s=60.0)
    for each in (died, error, OSError(2, "no such file"), ValueError("text", 1)):
        read = unpacked(packed(each))
        assert type(read) is type(each)
        assert (str(read), read.args) == (str(each), each.args)
    assert (read := unpacked(packed(error))).last.exit == "SIGKILL"
    assert read.env_ids == (2, 3)


class Own(Exception):
    pass


@pytest.mark.parametrize(
    "make", [Own, partial(partial, max, 1), lambda: Own, lambda: test_errors_of_workers_come_back_with_their_attributes]
)
def test_all_others_are_apart(make: Callable[[], Any]) -> None:
    value = make()
    read = unpacked(packed([1, value]))
    assert read[0] == 1
    assert isinstance(read[1], Apart)
    loaded = unpacked(packed([1, value]), Apart.load)[1]
    assert same(loaded, value)


def test_a_recording_of_an_earlier_format_is_refused_with_the_reason(path: str) -> None:
    Path(path).write_bytes(b"\x89MCAP0\r\n" + bytes(100))
    for read in (lambda: list(episodes(path)), lambda: ReplayEnvManager(recording=path), lambda: about(path)):
        with pytest.raises(BadRecording, match=r"earlier version.*record the run again"):
            read()
