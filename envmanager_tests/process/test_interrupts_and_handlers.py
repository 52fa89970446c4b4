"""Ctrl-C where others have handlers of their own: notebooks, asyncio, programs; and very many of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import envmanager
from envmanager import AsyncioEnvManager, BadAction, EnvManager, EnvRaised, SimpleEnvManager, SubprocessEnvManager, Wait
from envmanager_tests.envs import EchoGym
from envmanager_tests.interrupting import interrupted, interrupts_from_outside

pytestmark = pytest.mark.untraced

every_kind = pytest.mark.parametrize("make", [SimpleEnvManager, AsyncioEnvManager, SubprocessEnvManager])


@pytest.fixture(autouse=True)
def pythons_handler_is_back() -> Iterator[None]:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def use(manager: EnvManager) -> None:
    manager.reset()
    manager.recv(Wait.all())
    manager.send(np.ones(manager.n_envs, np.int64), range(manager.n_envs))
    manager.recv(Wait.all())


@every_kind
def test_the_handler_that_was_found_comes_back_with_the_last_manager_that_closes(make: Any) -> None:
    first, second = make(EchoGym, 1), make(EchoGym, 1)
    use(first)
    use(second)
    first.close()
    use(second)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "it stays between calls"
    second.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_manager_that_nobody_closed_does_not_keep_it() -> None:
    manager = SimpleEnvManager(EchoGym, 1)
    use(manager)
    del manager
    with SimpleEnvManager(EchoGym, 1) as other:
        use(other)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Kernel:
    """What a notebook's kernel does with SIGINT: ignored between cells, Python's own in each."""

    def __init__(self) -> None:
        self._between = signal.SIG_IGN

    def run(self, cell: Callable[[], None]) -> str:
        between = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            cell()
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            signal.signal(signal.SIGINT, between)
        return "done"


@every_kind
def test_a_notebook_puts_its_handlers_back_in_each_cell_and_steps_stay_paired(make: Any) -> None:
    kernel, before = Kernel(), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        made: list[EnvManager] = []
        assert kernel.run(lambda: made.append(make(EchoGym, 2))) == "done"
        (manager,) = made
        assert kernel.run(lambda: use(manager)) == "done"
        for nth in (1, 3, 6):
            action = 100 + nth
            assert kernel.run(lambda action=action: manager.send(np.full(2, action), [0, 1])) == "done"  # type: ignore[misc]
            outcome = kernel.run(lambda nth=nth: print(interrupted(lambda: manager.recv(Wait.all()), nth)))  # type: ignore[misc]
            assert outcome == "done"
            batch = manager.recv(Wait.all())
            assert (batch.obs[:, 3] == action).all()
        assert kernel.run(manager.close) == "done"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_made", ["inside", "before"])
@every_kind
def test_under_asyncio_an_interrupt_is_not_lost_and_nothing_is(make: Any, is_made: str) -> None:
    made = [make(EchoGym, 2)] if is_made == "before" else []

    async def main() -> None:
        if not made:
            made.append(make(EchoGym, 2))
        manager = made[0]
        manager.reset()
        manager.recv(Wait.all())
        manager.send(np.full(2, 7), [0, 1])
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    with made[0] as manager:
        assert (manager.recv(Wait.all()).obs[:, 3] == 7).all()


@every_kind
def test_a_programs_own_handler_is_called_after_the_call_and_may_call_the_one_it_found(make: Any) -> None:
    called: list[str] = []
    with make(EchoGym, 1) as manager:
        use(manager)
        found = signal.getsignal(signal.SIGINT)

        def handle(number: int, frame: Any) -> None:
            called.append("the program's")
            found(number, frame)  # type: ignore[operator,misc]

        before = signal.signal(signal.SIGINT, handle)
        use(manager)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupted(lambda: manager.get_attr("spec"), 3)
        assert called == ["the program's"] * 2
        use(manager)
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_only_takes_note_leaves_the_call_as_it_is() -> None:
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        with SubprocessEnvManager(EchoGym, 2) as manager:
            manager.reset()
            batch = manager.recv(Wait.all())
            for step in range(1, 30):
                last = batch.obs[:, 2].copy()
                timer = threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGINT))
                timer.start()
                manager.send(np.full(2, step), [0, 1])
                batch = manager.recv(Wait.all())
                timer.join()  # a late signal would find the handler of the test run
                shown = batch.final_obs if batch.terminated.all() else batch.obs
                assert (shown[:, 2] == last + 1).all()
        assert noted
    finally:
        signal.signal(signal.SIGINT, before)


PACKAGE = os.path.dirname(envmanager.__file__) + os.sep


class Interrupts:
    """Raises KeyboardInterrupt wherever the library is at work; the code of this test is not to be interrupted."""

    def __init__(self) -> None:
        self.n_raised = 0
        self.is_armed = False

    def __call__(self, _: int, frame: Any) -> None:
        if not self.is_armed:
            return
        is_told_late = frame is None
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None or is_told_late:
            self.n_raised += 1
            raise KeyboardInterrupt


def repeated(call: Callable[[], Any]) -> tuple[Any, bool]:
    """What ``call`` returns when it is not interrupted, and whether it was before."""
    was_interrupted = False
    while True:
        try:
            return call(), was_interrupted
        except KeyboardInterrupt:
            was_interrupted = True
        except BadAction:  # a send that was interrupted had been done
            if not was_interrupted:
                raise
            return None, True


class Books:
    """What was sent to each environment, and what must come back."""

    def __init__(self, manager: EnvManager) -> None:
        self.manager = manager
        self.random = random.Random(11)
        self.next_action = 1
        self.sent: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def reset(self) -> None:
        self.sent.clear()
        self.last.clear()
        repeated(self.manager.reset)
        self.recv("all")

    def send(self) -> None:
        idle = [env_id for env_id in self.last if env_id not in self.sent]
        if idle:
            chosen = self.random.sample(idle, self.random.randint(1, len(idle)))
            actions = np.arange(self.next_action, self.next_action + len(chosen))
            self.next_action += len(chosen)
            repeated(lambda: self.manager.send(actions, chosen))
            self.sent.update(zip(chosen, actions.tolist(), strict=True))

    def recv(self, wait: str) -> None:
        batch, _ = repeated(lambda: self.manager.recv(wait))
        ended = np.flatnonzero(batch.terminated | batch.truncated).tolist()
        for row, env_id in enumerate(batch.env_ids.tolist()):
            shown = batch.final_obs[ended.index(row)] if row in ended else batch.obs[row]
            assert shown[0] == env_id, "another environment's row"
            if env_id in self.sent:
                assert shown[3] == self.sent.pop(env_id), "not the step of the last action"
                assert shown[2] == self.last[env_id] + 1, "a step is missing, or came twice"
            else:
                assert env_id not in self.last, "nobody asked for it"
            self.last[env_id] = int(batch.obs[row][2])

    def use(self) -> None:
        """Something, by chance."""
        if self.random.random() < 0.02:
            self.reset()
        if self.random.random() < 0.05:
            repeated(lambda: self.manager.get_attr("spec"))
        self.send()
        if self.sent:
            self.recv(self.random.choice(["any", "all"]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimpleEnvManager(EchoGym, 4),
        lambda: AsyncioEnvManager(EchoGym, 4),
        lambda: SubprocessEnvManager(EchoGym, 4),
        lambda: SubprocessEnvManager(EchoGym, 4, n_workers=4, zero_copy=True),
        lambda: SubprocessEnvManager(EchoGym, 4, local_envs=1),
    ],
    ids=["simple", "asyncio", "processes", "zero-copy", "share"],
)
def test_hundreds_of_interrupts_at_any_moment_lose_nothing_and_mix_up_nothing(make: Any) -> None:
    handler = Interrupts()
    with interrupts_from_outside(handler, 0.0005, 0.003):
        manager = make()
        handler.is_armed = True
        use_until_interrupted(manager, handler, 80)


def use_until_interrupted(manager: EnvManager, handler: Interrupts, n_times: int) -> None:
    books = Books(manager)
    books.reset()
    while handler.n_raised < n_times:
        try:
            books.use()
        except EnvRaised as error:  # an environment in this process, in the middle of its step
            assert error.type_name == "KeyboardInterrupt"  # noqa: PT017
            books.reset()
    thread = threading.Thread(target=manager.stats)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "somebody kept the lock"
    repeated(manager.close)
