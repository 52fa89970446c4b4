"""The manager of environments on a Ray cluster.

::

    trainer                                    node 0              node 1
    RayEnvManager ── a call of an actor ──▶    actor 0: envs 0 1   actor 1: envs 2 3
          ▲                                        │                   │
          └── one step queue ◀── callbacks ────────┴───────────────────┘

Each actor is a worker and does what a worker process does. Ray places it, carries its messages and reports its end. The
manager decides when to replace it and what to report to the trainer, as for every other kind of worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from envmanager.adapters.factories import EnvFactory, factories_for, pickled
from envmanager.data.env_rows import split_evenly
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.hosts.link_host import LinkHost, Resources
from envmanager.kernel.calls import weak_callback
from envmanager.kernel.table import Entry
from envmanager.observe.stats import WorkerStats
from envmanager.options import takes
from envmanager.ray_cluster.cluster import Cluster, await_nodes, connect, n_cpus
from envmanager.ray_cluster.link import ActorConnection, ActorLink, ActorPoller
from envmanager.ray_cluster.options import RayOptions
from envmanager.ray_cluster.places import Places
from envmanager.ray_cluster.probing import place_on_cluster


class RayHost(LinkHost[ActorLink]):
    """The host of a RayEnvManager, whose workers are actors on a Ray cluster."""

    options: RayOptions
    rewrites_arrays = True
    """Whether a step overwrites the arrays of earlier steps. True, because all steps of a worker use the same rows."""

    tells_memory = False

    def __init__(self, env_factory: Any, factories: Sequence[Any], cluster: Cluster, options: RayOptions) -> None:
        super().__init__(env_factory, options)
        self.start_at_most, self.is_asked = math.inf, True
        self._on_cluster = on_cluster = options.on_cluster
        self._place_s = min(on_cluster.place_s, options.timeouts.start_s) / 4  # so that its process may start in time
        self.factories = factories
        self._cluster = cluster

    def _make_resources(self) -> Resources[ActorLink]:
        poller = ActorPoller()
        self._places = Places(self._cluster, poller.ring)
        poller.on_ring = weak_callback(self._squeeze)
        return Resources(self.options.timeouts.close_s, poller, self._places.close)

    def _squeeze(self) -> None:
        """Let workers that have waited for a place for long run beside others."""
        for link in self.workers:
            link.channel.await_place()
        for link in self._places.without_place(self.workers) if self._on_cluster.squeeze else ():
            if link.channel.squeeze_if_due():
                self.context.events.add(self._places.squeezed(link, self._place_s))

    def why_due(self, worker_id: int) -> str:
        return self._places.why_due(worker_id, self.workers)

    def make_worker(self, worker_id: int) -> ActorLink:
        """Request an actor and return its link without waiting, so that all workers share one start timeout."""
        self.context.calls.require_open("the start of a worker")
        entry, poller = self.context.entries[worker_id], self._resources.poller
        plan, data = self.plan_of(entry), pickled(self.group_factory(entry))
        cluster, events, times = self._cluster, self.context.events, entry.times
        place = self.workers[worker_id].channel.take_place() if entry.generation > 0 else None
        make_actor = partial(cluster.make_actor, worker_id, entry.env_ids, data, node_id=self._places.target(worker_id))
        connection = partial(ActorConnection, make_actor, poller, self._place_s, place)
        return self.care_for(lambda: ActorLink(plan, connection(), cluster, events, times))

    def describe(self, entry: Entry, known: WorkerStats) -> WorkerStats:
        node = self.workers[entry.worker_id].channel.node
        return attrs.evolve(super().describe(entry, known), node=node, memory_bytes=0)  # the pid is of that node


class RayEnvManager(EnvManager):
    """A manager of ``n_envs`` environments in ``n_workers`` actors (default: one per environment) on a Ray cluster.

    ``n_workers="auto"``: a number that suits the cluster's CPUs and the first environment, whose steps are measured in
    an actor before the others start. ``envs_per_worker``: given instead of ``n_workers``. ``cluster``, or its fields
    (``address``, ``resources``, ``placement``, ``squeeze``, …): see ClusterOptions. ``worker_env``: environment
    variables for the actors, in addition to Ray's own. ``log_dir``: passed on in EnvContext. The output of actors is in
    Ray's logs and in the trainer's output. The other parameters are those of SubprocessEnvManager, but ``transport`` is
    ignored; ``local_envs``, ``start_method``, ``zero_copy``, ``start_at_most`` and ``memory_limit_mb`` are refused.

    The constructor connects this program to the cluster as a driver, unless it is already connected to one. It waits
    up to ``timeouts.start_s`` until all workers are ready. It raises UsageError for invalid options or an unusable
    factory, and NotPlaced if the cluster has no room. If a worker cannot start, the constructor ends all other workers
    and raises a WorkerError.
    """

    @takes(RayOptions)
    def __init__(self, env_factory: EnvFactory, options: RayOptions) -> None:
        on_cluster, n_envs, n_workers = options.on_cluster, options.n_envs, options.n_workers
        if on_cluster.envs_per_worker is not None:
            if n_workers is not None:
                raise UsageError(
                    f"n_workers={n_workers!r} and envs_per_worker={on_cluster.envs_per_worker} say the same in two "
                    "ways: give one."
                )
            n_workers = math.ceil(n_envs / on_cluster.envs_per_worker)
        factories = factories_for(env_factory, n_envs)
        connect(on_cluster)
        await_nodes(on_cluster.min_nodes, options.timeouts.start_s)
        if n_workers == "auto":
            found = place_on_cluster(RayEnvManager, env_factory, options, on_cluster, n_cpus())
            n_workers, self.placement = found.n_workers, str(found)
        env_ids = split_evenly(n_envs, n_workers or n_envs)
        super().__init__(env_ids, **options.of_the_manager)
        cluster = Cluster(on_cluster, len(env_ids), options.worker_env)
        self.start(RayHost(env_factory, factories, cluster, options))
