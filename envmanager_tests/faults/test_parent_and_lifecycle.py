"""Cases 28, 38, 39, 41, 42, 44 and 45: the clock, Ctrl-C, ends, closing, where managers are made, what workers hold.

What other modules show of them:

==== ===========================================================================================================
case shown by
==== ===========================================================================================================
38   ``process/test_cli.py``: a Ctrl-C or SIGTERM to the command's group. Here: a user's script, and while starting
39   ``process/test_interrupts.py``: in step, reset, send, recv, call and close. Here: in the constructor
40   ``test_trainer_death.py``
41   ``test_trainer_death.py``: however a trainer ends that did not close. Here: garbage, ``with``, forked children
42   ``process/test_failures.py``: ``close_s`` with a worker that holds the GIL. Here: all else
44   the suite itself runs under pytest-xdist (``make test``). Here: threads, daemons, workers
==== ===========================================================================================================
"""

from __future__ import annotations

import ast
import gc
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import envmanager
from envmanager import (
    EnvManagerError,
    ManagerClosed,
    SubprocessEnvManager,
    Timeouts,
    UsageError,
    Wait,
    WorkerError,
    WorkerTimedOut,
)
from envmanager.testing import Die, FakeEnvironment, Raise, Sleep, nothing_left_behind
from envmanager.testing.leaks import SLACK_S, SOON_S
from envmanager_tests.faults import scripts
from envmanager_tests.faults.scripts import (
    actions,
    living,
    pids_of,
    program,
    started,
    until,
    until_gone,
)
from envmanager_tests.in_a_thread import begun_in_a_thread
from envmanager_tests.start_methods import IS_PORTABLE, MARKED_START_METHODS, MEMORY, native_only

pytestmark = pytest.mark.usefixtures("nothing_is_left")
every_start_method = pytest.mark.parametrize("start_method", MARKED_START_METHODS)
untraced = pytest.mark.untraced


# Case 28.

PACKAGE = Path(envmanager.__file__).parent
ALLOWED_OF_TIME = {"monotonic", "perf_counter", "perf_counter_ns", "sleep", "process_time", "process_time_ns"}


def uses_of_clocks(path: Path) -> set[str]:
    """``time.x`` for every x of the module time, and ``datetime``, that the file uses."""
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            used.add(f"time.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            used |= {alias.asname or alias.name for alias in node.names if alias.name == "datetime"}
            used |= {f"time as {alias.asname}" for alias in node.names if alias.name == "time" and alias.asname}
    return used


def test_case_28_the_library_never_looks_at_the_wall_clock() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if "cli" not in path.relative_to(PACKAGE).parts]
    modules.remove(PACKAGE / "training" / "runs" / "writers.py")  # MLflow keeps with each value when it was seen
    modules.remove(PACKAGE / "recording" / "recorder.py")  # a recording keeps with each response when it came
    used = {path.relative_to(PACKAGE).as_posix(): uses_of_clocks(path) for path in modules}

    assert "time.monotonic" in set.union(*used.values()), "the check sees nothing"
    allowed = {f"time.{name}" for name in ALLOWED_OF_TIME}
    assert {name: uses - allowed for name, uses in used.items() if uses - allowed} == {}


def test_case_28_a_wall_clock_that_jumps_by_days_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jumping = scripts.jumping_clock()
    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    assert abs(time.time() - time.time()) > scripts.DAY_S
    timeouts = Timeouts(step_s=3.0, close_s=1.0)
    with started(scripts.JumpingClock, 2, timeouts=timeouts) as manager:
        manager.reset()
        assert [len(manager.step(Wait.all())) for _ in range(40)] == [2] * 40
        before = time.monotonic()
        assert manager.step(Wait.all(timeout_s=0.1)) == []
        assert 0.1 <= time.monotonic() - before < 3.0
        with pytest.raises(WorkerTimedOut):
            manager.step(Wait.all())
        assert 3.0 <= time.monotonic() - before < 3.0 + SLACK_S
    assert time.monotonic() - before < 3.0 + 1.0 + SLACK_S


def test_case_28_a_step_that_ended_while_the_trainer_was_suspended_is_no_time_out() -> None:
    with program(scripts.train_across_a_suspension) as trainer:
        workers = [int(pid) for (pid,) in trainer.announced("stepping", 2)]
        os.kill(trainer.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        until(lambda: all(is_idle(pid) for pid in workers), "both workers wait for a command")
        until(lambda: time.monotonic() - stopped_at > scripts.SHORTER_THAN_THE_SUSPENSION_S + 0.2, "longer than step_s")
        os.kill(trainer.pid, signal.SIGCONT)

        assert trainer.announced("received") == [["2"]]
        assert (trainer.ended(), trainer.errors()) == (0, "")


def is_idle(pid: int) -> bool:
    """Whether a process sleeps and has slept for a while: two looks find that it did not run in between."""

    def switches() -> tuple[str, ...]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return tuple(line for line in lines if "ctxt_switches" in line or line.startswith("State:"))

    before = switches()
    threading.Event().wait(0.4)  # longer than its step
    return before == switches() and any("sleeping" in line for line in before)


# Cases 38 and 39.


@untraced
@every_start_method
@pytest.mark.parametrize(
    ("train", "announcement"),
    [
        (scripts.train_for_ever, "stepping"),
        pytest.param(scripts.train_with_interrupts_at_the_start, "started", marks=native_only),
    ],
    ids=["while stepping", "before workers are set up"],
)
def test_case_38_a_ctrl_c_to_the_group_is_one_interrupt_and_no_word_from_workers(
    start_method: str, train: Callable[[Any], None], announcement: str
) -> None:
    with program(train, start_method) as trainer:
        trainer.announced(announcement, 2)

        os.killpg(trainer.pid, signal.SIGINT)

        assert trainer.ended(within_s=SLACK_S) == -signal.SIGINT
        trainer.until_all_gone()
        errors = trainer.errors()
        assert (errors.count("Traceback"), errors.count("KeyboardInterrupt")) == (1, 1), errors


@untraced
@every_start_method
def test_case_39_an_interrupt_in_the_constructor_can_be_caught_and_leaves_nothing(
    start_method: Any, tmp_path: Path
) -> None:
    def hangs() -> None:
        (tmp_path / "making").touch()
        time.sleep(600)

    before = set(living())
    interrupt = threading.Thread(target=interrupt_main_thread, args=[(tmp_path / "making").exists])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        SubprocessEnvManager(hangs, 2, start_method=start_method, timeouts=Timeouts(close_s=1.0))
    interrupted_at = time.monotonic()
    interrupt.join()

    until_gone(set(living()) - before)
    assert time.monotonic() - interrupted_at < SLACK_S
    with started(start_method=start_method) as manager:
        manager.reset()
        assert len(manager.step(Wait.all())) == 2


def interrupt_main_thread(when: Callable[[], bool], number: int = signal.SIGINT) -> None:
    until(when, "the moment to interrupt")
    signal.pthread_kill(threading.main_thread().ident or 0, number)


# Case 41.


@every_start_method
def test_case_41_a_forgotten_manager_ends_when_it_is_garbage(start_method: Any) -> None:
    manager = started(start_method=start_method)
    manager.reset()
    manager.step(Wait(timeout_s=0.0))
    workers = pids_of(manager)
    del manager
    gc.collect()
    until_gone(workers)


def test_case_41_an_exception_in_a_with_block_ends_the_workers() -> None:
    workers = []

    def fail() -> None:
        with started() as manager:
            workers.extend(pids_of(manager))
            raise ZeroDivisionError

    with nothing_left_behind(), pytest.raises(ZeroDivisionError):
        fail()
    until_gone(workers)


def test_case_41_a_process_that_the_trainer_forks_neither_stops_the_workers_nor_keeps_them() -> None:
    manager = started(start_method="spawn")
    manager.reset()
    loader = os.fork()
    if loader == 0:
        try:
            manager.close()
            del manager
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(loader, 0)
    assert len(manager.step(Wait.all())) == 2
    workers = pids_of(manager)
    waiting = os.fork()
    if waiting == 0:
        signal.pause()
    try:
        manager.close()
        until_gone(workers)
    finally:
        os.kill(waiting, signal.SIGKILL)
        os.waitpid(waiting, 0)


@every_start_method
def test_case_41_forked_children_that_exit_as_scripts_do_leave_the_workers_alone(start_method: str) -> None:
    with program(scripts.train_while_children_exit, start_method) as trainer:
        assert trainer.announced("stepped") == [["20"]]
        assert trainer.announced("exit", 2) == [["0"], ["0"]]
        assert (trainer.ended(), trainer.errors()) == (0, "")
        trainer.until_all_gone()


# Case 42.


class HangsIn(FakeEnvironment):
    """Touches a file and does not come back, in the method of that name."""

    def __init__(self, method: str, flag: Path) -> None:
        super().__init__()
        self._method, self._flag = method, flag

    def _perhaps_hang(self, method: str) -> None:
        if method == self._method:
            self._flag.touch()
            time.sleep(600)

    def reset(self, **arguments: Any) -> Any:
        self._perhaps_hang("reset")
        return super().reset(**arguments)

    def step(self, actions: Any) -> Any:
        self._perhaps_hang("step")
        return super().step(actions)

    def think(self) -> None:
        self._perhaps_hang("think")

    def close(self) -> None:
        self._perhaps_hang("close")


@contextmanager
def in_a_thread(function: Callable[[], Any]) -> Iterator[None]:
    """Run ``function`` beside the block; what it raises is raised at the end."""
    thread, raised = begun_in_a_thread(function)
    try:
        yield
    finally:
        thread.join(SOON_S)
    assert not thread.is_alive()
    assert raised == []


@pytest.mark.parametrize("hangs_in", ["nothing", "close"])
def test_case_42_four_threads_may_close_at_once(hangs_in: str, tmp_path: Path) -> None:
    with nothing_left_behind():
        manager = started(lambda: HangsIn(hangs_in, tmp_path / "flag"), timeouts=Timeouts(close_s=1.0))
        manager.reset()
        barrier = threading.Barrier(4)
        errors: list[BaseException] = []

        def close() -> None:
            barrier.wait(SOON_S)
            try:
                manager.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(4)]
        before = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)

        assert time.monotonic() - before < 1.0 + SLACK_S
        assert errors == []
        with pytest.raises(ManagerClosed):
            manager.step()


@every_start_method
def test_case_42_functions_registered_with_atexit_may_close(start_method: str) -> None:
    with program(scripts.train_and_close_at_exit, start_method) as trainer:
        assert trainer.announced("closed")
        assert (trainer.ended(), trainer.errors()) == (0, "")
        trainer.until_all_gone()


def test_case_42_a_manager_that_is_closed_before_its_workers_start_starts_none() -> None:
    class ClosesBefore(SubprocessEnvManager):
        def start(self, host: Any) -> None:
            real = host.make_worker

            def make_worker(worker_id: int) -> Any:
                self.close()
                return real(worker_id)

            host.make_worker = make_worker
            super().start(host)

    with nothing_left_behind(), pytest.raises(EnvManagerError):
        ClosesBefore(FakeEnvironment, 2)


def test_case_42_a_manager_that_is_closed_while_its_workers_start_ends_its_constructor(tmp_path: Path) -> None:
    made: list[SubprocessEnvManager] = []

    class Remembered(SubprocessEnvManager):
        def start(self, host: Any) -> None:
            made.append(self)
            super().start(host)

    def hangs() -> None:
        (tmp_path / "making").touch()
        time.sleep(600)

    def close() -> None:
        until((tmp_path / "making").exists, "a worker makes its environment")
        made[0].close()

    with nothing_left_behind():
        before = time.monotonic()
        with in_a_thread(close), pytest.raises(EnvManagerError):
            Remembered(hangs, 2, timeouts=Timeouts(start_s=SOON_S, close_s=1.0))
        assert time.monotonic() - before < 1.0 + SLACK_S
        made[0].close()
        made.clear()


FAILURES: dict[str, Any] = {
    "died": [Die(3)],
    "killed": [Die(signal_number=signal.SIGKILL)],
    "timed out": [Sleep(600)],
    "raised": [Raise(ValueError("no"))],
}


@pytest.mark.parametrize("failure", FAILURES)
def test_case_42_after_a_failure_close_works_any_number_of_times(failure: str) -> None:
    def make() -> FakeEnvironment:
        return FakeEnvironment(FAILURES[failure])

    with nothing_left_behind():
        manager = started(make, timeouts=Timeouts(step_s=0.5, close_s=1.0))
        manager.reset()
        with pytest.raises(WorkerError):
            manager.step(Wait.all())
        before = time.monotonic()
        for _ in range(3):
            manager.close()
        assert time.monotonic() - before < 1.0 + SLACK_S


def block_in_step(manager: SubprocessEnvManager) -> None:
    manager.reset()
    manager.step()


def block_in_recv(manager: SubprocessEnvManager) -> None:
    manager.reset()
    manager.send(actions(2), [0, 1])
    manager.recv()


def block_in_reset(manager: SubprocessEnvManager) -> None:
    manager.reset()


def block_in_reset_behind_a_step(manager: SubprocessEnvManager) -> None:
    manager.reset()
    assert manager.step(Wait(timeout_s=0.0)) == []
    manager.reset()


def block_in_call(manager: SubprocessEnvManager) -> None:
    manager.call("think")


BLOCKING = {
    "step": ("step", block_in_step),
    "recv": ("step", block_in_recv),
    "reset": ("reset", block_in_reset),
    "reset behind a step": ("step", block_in_reset_behind_a_step),
    "call": ("think", block_in_call),
}
PATIENT = Timeouts(reset_s=SOON_S, step_s=SOON_S, call_s=SOON_S, close_s=1.0)


@pytest.mark.parametrize("blocking", BLOCKING)
def test_case_42_a_close_in_another_thread_ends_a_call_that_waits(blocking: str, tmp_path: Path) -> None:
    hangs_in, block = BLOCKING[blocking]
    flag = tmp_path / "hanging"
    with nothing_left_behind():
        manager = started(lambda: HangsIn(hangs_in, flag), timeouts=PATIENT)

        def close() -> None:
            until(flag.exists, "the environment hangs")
            manager.close()

        before = time.monotonic()
        with in_a_thread(close), pytest.raises(ManagerClosed):
            block(manager)
        assert time.monotonic() - before < 1.0 + SLACK_S
        manager.close()
        with pytest.raises(ManagerClosed):
            manager.step()


@untraced
@pytest.mark.parametrize("blocking", BLOCKING)
def test_case_42_a_close_in_a_signal_handler_ends_a_call_that_waits(blocking: str, tmp_path: Path) -> None:
    hangs_in, block = BLOCKING[blocking]
    flag = tmp_path / "hanging"
    with nothing_left_behind():
        manager = started(lambda: HangsIn(hangs_in, flag), timeouts=PATIENT)
        old = signal.signal(signal.SIGUSR1, lambda *_: manager.close())
        try:
            before = time.monotonic()
            stop = lambda: interrupt_main_thread(flag.exists, signal.SIGUSR1)  # noqa: E731
            with in_a_thread(stop), pytest.raises(ManagerClosed):
                block(manager)
            assert time.monotonic() - before < 1.0 + SLACK_S
        finally:
            signal.signal(signal.SIGUSR1, old)
            manager.close()


def test_case_42_a_close_in_another_thread_ends_steps_that_come_thick_and_fast() -> None:
    with nothing_left_behind():
        for _ in range(15):
            manager = started(n_envs=3, timeouts=PATIENT)
            manager.reset()
            stepped = threading.Event()

            def close(manager: Any = manager, stepped: Any = stepped) -> None:
                stepped.wait(SOON_S)
                manager.close()

            before = time.monotonic()
            with in_a_thread(close), pytest.raises(ManagerClosed):  # noqa: PT012
                while True:
                    assert 1 <= len(manager.step()) <= 3
                    stepped.set()
            assert time.monotonic() - before < 1.0 + SLACK_S
            assert not any(map(scripts.alive, pids_of(manager)))


# Case 44.


@every_start_method
def test_case_44_workers_outlive_the_thread_that_made_them(start_method: Any) -> None:
    made: list[SubprocessEnvManager] = []
    thread = threading.Thread(target=lambda: made.append(started(start_method=start_method)))
    thread.start()
    thread.join()
    until(lambda: thread not in threading.enumerate(), "the thread has ended")
    with made.pop() as manager:
        workers = pids_of(manager)
        manager.reset()
        assert [len(manager.step(Wait.all())) for _ in range(10)] == [2] * 10
        assert pids_of(manager) == workers


@every_start_method
def test_case_44_a_daemonic_process_may_have_a_manager(start_method: str) -> None:
    before = set(living())
    spawn = multiprocessing.get_context("spawn")
    daemon = spawn.Process(target=scripts.train_in_a_daemon, args=[start_method], daemon=True)
    daemon.start()
    try:
        daemon.join(SOON_S)
        assert daemon.exitcode == 0
        until_gone(set(living()) - before)
    finally:
        daemon.kill()
        daemon.join()
        daemon.close()


def nested(start_method: Any) -> Any:
    class Nested(FakeEnvironment):
        """An environment that has environments in processes."""

        def __init__(self) -> None:
            super().__init__()
            self._inner = started(start_method=start_method)
            self._inner.reset()

        def step(self, actions: Any) -> Any:
            assert len(self._inner.step(Wait.all())) == 2
            return super().step(actions)

        def inner_pids(self) -> list[int]:
            return pids_of(self._inner)

        def close(self) -> None:
            self._inner.close()

    return Nested


@every_start_method
def test_case_44_a_manager_works_inside_a_worker_of_another(start_method: Any) -> None:
    before = set(living())
    with started(nested(start_method), start_method=start_method) as manager:
        manager.reset()
        assert [len(manager.step(Wait.all())) for _ in range(5)] == [2] * 5
        inner = [pid for pids in manager.call("inner_pids") for pid in pids]
        assert len(set(inner)) == 4
        assert set(inner) <= set(living())
    until_gone(set(living()) - before)


@every_start_method
def test_case_44_the_workers_of_a_worker_that_is_killed_die_with_it(start_method: Any) -> None:
    with started(nested(start_method), 1, start_method=start_method) as manager:
        (inner,) = manager.call("inner_pids")
        (worker,) = pids_of(manager)
        family = {worker, *scripts.descendants(worker)}
        assert set(inner) <= family
        os.kill(worker, signal.SIGKILL)
        until_gone(family)


# Case 45.


@native_only
@every_start_method
def test_case_45_workers_have_none_of_the_trainers_threads(start_method: Any) -> None:
    class Child(FakeEnvironment):
        def threads(self) -> list[str]:
            return [thread.name for thread in threading.enumerate()]

    stop = threading.Event()
    busy = threading.Thread(target=stop.wait, name="busy")  # as torch's or grpc's
    busy.start()
    try:
        with SubprocessEnvManager(Child, 2, start_method=start_method) as manager:
            assert manager.call("threads") == [["MainThread"]] * 2
    finally:
        stop.set()
        busy.join()


WRITE_ONLY = os.O_WRONLY


def open_files(pid: int | str) -> dict[str, set[int]]:
    """What a process holds open: the target of each descriptor, with its access modes."""
    found: dict[str, set[int]] = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            if "memfd" in target:  # all have the same name
                target = f"{target} {os.stat(f'/proc/{pid}/fd/{entry}').st_ino}"
            flags = next(
                line.split()[1]
                for line in Path(f"/proc/{pid}/fdinfo/{entry}").read_text().splitlines()
                if line.startswith("flags:")
            )
            found.setdefault(target, set()).add(int(flags, 8) & os.O_ACCMODE)
    return found


def count(targets: Any, kind: str) -> int:
    return sum(kind in target for target in targets)


@every_start_method
def test_case_45_a_worker_holds_no_descriptor_of_its_siblings_or_of_another_manager(start_method: Any) -> None:
    of_the_user = set(open_files("self"))
    with started(start_method=start_method) as other:
        of_the_other = set(open_files("self")) - of_the_user
        with started(n_envs=3, start_method=start_method) as manager:
            manager.reset()
            held = [
                {target: modes for target, modes in open_files(pid).items() if target not in of_the_user}
                for pid in pids_of(manager)
            ]
            others = [set(open_files(pid)) - of_the_user for pid in pids_of(other)]

    for mine in held:
        assert not mine.keys() & (of_the_other | set().union(*others))
        assert count(mine, MEMORY) == 1
        assert count(mine, "anon_inode") == 0, "pidfds and the epoll are the trainer's"
    shared = set(held[0]) & set(held[1]) & set(held[2])
    pipes = {target for target in shared if "pipe:" in target}
    modes = Counter(frozenset(held[0][pipe]) for pipe in pipes)
    expected = {} if IS_PORTABLE else {frozenset({WRITE_ONLY}): 1}
    assert modes == expected, "the step pipe; the life pipe is the whole program's"
    for one, another in ((0, 1), (0, 2), (1, 2)):
        assert set(held[one]) & set(held[another]) == shared


@every_start_method
def test_case_45_a_simulator_gets_no_descriptor_of_the_library(start_method: Any) -> None:
    class WithSimulator(FakeEnvironment):
        def start(self) -> int:
            return subprocess.Popen(["sleep", "600"], close_fds=False).pid

    of_the_user = set(open_files("self"))
    with started(WithSimulator, 1, start_method=start_method) as manager:
        (simulator,) = manager.call("start")
        (worker,) = pids_of(manager)
        held = set(open_files(worker)) - of_the_user
        of_the_library = (held & set(open_files("self"))) | {target for target in held if "socket:" in target}
        assert count(of_the_library, "pipe:") >= 1
        assert count(of_the_library, MEMORY) >= 1
        assert not of_the_library & set(open_files(simulator))
    until_gone([simulator])


def test_case_44_and_45_a_start_method_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="start_method"):
        SubprocessEnvManager(FakeEnvironment, 1, start_method="thread")  # type: ignore[arg-type]
