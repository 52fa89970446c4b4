"""Chooses how many actors host the environments, for ``n_workers="auto"``.

::

    Probe (what a step costs) ──┐
    n_envs, n_cpus ─────────────┼── choose ──▶ ClusterPlacement (n_workers, the reason in a sentence)
    what a call of Ray costs ───┘

A call costs the trainer some fifty times what a message to a process on its own machine does, so for cheap
environments fewer actors with more environments each are faster, though CPUs stay free.

Only the environment is measured, in an actor.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import attrs

from envmanager.placing.placement import Probe, describe_seconds
from envmanager.placing.probing import ProbeEnded, measure
from envmanager.ray_cluster.options import ClusterOptions, RayOptions

CALL_S = 400e-6
"""The trainer's part in one call of an actor, measured on one core (docs/ray.md); it makes one call after another."""
ANSWER_S = 600e-6
"""The seconds from a call to its answer, without those of the environments."""
AS_GOOD = 1.05
"""The factor on the least time within which the smallest number of workers is chosen."""

_logger = logging.getLogger("envmanager")


@attrs.frozen
class ClusterPlacement:
    """A number of workers, and the reason for it."""

    n_workers: int
    reason: str

    def __str__(self) -> str:
        return self.reason


def place_on_cluster(
    manager_class: Callable[..., Any], env_factory: Any, options: RayOptions, cluster: ClusterOptions, n_cpus: int
) -> ClusterPlacement:
    """Return how many workers suit a cluster of ``n_cpus``, after probing the first environment in an actor; log it.

    An environment that ends its probe gets a worker of its own, as long as there is room.
    """
    if options.n_envs == 1:
        return ClusterPlacement(1, "1 environment in 1 actor, because there is only one")
    of_one = attrs.evolve(cluster, envs_per_worker=None, placement="pack")
    each = cluster.amounts["CPU"]
    most = max(1, math.floor(n_cpus / each) if each else options.n_envs)
    try:
        probe = measure(functools.partial(manager_class, cluster=of_one), env_factory, options)
    except ProbeEnded as ended:
        n_workers = min(most, options.n_envs)
        chosen = ClusterPlacement(n_workers, f"{_where(options.n_envs, n_workers)}, because {ended}")
    else:
        chosen = choose(probe, options.n_envs, most)
    _logger.info("%s", chosen)
    return chosen


def round_s(probe: Probe, n_envs: int, n_workers: int) -> float:
    """Return the estimated seconds of one step of all environments.

    That is a call for each actor, one answer, and the steps of the actor with the most environments, added up.
    """
    return n_workers * CALL_S + ANSWER_S + math.ceil(n_envs / n_workers) * probe.wall_s


def choose(probe: Probe, n_envs: int, n_room: int) -> ClusterPlacement:
    """Return how many workers, at most ``n_room``, should host the environments."""
    times = {count: round_s(probe, n_envs, count) for count in range(1, min(n_room, n_envs) + 1)}
    best_s = min(times.values())
    chosen = next(count for count, time_s in times.items() if time_s <= AS_GOOD * best_s)
    step = f"a step takes {describe_seconds(probe.wall_s)} and a call of an actor {describe_seconds(CALL_S)}"
    return ClusterPlacement(chosen, f"{_where(n_envs, chosen)}, because {step}")


def _where(n_envs: int, n_workers: int) -> str:
    actors = f"{n_workers} actor{'' if n_workers == 1 else 's'}"
    return f"{n_envs} environments in {actors}, up to {math.ceil(n_envs / n_workers)} each"
