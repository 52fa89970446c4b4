"""Environments that hang, that cannot be stopped, or that block the loop, and the end of a manager meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest

from envmanager import (
    AsyncioEnvManager,
    ConnectionLost,
    EnvContext,
    ManagerClosed,
    RestartPolicy,
    RestartsExhausted,
    Timeouts,
    Wait,
    WorkerError,
    WorkerTimedOut,
)
from envmanager.coroutines.loop import LoopThread
from envmanager.observe import events
from envmanager.testing.fault_checks import returns_within, until

ALL = Wait.all()
Made = dict[tuple[int, int], Any]
SOON = Timeouts(start_s=20, reset_s=20, step_s=1, call_s=20, close_s=1)
SOONER = attrs.evolve(SOON, step_s=0.3)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What holds environments up; it opens at the end of the test, so that no thread stays."""
    gate = threading.Event()
    yield gate
    gate.set()


class Obeys:
    """Does what the action says. All that are made are in ``made``, by env_id and generation."""

    def __init__(self, context: EnvContext, made: Made, gate: threading.Event) -> None:
        self.env_id, self.generation = context.env_id, context.generation
        self.gate = gate
        self.calls: list[str] = []
        made[context.env_id, context.generation] = self

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        self.n_steps = 0
        return f"{self.env_id} {self.generation} 0", {}

    async def step(self, action: Any) -> Any:
        self.calls.append(f"step {action}")
        self.n_steps += 1
        if action == "hang":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.calls.append("cancelled")
                raise
        while action == "ignore" and not self.gate.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                self.calls.append("ignored")
        if action == "block":
            time.sleep(1.3)
        if action == "block for ever":
            self.gate.wait()
        if isinstance(action, float):
            await asyncio.sleep(action)
        return f"{self.env_id} {self.generation} {self.n_steps}", 1.0, self.n_steps == 5, False, {}

    async def close(self) -> None:
        self.calls.append("close")
        await asyncio.sleep(0)


class Blocks:
    """A synchronous one, which waits for the gate when the action is to hang."""

    def __init__(self, context: EnvContext, made: Made, gate: threading.Event) -> None:
        self.generation, self.gate = context.generation, gate
        self.calls: list[str] = []
        made[context.env_id, context.generation] = self

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"{self.generation}", {}

    def step(self, action: Any) -> Any:
        if action == "hang":
            self.gate.wait()
        return f"{self.generation} {action}", 1.0, False, False, {}

    def close(self) -> None:
        self.calls.append("close")


def begun(manager: AsyncioEnvManager) -> Any:
    manager.reset()
    return manager.recv(ALL)


def until_lost(manager: AsyncioEnvManager, env_ids: Any, others: Any = ()) -> dict[int, Any]:
    """The observations of the rows that are lost, by env_id, while others go on."""
    lost: dict[int, Any] = {}
    deadline = time.monotonic() + 30
    while set(lost) < set(env_ids):
        assert time.monotonic() < deadline
        batch = manager.recv(Wait(timeout_s=5))
        lost.update(zip(batch.env_ids[batch.lost].tolist(), batch.obs[batch.lost].tolist(), strict=True))
        going = [env_id for env_id in batch.env_ids[~batch.lost].tolist() if env_id in others]
        manager.send(["go"] * len(going), going)
    return lost


def test_a_step_past_its_deadline_is_cancelled_and_its_environment_is_never_used_again(gate: threading.Event) -> None:
    made: Made = {}
    with AsyncioEnvManager(lambda context: Obeys(context, made, gate), 3, timeouts=SOON) as manager:
        begun(manager)
        manager.send(["go", "hang", "go"], [0, 1, 2])
        lost = until_lost(manager, [1], others=[0, 2])

        assert lost == {1: "1 1 0"}
        until(lambda: made[1, 0].calls == ["step hang", "cancelled", "close"])
        assert sorted(made) == [(0, 0), (1, 0), (1, 1), (2, 0)]
        assert manager.stats().restarts == manager.stats().steps_lost == 1
        assert manager.events.count(events.TimedOut) == manager.events.count(events.Restarted) == 1
        assert manager.events.count(events.Abandoned) == 0
        manager.send(["go"], [1])
        batch = manager.recv()
        while 1 not in batch.env_ids:
            batch = manager.recv()
        assert batch.obs[batch.env_ids == 1].tolist() == ["1 1 1"]


def test_many_that_hang_are_replaced_together(gate: threading.Event) -> None:
    made: Made = {}
    policy = RestartPolicy(max_restarts=1)
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 500, timeouts=SOON, restarts=policy) as manager:
        begun(manager)
        manager.send(["hang"] * 500, range(500))
        lost = until_lost(manager, range(500))
        assert lost == {env_id: f"{env_id} 1 0" for env_id in range(500)}
        until(lambda: all(made[env_id, 0].calls[-1] == "close" for env_id in range(500)))
        assert manager.stats().restarts == 500


def test_a_coroutine_that_swallows_its_cancellation_is_abandoned_and_named(gate: threading.Event) -> None:
    made: Made = {}
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 2, timeouts=SOON) as manager:
        begun(manager)
        manager.send(["go", "ignore"], [0, 1])
        assert until_lost(manager, [1], others=[0]) == {1: "1 1 0"}
        while not manager.events.count(events.Abandoned):
            manager.get_attr("calls", env_ids=[1])
        (event,) = [each for each in manager.events if isinstance(each, events.Abandoned)]
        assert (event.worker_id, event.generation, event.what) == (1, 0, "coroutine")
        assert made[1, 0].calls[:3] == ["step ignore", "ignored", "close"]
    gate.set()


def test_a_thread_past_its_deadline_is_abandoned_and_closes_its_environment_when_it_returns(
    gate: threading.Event,
) -> None:
    made: Made = {}
    with AsyncioEnvManager(lambda c: Blocks(c, made, gate), 2, timeouts=SOON) as manager:
        begun(manager)
        manager.send(["go", "hang"], [0, 1])
        assert until_lost(manager, [1]) == {1: "1"}
        while not manager.events.count(events.Abandoned):
            manager.get_attr("calls", env_ids=[1])
        (event,) = [each for each in manager.events if isinstance(each, events.Abandoned)]
        assert (event.worker_id, event.generation, event.what) == (1, 0, "thread")
        assert made[1, 0].calls == []
        gate.set()
        until(lambda: made[1, 0].calls == ["close"])
        manager.send(["on"], [1])
        assert manager.recv().obs.tolist() == ["1 on"]


class Prepares(Blocks):
    """Returns a coroutine after it has waited for the gate."""

    def step(self, action: Any) -> Any:
        return self._answer(super().step(action))

    async def _answer(self, result: Any) -> Any:
        return result


@pytest.mark.parametrize("ends", ["before", "after"])
def test_a_coroutine_that_a_thread_returns_too_late_is_closed(
    ends: str, gate: threading.Event, recwarn: pytest.WarningsRecorder
) -> None:
    made: Made = {}
    with AsyncioEnvManager(lambda context: Prepares(context, made, gate), 1, timeouts=SOON) as manager:
        begun(manager)
        manager.send(["hang"], [0])
        until_lost(manager, [0])
        if ends == "before":
            gate.set()
            until(lambda: made[0, 0].calls == ["close"])
    gate.set()
    until(lambda: not any(thread.name.startswith("envmanager") for thread in threading.enumerate()))
    gc.collect()
    assert not recwarn.list


def test_code_that_blocks_the_loop_is_named_and_others_go_on_after_it(gate: threading.Event) -> None:
    made: Made = {}
    limits = Timeouts(step_s=30)
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 2, timeouts=limits) as manager:
        begun(manager)
        manager.send(["go", "block"], [0, 1])
        batch = manager.recv(ALL)
        assert batch.obs.tolist() == ["0 0 1", "1 0 1"]
        manager.send([0.6, "go"], [0, 1])
        manager.recv(ALL)
        (event,) = [each for each in manager.events if isinstance(each, events.LoopBlocked)]
        assert (event.worker_id, event.is_over) == (1, True)
        assert event.blocked_s >= 0.5
        assert "test_deadlines.py" in event.where
        assert "(step)" in event.where
        assert manager.stats().restarts == 0


@pytest.mark.parametrize("blocks", [False, True])
def test_only_code_that_runs_on_blocks_a_loop_not_many_callbacks(blocks: bool) -> None:
    loop = LoopThread(lambda: None)
    done = threading.Event()
    called: list[int] = []

    def many() -> None:
        for number in range(200_000):
            loop.loop.call_soon(called.append, number)
        if blocks:
            loop.loop.call_soon(done.wait, 30)
        loop.loop.call_soon(done.set)

    try:
        loop.post(many)
        found = set[str]()
        while not (found if blocks else done.is_set()):
            loop.watch(time.monotonic())
            if loop.blocked is not None:
                found.add(loop.blocked.where.partition("(")[2].rstrip(")"))
            n_called = len(called)
            until(lambda: n_called < len(called) or len(called) in (0, 200_000))  # noqa: B023
        done.set()
        assert found == ({"wait"} if blocks else set())
    finally:
        loop.finish(1.0)
        assert loop.join(30)


def test_code_that_blocks_the_loop_is_named_while_coroutines_play(gate: threading.Event) -> None:
    async def play(manager: AsyncioEnvManager) -> None:
        deadline = time.monotonic() + 20
        async with manager.pool().begin() as episode:
            await episode.step("block")
            while not manager.events.count(events.LoopBlocked) and not episode.is_over:
                assert time.monotonic() < deadline
                await episode.step(0.5)

    made: Made = {}
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 1, timeouts=attrs.evolve(SOON, step_s=20)) as manager:
        asyncio.run(play(manager))
        (event,) = [each for each in manager.events if isinstance(each, events.LoopBlocked)]
        assert (event.worker_id, event.is_over) == (0, True)


def test_a_loop_that_stays_blocked_is_left_and_new_generations_run_on_another(gate: threading.Event) -> None:
    made: Made = {}
    limits = Timeouts(start_s=5, step_s=2, close_s=0.5)
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 2, timeouts=limits) as manager:
        begun(manager)
        with returns_within(10):
            manager.send(["block for ever", "go"], [0, 1])
            lost = until_lost(manager, [0, 1])
        assert lost == {0: "0 1 0", 1: "1 1 0"}
        manager.send(["go", "go"], [0, 1])
        assert manager.recv(ALL).obs.tolist() == ["0 1 1", "1 1 1"]
    gate.set()


class Slowly:
    """An observation whose conversion to an array waits for the gate."""

    def __init__(self, number: int, has_begun: threading.Event, gate: threading.Event) -> None:
        self.number, self.has_begun, self.gate = number, has_begun, gate

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.has_begun.set()
        assert self.gate.wait(30)
        return np.array([self.number], np.float32)


class Meets(Obeys):
    """Ends with each step. One that is slow waits for the gate while its row is made, and another for that."""

    observation_space = gymnasium.spaces.Box(-100, 100, (1,))
    action_space = gymnasium.spaces.Discrete(3)
    has_begun: threading.Event

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([self.env_id], np.float32), {}

    async def step(self, action: Any) -> Any:
        number = 10 + self.env_id
        if action == 0:
            self.gate.wait()
        if action == 1:
            return Slowly(number, self.has_begun, self.gate), float(number), True, False, {}
        while not self.has_begun.is_set():
            await asyncio.sleep(0.001)
        return np.array([number], np.float32), float(number), False, True, {}


def test_environments_that_step_on_two_loops_at_the_same_time_get_their_own_rows(gate: threading.Event) -> None:
    made: Made = {}
    Meets.has_begun, slow = threading.Event(), threading.Event()
    timeouts = Timeouts(step_s=2.5, call_s=5)
    with AsyncioEnvManager(lambda context: Meets(context, made, gate), 2, timeouts=timeouts) as manager:
        begun(manager)
        manager.send([0], [0])
        assert manager.recv(ALL).lost.tolist() == [True]
        gate.set()
        made[0, 1].gate = slow
        manager.send([1, 2], [0, 1])
        fast = manager.recv()
        slow.set()
        for env_id, batch in enumerate((manager.recv(), fast)):
            assert batch.env_ids.tolist() == [env_id]
            assert (batch.obs.tolist(), batch.final_obs.tolist()) == ([[env_id]], [[10 + env_id]])
            assert (batch.reward[0], batch.terminated[0], batch.truncated[0]) == (10 + env_id, not env_id, bool(env_id))


def test_environments_that_always_hang_use_up_their_restarts(gate: threading.Event) -> None:
    made: Made = {}
    policy = RestartPolicy(max_restarts=2, backoff_s=0)
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 1, timeouts=SOON, restarts=policy) as manager:
        begun(manager)
        with pytest.raises(RestartsExhausted) as raised:  # noqa: PT012
            while True:
                manager.send(["hang"], [0])
                manager.recv()
        assert isinstance(raised.value.last, WorkerTimedOut)
        assert raised.value.last.timeout_s == SOON.step_s
        begun(manager)
        manager.send(["go"], [0])
        assert manager.recv().obs.tolist() == ["0 3 1"]


@pytest.mark.parametrize("phase", ["start", "reset", "call"])
def test_each_command_has_its_own_limit(phase: str, gate: threading.Event) -> None:
    class Hangs:
        def __init__(self) -> None:
            if phase == "start":
                gate.wait()

        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if phase == "reset":
                await asyncio.sleep(600)
            return 0, {}

        async def step(self, action: Any) -> Any:
            raise NotImplementedError

        async def wait(self) -> None:
            await asyncio.sleep(600)

    limits = Timeouts(**{f"{phase}_s": 0.2}, close_s=0.5)
    with pytest.raises(WorkerTimedOut) as raised, returns_within(0.2):  # noqa: PT012
        manager = AsyncioEnvManager(Hangs, 2, timeouts=limits, restarts=RestartPolicy(max_restarts=0))
        with manager:
            manager.reset()
            manager.call("wait")
    assert (raised.value.phase, raised.value.timeout_s) == (phase, 0.2)
    gate.set()


def test_a_call_waits_for_a_step_that_hangs_no_longer_than_the_step_may_take(gate: threading.Event) -> None:
    made: Made = {}
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 2, timeouts=SOON) as manager:
        begun(manager)
        manager.send(["go", "hang"], [0, 1])
        with pytest.raises(WorkerTimedOut) as raised:
            manager.get_attr("calls")
        assert (raised.value.phase, raised.value.worker_id) == ("step", 1)
        assert until_lost(manager, [1]) == {1: "1 1 0"}
        assert manager.get_attr("generation") == [0, 1]


class Calls(Obeys):
    """One with methods that can be called, whose ``step`` may lose the connection."""

    async def step(self, action: Any) -> Any:
        if action == "lose":
            raise ConnectionResetError("the server has closed the session")
        return await super().step(action)

    async def hang(self) -> None:
        await asyncio.sleep(600)


@pytest.mark.parametrize(("action", "kind"), [("go", WorkerTimedOut), ("lose", ConnectionLost)])
def test_a_worker_that_fails_in_a_call_behind_a_step_is_replaced_once_and_the_step_is_lost(
    action: str, kind: type[WorkerError], gate: threading.Event
) -> None:
    made: Made = {}
    timeouts = attrs.evolve(SOON, call_s=1)
    with AsyncioEnvManager(lambda c: Calls(c, made, gate), 2, timeouts=timeouts) as manager:
        begun(manager)
        manager.send([action, "go"], [0, 1])
        with pytest.raises(kind):
            manager.call("hang", env_ids=[0])
        batch = manager.recv(ALL)
        assert sorted(batch.obs.tolist()) == ["0 1 0", "1 0 1"]
        assert batch.env_ids[batch.lost].tolist() == [0]
        manager.send(["go", "go"], [0, 1])
        assert sorted(manager.recv(ALL).obs.tolist()) == ["0 1 1", "1 0 2"]
        assert (len(made), manager.stats().steps_lost) == (3, 1)


def test_an_interrupt_of_a_call_in_which_a_worker_has_failed_leaves_no_step_that_never_ends(
    gate: threading.Event,
) -> None:
    made: Made = {}

    def interrupt() -> None:
        until(lambda: "cancelled" in made[0, 0].calls)
        os.kill(os.getpid(), signal.SIGINT)

    with AsyncioEnvManager(lambda c: Calls(c, made, gate), 2, timeouts=SOON) as manager:
        begun(manager)
        manager.send(["hang", "go"], [0, 1])
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            manager.call("hang")
        thread.join()
        assert until_lost(manager, [0]) == {0: "0 1 0"}


def test_a_call_waits_for_a_worker_that_fails_while_it_waits_for_another_to_be_replaced(gate: threading.Event) -> None:
    made: Made = {}
    is_replaced = threading.Event()

    class Fails(Obeys):
        def __init__(self, context: EnvContext, made: Made, gate: threading.Event) -> None:
            if context.generation == 1:
                (is_replaced if context.env_id == 1 else gate).wait(20)
            super().__init__(context, made, gate)

        async def step(self, action: Any) -> Any:
            raise ValueError(action)

    policy = RestartPolicy(on_exception="restart")
    timeouts = attrs.evolve(SOON, call_s=2)
    with AsyncioEnvManager(lambda c: Fails(c, made, gate), 2, timeouts=timeouts, restarts=policy) as manager:
        begun(manager)
        manager.send(["fail"], [1])
        until(lambda: not len(manager.recv(Wait.any(timeout_s=0.01))) and manager.stats().restarts == 1)
        manager.send(["fail"], [0])

        def replaced() -> None:
            until(lambda: manager.stats().restarts == 2)
            is_replaced.set()
            until(lambda: (1, 1) in made)
            gate.set()

        with ThreadPoolExecutor(1) as beside:
            ends = beside.submit(replaced)
            assert manager.get_attr("generation") == [1, 1]
            ends.result()
        assert manager.recv(ALL).lost.tolist() == [True, True]
        assert manager.stats().restarts == 2


def test_hangs_and_errors_cost_no_row_of_another_and_every_task_is_played_or_lost(gate: threading.Event) -> None:
    generator = np.random.default_rng(5)
    made: Made = {}
    policy = RestartPolicy(max_restarts=1000, backoff_s=0, on_exception="restart")

    class Chancy(Obeys):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.task = (options or {}).get("task")
            return (await super().reset(seed=seed, options=options))[0] + f" {self.task}", {}

        async def step(self, action: Any) -> Any:
            if action == "raise":
                raise ValueError("chance")
            obs, *rest = await super().step(action)
            return f"{obs} {self.task}", *rest

    with AsyncioEnvManager(lambda c: Chancy(c, made, gate), 64, timeouts=SOONER, restarts=policy) as manager:
        manager.reset(tasks=[{"task": number} for number in range(300)], attempts=100)
        while not manager.tasks.done:
            batch = manager.recv()
            tasks = [int(obs.split()[-1]) for obs in batch.obs]
            assert tasks == batch.task.tolist()
            assert [int(obs.split()[0]) for obs in batch.obs] == batch.env_ids.tolist()
            chance = generator.random(len(batch))
            actions = np.where(chance < 0.01, "hang", np.where(chance < 0.03, "raise", "go")).astype(object)
            manager.send(actions, batch.env_ids)
        results = manager.tasks.results
        assert Counter(result.index for result in results) == Counter(range(300))
        assert all(result.length == 5 for result in results)
        stats = manager.stats()
        assert stats.restarts == stats.steps_lost == manager.events.count(events.Failed) > 5
        assert sum(result.attempts for result in results) == 300 + manager.events.count(events.TaskLost)


# The end.


@pytest.mark.parametrize("action", ["hang", "ignore", 0.2])
def test_closing_with_many_in_flight_takes_close_s_and_leaves_no_task(action: Any, gate: threading.Event) -> None:
    made: Made = {}
    manager = AsyncioEnvManager(lambda c: Obeys(c, made, gate), 100, timeouts=SOON)
    begun(manager)
    manager.send([action] * 100, range(100))
    with returns_within(SOON.close_s):
        manager.close()
    assert all("close" in env.calls for env in made.values())
    assert manager.events.count(events.Abandoned) == (100 if action == "ignore" else 0)


def test_a_close_that_hangs_is_cancelled() -> None:
    ends: list[str] = []

    class HangsAtTheEnd:
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return 0, {}

        async def step(self, action: Any) -> Any:
            raise NotImplementedError

        async def close(self) -> None:
            try:
                await asyncio.sleep(600)
            finally:
                ends.append("end")

    manager = AsyncioEnvManager(HangsAtTheEnd, 3, timeouts=SOON)
    with returns_within(SOON.close_s):
        manager.close()
    assert ends == ["end"] * 3


@pytest.mark.parametrize("call", ["recv", "reset", "call"])
def test_closing_from_another_thread_ends_a_call_that_waits(call: str, gate: threading.Event) -> None:
    made: Made = {}
    manager = AsyncioEnvManager(lambda c: Obeys(c, made, gate), 2, timeouts=Timeouts(close_s=1))
    begun(manager)
    manager.send(["hang", "hang"], [0, 1])
    waits = {"recv": manager.recv, "reset": manager.reset, "call": lambda: manager.get_attr("calls")}[call]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(waits)
        until(lambda: all("step hang" in env.calls for env in made.values()))
        with returns_within(2):
            manager.close()
            with pytest.raises(ManagerClosed):
                waiting.result()


@pytest.mark.skipif(os.name == "nt", reason="on Windows os.kill with SIGINT ends the process")
def test_an_interrupt_of_a_wait_loses_no_step(gate: threading.Event) -> None:
    made: Made = {}
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 2) as manager:
        begun(manager)
        manager.send([0.5, 0.5], [0, 1])
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            manager.recv(ALL)
        timer.join()
        assert manager.recv(ALL).obs.tolist() == ["0 0 1", "1 0 1"]
        manager.send(["go", "go"], [0, 1])
        assert manager.recv(ALL).obs.tolist() == ["0 0 2", "1 0 2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_of_the_trainer_leaves_the_manager_alone(gate: threading.Event) -> None:
    made: Made = {}
    with AsyncioEnvManager(lambda c: Obeys(c, made, gate), 2) as manager:
        begun(manager)
        manager.send([0.2, 0.2], [0, 1])
        pid = os.fork()
        if pid == 0:
            manager.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert manager.recv(ALL).obs.tolist() == ["0 0 1", "1 0 1"]
