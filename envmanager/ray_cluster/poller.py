"""The poller of actors: Ray's threads bring their answers, and ring its bell.

::

    an answer, in a thread of Ray's ── add ──▶ came ──▶ bell ──▶ collect: each connection takes in its own

Only the end of a worker that is asked nothing would go unseen, so each of those is asked once a second whether it
lives, while the trainer takes steps of the others.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

from envmanager.data.steps import EnvironmentResponse
from envmanager.hosts.link import State
from envmanager.hosts.link_host import Resources
from envmanager.hosts.poller import Poller
from envmanager.ray_cluster.link import ActorLink, Answers

_PING_EVERY_S = 1.0


class ActorPoller(Poller[ActorLink]):
    """Responses to "step", in order of arrival, and first observations of replacements."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = Answers()
        self.epoll.register(self.answers.bell_fd, select.EPOLLIN)
        self._ping_at = 0.0

    def collect(self) -> bool:
        self.answers.drain()
        self._alarm.has_unread = True
        return super().collect()

    look = collect

    def take(self) -> Sequence[EnvironmentResponse]:
        taken = super().take()
        now = time.monotonic()
        if now >= self._ping_at:
            self._ping_at = now + _PING_EVERY_S
            for link in self.links.values():
                if link.state is State.RUNNING and link.awaited is None:
                    link.channel.ping()
        return taken

    def wait(self, timeout: float | None, n_wanted: int = 1) -> Sequence[EnvironmentResponse]:
        self.answers.n_wanted = n_wanted
        try:
            return super().wait(timeout)
        finally:
            self.answers.n_wanted = 1

    def close(self) -> None:
        super().close()
        self.answers.close()


class ActorResources(Resources[ActorLink]):
    """The links of actors."""

    poller: ActorPoller

    def __init__(self, close_s: float, is_connected: Callable[[], bool]) -> None:
        """``is_connected``: returns whether this program is still a driver of the cluster."""
        super().__init__(close_s, ActorPoller())
        self._is_connected = is_connected

    def stop(self) -> None:
        if self._is_connected():  # else the actors have gone
            super().stop()
