"""The portable transport, for every system: ``subprocess`` starts workers, and each has a socket for all its messages.

::

    trainer                                                             worker
    PortableProcess ── standard input: what to do, then nothing ──────▶ boot.run ──▶ child.main
      its thread    ── waits for the end of the process
                       and then closes one end of a socket pair
    Channel ◀────────── a socket: COMMANDs and MESSAGEs ──────────────▶ TrainerConnection
    SharedRows ◀─────── a temporary file without a name ──────────────▶ SharedRows

Standard input is also the lifeline: it ends when the trainer dies, and then a thread in the worker kills its group. The
thread in the trainer writes to it, so that a worker that reads slowly, or never, delays no other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from typing import Any

from envmanager.hosts import descriptors
from envmanager.hosts.link_host import Resources
from envmanager.hosts.poller import Poller
from envmanager.kernel.table import Entry
from envmanager.processes.boot import LENGTH, THREAD_CAPS, inheritance, python
from envmanager.processes.process_host import ProcessHost
from envmanager.processes.process_link import LaunchPlan, ProcessLink
from envmanager.system.interrupts import blocked_in_children
from envmanager.system.machine import core_wait_ns, exit_name

_REAP_S = 1.0
"""Maximum time in seconds to wait until a killed process has ended."""


class PortableProcess:
    """A worker process, and the thread that tells it what to do and then waits for its end."""

    def __init__(self, plan: LaunchPlan, pickled_factory: bytes, connection: socket.socket, output_fd: int | None):
        """Start the process. Raises OSError if this fails."""
        environ = {**dict.fromkeys(THREAD_CAPS, "1"), **plan.environ}
        executable, their_end = sys.executable, connection.fileno()
        kept: list[Any] = []
        before = dict(os.environ)
        if sys.platform == "win32":
            environ.setdefault("SYSTEMROOT", os.environ["SYSTEMROOT"])  # no socket can be made without it
            if sys.prefix != sys.base_prefix:  # the executable of a venv would start another process
                before["__PYVENV_LAUNCHER__"] = executable
                executable = sys._base_executable
        else:
            kept = [their_end, plan.memory]
        life_fd, self._life_fd = os.pipe()
        descriptors.register(self._life_fd)
        self.pidfd, self._end_fd = descriptors.socket_pair()
        try:
            with blocked_in_children():
                self._popen = subprocess.Popen(
                    python(executable, "boot import run; run"),
                    env={**before, **environ},  # a new Python may need variables that the environments do not get
                    pass_fds=kept,
                    stdin=life_fd,
                    stdout=output_fd,
                    stderr=output_fd,
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # without Ctrl-C, on Windows
                )
            self.pid = self._popen.pid
            self._lock = threading.Lock()
            self._has_ended = False
            self._exit_code: int | None = None
            self._thread = threading.Thread(target=self._serve, name=f"envmanager-worker-{plan.worker_id}", daemon=True)
            if sys.platform == "win32":
                their_end = connection.share(self.pid)
            arguments = [plan.memory], plan.worker_id, plan.generation, plan.seed, plan.spin_ns, pickled_factory
            inherited = inheritance(f"envmanager-worker-{plan.worker_id}", environ)
            data = pickle.dumps((inherited, "envmanager.processes.child:main", their_end, arguments), protocol=5)
            self._to_write = memoryview(LENGTH.pack(len(data)) + data)
            self._start_thread()
        except BaseException:
            self._close_own()
            descriptors.close(self.pidfd)
            raise
        finally:
            os.close(life_fd)

    def _start_thread(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads are allowed
            self._popen.kill()
            self._popen.wait()
            raise OSError(errno.EAGAIN, str(error)) from error

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended before it has read everything
            while self._to_write:
                self._to_write = self._to_write[os.write(self._life_fd, self._to_write) :]
        self._to_write = memoryview(b"")
        self._exit_code = self._wait()
        self._close_own()

    def _wait(self) -> int | None:
        """Wait until the process has ended, and kill the rest of its group. Return its exit code, if it is known."""
        is_known = True
        if hasattr(os, "waitid"):  # not reaped yet, so that no other group can have the number
            try:
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:  # the user's code has reaped it
                is_known = False
        else:
            self._popen.wait()
        with self._lock:
            self._has_ended = True
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        code = self._popen.wait()
        return code if is_known else None

    def _close_own(self) -> None:
        descriptors.forget(self._life_fd)
        os.close(self._life_fd)
        descriptors.close(self._end_fd)

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended. When it ends, the rest of its group is killed."""
        with self._lock:
            if self._has_ended:
                return
            if sys.platform != "win32":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
            elif number != signal.SIGTERM:  # which Windows does not have
                self._popen.kill()

    def core_wait_ns(self) -> int:
        """Return the time (ns) that the process has waited for a free core; 0 if the system does not report it."""
        return core_wait_ns(self.pid)

    def exit_name(self) -> str:
        """Return how the process ended: ``SIGSEGV``, ``EXIT(3)``, or ``EXIT(?)`` if that is unknown."""
        self._thread.join(_REAP_S)
        return exit_name(self._exit_code)

    def release(self) -> None:
        """Wait until the process is reaped, and close its descriptors. A second call does nothing."""
        self._thread.join(_REAP_S)
        self.pidfd = descriptors.close(self.pidfd)


class PortableLink(ProcessLink):
    """The link to a process that ``subprocess`` has started. All its responses come through its own connection."""

    process: PortableProcess

    def _launch(self, plan: LaunchPlan, pickled_factory: bytes, output_fd: int | None) -> tuple[PortableProcess, int]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for each in (ours, theirs):
                if each.family == socket.AF_INET:  # on Windows
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours.setblocking(False)
            process = PortableProcess(plan, pickled_factory, theirs, output_fd)
            return process, descriptors.register(ours.detach())


class PortableHost(ProcessHost):
    """The host of workers of the portable transport."""

    def _make_resources(self) -> Resources[ProcessLink]:
        poller: Poller[ProcessLink] = Poller(spin_ns=self._spin_ns)
        give_back: list[Any] = []
        if sys.platform == "win32":
            self._memory = f"envmanager-{secrets.token_hex(16)}"
        else:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # else it may be written to a disk
            with tempfile.TemporaryFile(dir=folder) as file:
                self._memory = descriptors.register(os.dup(file.fileno()))
            give_back.append(partial(descriptors.close, self._memory))
        return Resources(self.options.timeouts.close_s, poller, *give_back)

    def _make_link(self, plan: LaunchPlan, pickled_factory: bytes, entry: Entry) -> PortableLink:
        return PortableLink(plan, pickled_factory, self.context.events, entry.times)
