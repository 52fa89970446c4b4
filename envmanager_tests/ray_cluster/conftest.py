"""A cluster of three nodes, all on this machine, for all tests of this folder; without Ray they are skipped."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from envmanager.testing.fault_checks import is_gone, until
from envmanager.testing.leaks import SOON_S, descendants

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

CPUS_OF_A_NODE = 6
STORE_BYTES = 300_000_000


def actors() -> dict[int, str]:
    """The processes that host environments."""
    return {pid: command for pid, command in descendants().items() if "EnvActor" in command and not is_gone(pid)}


def start_cluster(n_nodes: int = 3) -> Any:
    """A cluster, of which this process is not yet a driver."""
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": CPUS_OF_A_NODE, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(n_nodes - 1):
        cluster.add_node(**node)
    return cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        started = start_cluster()
        ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture(autouse=True)
def leak_guard(cluster: Any) -> Iterator[None]:
    """No actor and no thread outlives a test; Ray's own processes and connections come and go as it likes."""
    threads = set(threading.enumerate())
    yield
    until(lambda: not actors(), within_s=SOON_S)
    left = [thread.name for thread in set(threading.enumerate()) - threads if not thread.daemon]
    assert not left, f"left behind: {left}"
