"""PPO learns what Stable-Baselines3's PPO learns from the same weights, environment and random numbers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")
sb3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from envmanager import SimpleEnvManager
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.controller import TrainerController

ROLLOUT, MINIBATCH, EPOCHS, STEPS = 192, 32, 3, 192 * 3


class Drift(gymnasium.Env):  # type: ignore[misc]
    """A walk with numbers of very different sizes. Some episodes end at a border and some by a limit of time."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self) -> None:
        self._random = np.random.default_rng(3)
        self.n_terminated = self.n_truncated = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._at, self._n_steps = self._random.normal(size=2), 0
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._n_steps += 1
        self._at = self._at + 0.4 * action + self._random.normal(size=2) * 0.2
        terminated = bool(abs(self._at[0]) > 1.5)
        truncated = not terminated and self._n_steps >= 12
        self.n_terminated += terminated
        self.n_truncated += truncated
        return self._obs(), float(3.0 - self._at @ self._at), terminated, truncated, {}

    def _obs(self) -> np.ndarray:
        return np.array([10.0 * self._at[0] + 5.0, self._at[1], 0.01 * self._n_steps], np.float32)


class LateNormalize(VecNormalize):  # type: ignore[misc]
    """Stable-Baselines3's normalization, with scales that are learned after a rollout. Until then rewards are 0."""

    def __init__(self, envs: DummyVecEnv, gamma: float) -> None:
        super().__init__(envs, gamma=gamma)
        self.training = False
        self.seen: list[np.ndarray] = []
        self.rewards: list[np.ndarray] = []

    def step_wait(self) -> Any:
        before = self.old_obs
        obs, rewards, ended, infos = super().step_wait()
        self.seen.append(before)
        self.rewards.append(self.old_reward)
        return obs, 0 * rewards, ended, infos

    def normalize_reward(self, reward: np.ndarray) -> np.ndarray:
        if reward is self.old_reward:  # of one step
            self._update_reward(reward)
        return super().normalize_reward(reward)


class LatePPO(sb3.PPO):  # type: ignore[misc]
    """Stable-Baselines3's PPO, which learns the scales after a rollout. Everything else is its own."""

    @torch.no_grad()
    def train(self) -> None:
        envs, buffer = self.env, self.rollout_buffer
        buffer.rewards += envs.normalize_reward(np.array(envs.rewards))  # to the values of cut episodes
        last_values = self.policy.predict_values(torch.from_numpy(self._last_obs))
        buffer.compute_returns_and_advantage(last_values, self._last_episode_starts)
        seen = np.array(envs.seen)
        envs.obs_rms.update(seen[:, 0])
        buffer.observations[...] = envs.normalize_obs(seen)
        self._last_obs = envs.normalize_obs(envs.old_obs)
        obs, actions = (torch.from_numpy(array[:, 0]) for array in (buffer.observations, buffer.actions))
        buffer.log_probs[:, 0] = self.policy.evaluate_actions(obs, actions)[1].numpy()
        envs.seen.clear()
        envs.rewards.clear()
        with torch.enable_grad():
            super().train()


@pytest.mark.parametrize("normalizes", [False, True])
def test_an_update_ends_with_the_weights_of_stable_baselines3(
    normalizes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"learning_rate": 1e-3, "gamma": 0.97, "gae_lambda": 0.9}
    envs: Any = DummyVecEnv([Drift])
    env = envs.envs[0]
    if normalizes:
        envs = LateNormalize(envs, options["gamma"])
    model = (LatePPO if normalizes else sb3.PPO)(
        "MlpPolicy", envs, n_steps=ROLLOUT, batch_size=MINIBATCH, n_epochs=EPOCHS, ent_coef=0.01, seed=0, device="cpu",
        vf_coef=0.25,  # it does not halve the value loss
        **{**options, "learning_rate": lambda left: options["learning_rate"] * left},
    )  # fmt: skip
    with SimpleEnvManager(Drift) as manager:
        spec = manager.behavior_specs["default"]
        trainer = PPO(
            "default",
            spec,
            PPOOptions(
                rollout=ROLLOUT, minibatch=MINIBATCH, epochs=EPOCHS, entropy_coefficient=0.01, **options,
                normalize_observations=normalizes, normalize_rewards=normalizes,
            ),
            device="cpu",
        )  # fmt: skip
        with torch.no_grad():
            for own, theirs in pairs(trainer, model):
                own.copy_(theirs)
        torch.manual_seed(1)
        TrainerController(manager, {"default": trainer}).train(STEPS)

    # The order of the minibatches, and the standard deviation by which advantages are divided, are those of ours.
    orders = torch.Generator().manual_seed(0)
    monkeypatch.setattr(np.random, "permutation", lambda n: torch.randperm(n, generator=orders).numpy())
    std = torch.Tensor.std
    monkeypatch.setattr(torch.Tensor, "std", lambda tensor: std(tensor, correction=0))
    begun = [theirs.detach().clone() for _, theirs in pairs(trainer, model)]
    torch.manual_seed(1)
    model.learn(STEPS)

    assert trainer.version == 3
    assert min(env.n_terminated, env.n_truncated) > 20
    moved = [(theirs - before).abs().max() for (_, theirs), before in zip(pairs(trainer, model), begun, strict=True)]
    assert max(moved) > 0.01
    for own, theirs in pairs(trainer, model):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5)


def pairs(trainer: PPO, model: Any) -> list[tuple[Any, Any]]:
    """Return the parameters of both, in pairs."""
    ours, policy = trainer.model, model.policy
    layers = policy.mlp_extractor
    own = [*ours.actor.parameters(), *ours.critic.parameters(), *ours.heads.parameters()]
    actor, critic = (layers.policy_net, policy.action_net), (layers.value_net, policy.value_net)
    theirs = [parameter for part in (*actor, *critic) for parameter in part.parameters()]
    return list(zip(own, [*theirs, policy.log_std], strict=True))
