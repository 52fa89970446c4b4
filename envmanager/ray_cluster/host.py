"""The host of actors: has the cluster make them, replaces and ends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import cloudpickle

from envmanager.adapters.factories import check_travel
from envmanager.hosts.link_host import LinkHost
from envmanager.kernel.table import Entry
from envmanager.observe.stats import WorkerStats
from envmanager.ray_cluster.cluster import Cluster, is_connected
from envmanager.ray_cluster.link import ActorLink
from envmanager.ray_cluster.options import RayOptions
from envmanager.ray_cluster.poller import ActorResources


class RayHost(LinkHost[ActorLink]):
    """Actors on a Ray cluster."""

    options: RayOptions

    def __init__(self, env_factory: Any, factories: Sequence[Any], cluster: Cluster, options: RayOptions) -> None:
        super().__init__(env_factory, options)
        check_travel(factories)
        self.factories = factories
        self._cluster = cluster
        # What Ray has put into its object store is read-only; the copy makes it the trainer's own.
        self.rewrites_arrays = True

    def _make_resources(self) -> ActorResources:
        return ActorResources(self.options.timeouts.close_s, is_connected)

    def make_worker(self, worker_id: int) -> ActorLink:
        """Ask for an actor, and do not wait for it: one wait is then enough to see that there is no room for all."""
        self.context.calls.require_open("the start of a worker")
        entry, poller = self.context.entries[worker_id], self._resources.poller
        plan, pickled = self.plan_of(entry), cloudpickle.dumps(self.group_factory(entry), protocol=5)
        events, times = self.context.events, entry.times
        return self.care_for(lambda: ActorLink(plan, self._cluster, pickled, poller.answers, events, times))

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        worker = self.workers[entry.worker_id]
        node = worker.channel.node if isinstance(worker, ActorLink) else known.node
        return attrs.evolve(super().describe(entry, known), node=node)
