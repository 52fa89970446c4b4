"""Networks for any observation, distributions for any action."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import ArraySpec, BehaviorSpec, SimpleEnvManager, UsageError
from envmanager.data.casting import check_batch
from envmanager.data.specs import zeros
from envmanager.training.algorithms.actions import ActionHeads
from envmanager.training.algorithms.dqn import DQN, DQNOptions
from envmanager.training.algorithms.networks import (
    CONVOLUTIONS,
    SMALLEST_IMAGE,
    Convolutions,
    Encoder,
    Flat,
    OneHot,
    Scale,
)
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.algorithms.sac import SAC
from envmanager.training.controller import TrainerController

ACTIONS: dict[str, Any] = {
    "discrete": ArraySpec((), np.int64, 0, 4),
    "discrete from 3": ArraySpec((), np.int64, 3, 5),
    "multi-discrete": ArraySpec((3,), np.int64, 0, np.array([1, 2, 4])),
    "multi-binary": ArraySpec((4,), np.bool_),
    "continuous": ArraySpec((2,), np.float32, -2.0, 2.0),
    "continuous of two axes": ArraySpec((2, 3), np.float64, 0.0, 1.0),
    "unbounded": ArraySpec((2,), np.float32),
    "dict": {"move": ArraySpec((2,), np.float32, -1.0, 1.0), "fire": ArraySpec((), np.int64, 0, 1)},
}
OBSERVATIONS: dict[str, Any] = {
    "vector": ArraySpec((5,), np.float32),
    "image": ArraySpec((4, 84, 84), np.uint8, 0, 255),
    "image with channels last": ArraySpec((64, 48, 3), np.uint8, 0, 255),
    "number": ArraySpec((), np.int64, 0, 15),
    "several numbers": ArraySpec((3,), np.int64, 0, 4),
    "dict": {"camera": ArraySpec((36, 36, 3), np.uint8, 0, 255), "joints": ArraySpec((7,), np.float64)},
    "board": ArraySpec((3, 3), np.int8, -1, 1),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_every_kind_of_action_is_drawn_within_its_spec(name: str) -> None:
    spec = ACTIONS[name]
    heads = ActionHeads(spec)
    raws, log_prob = heads.sample(3.0 * torch.randn(50, heads.n_inputs))
    action = heads.to_environment({key: raw.numpy() for key, raw in raws.items()})
    check_batch(spec, action, 50, "action")
    assert log_prob.shape == (50,)


@pytest.mark.parametrize("name", ACTIONS)
def test_what_was_drawn_has_the_log_probability_that_it_is_said_to_have(name: str) -> None:
    heads = ActionHeads(ACTIONS[name])
    inputs = torch.randn(20, heads.n_inputs)
    raws, log_prob = heads.sample(inputs)
    again, entropy = heads.evaluate(inputs, raws)
    torch.testing.assert_close(again, log_prob)
    assert entropy.shape == (20,)


def test_several_numbers_have_the_product_of_their_probabilities() -> None:
    heads = ActionHeads(ACTIONS["multi-discrete"])
    inputs = torch.zeros(1, heads.n_inputs)
    raw = torch.tensor([[1, 2, 3]])
    log_prob, entropy = heads.evaluate(inputs, {"raw0": raw})
    assert log_prob.item() == pytest.approx(-np.log(2 * 3 * 5))
    assert entropy.item() == pytest.approx(np.log(2 * 3 * 5))


def test_the_likeliest_action_is_the_one_of_the_highest_probability() -> None:
    heads = ActionHeads(ACTIONS["discrete from 3"])
    raws = heads.likeliest(torch.tensor([[0.0, 5.0, 1.0], [9.0, 0.0, 0.0]]))
    assert heads.to_environment({"raw0": raws["raw0"].numpy()}).tolist() == [4, 3]


def test_continuous_actions_fill_their_bounds_and_are_cut_there() -> None:
    heads = ActionHeads(ArraySpec((3,), np.float32, -2.0, 2.0))
    assert heads.to_environment({"raw0": np.array([[-1.0, 0.5, 7.0]], np.float32)}).tolist() == [[-2.0, 1.0, 2.0]]


@pytest.mark.parametrize("spec", [ArraySpec((), np.int64), ArraySpec((), object)], ids=str)
def test_actions_that_cannot_be_learned_are_refused(spec: ArraySpec) -> None:
    with pytest.raises(UsageError, match="cannot be learned"):
        ActionHeads(spec)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_every_kind_of_observation_becomes_features(name: str) -> None:
    encoder = Encoder(OBSERVATIONS[name])
    obs = encoder.tensors(zeros(OBSERVATIONS[name], 3), torch.device("cpu"))
    assert encoder(obs).shape == (3, encoder.n_features)


@pytest.mark.parametrize(
    ("name", "part"),
    [("image", Convolutions), ("image with channels last", Convolutions), ("number", OneHot), ("board", Flat)],
)
def test_each_leaf_is_encoded_in_the_way_that_suits_it(name: str, part: type) -> None:
    (made,) = Encoder(OBSERVATIONS[name]).parts
    assert type(made) is part


def test_whole_numbers_become_one_hot_from_their_lowest_value() -> None:
    encoder = Encoder(ArraySpec((2,), np.int64, 5, 7))
    assert encoder([torch.tensor([[5, 7]])]).tolist() == [[1, 0, 0, 0, 0, 1]]


def test_channels_last_and_first_are_the_same_image() -> None:
    first, last = Convolutions(ArraySpec((3, 40, 44), np.uint8)), Convolutions(ArraySpec((40, 44, 3), np.uint8))
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (1, 3, 40, 44), dtype=torch.uint8)
    torch.testing.assert_close(first(image), last(image.permute(0, 2, 3, 1)))


@pytest.mark.parametrize("convolutions", CONVOLUTIONS)
def test_every_kind_of_convolutions_takes_the_smallest_image(convolutions: str) -> None:
    spec = ArraySpec((3, SMALLEST_IMAGE, SMALLEST_IMAGE), np.uint8)
    encoder = Encoder(spec, convolutions=convolutions)
    assert encoder(encoder.tensors(zeros(spec, 2), torch.device("cpu"))).shape == (2, encoder.n_features)


def test_convolutions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="'nature' or 'small', not 'large'"):
        DQNOptions(convolutions="large")


def test_the_scale_is_that_of_everything_seen() -> None:
    values = torch.randn(100, 3) * torch.tensor([1.0, 5.0, 0.1]) + torch.tensor([0.0, 3.0, -1.0])
    scale = Scale(3)
    for part in values.split(13):
        scale.update(part)
    torch.testing.assert_close(scale.mean, values.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scale.variance, values.var(0, correction=0), rtol=1e-3, atol=1e-3)
    assert scale(values).std(0).tolist() == pytest.approx([1, 1, 1], rel=0.02)


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("action", ["multi-discrete", "dict"])
def test_ppo_acts_on_any_observation_and_any_action(observation: str, action: str) -> None:
    from envmanager import AgentSteps

    spec = BehaviorSpec(OBSERVATIONS[observation], ACTIONS[action])
    trainer = PPO("default", spec, PPOOptions(hidden=()), device="cpu")
    flags = np.zeros(2, np.bool_)
    steps = AgentSteps(np.arange(2), zeros(spec.observation, 2), np.zeros(2, np.float32), flags, flags)
    for policy in (trainer.policy, trainer.greedy_policy()):
        check_batch(spec.action, policy.get_action(steps).action, 2, "action")


@pytest.mark.parametrize("name", ["continuous", "multi-discrete", "dict"])
def test_dqn_refuses_actions_that_are_not_one_choice(name: str) -> None:
    with pytest.raises(UsageError, match="use PPO"):
        DQN("default", BehaviorSpec(OBSERVATIONS["vector"], ACTIONS[name]))


def test_observations_that_are_no_arrays_are_refused() -> None:
    with pytest.raises(UsageError, match="texts and other objects"):
        PPO("default", BehaviorSpec(ArraySpec((), object), ACTIONS["discrete"]), device="cpu")


def test_single_floats_are_normalized_too() -> None:
    encoder = Encoder({"a": ArraySpec(), "b": ArraySpec((2,))}, convolutions="nature", normalize=True)
    obs = encoder.tensors(
        {"a": np.array([1.0, 3.0], np.float32), "b": np.zeros((2, 2), np.float32)}, torch.device("cpu")
    )
    encoder.learn_scale(obs)
    assert encoder(obs)[:, 0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize(("cls", "action"), [(DQN, "discrete"), (SAC, "continuous")])
def test_dqn_and_sac_begin_with_the_weights_and_biases_that_pytorch_draws(cls: Any, action: str) -> None:
    trainer = cls("default", BehaviorSpec(OBSERVATIONS["vector"], ACTIONS[action]), device="cpu")
    layers = [layer for layer in trainer.model.modules() if isinstance(layer, torch.nn.Linear)]
    assert len(layers) >= 3
    for layer in layers:
        bound = layer.in_features**-0.5
        assert 0.8 * bound < layer.weight.abs().max() <= bound
        assert 0.0 < layer.bias.abs().max() <= bound


def test_ppo_begins_with_orthogonal_weights() -> None:
    trainer = PPO("default", BehaviorSpec(OBSERVATIONS["vector"], ACTIONS["discrete"]), device="cpu")
    weights = [layer.weight.detach() for layer in trainer.model.actor if isinstance(layer, torch.nn.Linear)]
    gains = [torch.linalg.svdvals(weight) for weight in weights]
    for gain, wanted in zip(gains, (2**0.5, 2**0.5, PPOOptions().policy_gain), strict=True):
        torch.testing.assert_close(gain, torch.full_like(gain, wanted))


@pytest.mark.parametrize(("log_std_init", "spread"), [(0.0, 3.0), (-math.log(3.0), 1.0)])
def test_ppo_begins_with_the_spread_of_continuous_actions_that_is_asked_for(log_std_init: float, spread: float) -> None:
    torch.manual_seed(0)
    spec = BehaviorSpec(OBSERVATIONS["vector"], ArraySpec((500,), np.float32, -3.0, 3.0))
    model = PPO("default", spec, PPOOptions(log_std_init=log_std_init), device="cpu").model
    raws, _ = model.heads.sample(torch.zeros(100, model.heads.n_inputs))
    in_units_of_the_environment = 3.0 * raws["raw0"]  # before they are cut at the bounds
    assert in_units_of_the_environment.std().item() == pytest.approx(spread, rel=0.02)


def test_a_large_adam_epsilon_makes_the_steps_of_dqn_small() -> None:
    def moved_by(adam_epsilon: float) -> float:
        """Return the largest change of a weight in the first update."""
        options = DQNOptions(learning_starts=4, batch=4, adam_epsilon=adam_epsilon)
        with SimpleEnvManager("CartPole-v1", 1, seed=0) as manager:
            trainer = DQN("default", manager.behavior_specs["default"], options, device="cpu")
            before = [weight.detach().clone() for weight in trainer.model.parameters()]
            TrainerController(manager, {"default": trainer}).train(4)
        assert trainer.version == 1
        pairs = zip(before, trainer.model.parameters(), strict=True)
        return max(float((after.detach() - weight).abs().max()) for weight, after in pairs)

    assert moved_by(1e-8) > 0.9 * DQNOptions().learning_rate
    assert moved_by(1e3) < 0.01 * DQNOptions().learning_rate
