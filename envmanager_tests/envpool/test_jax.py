"""A vector environment written in JAX: its arrays are handed on in this process, and are NumPy's elsewhere."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from envmanager import EnvContext, SimpleEnvManager, SubprocessEnvManager
from envmanager.data.trees import concat_rows, copy_tree, take_rows, with_rows

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-envpool")
jnp = jax.numpy

N, LENGTH = 4, 5


@jax.jit
def advance(obs: Any, actions: Any) -> tuple[Any, Any, Any]:
    """Step rows of ``[row, steps of the episode, last action]``; return final observations, next ones and ends."""
    last = obs.at[:, 1].add(1).at[:, 2].set(actions)
    ended = last[:, 1] >= LENGTH
    return last, jnp.where(ended[:, None], last * jnp.array([1.0, 0.0, 0.0]), last), ended


class JaxVector(gymnasium.vector.VectorEnv):  # type: ignore[misc]
    def __init__(self, n: int, mode: AutoresetMode) -> None:
        self.num_envs = n
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (), np.float32)
        self.metadata = {"autoreset_mode": mode}
        self.obs = jnp.zeros((n, 3))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = jnp.asarray((options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_)))
        first = jnp.zeros((self.num_envs, 3)).at[:, 0].set(jnp.arange(self.num_envs))
        self.obs = jnp.where(mask[:, None], first, self.obs)
        return self.obs, {}

    def step(self, actions: Any) -> Any:
        last, following, ended = advance(self.obs, jnp.asarray(actions))
        is_same_step = self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        self.obs = following if is_same_step else last
        infos = {"final_obs": last} if is_same_step and ended.any() else {}
        return self.obs, last[:, 1], ended, jnp.zeros(self.num_envs, bool), infos


def make(context: EnvContext) -> JaxVector:
    return JaxVector(context.n_envs, AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_arrays_of_jax_are_handed_on_with_the_ends_of_episodes(mode: AutoresetMode) -> None:
    with SimpleEnvManager(lambda: JaxVector(N, mode), N) as manager:
        manager.reset()
        batch = manager.recv()
        age, n_ends = np.zeros(N), 0
        for step in range(24):
            manager.send(jnp.full(N, 0.25 * (step % 3)), batch.env_ids)
            batch = manager.recv()
            assert isinstance(batch.obs, jax.Array)
            assert isinstance(batch.reward, np.ndarray)
            age = np.where(batch.terminated, 0, age + 1)
            assert batch.obs[:, :2].tolist() == [[k, age[k]] for k in range(N)]
            if batch.terminated.any():
                assert isinstance(batch.final_obs, jax.Array)
                assert batch.final_obs[:, :2].tolist() == [[k, LENGTH] for k in range(N)]
                n_ends += 1
        assert n_ends == 4


def test_worker_processes_send_arrays_of_numpy() -> None:
    with SubprocessEnvManager(make, 2 * N, n_workers=2, wait="all") as manager:
        manager.reset()
        batch = manager.recv()
        for _ in range(6):
            manager.send(jnp.full(2 * N, 0.5), batch.env_ids)
            batch = manager.recv()
        assert isinstance(batch.obs, np.ndarray)
        assert batch.obs[:, 1].tolist() == [1.0] * 2 * N


def test_the_functions_on_rows_keep_the_library() -> None:
    tree = (jnp.arange(6.0).reshape(3, 2), np.arange(3))
    changed = with_rows(tree, np.array([2, 0]), (jnp.zeros((2, 2)), np.array([7, 8])))
    assert changed[0].tolist() == [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0]]
    assert all(isinstance(each[0], jax.Array) for each in (changed, copy_tree(tree), take_rows(tree, slice(0))))
    assert concat_rows([tree, changed])[0].shape == (6, 2)
