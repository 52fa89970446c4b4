"""The connection to a Ray cluster. This module creates and kills actors, and reports the cluster's resources.

Only this module of the package imports Ray. Ray decides on which nodes the actors run. The option ``placement`` is only
a preference.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.ray_cluster.actor import EnvActor
from envmanager.ray_cluster.options import ClusterOptions, in_words, why_no_room
from envmanager.system.interrupts import allow_interrupts

with needed_by("the manager kind 'ray'", extra="ray"):
    import ray
    from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeStatus
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_REMOTE: Any = ray.remote(EnvActor)
_LOOK_EVERY_S = 0.5
_environments: dict[str, dict[str, Any]] = {}
"""Runtime environments of the Ray jobs that this library has started, by job id."""


def connect(options: ClusterOptions) -> None:
    """Connect this program to a Ray cluster as a driver, unless it is already connected to one.

    The runtime environment is set for the whole job, since Ray accepts local folders only at the job level. Raises
    UsageError if there is no cluster at the address, or if an option is invalid.
    """
    address, runtime_env = options.address, options.runtime_env
    if address is not None and address.startswith("ray://"):
        raise UsageError(
            f"address={address!r} is that of Ray's client, which stands between the trainer and the cluster and would "
            'slow every step. Run the trainer on a node of the cluster, with address="auto".'
        )
    if ray.is_initialized():
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        with allow_interrupts():
            ray.init(address=address, runtime_env=copy.deepcopy(runtime_env))  # Ray modifies it
    except ConnectionError as error:
        raise UsageError(
            f"there is no Ray cluster at address={address!r}: {error}. Start one with `ray start --head`, or leave the "
            "address out for one of this machine alone."
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"runtime_env or address cannot be used: {error}") from error
    _environments[ray.get_runtime_context().get_job_id()] = dict(runtime_env or {})
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray has replaced the handler


def await_nodes(n: int, within_s: float) -> None:
    """Wait until the cluster has ``n`` nodes. Raises UsageError if it has fewer after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while (found := sum(node["Alive"] for node in ray.nodes())) < n:
        if time.monotonic() >= deadline:
            raise UsageError(
                f"the cluster has {found} of min_nodes={n} nodes after {within_s:g} s (timeouts.start_s): add nodes, "
                "or leave min_nodes out, and the run begins with those that are there."
            )
        with allow_interrupts():
            time.sleep(_LOOK_EVERY_S)


def n_cpus() -> int:
    """Return the number of CPUs that the cluster reports."""
    return int(ray.cluster_resources().get("CPU", 0))


class Nodes(NamedTuple):
    """The nodes of a cluster at one moment."""

    cpus: Mapping[str, float]
    """CPUs of each node that is not to end, by id."""
    ending: set[str]
    n_waiting: int
    """Number of requests like those of workers that have no place, and could share the CPUs of others."""


def _fits(wanted: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in wanted.items())


class ActorHandle:
    """A wrapper around Ray's handle of one actor. It sends commands to the actor and kills it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._obey = actor.obey

    def obey(self, command: bytes, on_answer: Callable[[Any], None]) -> None:
        """Send a command to the actor, which executes commands in order.

        A thread of Ray calls ``on_answer`` with a Future of the answer. Raises UsageError after ray.shutdown().
        """
        if not ray.is_initialized():  # otherwise Ray would start another cluster
            raise UsageError("ray.shutdown() was called, and has ended the actors: make a new manager.")
        self._obey.remote(command).future().add_done_callback(on_answer)

    def kill(self) -> None:
        """Kill the actor, even while it executes a command. A second call does nothing."""
        with contextlib.suppress(RayError, ValueError):
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)


class Cluster:
    """A cluster on which one manager creates actors, all with the same options."""

    def __init__(self, options: ClusterOptions, n_workers: int, environ: Mapping[str, str] | None) -> None:
        """Set the actors' options. ``environ`` adds environment variables. Raises UsageError for a bad placement."""
        self._wanted = options.amounts
        self._nodes = [] if isinstance(options.placement, str) else _node_ids(options.placement, n_workers)
        runtime_env = dict(options.runtime_env or {})
        if runtime_env == _environments.get(ray.get_runtime_context().get_job_id()):  # actors inherit it
            runtime_env = {}
        if environ:
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **environ}
        more = dict(self._wanted)
        self._options = {
            "num_cpus": more.pop("CPU", 0.0),
            "num_gpus": more.pop("GPU", 0.0),
            "memory": int(more.pop("memory", 0)) or None,
            "resources": more,
            "runtime_env": runtime_env or None,
            "scheduling_strategy": "SPREAD" if options.placement == "spread" else "DEFAULT",
            # Ray must not restart actors or repeat calls: the manager replaces workers.
            "max_restarts": 0,
            "max_task_retries": 0,
            "enable_task_events": False,
        }

    def make_actor(self, worker_id: int, *arguments: Any, node_id: str = "", squeezed: bool = False) -> ActorHandle:
        """Return a new actor, which Ray places once there is room. Raises UsageError if Ray refuses the options.

        ``node_id``: the node to prefer. ``squeezed``: whether it asks for no CPU and no memory.
        """
        options = {**self._options, **({"num_cpus": 0.0, "memory": None} if squeezed else {})}
        node_id = node_id or (self._nodes[worker_id] if self._nodes else "")
        if node_id:
            # Without spilling, an actor waits for a node that is there and has no room.
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                node_id, soft=True, _spill_on_unavailable=True
            )
        try:
            return ActorHandle(_REMOTE.options(**options).remote(worker_id, *arguments))
        except (ValueError, TypeError) as error:
            raise UsageError(f"resources or runtime_env cannot be used: {error}") from error

    @property
    def is_by_name(self) -> bool:
        """Whether each worker has a preferred node."""
        return bool(self._nodes)

    def look(self) -> Nodes:
        """Return what the cluster says of its nodes, and of requests without a place. Raises errors of Ray."""
        reply = GetClusterResourceStateReply()
        reply.ParseFromString(ray._private.worker.global_worker.gcs_client.get_cluster_resource_state())
        state, cpus, ending, can_share = reply.cluster_resource_state, {}, set(), False
        shared = {name: amount for name, amount in self._wanted.items() if name not in ("CPU", "memory")}
        for node in state.node_states:
            if node.status == NodeStatus.DRAINING:
                ending.add(node.node_id.hex())
            elif node.status != NodeStatus.DEAD:
                cpus[node.node_id.hex()] = node.total_resources.get("CPU", 0.0)
                fits = _fits(self._wanted, node.total_resources) and _fits(shared, node.available_resources)
                can_share |= fits and shared != self._wanted
        requests = state.pending_resource_requests if can_share else ()
        n_waiting = sum(each.count for each in requests if dict(each.request.resources_bundle) == self._wanted)
        return Nodes(cpus, ending, n_waiting)

    def is_connected(self) -> bool:
        """Return whether this program is still a driver of the cluster."""
        return bool(ray.is_initialized())

    def shortage(self) -> dict[str, str]:
        """Return three fields of NotPlaced: a worker's resources, why no node has room, and the cluster's size."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        resources = in_words(dict(sorted(ray.cluster_resources().items())))
        return {
            "wanted": in_words(self._wanted),
            "missing": why_no_room(self._wanted, nodes, ray.available_resources()),
            "cluster": f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} with {resources}",
        }


def _node_ids(names: Any, n_workers: int) -> list[str]:
    """Return the id of each worker's node. Raises UsageError for an unknown name or a wrong number of names."""
    if len(names) != n_workers:
        raise UsageError(f"placement names {len(names)} nodes for {n_workers} workers: name one for each.")
    nodes, found = [node for node in ray.nodes() if node["Alive"]], []
    for name in names:
        ids = [
            each["NodeID"] for each in nodes if name in (each["NodeID"], each["NodeName"], each["NodeManagerAddress"])
        ]
        if not ids:
            known = ", ".join(f"{each['NodeID'][:8]}… ({each['NodeName']})" for each in nodes)
            raise UsageError(f"placement names {name!r}, and the cluster has no such node. It has {known}.")
        found.append(ids[0])
    return found
