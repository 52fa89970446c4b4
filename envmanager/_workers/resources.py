"""Resources of the trainer's process that workers need, and that are given back whatever happens."""

from __future__ import annotations

import os
import signal
import threading
import time
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


class Resources(Generic[AnyLink]):
    """The links of one manager, their poller, and in subclasses the memory and folders that the workers share.

    It gives all of that back, also when the manager is garbage or the program ends, and holds no reference to the host
    or the manager, which could otherwise never become garbage.
    """

    def __init__(self, close_s: float, poller: Poller[AnyLink]) -> None:
        self.poller = poller
        self._close_s = close_s
        self._owner_pid = os.getpid()
        self._closed = False
        self._links: set[AnyLink] = set()
        self._stopping = threading.RLock()
        self._giving_back = threading.Lock()
        poller.on_retired = weakly(self.drop)

    def _close_own(self) -> None:
        """Give back what a subclass holds, after the workers have gone."""

    def watch(self, link: AnyLink) -> None:
        """Take a worker into care; ManagerClosed when another thread has given everything back meanwhile."""
        with self._giving_back:
            if not self._closed:
                self._links.add(link)
                self.poller.register(link)
                return
        link.release()
        raise ManagerClosed("the start of a worker")

    def drop(self, link: AnyLink) -> None:
        """Give back a worker that has ended or must."""
        self._links.discard(link)
        self.poller.forget(link)
        link.release()

    def retire(self, link: AnyLink) -> None:
        """Give back a worker that is to be replaced: at once when it has ended, else it is asked to end."""
        if link.state is State.RUNNING:
            link.retire()
            self.poller.retire(link)
        else:
            self.drop(link)

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
            self._stop(list(self._links))

    def _stop(self, links: list[AnyLink]) -> None:
        deadline = time.monotonic() + self._close_s
        for link in links:
            link.ask_to_close()
        for number, share in ((signal.SIGTERM, 0.6), (signal.SIGKILL, 0.9)):
            left = _wait_for_ends(links, deadline - (1 - share) * self._close_s)
            for link in left:
                link.process.signal(number)
        _wait_for_ends(links, deadline)

    def _give_back(self) -> None:
        with self._giving_back:
            self._closed = True
        for link in list(self._links):
            self.drop(link)
        self.poller.close()
        self._close_own()


class ProcessResources(Resources[WorkerHandle]):
    """The links of worker processes, and the memory that these share with the trainer."""

    poller: ProcessStepQueue

    def __init__(self, events: EventLog, close_s: float, *, spin_ns: int) -> None:
        super().__init__(close_s, ProcessStepQueue(events, spin_ns=spin_ns))
        self.memory_fd = descriptors.create_memory("envmanager")
        self.crash_fd = descriptors.create_memory("envmanager-crashes")

    def _close_own(self) -> None:
        descriptors.close(self.memory_fd)
        descriptors.close(self.crash_fd)


def _wait_for_ends(links: list[AnyLink], deadline: float) -> list[AnyLink]:
    """Wait until all processes have ended or the time is up; those that have not."""
    left = {link.process.pidfd: link for link in links}
    while left:
        left_s = deadline - time.monotonic()
        ready = descriptors.wait_for([fd for link in left.values() for fd in link.channel.watched_fds()], left_s)
        for fd in ready & left.keys():
            del left[fd]
        if not ready and left_s <= 0:
            break
        for link in left.values():
            link.channel.pump()  # a worker that blocks on a full pipe cannot end
    return list(left.values())
