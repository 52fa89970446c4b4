"""A Ctrl-C at any moment, caught, and going on: no step is paired with another's action, nothing hangs."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    BadAction,
    EnvContext,
    EnvManager,
    EnvRaised,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    UsageError,
    Wait,
)
from envmanager.processes.process_host import ProcessHost
from envmanager_tests.envs import EchoGym
from envmanager_tests.interrupting import interrupted, interrupts_from_outside

SUITE = "core portable faults"

pytestmark = pytest.mark.untraced

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-manager.md"


@cache
def manager_of_threads() -> Any:
    """The class that the page shows: its step queue, and the responses of its workers, are plain queues."""
    _, _, text = PAGE.read_text(encoding="utf-8").partition('```python title="thread_manager.py"\n')
    names: dict[str, Any] = {"__name__": "thread_manager"}
    exec(text.partition("```")[0], names)
    return names["ThreadEnvManager"]


class Numbering:
    def __init__(self) -> None:
        self._next = 1

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        action = np.arange(self._next, self._next + len(steps))
        self._next += len(steps)
        return ActionInfo(action)


class Interrupts:
    """Raises KeyboardInterrupt while armed; another process sends a signal every few hundredths of a second."""

    armed = False

    def __call__(self, *_: Any) -> None:
        if self.armed:
            raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    handler = Interrupts()
    with interrupts_from_outside(handler, 0.005, 0.03):
        yield handler


def slow_echo(context: EnvContext) -> EchoGym:
    return EchoGym(context, sleep_s=0.001)


def check(info: Any) -> None:
    made = info.transitions()
    assert (made.next_obs[:, 3] == made.action).all()
    assert (made.next_obs[:, 2] == made.obs[:, 2] + 1).all()


@pytest.mark.parametrize(
    ("wait", "zero_copy"), [(Wait.all(), False), (Wait.any(), True)], ids=["all-copied", "any-zero-copy"]
)
def test_steps_stay_paired_when_interrupts_are_caught_at_any_moment(wait: Wait, zero_copy: bool) -> None:
    n_interrupts = n_steps = 0
    idle = threading.Event()  # another thread, to which the kernel may hand the signal
    other = threading.Thread(target=idle.wait)
    other.start()
    try:
        with SubprocessEnvManager(slow_echo, 3, zero_copy=zero_copy) as manager, interrupts() as handler:
            manager.set_policy("default", Numbering())
            manager.reset()
            while n_interrupts < 30 or n_steps < 100:
                infos: list[Any] = []
                try:
                    handler.armed = True
                    infos = manager.step(wait)
                except KeyboardInterrupt:
                    n_interrupts += 1
                finally:
                    handler.armed = False
                n_steps += len(infos)
                for info in infos:
                    check(info)
            assert manager.stats().late_replies == 0
    finally:
        idle.set()
        other.join()


def test_an_environment_in_this_process_that_was_interrupted_asks_for_a_reset() -> None:
    class Interrupted(EchoGym):
        def step(self, action: Any) -> Any:
            if action == 3:
                raise KeyboardInterrupt
            return super().step(action)

    with SimpleEnvManager(Interrupted, 1) as manager:
        manager.set_policy("default", Numbering())
        manager.reset()
        manager.step()
        manager.step()
        with pytest.raises(KeyboardInterrupt):
            manager.step()
        with pytest.raises(Exception, match="KeyboardInterrupt"):
            manager.step()
        manager.reset()
        check(manager.step()[0])


@pytest.mark.parametrize("make", [SimpleEnvManager, AsyncioEnvManager, SubprocessEnvManager])
def test_resets_calls_and_sends_may_be_interrupted_and_repeated(make: Any) -> None:
    n_interrupts = 0
    with make(slow_echo, 2) as manager, interrupts() as handler:
        for round_ in range(30):
            try:
                handler.armed = True
                reset_call_and_step(manager, round_)
            except KeyboardInterrupt:
                n_interrupts += 1
            finally:
                handler.armed = False
        assert n_interrupts > 3
        reset_call_and_step(manager, 99)


def reset_call_and_step(manager: EnvManager, number: int) -> None:
    manager.reset()
    batch = manager.recv(Wait.all())
    for step in range(1, 8):
        before = batch.obs[:, 2].copy()
        manager.send(np.full(2, number * 10 + step), batch.env_ids)
        assert len(manager.get_attr("spec")) == 2
        batch = manager.recv(Wait.all())
        assert (batch.obs[:, 3] == number * 10 + step).all() or batch.terminated.any()
        assert (batch.obs[:, 2] == before + 1).all()


def test_a_close_that_was_interrupted_can_be_repeated() -> None:
    class Lingers(EchoGym):
        def close(self) -> None:
            threading.Event().wait()

    manager = SubprocessEnvManager(Lingers, 2)
    manager.reset()
    with interrupts() as handler, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        handler.armed = True
        manager.close()
    manager.close()


def test_an_interrupt_while_environments_in_this_process_are_made_again_asks_for_a_reset() -> None:
    class Interrupted(EchoGym):
        def __init__(self, context: EnvContext) -> None:
            super().__init__(context)
            self._generation = context.generation

        def step(self, action: Any) -> Any:
            if self._generation == 0:
                raise ValueError("make me again")
            return super().step(action)

        def reset(self, **arguments: Any) -> Any:
            if self._generation == 1:
                raise KeyboardInterrupt
            return super().reset(**arguments)

    with SimpleEnvManager(Interrupted, 1, restarts=RestartPolicy(on_exception="restart")) as manager:
        manager.set_policy("default", Numbering())
        manager.reset()
        with pytest.raises(KeyboardInterrupt):
            manager.step()
        (info,) = manager.step()
        assert info.lost is not None
        assert manager.stats().workers[0].generation == 2


class Gate:
    """Holds the environments that run in threads of this process."""

    def __init__(self) -> None:
        self.where, self.reached, self.opened = "", threading.Event(), threading.Event()

    def hold(self, where: str) -> None:
        if where == self.where:
            self.reached.set()
            assert self.opened.wait(120.0)


GATE = Gate()


class Held(EchoGym):
    def reset(self, **arguments: Any) -> Any:
        GATE.hold("reset")
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        GATE.hold("step")
        return super().step(action)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_interrupt_ends_a_wait_for_responses_that_come_through_plain_queues(where: str) -> None:
    global GATE
    GATE, caught = Gate(), threading.Event()

    def interrupt() -> None:
        GATE.reached.wait(60.0)
        for _ in range(4):  # Python itself loses sight of a signal that comes just before get() begins to wait
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if caught.wait(5.0):
                break
        GATE.opened.set()

    with manager_of_threads()(Held, 1) as manager:
        echo = Echoing(manager, n_envs=1)
        echo.reset()
        GATE.where = where
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            echo.reset() if where == "reset" else echo.round()
        assert not GATE.opened.is_set(), "the interrupt came only with the response"
        caught.set()
        thread.join()
        if where == "reset":
            echo.reset()
        else:
            echo.check(manager.recv(Wait.all()))
        echo.round()


# One interrupt, at every call in turn that a call of the manager makes.


class Echoing:
    """``send`` and ``recv`` with an action that was never given before, and what became of it."""

    def __init__(self, manager: EnvManager, n_envs: int = 2) -> None:
        self.manager = manager
        self.n_envs = n_envs
        self.action = 0

    def reset(self) -> None:
        self.manager.reset()
        self.last = self.manager.recv(Wait.all()).obs

    def send(self, action: int | None = None) -> None:
        if action is None:
            self.action += 1
            action = self.action
        self.manager.send(np.full(self.n_envs, action), range(self.n_envs))

    def check(self, batch: Any) -> None:
        ended = batch.terminated | batch.truncated
        shown = batch.obs.copy()
        if ended.any():
            shown[ended] = batch.final_obs
        assert (shown[:, 3] == self.action).all(), "not the step of the last action"
        assert (shown[:, 2] == self.last[:, 2] + 1).all(), "a step is missing"
        self.last = batch.obs

    def round(self) -> None:
        self.send()
        self.check(self.manager.recv(Wait.all()))


def nobody_holds_the_manager(manager: EnvManager) -> None:
    thread = threading.Thread(target=manager.stats)
    asked = threading.Thread(target=lambda: manager.get_attr("spec"))
    for each in (thread, asked):
        each.start()
        each.join(60.0)
        assert not each.is_alive(), "another thread waits for ever"


def sweep(function: Any, begin: Any, go_on: Any, every: int) -> int:
    """Interrupt ``function()`` at its calls in turn, each time after ``begin()`` and before ``go_on()``.

    ``every``: 1 for each call, 3 for each third.
    """
    for nth in range(1, 10_000, every):
        begin()
        if not interrupted(function, nth):
            return nth - 1
        go_on()
    raise AssertionError("it never ends")


def or_reset(go_on: Any, reset: Any) -> Any:
    """``go_on``; but an environment in this process that was interrupted in its own step asks for a reset."""

    def do() -> None:
        try:
            go_on()
        except EnvRaised as error:
            if error.type_name != "KeyboardInterrupt":
                raise
            reset()

    return do


KINDS: dict[str, Callable[[], Any]] = {
    "simple": lambda: SimpleEnvManager(EchoGym, 2),
    "processes": lambda: SubprocessEnvManager(EchoGym, 2),
    "asyncio": lambda: AsyncioEnvManager(EchoGym, 2),
    "zero-copy": lambda: SubprocessEnvManager(EchoGym, 2, zero_copy=True, n_workers=1),
    "share": lambda: SubprocessEnvManager(EchoGym, 2, local_envs=1),
    "queues": lambda: manager_of_threads()(EchoGym, 2),
}
AT_EACH_CALL = ("simple", "processes")
"""The other kinds go the same way through the kernel; at each third of their calls they show what is their own."""
EVERY_KIND = pytest.mark.parametrize(
    ("make", "every"),
    [
        *(pytest.param(make, 1 if name in AT_EACH_CALL else 3, id=name) for name, make in KINDS.items()),
        *(
            pytest.param(make, 1, id=f"{name}, each call", marks=pytest.mark.thorough)
            for name, make in KINDS.items()
            if name not in AT_EACH_CALL
        ),
    ],
)


@EVERY_KIND
def test_an_interrupt_at_any_call_of_recv_loses_nothing_and_no_old_action_is_taken(make: Any, every: int) -> None:
    with make() as manager:
        echo = Echoing(manager)
        echo.reset()

        def go_on() -> None:
            with pytest.raises(BadAction, match=r"still waiting|was interrupted"):
                echo.send(10**6)
            echo.check(manager.recv(Wait.all()))
            with pytest.raises(UsageError, match="nothing is in flight"):
                manager.recv(Wait.all())

        def receive() -> None:
            manager.recv(Wait.all())

        def begin() -> None:
            echo.round()
            echo.send()

        assert sweep(receive, begin, or_reset(go_on, echo.reset), every) > 50
        nobody_holds_the_manager(manager)


@pytest.mark.parametrize(
    ("kind", "options", "every"),
    [
        pytest.param(SimpleEnvManager, {}, 1, id="simple"),
        pytest.param(AsyncioEnvManager, {}, 3, id="asyncio"),
        pytest.param(SubprocessEnvManager, {"zero_copy": True, "n_workers": 1}, 13, id="zero-copy"),
        pytest.param(
            SubprocessEnvManager,
            {"zero_copy": True, "n_workers": 1},
            1,
            id="zero-copy, each call",
            marks=pytest.mark.thorough,  # a manager for each call takes half a minute
        ),
    ],
)
def test_an_interrupt_at_any_call_of_close_is_raised_and_close_can_be_repeated(
    kind: Any, options: dict[str, Any], every: int
) -> None:
    for nth in range(1, 10_000, every):
        with kind(EchoGym, 2, **options) as manager:
            manager.reset()
            manager.recv(Wait.all())
            if not interrupted(manager.close, nth):  # it fails when one was not raised
                break
    assert nth > 20


def test_an_interrupt_while_close_gives_the_memory_back_is_raised() -> None:
    struck = False

    def strike(frame: Any, event: str, _: Any) -> None:
        nonlocal struck
        is_end_of_memory = frame.f_code is weakref.finalize.__call__.__code__
        if event == "call" and is_end_of_memory and frame.f_back.f_code is ProcessHost.close.__code__:
            struck = True
            signal.raise_signal(signal.SIGINT)

    with SubprocessEnvManager(EchoGym, 2) as manager:
        manager.reset()
        sys.setprofile(strike)
        try:
            with pytest.raises(KeyboardInterrupt):
                manager.close()
        finally:
            sys.setprofile(None)
        assert struck


@EVERY_KIND
def test_an_interrupt_at_any_call_of_send_leaves_it_done_or_not_done(make: Any, every: int) -> None:
    with make() as manager:
        echo = Echoing(manager)
        echo.reset()

        def go_on() -> None:
            try:
                echo.send()  # not done: now it is
            except BadAction:  # done: the environments have the action before this one
                echo.action -= 1
            echo.check(manager.recv(Wait.all()))

        assert sweep(echo.send, echo.round, go_on, every) > 20
        nobody_holds_the_manager(manager)


@EVERY_KIND
def test_after_an_interrupt_at_any_call_of_reset_only_a_reset_goes_on(make: Any, every: int) -> None:
    with make() as manager:
        echo = Echoing(manager)
        echo.reset()
        n_refused = 0

        def go_on() -> None:
            nonlocal n_refused
            episodes = echo.last[:, 4].copy()
            try:
                echo.send()
            except UsageError:
                n_refused += 1
                with pytest.raises(UsageError, match="call reset\\(\\) again"):
                    manager.recv()
            else:  # the reset had not begun
                echo.check(manager.recv(Wait.all()))
                assert (echo.last[:, 4] - episodes <= 1).all()
            echo.reset()

        n_calls = sweep(manager.reset, echo.round, go_on, every)
        assert n_refused > n_calls / every / 2
        nobody_holds_the_manager(manager)


@EVERY_KIND
def test_an_interrupt_at_any_call_of_step_loses_nothing(make: Any, every: int) -> None:
    policy = Numbering()
    with make() as manager:
        manager.set_policy("default", policy)
        manager.reset()
        last = np.zeros(2, np.int64)

        def check_all(infos: Any) -> None:
            for info in infos:
                check(info)
                made, ids = info.transitions(), info.current["default"].env_id
                assert (made.next_obs[:, 2] == last[ids] + 1).all(), "a step is missing"
                last[ids] = made.next_obs[:, 2]

        def step() -> None:
            check_all(manager.step(Wait.all()))

        def reset() -> None:
            for info in manager.reset():
                steps = info.current["default"]
                last[steps.env_id] = steps.obs[:, 2]

        assert sweep(lambda: manager.step(Wait.all()), step, or_reset(step, reset), every) > 50
        nobody_holds_the_manager(manager)


@EVERY_KIND
def test_an_interrupt_at_any_call_of_get_attr_leaves_the_manager_as_it_was(make: Any, every: int) -> None:
    with make() as manager:
        echo = Echoing(manager)
        echo.reset()
        assert sweep(lambda: manager.get_attr("spec"), echo.round, echo.round, every) > 20
        nobody_holds_the_manager(manager)
