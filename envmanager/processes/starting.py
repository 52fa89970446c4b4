"""Functions that start processes through the helper, without importing the user's main module in them.

The function of a process and its arguments are written to a memfd that the process inherits. So the trainer does not
block if the process is stopped or ends before it has read them. The module ``helper`` describes how a process starts.

A program usually has one helper, which all its managers share, and one life pipe (see ``helper``). A helper in which a
start timed out may only be busy, so it goes on for the processes that need it, and the next start uses another one. The
pipe stays open until the program ends, because all workers are killed when it closes. A process forked by user code
gets its own helper and pipe when needed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from envmanager.hosts import descriptors
from envmanager.hosts.descriptors import register, wait_for
from envmanager.processes.boot import THREAD_CAPS, inheritance, python
from envmanager.processes.helper import EXECUTE, FORK, RESPONSE, Birth, Request
from envmanager.system.interrupts import allow_interrupts, blocked_in_children
from envmanager.system.machine import after_fork_in_child, exit_name, state_of

PRELOADABLE = {
    "gymnasium": "envmanager.adapters.gymnasium",
    "pettingzoo": "envmanager.adapters.pettingzoo",
    "dm_env": "envmanager.adapters.dm_env",
    "ale_py": "ale_py",
    "cv2": "cv2",
}
"""Modules that the helper imports before it forks a worker, if the trainer has imported the module named by the key."""
_REAP_S = 1.0
"""Timeout in seconds for a killed process to end, and for the helper to report its exit code."""
_NO_WAIT_S = 10.0
"""Time in seconds after such a timeout in which no exit code from the same helper is waited for."""
_LOOK_EVERY_S = 0.5
"""Interval in seconds at which a wait for a response checks whether the helper has ended or is stopped."""


class HelperGone(OSError):
    """Error raised when the helper cannot start processes: it has ended, is stopped by a signal or reads no request."""

    def __init__(self) -> None:
        super().__init__(errno.ECONNRESET, "the helper process has ended or is stopped")


class Helper:
    """The trainer's handle on one helper process. The helper runs until ``stop`` kills it or the trainer dies."""

    def __init__(self, life_fd: int) -> None:
        """Start the helper, without waiting until it is ready. ``life_fd``: the read end of the life pipe."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, blocked_in_children():
            process = subprocess.Popen(
                [*python(sys.executable, "helper", "main"), str(theirs.fileno()), str(life_fd)],
                env={**dict.fromkeys(THREAD_CAPS, "1"), **os.environ},
                pass_fds=(theirs.fileno(), life_fd),
                stdin=subprocess.DEVNULL,
            )
            process.returncode = 0  # so that the Popen object does not reap the process, which this class does
            self.pid = process.pid
            self._fd, self._pidfd = register(ours.detach()), register(os.pidfd_open(process.pid))
        self.users: weakref.WeakSet[Process] = weakref.WeakSet()
        """Processes that the helper starts or is the parent of. While it has any, it is not killed for being late."""
        self.is_late = False
        """Whether a start has timed out, or found the queue of requests full, since the helper last responded."""
        self._wait_again_at = -math.inf
        self._is_stopped = False
        self._lock = threading.RLock()
        """Lock held while the descriptors are used or closed. Once they are closed, other files may get the numbers."""

    def responds(self) -> bool:
        """Return whether the helper is running and not stopped by a signal."""
        with self._lock:
            if self._is_stopped:
                return False
            try:
                options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
                return os.waitid(os.P_PIDFD, self._pidfd, options) is None
            except ChildProcessError:  # the user's code has reaped it
                return False

    def ask(self, request: Request) -> None:
        """Send a request without blocking, or raise HelperGone. Any response comes through ``request.fds[0]``."""
        with self._lock:
            if self._is_stopped:  # by another thread
                raise HelperGone
            try:
                with socket.socket(fileno=os.dup(self._fd)) as requests:
                    request.send(requests)
            except BlockingIOError as error:  # the queue of requests is full
                self.is_late = True
                raise HelperGone from error
            except ConnectionError as error:  # the helper is ending
                self.stop()
                raise HelperGone from error

    def wait_for(self, fd: int, deadline: float) -> None:
        """Wait until ``fd`` is readable. Raises TimeoutError at ``deadline``, HelperGone if ``responds()`` is False."""
        while True:
            left_s = deadline - time.monotonic()
            with allow_interrupts():
                ready = wait_for([fd, self._pidfd], min(left_s, _LOOK_EVERY_S))
            if fd in ready:
                return
            if not self.responds():
                raise HelperGone
            if left_s <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "the helper process does not respond")

    def await_report(self, fd: int) -> None:
        """Wait at most a second until the helper reports through ``fd`` how an ended process of its own has ended.

        After a wait in vain, the helper is busy, such as with an import, and there are no more waits for some time. So
        a call that finds many processes ended takes a second longer, and not a second for each.
        """
        now = time.monotonic()
        if now >= self._wait_again_at and not wait_for([fd], _REAP_S):
            self._wait_again_at = now + _REAP_S + _NO_WAIT_S

    def note_response(self) -> None:
        """Record that the helper has responded, and so is neither hung nor busy."""
        self.is_late, self._wait_again_at = False, -math.inf

    def stop(self) -> None:
        """Kill and reap the helper and close its descriptors. Its children keep running. A second call does nothing."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            for fd in (self._fd, self._pidfd):
                descriptors.close(fd)


_lock = threading.RLock()
_life_fds: tuple[int, int] | None = None
_helpers: list[Helper] = []


@after_fork_in_child
def _forget_helpers() -> None:
    """Discard the parent's helpers and life pipe, in a process that user code has forked."""
    global _lock, _life_fds, _helpers
    _lock, _life_fds, _helpers = threading.RLock(), None, []


def find_helper(user: Process | None = None) -> Helper:
    """Return a helper that is not late, for ``user`` if given. Start one if there is none."""
    global _life_fds
    with _lock:
        if _life_fds is None:
            read_fd, write_fd = os.pipe()
            _life_fds = register(read_fd), register(write_fd)
        helper = _choose_helper()
        if helper is None:
            helper = Helper(_life_fds[0])
            _helpers.append(helper)
        if user is not None:
            helper.users.add(user)
        return helper


def _choose_helper() -> Helper | None:
    """Return the first helper that is not late, or None. Kill those without users, and those that do not respond."""
    chosen = None
    for helper in list(_helpers):
        responds = helper.responds()
        if responds and not helper.is_late and chosen is None:
            chosen = helper
        elif not responds or not helper.users:
            helper.stop()
            _helpers.remove(helper)
    return chosen


class Process:
    """A process that was started through the helper, with its pid, its pidfd and its exit code."""

    def __init__(self, kind: str, birth: Birth, call: Any, fds: Sequence[int], deadline: float = math.inf) -> None:
        """Start the process and wait for its pid. Raises TimeoutError at ``deadline``, or OSError on failure."""
        modules = ["envmanager.processes.child"] if kind == FORK else []
        modules += [module for name, module in PRELOADABLE.items() if kind == FORK and name in sys.modules]
        data_fd = os.memfd_create("envmanager-start", os.MFD_CLOEXEC)
        try:
            birth.write(data_fd, call)
            self._start(kind, modules, [data_fd, *fds], deadline)
        finally:
            os.close(data_fd)
        self._exit_code: int | None = None
        self._wait_until = math.inf
        """Time until which the end of a killed process is waited for, so that many killed together share one second."""
        self._is_released = False
        self._lock = threading.RLock()
        """Lock held while the descriptors are used, and while ``release`` closes them."""

    def _start(self, kind: str, modules: Sequence[str], fds: Sequence[int], deadline: float) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:  # once ``ours`` is closed, the helper does not start the process, or kills it
            request = Request(kind, modules, [theirs.fileno(), *fds])
            self._helper = find_helper(self)
            try:
                try:
                    self._helper.ask(request)
                except HelperGone:  # the helper has not read the request
                    self._helper.users.discard(self)
                    self._helper = find_helper(self)
                    self._helper.ask(request)
                theirs.close()
                self._helper.wait_for(ours.fileno(), deadline)
                data, received, _, _ = socket.recv_fds(ours, RESPONSE.size, 1)
                if not data:  # the helper is ending
                    self._helper.stop()
                    raise HelperGone
                self._helper.note_response()
                (self.pid,) = RESPONSE.unpack(data)
                if self.pid < 0:
                    raise OSError(-self.pid, os.strerror(-self.pid))
                if not received:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            except BaseException as error:
                self._helper.is_late |= isinstance(error, TimeoutError)
                self._helper.users.discard(self)
                with _lock:
                    _choose_helper()  # kills this one, unless other processes need it
                raise
            os.set_inheritable(received[0], False)
            self.pidfd, self._response_fd = register(received[0]), register(ours.detach())

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended. When it ends, the helper kills its process group."""
        with self._lock:
            if number == signal.SIGKILL:
                self._wait_until = min(self._wait_until, time.monotonic() + _REAP_S)
            if not self._is_released:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, number)

    def exit_name(self) -> str:
        """Wait briefly for the process to end. Return how it ended, such as ``SIGSEGV``, or ``EXIT(?)`` if unknown."""
        self._await_reaping()
        return exit_name(self._exit_code)

    def _await_reaping(self) -> None:
        """Wait briefly for the process to end. Store its exit code. If the helper is gone, kill the process group."""
        helper, left_s = self._helper, min(_REAP_S, self._wait_until - time.monotonic())
        if self._exit_code is not None or self._is_released or not wait_for([self.pidfd], left_s):
            return
        if helper.responds():
            helper.await_report(self._response_fd)
        with self._lock:
            if self._exit_code is not None or self._is_released:  # by another thread
                return
            data = os.read(self._response_fd, RESPONSE.size) if wait_for([self._response_fd], 0.0) else b""
            if len(data) == RESPONSE.size:
                (self._exit_code,) = RESPONSE.unpack(data)
                helper.note_response()
            elif not helper.responds() and state_of(self.pid) in ("", "Z"):
                # A number is not reused while its group has members. A process with this pid leads another group.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Wait briefly for the process to be reaped, then close its descriptors. A second call does nothing."""
        self._await_reaping()
        with self._lock:
            if not self._is_released:
                self._is_released = True
                descriptors.close(self.pidfd)
                descriptors.close(self._response_fd)
                self._helper.users.discard(self)


def start(
    start_method: str,
    name: str,
    function: str,
    arguments: tuple[Any, ...],
    *,
    fds: Sequence[int] = (),
    output: tuple[int, int] = (1, 2),
    environ: Mapping[str, str] = os.environ,
    deadline: float = math.inf,
) -> Process:
    """Start and return a Python process that calls ``function(fds, *arguments)``, with SIGINT blocked.

    ``function``: "module:name". ``fds``: descriptors to inherit, under other numbers. ``output``: descriptors for
    standard output and error. Raises TimeoutError at ``deadline`` (monotonic seconds), or another OSError on failure.
    """
    kind = FORK if start_method == "forkserver" else EXECUTE
    command, cores = python(sys.executable, "helper", "begin"), os.sched_getaffinity(0)
    birth = Birth(command, dict(environ), os.getcwd(), cores, inheritance(name, environ))
    return Process(kind, birth, (function, arguments), [*output, *fds], deadline)


def execute(
    command: Sequence[str], environ: Mapping[str, str], output_fd: int, cores: set[int], deadline: float = math.inf
) -> Process:
    """Start another program on ``cores``, with SIGINT blocked. Return its process. Raises OSError on failure."""
    birth = Birth(list(command), dict(environ), os.getcwd(), cores, None)
    return Process(EXECUTE, birth, None, [output_fd, output_fd], deadline)
