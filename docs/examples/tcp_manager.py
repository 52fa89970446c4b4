"""A kind of manager of your own: workers that connect over TCP, with deaths, deadlines and replacements.

::

    TcpEnvManager ── starts ──▶ python tcp_manager.py ADDRESS     (or a program on another machine starts it)
         ▲                              │ connects, and shows the token
         └──── commands, responses ─────┘

The manager's side is the first part of this file, the worker's side the second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import secrets
import socket
import sys
import time
from typing import Any

from envmanager import EnvironmentCommand, EnvironmentResponse, EnvManager
from envmanager.adapters.factories import factories_for, pickled
from envmanager.data.env_rows import split_evenly
from envmanager.data.steps import CommandName
from envmanager.hosts import descriptors
from envmanager.hosts.life import WorkerPlan
from envmanager.hosts.link import Link
from envmanager.hosts.link_host import LinkHost
from envmanager.hosts.wire import (
    CODES,
    COMMAND,
    FAILED_CODE,
    MESSAGE,
    MESSAGE_MARK,
    NAMES,
    Channel,
    Decoder,
    dumps_failure,
    response_message,
)
from envmanager.options import KindOptions, takes
from envmanager.processes.child import worker
from envmanager.processes.output import OutputLog
from envmanager.processes.starting import execute

TOKEN_BYTES = 32
TOKEN = "TCP_WORKER_TOKEN"
MOST_S_TO_SHOW_TOKEN = 60


class TcpChannel(Channel):
    """Waits for its worker at a port of its own, and then carries the messages."""

    def __init__(self) -> None:
        super().__init__()
        listener = socket.create_server(("127.0.0.1", 0))  # the worker shows a token, but its bytes are not encrypted
        listener.setblocking(False)
        # A connection that sends nothing is never accepted, so nothing here waits for one that may not be the worker's.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, MOST_S_TO_SHOW_TOKEN)
        self.address = "{}:{}".format(*listener.getsockname())
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self.waiting: list[tuple[bytes, float]] | None = []
        self.fd = descriptors.register(listener.detach())

    def push(self, message: bytes, deadline: float) -> None:
        if self.waiting is None:
            super().push(message, deadline)
        else:
            self.waiting.append((message, deadline))

    def pump(self) -> bool:
        return super().pump() if self.waiting is None or self.accept() else False

    def accept(self) -> bool:
        """Return whether the worker is here now; then send what has waited for it."""
        listener = socket.socket(fileno=self.fd)
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return False
        finally:
            listener.detach()
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if not secrets.compare_digest(connection.recv(TOKEN_BYTES), self.token.encode()):
                return False
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            before, after = self.fd, descriptors.register(connection.detach())
            self.on_moved(before, after)
            self.fd = after
            descriptors.close(before)
            waiting, self.waiting = self.waiting or [], None
            for message, deadline in waiting:
                super().push(message, deadline)
        return self.waiting is None


class TcpLink(Link):
    """The link to one worker, which is started here."""

    channel: TcpChannel

    def __init__(self, plan: WorkerPlan, factory: bytes, options: KindOptions, events: Any, times: Any) -> None:
        super().__init__(plan, TcpChannel(), events, times)
        self.decoder = Decoder(plan.worker_id, plan.env_ids)
        self.log, output_fd = None, os.dup(2)
        if options.log_dir is not None:
            os.close(output_fd)
            self.log, output_fd = OutputLog.open(options.log_dir, plan.worker_id, plan.generation)
        environ = {**(os.environ if options.worker_env is None else options.worker_env), TOKEN: self.channel.token}
        command = [sys.executable, __file__, self.channel.address, *sys.path]
        try:
            self.process = execute(command, environ, output_fd, os.sched_getaffinity(0))
        except BaseException:
            self.channel.close()
            raise
        finally:
            os.close(output_fd)
        self.channel.pidfd = self.process.pidfd
        self.channel.push(COMMAND.pack(plan.worker_id, 0, 0, 0, 0, len(factory)) + factory, float("inf"))

    def output_tail(self) -> str:
        return "" if self.log is None else self.log.tail()


class TcpHost(LinkHost[TcpLink]):
    """Starts, replaces and ends the workers."""

    options: KindOptions

    def __init__(self, env_factory: Any, options: KindOptions) -> None:
        super().__init__(env_factory, options)
        self.factories = factories_for(env_factory, options.n_envs)
        self.rewrites_arrays = False  # each response brings arrays of its own

    def make_worker(self, worker_id: int) -> TcpLink:
        entry = self.context.entries[worker_id]
        plan, data = self.plan_of(entry), pickled(self.group_factory(entry))
        return self.care_for(lambda: TcpLink(plan, data, self.options, self.context.events, entry.times))


class TcpEnvManager(EnvManager):
    """Runs environments in processes that it reaches over TCP. The options are those of KindOptions."""

    @takes(KindOptions)
    def __init__(self, env_factory: Any, options: KindOptions) -> None:
        n_workers = options.n_workers or options.n_envs
        super().__init__(split_evenly(options.n_envs, n_workers), **options.of_the_manager)
        self.start(TcpHost(env_factory, options))


# The worker's side.


class Connection:
    """The worker's end: commands come in, responses go out."""

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(token.encode())
        self.incoming = self.socket.makefile("rb")
        self.group: Any = None
        self.ticket = self.n_reported = self.began_ns = 0

    def use_group(self, group: Any) -> None:
        """Remember the environments, whose specs are reported."""
        self.group, self.n_reported = group, len(group.behavior_specs)

    def read(self) -> tuple[int, bytes, bytes]:
        """Return the code, the payload and the begins of the next command; EOFError when there is none any more."""
        head = self.incoming.read(COMMAND.size)
        if len(head) < COMMAND.size:
            raise EOFError
        self.ticket, code, _, _, n_begins, length = COMMAND.unpack(head)
        return code, self.incoming.read(length), self.incoming.read(n_begins)

    def recv(self) -> EnvironmentCommand:
        code, payload, begins = self.read()
        self.began_ns = time.perf_counter_ns()
        try:
            given = pickle.loads(payload) if payload else None
            if begins:
                self.group.on_demand.add(pickle.loads(begins))
        except Exception as error:
            given = error  # which the command raises
        return EnvironmentCommand(NAMES[code], given)

    def send(self, response: EnvironmentResponse) -> None:
        code, flags, specs = CODES[response.name], 0, None
        if code == FAILED_CODE:
            data = dumps_failure(response.payload)
        else:
            if response.name is not CommandName.START and len(self.group.behavior_specs) != self.n_reported:
                specs = dict(self.group.behavior_specs)
            flags, data = response_message(response.payload, specs, response.not_begun)
            self.n_reported = len(self.group.behavior_specs)
        now_ns = time.perf_counter_ns()  # 0 from another machine, whose clock is another one
        self.socket.sendall(
            MESSAGE.pack(self.ticket, code, flags, MESSAGE_MARK, 0, len(data), now_ns - self.began_ns, now_ns) + data
        )

    put = send
    """A step is answered like anything else."""


if __name__ == "__main__":
    faulthandler.enable()
    sys.path[:] = sys.argv[2:]
    connection = Connection(sys.argv[1], os.environ.pop(TOKEN))
    _, factory, _ = connection.read()  # its ticket is the number of the worker
    worker(connection, connection, factory, connection.ticket)
