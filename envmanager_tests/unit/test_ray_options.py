"""What may be said about a cluster, and what is said about what it lacks. Needs no Ray."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from envmanager.errors import ConfigError, NotPlaced, UsageError
from envmanager.placing.placement import Probe
from envmanager.ray_cluster.options import ClusterOptions, in_words, why_no_room
from envmanager.ray_cluster.probing import choose
from envmanager.registry import ManagerOptions, known_kinds, make_manager


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"resources": {"cpus": 1}}, "resources knows num_cpus, num_gpus, memory, custom, not 'cpus'"),
        ({"resources": {"num_cpus": -1}}, "resources.num_cpus must be a number from 0 up"),
        ({"resources": {"custom": {"license": True}}}, "resources.custom.license must be a number"),
        ({"resources": 3}, "resources must be a mapping"),
        ({"placement": "scatter"}, "placement must be"),
        ({"placement": [1, 2]}, "placement must be"),
        ({"address": ""}, "address must be a text"),
        ({"runtime_env": "pip"}, "runtime_env must be a mapping"),
        ({"envs_per_worker": 0}, "envs_per_worker must be a whole number of at least 1"),
        ({"adress": "auto"}, "did you mean cluster.address?"),
    ],
)
def test_what_makes_no_sense_is_refused_and_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ClusterOptions.of(options)
    assert complaint in str(raised.value)


def test_resources_are_kept_by_rays_names_and_one_cpu_is_the_default() -> None:
    assert ClusterOptions.of(None).amounts == {"CPU": 1.0}
    asked = ClusterOptions.of({"resources": {"num_cpus": 0.5, "num_gpus": 1, "custom": {"license": 2}}})
    assert asked.amounts == {"CPU": 0.5, "GPU": 1.0, "license": 2.0}


def test_secrets_of_a_runtime_env_are_not_shown() -> None:
    options = ClusterOptions.of({"runtime_env": {"env_vars": {"TOKEN": "hunter2"}}})
    assert "hunter2" not in repr(options)
    assert "hunter2" not in repr(ManagerOptions(cluster={"runtime_env": {"env_vars": {"TOKEN": "hunter2"}}}))


NODES = [{"CPU": 4.0, "node:10.0.0.1": 1.0}, {"CPU": 2.0, "license": 1.0}]


@pytest.mark.parametrize(
    ("wanted", "free", "why"),
    [
        ({"CPU": 8.0}, {"CPU": 6.0}, "no node has 8 CPU (the most that one has is 4)"),
        ({"CPU": 1.0, "GPU": 1.0}, {"CPU": 6.0}, "no node has 1 GPU (no node has any)"),
        ({"CPU": 3.0, "license": 1.0}, {"CPU": 6.0, "license": 1.0}, "no node has all of 3 CPU, 1 license"),
        ({"CPU": 1.0}, {"CPU": 0.0}, "all CPU is taken, but for 0 CPU"),
        ({"CPU": 1.0}, {}, "all CPU is taken, but for 0 CPU"),
        ({"CPU": 4.0}, {"CPU": 5.0}, "no node has 4 CPU free at once, or the one that has is slow to start a process"),
    ],
)
def test_a_worker_without_room_is_told_what_is_missing(
    wanted: dict[str, float], free: dict[str, float], why: str
) -> None:
    assert why_no_room(wanted, NODES, free) == why


def test_what_a_cluster_has_is_said_without_rays_own_counts() -> None:
    assert in_words({"CPU": 6.0, "node:10.0.0.1": 1.0, "memory": 2.0**31, "license": 1.0}) == (
        "6 CPU, 2 GiB memory, 1 license"
    )


def test_the_error_says_what_to_do() -> None:
    error = NotPlaced(
        worker_id=2, env_ids=[4, 5], timeout_s=120, wanted="1 GPU", missing="no node has 1 GPU", cluster="1 node"
    )
    assert "worker 2 (envs 4-5) wants 1 GPU and could not be placed within 120 s: no node has 1 GPU" in str(error)
    assert "resources=" in str(error)


@pytest.mark.parametrize(
    ("step_s", "n_envs", "n_room", "n_workers"),
    [
        (10e-6, 64, 16, 1),  # calls cost more than all its steps
        (1e-3, 64, 16, 11),
        (100e-3, 64, 16, 16),  # as many as there is room for
        (100e-3, 8, 16, 8),  # one each
    ],
)
def test_cheap_environments_share_an_actor_and_dear_ones_do_not(
    step_s: float, n_envs: int, n_room: int, n_workers: int
) -> None:
    assert choose(Probe(wall_s=step_s, cpu_s=step_s), n_envs, n_room).n_workers == n_workers


def test_the_kind_is_known_and_without_ray_the_pip_command_is_named() -> None:
    assert "ray" in known_kinds()
    code = """
import sys
sys.modules["ray"] = None
from envmanager import MissingExtra, make_manager
try:
    make_manager({"kind": "ray", "env": "CartPole-v1"})
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True)
    assert "pip install 'envmanager[ray]'" in done.stdout


def test_other_kinds_refuse_the_options_of_a_cluster() -> None:
    with pytest.raises(ConfigError, match="has no option cluster"):
        make_manager({"kind": "simple", "env": "CartPole-v1", "cluster": {"address": "auto"}})
    with pytest.raises(UsageError, match="cluster must be a mapping"):
        ManagerOptions(cluster="auto")  # type: ignore[arg-type]
