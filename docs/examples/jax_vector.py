"""Functional environments of JAX as a vector.

``reset(key)`` returns the state and the observation of one environment. ``step(key, state, action)`` returns these, the
reward, ``terminated`` and ``truncated``.
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from envmanager import EnvContext


class FunctionalVector(gymnasium.vector.VectorEnv):
    """Environments of one pair of functions, each of which restarts in the step in which its episode ends."""

    def __init__(self, reset, step, observation_space, action_space, num_envs):
        def step_one(key, state, action):
            key, of_step, of_reset = jax.random.split(key, 3)
            state, last, reward, terminated, truncated = step(of_step, state, action)
            ended = terminated | truncated
            now = jax.tree.map(lambda new, old: jnp.where(ended, new, old), reset(of_reset), (state, last))
            return key, *now, last, reward, terminated, truncated

        self._reset, self._step = jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step_one))
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self.num_envs, self._seed = num_envs, np.random.SeedSequence().generate_state(1)[0]

    def reset(self, *, seed=None, options=None):
        self._seed = self._seed + 1 if seed is None else seed
        keys = jax.random.split(jax.random.key(self._seed), (2, self.num_envs))
        self._keys, (self._states, obs) = keys[0], self._reset(keys[1])
        return obs, {}

    def step(self, actions):
        self._keys, self._states, obs, last, *ends = self._step(self._keys, self._states, actions)
        return obs, *ends, {"final_obs": last}


def reset(key):
    state = jax.random.uniform(key, (2,), minval=-0.05, maxval=0.05)  # place and velocity
    return state, state


def step(key, state, action):
    """Push a point to the left or the right, until it is beyond 1."""
    velocity = state[1] + 0.01 * (2 * action - 1) + 0.01 * jax.random.normal(key)
    state = jnp.stack([state[0] + velocity, velocity])
    return state, state, 1.0, abs(state[0]) > 1, False


def make(context: EnvContext):
    spaces = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32), gymnasium.spaces.Discrete(2)
    return FunctionalVector(reset, step, *spaces, context.n_envs)
