"""Environments that need a server: one that is not there yet, is full, goes away or comes back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from envmanager import (
    AsyncioEnvManager,
    ConnectionLost,
    RestartPolicy,
    RestartsExhausted,
    ServerFull,
    Timeouts,
    Wait,
)
from envmanager.observe import events
from envmanager.testing.fault_checks import returns_within, until

ALL = Wait.all()
ONE = RestartPolicy(max_restarts=1)


class Server:
    """What sessions connect to. It is in this process, but as unreliable as a real one."""

    def __init__(self, n_slots: int = 1_000_000, *, is_there: bool = True) -> None:
        self.is_there = is_there
        self.n_slots = n_slots
        self.n_refused = 0
        self.sessions: set[Any] = set()
        self.made = 0

    def stop(self) -> None:
        """End all sessions, and refuse others."""
        self.is_there = False
        for session in list(self.sessions):
            session.loop.call_soon_threadsafe(session.cut)

    def start(self) -> None:
        self.is_there = True


class Remote:
    """One session of a server. What it has lost, it never connects to again."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.is_connected = self.is_cut = False
        self.n_episodes = 0
        server.made += 1

    def cut(self) -> None:
        self.is_cut = True
        self.server.sessions.discard(self)
        if not self.lost.done():
            self.lost.set_result(None)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        if not self.is_connected:
            if not self.server.is_there:
                self.server.n_refused += 1
                raise ConnectionRefusedError(111, "refused")
            if len(self.server.sessions) >= self.server.n_slots:
                self.server.n_refused += 1
                raise ServerFull(f"{self.server.n_slots} of {self.server.n_slots} sessions")
            self.is_connected, self.lost = True, self.loop.create_future()
            self.server.sessions.add(self)
        if self.is_cut:
            raise ConnectionResetError(104, "by peer")
        self.n_steps = 0
        self.n_episodes += 1
        return (options or {}).get("task", self.n_episodes), {}

    async def step(self, action: Any) -> Any:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.lost), 600 if action == "wait" else 0.001)
        if self.is_cut:
            raise ConnectionResetError(104, "by peer")
        self.n_steps += 1
        return action, 1.0, self.n_steps == 3, False, {}

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.server.sessions.discard(self)


def kinds_of(manager: AsyncioEnvManager) -> list[str]:
    return [type(event).__name__ for event in manager.events if not isinstance(event, events.Started)]


def connected(manager: AsyncioEnvManager) -> None:
    manager.reset()
    batch = manager.recv(ALL)
    manager.send(["go"] * len(batch), batch.env_ids)
    manager.recv(ALL)


def all_lost(manager: AsyncioEnvManager) -> None:
    """Receive a lost row of each environment."""
    lost: set[int] = set()
    while len(lost) < manager.n_envs:
        batch = manager.recv(Wait(timeout_s=20))
        assert batch.lost.all(), "a row of none that was lost"
        assert not lost & set(batch.env_ids.tolist())
        lost.update(batch.env_ids.tolist())


def test_a_server_that_is_not_there_yet_is_waited_for_with_one_event_and_no_restart() -> None:
    server = Server(is_there=False)
    with AsyncioEnvManager(lambda: Remote(server), 64, restarts=RestartPolicy(max_restarts=0)) as manager:
        opening = threading.Timer(0.5, server.start)
        opening.start()
        with returns_within(2):
            manager.reset()
        opening.join()
        assert manager.recv(ALL).obs.tolist() == [1] * 64
        manager.send(["go"] * 64, range(64))
        manager.recv(ALL)
        assert kinds_of(manager) == ["ServerGone", "ServerBack"]
        (gone, back) = [each for each in manager.events if not isinstance(each, events.Started)]
        assert isinstance(gone, events.ServerGone)
        assert isinstance(gone.error, ConnectionRefusedError)
        assert isinstance(back, events.ServerBack)
        assert back.n_workers == 64
        assert (manager.stats().restarts, server.made) == (0, 64)
        assert server.n_refused > 64, "nothing was tried again"


@pytest.mark.parametrize("n_slots", [64, 1_000_000], ids=["exactly as many slots", "many slots"])
def test_all_sessions_of_a_server_that_restarts_are_lost_together_and_no_budget_is_spent(n_slots: int) -> None:
    server = Server(n_slots)
    with AsyncioEnvManager(lambda: Remote(server), 64, restarts=ONE) as manager:
        connected(manager)
        manager.send(["wait"] * 64, range(64))
        server.stop()
        opening = threading.Timer(0.5, server.start)
        opening.start()
        all_lost(manager)
        opening.join()
        assert manager.stats().restarts == manager.stats().steps_lost == 64
        manager.send(["go"] * 64, range(64))
        assert manager.recv(ALL).obs.tolist() == ["go"] * 64
        assert kinds_of(manager) == ["ServerGone", "ServerBack"]
        assert server.made == 128


def test_a_full_server_gives_its_slots_to_those_that_wait() -> None:
    server = Server(n_slots=2)
    with AsyncioEnvManager(lambda: Remote(server), 2, restarts=ONE) as first:
        first.reset()
        made: list[AsyncioEnvManager] = []

        def make() -> None:
            manager = AsyncioEnvManager(lambda: Remote(server), 2)
            manager.reset()
            made.append(manager)

        thread = threading.Thread(target=make)
        thread.start()
        until(lambda: server.n_refused >= 2)
        first.close()
        thread.join()
        (second,) = made
        with second:
            assert second.recv(ALL).obs.tolist() == [1, 1]
            assert second.events.count(events.ServerGone) == 1
            (gone,) = [each for each in second.events if isinstance(each, events.ServerGone)]
            assert isinstance(gone.error, ServerFull)
            assert second.stats().restarts == 0


def test_a_server_that_never_comes_is_waited_for_as_long_as_start_s() -> None:
    server = Server(is_there=False)
    limits = Timeouts(start_s=1)
    never = RestartPolicy(max_restarts=0)
    with AsyncioEnvManager(lambda: Remote(server), 3, timeouts=limits, restarts=never) as manager:
        began = time.monotonic()
        with pytest.raises(ConnectionLost) as raised:
            manager.reset()
        assert time.monotonic() - began >= 1
        error = raised.value
        assert (error.phase, error.timeout_s, error.type_name) == ("reset", 1, "ConnectionRefusedError")
        assert isinstance(error.__cause__, ConnectionRefusedError)
        server.start()
        connected(manager)
    assert server.sessions == set()


def test_waits_in_vain_are_restarts_in_the_end() -> None:
    server = Server(is_there=False)
    policy = RestartPolicy(max_restarts=1, within_s=0.5, backoff_s=0)
    with AsyncioEnvManager(lambda: Remote(server), 1, timeouts=Timeouts(start_s=1), restarts=policy) as manager:
        with pytest.raises(RestartsExhausted) as raised:
            manager.reset()
        assert isinstance(raised.value.last, ConnectionLost)
        assert manager.events.count(events.Disconnected) == 2
        assert manager.events.count(events.ServerGone) == 1


def test_without_restarts_a_lost_connection_is_raised_and_a_reset_makes_another() -> None:
    server = Server()
    never = RestartPolicy(max_restarts=0)
    with AsyncioEnvManager(lambda: Remote(server), 2, restarts=never) as manager:
        connected(manager)
        manager.send(["wait", "wait"], [0, 1])
        until(lambda: len(server.sessions) == 2)
        server.stop()
        for _ in range(2):
            with pytest.raises(ConnectionLost) as raised:
                manager.recv()
            assert (raised.value.phase, raised.value.timeout_s) == ("step", 0.0)
        server.start()
        connected(manager)
        assert server.made == 4, "a session that was lost was used again"


def test_a_connection_that_is_lost_again_and_again_uses_up_the_restarts() -> None:
    class Drops(Remote):
        async def step(self, action: Any) -> Any:
            self.cut()
            return await super().step(action)

    server = Server()
    policy = RestartPolicy(max_restarts=2, backoff_s=0)
    with AsyncioEnvManager(lambda: Drops(server), 1, restarts=policy) as manager:
        manager.reset()
        manager.recv()
        with pytest.raises(RestartsExhausted) as raised:  # noqa: PT012
            while True:
                manager.send(["go"], [0])
                manager.recv()
        assert isinstance(raised.value.first, ConnectionLost)
        assert manager.stats().restarts == 3, "the first loss and the two of the budget"


def test_a_session_that_is_lost_between_two_episodes_is_replaced() -> None:
    class Ends(Remote):
        async def step(self, action: Any) -> Any:
            result = await super().step(action)
            if action == "last":
                self.cut()
            return result

    server = Server()
    with AsyncioEnvManager(lambda: Ends(server), 1, restarts=ONE) as manager:
        connected(manager)
        manager.send(["go"], [0])
        manager.recv()
        manager.send(["last"], [0])
        batch = manager.recv()
        assert (batch.lost.tolist(), batch.obs.tolist()) == ([True], [1])
        manager.send(["go"], [0])
        assert not manager.recv().lost.any()


def test_tasks_outlive_a_server() -> None:
    server = Server()
    with AsyncioEnvManager(lambda: Remote(server), 8, restarts=ONE) as manager:
        manager.reset(tasks=[{"task": number} for number in range(40)])
        n_rows = 0
        while not manager.tasks.done:
            batch = manager.recv()
            n_rows += len(batch)
            assert batch.obs[batch.first].tolist() == batch.task[batch.first].tolist()
            manager.send(["go"] * len(batch), batch.env_ids)
            if 60 <= n_rows < 60 + len(batch):
                server.stop()
                server.start()
        assert [(result.index, result.length) for result in manager.tasks.results] == [(k, 3) for k in range(40)]
        assert 0 < manager.stats().restarts <= 8
        assert manager.events.count(events.Failed) == 0


def test_an_adapter_can_say_that_a_server_is_full() -> None:
    assert issubclass(ServerFull, ConnectionError)
