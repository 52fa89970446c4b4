"""A Ray cluster of this machine alone, for the contenders that need one."""

from __future__ import annotations

import ray

EACH = 0.01
"""Share of a CPU that each actor reserves, so small that any number of actors fits on this machine."""


def start_ray() -> None:
    """Start the cluster, unless this process has started one."""
    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
