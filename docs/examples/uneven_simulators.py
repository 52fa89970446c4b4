"""Eight simulators as one meets them: steps take unequal time, one simulator is slow, one crashes every few seconds.

    envmanager run uneven_simulators.toml                 # acts on whichever simulators are ready
    envmanager run uneven_simulators.toml --wait all      # waits for all of them, as other libraries do

`make run` runs the first.
"""

import ctypes
import time

import gymnasium
import numpy as np

CRASHES, SLOW = 2, 5
"""The numbers of the two simulators that are not like the others."""
EPISODE = 200
CRASHES_AFTER = 300
"""Steps of the whole process, not of an episode: repeated in a new process, the episode gets past its crash."""


class Simulator(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, EPISODE, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, context):
        self.env_id = context.env_id  # 0 to 7
        self.n_steps = 0
        self.n_lived = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return self._obs(), {}

    def step(self, action):
        self.n_steps += 1
        self.n_lived += 1
        if self.env_id == CRASHES and self.n_lived == CRASHES_AFTER:
            ctypes.string_at(0)  # reads address 0, as a bug in C or C++ code would: SIGSEGV ends the process
        time.sleep(0.1 if self.env_id == SLOW else self.np_random.exponential(0.004))
        return self._obs(), float(action), False, self.n_steps == EPISODE, {}

    def _obs(self):
        return np.array([self.n_steps], np.float32)
