"""A Ray cluster of this machine alone, for whoever is measured on one."""

from __future__ import annotations

from envmanager.extras import needed_by

with needed_by("the contender ray", extra="ray"):
    import ray

EACH = 0.01
"""What an actor says that it takes of a CPU, so that any number of them has room on this machine."""


def start_ray() -> None:
    """Be a driver of such a cluster, if this process is none yet."""
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
