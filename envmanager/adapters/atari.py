"""Atari games with the preprocessing of Mnih et al. 2015, computed directly from the emulator's frames.

::

    Atari("Pong")          4 frames per action ──▶ maximum of the last two, gray ──▶ 84×84 ──▶ a stack of 4

Gymnasium's ``AtariPreprocessing`` and ``FrameStackObservation`` give the same observations, byte for byte. They are
slower, because they make the emulator draw all frames in color. Here the emulator draws two of four frames, in gray.

The rule: with equal seeds and actions, ``Atari`` and the two wrappers give the same episodes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from envmanager.environment import EnvContext
from envmanager.importing import needed_by

with needed_by("Atari", extra="atari"):
    import ale_py
    import cv2
    import gymnasium

_NOOP = 0


def atari_vector(
    game: str,
    context: EnvContext,
    *,
    frame_skip: int = 4,
    size: int = 84,
    stack: int = 4,
    noop_max: int = 30,
    clip_rewards: bool = False,
    terminal_on_life_loss: bool = False,
) -> Any:
    """Return the vectorised form of ``Atari``, an AtariVectorEnv of ale_py with all environments of a worker.

    With ``noop_max=0``, equal actions give the same frames, rewards and episode ends as ``Atari``. Otherwise the number
    of no-ops may differ, even with equal seeds. At a reset, older frames are zeros; in ``Atari`` they equal the newest.
    """
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        gymnasium.spec(f"ALE/{game}-v5").kwargs["game"],
        context.n_envs,
        frameskip=frame_skip,
        img_height=size,
        img_width=size,
        stack_num=stack,
        noop_max=noop_max,
        reward_clipping=clip_rewards,
        episodic_life=terminal_on_life_loss,
        use_fire_reset=False,
    )


class Atari(gymnasium.Env):  # type: ignore[misc]
    """An Atari game as a Gymnasium environment. ``game`` is the game's name, such as ``"Pong"``.

    Observations are uint8[stack, size, size] with the newest frame last. Actions index the game's minimal action set.
    An action lasts ``frame_skip`` frames. A reset plays 1 to ``noop_max`` no-op frames, or none with ``noop_max=0``.
    ``clip_rewards`` replaces rewards with their signs. ``terminal_on_life_loss`` ends the episode when a life is lost.
    """

    def __init__(
        self,
        game: str,
        *,
        frame_skip: int = 4,
        size: int = 84,
        stack: int = 4,
        noop_max: int = 30,
        clip_rewards: bool = False,
        terminal_on_life_loss: bool = False,
    ) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        cv2.setNumThreads(1)
        made = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0, obs_type="grayscale")
        self._env: Any = made.unwrapped
        self._ale = self._env.ale
        self._actions = list(self._env._action_set)
        self._frame_skip, self._size, self._noop_max = frame_skip, size, noop_max
        self._clips, self._ends_with_life = clip_rewards, terminal_on_life_loss
        screen = self._ale.getScreenDims()
        self._last, self._before_last = np.zeros(screen, np.uint8), np.zeros(screen, np.uint8)
        self._stack = np.zeros((stack, size, size), np.uint8)
        self._lives = 0
        self.observation_space = gymnasium.spaces.Box(0, 255, self._stack.shape, np.uint8)
        self.action_space = self._env.action_space
        self.metadata = self._env.metadata

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        _, info = self._env.reset(seed=seed, options=options)
        n_noops = self._env.np_random.integers(1, self._noop_max + 1) if self._noop_max else 0
        for _ in range(n_noops):
            self._ale.act(_NOOP)
            if self._ale.game_over(with_truncation=True):
                _, info = self._env.reset(seed=seed, options=options)
        self._lives = self._ale.lives()
        self._ale.getScreenGrayscale(self._last)
        self._before_last.fill(0)
        self._stack[:] = self._resized()
        return self._stack.copy(), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        act, ale = self._actions[int(action)], self._ale
        reward, terminated, truncated = 0.0, False, False
        for frame in range(self._frame_skip):
            reward += ale.act(act)
            terminated, truncated = ale.game_over(with_truncation=False), ale.game_truncated()
            if self._ends_with_life:
                lives = ale.lives()
                terminated = terminated or lives < self._lives
                self._lives = lives
            if terminated or truncated:
                break
            if frame == self._frame_skip - 2:
                ale.getScreenGrayscale(self._before_last)
            elif frame == self._frame_skip - 1:
                ale.getScreenGrayscale(self._last)
        if self._frame_skip > 1:
            np.maximum(self._last, self._before_last, out=self._last)
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = self._resized()
        info = {"lives": ale.lives(), "episode_frame_number": ale.getEpisodeFrameNumber()}
        return self._stack.copy(), float(np.sign(reward)) if self._clips else reward, terminated, truncated, info

    def _resized(self) -> np.ndarray:
        return np.asarray(cv2.resize(self._last, (self._size, self._size), interpolation=cv2.INTER_AREA))

    def render(self) -> Any:
        return self._ale.getScreenRGB()

    def close(self) -> None:
        self._env.close()


def __getattr__(name: str) -> Any:
    """Return a factory for a game, so that configs can say ``env: envmanager.adapters.atari:Pong``.

    ``PongVector`` makes the vector of all environments of a worker.
    """
    if name[:1].isupper():
        game = name.removesuffix("Vector")
        return partial(Atari if game == name else atari_vector, game)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
