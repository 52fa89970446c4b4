"""The helper process, one per program. It starts workers, kills them when the trainer dies, and reaps them.

::

    trainer ── one socket: requests with descriptors ────────▶ helper ── fork ──▶ worker, engine, learner
       ▲                                                         │
       └──── one socket per process: its pid and pidfd, later its exit code

How a process starts: ``starting.start`` writes a Birth to a file in memory and sends a request → ``_Helper._obey`` →
``_Helper._start`` forks → ``_become`` turns the fork into the requested process → ``begin`` calls its function. With
start method "forkserver" the fork keeps the libraries that the helper has loaded. With "spawn" it executes a new
Python, which calls ``begin``. An engine executes its own program.

The helper listens on no address, because it inherits the other end of the trainer's one socket. It is the parent of the
processes that it starts. When a process ends, even while the trainer computes, the helper kills the rest of its process
group. Only then does it reap the process, because the number of the group may be reused after that.
*Lifelines* kill all these processes when the trainer dies, for whatever reason::

    trainer ── write end ──▶ life pipe ◀── lifelines: one in each process; two per process in the helper

The trainer holds the write end of one pipe for as long as it lives. A lifeline is the read end of this pipe, opened
again through /proc/self/fd, so that it has an open file description and an owner (F_SETOWN) of its own. The kernel
sends SIGKILL (F_SETSIG) to the owner when the last writer is gone. This needs no thread and no GIL, and works while the
process is in native code, ignores SIGTERM or is stopped. PR_SET_PDEATHSIG is not enough: it fires when the *thread*
that started the process ends, and not at all in children of the helper. A worker that crashes loses its lifeline, and
an environment may close all descriptors or join another group. So the helper holds two more lifelines for each process:
one owned by its group, one by the process. The kernel identifies an owner by more than its number, so a later process
with the same number is not killed. Where lifelines do not work (no /proc, a sandbox without signal-driven I/O), the
helper kills the groups itself, and a thread in each worker, which needs the GIL, waits for the end of the pipe.

The rule: the helper runs no user code except imports, and waits for no process that runs any. It opens its own lifeline
before all others, because the kernel signals from the newest to the oldest, and a helper that is killed first would
close the others. This module imports only the standard library and ``boot``, so that the helper starts fast for a
program that needs only lifelines.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import gc
import importlib
import os
import pickle
import pkgutil
import resource
import select
import signal
import socket
import struct
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from envmanager.processes.boot import Inheritance, end_group, end_with_trainer, flush_output, inherit, set_environ

RESPONSE = struct.Struct("<q")
"""Format of both responses to a start: first a pid or a negative errno, later an exit code (negative: a signal)."""
FORK, EXECUTE = "fork", "execute"
"""Kinds of requests."""
_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 64
_COULD_NOT_EXECUTE = 127


class Birth(NamedTuple):
    """The settings of a new process, which are applied before it calls its function or executes another program."""

    command: list[str]
    """Program to execute, with its arguments. Unused with the request FORK."""
    environ: dict[str, str]
    directory: str
    cores: set[int]
    python: Inheritance | None
    """Settings that a Python process takes over before it calls its function; None for any other program."""

    def write(self, data_fd: int, call: Any) -> None:
        """Write this Birth to a file, and ``call``: a function and its arguments, or None for another program."""
        with open(data_fd, "wb", closefd=False) as file:
            pickle.dump(self, file)
            pickle.dump(call, file, protocol=5)
        os.lseek(data_fd, 0, os.SEEK_SET)


class Request(NamedTuple):
    """A request to the helper: one message over the trainer's socket."""

    kind: str
    modules: Sequence[str] = ()
    fds: Sequence[int] = ()
    """Descriptors: a socket for the responses, the file with the Birth, standard output and error, and others."""

    def send(self, requests: socket.socket) -> None:
        """Send the request without blocking. Raises OSError if that fails."""
        data = " ".join([self.kind, *self.modules]).encode()
        socket.send_fds(requests, [data], self.fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    @classmethod
    def receive(cls, requests: socket.socket) -> Request | None:
        """Return the next request, or None if the trainer is dying. Without room for its ``fds``, it has none."""
        data, fds, flags, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return None
        kind, *modules = data.decode().split()
        return cls(kind, modules, () if flags & socket.MSG_CTRUNC else fds)


class _Child(NamedTuple):
    pid: int
    pidfd: int
    response_fd: int
    lines: list[int]


def main(requests_fd: int, life_fd: int) -> None:
    """Run the main loop of the helper. In a new fork that is to call a function, the loop ends; ``begin`` follows."""
    exit_code: int | None = None  # None in the helper itself

    def exit_of_fork() -> None:
        """Exit at once. Python's usual shutdown frees all modules inherited from the helper, which takes longer than
        starting a process.
        """
        if exit_code is not None:
            flush_output()
            os._exit(exit_code)

    atexit.register(exit_of_fork)  # before all others, so that it runs last
    # A process group suffices to avoid a terminal's signals. With a session, Linux (autogroup) would give half of the
    # cores' time to the trainer and half to all workers, which doubles the duration of a round with eight workers.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is inherited as ignored, the kernel reaps our children
    helper = _Helper(requests_fd, life_fd)
    helper.serve()
    if helper.born:
        exit_code = 1
        begin(*helper.born)
        exit_code = 0


class _Helper:
    """The main loop of the helper process, and the table of the child processes that it has started."""

    def __init__(self, requests_fd: int, life_fd: int) -> None:
        self._requests = socket.socket(fileno=requests_fd)
        self._life_fd = life_fd
        self._own_lines: list[int] = []
        with contextlib.suppress(OSError):  # without a lifeline, ``serve`` detects the end of the life pipe
            # Before all other lifelines, because the kernel kills the owner of the oldest last.
            self._own_lines.append(line_for(life_fd, os.getpid()))
        self._children: dict[int, _Child] = {}
        """Processes that were started but not reaped yet, by pidfd."""
        self._awaited: dict[int, int] = {}
        """Pids of children by ``response_fd``, the socket through which the trainer receives the exit code."""
        self.born: tuple[int, ...] = ()
        """Arguments for ``begin`` in a new fork; empty in the helper."""
        self._loaded: set[str] = set()
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))
        self._poll = select.poll()
        self._poll.register(life_fd, select.POLLIN)  # first: a request of a trainer that has died is not obeyed
        self._poll.register(requests_fd, select.POLLIN)

    def serve(self) -> None:
        """Serve requests and reap children until the trainer dies or descriptors run out. Also return in a new fork."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._life_fd:
                    for child in self._children.values():
                        _kill_group(child.pid)
                    return
                if fd in self._awaited:  # the trainer has closed its end, because a Ctrl-C interrupted the start
                    self._poll.unregister(fd)
                    _kill_group(self._awaited.pop(fd))
                elif fd in self._children:
                    self._reap(self._children.pop(fd))
                elif fd == self._requests.fileno() and not self._obey():  # fd may be of a child just reaped
                    return

    def _obey(self) -> bool:
        """Carry out one request. Return whether to serve more: not in a new fork or if descriptors have run out."""
        request = Request.receive(self._requests)
        if request is None:  # the life pipe closes when the trainer has died
            self._poll.unregister(self._requests)
            return True
        self._load(request.modules)
        if not request.fds:  # out of descriptors; a new helper will have some
            return False
        for fd in request.fds:
            os.set_inheritable(fd, False)
        response_fd, *others = request.fds
        if is_cut(response_fd):  # the start has timed out, or was interrupted
            _close(*request.fds)
            return True
        try:
            self._start(request.kind == EXECUTE, response_fd, others)
            if self.born:
                return False
        except OSError as error:
            _respond(response_fd, -(error.errno or errno.EIO))
            _close(response_fd)
            if error.errno == errno.EMFILE:
                return False
        _close(*others)
        return True

    def _load(self, modules: Iterable[str]) -> None:
        """Import modules that forks will share. Ignore errors, which recur in any worker that imports the module."""
        missing = [name for name in modules if name not in self._loaded]
        if missing:
            self._loaded.update(missing)
            for name in missing:
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
            flush_output()  # else each fork repeats the output of the imports
            gc.freeze()  # a garbage collection in a worker then copies no pages shared with this process

    def _start(self, executes: bool, response_fd: int, fds: list[int]) -> None:
        """Start a process and report its pid, or raise OSError. In a child that will call ``begin``, set ``born``."""
        failure_r, failure_w = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which no worker needs
                pid = os.fork()
        except OSError:
            _close(failure_r, failure_w)
            raise
        if pid == 0:
            _close(response_fd, failure_r, self._requests.detach(), *self._own_lines)
            for child in self._children.values():
                _close(child.pidfd, child.response_fd, *child.lines)
            self.born = _become(executes, fds, self._life_fd, failure_w, self._limits)
            return
        _close(failure_w)
        with contextlib.suppress(OSError):  # the child has called this already, and executed a program
            os.setpgid(pid, pid)
        lines: list[int] = []
        with contextlib.suppress(OSError):
            for owner in (-pid, pid):  # two, because the child may leave the group or close its own line
                lines.append(line_for(self._life_fd, owner))
        failure = os.read(failure_r, RESPONSE.size) if executes else b""  # empty: exec has closed the pipe
        _close(failure_r)
        try:
            if failure:
                (number,) = RESPONSE.unpack(failure)
                raise OSError(number, os.strerror(number))
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            _close(*lines)
            raise
        self._children[pidfd] = _Child(pid, pidfd, response_fd, lines)
        self._poll.register(pidfd, select.POLLIN)
        self._awaited[response_fd] = pid
        self._poll.register(response_fd, 0)  # reports when the other end is closed
        _respond(response_fd, pid, pidfd)

    def _reap(self, child: _Child) -> None:
        """Kill the rest of an ended child's process group. Then reap the child and report its exit code."""
        self._poll.unregister(child.pidfd)
        if self._awaited.pop(child.response_fd, None) is not None:
            self._poll.unregister(child.response_fd)
        _kill_group(child.pid)
        _, status = os.waitpid(child.pid, 0)
        _respond(child.response_fd, os.waitstatus_to_exitcode(status))
        _close(child.pidfd, child.response_fd, *child.lines)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _respond(fd: int, number: int, *fds: int) -> None:
    """Send a number and descriptors to the trainer over the socket ``fd``, unless the trainer has closed its end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as trainer:
        socket.send_fds(trainer, [RESPONSE.pack(number)], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


# Lifelines.


VARIABLE = "ENVMANAGER_LIFELINE"
"""Environment variable. With the value ``thread``, a thread in each worker is used instead of lifelines."""


def line_for(life_fd: int, owner: int) -> int:
    """Return a descriptor that makes the kernel kill ``owner`` (pid or -pgid) if the trainer dies, or raise OSError."""
    if os.environ.get(VARIABLE) == "thread":
        raise OSError(f"{VARIABLE}=thread")
    line = os.open(f"/proc/self/fd/{life_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(line, fcntl.F_SETOWN, owner)
        fcntl.fcntl(line, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except OSError:
        os.close(line)
        raise
    return line


def is_cut(fd: int) -> bool:
    """Return whether the pipe or socket ``fd`` has ended, because the trainer has died or closed its end."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


# In the forked process.


def _become(
    executes: bool, fds: Sequence[int], life_fd: int, failure_w: int, limits: tuple[int, int]
) -> tuple[int, ...]:
    """Set this fork up as the requested process. Return arguments for ``begin`` or execute a program."""
    try:
        data_fd, stdout, stderr, *others = fds
        with open(data_fd, "rb", closefd=False) as file:
            birth: Birth = pickle.load(file)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd, number in ((stdout, 1), (stderr, 2)):  # 0 is /dev/null, because only the trainer reads input
            os.dup2(fd, number)
            os.close(fd)
        # A new Python may need variables such as LD_LIBRARY_PATH to start; ``begin`` removes them.
        environ = {**os.environ, **birth.environ} if birth.python else birth.environ
        set_environ(birth.environ)
        os.chdir(birth.directory)
        os.sched_setaffinity(0, birth.cores)
        try:
            line, is_tied = line_for(life_fd, -os.getpid()), 1
            os.close(life_fd)
        except OSError:
            line, is_tied = life_fd, 0  # a thread waits for the end of the pipe (see begin)
        if is_cut(line):  # the trainer died before the lifeline was set up
            end_group()
        kept = (data_fd, line, *others)
        if not executes:
            os.close(failure_w)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
            return is_tied, *kept
        for fd in kept if birth.python else (line,):
            os.set_inheritable(fd, True)
        numbers = map(str, (is_tied, *kept)) if birth.python else ()
        for signal_number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signal_number, signal.SIG_DFL)  # else the program inherits that Python ignores them
        signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
        os.execvpe(birth.command[0], [*birth.command, *numbers], environ)
    except BaseException as error:
        if executes and isinstance(error, OSError):
            os.write(failure_w, RESPONSE.pack(error.errno or errno.EIO))
        else:
            traceback.print_exc()
    os._exit(_COULD_NOT_EXECUTE)


def begin(is_tied: int, data_fd: int, line: int, *fds: int) -> None:
    """Read settings, a function and arguments from ``data_fd``; apply the settings; call ``function(fds, *arguments)``.

    If ``is_tied`` is 0, ``line`` is the life pipe, and a thread kills this process when the pipe ends.
    """
    for fd in (data_fd, line, *fds):
        os.set_inheritable(fd, False)
    os.lseek(data_fd, 0, os.SEEK_SET)
    with open(data_fd, "rb") as file:
        birth: Birth = pickle.load(file)
        assert birth.python is not None
        inherit(birth.python)
        if not is_tied:
            end_with_trainer(line)
        function, arguments = pickle.load(file)
    pkgutil.resolve_name(function)(list(fds), *arguments)
