"""Starting the process of one worker: its ends of the channels, its environment, its output."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Mapping

import attrs

from envmanager._workers import boot, descriptors
from envmanager._workers.child_transport import Launch
from envmanager._workers.output_log import OutputLog
from envmanager._workers.processes import ChildProcess
from envmanager._workers.remote import WorkerPlan
from envmanager._workers.server import ServerGone
from envmanager.errors import WorkerError
from envmanager.system.refusals import advice

_DESCRIPTORS_TO_START = 16
"""More than starting one process takes for a moment: refused before, nothing is left half open."""


@attrs.frozen(kw_only=True)
class LaunchPlan(WorkerPlan):
    """What a worker process is started with, besides its factory."""

    seed: int
    start_method: str
    memory_fd: int
    steps_fd: int
    life_fd: int
    guardian_fd: int
    crash_fd: int
    n_slots: int
    spin_ns: int
    """How long it may look again before it sleeps."""
    environ: Mapping[str, str] = attrs.field(repr=False)  # it may hold secrets
    log_dir: str | None


@attrs.frozen
class Launched:
    """A process that has been started, our end of its connection, and where its output goes."""

    process: ChildProcess
    fd: int
    log: OutputLog | None


def launch(plan: LaunchPlan, pickled_factory: bytes) -> Launched:
    """Start the process. TimeoutError when it cannot be in ``start_s``; WorkerError when it cannot be at all."""
    descriptors.require_room(_DESCRIPTORS_TO_START)
    descriptors.open_standard()  # the trainer may have closed some since the last start
    log, stdio = _open_output(plan)
    try:
        try:
            process, fd = _start(plan, pickled_factory, stdio)
        except ServerGone:
            # After it was asked. Once more, with a new one and another connection: a worker that it has forked all
            # the same notices that nobody is at the other end of its own, and ends.
            process, fd = _start(plan, pickled_factory, stdio)
    except TimeoutError:
        raise
    except (OSError, EOFError) as error:
        raise _cannot_start(plan, error) from error
    finally:
        for each in stdio.values():
            os.close(each)
    return Launched(process, fd, log)


def _open_output(plan: LaunchPlan) -> tuple[OutputLog | None, dict[str, int]]:
    """Where the output goes: its log, or what a process forked from the server would not inherit."""
    if plan.log_dir is not None:
        log, fd = OutputLog.open(plan.log_dir, plan.worker_id, plan.generation)
        return log, {"stdout": fd, "stderr": os.dup(fd)}
    return None, {"stdout": os.dup(1), "stderr": os.dup(2)} if plan.start_method == "forkserver" else {}


def _start(plan: LaunchPlan, pickled_factory: bytes, stdio: dict[str, int]) -> tuple[ChildProcess, int]:
    ours, theirs = socket.socketpair()
    fd, worker_fd = descriptors.register(ours.detach()), theirs.detach()
    os.set_blocking(fd, False)
    fds = {
        "connection": worker_fd,
        "steps": plan.steps_fd,
        "memory": plan.memory_fd,
        "life": plan.life_fd,
        "guardian": plan.guardian_fd,
        "crash": plan.crash_fd,
    }
    try:
        wrapped = {name: descriptors.Fd(each) for name, each in {**fds, **stdio}.items()}
        orders = pickle.dumps(Launch(plan.worker_id, plan.generation, plan.seed, plan.spin_ns, pickled_factory))
        name = f"envmanager-worker-{plan.worker_id}"
        arguments = wrapped, dict(plan.environ), orders
        deadline = time.monotonic() + plan.timeouts.start_s
        return ChildProcess(plan.start_method, name, boot.run, arguments, deadline=deadline), fd
    except BaseException:
        descriptors.close(fd)
        raise
    finally:
        os.close(worker_fd)


def _cannot_start(plan: LaunchPlan, error: Exception) -> WorkerError:
    cause = f"{type(error).__name__}: {error}".rstrip(": ")
    return WorkerError(
        f"the process of worker {plan.worker_id} could not be started: {cause}. {advice(error)}".rstrip(),
        worker_id=plan.worker_id,
        env_ids=plan.env_ids,
        phase="start",
        cause=cause,
    )
