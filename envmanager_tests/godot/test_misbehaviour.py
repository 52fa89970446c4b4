"""What becomes of an engine that breaks the protocol, or hangs, or dies, while a manager uses it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from envmanager import ProtocolError, RestartPolicy, Timeouts, WorkerDied, WorkerTimedOut
from envmanager.errors import WorkerError
from envmanager.observe.events import LateReplyDiscarded, Note, ProtocolBroken, Raised, Restarted
from envmanager.testing.contract import NumberedActions
from envmanager.testing.fakes import EchoEnvironment
from envmanager_tests.godot.fake_engine_manager import FakeEngineManager

NEVER = RestartPolicy(max_restarts=0)
QUICK = Timeouts(start_s=20.0, reset_s=3.0, step_s=2.0, call_s=3.0)

BROKEN = ["garbage", "oversize", "bytes_too_many", "bytes_missing", "unknown_kind", "reserved", "empty"]


def started(mode: str, n_envs: int = 1, **options: object) -> FakeEngineManager:
    manager = FakeEngineManager(EchoEnvironment, n_envs, mode=mode, timeouts=QUICK, **options)
    manager.set_policy("default", NumberedActions())
    return manager


def take_steps(manager: FakeEngineManager, n_steps: int) -> None:
    for _ in range(n_steps):
        manager.step("all")


@pytest.mark.parametrize("mode", BROKEN)
def test_a_frame_that_the_protocol_does_not_allow_is_an_error_and_nothing_of_it_is_used(mode: str) -> None:
    with started(f"{mode}@3", restarts=NEVER) as manager:
        manager.reset()
        take_steps(manager, 2)
        with pytest.raises(ProtocolError, match="install-addon") as raised:
            manager.step("all")
        assert raised.value.phase == "step"
        assert raised.value.reason
        manager.reset()
        take_steps(manager, 2)


@pytest.mark.parametrize("mode", ["garbage", "bytes_too_many"])
def test_an_engine_that_broke_the_protocol_is_replaced_and_its_step_is_marked_as_lost(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVMANAGER_FAKE_ONCE", str(tmp_path / "once"))
    with started(f"{mode}@2", restarts=RestartPolicy(max_restarts=1)) as manager:
        manager.reset()
        take_steps(manager, 1)
        (info,) = manager.step("all")
        assert info.lost is not None
        assert manager.stats().restarts == 1
        (restarted,) = [event for event in manager.events if isinstance(event, Restarted)]
        assert isinstance(restarted.cause, ProtocolError)
        assert (manager.events.count(ProtocolBroken), manager.events.count(Raised)) == (1, 0)


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("half", WorkerTimedOut),
        ("mute", WorkerTimedOut),
        ("hangs", WorkerTimedOut),
        ("half_and_die", WorkerDied),
        ("quits", WorkerDied),
    ],
)
def test_an_engine_that_does_not_answer_is_a_fault(mode: str, error: type[WorkerError]) -> None:
    with started(f"{mode}@2", restarts=NEVER) as manager:
        manager.reset()
        take_steps(manager, 1)
        with pytest.raises(error) as raised:
            manager.step("all")
        assert raised.value.phase == "step"
        manager.reset()
        take_steps(manager, 1)


@pytest.mark.parametrize("mode", ["bytewise@2", "stranger", "silent_stranger"])
def test_what_is_only_odd_does_no_harm(mode: str) -> None:
    with started(mode) as manager:
        manager.reset()
        take_steps(manager, 4)
        assert manager.stats().restarts == 0


def test_an_engine_that_says_that_it_is_busy_gets_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVMANAGER_FAKE_PAUSE_S", "1.5")  # of a step_s of 2, three times
    with started("busy=3@2", restarts=NEVER) as manager:
        manager.reset()
        began = time.monotonic()
        take_steps(manager, 3)
        assert time.monotonic() - began > QUICK.step_s


def test_an_answer_to_an_older_request_is_discarded_and_counted() -> None:
    with started("old_ticket@2") as manager:
        manager.reset()
        take_steps(manager, 4)
        assert manager.events.count(LateReplyDiscarded) >= 1
        assert manager.stats().restarts == 0


def test_a_note_becomes_an_event() -> None:
    with started("note@2") as manager:
        manager.reset()
        take_steps(manager, 4)
        note = next(event for event in manager.events if isinstance(event, Note))
        assert (note.name, dict(note.data)) == ("wave", {"height": 3})


def test_another_major_version_fails_the_start_and_names_both() -> None:
    with pytest.raises(ProtocolError, match=r"2\.0.*1\.0") as raised:
        started("other_major")
    assert raised.value.phase == "start"


@pytest.mark.parametrize("mode", ["silent", "wrong_token"])
def test_whoever_does_not_say_the_token_is_not_the_engine(mode: str) -> None:
    with pytest.raises(WorkerError) as raised:
        FakeEngineManager(EchoEnvironment, 1, mode=mode, timeouts=Timeouts(start_s=3.0))
    assert raised.value.phase == "start"


def test_a_failure_of_one_engine_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVMANAGER_FAKE_ONCE", str(tmp_path / "once"))
    with started("garbage@3", n_envs=3, restarts=RestartPolicy(max_restarts=3)) as manager:
        manager.reset()
        take_steps(manager, 12)
        assert manager.stats().restarts == 1
        assert len(manager.step("all")) == 3
