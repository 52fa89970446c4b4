"""Cases 19, 35, 46 and 47: memory that is short, shared memory that does not fit, too few descriptors or processes."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ArraySpec,
    BehaviorSpec,
    EnvContext,
    EnvManagerError,
    EnvRaised,
    RestartPolicy,
    RestartsExhausted,
    SubprocessEnvManager,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
    WorkerError,
)
from envmanager.hosts import shared_rows
from envmanager.processes.process_host import ProcessHost
from envmanager.processes.starting import Helper
from envmanager.testing import Die, FakeEnvironment, Step, nothing_left_behind
from envmanager.testing.leaks import SLACK_S, SOON_S
from envmanager_tests.faults import scripts, scripts_of_workers
from envmanager_tests.faults.scripts import NO_RESTARTS, living, program, started
from envmanager_tests.start_methods import IS_PORTABLE, MARKED_START_METHODS, native_only

pytestmark = pytest.mark.usefixtures("nothing_is_left")
every_start_method = pytest.mark.parametrize("start_method", MARKED_START_METHODS)


@contextmanager
def soft_limit(kind: int, limit: int) -> Iterator[None]:
    """The trainer may have no more than that for the time of the block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


# Case 19.


class ShortOfMemory(FakeEnvironment):
    """May have 64 MiB more than it has. The first environment asks for 256 in its third step."""

    def __init__(self, context: EnvContext) -> None:
        super().__init__()
        self._is_greedy = context.env_id == 0
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (64 << 20), resource.RLIM_INFINITY))

    def step(self, actions: Any) -> Any:
        if self._is_greedy and self._n_steps == 2:
            np.ones(256 << 20, np.uint8)
        return super().step(actions)


class LargeInfo(ShortOfMemory):
    """Its info fits into memory once, but not twice, as pickling needs it."""

    def step(self, actions: Any) -> Any:
        results = FakeEnvironment.step(self, actions)
        if self._is_greedy and self._n_steps == 3:
            results["default"].info = [{"picture": bytearray(56 << 20)}]
        return results


@pytest.mark.sample("in the step")
@every_start_method
@pytest.mark.parametrize("environment", [ShortOfMemory, LargeInfo], ids=["in the step", "in pickling its info"])
def test_case_19_memory_that_runs_out_is_the_environments_error_and_its_worker_lives(
    start_method: Any, environment: Any
) -> None:
    with started(environment, start_method=start_method, infos=True) as manager:
        manager.reset()
        workers = scripts.pids_of(manager)
        manager.step(Wait.all())
        manager.step(Wait.all())
        with pytest.raises(EnvRaised) as raised:
            manager.step(Wait.all())

        assert (raised.value.worker_id, raised.value.phase) == (0, "step")
        assert raised.value.type_name.endswith("MemoryError")
        assert "Traceback" in raised.value.remote_traceback
        assert [info.worker_id for info in manager.step(Wait.all())] == [1]
        manager.reset()
        assert len(manager.step(Wait.all())) == 2
        assert scripts.pids_of(manager) == workers


def test_case_19_a_worker_that_was_killed_is_told_with_memory_as_a_possible_cause() -> None:
    def make() -> FakeEnvironment:
        return FakeEnvironment([Step(), Die(signal_number=signal.SIGKILL)])

    with started(make, 1) as manager:
        manager.reset()
        manager.step()
        with pytest.raises(WorkerDied, match="memory") as raised:
            manager.step()
        assert raised.value.exit == "SIGKILL"


# Case 35. test_failures.py has an observation that no machine could hold.


class FourMebibytes(FakeEnvironment):
    """Its observations are large enough to matter."""

    @property
    def behavior_specs(self) -> Any:
        return {"default": BehaviorSpec(ArraySpec((4 << 20,), np.uint8), ArraySpec((), np.int64))}

    def _obs(self, action: int) -> np.ndarray:
        return np.zeros((1, 4 << 20), np.uint8)


@pytest.mark.sample("zero-copy")
@every_start_method
@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero-copy"])
def test_case_35_shared_memory_that_does_not_fit_is_refused_before_it_is_touched(
    start_method: Any, zero_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "available_bytes", lambda: 1 << 20)
    with nothing_left_behind(), pytest.raises(UsageError, match="shared memory") as raised:
        SubprocessEnvManager(FourMebibytes, 2, start_method=start_method, zero_copy=zero_copy)
    assert "1 MiB are free" in str(raised.value)


def test_case_35_shared_memory_that_cannot_be_allocated_though_it_seemed_to_fit_is_an_error_and_no_sigbus() -> None:
    # A file limit is how a full machine can be had without one: the kernel refuses the allocation just so.
    with soft_limit(resource.RLIMIT_FSIZE, 1 << 20), nothing_left_behind():
        with pytest.raises(UsageError, match="shared memory") as raised:
            SubprocessEnvManager(FourMebibytes, 2)
        assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno in (errno.EFBIG, errno.ENOSPC, errno.ENOMEM)


def test_case_35_shared_memory_that_the_trainer_cannot_map_is_an_error_of_the_library() -> None:
    with program(scripts.train_with_little_address_space) as trainer:
        (kinds,) = trainer.announced("error")
        assert (trainer.ended(), trainer.errors()) == (0, "")
        assert EnvManagerError.__name__ in kinds
        trainer.until_all_gone()


def test_case_35_shared_memory_that_a_worker_cannot_map_is_an_error_of_that_worker() -> None:
    class CannotMap(FourMebibytes):
        def __init__(self, context: EnvContext) -> None:
            super().__init__()
            if context.env_id == 1:
                in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 20), resource.RLIM_INFINITY))

    with SubprocessEnvManager(CannotMap, 2, restarts=NO_RESTARTS) as manager:
        with pytest.raises(WorkerError) as raised:
            manager.reset()
        assert raised.value.worker_id == 1
        assert "memory" in str(raised.value).lower()


# Case 46.


def n_open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


@every_start_method
def test_case_46_too_few_descriptors_are_refused_before_anything_starts_with_the_number_needed(
    start_method: Any, tmp_path: Path
) -> None:
    def make(context: EnvContext) -> FakeEnvironment:
        (tmp_path / f"{context.env_id}").touch()
        return FakeEnvironment()

    processes = living()
    too_few = n_open() + 20
    with nothing_left_behind(), soft_limit(resource.RLIMIT_NOFILE, too_few):
        before = time.monotonic()
        with pytest.raises(UsageError, match=r"RLIMIT_NOFILE|open files") as raised:
            SubprocessEnvManager(make, 24, start_method=start_method)
        assert time.monotonic() - before < SLACK_S
        assert living() == processes
    assert not list(tmp_path.iterdir())

    needed = max(int(number) for number in re.findall(r"\d+", str(raised.value)))
    assert needed > too_few
    with soft_limit(resource.RLIMIT_NOFILE, needed), started(make, 24, start_method=start_method) as manager:
        manager.reset()
        assert len(manager.step(Wait.all())) == 24


def test_case_46_environments_of_the_trainers_process_need_no_descriptors() -> None:
    def n_needed(n_workers: int, local_envs: int) -> int:
        with soft_limit(resource.RLIMIT_NOFILE, n_open() + 8), pytest.raises(UsageError) as raised:
            SubprocessEnvManager(FakeEnvironment, 8, n_workers=n_workers, local_envs=local_envs)
        return max(int(number) for number in re.findall(r"\d+", str(raised.value)))

    assert n_needed(n_workers=2, local_envs=4) == n_needed(n_workers=2, local_envs=0)


@every_start_method
def test_case_46_wherever_descriptors_run_out_during_the_start_nothing_is_left(
    start_method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ProcessHost.make_worker

    def make_worker(host: ProcessHost, worker_id: int) -> Any:
        """Another part of the program takes descriptors after the check: some are left for worker 1."""
        if worker_id < 1:
            return real(host, worker_id)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        free = set(range(highest)) - set(map(int, os.listdir("/proc/self/fd")))
        taken = [os.open("/dev/null", os.O_RDONLY) for _ in free]
        try:
            with soft_limit(resource.RLIMIT_NOFILE, max([highest, *taken]) + 1 + n_left):
                return real(host, worker_id)
        finally:
            for fd in taken:
                os.close(fd)

    monkeypatch.setattr(ProcessHost, "make_worker", make_worker)
    n_left, errors = 0, []
    while True:
        with nothing_left_behind():
            try:
                manager = SubprocessEnvManager(
                    FakeEnvironment, 2, start_method=start_method, timeouts=Timeouts(start_s=5.0)
                )
                manager.close()
            except Exception as error:
                errors.append(error)
            else:
                break
        n_left += 1
        assert n_left < 40
    assert n_left > 4
    strangers = {type(error).__name__ for error in errors if not isinstance(error, EnvManagerError)}
    assert strangers == set(), "errors that are not the library's"


@contextmanager
def refusing(calls: set[int], number: int = errno.EAGAIN) -> Iterator[None]:
    """The kernel refuses to start some of the next processes: ``calls``, counted from 0."""
    starter, name = (subprocess, "Popen") if IS_PORTABLE else (Helper, "ask")
    original, counter = getattr(starter, name), itertools.count()

    def refuse(*arguments: Any, **options: Any) -> Any:
        if next(counter) in calls:
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    setattr(starter, name, refuse)
    try:
        yield
    finally:
        setattr(starter, name, original)


@pytest.mark.sample("EAGAIN")
@every_start_method
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM], ids=["EAGAIN", "ENOMEM"])
def test_case_46_when_the_kernel_refuses_the_third_process_the_first_two_are_stopped(
    start_method: Any, number: int
) -> None:
    before = set(living())
    with nothing_left_behind(), refusing({2}, number):
        started_at = time.monotonic()
        with pytest.raises(EnvManagerError, match="worker 2"):
            SubprocessEnvManager(FakeEnvironment, 4, start_method=start_method)
        assert time.monotonic() - started_at < Timeouts().close_s + SLACK_S
        assert set(living()) == before
    with started(start_method=start_method) as manager:
        manager.reset()
        assert len(manager.step(Wait.all())) == 2


@every_start_method
def test_case_46_a_replacement_that_the_kernel_refuses_twice_is_tried_again_while_the_others_go_on(
    start_method: Any,
) -> None:
    restarts = RestartPolicy(max_restarts=5, backoff_s=0.02)
    with started(start_method=start_method, restarts=restarts) as manager:
        manager.reset()
        manager.step(Wait.all())
        descriptors = n_open()
        with refusing({0, 1}):
            os.kill(scripts.pids_of(manager)[0], signal.SIGKILL)
            infos: list[Any] = []
            deadline = time.monotonic() + SOON_S
            while not any(info.lost for info in infos):
                assert time.monotonic() < deadline
                infos += manager.step()
        infos += manager.step(Wait.all())

        assert [info.worker_id for info in infos if info.lost] == [0]
        steps = [float(info.current["default"].obs[0, 1]) for info in infos if info.worker_id == 1]
        assert steps == list(range(2, 2 + len(steps))), "worker 1 noticed something"
        assert manager.stats().restarts == 3
        assert n_open() <= descriptors


@every_start_method
def test_case_46_a_replacement_that_the_kernel_always_refuses_ends_in_an_error_and_the_others_go_on(
    start_method: Any,
) -> None:
    restarts = RestartPolicy(max_restarts=3, backoff_s=0.02)
    with started(start_method=start_method, restarts=restarts) as manager:
        manager.reset()
        manager.step(Wait.all())
        with refusing(set(range(1000))):
            os.kill(scripts.pids_of(manager)[0], signal.SIGKILL)
            deadline = time.monotonic() + SOON_S
            with pytest.raises(RestartsExhausted) as raised:  # noqa: PT012  (any of the calls may be the one)
                while time.monotonic() < deadline:
                    manager.step()

        assert (raised.value.worker_id, raised.value.first.cause) == (0, "SIGKILL")
        assert "start" in raised.value.last.phase
        assert [info.worker_id for info in manager.step(Wait.all())] == [1]
        assert len(manager.reset()) == 2


@native_only
def test_case_46_a_helper_that_runs_out_of_descriptors_is_replaced_and_nobody_notices() -> None:
    with program(scripts.train_across_a_helper_without_descriptors) as trainer:
        assert trainer.announced("stepped") == [["2"]]
        assert trainer.ended() == 0
        trainer.until_all_gone()


@native_only
def test_a_helper_that_is_killed_takes_no_worker_along_and_another_takes_its_place() -> None:
    with program(scripts.train_across_a_killed_helper) as trainer:
        assert trainer.announced("stepped", 2) == [["2"], ["2"]]
        assert trainer.announced("exit") == [["EXIT(?)"]], "only the helper knew how its children end"
        assert (trainer.ended(), trainer.errors()) == (0, "")
        trainer.until_all_gone()


# A machine, or a container, without /proc.


@contextmanager
def without_proc(function: Any, *arguments: Any) -> Iterator[scripts.Program]:
    if os.getuid() != 0:
        pytest.skip("only root can hide /proc")
    with program(function, *arguments) as trainer:
        yield trainer


@every_start_method
def test_without_proc_workers_step_and_are_replaced(start_method: str, tmp_path: Path) -> None:
    with without_proc(scripts_of_workers.train_without_proc, start_method, str(tmp_path)) as trainer:
        assert trainer.announced("stepped") == [["12", "SIGSEGV"]]
        assert trainer.announced("told") == [["True"]], "the end of the log, where the crash is told then"
        assert trainer.ended() == 0
        trainer.until_all_gone()


@every_start_method
def test_without_proc_simulators_end_with_their_workers_and_with_the_trainer(start_method: str, tmp_path: Path) -> None:
    with without_proc(scripts_of_workers.train_simulators_without_proc, start_method, str(tmp_path)) as trainer:
        (first,), _ = trainer.announced("first"), trainer.announced("closed")
        scripts.until_gone(map(int, first))
        assert [path.read_text() for path in tmp_path.iterdir()] == ["a word without an end"] * 2
        (second,) = trainer.announced("second")
        assert {int(pid) for pid in second} <= trainer.family().keys()

        trainer.kill()

        trainer.until_all_gone()


# Case 47; with a hundred workers under load.


@every_start_method
def test_case_47_a_worker_costs_the_trainer_at_most_three_descriptors_or_four(start_method: Any) -> None:
    n_descriptors = []
    for n_envs in (1, 6):
        with started(n_envs=n_envs, start_method=start_method) as manager:
            manager.reset()
            n_descriptors.append(n_open())
    assert n_descriptors[1] - n_descriptors[0] <= 5 * (4 if IS_PORTABLE else 3)
