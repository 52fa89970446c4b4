"""The step queue of engines: their own connections, watched by one epoll."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from envmanager._workers import descriptors
from envmanager._workers.remote import State
from envmanager._workers.watch import Watch
from envmanager.data.steps import CommandName
from envmanager.godot.worker import EngineWorker

_STEP = CommandName.STEP


class EngineQueue(Watch[EngineWorker]):
    """Responses to "step", in order of completion."""

    def __init__(self, *, on_retired: Callable[[EngineWorker], None], spin_ns: int) -> None:
        super().__init__(on_retired=on_retired, spin_ns=spin_ns)
        self._bell_fd = descriptors.register(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._epoll.register(self._bell_fd, select.EPOLLIN)

    def _ring(self) -> None:
        if self._bell_fd != descriptors.CLOSED:
            os.eventfd_write(self._bell_fd, 1)

    def _look(self) -> bool:
        self._look_aside()
        for fd, _ in self._epoll.poll(0):  # a read that raises takes several times as long
            ready = self._by_fd.get(fd)
            if ready is not None and ready.awaited is _STEP and fd == ready.channel.fd:
                self._pump(ready)
        return bool(self._arrived)

    def _look_aside(self) -> None:
        for handle in self._handles.values():
            if handle.channel.has_messages:  # read by whoever waited for another response of that engine
                self._take_messages(handle)

    def _take_messages(self, handle: EngineWorker) -> None:
        if handle.awaited is not _STEP:
            return
        message = handle.channel.take(handle.channel.step_ticket)
        if message is not None:
            self._arrived.append(handle.step_response(message))
            if handle.state is State.GONE:  # it broke the protocol
                self.forget(handle)

    def close(self) -> None:
        super().close()
        self._bell_fd = descriptors.close(self._bell_fd)
