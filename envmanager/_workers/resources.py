"""Resources of the trainer's process that workers need, and that are given back whatever happens."""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from typing import Generic

from envmanager._workers import descriptors
from envmanager._workers.handle import WorkerHandle
from envmanager._workers.remote import State
from envmanager._workers.step_queue import ProcessStepQueue
from envmanager._workers.watch import AnyLink, Poller
from envmanager.core.calls import weakly
from envmanager.errors import ManagerClosed
from envmanager.observe.events import EventLog
from envmanager.system.interrupts import held


class Resources(ABC, Generic[AnyLink]):
    """What must be given back, also when the manager is garbage or the program ends: processes, pipes, memory.

    It holds no reference to the host or the manager, which could otherwise never become garbage.
    """

    step_queue: Poller[AnyLink]

    def __init__(self, close_s: float) -> None:
        self._close_s = close_s
        self._owner_pid = os.getpid()
        self._closed = False
        self._handles: set[AnyLink] = set()
        self._stopping = threading.RLock()
        self._giving_back = threading.Lock()
        descriptors.open_standard()
        self._open()
        self.step_queue.on_retired = weakly(self.drop)

    @abstractmethod
    def _open(self) -> None:
        """Make the step queue, and whatever else this kind of worker needs."""

    def _close_own(self) -> None:
        """Give back what ``_open`` made, but for the step queue."""

    def watch(self, handle: AnyLink) -> None:
        """Take a worker into care; ManagerClosed when another thread has given everything back meanwhile."""
        with self._giving_back:
            if not self._closed:
                self._handles.add(handle)
                self.step_queue.register(handle)
                return
        handle.release()
        raise ManagerClosed("the start of a worker")

    def drop(self, handle: AnyLink) -> None:
        """Give back a worker that has ended or must."""
        self._handles.discard(handle)
        self.step_queue.forget(handle)
        handle.release()

    def retire(self, handle: AnyLink) -> None:
        """Give back a worker that is to be replaced: at once when it has ended, else it is asked to end."""
        if handle.state is State.RUNNING:
            handle.retire()
            self.step_queue.retire(handle)
        else:
            self.drop(handle)

    def close(self) -> None:
        """Ask, then SIGTERM, then SIGKILL, all inside ``close_s``; then give everything back.

        An interrupt meanwhile leaves out the waiting.
        """
        if os.getpid() != self._owner_pid or self._closed:
            return  # in a process that the trainer forked, the workers are not its own
        try:
            self.stop()
        finally:
            with held():
                self._give_back()

    def stop(self) -> None:
        """End all workers, inside ``close_s``; what belongs to them is still there. One thread does it at a time."""
        with self._stopping:
            self._stop(list(self._handles))

    def _stop(self, handles: list[AnyLink]) -> None:
        deadline = time.monotonic() + self._close_s
        for handle in handles:
            handle.ask_to_close()
        for number, share in ((signal.SIGTERM, 0.6), (signal.SIGKILL, 0.9)):
            left = _wait_for_ends(handles, deadline - (1 - share) * self._close_s)
            for handle in left:
                handle.process.signal(number)
        _wait_for_ends(handles, deadline)

    def _give_back(self) -> None:
        with self._giving_back:
            self._closed = True
        for handle in list(self._handles):
            self.drop(handle)
        self.step_queue.close()
        self._close_own()


class ProcessResources(Resources[WorkerHandle]):
    """Those of workers that share memory with the trainer."""

    step_queue: ProcessStepQueue

    def __init__(self, events: EventLog, close_s: float, *, spin_ns: int) -> None:
        self._events = events
        self._spin_ns = spin_ns
        super().__init__(close_s)

    def _open(self) -> None:
        self.step_queue = ProcessStepQueue(self._events, spin_ns=self._spin_ns)
        self.memory_fd = descriptors.create_memory("envmanager")
        self.crash_fd = descriptors.create_memory("envmanager-crashes")

    def _close_own(self) -> None:
        descriptors.close(self.memory_fd)
        descriptors.close(self.crash_fd)


def _wait_for_ends(handles: list[AnyLink], deadline: float) -> list[AnyLink]:
    """Wait until all processes have ended or the time is up; those that have not."""
    left = {handle.process.pidfd: handle for handle in handles}
    while left:
        left_s = deadline - time.monotonic()
        ready = descriptors.wait_for([fd for handle in left.values() for fd in handle.channel.watched_fds()], left_s)
        for fd in ready & left.keys():
            del left[fd]
        if not ready and left_s <= 0:
            break
        for handle in left.values():
            handle.channel.pump()  # a worker that blocks on a full pipe cannot end
    return list(left.values())
