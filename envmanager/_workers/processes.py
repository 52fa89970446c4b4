"""Starts processes under forkserver or spawn, without importing the user's main module in the child.

Multiprocessing's children import ``__main__`` again, which is why scripts need a guard. Ours need none: the factory
travels by cloudpickle, so the two keys that ask for the import are dropped from the preparation data.

What a process is to do is written to a file in memory, which it inherits: a child that is stopped, or that ends before
it has read all, keeps nobody waiting.

The rule: this module and ``server`` may rely on multiprocessing's internals and no other may; a test per Python version
guards it.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing import (
    context,
    popen_forkserver,
    popen_spawn_posix,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import set_spawning_popen
from typing import Any

import attrs

from envmanager._workers import descriptors, groups
from envmanager._workers.descriptors import register, wait_for
from envmanager._workers.server import Server, ServerGone
from envmanager.system.interrupts import blocked_in_children

_util: Any = util  # type stubs leave out what is needed here
_spawning: Any = popen_spawn_posix
_serving: Any = popen_forkserver
_server: Server | None = None
_server_lock = threading.Lock()

_REAP_S = 1.0
"""How long the end of a process that was killed, or whose pidfd says it has ended, may take to be reported."""


def _forget_server() -> None:
    """In a forked child: the server is the parent's."""
    global _server, _server_lock
    _server, _server_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_server)

PRELOADABLE = {
    "gymnasium": "envmanager.adapters.gymnasium",
    "pettingzoo": "envmanager.adapters.pettingzoo",
    "dm_env": "envmanager.adapters.dm_env",
    "ale_py": "ale_py",
    "cv2": "cv2",
}
"""What the server imports besides a worker's own modules, for what the trainer has loaded when it starts its first."""


def default_start_method() -> str:
    """Return ``forkserver``, which starts fastest, where there is one."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def start_server(*more: str) -> Server:
    """The server that workers are forked from, a new one if there is none that responds; it ends with this process.

    ``more``: modules that a new one imports too.
    """
    global _server
    resource_tracker.ensure_running()  # its workers share the trainer's
    with _server_lock:
        if _server is not None and not _server.responds():
            _server.stop()
            _server = None
        if _server is None:
            also = [module for name, module in PRELOADABLE.items() if name in sys.modules]
            _server = Server(["envmanager._workers.child", *also, *more])
        return _server


def _stop_server(server: Server) -> None:
    """Have done with a server that does not respond; another is started when it is needed. Its children live on."""
    global _server
    with _server_lock:
        server.stop()
        if _server is server:
            _server = None


@attrs.frozen
class Started:
    """A process that has been started; its descriptors are registered."""

    pid: int
    pidfd: int
    server: Server | None = None
    """Its parent, when this process is not."""
    response_fd: int = -1
    """Where the server reports how it ended."""


class _SpawnedFds:
    """What pickling asks how descriptors travel to a process that is being described."""

    DupFd = _spawning._DupFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """It is inherited under the same number."""
        self.fds.append(fd)
        return fd


class _ServedFds(_SpawnedFds):
    DupFd = _serving._DupFd

    def duplicate_for_child(self, fd: int) -> int:
        """It is sent along, and known by its place among what is sent."""
        self.fds.append(fd)
        return len(self.fds) - 1


def _describe(process_obj: Any, fds: _SpawnedFds) -> int:
    """A file in memory that says what the process is to do."""
    preparation = spawn.get_preparation_data(process_obj.name)
    preparation.pop("init_main_from_name", None)
    preparation.pop("init_main_from_path", None)
    data_fd = os.memfd_create("envmanager-start", os.MFD_CLOEXEC)
    set_spawning_popen(fds)  # type: ignore[arg-type]
    try:
        with open(data_fd, "wb", closefd=False) as file:
            reduction.dump(preparation, file)
            reduction.dump(process_obj, file)
        os.lseek(data_fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(data_fd)
        raise
    finally:
        set_spawning_popen(None)
    return data_fd


def _start_served(process_obj: Any, deadline: float) -> Started:
    fds = _ServedFds()
    data_fd = _describe(process_obj, fds)
    try:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                server = _ask_server(theirs.fileno(), data_fd, fds.fds, deadline)
            try:
                pid, pidfd = server.wait_for_response(ours.fileno(), deadline)
            except (ServerGone, TimeoutError):
                _stop_server(server)
                raise
            return Started(pid, register(pidfd), server, register(ours.detach()))
    finally:
        os.close(data_fd)


def _ask_server(response_fd: int, data_fd: int, fds: list[int], deadline: float) -> Server:
    while True:
        server = start_server()
        try:
            server.ask(response_fd, data_fd, fds, deadline)
            return server
        except ServerGone:  # it was ending; it has not heard of this
            _stop_server(server)
        except TimeoutError:
            _stop_server(server)
            raise


def _start_spawned(process_obj: Any, _: float) -> Started:
    tracker_fd: Any = resource_tracker.getfd()
    fds = _SpawnedFds()
    data_fd = _describe(process_obj, fds)
    try:
        command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=data_fd)
        with blocked_in_children():
            pid = _util.spawnv_passfds(spawn.get_executable(), command, [tracker_fd, data_fd, *fds.fds])
    finally:
        os.close(data_fd)
    return own_child(pid)


def own_child(pid: int) -> Started:
    """A child of this process, which nobody else may reap."""
    try:
        return Started(pid, register(os.pidfd_open(pid)))
    except OSError:  # nobody could tell when it ends
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


_STARTS: dict[str, tuple[type[process.BaseProcess], Callable[[Any, float], Started]]] = {
    "spawn": (context.SpawnProcess, _start_spawned),
    "forkserver": (context.ForkServerProcess, _start_served),
}


class Process:
    """One process: its pid, a pidfd for its death, and how it ended."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self._exit_code: int | None = None
        self._is_released = False
        self.is_buried = False
        """It was reaped, and its group is gone."""

    @property
    def pid(self) -> int:
        """Its number, which may be another's once it has been reaped."""
        return self._started.pid

    @property
    def pidfd(self) -> int:
        """Readable when it has ended."""
        return self._started.pidfd

    def signal(self, number: int) -> None:
        """Send a signal to the process, and to its group unless a server is its parent; nothing when it is gone."""
        if not self._is_released:
            groups.send(self.pid, self.pidfd, number)

    def core_wait_ns(self) -> int:
        """How long it could have run and no core was free, since it began; 0 where the kernel does not report it."""
        try:
            with open(f"/proc/{self.pid}/schedstat", "rb") as file:
                _, waited_ns, _ = file.read().split()  # time on a core, time waiting for one, number of turns
        except (OSError, ValueError):
            return 0
        return int(waited_ns)

    def exit_name(self) -> str:
        """How it ended, by name: ``SIGSEGV``, ``EXIT(3)``, or ``EXIT(?)`` when nobody can tell."""
        self._bury()
        code = self._exit_code
        if code is None:
            return "EXIT(?)"
        if code < 0:
            try:
                return signal.Signals(-code).name
            except ValueError:
                return f"SIGNAL({-code})"
        return f"EXIT({code})"

    def _bury(self) -> None:
        """Reap a process that has ended or is about to, and end its group; its parent does so."""
        if self.is_buried or self._is_released or not wait_for([self.pidfd], _REAP_S):
            return
        server = self._started.server
        if server is None:
            self._exit_code = groups.bury(self.pid, self.pidfd)
        else:
            self._exit_code = server.exit_code(self._started.response_fd, _REAP_S)
        self.is_buried = self._exit_code is not None

    def release(self) -> None:
        """Give back its descriptors and its entry in the process table. A second time does nothing."""
        self._bury()
        self._is_released = True
        descriptors.close(self.pidfd)
        descriptors.close(self._started.response_fd)


class ChildProcess(Process):
    """A process of this program, forked from the server or started with a new Python."""

    def __init__(
        self,
        start_method: str,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        deadline: float = math.inf,
    ) -> None:
        """Start it. In the child, ``target(*args)`` runs with SIGINT blocked or ignored until it says otherwise.

        TimeoutError when it is not there by the deadline, another OSError when it cannot be.
        """
        resource_tracker.ensure_running()  # unblocks SIGINT when it starts, so before it is blocked
        kind, start = _STARTS[start_method]
        described = kind(target=target, args=args, name=name)
        described._config["daemon"] = False  # type: ignore[attr-defined]  # a simulator may be its child
        # Not its own start(): that would register the child, and multiprocessing would wait for it at exit, for ever
        # if it hangs. It would also refuse to work inside a daemonic process.
        super().__init__(start(described, deadline))
