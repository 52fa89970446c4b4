"""Trainers see all by the mean and spread of what came, keep it raw, and save what they know."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import AgentSteps, SimpleEnvManager, UsageError
from envmanager.data.specs import BehaviorSpec
from envmanager.training.algorithms.dqn import DQN, DQNOptions
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.algorithms.sac import SAC, SACOptions
from envmanager.training.controller import TrainerController
from envmanager.training.runs import checkpoints
from envmanager.training.runs.checkpoints import Checkpoint, TrainingState

SMALL = {"learning_starts": 50, "capacity": 2000, "hidden": (8,), "batch": 16}
KINDS: dict[str, Any] = {
    "ppo": ("CartPole-v1", PPO, PPOOptions, {"rollout": 64, "epochs": 2, "minibatch": 32}),
    "dqn": ("CartPole-v1", DQN, DQNOptions, SMALL),
    "sac": ("Pendulum-v1", SAC, SACOptions, {**SMALL, "train_every": 8}),
}
ALL = pytest.mark.parametrize("kind", KINDS)
REPLAYED = pytest.mark.parametrize("kind", ["dqn", "sac"])


def spec_of(kind: str) -> BehaviorSpec:
    with SimpleEnvManager(KINDS[kind][0]) as manager:
        return manager.behavior_specs["default"]


def make(kind: str, **options: Any) -> Any:
    _, cls, options_cls, small = KINDS[kind]
    return cls("default", spec_of(kind), options_cls(**{**small, **options}), device="cpu")


def trained(kind: str, n_steps: int = 300, **options: Any) -> Any:
    """A trainer after so many steps of two environments."""
    trainer = make(kind, **options)
    with SimpleEnvManager(KINDS[kind][0], 2, seed=0) as manager:
        TrainerController(manager, {"default": trainer}).train(n_steps)
    assert trainer.version > 0
    return trainer


def some_steps(trainer: Any, n: int = 20) -> AgentSteps:
    n_numbers = trainer.model.actor.encoder.n_features if isinstance(trainer, SAC) else 4
    obs = np.random.default_rng(0).normal(size=(n, n_numbers)).astype(np.float32)
    flags = np.zeros(n, np.bool_)
    return AgentSteps(np.arange(n), obs, np.zeros(n, np.float32), flags, flags)


def scale_of(trainer: Any) -> Any:
    encoder = trainer.model.actor.encoder if isinstance(trainer, SAC) else trainer.model.encoder
    return encoder.parts[0].scale


@REPLAYED
def test_what_is_kept_is_raw_and_the_scale_is_that_of_every_observation_once(kind: str) -> None:
    trainer = trained(kind, normalize_observations=True)
    store = trainer.replay.store
    seen = store.obs[: trainer._n_in_scale]

    assert 0 <= store.n_rows - trainer._n_in_scale <= 16
    np.testing.assert_allclose(scale_of(trainer).mean.numpy(), seen.mean(0), atol=1e-4)
    np.testing.assert_allclose(scale_of(trainer).variance.numpy(), seen.var(0), rtol=1e-3)


def test_rows_that_were_overwritten_before_they_were_seen_do_no_harm() -> None:
    trainer = trained("dqn", normalize_observations=True, capacity=60, train_every=200)
    assert trainer._n_in_scale <= trainer.replay.store.n_rows
    assert torch.isfinite(scale_of(trainer).variance).all()


@REPLAYED
def test_all_networks_have_one_scale(kind: str) -> None:
    trainer = trained(kind, normalize_observations=True)
    encoders = [trainer.encoder, trainer.target.encoder]
    if kind == "sac":
        encoders.append(trainer.model.critics.encoder)
    assert len({id(encoder.parts[0].scale) for encoder in encoders}) == 1
    assert scale_of(trainer).count > 1


@ALL
def test_the_greedy_policy_sees_observations_normalized(kind: str) -> None:
    trainer = trained(kind, normalize_observations=True)
    plain = make(kind)
    weights = {name: tensor for name, tensor in trainer.model.state_dict().items() if ".scale." not in name}
    plain.model.load_state_dict(weights)
    steps = some_steps(trainer)
    scale = scale_of(trainer)
    steps.obs *= 50.0  # so that it matters
    by_hand = np.clip((steps.obs - scale.mean.numpy()) / np.sqrt(scale.variance.numpy() + 1e-8), -10, 10)

    expected = plain.greedy_policy().get_action(attrs.evolve(steps, obs=by_hand))
    action = trainer.greedy_policy().get_action(steps).action
    np.testing.assert_allclose(action, expected.action, rtol=1e-4, atol=1e-5)


@REPLAYED
def test_rewards_are_kept_raw_and_drawn_divided_by_the_spread_of_returns(kind: str) -> None:
    trainer = trained(kind, normalize_rewards=True, n_step=1)
    store = trainer.replay.store
    batch = trainer._draw(0.0)
    raw = store.reward[store.places(batch.rows)]

    assert trainer._return_spread.spread.count > 290
    assert trainer._return_spread.factor != 1.0
    np.testing.assert_allclose(batch.reward.numpy(), raw * trainer._return_spread.factor, rtol=1e-5)


def test_several_steps_are_divided_and_cut_one_by_one() -> None:
    trainer = trained("dqn", normalize_rewards=True, n_step=3, gamma=1.0, reward_clip=0.01)
    reward = trainer._draw(0.0).reward
    assert trainer._return_spread.factor > 0.01
    assert reward.max().item() == pytest.approx(0.03)


def test_the_advantages_of_ppo_are_of_normalized_rewards() -> None:
    """Without a lambda, and with hardly any gamma, an advantage is the reward less the value."""
    trainer = trained("ppo", normalize_rewards=True, gae_lambda=0.0, gamma=1e-9, reward_scale=2.0)
    with SimpleEnvManager("CartPole-v1", 2, seed=1) as manager:
        manager.set_policy("default", trainer.policy)
        for info in manager.reset():
            trainer.add(info)
        for _ in range(10):
            for info in manager.step():
                trainer.add(info)
    rollout = trainer._take_rollout()
    spread = trainer._return_spread.factor
    np.testing.assert_allclose((rollout.advantage + rollout.value).numpy(), 2.0 * min(spread, 10.0), rtol=1e-3)


def test_the_ratio_of_ppo_is_one_before_the_first_gradient_step_of_every_update() -> None:
    trainer = make("ppo", normalize_observations=True)
    learned: list[int] = []
    step = trainer._step

    def note(batch: Any) -> Any:
        if trainer.version not in learned:
            learned.append(trainer.version)
            log_prob, _ = trainer.model.heads.evaluate(trainer.model.inputs(batch.obs), batch.raws)
            torch.testing.assert_close(log_prob, batch.log_prob, rtol=0, atol=1e-6)
        return step(batch)

    with SimpleEnvManager("CartPole-v1", 2, seed=1) as manager, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_step", note)
        TrainerController(manager, {"default": trainer}).train(64 * 4)
    assert learned == [0, 1, 2, 3]


@ALL
def test_all_that_is_known_is_saved_and_a_restored_trainer_acts_alike(kind: str, tmp_path: Any) -> None:
    trainer = trained(kind, normalize_observations=True, normalize_rewards=True)
    checkpoints.save(tmp_path, checkpoint_of(*trainer.state()))
    again = make(kind, normalize_observations=True, normalize_rewards=True)
    checkpoints.restore(again, spec_of(kind), checkpoints.load_latest(tmp_path), tmp_path, "")
    steps = some_steps(trainer)

    np.testing.assert_array_equal(
        again.greedy_policy().get_action(steps).action, trainer.greedy_policy().get_action(steps).action
    )
    assert again._return_spread.factor == trainer._return_spread.factor
    assert again.state()[1] == trainer.state()[1]


def checkpoint_of(arrays: Any, facts: Any) -> Checkpoint:
    return Checkpoint(training=TrainingState(n_steps=1), trainers={"default": (arrays, facts)})


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
@pytest.mark.parametrize("option", ["normalize_observations", "normalize_rewards"])
def test_one_that_was_not_normalized_is_refused_by_a_trainer_that_does(kind: str, option: str, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=f"does not fit.*it was written with {option}=false"):
        checkpoints.restore(
            make(kind, **{option: True}), spec_of(kind), checkpoint_of(*trained(kind).state()), tmp_path, "Resume."
        )


def test_one_that_was_normalized_is_refused_by_a_trainer_that_does_not(tmp_path: Any) -> None:
    checkpoint = checkpoint_of(*trained("dqn", normalize_observations=True).state())
    with pytest.raises(UsageError, match="it was written with normalize_observations=true"):
        checkpoints.restore(make("dqn"), spec_of("dqn"), checkpoint, tmp_path, "")
