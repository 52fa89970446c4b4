"""The portable transport on Linux: what is its own. The contracts run over it too, see ``make test-portable``."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    EnvContext,
    RestartPolicy,
    SubprocessEnvManager,
    Timeouts,
    UsageError,
    Wait,
    WorkerDied,
    WorkerTimedOut,
)
from envmanager.hosts import shared_rows
from envmanager.processes import portable
from envmanager.testing import EchoEnvironment, FakeEnvironment
from envmanager.testing.fakes import Die
from envmanager.testing.fault_checks import returns_within
from envmanager.testing.faults import Segfault, faulty
from envmanager.testing.leaks import SLACK_S
from envmanager_tests.faults import scripts
from envmanager_tests.faults.scripts import program, until_gone
from envmanager_tests.faults.scripts_of_workers import mount_in_a_namespace

SUITE = "systems portable faults"

NO_RESTARTS = RestartPolicy(max_restarts=0)


def started(factory: Any = FakeEnvironment, n_envs: int = 2, **options: Any) -> SubprocessEnvManager:
    return SubprocessEnvManager(factory, n_envs, transport="portable", restarts=NO_RESTARTS, **options)


# Options.


def test_the_portable_transport_and_a_forkserver_exclude_each_other() -> None:
    with pytest.raises(UsageError, match='"forkserver" needs transport="native"'):
        started(start_method="forkserver")


def test_the_environment_variable_chooses_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVMANAGER_TRANSPORT", "portable")
    with pytest.raises(UsageError, match='"forkserver" needs transport="native"'):
        SubprocessEnvManager(FakeEnvironment, 1, start_method="forkserver")
    with SubprocessEnvManager(FakeEnvironment, 1, start_method="forkserver", transport="native") as manager:
        assert manager.n_envs == 1
    monkeypatch.setenv("ENVMANAGER_TRANSPORT", "fast")
    with pytest.raises(UsageError, match="ENVMANAGER_TRANSPORT must be 'native' or 'portable', not 'fast'"):
        SubprocessEnvManager(FakeEnvironment, 1)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_native_transport_is_refused_on_another_system(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(UsageError, match='transport="native" needs Linux'):
        SubprocessEnvManager(FakeEnvironment, 1, transport="native")


# The end of the trainer.


@pytest.mark.parametrize("kind", ["idle", "stepping", "simulators"])
def test_workers_and_their_simulators_end_when_the_trainer_is_killed(kind: str) -> None:
    with program(scripts.train_three_of, kind, "spawn", ENVMANAGER_TRANSPORT="portable") as trainer:
        trainer.announced("waiting")
        trainer.announced(kind, 3)

        trainer.kill()

        trainer.until_all_gone()


def test_a_worker_in_native_code_that_holds_the_gil_ends_when_it_releases_it() -> None:
    with program(train_beside_a_short_hold_of_the_gil, ENVMANAGER_TRANSPORT="portable") as trainer:
        ((worker,),) = trainer.announced("gil")
        trainer.kill()
        until_gone([int(worker)], within_s=HOLD_S + SLACK_S)


HOLD_S = 3


class HoldsTheGilForAMoment(FakeEnvironment):
    def step(self, actions: Any) -> Any:
        scripts.announce("gil", os.getpid())
        ctypes.PyDLL(None).sleep(HOLD_S)
        time.sleep(scripts.LONG_S)
        return super().step(actions)


def train_beside_a_short_hold_of_the_gil() -> None:
    manager = SubprocessEnvManager(HoldsTheGilForAMoment, 1)
    manager.reset()
    manager.send(scripts.actions(1), [0])
    manager.recv(Wait.all())


def test_a_fork_of_the_trainer_that_outlives_it_does_not_keep_its_workers() -> None:
    with program(train_beside_a_loader, ENVMANAGER_TRANSPORT="portable") as trainer:
        ((loader,),) = trainer.announced("loader")
        trainer.announced("idle", 2)

        trainer.kill()

        trainer.until_all_gone(but=[int(loader)])
        assert int(loader) in trainer.family()


def train_beside_a_loader() -> None:
    manager = SubprocessEnvManager(scripts.Idle, 2)
    loader = os.fork()
    if loader == 0:
        time.sleep(scripts.LONG_S)
        os._exit(0)
    scripts.announce("loader", loader)
    manager.reset()
    time.sleep(scripts.LONG_S)


# Starts.


def first_worker_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first worker run this code, and never read what to do."""
    python, codes = portable.python, [code]

    def command(executable: str, module: str, function: str) -> list[str]:
        return [executable, "-c", codes.pop()] if codes else python(executable, module, function)

    monkeypatch.setattr(portable, "python", command)


def test_a_factory_of_50_mb_and_a_worker_that_never_reads_delay_no_other_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_worker_runs("import time; time.sleep(600)", monkeypatch)
    ballast, limit_s = os.urandom(50_000_000), 15.0

    def make(context: EnvContext) -> FakeEnvironment:
        assert len(ballast) == 50_000_000
        (tmp_path / str(context.env_id)).write_text(str(time.monotonic()))
        return FakeEnvironment()

    began = time.monotonic()
    with pytest.raises(WorkerTimedOut) as raised, returns_within(limit_s):
        started(make, 3, timeouts=Timeouts(start_s=limit_s, close_s=1.0))

    assert raised.value.worker_id == 0
    made = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert set(made) == {"1", "2"}
    assert max(made.values()) < began + limit_s


def test_a_worker_that_ends_before_it_has_read_what_to_do_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    first_worker_runs("import sys; sys.exit(7)", monkeypatch)
    with pytest.raises(WorkerDied) as raised:
        started(FakeEnvironment, 2)
    assert (raised.value.worker_id, raised.value.exit) == (0, "EXIT(7)")


def test_half_a_response_is_awaited_until_the_deadline_and_harms_no_other_worker() -> None:
    class SendsHalf(EchoEnvironment):
        def __init__(self, context: EnvContext) -> None:
            super().__init__(context)
            self._sends_half = context.env_id == 1 and context.generation == 0

        def step(self, actions: Any) -> Any:
            if self._sends_half:
                for fd in map(int, os.listdir("/proc/self/fd")):
                    try:
                        connection = socket.socket(fileno=os.dup(fd))
                    except OSError:
                        continue
                    with connection:
                        if connection.family == socket.AF_UNIX:
                            connection.send(bytes(20))
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().step(actions)

    with started(SendsHalf, 2, timeouts=Timeouts(step_s=3.0)) as manager:
        manager.reset()
        manager.recv(Wait.all())
        manager.send(np.array([1, 2]), [0, 1])
        assert manager.recv(Wait(min_ready=1)).env_ids.tolist() == [0]
        with pytest.raises(WorkerTimedOut) as raised, returns_within(3.0 + 1.0):
            manager.recv(Wait.all())
        assert raised.value.worker_id == 1
        manager.reset()
        assert manager.recv(Wait.all()).env_ids.tolist() == [0, 1]


@pytest.mark.load
@pytest.mark.timeout(400)
def test_a_hundred_workers_start_step_and_close() -> None:
    with started(EchoEnvironment, 100, timeouts=Timeouts(start_s=300.0, close_s=20.0)) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        for number in range(20):
            manager.send(np.full(100, number), batch.env_ids)
            batch = manager.recv(Wait.all())
            assert (batch.obs[:, 3] == number).all()


# The end of a worker.


KERNEL = tuple(map(int, platform.release().split(".")[:2]))


@pytest.mark.parametrize("how", ["a thread waits for any child", "a handler waits for any child", "SIGCHLD is ignored"])
@pytest.mark.parametrize("end", [Die(3), Die(signal_number=signal.SIGKILL)])
def test_how_a_worker_ended_is_known_to_a_program_that_reaps_its_children_itself(how: str, end: Die) -> None:
    with program(die_in_a_program_that_reaps, how, end.exit_code, ENVMANAGER_TRANSPORT="portable") as trainer:
        if KERNEL >= (6, 15) or how != "SIGCHLD is ignored":  # in the other cases it is a matter of who is first
            expected = {"SIGKILL" if end.signal_number else "EXIT(3)"} | ({"EXIT(?)"} if KERNEL < (6, 15) else set())
        else:
            expected = {"EXIT(?)"}
        ((exit_name,),) = trainer.announced("died")
        assert exit_name in expected
        assert trainer.ended() == 0
        trainer.until_all_gone()


def die_in_a_program_that_reaps(how: str, exit_code: int | None) -> None:
    def reap(*_: Any) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def reap_on() -> None:
        while True:
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)

    if how == "SIGCHLD is ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    elif how == "a handler waits for any child":
        signal.signal(signal.SIGCHLD, reap)
    else:
        threading.Thread(target=reap_on, daemon=True).start()
    end = Die(3) if exit_code else Die(signal_number=signal.SIGKILL)
    with started(faulty(end), 1) as manager:
        manager.reset()
        manager.recv(Wait.all())
        manager.send(np.array([1]), [0])
        try:
            manager.recv(Wait.all())
        except WorkerDied as error:
            scripts.announce("died", error.exit)
    os._exit(0)


# Memory.


@pytest.mark.parametrize("options", ["ro", "nr_inodes=1"])
def test_dev_shm_may_be_full_or_read_only(options: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can mount another /dev/shm")
    with program(step_beside_another_dev_shm, options, ENVMANAGER_TRANSPORT="portable") as trainer:
        assert trainer.announced("stepped") == [["2"]]
        assert trainer.ended() == 0
        trainer.until_all_gone()


def step_beside_another_dev_shm(options: str) -> None:
    assert mount_in_a_namespace(b"/dev/shm", options.encode())
    with started() as manager:
        manager.reset()
        scripts.announce("stepped", len(manager.recv(Wait.all())))


def test_no_room_for_temporary_files_where_memory_is_one_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="missing"):
        started()


def test_rows_that_do_not_fit_into_memory_are_refused_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "available_bytes", lambda: 100)
    with pytest.raises(UsageError, match="are free on this machine"):
        started(EchoEnvironment, 2)


def test_without_posix_fallocate_the_memory_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with started(EchoEnvironment, 2) as manager:
        manager.reset()
        manager.recv(Wait.all())
        manager.send(np.array([4, 5]), [0, 1])
        assert manager.recv(Wait.all()).obs[:, 3].tolist() == [4, 5]


KEEPS_ARRAYS = """
import numpy as np
from envmanager import SubprocessEnvManager, Wait
from envmanager.testing import EchoEnvironment

manager = SubprocessEnvManager(EchoEnvironment, 2, transport="portable", zero_copy=True)
manager.reset()
manager.recv(Wait.all())
manager.send(np.array([4, 5]), [0, 1])
batch = manager.recv(Wait.all())
manager.close()
print(batch.obs[:, 3].tolist())
"""


def test_zero_copy_arrays_may_be_kept_after_close_and_nothing_is_printed_at_exit() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPS_ARRAYS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[4, 5]\n", "")


# Standard streams.


def test_an_environment_reads_nothing_from_its_input_and_the_lifeline_is_not_inherited() -> None:
    class Reads(FakeEnvironment):
        def read(self) -> tuple[str, list[int]]:
            pipes = [fd for fd in map(int, os.listdir("/proc/self/fd")) if is_pipe(fd)]
            return sys.stdin.read(), [fd for fd in pipes if not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC]

    with started(Reads, 1) as manager:
        ((text, inherited),) = manager.call("read")
    assert text == ""
    assert not set(inherited) - {1, 2}


def is_pipe(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    except OSError:
        return False


def test_a_segmentation_fault_in_a_worker_brings_its_traceback_with_log_dir(tmp_path: Path) -> None:
    with started(faulty(Segfault()), 1, log_dir=str(tmp_path)) as manager:
        manager.reset()
        manager.recv(Wait.all())
        manager.send(np.array([1]), [0])
        with pytest.raises(WorkerDied) as raised:
            manager.recv(Wait.all())
    assert raised.value.exit == "SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in raised.value.output
