"""Calls where two things meet: a close while a policy decides, a fork, a call inside a call, memory that is short."""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvContext,
    EnvManager,
    ManagerClosed,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
)
from envmanager.hosts.poller import Poller
from envmanager.testing import EchoEnvironment, FakeEnvironment
from envmanager.testing.contract import NumberedActions
from envmanager_tests.envs import EchoGym
from envmanager_tests.faults.scripts import program
from envmanager_tests.in_a_thread import begun_in_a_thread, lines_of, while_held_at
from envmanager_tests.process import odd_moments

PATIENT_S = 60.0
every_kind = pytest.mark.parametrize("make", [SimpleEnvManager, AsyncioEnvManager, SubprocessEnvManager])


class Deciding:
    """A policy that calls ``during`` while it decides, once it is set."""

    def __init__(self) -> None:
        self.during: Callable[[], Any] | None = None
        self._actions = NumberedActions()

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        if self.during is not None:
            during, self.during = self.during, None
            during()
        return self._actions.get_action(steps)


def ready_to_decide(make: Any, n_envs: int = 2, **options: Any) -> tuple[EnvManager, Deciding]:
    manager, policy = make(EchoEnvironment, n_envs, **options), Deciding()
    manager.set_policy("default", policy)
    manager.reset()
    manager.step(Wait.all())
    return manager, policy


@contextmanager
def files_of_the_user(n: int = 40) -> Iterator[None]:
    """Open files, which take the lowest numbers that are free; nobody else may write into them."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(n)]
        yield
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * n


# A close while a call is on its way.


@pytest.mark.parametrize("line", lines_of(Poller.wake))
def test_of_two_threads_that_close_none_writes_into_a_file_of_the_program(line: int) -> None:
    manager = SubprocessEnvManager(FakeEnvironment)
    with ExitStack() as stack, while_held_at(line, Poller.wake, manager.close, manager.close):
        stack.enter_context(files_of_the_user())


def test_a_file_of_a_forked_child_stays_open_when_the_child_frees_the_manager() -> None:
    manager, end = SubprocessEnvManager(FakeEnvironment), 1
    child = os.fork()
    if child == 0:
        try:
            with files_of_the_user():
                del manager
                gc.collect()
            end = 0
        finally:
            os._exit(end)
    _, status = os.waitpid(child, 0)
    manager.close()
    assert status == 0


@every_kind
def test_what_a_policy_decides_after_a_close_in_another_thread_goes_nowhere(make: Any) -> None:
    manager, policy = ready_to_decide(make)
    decides, closed = threading.Event(), threading.Event()

    def while_another_closes() -> None:
        decides.set()
        assert closed.wait(PATIENT_S)

    policy.during = while_another_closes
    thread, raised = begun_in_a_thread(lambda: manager.step(Wait.all()))
    assert decides.wait(PATIENT_S)
    manager.close()
    with files_of_the_user():
        closed.set()
        thread.join(PATIENT_S)
        assert [type(error) for error in raised] == [ManagerClosed]


@every_kind
def test_a_policy_may_close_its_manager_which_ends_the_step(make: Any) -> None:
    manager, policy = ready_to_decide(make)
    with ExitStack() as files:

        def close() -> None:
            manager.close()
            files.enter_context(files_of_the_user())

        policy.during = close
        with pytest.raises(ManagerClosed):
            manager.step(Wait.all())
        manager.close()


def test_a_close_that_is_repeated_writes_into_nobodys_file() -> None:
    manager, _ = ready_to_decide(SubprocessEnvManager)
    manager.close()
    with files_of_the_user():
        manager.close()


def test_a_worker_that_was_given_back_is_sent_nothing() -> None:
    manager, _ = ready_to_decide(SubprocessEnvManager)
    (worker, *_) = manager.env_workers
    manager.close()
    with files_of_the_user():
        worker.send("call", ("who", ("",), [0]))


class Lingers(EchoEnvironment):
    """Stays in its first step until it may leave, and writes down what happens to it. It lives in this process."""

    arrives, may_leave = threading.Event(), threading.Event()
    order: list[str]

    def step(self, actions: Any) -> Any:
        if not self.arrives.is_set():
            self.arrives.set()
            assert self.may_leave.wait(PATIENT_S)
            self.order.append("left its step")
        return super().step(actions)

    def close(self) -> None:
        self.order.append("closed")


@pytest.mark.parametrize(
    "make",
    [lambda: SimpleEnvManager(Lingers), lambda: SubprocessEnvManager([EchoEnvironment, Lingers], 2, local_envs=1)],
)
def test_an_environment_in_this_process_is_closed_when_it_has_left_its_step(make: Any) -> None:
    Lingers.arrives, Lingers.may_leave, Lingers.order = threading.Event(), threading.Event(), []
    manager = make()
    manager.set_policy("default", NumberedActions())
    manager.reset()
    thread, raised = begun_in_a_thread(lambda: manager.step(Wait.all()))
    assert Lingers.arrives.wait(PATIENT_S)
    manager.close()
    assert Lingers.order == []
    Lingers.may_leave.set()
    thread.join(PATIENT_S)

    assert Lingers.order == ["left its step", "closed"]
    assert [type(error) for error in raised] == [ManagerClosed]


# A fork.


def what_a_child_finds(function: Callable[[], Any]) -> str:
    """The name of what ``function`` raises in a forked child, or "nothing"."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = "nothing"
        try:
            function()
        except BaseException as error:
            found = type(error).__name__
        os.write(write_fd, found.encode())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd) as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return found


CALLS: dict[str, Callable[[EnvManager], Any]] = {
    "reset": lambda manager: manager.reset(),
    "step": lambda manager: manager.step(),
    "send": lambda manager: manager.send(np.full(2, 7), [0, 1]),
    "recv": lambda manager: manager.recv(),
    "call": lambda manager: manager.call("who", ""),
    "get_attr": lambda manager: manager.get_attr("label"),
    "set_attr": lambda manager: manager.set_attr("label", ["x", "y"]),
    "render": lambda manager: manager.render(),
    "stats": lambda manager: manager.stats(),
    "set_policy": lambda manager: manager.set_policy("default", NumberedActions()),
}


@every_kind
def test_a_forked_child_is_refused_every_call_and_changes_nothing(make: Any) -> None:
    with make(EchoEnvironment, 2) as manager:
        manager.reset()
        manager.recv(Wait.all())
        for step in range(1, 4):
            manager.send(np.full(2, step), [0, 1])
            assert {name: what_a_child_finds(lambda call=call: call(manager)) for name, call in CALLS.items()} == (
                dict.fromkeys(CALLS, "UsageError")
            )
            assert manager.recv(Wait.all()).obs[:, 3].tolist() == [step, step]


@every_kind
def test_a_forked_child_may_leave_the_with_block(make: Any) -> None:
    def leave() -> None:
        with files_of_the_user():
            manager.__exit__(None, None, None)
            manager.close()

    with make(EchoEnvironment, 2) as manager:
        manager.reset()
        assert what_a_child_finds(leave) == "nothing"
        manager.reset()


# A call inside a call.


@every_kind
@pytest.mark.parametrize("move", ["reset", "step", "send", "recv"])
def test_a_policy_may_not_move_its_manager(make: Any, move: str) -> None:
    manager, policy = ready_to_decide(make)
    refused: list[Exception] = []

    def try_to_move() -> None:
        try:
            CALLS[move](manager)
        except UsageError as error:
            refused.append(error)

    with manager:
        policy.during = try_to_move
        (made, *_) = [info.transitions() for info in manager.step(Wait.all())]
        assert f"{move}() was called inside step()" in str(refused[0])
        assert made is not None
        assert (made.next_obs[:, 3] == made.action).all()


@every_kind
def test_a_policy_may_ask_the_environments(make: Any) -> None:
    manager, policy = ready_to_decide(make)
    said: list[Any] = []
    with manager:
        policy.during = lambda: said.extend(manager.call("who", "is"))
        for info in manager.step(Wait.all()):
            made = info.transitions()
            assert made is not None
            assert (made.next_obs[:, 3] == made.action).all()
        assert len(said) == 2


def test_an_environment_may_not_move_the_manager_that_steps_it() -> None:
    class Steps(EchoGym):
        def step(self, action: Any) -> Any:
            with pytest.raises(UsageError, match=r"step\(\) was called inside step\(\)"):
                manager.step()
            return super().step(action)

    with SimpleEnvManager(Steps, 1) as manager:
        manager.set_policy("default", NumberedActions())
        manager.reset()
        (info,) = manager.step()
        assert info.current["default"].obs[0, 3] == 1


class DiesWhenCalled(FakeEnvironment):
    def __init__(self, context: EnvContext) -> None:
        super().__init__()
        self._dies = context.env_id == 0 and context.generation == 0

    def die(self) -> None:
        if self._dies:
            os._exit(3)


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_worker_that_dies_in_a_call_of_the_policy_is_sent_no_action(max_restarts: int) -> None:
    policy = Deciding()
    with SubprocessEnvManager(
        DiesWhenCalled, 2, restarts=RestartPolicy(max_restarts=max_restarts), timeouts=Timeouts(step_s=PATIENT_S)
    ) as manager:
        manager.set_policy("default", policy)
        manager.reset()

        def call() -> None:
            with pytest.raises(WorkerDied):
                manager.call("die")

        policy.during = call
        infos = manager.step(Wait.all())
        while max_restarts and not any(info.lost for info in infos):
            infos += manager.step(Wait.all())

        assert {info.worker_id for info in infos} == ({0, 1} if max_restarts else {1})
        assert manager.stats().steps_lost == 1
        assert len(manager.step(Wait.all())) == (2 if max_restarts else 1)


# Memory that is short.


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="memory cannot be limited here")
@pytest.mark.parametrize(("kind", "use"), [("simple", "step"), ("subprocess", "recv")])
def test_what_could_not_be_copied_for_want_of_memory_is_handed_out_by_the_next_call(kind: str, use: str) -> None:
    with program(odd_moments.step_without_memory, kind, use) as trainer:
        assert trainer.announced("refused") == [["MemoryError"]]
        assert trainer.announced("delivered") == [["2", "True"]]
        assert trainer.announced("continued") == [["3", "True"]]
        assert (trainer.ended(), trainer.errors()) == (0, "")
