"""An environment each of whose steps has a number of its own, and the check that rollouts hold each step once."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from envmanager import Batch, EnvContext, Rollout

ACTIONS, STEPS, EPISODES, GENERATIONS = 4, 16, 64, 64


class Ledger(gymnasium.Env):  # type: ignore[misc]
    """The reward of a step is its number, from 1 on; observations say what led to them. Every other episode is cut."""

    observation_space = gymnasium.spaces.Dict(
        {
            "where": gymnasium.spaces.Box(0, 2**24, (4,), np.float32),  # env, generation, episode, step
            "last": gymnasium.spaces.Box(-1, ACTIONS - 1, (), np.int64),  # action
        }
    )
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def __init__(self, context: EnvContext) -> None:
        self._env_id, self._generation, self._episode = context.env_id, context.generation, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode += 1
        self._step, self._last = 0, -1
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._step, self._last = self._step + 1, int(action)
        is_last = self._step == length_of(self._env_id, self._episode)
        reward = number_of(self._env_id, self._generation, self._episode, self._step)
        return self._obs(), reward, is_last and self._episode % 2 == 0, is_last and self._episode % 2 == 1, {}

    def _obs(self) -> Any:
        where = np.array([self._env_id, self._generation, self._episode, self._step], np.float32)
        return {"where": where, "last": np.int64(self._last)}


def length_of(env_id: Any, episode: Any) -> Any:
    """The number of steps of an episode that nothing cuts."""
    return 3 + (env_id * 5 + episode * 3) % 8


def number_of(env_id: Any, generation: Any, episode: Any, step: Any) -> Any:
    """The number of the step that leads to an observation, as an exact float32."""
    return ((env_id * GENERATIONS + generation) * EPISODES + episode) * STEPS + step


def steps_of(batch: Batch) -> list[float]:
    """The numbers of the steps in a batch, which the rollouts must hold."""
    return [reward for reward in batch.reward.tolist() if reward]


def numbers_in(rollout: Rollout) -> list[float]:
    """Check that no row of a rollout is wrong. Return the numbers of its steps."""
    before, after = rollout.obs["where"], rollout.next_obs["where"]
    env_id, generation, episode, step = np.moveaxis(after, -1, 0)
    assert (rollout.env_id == env_id).all()
    assert (rollout.reward == number_of(env_id, generation, episode, step)).all()
    assert (before[..., :3] == after[..., :3]).all()
    assert (before[..., 3] + 1 == step).all()
    assert (rollout.next_obs["last"] == rollout.action).all()
    assert (rollout.obs["last"] == np.where(before[..., 3] == 0, -1, rollout.obs["last"])).all()
    np.testing.assert_array_equal(rollout.outputs["of"], before)
    is_last = step == length_of(env_id, episode)
    assert (rollout.terminated == (is_last & (episode % 2 == 0))).all()
    assert (rollout.truncated == (is_last & (episode % 2 == 1))).all()
    ended = rollout.ended[:-1]
    assert (rollout.ended >= (is_last | rollout.lost)).all()
    assert not (rollout.lost & is_last).any()
    np.testing.assert_array_equal(after[:-1][~ended], before[1:][~ended])
    assert not (after[:-1] == before[1:])[ended].all(-1).any()
    numbers: list[float] = rollout.reward.ravel().tolist()
    return numbers
