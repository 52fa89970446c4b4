"""The worker process: its set-up, the loop that obeys commands, and the end of what an environment forks.

::

    helper.run ──▶ main: set-up (signals, output, seeds) ──▶ worker(connection, step queue, factory, worker_id)

    worker ─── step ───▶ environment ─── os.fork() ───▶ goes on as the worker
                                             └────────▶ the fork: what it holds of the transport leads nowhere;
                                                        when it leaves the environment's code, it ends

A fork may live on (a simulator), or end itself (``os._exit``, ``multiprocessing``, another program). If it returns,
raises or calls ``sys.exit`` where the worker does the same, it would take commands and respond to them too. It ends
like a script, but without what was registered to be done at the worker's end: ``atexit``, finalizers, ``close`` of the
environments.

The rule: ``worker`` knows only ``recv``, ``send`` and ``put``, so it can be run in a test with mocks; tickets, slots
and shared memory belong to the object that it is given (``child_transport``).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import numpy.random  # here, so that the helper has it: NumPy loads it late

from envmanager.data.steps import STEPPING, CommandName, EnvironmentCommand, EnvironmentResponse
from envmanager.environment import EnvGroup
from envmanager.hosts.hosting import COMMANDS, GroupFactory, failed, make_group
from envmanager.hosts.wire import Undecoded
from envmanager.processes import lifeline, output
from envmanager.processes.child_transport import CannotObey, Launch, TrainerConnection, TrainerGone
from envmanager.system.machine import after_fork_in_child

FDS = ("connection", "steps", "memory", "crash")
"""The descriptors that a worker inherits."""
_STDERR = 2
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
        if _is_fork:
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
        if _is_fork:
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
    trainer = TrainerConnection(fds, launch)

    def leave() -> None:
        trainer.cut_off()
        output.leave_crash_report(crash_fd)

    global _leave_worker
    _leave_worker = leave
    try:
        worker(trainer, trainer, launch.pickled_factory, launch.worker_id)
    except BaseException as error:
        # What an environment forks comes here too when it leaves the environment's code, and ends.
        if _is_fork:
            _end_fork(None if isinstance(error, TrainerGone) else error)
        if isinstance(error, TrainerGone):  # it may be noticed here before the life pipe tells
            lifeline.end_group()
        raise
    if _is_fork:
        _end_fork(None)


_is_fork = False
"""Whether this process was forked by an environment."""
_leave_worker: Callable[[], None] | None = None
"""Called in each process that is forked from this worker, before anything else."""


def _after_fork_in_child() -> None:
    global _is_fork, _leave_worker
    if _leave_worker is None:  # no worker, or a fork of a fork
        return
    _is_fork, leave, _leave_worker = True, _leave_worker, None
    try:
        leave()
    except BaseException as error:  # Python would print it and go on, as a second worker
        _end_fork(error)


after_fork_in_child(_after_fork_in_child)


def _end_fork(error: BaseException | None) -> NoReturn:
    """End this process, which was forked, as a script ends that comes to its end or raises ``error``."""
    code, text = 1, ""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        if error is None:
            code = 0
        elif not isinstance(error, SystemExit):
            text = "".join(traceback.format_exception(error))
        elif error.code is None or isinstance(error.code, int):
            code = int(error.code or 0) & 0xFF
        else:
            text = f"{error.code}\n"
        os.write(_STDERR, text.encode(errors="backslashreplace"))
    finally:
        os._exit(code)
