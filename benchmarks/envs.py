"""Environments of the workloads, the same for this library and for every peer.

``make_env(name, env_id)`` makes an environment. It is pickled by name, so that any library can call it anywhere.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np

EPISODE_STEPS = 200


class Trivial(gymnasium.Env):  # type: ignore[misc]
    """An environment that returns the same observation for 200 steps, then ends the episode."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, obs: Any) -> None:
        high = np.iinfo(obs.dtype).max if obs.dtype.kind == "u" else 1.0
        self.observation_space = gymnasium.spaces.Box(0, high, obs.shape, obs.dtype.type)
        self._obs = obs
        self._n_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._n_steps = 0
        return self._obs, {}

    def step(self, action: Any) -> Any:
        self._n_steps += 1
        return self._obs, 1.0, self._n_steps >= EPISODE_STEPS, False, {}


class Sleeping(Trivial):
    """A Trivial environment whose steps sleep for ``sleep_s()``."""

    def __init__(self, sleep_s: Callable[[], float]) -> None:
        super().__init__(np.zeros(4, np.float32))
        self._sleep_s = sleep_s

    def step(self, action: Any) -> Any:
        time.sleep(self._sleep_s())
        return super().step(action)


def make_env(name: str, env_id: int) -> Any:
    """Make environment ``env_id`` of the workloads whose ``env`` is ``name``."""
    return MAKERS[name](env_id)


def _noop(_: int) -> Any:
    return Trivial(np.zeros(4, np.float32))


def _bigobs(env_id: int) -> Any:
    # Not np.zeros: its pages would all map to one page of memory until written, and reading them would be free.
    return Trivial(np.random.default_rng(env_id).integers(0, 256, 512 * 1024, np.uint8))


def _cartpole(_: int) -> Any:
    return gymnasium.make("CartPole-v1")


def _pong(_: int) -> Any:
    import ale_py  # registers its environments
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return FrameStackObservation(AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84), 4)


def _straggler(env_id: int) -> Any:
    return Sleeping(partial(next, _one_in_ten(random.Random(env_id))))


def _one_in_ten(chance: random.Random) -> Iterator[float]:
    """Yield the seconds to sleep: in every ten steps 10 ms in a random one, else 1 ms.

    If each time were drawn independently, the mean over a second, and with it the limit, would vary by a tenth.
    """
    while True:
        slow = chance.randrange(10)
        yield from (0.01 if step == slow else 0.001 for step in range(10))


def _badworker(env_id: int) -> Any:
    return Sleeping(partial(float, 0.05 if env_id == 0 else 0.001))


def _waiting(_: int) -> Any:
    return Sleeping(partial(float, 0.05))


MAKERS: dict[str, Callable[[int], Any]] = {
    "noop": _noop,
    "cartpole": _cartpole,
    "pong": _pong,
    "bigobs": _bigobs,
    "straggler": _straggler,
    "badworker": _badworker,
    "waiting": _waiting,
}
