"""Trainers that run as programs of their own, because the tests kill them, and what both sides need.

::

    test ── program(function, …) ──▶ trainer (own session) ──▶ workers, simulators, a helper
      ◀───────── announcements: one line each, written by whoever has something to say ─────────┘

The rule: nobody sleeps to let others get somewhere; each says where it is and the test waits for that, with a deadline.
Whatever a program started is killed at the end of the ``with`` block, whether the test passed or not.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import fcntl
import functools
import multiprocessing
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from envmanager import (
    ActionInfo,
    AgentSteps,
    EnvContext,
    EnvManagerError,
    RestartPolicy,
    SubprocessEnvManager,
    Timeouts,
    Wait,
    WorkerDied,
    WorkerError,
)
from envmanager.hosts.wire import COMMAND
from envmanager.processes import child, native, starting
from envmanager.processes.starting import Helper
from envmanager.system import machine
from envmanager.testing import FakeEnvironment, Sleep, Step
from envmanager.testing.leaks import SLACK_S, SOON_S, Traces, descendants, settle

ROOT = Path(__file__).parents[2]
GONE_WITHIN_S = SLACK_S
"""How long anything may live on after the trainer."""
LONG_S = 600.0
SPEC = FakeEnvironment.SPEC
NO_RESTARTS = RestartPolicy(max_restarts=0)


class Zeros:
    """A policy."""

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))


def started(factory: Any = FakeEnvironment, n_envs: int = 2, **options: Any) -> SubprocessEnvManager:
    """A manager that replaces nobody unless ``options`` say so, with a policy; it is not reset yet."""
    manager = SubprocessEnvManager(factory, n_envs, **{"restarts": NO_RESTARTS, **options})
    manager.set_policy("default", Zeros())
    return manager


def actions(n: int) -> np.ndarray:
    """Something to send."""
    return np.zeros(n, np.int64)


# What tests watch.


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def living() -> dict[int, str]:
    """All processes below this one, orphans too (see ``adopt_orphans``), by pid, with their command lines."""
    return {pid: command for pid, command in descendants().items() if alive(pid)}


def until(condition: Callable[[], Any], what: str, within_s: float = SOON_S) -> Any:
    """What ``condition()`` returns as soon as that is true; fails when it takes too long."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        pause.wait(0.005)


def until_gone(pids: Any, within_s: float = GONE_WITHIN_S) -> None:
    """Return once none of these processes lives; fails with those that do."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still there after {within_s:g} s: {left}"
        pause.wait(0.005)


@contextmanager
def ending_what_is_left() -> Iterator[None]:
    """Fail when the block leaves processes behind, and end them, so that one failure does not become many."""
    before = Traces.now()
    processes = set(living())
    try:
        yield
    finally:
        left = settle(before)
        for pid in set(living()) - processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"


def pids_of(manager: SubprocessEnvManager) -> list[int]:
    """The workers' processes."""
    return [worker.pid or 0 for worker in manager.stats().workers]


class Program:
    """A trainer in a process of its own; see ``program``."""

    def __init__(self, code: str, environ: dict[str, str]) -> None:
        self._others = set(living())
        self._text = b""
        self._lines: list[list[str]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=ROOT,
            env=environ,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def announced(self, what: str, n: int = 1, within_s: float = SOON_S) -> list[list[str]]:
        """The words that follow ``what`` in the first ``n`` lines that begin so, as soon as they are there."""
        deadline = time.monotonic() + within_s
        while len(found := [words[1:] for words in self._lines if words[0] == what]) < n:
            if not self._read(deadline):
                raise AssertionError(f"{what!r} was announced {len(found)} times of {n}; {self.errors()}")
        return found[:n]

    def _read(self, deadline: float) -> bool:
        assert self.process.stdout is not None
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self._text += data
        *complete, self._text = self._text.split(b"\n")
        self._lines += [words for line in complete if (words := line.decode().split())]
        return bool(data)

    def go_on(self) -> None:
        """Let a program that has called ``wait_to_go_on`` go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def family(self) -> dict[int, str]:
        """Every process that is there because of this program, itself included."""
        return {pid: command for pid, command in living().items() if pid not in self._others}

    def until_all_gone(self, *, but: Any = (), within_s: float = GONE_WITHIN_S) -> None:
        """Return once the program and everything it started is gone; fails with what is not."""
        deadline = time.monotonic() + within_s
        pause = threading.Event()
        while left := {pid: command for pid, command in self.family().items() if pid not in but}:
            assert time.monotonic() < deadline, f"still there after {within_s:g} s: {left}"
            pause.wait(0.005)

    def kill(self) -> None:
        """SIGKILL the trainer, and nobody else."""
        self.process.kill()
        self.process.wait()

    def ended(self, within_s: float = SOON_S) -> int:
        """The exit code once the trainer has ended by itself."""
        return self.process.wait(within_s)

    def errors(self) -> str:
        """What was written to stderr so far by anybody."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        text = b""
        with suppress(BlockingIOError):
            while data := os.read(self.process.stderr.fileno(), 1 << 16):
                text += data
        return text.decode(errors="replace")

    def end(self) -> None:
        """Kill all that is left."""
        while left := self.family():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        self.process.wait()


@contextmanager
def program(function: Callable[..., None], *arguments: Any, **environ: str) -> Iterator[Program]:
    """Run ``function(*arguments)``, of an importable module, as the main program of a new process.

    ``environ``: more environment variables. Coverage is not measured there: a killed trainer leaves half a file.
    """
    call = f"{function.__name__}(*{arguments!r})"
    ast.parse(call)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    running = Program(f"from {function.__module__} import {function.__name__}; {call}", {**inherited, **environ})
    try:
        yield running
    finally:
        running.end()


# What programs and their workers use.


def announce(what: str, *words: Any) -> None:
    """Tell the test: one write, so that lines of several processes do not mix."""
    os.write(1, " ".join([what, *map(str, words)]).encode() + b"\n")


def wait_to_go_on() -> None:
    """Wait until the test says ``go_on``."""
    os.read(0, 1)


def hold_the_gil() -> None:
    """Sleep in native code, without giving up the GIL."""
    ctypes.PyDLL(None).sleep(int(LONG_S))


class Idle(FakeEnvironment):
    """Is asked for nothing after its reset."""

    def reset(self, **arguments: Any) -> Any:
        announce("idle", os.getpid())
        return super().reset(**arguments)


class InALongStep(FakeEnvironment):
    """Its step does not end."""

    def step(self, actions: Any) -> Any:
        announce("stepping", os.getpid())
        time.sleep(LONG_S)
        return super().step(actions)


class HoldsTheGil(FakeEnvironment):
    """Its step does not end, no Python code of its process runs, and SIGTERM means nothing to it."""

    def step(self, actions: Any) -> Any:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        announce("gil", os.getpid())
        hold_the_gil()
        return super().step(actions)


class Simulated(FakeEnvironment):
    """It has simulators: one plain, one that ignores all signals that can be ignored, one that is a grandchild."""

    def reset(self, **arguments: Any) -> Any:
        stubborn = "trap '' TERM HUP INT; sleep 600 & wait; wait"
        plain = subprocess.Popen(["sleep", "600"])
        shell = subprocess.Popen(["sh", "-c", stubborn])
        announce("simulators", os.getpid(), plain.pid, shell.pid)
        return super().reset(**arguments)


class Stopped(InALongStep):
    """The test stops it by SIGSTOP."""

    def step(self, actions: Any) -> Any:
        announce("stopped", os.getpid())
        return super().step(actions)


RESPONSIVE = (Idle, InALongStep, Simulated)
DEAF = (HoldsTheGil, Stopped)


# Programs: trainers that die.


def train_one_of_each(start_method: Any, with_deaf: bool) -> None:
    """A worker of each kind, all but the idle one in a step; then wait for their steps."""
    kinds = [*RESPONSIVE, *DEAF] if with_deaf else list(RESPONSIVE)
    manager = SubprocessEnvManager(kinds, len(kinds), start_method=start_method)
    manager.reset()
    manager.send(actions(len(kinds) - 1), range(1, len(kinds)))
    announce("waiting")
    manager.recv(Wait.all())


KINDS = {"idle": Idle, "stepping": InALongStep, "gil": HoldsTheGil, "simulators": Simulated}


def train_three_of(kind: str, start_method: Any) -> None:
    """Three workers of one kind, which announces itself; all but the idle ones in a step."""
    manager = SubprocessEnvManager(KINDS[kind], 3, start_method=start_method)
    manager.reset()
    if kind != "idle":
        manager.send(actions(3), range(3))
    announce("waiting")
    time.sleep(LONG_S)


def train_idle_simulators(start_method: Any) -> None:
    """Workers that are idle, and so notice first when the trainer goes; their simulators do not notice."""
    manager = SubprocessEnvManager(Simulated, 4, start_method=start_method)
    manager.reset()
    announce("waiting")
    time.sleep(LONG_S)


def train_beside_a_loader(start_method: Any) -> None:
    """Fork a data loader that stays, as PyTorch does."""
    manager = SubprocessEnvManager(HoldsTheGil, 2, start_method=start_method)
    manager.reset()
    loader = os.fork()
    if loader == 0:
        time.sleep(LONG_S)
        os._exit(0)
    announce("loader", loader)
    manager.send(actions(2), [0, 1])
    manager.recv(Wait.all())


def sleep(_: list[int]) -> None:
    """Sleep for ever, as a worker whose factory hangs."""
    time.sleep(LONG_S)


def start_instead(function: Any, *before: Any) -> None:
    """Have workers run ``function(fds, *before, …)`` instead of their own first function."""

    def start(start_method: str, name: str, _: Any, arguments: tuple[Any, ...], **options: Any) -> starting.Process:
        named = f"{function.__module__}:{function.__name__}"
        return starting.start(start_method, name, named, (*before, *arguments), **options)

    vars(native)["start"] = start


def run_without_a_trainer(fds: list[int], trainer_pid: int, *arguments: Any) -> None:
    """What a worker does first, but only once the trainer is dead."""
    pidfd = os.pidfd_open(trainer_pid)
    announce("started", os.getpid())
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(int(SOON_S * 1000))
    os.close(pidfd)
    child.run_worker(fds, *arguments)


def hang_at_the_start() -> None:
    """A factory that never returns and does not let anybody else run."""
    announce("made", os.getpid())
    hold_the_gil()


def train_with_workers_that_start_slowly(start_method: Any) -> None:
    """To be killed between the start of a worker's process and its first look at the life pipe."""
    start_instead(run_without_a_trainer, os.getpid())
    SubprocessEnvManager(hang_at_the_start, 2, start_method=start_method)


def train_many(start_method: Any) -> None:
    """To be killed at any moment of the start, the first reset and the end of four workers."""
    announce("starting")
    with SubprocessEnvManager(Simulated, 4, start_method=start_method) as manager:
        manager.reset()
    announce("closed")
    time.sleep(LONG_S)


ENDINGS: dict[str, Callable[[], Any]] = {
    "end of the script": lambda: None,
    "sys.exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "an exception": lambda: 1 // 0,
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def idle_and_busy(context: EnvContext) -> FakeEnvironment:
    """Two kinds of environments."""
    return Idle() if context.env_id == 0 else InALongStep()


def train_and_end(start_method: Any, ending: str) -> None:
    """End in one of many ways, without closing, while one worker is idle and one in a step."""
    manager = SubprocessEnvManager(idle_and_busy, 2, start_method=start_method, timeouts=Timeouts(close_s=1))
    manager.reset()
    manager.send(actions(1), [1])
    wait_to_go_on()
    ENDINGS[ending]()


def train_and_close_at_exit(start_method: Any) -> None:
    """Close in a function registered before there was a manager, and in one registered after."""
    made: list[SubprocessEnvManager] = []

    def close() -> None:
        made[0].close()
        announce("closed")

    atexit.register(close)
    made.append(SubprocessEnvManager(Idle, 2, start_method=start_method))
    atexit.register(made[0].close)
    made[0].reset()


# Programs: trainers that live on.


def train_while_children_exit(start_method: Any) -> None:
    """Fork children that end like a script does, and as multiprocessing's do; then take steps."""
    manager = SubprocessEnvManager(FakeEnvironment, 2, start_method=start_method)
    manager.set_policy("default", Zeros())
    manager.reset()
    child = os.fork()
    if child == 0:
        return  # to the end of the script: functions registered with atexit, finalizers, garbage
    announce("exit", os.waitpid(child, 0)[1])
    other = multiprocessing.get_context("fork").Process(target=manager.close)
    other.start()
    other.join()
    announce("exit", other.exitcode)
    announce("stepped", sum(len(manager.step(Wait.all())) for _ in range(10)))
    manager.close()


class Announcing(FakeEnvironment):
    """Takes a hundredth of a second for a step, and tells of its third."""

    def step(self, actions: Any) -> Any:
        time.sleep(0.01)
        if self._n_steps == 3:
            announce("stepping", os.getpid())
        return super().step(actions)


def train_for_ever(start_method: Any) -> None:
    """What a user's script looks like that gets a Ctrl-C."""
    with SubprocessEnvManager(Announcing, 2, start_method=start_method) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        while True:
            manager.step()


def run_after_an_interrupt(fds: list[int], *arguments: Any) -> None:
    """What a worker does first, but only once a Ctrl-C has come.

    One that was forked from the helper is not in the group that gets it; its trainer, which is, asks it to close.
    """
    announce("started", os.getpid())
    until(
        lambda: signal.SIGINT in signal.sigpending() or n_bytes_to_read(fds[0]) > COMMAND.size,
        "a Ctrl-C",
    )
    child.run_worker(fds, *arguments)


def n_bytes_to_read(fd: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])


def train_with_interrupts_at_the_start(start_method: Any) -> None:
    """To get a Ctrl-C between the start of its workers' processes and their set-up."""
    start_instead(run_after_an_interrupt)
    SubprocessEnvManager(FakeEnvironment, 2, start_method=start_method)


SHORTER_THAN_THE_SUSPENSION_S = 3.0


class TakesATime(FakeEnvironment):
    """A step that takes a while, but less than its timeout."""

    def step(self, actions: Any) -> Any:
        announce("stepping", os.getpid())
        time.sleep(0.3)
        return super().step(actions)


def train_across_a_suspension() -> None:
    """To be stopped for longer than ``step_s`` in the middle of a step."""
    with SubprocessEnvManager(
        TakesATime, 2, timeouts=Timeouts(step_s=SHORTER_THAN_THE_SUSPENSION_S), restarts=NO_RESTARTS
    ) as manager:
        manager.reset()
        manager.send(actions(2), [0, 1])
        announce("received", len(manager.recv(Wait.all())))


DAY_S = 86_400.0


def jumping_clock() -> Callable[[], float]:
    """A wall clock that is a day early and a day late by turns."""
    n_looks = 0

    def now() -> float:
        nonlocal n_looks
        n_looks += 1
        return time.clock_gettime(time.CLOCK_REALTIME) + (DAY_S if n_looks % 2 else -DAY_S)

    return now


class JumpingClock(FakeEnvironment):
    """Forty quick steps and an endless one, in a process whose wall clock jumps."""

    def __init__(self) -> None:
        super().__init__([*[Step()] * 40, Sleep(LONG_S)])
        time.time = jumping_clock()


class LargeObservation(FakeEnvironment):
    """16 MiB of observation."""

    @property
    def behavior_specs(self) -> Any:
        from envmanager import ArraySpec, BehaviorSpec

        return {"default": BehaviorSpec(ArraySpec((1 << 24,), np.uint8), ArraySpec((), np.int64))}


def train_with_little_address_space() -> None:
    """The shared memory can be allocated, but not mapped into the trainer."""
    with SubprocessEnvManager(FakeEnvironment, 1):
        pass  # the helper is there now, and the limit is not for it
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 23), resource.RLIM_INFINITY))
    try:
        SubprocessEnvManager(LargeObservation, 1)
    except Exception as error:
        announce("error", *(kind.__name__ for kind in type(error).__mro__))


def pid_of_helper() -> int:
    """The process that starts workers."""
    return next(pid for pid, command in descendants().items() if "envmanager.processes.helper" in command)


def train_across_a_helper_without_descriptors() -> None:
    """The helper runs out of descriptors, and so ends, when it is asked for a worker."""
    with SubprocessEnvManager(FakeEnvironment, 1):
        pass
    helper = pid_of_helper()
    n_open = len(os.listdir(f"/proc/{helper}/fd"))
    resource.prlimit(helper, resource.RLIMIT_NOFILE, (n_open, n_open))
    _step_once()


def train_across_a_killed_helper() -> None:
    """The helper is killed while it has workers."""
    with SubprocessEnvManager(FakeEnvironment, 2, restarts=NO_RESTARTS) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        helper = pid_of_helper()
        os.kill(helper, signal.SIGKILL)
        until(lambda: not alive(helper), "the end of the helper")
        manager.step(Wait.all())
        announce("stepped", len(manager.step(Wait.all())))
        os.kill(pids_of(manager)[0], signal.SIGKILL)
        try:
            while True:
                manager.step()
        except WorkerDied as error:
            announce("exit", error.exit)
    _step_once()


def _step_once(restarts: RestartPolicy = NO_RESTARTS) -> None:
    with SubprocessEnvManager(FakeEnvironment, 2, restarts=restarts) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        announce("stepped", len(manager.step(Wait.all())))


def train_and_list_listeners(start_method: Any) -> None:
    """Tell which sockets somebody in this family listens on, before and while there are workers."""
    announce("before", *_listeners())
    with SubprocessEnvManager(FakeEnvironment, 2, start_method=start_method, infos=True) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        manager.step(Wait.all())
        announce("during", *_listeners())
    announce("after", *_listeners())
    announce("listening")
    wait_to_go_on()


def _listeners() -> list[str]:
    """``tcp:inode`` or ``unix:path`` of every listening socket that this process or one of its descendants holds."""
    held = set()
    for pid in [os.getpid(), *descendants()]:
        with suppress(OSError):
            held |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return [name for inode, name in listening_sockets().items() if f"socket:[{inode}]" in held]


def listening_sockets() -> dict[str, str]:
    """Every socket of this machine on which somebody listens, by inode."""
    found = {}
    for protocol in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # TCP_LISTEN
                found[words[9]] = f"{protocol}:{words[1]}"
    for protocol in ("udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            found[line.split()[9]] = f"{protocol}:{line.split()[1]}"
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & 0x10000:  # __SO_ACCEPTCON: somebody listens
            found[words[6]] = f"unix:{words[7] if len(words) > 7 else ''}"
    return found


def train_in_a_daemon(start_method: Any) -> None:
    """What a daemonic process of multiprocessing does, which may not have children by multiprocessing's rules."""
    with SubprocessEnvManager(FakeEnvironment, 2, start_method=start_method) as manager:
        manager.set_policy("default", Zeros())
        manager.reset()
        assert [len(manager.step(Wait.all())) for _ in range(3)] == [2, 2, 2]


# Programs: workers whose simulators, descriptors or groups make trouble.


class CrashesBesideASimulator(FakeEnvironment):
    """Its step is a segmentation fault; its simulator does not care."""

    def step(self, actions: Any) -> Any:
        simulator = subprocess.Popen(["sleep", "600"])
        announce("crashing", os.getpid(), simulator.pid)
        os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(actions)


def train_and_look_away(start_method: Any, n_envs: int) -> None:
    """Take a step in which all workers crash, and compute instead of looking."""
    manager = SubprocessEnvManager(CrashesBesideASimulator, n_envs, start_method=start_method)
    manager.reset()
    manager.send(actions(n_envs), range(n_envs))
    time.sleep(LONG_S)


def train_and_look_late(start_method: Any) -> None:
    """Compute until told to look at the worker that has crashed; say what was seen, then close."""
    with started(CrashesBesideASimulator, 1, start_method=start_method) as manager:
        manager.reset()
        manager.send(actions(1), [0])
        wait_to_go_on()
        try:
            manager.recv()
        except WorkerDied as error:
            announce("died", error.exit)
        wait_to_go_on()
    announce("closed")
    wait_to_go_on()


def close_all_descriptors(_: int) -> None:
    """All but those of the test."""
    os.closerange(3, 4096)


def join_another_group(_: int) -> None:
    """As far as signals to groups are concerned, this process is a part of the helper now."""
    os.setpgid(0, os.getpgid(os.getppid()))


def begin_a_session(trainer_pid: int) -> None:
    """Only who leads no group may, and while nobody is in the group that it led."""
    join_another_group(trainer_pid)
    os.setsid()


def untie_all(trainer_pid: int) -> None:
    """All that can be done at once."""
    close_all_descriptors(trainer_pid)
    join_another_group(trainer_pid)


ESCAPES = {
    "closes all descriptors": close_all_descriptors,
    "joins another group": join_another_group,
    "begins a session": begin_a_session,
    "does it all": untie_all,
}


class Escapes(FakeEnvironment):
    """It leaves what ties it to its trainer; then its step does not end, unless it is to. It has a simulator."""

    def __init__(self, how: str, trainer_pid: int, hangs: bool) -> None:
        super().__init__()
        self._how, self._trainer_pid, self._hangs = how, trainer_pid, hangs

    def step(self, actions: Any) -> Any:
        begins_a_session = self._how == "begins a session"
        simulator = None if begins_a_session else subprocess.Popen(["sleep", "600"])
        ESCAPES[self._how](self._trainer_pid)
        if simulator is None:
            simulator = subprocess.Popen(["sleep", "600"])
        announce("escaped", os.getpid(), simulator.pid)
        if self._hangs:
            time.sleep(LONG_S)
        return super().step(actions)


def _escaping(how: str, hangs: bool) -> Callable[[], FakeEnvironment]:
    return functools.partial(Escapes, how, os.getpid(), hangs)


def train_what_escapes_and_hangs(start_method: Any, how: str) -> None:
    """To be killed while the environment hangs."""
    manager = SubprocessEnvManager(_escaping(how, True), 1, start_method=start_method)
    manager.reset()
    manager.send(actions(1), [0])
    announce("waiting")
    manager.recv()


def train_what_escapes_and_is_closed(start_method: Any, how: str) -> None:
    """Close while the environment is well, and then while it hangs."""
    for hangs in (False, True):
        timeouts = Timeouts(step_s=3.0, close_s=2.0)
        with started(_escaping(how, hangs), 1, start_method=start_method, timeouts=timeouts) as manager:
            manager.reset()
            try:
                announce("stepped", len(manager.step()))
            except WorkerError as error:
                announce("error", type(error).__name__)
        announce("closed")
    wait_to_go_on()


def train_two_managers(start_method: Any) -> None:
    """Tell which children the trainer has, and which the helper has."""
    with started(start_method=start_method) as one, started(start_method=start_method) as another:
        one.reset()
        another.reset()
        announce("children", *machine.children_of(os.getpid()))
        announce("workers", *machine.children_of(pid_of_helper()))


def train_without_a_helper(start_method: Any, signal_number: int) -> None:
    """The helper is killed or stopped; replace a worker, close, and do it again to be killed."""
    for is_last in (False, True):
        restarts = RestartPolicy(backoff_s=0)
        with started(InALongStep if is_last else FakeEnvironment, 2, start_method=start_method, restarts=restarts) as m:
            m.reset()
            os.kill(pid_of_helper(), signal_number)
            if is_last:
                m.send(actions(2), [0, 1])
                announce("waiting")
                m.recv()
            os.kill(pids_of(m)[0], signal.SIGKILL)
            while not any(info.lost for info in m.step(Wait.all())):
                pass
        announce("closed")


def train_and_count_lifelines(start_method: Any) -> None:
    """Replace a worker many times, and compare what the helper holds before and after."""
    restarts = RestartPolicy(max_restarts=100, backoff_s=0)
    with started(FakeEnvironment, 2, start_method=start_method, restarts=restarts) as manager:
        manager.reset()
        held = Path(f"/proc/{pid_of_helper()}/fd")
        before = len(os.listdir(held))
        for _ in range(20):
            os.kill(pids_of(manager)[0], signal.SIGKILL)
            while not any(info.lost for info in manager.step(Wait.all())):
                pass
        until(lambda: len(os.listdir(held)) <= before, "as few descriptors as before")
    announce("done")


def train_with_a_killed_helper_and_a_crash(start_method: Any) -> None:
    """No process reaps a worker whose helper has gone; its simulator ends with the manager at the latest."""
    with started(CrashesBesideASimulator, 1, start_method=start_method) as manager:
        manager.reset()
        helper = pid_of_helper()
        os.kill(helper, signal.SIGKILL)
        until(lambda: not alive(helper), "the end of the helper")
        manager.send(actions(1), [0])
        try:
            manager.recv()
        except WorkerDied as error:
            announce("died", error.exit)
    announce("closed")
    wait_to_go_on()


# Programs: starts that do not go on.


def train_across_a_stopped_helper() -> None:
    """The helper is stopped while there are workers, one of which is then replaced, while others start, and close."""
    helper_at_first = None
    restarts = RestartPolicy(backoff_s=0)
    with started(FakeEnvironment, 2, restarts=restarts) as first:
        first.reset()
        helper_at_first = pid_of_helper()
        os.kill(helper_at_first, signal.SIGSTOP)
        _step_once()
        assert not alive(helper_at_first)
        os.kill(pid_of_helper(), signal.SIGSTOP)
        os.kill(pids_of(first)[1], signal.SIGKILL)
        while not any(info.lost for info in first.step(Wait.all())):
            pass
        announce("stepped", len(first.step(Wait.all())))
        os.kill(pid_of_helper(), signal.SIGSTOP)
        closing_at = time.monotonic()
    announce("closed", time.monotonic() - closing_at < 5.0 + SLACK_S)


def train_across_helpers_that_stop_when_asked(n_times: int, max_restarts: int = 0) -> None:
    """Each of the first helpers takes the request for a worker, and is stopped before it has forked one."""
    left = [n_times]
    ask = Helper.ask

    def ask_a_stopped_one(helper: Helper, *args: Any) -> None:
        if left[0]:
            left[0] -= 1
            signal.pidfd_send_signal(helper._pidfd, signal.SIGSTOP)
            until(lambda: not helper.responds(), "the stop of the helper")
        ask(helper, *args)

    Helper.ask = ask_a_stopped_one  # type: ignore[method-assign]
    try:
        _step_once(RestartPolicy(max_restarts))
    except WorkerError as error:
        announce("error", error.phase, error.cause)


def close_while_the_helper_is_about_to_stop() -> None:
    """The helper was last seen at work, and is stopped before it tells how the worker has ended."""
    with started(FakeEnvironment, 1) as manager:
        manager.reset()
        os.kill(pid_of_helper(), signal.SIGSTOP)
        Helper.responds = lambda _: True  # type: ignore[method-assign]
    announce("closed")


def train_with_a_helper_that_hangs(start_s: float) -> None:
    """What the helper imports first does not end."""
    os.environ["TRAINER"] = str(os.getpid())
    __import__("cv2")
    announce("starting")
    before = time.monotonic()
    try:
        SubprocessEnvManager(FakeEnvironment, 2, timeouts=Timeouts(start_s=start_s))
    except BaseException as error:
        announce("error", type(error).__name__, getattr(error, "phase", "-"), time.monotonic() - before)


def start_beside_starts_that_time_out() -> None:
    """Managers start while others, in another thread, give their starts less time than any helper needs."""
    failed = []

    def be_hasty() -> None:
        while True:
            try:
                SubprocessEnvManager(FakeEnvironment, timeouts=Timeouts(start_s=0.01)).close()
            except WorkerError:
                failed.append(True)

    threading.Thread(target=be_hasty, daemon=True).start()
    until(lambda: failed, "a start has timed out")
    for _ in range(10):
        SubprocessEnvManager(FakeEnvironment).close()
    announce("started", 10)
    os._exit(0)


def die_beside_a_start_that_timed_out() -> None:
    """The helper is busy for longer than one start may take; later it tells how the worker of another manager ended."""
    with started(FakeEnvironment, 1, restarts=NO_RESTARTS) as manager:
        manager.reset()
        os.environ["TRAINER"] = str(os.getpid())
        __import__("cv2")
        try:
            SubprocessEnvManager(FakeEnvironment, timeouts=Timeouts(start_s=0.3))
        except WorkerError as error:
            announce("late", type(error).__name__)
        Path(os.environ["HANGING"]).unlink()
        os.kill(pids_of(manager)[0], signal.SIGKILL)
        try:
            manager.reset()
        except WorkerDied as error:
            announce("exit", error.exit)
    SubprocessEnvManager(FakeEnvironment).close()
    announce("helpers", sum("envmanager.processes.helper" in command for command in descendants().values()))


def _begin_to_hang_in_the_helper() -> None:
    """Have the helper import what does not end, for a manager in another thread."""
    os.environ["TRAINER"] = str(os.getpid())
    __import__("cv2")
    threading.Thread(target=SubprocessEnvManager, args=(FakeEnvironment,), daemon=True).start()
    until(Path(os.environ["HANGING"]).exists, "the import in the helper")


def close_beside_a_helper_that_hangs() -> None:
    manager = SubprocessEnvManager(FakeEnvironment, 30, timeouts=Timeouts(close_s=2.0))
    manager.reset()
    _begin_to_hang_in_the_helper()
    before = time.monotonic()
    manager.close()
    announce("closed", time.monotonic() - before)
    os._exit(0)


def reset_dead_workers_beside_a_helper_that_hangs() -> None:
    manager = SubprocessEnvManager(FakeEnvironment, 30, restarts=NO_RESTARTS)
    manager.reset()
    _begin_to_hang_in_the_helper()
    for pid in pids_of(manager):
        os.kill(pid, signal.SIGKILL)
    before = time.monotonic()
    try:
        manager.reset()
    except WorkerDied as error:
        announce("failed", time.monotonic() - before, error.exit)
    os._exit(0)


def train_across_an_interrupted_replacement() -> None:
    """The new helper hangs while a worker is to be replaced, until a Ctrl-C; the next one does not."""
    with started(FakeEnvironment, 2, restarts=RestartPolicy(backoff_s=0)) as manager:
        manager.reset()
        os.environ["TRAINER"] = str(os.getpid())
        __import__("cv2")
        os.kill(pid_of_helper(), signal.SIGKILL)
        os.kill(pids_of(manager)[1], signal.SIGKILL)
        announce("replacing")
        try:
            while True:
                manager.step()
        except KeyboardInterrupt:
            announce("interrupted")
        del sys.modules["cv2"]
        os.kill(pid_of_helper(), signal.SIGKILL)
        while not any(info.lost for info in manager.step(Wait.all())):
            pass
        announce("stepped", len(manager.step(Wait.all())))


class StopsWhenUnpickled:
    """Something that is sent to a worker, which is stopped before it has read the rest."""

    def __reduce__(self) -> Any:
        return _stop, ()


def _stop() -> None:
    announce("stopping", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def run_second(fds: list[int], _: Any, *arguments: Any) -> None:
    """What a worker does when somebody lets it go on."""
    child.run_worker(fds, *arguments)


def train_with_workers_that_are_stopped_early(start_method: Any) -> None:
    """The factory is larger than any pipe."""
    start_instead(run_second, StopsWhenUnpickled())
    big = os.urandom(3_000_000)
    timeouts = Timeouts(start_s=2.0, close_s=0.5)
    before = time.monotonic()
    try:
        SubprocessEnvManager(lambda: (len(big), FakeEnvironment())[1], 2, start_method=start_method, timeouts=timeouts)
    except WorkerError as error:
        announce("error", type(error).__name__, error.phase, time.monotonic() - before)


def train_with_interpreters_that_end_at_once() -> None:
    """A worker ends before it has read its arguments, again and again."""
    with SubprocessEnvManager(FakeEnvironment, 1, start_method="spawn"):
        pass
    sys.executable = "/bin/false"
    big = bytes(200_000)
    for _ in range(3):
        try:
            SubprocessEnvManager(lambda: (len(big), FakeEnvironment())[1], 2, start_method="spawn")
        except EnvManagerError as error:
            announce("error", type(error).__name__)
    zombies = [pid for pid in descendants() if not alive(pid)]
    announce("zombies", *zombies)


def train_and_hang_in(start_method: Any) -> None:
    """Tell the folder for temporary files, and wait to be killed."""
    with started(start_method=start_method) as manager:
        manager.reset()
        announce("folder", os.environ["TMPDIR"])
        time.sleep(LONG_S)


def train_while_children_are_reaped(start_method: Any) -> None:
    """The user's code reaps all children of the trainer; a worker is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel does it
    with started(CrashesBesideASimulator, 1, start_method=start_method) as manager:
        manager.reset()
        try:
            manager.step()
        except WorkerDied as error:
            announce("died", error.exit)
        manager.close()
    announce("closed")
    wait_to_go_on()
