"""Starts the process of one worker: its ends of the channels, its environment variables, its output."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

import attrs

from envmanager._workers import descriptors
from envmanager._workers.child_transport import Launch
from envmanager._workers.output import OutputLog
from envmanager._workers.processes import THREAD_CAPS, HelperGone, Process, start
from envmanager._workers.remote import WorkerPlan
from envmanager.errors import WorkerError
from envmanager.system.files import advice

_DESCRIPTORS_TO_START = 16
"""More than starting one process takes for a moment: refused before, nothing is left half open."""


@attrs.frozen(kw_only=True)
class LaunchPlan(WorkerPlan):
    """The arguments of the start of a worker process, but for its factory."""

    seed: int
    start_method: str
    memory_fd: int
    steps_fd: int
    crash_fd: int
    n_slots: int
    spin_ns: int
    """Longest time in ns that the worker polls for a command before it sleeps."""
    environ: Mapping[str, str] = attrs.field(repr=False)  # it may hold secrets
    log_dir: str | None


@attrs.frozen
class Launched:
    """A process that has been started, our end of its connection, and where its output goes."""

    process: Process
    fd: int
    log: OutputLog | None


def launch(plan: LaunchPlan, pickled_factory: bytes) -> Launched:
    """Start the process. TimeoutError when it cannot be in ``start_s``; WorkerError when it cannot be at all."""
    descriptors.require_room(_DESCRIPTORS_TO_START)
    descriptors.open_standard()  # the trainer may have closed some since the last start
    log, output = None, (1, 2)
    if plan.log_dir is not None:
        log, fd = OutputLog.open(plan.log_dir, plan.worker_id, plan.generation)
        output = fd, fd
    try:
        try:
            process, fd = _start(plan, pickled_factory, output)
        except HelperGone:
            # After it was asked. Once more, with a new one and another connection: a worker that it has forked all
            # the same notices that the other end of its own is closed, and ends.
            process, fd = _start(plan, pickled_factory, output)
    except TimeoutError:
        raise
    except OSError as error:
        raise _cannot_start(plan, error) from error
    finally:
        if log is not None:
            os.close(output[0])
    return Launched(process, fd, log)


def _start(plan: LaunchPlan, pickled_factory: bytes, output: tuple[int, int]) -> tuple[Process, int]:
    ours, theirs = socket.socketpair()
    fd = descriptors.register(ours.detach())
    os.set_blocking(fd, False)
    try:
        with theirs:
            process = start(
                plan.start_method,
                f"envmanager-worker-{plan.worker_id}",
                "envmanager._workers.child:main",
                (Launch(plan.worker_id, plan.generation, plan.seed, plan.spin_ns, pickled_factory),),
                fds=(theirs.fileno(), plan.steps_fd, plan.memory_fd, plan.crash_fd),
                output=output,
                environ={**dict.fromkeys(THREAD_CAPS, "1"), **plan.environ},
                deadline=time.monotonic() + plan.timeouts.start_s,
            )
        return process, fd
    except BaseException:
        descriptors.close(fd)
        raise


def _cannot_start(plan: LaunchPlan, error: Exception) -> WorkerError:
    cause = f"{type(error).__name__}: {error}".rstrip(": ")
    return WorkerError(
        f"the process of worker {plan.worker_id} could not be started: {cause}. {advice(error)}".rstrip(),
        worker_id=plan.worker_id,
        env_ids=plan.env_ids,
        phase="start",
        cause=cause,
    )
