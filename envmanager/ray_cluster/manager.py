"""Environments on a Ray cluster.

::

    trainer                                    node 0              node 1
    RayEnvManager ── a call of an actor ──▶    actor 0: envs 0 1   actor 1: envs 2 3
          ▲                                        │                   │
          └── one step queue ◀── callbacks ────────┴───────────────────┘

An actor is a worker, and does what a worker process does. Ray places it, reaches it and says when it is no more; when
it is replaced, and what the trainer is told, is decided here, as for every other kind of worker.
"""

from __future__ import annotations

import math

from envmanager.adapters.factories import EnvFactory, factories_for
from envmanager.data.env_rows import deal
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.options import WorkerCount, takes
from envmanager.ray_cluster import cluster as clusters
from envmanager.ray_cluster.host import RayHost
from envmanager.ray_cluster.options import RayOptions
from envmanager.ray_cluster.probing import place_on_cluster


class RayEnvManager(EnvManager):
    """Runs ``n_envs`` environments in ``n_workers`` actors (by default one each) on a Ray cluster.

    ``n_workers="auto"``: as many as suit the cluster's CPUs and the first environment, which an actor steps for a
    moment before the others start. ``envs_per_worker``: instead of ``n_workers``. ``cluster``, or its fields
    ``address``, ``resources``, ``placement`` and ``runtime_env`` one by one: see ClusterOptions. ``worker_env``:
    environment variables for the actors, besides those that Ray gives them. ``log_dir``: for the factories' EnvContext;
    what actors print is in Ray's logs, and in the trainer's output. The other parameters are those of
    SubprocessEnvManager, of which ``local_envs``, ``start_method`` and ``zero_copy`` mean nothing here and are refused.

    If this program is no driver of a cluster yet, it becomes one, until it ends. The constructor returns when all
    workers are ready, at most after ``timeouts.start_s``. Raises UsageError when the options or the factory cannot
    work, NotPlaced when the cluster has no room, and the WorkerError of the first worker that could not start; then all
    others are ended.
    """

    @takes(RayOptions)
    def __init__(self, env_factory: EnvFactory, options: RayOptions) -> None:
        on_cluster = options.on_cluster
        n_envs, n_workers = options.n_envs, _n_workers(options.n_envs, options.n_workers, on_cluster.envs_per_worker)
        factories = factories_for(env_factory, n_envs)
        clusters.connect(on_cluster)
        if n_workers == "auto":
            found = place_on_cluster(RayEnvManager, env_factory, options, on_cluster, clusters.n_cpus())
            n_workers, self.placement = found.n_workers, str(found)
        assert isinstance(n_workers, int)
        super().__init__(deal(n_envs, n_workers), **options.of_the_manager)
        self.start(
            RayHost(env_factory, factories, clusters.Cluster(on_cluster, n_workers, options.worker_env), options)
        )


def _n_workers(n_envs: int, n_workers: WorkerCount, envs_per_worker: int | None) -> WorkerCount:
    if envs_per_worker is None:
        return n_envs if n_workers is None else n_workers
    if n_workers is not None:
        raise UsageError(
            f"n_workers={n_workers!r} and envs_per_worker={envs_per_worker} say the same in two ways: give one."
        )
    return math.ceil(n_envs / envs_per_worker)
