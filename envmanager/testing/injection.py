"""Random signals to the worker processes of a running manager, with a record of each signal.

::

    with chaos(manager, rate=0.5, seed=0) as report:
        …                                               # train
    …                                                   # until manager.stats().restarts == report.faults

    kill      SIGKILL                                   a fault: the process has ended
    freeze    SIGSTOP, and never resumed                a fault: the manager must time the worker out
    pause     SIGSTOP, and a moment later SIGCONT       no fault

The rule: the manager reports every fault exactly once. So a process gets a signal only after two steps of its worker
have been delivered since its pidfd was opened. The second was requested after that, so this process executed the step.
Thus the worker is not being replaced, and its last replacement was reported. No other code may end workers.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import attrs

from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.hosts.descriptors import wait_for
from envmanager.observe.stats import WorkerStats

Kind = Literal["kill", "freeze", "pause"]

_LETHAL = ("kill", "freeze")
_LOOK_EVERY_S = 0.02
"""Polling interval while no worker may get a signal, for example because the trainer is not stepping."""


@attrs.frozen
class Injection:
    """A record of a signal sent to one generation of a worker, at time ``at_s`` (from ``time.monotonic()``)."""

    worker_id: int
    generation: int
    kind: Kind
    at_s: float


@attrs.define
class ChaosReport:
    """A record of the signals that ``chaos`` has sent so far, oldest first, with counts by kind."""

    injected: list[Injection] = attrs.field(factory=list)

    @property
    def kills(self) -> int:
        """Number of times that a worker was killed."""
        return self._count("kill")

    @property
    def freezes(self) -> int:
        """Number of times that a worker was stopped permanently."""
        return self._count("freeze")

    @property
    def pauses(self) -> int:
        """Number of times that a worker was stopped and then resumed."""
        return self._count("pause")

    @property
    def faults(self) -> int:
        """Number of kills and freezes, each of which must lead to a replacement."""
        return sum(each.kind in _LETHAL for each in list(self.injected))

    def _count(self, kind: Kind) -> int:
        return sum(each.kind == kind for each in list(self.injected))


@contextlib.contextmanager
def chaos(
    manager: EnvManager, rate: float, seed: int, *, kinds: Sequence[Kind] = get_args(Kind), pause_s: float = 0.1
) -> Iterator[ChaosReport]:
    """Send signals of ``kinds`` to workers of ``manager`` during the block, about ``rate`` per second. Yield a report.

    The gaps between signals are exponentially distributed, but longer while no worker may be signaled. Random
    choices depend on ``seed``. No process gets a second fault. A pause lasts ``pause_s`` seconds, which must be
    well below the manager's ``Timeouts.step_s``. Afterwards, step until ``manager.stats().restarts`` counts all faults.
    Raises UsageError for bad arguments, and if workers are not separate processes. Works only on Linux.
    """
    unknown = set(kinds) - set(get_args(Kind))
    if unknown or not kinds or rate <= 0 or pause_s < 0:
        raise UsageError(f"chaos needs a rate above 0, a pause_s from 0 up and kinds out of {get_args(Kind)}.")
    if any(worker.pid is None or worker.node not in ("", os.uname().nodename) for worker in manager.stats().workers):
        raise UsageError(f"chaos needs a manager whose workers are processes of this machine, not {manager!r}.")
    injector = _Injector(manager, rate, random.Random(seed), tuple(kinds), pause_s)
    thread = threading.Thread(target=injector.run, name="envmanager-chaos", daemon=True)
    thread.start()
    try:
        yield injector.report
    finally:
        injector.stopped.set()
        thread.join()
    if injector.error is not None:
        raise injector.error


@attrs.frozen
class _Process:
    """The process of one generation of a worker. ``steps``: the worker's step count just after the pidfd was opened."""

    generation: int
    pid: int
    pidfd: int
    steps: int

    def has_ended(self) -> bool:
        return bool(wait_for([self.pidfd], 0.0))


@attrs.define(eq=False)
class _Injector:
    """State and loop of the signaling thread. Other threads only set ``stopped`` and read ``report`` and ``error``."""

    _manager: EnvManager
    _rate: float
    _dice: random.Random
    _kinds: tuple[Kind, ...]
    _pause_s: float
    report: ChaosReport = attrs.field(factory=ChaosReport, init=False)
    stopped: threading.Event = attrs.field(factory=threading.Event, init=False)
    error: BaseException | None = attrs.field(default=None, init=False)
    _processes: dict[int, _Process] = attrs.field(factory=dict, init=False)
    _doomed: set[tuple[int, int]] = attrs.field(factory=set, init=False)

    def run(self) -> None:
        try:
            due_at = time.monotonic()
            self._look()
            while True:
                due_at = max(due_at + self._dice.expovariate(self._rate), time.monotonic())
                if self.stopped.wait(due_at - time.monotonic()):
                    return
                kind = self._dice.choice(self._kinds)
                while not self._inject(kind) and not self.stopped.wait(_LOOK_EVERY_S):
                    pass
        except BaseException as error:
            self.error = error  # raised at the end of the block
        finally:
            for process in self._processes.values():
                os.close(process.pidfd)

    def _inject(self, kind: Kind) -> bool:
        """Kill, freeze or pause a random worker that may be signaled now. Return whether a signal was sent."""
        candidates = self._look()
        if not candidates:
            return False
        worker_id, process = self._dice.choice(candidates)
        if kind in _LETHAL:
            self._doomed.add((worker_id, process.generation))
        try:
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        except ProcessLookupError:  # it has just ended for another reason
            return False
        self.report.injected.append(Injection(worker_id, process.generation, kind, time.monotonic()))
        if kind == "pause":
            self.stopped.wait(self._pause_s)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process.pidfd, signal.SIGCONT)
        return True

    def _look(self) -> list[tuple[int, _Process]]:
        """Open the pidfds of new processes. Return the id and process of each worker that may be signaled now."""
        found = []
        for worker in self._manager.stats().workers:
            process = self._processes.get(worker.worker_id)
            if process is None or (process.generation, process.pid) != (worker.generation, worker.pid):
                self._open(worker)
                continue
            is_out = worker.failed or worker.dropped or (worker.worker_id, worker.generation) in self._doomed
            if not is_out and worker.steps >= process.steps + 2 and not process.has_ended():
                found.append((worker.worker_id, process))
        return found

    def _open(self, worker: WorkerStats) -> None:
        """Store a pidfd of a worker's process if it still runs. Close the pidfd of the worker's previous process."""
        before = self._processes.pop(worker.worker_id, None)
        if before is not None:
            os.close(before.pidfd)
        if worker.pid is None:
            return
        try:
            pidfd = os.pidfd_open(worker.pid)
        except ProcessLookupError:
            return
        # Read after opening: if more steps than this are delivered, the process was alive when the pidfd was opened.
        steps = self._manager.stats().workers[worker.worker_id].steps
        self._processes[worker.worker_id] = _Process(worker.generation, worker.pid, pidfd, steps)
