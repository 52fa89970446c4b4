"""Programs whose workers print, fork, or lack what a process usually has; see ``scripts``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

from envmanager import RestartPolicy, SubprocessEnvManager, Wait, WorkerDied
from envmanager.testing import FakeEnvironment, faulty
from envmanager.testing.faults import Segfault
from envmanager_tests.faults.scripts import LONG_S, NO_RESTARTS, Zeros, announce, pids_of


def started_for_steps(factory: Any, n_envs: int, start_method: Any, **options: Any) -> SubprocessEnvManager:
    """A manager that replaces nobody, has a policy, and was reset."""
    manager = SubprocessEnvManager(factory, n_envs, start_method=start_method, restarts=NO_RESTARTS, **options)
    manager.set_policy("default", Zeros())
    manager.reset()
    return manager


class Chatty(FakeEnvironment):
    """Its steps print as native code does, whatever the descriptors lead to, and as Python does."""

    def step(self, actions: Any) -> Any:
        for fd in (1, 2):
            os.write(fd, b"text of the environment, of no particular length\n")
        print("more of it", flush=True)
        subprocess.run(["echo", "and a simulator's"], check=True)
        return super().step(actions)

    def standard_streams(self) -> list[str]:
        return [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]


def train_without_standard_streams(start_method: Any, closed: list[int], is_replaced: bool) -> None:
    """Standard descriptors are closed, as a daemon's are: before the manager is made, or before a replacement."""
    elsewhere = os.dup(1)

    def close_streams() -> None:
        for fd in closed:
            os.close(fd)

    if not is_replaced:
        close_streams()

    def announce_elsewhere(what: str, *words: Any) -> None:
        os.write(elsewhere, " ".join([what, *map(str, words)]).encode() + b"\n")

    try:
        with started_for_steps(Chatty, 2, start_method) as manager:
            if is_replaced:
                close_streams()
                os.kill(pids_of(manager)[0], signal.SIGKILL)
                with suppress(WorkerDied):
                    manager.step(Wait.all())
                manager.reset()
            n_steps = sum(len(manager.step(Wait.all())) for _ in range(20))
            announce_elsewhere("stepped", n_steps)
            for streams in manager.call("standard_streams"):
                announce_elsewhere("streams", *streams)
    except BaseException as error:
        announce_elsewhere("failed", type(error).__name__)


class ReadsItsInput(FakeEnvironment):
    """Its simulator reads what there is to read."""

    def what_a_simulator_reads(self) -> bytes:
        return subprocess.run(["head", "-c", "1"], capture_output=True, check=True).stdout


def train_beside_input(start_method: Any) -> None:
    """There is input for the trainer, which environments must leave alone."""
    with started_for_steps(ReadsItsInput, 1, start_method) as manager:
        announce("ready")
        announce("read", *map(len, manager.call("what_a_simulator_reads")))
    announce("left", len(os.read(0, 1)))


class HasForked(FakeEnvironment):
    """Its fork lives on as a simulator, in the worker's process group."""

    def reset(self, **arguments: Any) -> Any:
        pid = os.fork()
        if pid == 0:
            time.sleep(LONG_S)
            return {}
        announce("simulator", pid)
        return super().reset(**arguments)


def train_with_forked_simulators(start_method: Any) -> None:
    """To be killed while its environments have simulators that they have forked."""
    with started_for_steps(HasForked, 2, start_method) as manager:
        manager.step(Wait.all())
        announce("waiting")
        time.sleep(LONG_S)


def mount_in_a_namespace(folder: bytes, options: bytes = b"") -> bool:
    """Have this process and its children find an empty folder there. False when the kernel does not allow that."""
    libc = ctypes.CDLL(None)
    new_namespace, private, recursive = 0x20000, 1 << 18, 0x4000
    flags, options = (1, b"") if options == b"ro" else (0, options)
    return (
        libc.unshare(new_namespace) == 0
        and libc.mount(b"none", b"/", None, private | recursive, None) == 0
        and libc.mount(b"none", folder, b"tmpfs", flags, options or None) == 0
    )


def train_without_proc(start_method: Any, log_dir: str) -> None:
    """No /proc: work, have a worker that dies replaced, and end."""
    if not mount_in_a_namespace(b"/proc"):
        announce("refused")
        return
    assert os.listdir("/proc") == []
    dies_once = faulty(Segfault(), after=2, only_env=1, only_generation=0)
    restarts = RestartPolicy(max_restarts=1, backoff_s=0.0)
    with SubprocessEnvManager(dies_once, 2, start_method=start_method, restarts=restarts, log_dir=log_dir) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        infos = [info for _ in range(6) for info in manager.step(Wait.all())]
        announce("stepped", len(infos), *(info.lost.cause.exit for info in infos if info.lost))
        announce("told", *("Fatal Python error" in info.lost.cause.output for info in infos if info.lost))


class StartsSimulators(FakeEnvironment):
    """A simulator is its child."""

    def simulator(self) -> int:
        print("a word without an end", end="")
        return subprocess.Popen(["sleep", "600"]).pid


def train_simulators_without_proc(start_method: Any, log_dir: str) -> None:
    """No /proc: end simulators at the end of their workers, and with the trainer."""
    if not mount_in_a_namespace(b"/proc"):
        announce("refused")
        return
    with SubprocessEnvManager(StartsSimulators, 2, start_method=start_method, log_dir=log_dir) as manager:
        announce("first", *manager.call("simulator"))
    announce("closed")
    manager = SubprocessEnvManager(StartsSimulators, 2, start_method=start_method, log_dir=log_dir)
    announce("second", *manager.call("simulator"))
    time.sleep(LONG_S)
