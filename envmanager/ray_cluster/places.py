"""Nodes that come and go: which workers have no place of their own, and which are to move.

::

    a thread, each second ── the nodes of the cluster ──▶ Places ◀── why_due, target ── the host, when a worker responds
                          └─ rings ──▶ poller ──▶ each connection: is it still without a place?

A worker for which no node has had room for a quarter of ``place_s`` is squeezed: it asks for no CPU, and runs beside
others, while an actor that does nothing waits in its name for a place, and goes on in its place when it has one. When a
node joins, workers move to it one after the other, until another move would make the shares less even. When a node is
to end (``ray drain-node``, the notice of a spot instance), its workers move before.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from envmanager.hosts.life import State
from envmanager.observe.events import Squeezed

if TYPE_CHECKING:  # it needs Ray
    from envmanager.ray_cluster.cluster import Cluster

_LOOK_EVERY_S = 1.0


class Places:
    """The nodes of a cluster, as one manager sees them, and the moves that follow from them."""

    def __init__(self, cluster: Cluster, ring: Callable[[], None]) -> None:
        """Look once, and then in a thread, which calls ``ring`` each time, until ``close``."""
        self._cluster, self._ring = cluster, ring
        self._nodes = cluster.look()
        self._joined: set[str] = set()
        """Nodes that have come since the start, and to which workers may move."""
        self._targets: dict[int, str] = {}
        self._moving: tuple[Any, str] | None = None
        """Link, before its move, of the worker that moves so that shares become even, and the node."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="envmanager-ray-nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            try:
                self.look()
            except Exception:  # the head is gone, or this program has left the cluster: calls of actors say that
                continue
            self._ring()

    def look(self) -> None:
        """Ask the cluster for its nodes."""
        before, self._nodes = self._nodes.cpus.keys(), self._cluster.look()
        now = self._nodes.cpus.keys()
        self._joined = (self._joined | (now - before)) & now

    def target(self, worker_id: int) -> str:
        """Return the node to which the next generation of a worker moves, or "". Asked once for each generation."""
        return self._targets.pop(worker_id, "")

    def why_due(self, worker_id: int, links: Sequence[Any]) -> str:
        """Return why a worker is to move, or "". ``links``: those of all workers."""
        own = links[worker_id].channel
        if own.has_room:
            return "as there is a place for it"
        if own.node_id in self._nodes.ending:
            return "as its node is to end"
        is_short = any(link.channel.is_squeezed for link in links)  # a node that joins is for these first
        if self._cluster.is_by_name or not self._joined or is_short:
            return ""
        if self._moving is not None:
            before, node_id = self._moving
            link = links[before.worker_id]
            is_there = link is not before and link.state is State.RUNNING and link.channel.node_id
            if not is_there and link.state is not State.GONE:
                return ""
            self._moving = None
            if is_there and link.channel.node_id != node_id:
                self._joined.discard(node_id)  # it has no room
        n_on, cpus = Counter(link.channel.node_id for link in links), self._nodes.cpus
        loads = {node_id: n_on[node_id] / max(own, 1.0) for node_id, own in cpus.items()}
        with_one_more = {each: (n_on[each] + 1) / max(cpus[each], 1.0) for each in self._joined & loads.keys()}
        target = min(with_one_more, key=with_one_more.__getitem__, default="")
        is_fullest = own.node_id in loads and loads[own.node_id] == max(loads.values())
        if not target or not is_fullest or loads[own.node_id] <= with_one_more[target]:
            return ""
        self._moving, self._targets[worker_id] = (links[worker_id], target), target
        return "for even shares of the nodes"

    def without_place(self, links: Sequence[Any]) -> list[Any]:
        """Return the links of workers that wait for a place, and not only for their process.

        Ray says how many wait, not which: those that were asked for last.
        """
        waiting = [link for link in links if link.channel.pid is None and not link.channel.is_squeezed]
        n = self._nodes.n_waiting - sum(link.channel.waits_for_place for link in links)
        return waiting[-n:] if n > 0 else []

    def squeezed(self, link: Any, place_s: float) -> Squeezed:
        """Return the event of a worker that runs beside others."""
        missing = self._cluster.shortage()["missing"]
        return Squeezed(worker_id=link.worker_id, generation=link.generation, place_s=place_s, missing=missing)
