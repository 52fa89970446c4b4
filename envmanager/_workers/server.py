"""The server that workers are forked from: it has the usual libraries loaded, and none of the trainer's threads.

::

    trainer ── one socket: requests, each with descriptors ──▶ server ── fork ──▶ worker
       ▲                                                         │
       └──── one socket per worker: its pid and pidfd, later its exit code

Nobody can connect to it, because it listens nowhere: it inherits the other end of the one socket that it is asked
through. It is the workers' parent, so it ends what is left of a worker's group before it reaps the worker (see
``groups``), at once and also while the trainer computes.

The rule: the server runs nothing of the user's but imports, and it never waits for a worker.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker, spawn, util
from typing import Any, NoReturn

import attrs

from envmanager._workers import boot, descriptors, groups, lifeline
from envmanager.system.interrupts import blocked_in_children, let_through

_util: Any = util  # its type stubs leave out what is needed here
_forkserver: Any = forkserver
_spawn: Any = spawn
_tracker: Any = resource_tracker

_RESPONSE = struct.Struct("<q")
"""A pid, or the negative errno of the fork that failed; later an exit code, negative for a signal."""
_FORK, _HOLD = b"f", b"h"
"""Requests: fork with these descriptors, and hold this one."""
_MOST_DESCRIPTORS = 64
_LOOK_EVERY_S = 0.5
"""How often to look whether a server that does not respond is there and not stopped."""


class ServerGone(OSError):
    """The server has ended or is stopped, and is no use any more."""


class Server:
    """The trainer's side: one server process. It ends with this process, or by ``stop``."""

    def __init__(self, preload: Iterable[str]) -> None:
        """Start it, and do not wait for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alive_r, alive_w = os.pipe()
        path = spawn.get_preparation_data("server")["sys_path"]
        command = (
            f"import sys; sys.path[:] = {path!r}; from envmanager._workers.server import serve; "
            f"serve({theirs.fileno()}, {list(preload)!r})"
        )
        program = os.fsdecode(spawn.get_executable())
        arguments = [program, *_util._args_from_interpreter_flags(), "-c", command]
        try:
            with blocked_in_children():
                pid: int = _util.spawnv_passfds(os.fsencode(program), arguments, [theirs.fileno()])
            _send_lifeline(ours, alive_r, pid)
        except BaseException:
            ours.close()
            os.close(alive_w)
            raise
        finally:
            theirs.close()
            os.close(alive_r)
        self._fd, self._alive_fd = descriptors.register(ours.detach()), descriptors.register(alive_w)
        self._pidfd = descriptors.register(os.pidfd_open(pid))
        self._is_stopped = False

    def responds(self) -> bool:
        """Whether it is there, and not stopped by a signal."""
        if self._is_stopped:
            return False
        try:
            options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PIDFD, self._pidfd, options) is None
        except ChildProcessError:  # the user's code has reaped it
            return False

    def ask(self, response_fd: int, data_fd: int, inherited: Iterable[int], deadline: float) -> None:
        """Ask for a process that runs what ``data_fd`` describes; ``response_fd``'s other end brings the response."""
        fds = [response_fd, data_fd, _tracker.getfd(), *inherited]
        with socket.socket(fileno=os.dup(self._fd)) as requests:
            while True:
                try:
                    socket.send_fds(requests, [_FORK], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:  # it has much to do, or does not read
                    self._wait([], deadline, writable=[self._fd])
                except ConnectionError as error:
                    raise ServerGone(errno.ECONNRESET, "the fork server has ended") from error

    def wait_for_response(self, fd: int, deadline: float) -> tuple[int, int]:
        """The pid and a pidfd of the process that was asked for; OSError when it could not be made."""
        self._wait([fd], deadline)
        with socket.socket(fileno=os.dup(fd)) as responses:
            data, fds, _, _ = socket.recv_fds(responses, _RESPONSE.size, 1)
        if not data:
            raise ServerGone(errno.ECONNRESET, "the fork server has ended")
        (pid,) = _RESPONSE.unpack(data)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        if not fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        os.set_inheritable(fds[0], False)
        return pid, fds[0]

    def _wait(self, readable: Iterable[int], deadline: float, *, writable: Iterable[int] = ()) -> None:
        """Wait for one of these; ServerGone when the server cannot respond, TimeoutError when it does not in time."""
        while True:
            left_s = deadline - time.monotonic()
            with let_through():
                watched = [*readable, self._pidfd]
                ready = descriptors.wait_for(watched, min(left_s, _LOOK_EVERY_S), writable=writable)
            if ready - {self._pidfd}:
                return
            if not self.responds():
                raise ServerGone(errno.ECONNRESET, "the fork server has ended or is stopped")
            if left_s <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "the fork server does not respond")

    def exit_code(self, fd: int, timeout_s: float) -> int | None:
        """How the process ended whose responses come through ``fd``; None when the server does not tell in time.

        Nobody waits for one that has ended or is stopped.
        """
        if not descriptors.wait_for([fd], 0.0) and not (self.responds() and descriptors.wait_for([fd], timeout_s)):
            return None
        with contextlib.suppress(OSError):
            data = os.read(fd, _RESPONSE.size)
            if len(data) == _RESPONSE.size:
                return int(_RESPONSE.unpack(data)[0])
        return None

    def stop(self) -> None:
        """Kill it and give back what it took; its workers live on. Twice does no harm."""
        if self._is_stopped:
            return
        self._is_stopped = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        for fd in (self._fd, self._alive_fd, self._pidfd):
            descriptors.close(fd)


def _send_lifeline(server: socket.socket, alive_fd: int, pid: int) -> None:
    """Tie it to this process by the kernel; where that refuses, it notices the end of the requests unless stopped."""
    with contextlib.suppress(OSError):
        line = lifeline.line_for(alive_fd, pid)
        socket.send_fds(server, [_HOLD], [line])
        os.close(line)


# In the server.


@attrs.frozen
class _Child:
    pid: int
    pidfd: int
    response_fd: int


def serve(requests_fd: int, preload: list[str]) -> None:
    """The server: import, then fork what is asked for and bury what has ended, until the trainer has gone."""
    os.setpgid(0, 0)  # a Ctrl-C, or another signal to the trainer's group, is not for it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a trainer that ignores it would have the kernel reap our children
    _util._close_stdin()
    boot.cap_threads()
    boot.preload(preload)
    gc.freeze()  # a collection in a worker then writes to none of the pages that it shares with this process
    _Nursery(requests_fd).run()


class _Nursery:
    """The server's loop, and the children that it has."""

    def __init__(self, requests_fd: int) -> None:
        self._requests = socket.socket(fileno=requests_fd)
        self._own_fds = [requests_fd]
        self._children: dict[int, _Child] = {}
        self._poll = select.poll()
        self._poll.register(requests_fd, select.POLLIN)

    def run(self) -> None:
        """Until nobody can ask any more."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._bury(self._children.pop(fd))
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        """Do what is asked for; False when this was the last time."""
        data, fds, flags, _ = socket.recv_fds(self._requests, 1, _MOST_DESCRIPTORS)
        if not data:
            return False
        if flags & socket.MSG_CTRUNC or not fds:  # too few descriptors are left; another server has more
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        if data == _HOLD:
            self._own_fds += fds
            return True
        response_fd, *others = fds
        try:
            self._fork(response_fd, others)
        except OSError as error:
            _respond(response_fd, -(error.errno or errno.EIO))
            os.close(response_fd)
            return error.errno != errno.EMFILE
        finally:
            for fd in others:
                os.close(fd)
        return True

    def _fork(self, response_fd: int, fds: list[int]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a library's thread, which the worker will do without
            pid = os.fork()
        if pid == 0:
            self._become_a_worker(response_fd, fds)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._children[pidfd] = _Child(pid, pidfd, response_fd)
        self._poll.register(pidfd, select.POLLIN)
        if not _respond(response_fd, pid, pidfd):
            os.kill(pid, signal.SIGKILL)  # nobody wants it any more

    def _become_a_worker(self, response_fd: int, fds: list[int]) -> NoReturn:
        code = 1
        try:
            for fd in (response_fd, *self._own_fds):
                os.close(fd)
            for child in self._children.values():
                os.close(child.pidfd)
                os.close(child.response_fd)
            data_fd, _tracker._resource_tracker._fd, *_forkserver._forkserver._inherited_fds = fds
            code = _spawn._main(data_fd, os.dup(data_fd))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def _bury(self, child: _Child) -> None:
        self._poll.unregister(child.pidfd)
        code = groups.bury(child.pid, child.pidfd)
        if code is not None:
            _respond(child.response_fd, code)
        os.close(child.pidfd)
        os.close(child.response_fd)


def _respond(fd: int, number: int, *fds: int) -> bool:
    """Respond to the one who asked; False when that cannot be."""
    try:
        with socket.socket(fileno=os.dup(fd)) as asker:
            socket.send_fds(asker, [_RESPONSE.pack(number)], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True
