"""The worker process: its set-up, and the loop that obeys commands.

::

    helper.run ──▶ main: set-up (signals, output, seeds) ──▶ worker(connection, step queue, factory, worker_id)

The rule: ``worker`` knows only ``recv``, ``send`` and ``put``, so it can be run in a test with mocks; tickets, slots
and shared memory belong to the two objects it is given (``child_transport``).
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from typing import Any

import cloudpickle
import numpy as np
import numpy.random  # here, so that the helper has it: NumPy loads it late

from envmanager.data.steps import STEPPING, CommandName, EnvironmentCommand, EnvironmentResponse
from envmanager.environment import EnvGroup
from envmanager.hosts.hosting import COMMANDS, GroupFactory, failed, make_group
from envmanager.hosts.wire import Undecoded
from envmanager.processes import forks, lifeline, output
from envmanager.processes.child_transport import (
    CannotObey,
    Connection,
    Launch,
    StepQueueWriter,
    TrainerGone,
    Transport,
)

FDS = ("connection", "steps", "memory", "crash")
"""The descriptors that a worker inherits."""
_STEP, _CLOSE = CommandName.STEP, CommandName.CLOSE


def worker(parent_conn: Any, step_queue: Any, pickled_env_factory: bytes, worker_id: int) -> None:
    """Make the environments, then obey commands until "close", or until ``recv`` raises EOFError.

    Responses to "step" go on ``step_queue``, all others on ``parent_conn``; so do "failed" ones, whose payload is an
    error of this library.
    """
    factory = group = failure = None
    try:
        factory = cloudpickle.loads(pickled_env_factory)
        group = make_group(factory, worker_id)
        if hasattr(parent_conn, "use_group"):
            parent_conn.use_group(group)
    except BaseException as error:
        if forks.is_fork:
            raise
        env_ids = [c.env_id for c in factory.contexts] if isinstance(factory, GroupFactory) else [worker_id]
        failure = failed(error, CommandName.START, worker_id=worker_id, env_ids=env_ids, group=None)
    while True:
        try:
            command = parent_conn.recv()
        except EOFError:
            break
        if command.name is _CLOSE:
            break
        respond = step_queue.put if command.name in STEPPING else parent_conn.send
        if failure is not None or group is None:
            respond(failure)
        else:
            _obey(group, command, respond, worker_id)
    if group is not None:
        group.close()


def _obey(group: EnvGroup, command: EnvironmentCommand, respond: Any, worker_id: int) -> None:
    name = _STEP if command.name in STEPPING else command.name
    try:
        payload = command.payload
        if payload.__class__ is Undecoded:
            payload = cloudpickle.loads(payload)
        elif payload.__class__ is CannotObey:
            raise payload.reason
        result = COMMANDS[command.name](group, payload)
        respond(EnvironmentResponse(name, worker_id, result))
    except TrainerGone:
        raise  # nobody is there to report to
    except BaseException as error:
        if forks.is_fork:
            raise
        # SystemExit, KeyboardInterrupt and MemoryError too: they come from the environment's code.
        respond(failed(error, command.name, worker_id=worker_id, env_ids=group.env_ids, group=group))


def main(inherited: list[int], launch: Launch) -> None:
    """Run one worker process to its end. It inherits what ``FDS`` names, in this order."""
    fds = dict(zip(FDS, inherited, strict=True))
    # A Ctrl-C meant for the trainer: the worker obeys the trainer. Ignoring it drops one that is pending.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    crash_fd = output.enable_crash_report(fds["crash"], launch.worker_id)
    # All workers have the helper's generators, and would draw the same numbers.
    random.seed(launch.seed)
    np.random.seed(launch.seed % 2**32)
    transport = Transport(fds, launch)
    forks.watch(lambda: _leave_worker(transport, crash_fd))
    try:
        worker(Connection(transport), StepQueueWriter(transport), launch.pickled_factory, launch.worker_id)
    except BaseException as error:
        # What an environment forks comes here too when it leaves the environment's code, and ends.
        if forks.is_fork:
            forks.end(None if isinstance(error, TrainerGone) else error)
        if isinstance(error, TrainerGone):  # it may be noticed here before the life pipe tells
            lifeline.end_group()
        raise
    if forks.is_fork:
        forks.end(None)


def _leave_worker(transport: Transport, crash_fd: int) -> None:
    transport.cut_off()
    output.leave_crash_report(crash_fd)
