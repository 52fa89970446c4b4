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
import weakref
from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.adapters.factories import EnvFactory, factories_for
from envmanager.core.hosts import EnvWorker
from envmanager.data.env_rows import deal
from envmanager.env_manager import EnvManager
from envmanager.errors import UsageError
from envmanager.options import LocalCount, ManagerOptions, RestartPolicy, StartMethod, Timeouts, Wait, WorkerCount
from envmanager.ray_cluster import cluster as clusters
from envmanager.ray_cluster.host import RayHost
from envmanager.ray_cluster.options import ClusterOptions
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

    def __init__(
        self,
        env_factory: EnvFactory,
        n_envs: int = 1,
        *,
        n_workers: WorkerCount = None,
        envs_per_worker: int | None = None,
        resources: Mapping[str, Any] | None = None,
        placement: Any = None,
        address: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        cluster: ClusterOptions | Mapping[str, Any] | None = None,
        wait: Wait | str | int = "any",
        timeouts: Timeouts | None = None,
        restarts: RestartPolicy | None = None,
        infos: bool = False,
        check_values: bool = False,
        seed: int | None = None,
        worker_env: Mapping[str, str] | None = None,
        log_dir: str | None = None,
        trace: str | None = None,
        local_envs: LocalCount = 0,
        start_method: StartMethod | None = None,
        zero_copy: bool = False,
    ) -> None:
        _refuse(local_envs=local_envs, start_method=start_method, zero_copy=zero_copy)
        given = {
            "envs_per_worker": envs_per_worker,
            "resources": resources,
            "placement": placement,
            "address": address,
            "runtime_env": runtime_env,
        }
        on_cluster = _cluster_options(cluster, {name: value for name, value in given.items() if value is not None})
        options = ManagerOptions(
            kind="ray",
            n_envs=n_envs,
            n_workers=_n_workers(n_envs, n_workers, on_cluster.envs_per_worker),
            wait=wait,
            timeouts=Timeouts() if timeouts is None else timeouts,
            restarts=RestartPolicy() if restarts is None else restarts,
            infos=infos,
            check_values=check_values,
            seed=seed,
            worker_env=worker_env,
            log_dir=log_dir,
            trace=trace,
        )
        factories = factories_for(env_factory, n_envs)
        clusters.connect(on_cluster)
        if options.n_workers == "auto":
            placement_found = place_on_cluster(RayEnvManager, env_factory, options, on_cluster, clusters.n_cpus())
            options = attrs.evolve(options, n_workers=placement_found.n_workers)
            self.placement = str(placement_found)
        workers = options.n_workers
        assert isinstance(workers, int)
        super().__init__(
            deal(n_envs, workers),
            wait=options.wait,
            seed=seed,
            restarts=options.restarts,
            check_values=check_values,
            trace=options.trace,
        )
        this = weakref.ref(self)

        def create(worker_id: int) -> EnvWorker:
            manager = this()
            assert manager is not None
            return manager.create_worker(worker_id, manager.step_queue, env_factory)

        self._actors = RayHost(
            factories,
            clusters.Cluster(on_cluster, workers, worker_env),
            options,
            self._table.entries,
            calls=self._calls,
            listener=self._listener,
            events=self.events,
            create=create,
        )
        self.start(self._actors)

    def create_worker(self, worker_id: int, step_queue: Any, env_factory: Any) -> EnvWorker:
        """Ask for one actor. Tests replace this by something that returns a fake."""
        return self._actors.make_worker(worker_id)


def _refuse(**options: Any) -> None:
    why = {
        "local_envs": "the trainer's process hosts none",
        "start_method": "Ray starts its processes",
        "zero_copy": "no memory is shared between machines",
    }
    for name, value in options.items():
        if value:
            raise UsageError(f"{name}={value!r} means nothing to the manager kind 'ray': {why[name]}. Leave it out.")


def _cluster_options(cluster: ClusterOptions | Mapping[str, Any] | None, given: Mapping[str, Any]) -> ClusterOptions:
    if cluster is None:
        return ClusterOptions.of(given)
    if given:
        raise UsageError(f"{', '.join(given)} and cluster are both given: put all of it into one of them.")
    return ClusterOptions.of(cluster)


def _n_workers(n_envs: int, n_workers: WorkerCount, envs_per_worker: int | None) -> WorkerCount:
    if envs_per_worker is None:
        return n_envs if n_workers is None else n_workers
    if n_workers is not None:
        raise UsageError(
            f"n_workers={n_workers!r} and envs_per_worker={envs_per_worker} say the same in two ways: give one."
        )
    return math.ceil(n_envs / envs_per_worker)
