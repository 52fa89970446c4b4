"""Starting a process under fork, spawn or forkserver, without importing the user's main module in the child.

Multiprocessing's children import ``__main__`` again, which is why scripts need a guard. Ours need none: the factory
travels by cloudpickle, so the two keys that ask for the import are dropped from the preparation data.

The rule: this module may rely on multiprocessing's internals and no other may; a test per Python version guards it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing import (
    context,
    forkserver,
    popen_fork,
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

from envmanager._workers import boot
from envmanager._workers.descriptors import close, forking_a_worker, register, standard_open, wait_for

_util: Any = util  # its type stubs leave out what is needed here
_server = forkserver.ForkServer()
_server_lock = threading.Lock()

_REAP_S = 1.0
"""How long the end of a process that was killed, or whose pidfd says it has ended, may take to be told."""


def _forget_server() -> None:
    """In a forked child: the server is the parent's, and its life must not hang on ours."""
    global _server
    alive_fd: int | None = _server._forkserver_alive_fd  # type: ignore[attr-defined]
    if alive_fd is not None:
        with contextlib.suppress(OSError):
            os.close(alive_fd)
    _server = forkserver.ForkServer()


os.register_at_fork(after_in_child=_forget_server)

PRELOADABLE = ("numpy", "cloudpickle", "attrs", "gymnasium", "pettingzoo", "dm_env", "ale_py", "cv2")
"""Imported by the forkserver when the trainer has them loaded when the first worker starts."""


def _pickled(popen: Any, process_obj: Any) -> memoryview:
    preparation = spawn.get_preparation_data(process_obj.name)
    preparation.pop("init_main_from_name", None)
    preparation.pop("init_main_from_path", None)
    buffer = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, buffer)
        reduction.dump(process_obj, buffer)
    finally:
        set_spawning_popen(None)
    return buffer.getbuffer()


def _write_all(fd: int, data: memoryview) -> None:
    with open(fd, "wb", closefd=True) as pipe:
        pipe.write(data)


class _ForkServerPopen(popen_forkserver.Popen):
    """Its sentinel is a pipe through which the server tells the exit code, which only a parent can know."""

    _fds: list[int]
    returncode: int | None
    is_untold = False
    """The server has ended before it could tell the exit code."""

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code once the process has ended; 255, and ``is_untold``, when nobody can tell."""
        if self.returncode is None and wait_for([self.sentinel], 0.0 if flag == os.WNOHANG else math.inf):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode, self.is_untold = 255, True
        return self.returncode

    def _launch(self, process_obj: Any) -> None:
        data = _pickled(self, process_obj)
        self.sentinel, write_fd = self._connect()
        self.finalizer = util.Finalize(self, _util.close_fds, (self.sentinel,))
        try:
            _write_all(write_fd, data)
            self.pid = forkserver.read_signed(self.sentinel)
        except (OSError, EOFError):
            self.finalizer()
            _stop_server()  # it has ended, or is no use
            raise

    def _connect(self) -> tuple[int, int]:
        start_server()
        try:
            return _server.connect_to_new_process(self._fds)
        except ConnectionError:  # it is ending, or somebody has killed it
            _stop_server()
            start_server()
            return _server.connect_to_new_process(self._fds)


class _SpawnPopen(popen_spawn_posix.Popen):
    """As the standard library's, without its sentinel: a pidfd tells of the end."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker_fd: Any = resource_tracker.getfd()
        self._fds.append(tracker_fd)
        data = _pickled(self, process_obj)
        child_r, data_w = os.pipe()
        try:
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
            self._fds.append(child_r)
            self.pid = _util.spawnv_passfds(spawn.get_executable(), command, self._fds)
        except BaseException:
            os.close(data_w)
            raise
        finally:
            os.close(child_r)
        _write_all(data_w, data)


class _ForkPopen(popen_fork.Popen):
    """As the standard library's, without its sentinel."""

    def _launch(self, process_obj: Any) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = process_obj._bootstrap()
            finally:
                os._exit(code)


class _ForkProcess(context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  (multiprocessing's name)
        with forking_a_worker(), warnings.catch_warnings():
            # The user chose fork; the docs say what it means for a trainer with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _ForkPopen(process_obj)


class _SpawnProcess(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        return _SpawnPopen(process_obj)


class _ForkServerProcess(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        return _ForkServerPopen(process_obj)


_PROCESSES: dict[str, type[process.BaseProcess]] = {
    "fork": _ForkProcess,
    "spawn": _SpawnProcess,
    "forkserver": _ForkServerProcess,
}


def default_start_method() -> str:
    """``forkserver``: starts as fast as fork, without the trainer's threads and locks."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def start_server() -> None:
    """Start the private forkserver unless it runs; it ends with this process."""
    with _server_lock, standard_open():
        loaded = [name for name in PRELOADABLE if name in sys.modules]
        os.environ[boot.PRELOAD_VARIABLE] = " ".join([*loaded, "envmanager._workers.child"])
        _server.set_forkserver_preload(["envmanager._workers.boot"])
        try:
            _server.ensure_running()
        finally:
            del os.environ[boot.PRELOAD_VARIABLE]


def _stop_server() -> None:
    """Have done with a server that does not answer; another is started when it is needed. Its children live on."""
    with _server_lock:
        if _server._forkserver_pid is not None:  # type: ignore[attr-defined]
            with contextlib.suppress(ProcessLookupError):
                os.kill(_server._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
            with contextlib.suppress(ChildProcessError, FileNotFoundError):
                _server._stop()  # type: ignore[attr-defined]


class ChildProcess:
    """One child process: its pid, a pidfd for its death, and how it ended."""

    def __init__(self, start_method: str, name: str, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start it. In the child, ``target(*args)`` runs with SIGINT blocked until it says otherwise."""
        resource_tracker.ensure_running()  # unblocks SIGINT when it starts, so before it is blocked
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            described = _PROCESSES[start_method](target=target, args=args, name=name)
            described._config["daemon"] = False  # type: ignore[attr-defined]  # a simulator may be its child
            # Not start(): it would register the child, and multiprocessing would wait for it at exit, for ever if it
            # hangs. It would also refuse to work inside a daemonic process.
            self._popen = type(described)._Popen(described)  # type: ignore[attr-defined]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        self.pid: int = self._popen.pid
        try:
            self.pidfd = register(os.pidfd_open(self.pid))
        except OSError:  # nobody could tell when it ends
            os.kill(self.pid, signal.SIGKILL)
            raise

    def signal(self, number: int, *, group: bool = True) -> None:
        """Send a signal to the process and its group; nothing happens when it is gone."""
        if group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def core_wait_ns(self) -> int:
        """How long it could have run and no core was free, since it began; 0 where the kernel does not tell."""
        try:
            with open(f"/proc/{self.pid}/schedstat", "rb") as file:
                _, waited_ns, _ = file.read().split()  # time on a core, time waiting for one, number of turns
        except (OSError, ValueError):
            return 0
        return int(waited_ns)

    def exit_name(self) -> str:
        """How it ended, by name: ``SIGSEGV``, ``EXIT(3)``, ``SIG?`` or ``EXIT(?)`` when nobody can tell."""
        code = self._exit_code()
        if code is None:
            return "EXIT(?)"
        if code < 0:
            try:
                return signal.Signals(-code).name
            except ValueError:
                return f"SIGNAL({-code})"
        return f"EXIT({code})"

    def _exit_code(self) -> int | None:
        """The exit code of a process that has ended or is about to; None when nobody can tell."""
        wait_for([self.pidfd], _REAP_S)
        # A forkserver reaps its children and tells; our own are reaped here.
        if not isinstance(self._popen, _ForkServerPopen):
            return self._popen.poll()  # type: ignore[no-any-return]
        code: int | None = self._popen.wait(timeout=_REAP_S)
        return None if self._popen.is_untold else code

    def release(self) -> None:
        """Give back its descriptors and its entry in the process table."""
        self._exit_code()
        self._popen.close()
        close(self.pidfd)
