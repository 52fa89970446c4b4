"""What a step of all environments of a functional vector costs: in a bare ``lax.scan``, alone, and in a manager.

python jax_vector_costs.py
"""

import time

import jax
import numpy as np
from jax_vector import make

from envmanager import EnvContext, SimpleEnvManager


def measure(n_envs: int, n_steps: int = 200) -> None:
    """Print the least time of a step in six runs, of which the first compiles."""
    vector, actions = make(EnvContext(0, 0, n_envs=n_envs)), np.zeros(n_envs, np.int64)
    vector.reset(seed=1)

    def scanned(carry, _):
        keys, states, _, _, reward, *_ = vector._step(*carry, actions)
        return (keys, states), reward

    scan = jax.jit(lambda carry: jax.lax.scan(scanned, carry, length=n_steps))

    def step_vector():
        return [vector.step(actions)[1] for _ in range(n_steps)]

    with SimpleEnvManager(make, n_envs=n_envs) as manager:
        manager.reset(seed=1)
        batch = manager.recv()

        def step_manager():
            for _ in range(n_steps):
                manager.send(actions, batch.env_ids)
                manager.recv()

        ways = {"scan": lambda: scan((vector._keys, vector._states)), "vector": step_vector, "manager": step_manager}
        for name, run in ways.items():
            times = []
            for _ in range(6):
                began = time.perf_counter()
                jax.block_until_ready(run())
                times.append(time.perf_counter() - began)
            print(f"{n_envs:5} environments, {name:8} {min(times) / n_steps * 1e6:6.0f} µs a step")


if __name__ == "__main__":
    for n_envs in (64, 4096):
        measure(n_envs)
