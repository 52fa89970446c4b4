"""The poller, which waits for the step responses of one manager's links and for replacements' first observations.

::

    one epoll: the bell (to wake it), a host's own descriptors, every worker's pidfd, every worker's connection
        └──▶ messages ──▶ deaths ──▶ deadlines ──▶ EnvironmentResponses

A retired worker is watched until it has ended. The end of any other worker becomes a "failed" response, unless ``recv``
has reported this end. Messages are read before a death or a timeout is reported, so that no last response is lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError
from envmanager.hosts import descriptors
from envmanager.hosts.life import Alarm, State
from envmanager.hosts.link import WHILE_BYTES_COME_S, Link
from envmanager.hosts.spin import Spinner
from envmanager.kernel.host import ResponseSource
from envmanager.system.interrupts import allow_interrupts

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_WATCH_EVERY_S = 0.01
"""Interval (s) of checks for deaths and timeouts while responses keep arriving, so that a busy queue hides neither."""
_STEP = CommandName.STEP

AnyLink = TypeVar("AnyLink", bound=Link)


class Poller(ResponseSource, Generic[AnyLink]):
    """A ResponseSource for workers that have a Link. It returns step responses and replacements' first observations.

    A subclass whose steps do not arrive through the links' own channels overrides ``read_other`` or ``collect``.
    """

    def __init__(self, *, spin_ns: int = 0) -> None:
        """Create a poller without links. ``get`` polls for at most ``spin_ns`` nanoseconds before it sleeps."""
        self.on_retired: Callable[[AnyLink], None]
        """Callback that receives each retired worker that has ended. The owner of the poller sets it."""
        self.links: dict[int, AnyLink] = {}
        """Links by worker_id. A replacement overwrites its predecessor."""
        self.arrived: list[EnvironmentResponse] = []
        self.epoll = descriptors.make_waiter()
        self._has_epoll = self.epoll.fileno() != descriptors.CLOSED
        self.bell_fd, self._ring_fd = descriptors.socket_pair()
        self._ringing = threading.RLock()
        """Lock held while the bell rings, and while it is closed, after which another file may get its number."""
        self.epoll.register(self.bell_fd, descriptors.READABLE)
        self._by_fd: dict[int, AnyLink] = {}
        self.retiring: set[AnyLink] = set()
        """Workers that were asked to exit, watched until they end. A replacement may have the same worker_id."""
        self._spinner = Spinner(spin_ns)
        self._watch_at = 0.0
        self._alarm = Alarm()
        self._is_woken = False

    # For the host.

    def register(self, link: AnyLink) -> None:
        """Watch a worker's connection for responses and its pidfd for the end of the process."""
        self.links[link.worker_id] = link
        link.alarm = self._alarm
        link.channel.on_moved = partial(self._move, link)
        for fd in (link.process.pidfd, link.channel.fd):
            self._start_watching(link, fd)

    def forget(self, link: AnyLink) -> None:
        """Stop watching a worker's connection and pidfd."""
        self.retiring.discard(link)
        for fd in (link.process.pidfd, link.channel.fd):
            self._stop_watching(link, fd)

    def wake(self) -> None:
        """Unblock a ``get`` in another thread. No later ``get`` blocks either."""
        self._is_woken = True
        with self._ringing:
            if self._ring_fd != descriptors.CLOSED:
                with contextlib.suppress(BlockingIOError):  # it has rung many times
                    descriptors.write(self._ring_fd, b"!")

    def close(self) -> None:
        """Close the epoll and the bell (the sockets of ``wake``). ``forget`` must have been called for all workers."""
        descriptors.forget(self.epoll.fileno())
        self.epoll.close()
        with self._ringing:
            self.bell_fd, self._ring_fd = map(descriptors.close, (self.bell_fd, self._ring_fd))

    def _start_watching(self, link: AnyLink, fd: int) -> None:
        if fd != descriptors.CLOSED:
            self._by_fd[fd] = link
            self.epoll.register(fd, descriptors.READABLE)

    def _stop_watching(self, link: AnyLink, fd: int) -> None:
        """Stop watching ``fd`` for ``link``. Do nothing if another link has reused the descriptor number."""
        if self._by_fd.get(fd) is link:
            del self._by_fd[fd]
            self.epoll.unregister(fd)

    def _move(self, link: AnyLink, before: int, after: int) -> None:
        """Watch the new descriptor of a channel instead of the old one, which is not closed yet."""
        if self._by_fd.get(before) is link:
            self._stop_watching(link, before)
            self._start_watching(link, after)

    # For the manager.

    def take(self) -> Sequence[EnvironmentResponse]:
        if time.monotonic() >= self._watch_at:
            self._watch(0.0)
        else:
            self.look()
        arrived, self.arrived = self.arrived, []
        return arrived

    def get(self, n_wanted: int, deadline: float) -> Sequence[EnvironmentResponse]:
        while not self.arrived:
            if not self._spinner.spin(self.look):
                if not self._is_woken:
                    left_s = max(0.0, min(deadline, self._alarm.at) - time.monotonic())
                    self._watch(min(left_s + 0.001, descriptors.LONGEST_WAIT_S))
                self._spinner.slept()
            if not self.arrived and (self._is_woken or time.monotonic() >= deadline):
                break
        arrived, self.arrived = self.arrived, []
        return arrived

    def listen(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> Callable[[], None]:
        if not self._has_epoll:
            return super().listen(loop, ring)
        try:
            fd = descriptors.register(os.dup(self.epoll.fileno()))  # the manager may be closed before this is undone
        except ValueError:  # another thread has just closed it
            return lambda: None
        loop.add_reader(fd, ring)

        def stop() -> None:
            loop.remove_reader(fd)
            descriptors.close(fd)

        return stop

    def due_at(self) -> float:
        return self._alarm.at + 0.001 if self._has_epoll else super().due_at()

    # Messages.

    def collect(self) -> bool:
        """Add to ``arrived`` the responses that ``epoll`` does not report. Return whether ``arrived`` has any.

        Such responses are in messages that a link's ``recv`` read while it waited for another response.
        """
        if self._alarm.has_unread:
            self._alarm.has_unread = False
            for link in self.links.values():
                if link.channel.messages:
                    self._take_messages(link)
        return bool(self.arrived)

    def read_other(self, fd: int) -> None:
        """Handle a readable descriptor that belongs to no link, such as the bell. The base class does nothing."""

    def look(self) -> bool:
        """Add new responses to ``arrived``, without blocking or death checks. Return whether ``arrived`` has any."""
        self.collect()
        for fd, _ in self.epoll.poll(0):  # several times as fast as a read that raises
            link = self._by_fd.get(fd)
            if link is None:
                self.read_other(fd)
            elif link.awaited.command is _STEP and fd == link.channel.fd:
                self.pump(link)
        return bool(self.arrived)

    def pump(self, link: AnyLink) -> None:
        """Read a worker's messages and add the responses to ``arrived``. Kill the worker if it broke the protocol."""
        channel = link.channel
        with channel.lock:
            has_read = channel.pump()
        if has_read:
            link.awaited.deadline = max(link.awaited.deadline, time.monotonic() + WHILE_BYTES_COME_S)
        if channel.hung_up:  # its fd would wake every wait; the pidfd and the deadline are still watched
            self._stop_watching(link, channel.fd)
        self._take_messages(link)
        if channel.broken and link.state is not State.GONE:
            self._note_end(link, link.broke_protocol)

    def _take_messages(self, link: AnyLink) -> None:
        """Add a step response or a first observation to ``arrived``. Reset a replacement that has just started."""
        command = link.awaited.command
        message = link.take(link.awaited.ticket) if link.channel.messages else None
        if message is None:
            return
        if command is None or command is _STEP:
            response: EnvironmentResponse | None = link.step_response(message)
        else:  # one of a replacement's first commands
            response = link.first_response(link.command_response(message, command))
        if response is not None:
            self.arrived.append(response)
            if link.state is State.GONE:  # killed, because the response broke the protocol
                self.forget(link)

    # Deaths and deadlines.

    def _watch(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for an event. Then handle all events that have occurred, timeouts last."""
        events: list[tuple[int, int]] = []
        if timeout_s > 0:
            with allow_interrupts():
                events = self.epoll.poll(timeout_s)
        if not events:  # a suspension of the process that outlasted the timeout hides events from the first poll
            events = self.epoll.poll(0)
        self._watch_at = time.monotonic() + _WATCH_EVERY_S
        self.collect()
        for fd, _ in events:
            if fd not in self._by_fd:
                self.read_other(fd)
        for fd, _ in events:
            link = self._by_fd.get(fd)
            if link is not None and fd == link.process.pidfd:
                self._note_death(link)
            elif link is not None:
                self.pump(link)
        now = time.monotonic()
        if now >= self._alarm.at:
            self._note_timeouts(now)

    def _note_end(self, link: AnyLink, describe: Callable[[Any], EnvManagerError]) -> None:
        if link in self.retiring:
            link.kill()  # the pidfd reports its end later
            return
        during = link.awaited.command
        self.forget(link)
        self.arrived.append(link.failed(describe(during)))

    def _note_death(self, link: AnyLink) -> None:
        if link in self.retiring:
            self.on_retired(link)
            return
        self.pump(link)
        if link.state is not State.GONE:  # else recv has reported the death
            self._note_end(link, link.died)
        else:
            self.forget(link)

    def _note_timeouts(self, now: float) -> None:
        for link in [*self.links.values(), *self.retiring]:
            if link.awaited.deadline <= now:
                self.pump(link)
            if link.awaited.deadline <= now:
                self._note_end(link, link.timed_out)
        deadlines = (link.awaited.deadline for link in (*self.links.values(), *self.retiring))
        self._alarm.at = min(deadlines, default=math.inf)
