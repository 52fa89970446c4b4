"""Environments that write to descriptors of the library, which they did not open: all other workers lose nothing.

Such a write is usually a bug about a number: a file is closed twice, or written to after it was closed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from envmanager import (
    EnvContext,
    EnvManager,
    ProtocolError,
    RestartPolicy,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    WorkerTimedOut,
)
from envmanager.hosts.wire import RECORD, RECORD_MARK
from envmanager.observe.events import Failed, LateReplyDiscarded, ProtocolBroken, Started
from envmanager_tests.envs import EchoGym
from envmanager_tests.faults.scripts import NO_RESTARTS
from envmanager_tests.start_methods import native_only

pytestmark = pytest.mark.usefixtures("nothing_is_left")
N_ENVS, N_ROUNDS = 3, 12
SHORT = Timeouts(step_s=20.0)


def write_to_all(kind: str, data: bytes) -> None:
    """Write to each open descriptor whose name under /proc begins with ``kind``, except the standard streams."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if fd > 2 and os.readlink(f"/proc/self/fd/{fd}").startswith(kind):
                os.write(fd, data)
        except OSError:  # closed since, or not writable
            pass


class WithoutInfos(EchoGym):
    """Steps that are only rows, so that a record reports them."""

    def reset(self, **arguments: Any) -> Any:
        return super().reset(**arguments)[0], {}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {}


class Writes(WithoutInfos):
    """Environment 0 writes stray bytes in its second step and after it, and in a thread while no step is in flight."""

    def __init__(self, context: EnvContext, kind: str, data: bytes) -> None:
        super().__init__(context)
        self.kind, self.data = kind, data

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if self._env_id == 0 and self._n_steps == 2:
            write_to_all(self.kind, self.data)
            thread = threading.Thread(target=write_to_all, args=(self.kind, self.data))
            thread.start()
            thread.join()
        return result


def writing(kind: str, data: bytes) -> Callable[[EnvContext], EchoGym]:
    return lambda context: Writes(context, kind, data)


def play(manager: EnvManager, n_rounds: int = N_ROUNDS) -> None:
    """Check that each step has the action that was sent, and that no step of a worker is missing."""
    manager.reset()
    batch = manager.recv(Wait.all())
    for number in range(1, n_rounds + 1):
        manager.send(number * 10 + batch.env_ids, batch.env_ids)
        batch = manager.recv(Wait.all())
        assert not batch.lost.any()
        shown, ended = batch.obs.copy(), batch.terminated | batch.truncated
        if ended.any():
            shown[ended] = batch.final_obs
        assert shown[:, 0].tolist() == batch.env_ids.tolist()
        assert shown[:, 2].tolist() == [number] * len(batch.env_ids)
        assert shown[:, 3].tolist() == (number * 10 + batch.env_ids).tolist()


STRAYS = {
    "one": b"?",
    "seven": bytes(7),
    "a record less one": bytes(RECORD.size - 1),
    "zeros as long as a record": bytes(RECORD.size),
    "garbage as long as two records": os.urandom(2 * RECORD.size),
    "a record and one": bytes(RECORD.size + 1),
    "the beginning of a record": RECORD.pack(RECORD_MARK, *range(1, 9))[:20],
    "more than a pipe holds": os.urandom(100_000),
}


@native_only
@pytest.mark.parametrize("data", STRAYS.values(), ids=STRAYS)
def test_stray_bytes_in_the_step_pipe_are_skipped_and_no_worker_loses_a_step(data: bytes) -> None:
    with SubprocessEnvManager(writing("pipe:", data), N_ENVS, timeouts=SHORT) as manager:
        play(manager)
        assert {type(each) for each in manager.events} == {Started}


@native_only
def test_stray_bytes_in_the_step_pipe_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with SubprocessEnvManager(writing("pipe:", bytes(7)), N_ENVS, timeouts=SHORT) as manager:
        play(manager)
        assert [record.levelname for record in caplog.records if record.levelname == "WARNING"] == ["WARNING"]


@native_only
def test_a_worker_that_never_stops_writing_to_the_step_pipe_is_found_by_its_deadline_and_others_go_on() -> None:
    class Floods(WithoutInfos):
        def step(self, action: Any) -> Any:
            while self._env_id == 0 and self._n_steps == 2:
                write_to_all("pipe:", os.urandom(5000))
            return super().step(action)

    with SubprocessEnvManager(Floods, N_ENVS, timeouts=Timeouts(step_s=2.0), restarts=NO_RESTARTS) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        n_steps = 0
        with pytest.raises(WorkerTimedOut) as raised:  # noqa: PT012
            while n_steps < 100_000:
                manager.send(batch.env_ids, batch.env_ids)
                batch = manager.recv(Wait.any())
                n_steps += int((batch.env_ids > 0).sum())
        assert raised.value.worker_id == 0
        assert n_steps > 2 * N_ENVS, "the others were not held up"
        assert manager.events.count(LateReplyDiscarded) == 0


@pytest.mark.parametrize("data", [bytes(7), bytes(32), os.urandom(500)], ids=["seven", "a header", "garbage"])
def test_stray_bytes_in_a_connection_are_a_violation_of_the_protocol_by_its_worker(data: bytes) -> None:
    options: Any = {"timeouts": SHORT, "restarts": NO_RESTARTS}
    with SubprocessEnvManager(writing("socket:", data), N_ENVS, **options) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        with pytest.raises(ProtocolError, match="descriptor") as raised:  # noqa: PT012
            for _ in range(4):
                manager.send(batch.env_ids, batch.env_ids)
                batch = manager.recv(Wait.all())
                manager.get_attr("spec")  # each response is a message
        assert raised.value.worker_id == 0
        assert manager.events.count(Failed) == manager.events.count(ProtocolBroken) == 1


def test_a_worker_whose_environment_writes_into_its_connection_is_replaced_alone() -> None:
    class WritesOnce(Writes):
        def __init__(self, context: EnvContext) -> None:
            super().__init__(context, "socket:" if context.generation == 0 else "nothing", bytes(64))

    options: Any = {"timeouts": SHORT, "restarts": RestartPolicy(max_restarts=1)}
    with SubprocessEnvManager(WritesOnce, N_ENVS, **options) as manager:
        manager.reset()
        batch, lost = manager.recv(Wait.all()), np.zeros(N_ENVS, np.int64)
        for _ in range(N_ROUNDS):
            manager.send(batch.env_ids, batch.env_ids)
            batch = manager.recv(Wait.all())
            lost[batch.env_ids] += batch.lost
        assert lost.tolist() == [1, 0, 0]
        assert [type(each) for each in manager.events if isinstance(each, Failed)] == [ProtocolBroken]


def test_stray_bytes_in_the_shared_memory_change_no_row() -> None:
    memory = writing("/", b"\xff" * 4096)
    with SubprocessEnvManager(memory, N_ENVS, timeouts=SHORT) as manager:
        play(manager)
