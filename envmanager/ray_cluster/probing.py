"""The choice of how many actors host the environments, for ``n_workers="auto"``.

::

    Probe (what a step costs) ──┐
    n_envs, n_cpus ─────────────┼── choose ──▶ Placement (n_workers, the reason in a sentence)
    what a call of Ray costs ───┘

A call costs the trainer much more than a message to a local process. Cheap environments are therefore faster
in fewer actors with more environments each, even if some CPUs then stay free. Only the environment is measured, in an
actor; the cost of a call is a constant.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import attrs

from envmanager.adapters.factories import factories_for
from envmanager.placing.pair import OnePerProcess, try_two
from envmanager.placing.placement import AS_GOOD, Placement, Probe, describe_seconds
from envmanager.placing.probing import ProbeEnded, measure
from envmanager.ray_cluster.options import ClusterOptions, RayOptions

CALL_S = 400e-6
"""Trainer time per call to an actor in seconds, measured on one core (docs/ray.md). Calls are made one at a time."""
ANSWER_S = 600e-6
"""Time from a call to its answer in seconds, without the steps of the environments."""

_logger = logging.getLogger("envmanager")


def place_on_cluster(
    manager_class: Callable[..., Any], env_factory: Any, options: RayOptions, cluster: ClusterOptions, n_cpus: int
) -> Placement:
    """Probe the first environment in an actor. Log and return a placement for a cluster with ``n_cpus`` CPUs.

    A single environment is not probed. On ProbeEnded and OnePerProcess, choose as many actors as can be.
    """
    n_envs, each = options.n_envs, cluster.amounts.get("CPU")
    if n_envs == 1:
        return Placement("ray", 1, "1 environment in 1 actor, because there is only one")
    n_room = max(1, math.floor(n_cpus / each)) if each else n_envs
    one = functools.partial(manager_class, cluster=attrs.evolve(cluster, envs_per_worker=None, placement="pack"))
    try:
        chosen = choose(measure(one, env_factory, options), n_envs, n_room)
        if chosen.shares_a_process(n_envs):
            try_two(one, factories_for(env_factory, n_envs), options)
    except (ProbeEnded, OnePerProcess) as ended:
        chosen = _placement(n_envs, min(n_room, n_envs), str(ended))
    _logger.info("%s", chosen)
    return chosen


def round_s(probe: Probe, n_envs: int, n_workers: int) -> float:
    """Return the estimated seconds of a step of all: a call per actor, an answer, the steps of the fullest actor."""
    return n_workers * CALL_S + ANSWER_S + math.ceil(n_envs / n_workers) * probe.wall_s


def choose(probe: Probe, n_envs: int, n_room: int) -> Placement:
    """Return the placement with the fewest actors, at most ``n_room``, that is at most 5 % slower than the fastest."""
    times = {count: round_s(probe, n_envs, count) for count in range(1, min(n_room, n_envs) + 1)}
    n_workers = next(count for count, time_s in times.items() if time_s <= AS_GOOD * min(times.values()))
    step = f"a step takes {describe_seconds(probe.wall_s)} and a call of an actor {describe_seconds(CALL_S)}"
    return attrs.evolve(_placement(n_envs, n_workers, step), probes=(probe,))


def _placement(n_envs: int, n_workers: int, reason: str) -> Placement:
    actors = f"{n_workers} actor{'' if n_workers == 1 else 's'}"
    most = math.ceil(n_envs / n_workers)
    return Placement("ray", n_workers, f"{n_envs} environments in {actors}, up to {most} each, because {reason}")
