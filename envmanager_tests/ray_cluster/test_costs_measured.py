"""What a step costs the trainer, by the number of actors, and how fast it goes. The figures are printed (``-rP``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from envmanager import EnvManager, SubprocessEnvManager, Timeouts, Wait
from envmanager.data.steps import Steps
from envmanager.data.trees import Tree
from envmanager.testing import EchoEnvironment

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from envmanager.ray_cluster.manager import RayEnvManager

pytestmark = [pytest.mark.load, pytest.mark.timeout(900)]

COUNTS = (1, 4, 16, 64)
FOR_S = 4.0


class Asleep(EchoEnvironment):
    """A step that waits for something else, so that the trainer alone computes."""

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        time.sleep(0.1)
        return super().step(actions)


def cost_s(n_workers: int) -> float:
    """Processor time of this process per worker step."""
    options: Any = {"resources": {"num_cpus": 0.1}, "timeouts": Timeouts(start_s=400)}
    with RayEnvManager(Asleep, n_workers, **options) as manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        n_steps, began, cpu_s = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began < FOR_S:
            manager.send(np.zeros(len(batch), np.int64), batch.env_ids)
            batch = manager.recv(Wait.any())
            n_steps += len(batch)
        return (time.process_time() - cpu_s) / n_steps


def test_a_step_costs_the_trainer_the_same_whatever_the_number_of_actors(cluster: Any) -> None:
    """Ray's own threads are counted too; what they do for nobody's step falls on few steps where there are few."""
    costs = {n_workers: cost_s(n_workers) for n_workers in COUNTS}
    print(", ".join(f"{n_workers} actors: {1e6 * cost:.0f} µs" for n_workers, cost in costs.items()))
    assert costs[64] < 1.5 * costs[16] < 2.25 * costs[4]


SHAPES = ((8, 1), (8, 8), (2, 32), (2, 128), (1, 256))
"""Actors, and environments of each."""


def steps_per_s(manager: EnvManager) -> float:
    """Steps of environments per second, waiting for all."""
    with manager:
        manager.reset()
        batch = manager.recv(Wait.all())
        actions = np.zeros(manager.n_envs, np.int64)
        for _ in range(20):
            manager.send(actions, batch.env_ids)
            manager.recv(Wait.all())
        n_calls, began = 0, time.monotonic()
        while time.monotonic() - began < FOR_S:
            manager.send(actions, batch.env_ids)
            manager.recv(Wait.all())
            n_calls += 1
        return n_calls * manager.n_envs / (time.monotonic() - began)


def test_how_many_environments_share_an_actor_decides_the_speed(cluster: Any) -> None:
    rates = {}
    for n_workers, each in SHAPES:
        on_cluster = steps_per_s(RayEnvManager("CartPole-v1", n_workers * each, n_workers=n_workers))
        here = steps_per_s(SubprocessEnvManager("CartPole-v1", n_workers * each, n_workers=n_workers))
        rates[n_workers, each] = on_cluster
        print(f"{n_workers} x {each}: {on_cluster:,.0f} steps/s in actors, {here:,.0f} in processes")
    assert rates[2, 128] > 5 * rates[8, 1]
