"""The cluster: connects to it, has it make actors and end them, and reports what it has.

The rule: no other module of this folder imports Ray, and what this one asks of Ray is all public. It schedules nothing
itself: who runs where, and what a lost node means, is Ray's to decide.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.ray_cluster.actor import EnvActor
from envmanager.ray_cluster.options import ClusterOptions
from envmanager.ray_cluster.room import in_words, why_no_room
from envmanager.system.interrupts import let_through

with needed_by("the manager kind 'ray'", extra="ray"):
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_CLIENT = "ray://"

_REMOTE: Any = ray.remote(EnvActor)

OnAnswer = Callable[[Any], None]


class _OwnJob:
    """The job that this library has begun, and its runtime environment."""

    job_id: str | None = None
    runtime_env: Mapping[str, Any] | None = None


def connect(options: ClusterOptions) -> None:
    """Make this program a driver of the cluster until it ends. One that is a driver already stays with its cluster.

    The runtime environment is then the whole job's, because only that may be made of folders of this machine.
    UsageError when there is no cluster at that address.
    """
    address = options.address
    if address is not None and address.startswith(_CLIENT):
        raise UsageError(
            f"address={address!r} is that of Ray's client, which stands between the trainer and the cluster and would "
            'slow every step. Run the trainer on a node of the cluster, with address="auto".'
        )
    if ray.is_initialized():
        return
    before = signal.getsignal(signal.SIGTERM)
    runtime_env = options.runtime_env
    try:
        with let_through():
            ray.init(address=address, runtime_env=copy.deepcopy(runtime_env))  # Ray writes into it
    except ConnectionError as error:
        raise UsageError(
            f"there is no Ray cluster at address={address!r}: {error}. Start one with `ray start --head`, or leave the "
            "address out for one of this machine alone."
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"runtime_env or address cannot be used: {error}") from error
    _OwnJob.job_id, _OwnJob.runtime_env = _job_id(), runtime_env
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray puts its own in the place of any other


def _job_id() -> str:
    return str(ray.get_runtime_context().get_job_id())


class ActorHandle:
    """A handle of one actor. Its answers are passed to a callback, in a thread of Ray's."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._obey = actor.obey

    def hello(self, on_answer: OnAnswer) -> None:
        """Ask for its process id and host; the answer comes once it has been placed."""
        self._actor.hello.remote().future().add_done_callback(on_answer)

    def ping(self, on_answer: OnAnswer) -> None:
        """Ask whether it lives."""
        self._actor.ping.remote().future().add_done_callback(on_answer)

    def obey(self, command: bytes, on_answer: OnAnswer) -> None:
        """Call the actor to carry out a command, after all earlier ones."""
        if not ray.is_initialized():  # or Ray would start another cluster
            raise UsageError("ray.shutdown() was called, and has ended the actors: make a new manager.")
        self._obey.remote(command).future().add_done_callback(on_answer)

    def kill(self) -> None:
        """End it, wherever it is and whatever it does. A second time does nothing."""
        with contextlib.suppress(RayError, ValueError):
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)


class Cluster:
    """The cluster as one manager uses it."""

    def __init__(self, options: ClusterOptions, n_workers: int, environ: Mapping[str, str] | None) -> None:
        """``environ``: more environment variables for the workers. UsageError when a named node is not there."""
        self._options = options
        self._runtime_env = _runtime_env(_besides_the_jobs(options.runtime_env), environ)
        self._nodes = _node_ids(options.placement, n_workers)
        wanted = options.amounts
        self._resources = {
            "num_cpus": wanted.pop("CPU", 1.0),
            "num_gpus": wanted.pop("GPU", 0.0),
            "memory": int(wanted.pop("memory", 0)) or None,
            "resources": wanted,
        }

    def make_actor(self, worker_id: int, *arguments: Any) -> ActorHandle:
        """Ask for a new actor, which Ray places when there is room. Ray itself restarts and repeats nothing."""
        options = {
            "max_restarts": 0,
            "max_task_retries": 0,
            "enable_task_events": False,
            "scheduling_strategy": self._strategy(worker_id),
            "runtime_env": self._runtime_env,
            **self._resources,
        }
        try:
            return ActorHandle(_REMOTE.options(**options).remote(worker_id, *arguments))
        except (ValueError, TypeError) as error:
            raise UsageError(f"resources or runtime_env cannot be used: {error}") from error

    def _strategy(self, worker_id: int) -> Any:
        if self._nodes:
            return NodeAffinitySchedulingStrategy(self._nodes[worker_id], soft=True)
        return "SPREAD" if self._options.placement == "spread" else "DEFAULT"

    @property
    def wanted(self) -> dict[str, float]:
        """The resources that each worker takes, by Ray's names."""
        return {name: amount for name, amount in self._options.amounts.items() if amount}

    @property
    def wanted_in_words(self) -> str:
        """The resources that each worker takes, in words."""
        return in_words(self.wanted)

    def why_no_room(self) -> str:
        """Return which resource is missing for one more worker, in words."""
        return why_no_room(self.wanted, [node["Resources"] for node in _alive_nodes()], ray.available_resources())

    def what_it_has(self) -> str:
        """Return the number of nodes, and their resources, in words."""
        nodes = _alive_nodes()
        resources = in_words(dict(sorted(ray.cluster_resources().items())))
        return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} with {resources}"


def is_connected() -> bool:
    """Return whether this program is still a driver of the cluster."""
    return bool(ray.is_initialized())


def n_cpus() -> int:
    """Return the number of CPUs that the cluster reports."""
    return int(ray.cluster_resources().get("CPU", 0))


def _alive_nodes() -> list[Mapping[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _besides_the_jobs(runtime_env: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return ``runtime_env``, or None if the job has it already."""
    if runtime_env is None or (_OwnJob.job_id == _job_id() and runtime_env == _OwnJob.runtime_env):
        return None
    return runtime_env


def _runtime_env(given: Mapping[str, Any] | None, environ: Mapping[str, str] | None) -> dict[str, Any] | None:
    merged = dict(given or {})
    if environ:
        merged["env_vars"] = {**merged.get("env_vars", {}), **environ}
    return merged or None


def _node_ids(placement: Any, n_workers: int) -> list[str]:
    """Return the id of each worker's node if ``placement`` names nodes, else an empty list."""
    if isinstance(placement, str):
        return []
    if len(placement) != n_workers:
        raise UsageError(f"placement names {len(placement)} nodes for {n_workers} workers: name one for each.")
    nodes = _alive_nodes()
    found = []
    for wanted in placement:
        ids = [
            node["NodeID"] for node in nodes if wanted in (node["NodeID"], node["NodeName"], node["NodeManagerAddress"])
        ]
        if not ids:
            known = ", ".join(f"{node['NodeID'][:8]}… ({node['NodeName']})" for node in nodes)
            raise UsageError(f"placement names {wanted!r}, and the cluster has no such node. It has {known}.")
        found.append(ids[0])
    return found
