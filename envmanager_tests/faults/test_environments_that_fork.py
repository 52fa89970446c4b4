"""An environment may fork. What it forks is never the worker: it answers nothing, and ends when its work is done."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envmanager import SubprocessEnvManager, Wait, WorkerDied
from envmanager.testing import FakeEnvironment
from envmanager_tests.faults import scripts_of_workers
from envmanager_tests.faults.scripts import LONG_S, alive, pids_of, program, started, until, until_gone
from envmanager_tests.start_methods import MARKED_START_METHODS, native_only

pytestmark = pytest.mark.usefixtures("nothing_is_left")
every_start_method = pytest.mark.parametrize("start_method", MARKED_START_METHODS)
N_STEPS = 12


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raise_an_error() -> None:
    raise ValueError("of the fork")


ENDINGS: dict[str, tuple[Callable[[], Any], int]] = {
    "returns": (lambda: None, 0),
    "raises": (raise_an_error, 1),
    "sys.exit()": (sys.exit, 0),
    "sys.exit(3)": (lambda: sys.exit(3), 3),
    "sys.exit(text)": (lambda: sys.exit("of the fork"), 1),
    "os._exit(5)": (lambda: os._exit(5), 5),
    "another program": (lambda: os.execvp("sh", ["sh", "-c", "exit 6"]), 6),
    "a signal": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
}
PLACES = ("constructor", "reset", "step", "call")


class Forks(FakeEnvironment):
    """Forks once, at a place of its code; the fork ends in some way."""

    def __init__(self, place: str, end: Callable[[], Any]) -> None:
        super().__init__()
        self._place, self._end = place, end
        self._forked: int | None = None
        self._come_to("constructor")

    def _come_to(self, place: str) -> None:
        if place == self._place and self._forked is None:
            self._forked = os.fork()
            if self._forked == 0:
                self._end()

    def reset(self, **arguments: Any) -> Any:
        self._come_to("reset")
        return super().reset(**arguments)

    def step(self, taken: Any) -> Any:
        if self._n_steps == 2:
            self._come_to("step")
        return super().step(taken)

    def act(self) -> None:
        self._come_to("call")

    def exit_code(self) -> int:
        assert self._forked
        return exit_code(self._forked)


def step_numbers(manager: SubprocessEnvManager) -> list[int]:
    """The numbers that the steps of the first environment give themselves."""
    infos = [manager.step(Wait.all()) for _ in range(N_STEPS)]
    return [int(each[0].current["default"].obs[0, 1]) for each in infos]


@every_start_method
@pytest.mark.sample(r"returns-step|raises-constructor|os\._exit.*reset|another program-call")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_fork_takes_no_steps_and_ends_as_a_script_would(
    start_method: Any, place: str, ending: str, tmp_path: Path
) -> None:
    end, expected = ENDINGS[ending]
    with started(lambda: Forks(place, end), 1, start_method=start_method, log_dir=str(tmp_path)) as manager:
        manager.reset()
        manager.call("act")
        worker = pids_of(manager)

        assert step_numbers(manager) == [*range(1, N_STEPS + 1)]
        assert manager.call("exit_code") == [expected]
        assert pids_of(manager) == worker
        stats = manager.stats()
        assert (stats.restarts, stats.late_replies) == (0, 0)
    text = (tmp_path / "worker-0-0.log").read_text()
    assert ("of the fork" in text) == (ending in ("raises", "sys.exit(text)"))
    assert ("Traceback" in text) == (ending == "raises")


@every_start_method
@pytest.mark.sample("returns")
@pytest.mark.parametrize("ending", ["returns", "raises", "sys.exit(3)"])
def test_a_fork_made_while_the_environment_closes_does_not_end_the_worker(
    start_method: Any, ending: str, tmp_path: Path
) -> None:
    end, expected = ENDINGS[ending]

    class ForksAtItsEnd(FakeEnvironment):
        def close(self) -> None:
            fork = os.fork()
            if fork == 0:
                end()
            else:
                (tmp_path / "exit code").write_text(str(exit_code(fork)))

    with started(ForksAtItsEnd, 1, start_method=start_method) as manager:
        manager.reset()
    assert (tmp_path / "exit code").read_text() == str(expected)


def test_forks_of_forks_end_too(tmp_path: Path) -> None:
    class ForksTwice(FakeEnvironment):
        def step(self, taken: Any) -> Any:
            if self._n_steps == 2:
                first = os.fork()
                second = os.fork()
                if second:
                    (tmp_path / f"{os.getpid()}").write_text(str(exit_code(second)))
                if first and second:
                    (tmp_path / "first").write_text(str(exit_code(first)))
            return super().step(taken)

    with started(ForksTwice, 1) as manager:
        manager.reset()
        assert step_numbers(manager) == [*range(1, N_STEPS + 1)]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["0"] * 3


class Counted(gymnasium.Env):  # type: ignore[misc]
    """Notes who steps it. The first of them forks in its third step."""

    number_at = 0
    observation_space = gymnasium.spaces.Box(-1, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, env_id: int, notes: Path) -> None:
        self._env_id, self._notes, self._n_steps = env_id, notes, 0

    def _note(self, what: str) -> None:
        with (self._notes / f"{what} {self._env_id}").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._note("step")
        self._n_steps += 1
        if self._env_id == 0 and self._n_steps == 3:
            fork = os.fork()
            if fork:
                assert exit_code(fork) == 0
        return np.full(1, self._n_steps, np.float32), 0.0, False, False, {}

    def close(self) -> None:
        self._note("close")
        if self._env_id == 0:
            fork = os.fork()
            if fork:
                assert exit_code(fork) == 0


class CountedFake(FakeEnvironment):
    """The same for another group of environments."""

    number_at = 1

    def __init__(self, env_id: int, notes: Path) -> None:
        super().__init__()
        self._env = Counted(env_id, notes)

    def step(self, taken: Any) -> Any:
        self._env.step(0)
        return super().step(taken)

    def close(self) -> None:
        self._env.close()


@pytest.mark.parametrize("kind", [Counted, CountedFake])
def test_a_fork_of_one_of_a_workers_environments_ends_and_the_worker_steps_all(kind: Any, tmp_path: Path) -> None:
    with started(lambda context: kind(context.env_id, tmp_path), 3, n_workers=1) as manager:
        manager.reset()
        worker = str(pids_of(manager)[0])
        for number in range(1, N_STEPS + 1):
            (info,) = manager.step(Wait.all())
            assert info.current["default"].obs[:, kind.number_at].tolist() == [number] * 3
    for env_id in range(3):
        assert (tmp_path / f"step {env_id}").read_text().split().count(worker) == N_STEPS
        assert (tmp_path / f"close {env_id}").read_text().split().count(worker) == 1


def test_a_factory_that_forks_and_raises_in_the_fork_closes_nothing_there(tmp_path: Path) -> None:
    def make(context: Any) -> Any:
        if context.env_id == 1 and os.fork() == 0:
            sys.exit(0)
        return Counted(context.env_id, tmp_path)

    with started(make, 2, n_workers=1) as manager:
        manager.reset()
        worker = str(pids_of(manager)[0])
    assert (tmp_path / "close 0").read_text().split() == [worker]


class Late(Counted):
    """Its fork returns an observation only when it is told to."""

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        if self._n_steps == 1:
            self._told, self._tell = os.pipe()
            self._fork = os.fork()
            if self._fork == 0:
                os.read(self._told, 1)
                return np.full(1, 1e5, np.float32), 7.0, True, True, {}
        return np.full(1, self._n_steps, np.float32), 0.0, False, False, {}

    def tell(self) -> int:
        os.write(self._tell, b"x")
        return exit_code(self._fork)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("zero_copy", [False, True])
def test_what_a_fork_returns_is_not_written_into_shared_memory(zero_copy: bool, tmp_path: Path) -> None:
    with started(lambda context: Late(context.env_id, tmp_path), 1, zero_copy=zero_copy) as manager:
        manager.reset()
        (info,) = manager.step(Wait.all())
        assert manager.call("tell") == [0]
        steps = info.current["default"]
        assert (float(steps.obs[0, 0]), float(steps.reward[0]), bool(steps.truncated[0])) == (1.0, 0.0, False)
        (info,) = manager.step(Wait.all())
        assert float(info.current["default"].obs[0, 0]) == 2.0


# What is in order.


def square_of(number: int) -> int:
    return number * number


class Delegates(FakeEnvironment):
    """Has others work for it."""

    def by_process(self) -> list[int]:
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        process = context.Process(target=lambda: results.put(square_of(4)))
        process.start()
        process.join()
        return [results.get(), process.exitcode or 0]

    def by_pool(self) -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(square_of, range(3))

    def by_preparation(self) -> list[int]:
        done = subprocess.run(["echo", "7"], preexec_fn=os.getpid, capture_output=True, check=True)
        return [int(done.stdout)]


@every_start_method
@pytest.mark.parametrize(
    ("how", "expected"), [("by_process", [16, 0]), ("by_pool", [0, 1, 4]), ("by_preparation", [7])]
)
def test_environments_may_have_forks_work_for_them(start_method: Any, how: str, expected: list[int]) -> None:
    with started(Delegates, 1, start_method=start_method) as manager:
        manager.reset()
        assert manager.call(how) == [expected]
        assert step_numbers(manager) == [*range(1, N_STEPS + 1)]


class Simulates(FakeEnvironment):
    """Its fork lives on."""

    def simulator(self) -> int:
        """Its pid, once it is there."""
        there, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(say, b"x")
            time.sleep(LONG_S)
            os._exit(0)
        os.read(there, 1)
        os.close(there)
        os.close(say)
        return pid


@every_start_method
def test_a_fork_that_lives_on_ends_with_its_worker(start_method: Any) -> None:
    with started(Simulates, 2, start_method=start_method) as manager:
        manager.reset()
        first, second = manager.call("simulator")
        manager.step(Wait.all())
        os.kill(pids_of(manager)[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            manager.step(Wait.all())
        until_gone([first])
        assert alive(second)
    until_gone([second])


@every_start_method
@pytest.mark.parametrize("how", ["kernel", "thread"])
def test_forks_go_with_a_trainer_that_is_killed(start_method: str, how: str) -> None:
    environ = {} if how == "kernel" else {"ENVMANAGER_LIFELINE": how}
    with program(scripts_of_workers.train_with_forked_simulators, start_method, **environ) as trainer:
        trainer.announced("waiting")
        simulators = [int(pid) for (pid,) in trainer.announced("simulator", 2)]
        assert set(simulators) <= trainer.family().keys()

        trainer.kill()

        trainer.until_all_gone()


@native_only
@every_start_method
def test_a_fork_holds_no_descriptor_of_the_transport(start_method: Any) -> None:
    with started(Simulates, 1, start_method=start_method) as manager:
        manager.reset()
        (simulator,) = manager.call("simulator")
        workers, forks = (
            {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()} for pid in (*pids_of(manager), simulator)
        )
        kinds = sorted(name.partition(":")[0] for name in workers - forks)
        assert kinds == ["/memfd", "/memfd", "pipe", "socket"]  # memory, crash reports, step queue, connection


class HasACrashingFork(FakeEnvironment):
    """Its fork crashes, and then it ends without a word."""

    def crash(self) -> int:
        fork = os.fork()
        if fork == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        return exit_code(fork)

    def step(self, taken: Any) -> Any:
        os._exit(3)


def test_the_crash_of_a_fork_is_not_told_as_the_workers(tmp_path: Path) -> None:
    with started(HasACrashingFork, 1) as manager:
        manager.reset()
        assert manager.call("crash") == [-signal.SIGSEGV]
        with pytest.raises(WorkerDied) as raised:
            manager.step(Wait.all())
    assert (raised.value.exit, raised.value.output) == ("EXIT(3)", "")


# At any moment.


class ForksInAThread(FakeEnvironment):
    """A thread forks all the time, while the worker writes large answers; what it forks returns."""

    def __init__(self) -> None:
        super().__init__()
        self._codes: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._fork_on)
        self._thread.start()

    def _fork_on(self) -> None:
        while not self._is_over.is_set():
            fork = os.fork()
            if fork == 0:
                return
            self._codes.append(exit_code(fork))

    def step(self, taken: Any) -> Any:
        results = super().step(taken)
        results["default"].info = [{"number": self._n_steps, "large": b"x" * 300_000}]
        return results

    def finish(self) -> tuple[int, set[int]]:
        self._is_over.set()
        self._thread.join()
        return len(self._codes), set(self._codes)


@every_start_method
def test_a_thread_may_fork_while_the_worker_answers(start_method: Any) -> None:
    with started(ForksInAThread, 1, start_method=start_method, infos=True) as manager:
        manager.reset()
        for number in range(1, 60):
            (info,) = manager.step(Wait.all())
            steps = info.current["default"]
            assert steps.info is not None
            assert (int(steps.obs[0, 1]), steps.info[0]["number"]) == (number, number)
        ((n_forks, codes),) = manager.call("finish")
        assert n_forks > 0
        assert codes == {0}
        assert manager.stats().late_replies == 0


class ForksInAHandler(FakeEnvironment):
    """Forks when a signal comes, perhaps while nothing is asked of the worker."""

    def __init__(self) -> None:
        super().__init__()
        self._fork = 0
        signal.signal(signal.SIGUSR1, self._handle)

    def _handle(self, *_: Any) -> None:
        self._fork = os.fork()

    def fork_ended_with(self) -> int | None:
        return exit_code(self._fork) if self._fork else None


@every_start_method
def test_a_signal_handler_may_fork_while_nothing_is_asked_of_the_worker(start_method: Any) -> None:
    with started(ForksInAHandler, 1, start_method=start_method) as manager:
        manager.reset()
        os.kill(pids_of(manager)[0], signal.SIGUSR1)
        assert until(lambda: manager.call("fork_ended_with") == [0], "the end of the fork")
        assert step_numbers(manager) == [*range(1, N_STEPS + 1)]
