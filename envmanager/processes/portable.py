"""The portable transport, for every system: ``subprocess`` starts workers, and each has a socket for all its messages.

::

    trainer                                                             worker
    PortableProcess ── standard input: a call; it stays open ─────────▶ boot ──▶ child.run_worker
      its thread    ── waits for the end of the process
                       and then closes the peer of the socket ``pidfd``
    Channel ◀────────── a socket: COMMANDs and MESSAGEs ──────────────▶ TrainerConnection
    SharedRows ◀─────── memory of an unnamed file; named on Windows ──▶ SharedRows

Standard input is also the lifeline: it ends when the trainer dies, and a thread in the worker then calls
``end_group``. A thread in the trainer writes the call, so a worker that reads slowly, or never, delays no other worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from envmanager.hosts import descriptors
from envmanager.hosts.link_host import Resources
from envmanager.hosts.poller import Poller
from envmanager.processes.boot import inheritance, python
from envmanager.processes.process_host import LaunchPlan, ProcessHost, ProcessLink
from envmanager.system.interrupts import blocked_in_children
from envmanager.system.machine import exit_name, state_of

_REAP_S = 1.0
"""Maximum time in seconds to wait until a killed process has ended."""
_PIDFD_GET_INFO, _INFO_EXIT = 0xC040FF0B, 1 << 3
_PIDFD_INFO = struct.Struct("=Q52xi")
"""Mask of the fields that are wanted or known, and the status of a process that was reaped (Linux 6.15)."""
_EXTENDED_LIMITS, _KILL_ON_JOB_CLOSE = 9, 0x2000
_LIMIT_FLAGS_AT = 16
_LIMITS_BYTES = 144 if sys.maxsize > 2**32 else 112


class PortableProcess:
    """A Python process started by ``subprocess``. A thread sends it the function to call and waits for it to end."""

    def __init__(
        self,
        name: str,
        function: str,
        arguments: tuple[Any, ...],
        *,
        connection: socket.socket,
        memory: int | str,
        environ: Mapping[str, str],
        output_fd: int | None = None,
    ) -> None:
        """Start a process that calls ``function([fd, memory], *arguments)``. Raises OSError if the start fails.

        ``function``: "module:name". ``fd``: its descriptor of ``connection``. ``memory``: from ``open_memory``.
        ``environ``: all environment variables. ``output_fd``: descriptor for its output; None for the trainer's.
        """
        self._lock = threading.RLock()
        self._has_ended = False
        self._exit_code: int | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        with contextlib.ExitStack() as undo:
            stdin_fd, self._life_fd = os.pipe()
            undo.callback(self._close_lifeline)
            descriptors.register(self._life_fd)  # a fork of the trainer must not keep it open
            try:
                self.pidfd, self._end_fd = descriptors.socket_pair()
                undo.callback(descriptors.close, self.pidfd)
                undo.callback(descriptors.close, self._end_fd)
                their_end: int | bytes = connection.fileno()
                kept = [] if sys.platform == "win32" else [their_end, memory]
                self._popen = _start_python(environ, stdin_fd, output_fd, kept)
            finally:
                os.close(stdin_fd)
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self._kill_group = _group_of(self._popen)
            self.pid = self._popen.pid
            self._kernel_fd = descriptors.CLOSED
            if hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):  # an old kernel, or the process has ended and was reaped
                    self._kernel_fd = descriptors.register(os.pidfd_open(self.pid))
            undo.callback(descriptors.close, self._kernel_fd)
            if sys.platform == "win32":
                their_end = connection.share(self.pid)
            todo = inheritance(name, environ), function, their_end, ([memory], *arguments)
            self._unwritten = memoryview(pickle.dumps(todo, protocol=5))
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads are allowed
                raise OSError(errno.EAGAIN, str(error)) from error
            undo.pop_all()

    def _serve(self) -> None:
        try:
            with contextlib.suppress(OSError):  # the process has ended before it has read everything
                while self._unwritten:
                    self._unwritten = self._unwritten[os.write(self._life_fd, self._unwritten) :]
            self._unwritten = memoryview(b"")
            self._exit_code = self._await_end()
            self._close_lifeline()
        finally:
            descriptors.close(self._kernel_fd)
            descriptors.close(self._end_fd)  # this makes ``pidfd`` readable

    def _await_end(self) -> int | None:
        """Wait for the process to end, reap it and kill its group. Return the exit code; None if unknown."""
        code, is_reaped = None, False
        if hasattr(os, "waitid"):
            is_known = self._kernel_fd != descriptors.CLOSED
            kind, number = (os.P_PIDFD, self._kernel_fd) if is_known else (os.P_PID, self.pid)
            try:
                end = os.waitid(kind, number, os.WEXITED | os.WNOWAIT)
                assert end is not None
                code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            except ChildProcessError:  # the user's code has reaped it, or ignores SIGCHLD
                is_reaped, code = True, _code_of_reaped(self._kernel_fd)
                self._popen.returncode = 0  # so that it does not wait for another child with this pid
        else:  # the process is reaped before its group is killed, whose number another could have by then
            code = self._popen.wait()
        with self._lock:
            self._has_ended = True
        if not is_reaped or not state_of(self.pid):  # else another process has the pid, and leads another group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._kill_group()
        self._popen.wait()
        return code

    def _close_lifeline(self) -> None:
        descriptors.forget(self._life_fd)
        with contextlib.suppress(OSError):
            os.close(self._life_fd)

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended. On Windows SIGTERM is ignored; other signals kill."""
        with self._lock:
            if self._has_ended:
                return
            if sys.platform != "win32":
                with contextlib.suppress(ProcessLookupError):
                    if self._kernel_fd == descriptors.CLOSED:
                        os.kill(self.pid, number)
                    else:
                        signal.pidfd_send_signal(self._kernel_fd, number)
            elif number != signal.SIGTERM:  # which Windows does not have
                self._popen.kill()

    def exit_name(self) -> str:
        """Return how the process ended: ``SIGSEGV``, ``EXIT(3)``, or ``EXIT(?)`` if this is unknown after a second."""
        self._thread.join(_REAP_S)
        return exit_name(self._exit_code)

    def release(self) -> None:
        """Wait at most a second for the process to be reaped, then close ``pidfd``. A second call does nothing."""
        self._thread.join(_REAP_S)
        self.pidfd = descriptors.close(self.pidfd)


def _code_of_reaped(pidfd: int) -> int | None:
    """Return the exit code of a process that other code has reaped, or None if the kernel does not keep it."""
    try:
        import fcntl

        info, poll = bytearray(_PIDFD_INFO.pack(_INFO_EXIT, 0)), select.poll()
        poll.register(pidfd, 0)
        poll.poll(_REAP_S * 1000)  # for POLLHUP: the process is about to be reaped
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except (ImportError, OSError, ValueError):
        return None
    known, status = _PIDFD_INFO.unpack(info)
    return os.waitstatus_to_exitcode(status) if known & _INFO_EXIT else None


def _start_python(
    environ: Mapping[str, str], stdin_fd: int, output_fd: int | None, kept: list[Any]
) -> subprocess.Popen[bytes]:
    """Start and return a Python process that runs ``boot.run``, inherits descriptors ``kept`` and survives Ctrl-C."""
    executable, needed = sys.executable, dict(os.environ)  # it may need variables that the environments do not get
    if sys.platform == "win32" and sys.prefix != sys.base_prefix:  # the executable of a venv starts another process
        executable, needed["__PYVENV_LAUNCHER__"] = sys._base_executable, sys.executable
    with blocked_in_children():
        return subprocess.Popen(
            python(executable, "boot", "run"),
            env={**needed, **environ},
            pass_fds=kept,
            stdin=stdin_fd,
            stdout=output_fd,
            stderr=output_fd,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )


def _group_of(process: subprocess.Popen[bytes]) -> Callable[[], object]:
    """Return a function that kills ``process`` and the processes that it has started.

    The function kills the process group or, on Windows, closes a job object. The kernel closes it if the trainer dies.
    """
    if sys.platform != "win32":
        return partial(os.killpg, process.pid, signal.SIGKILL)
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.CreateJobObjectW.restype = ctypes.c_void_p
    job = ctypes.c_void_p(kernel32.CreateJobObjectW(None, None))
    limits = ctypes.create_string_buffer(_LIMITS_BYTES)  # a JOBOBJECT_EXTENDED_LIMIT_INFORMATION
    struct.pack_into("<I", limits, _LIMIT_FLAGS_AT, _KILL_ON_JOB_CLOSE)
    kernel32.SetInformationJobObject(job, _EXTENDED_LIMITS, limits, len(limits))
    kernel32.AssignProcessToJobObject(job, ctypes.c_void_p(int(process._handle)))
    return partial(kernel32.CloseHandle, job)


def open_memory() -> int | str:
    """Return a descriptor of an empty, unnamed file to map as shared memory; on Windows, a name for the memory.

    The caller closes the descriptor. Mapped memory stays mapped.
    """
    if sys.platform == "win32":
        return f"envmanager-{secrets.token_hex(16)}"
    if hasattr(os, "memfd_create"):  # Linux, where /dev/shm may be small, full or read-only
        return descriptors.create_memory("envmanager")
    memory, path = tempfile.mkstemp(prefix="envmanager-")  # which may be written to a disk
    os.unlink(path)
    return descriptors.register(memory)


class PortablePoller(Poller["PortableLink"]):
    """A poller that makes no Message of a step that is entirely in shared memory."""

    def pump(self, link: PortableLink) -> None:
        step = link.channel.take_step(link.awaited.ticket) if link.awaited.ticket else None
        if step is None:
            super().pump(link)
            return
        flags, n_ended, busy_ns, ended_ns = step
        link.times.stepped(busy_ns, ended_ns)
        link.awaited.clear()
        self.arrived.append(link.decoder.record(link.slot, flags, n_ended))


class PortableLink(ProcessLink):
    """The link to a worker started by ``subprocess``. All responses, including steps, arrive through one socket."""

    process: PortableProcess

    def launch(self, plan: LaunchPlan, pickled_factory: bytes, output_fd: int | None) -> tuple[PortableProcess, int]:
        ours, theirs = descriptors.connected_sockets()
        with ours, theirs:
            ours.setblocking(False)
            process = PortableProcess(
                *plan.call(pickled_factory),
                connection=theirs,
                memory=plan.memory,
                environ=plan.environ,
                output_fd=output_fd,
            )
            return process, descriptors.register(ours.detach())


class PortableHost(ProcessHost):
    """A ProcessHost whose workers are started by ``subprocess``, each with one socket for all its responses."""

    link_class = PortableLink

    def _make_resources(self) -> Resources[ProcessLink]:
        self._memory = memory = open_memory()
        close = [partial(descriptors.close, memory)] if isinstance(memory, int) else []
        poller: Any = PortablePoller(spin_ns=self._spin_ns)
        return Resources(self.options.timeouts.close_s, poller, *close)
