"""Soft actor-critic: its mathematics against NumPy, what it refuses, and that it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import AgentSteps, ArraySpec, BehaviorSpec, ConfigError, SimpleEnvManager, UsageError
from envmanager.data.casting import check_batch
from envmanager.data.trees import leaves
from envmanager.training.algorithms.actions import COLUMN, SquashedGaussian
from envmanager.training.algorithms.replay import Drawn
from envmanager.training.algorithms.sac import SAC, SACOptions
from envmanager.training.algorithms.trainers import known_kinds, make_trainer
from envmanager.training.controller import TrainerController
from envmanager.training.learner_process import LearnerProcess
from envmanager.training.runs import checkpoints
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

SEEN = ArraySpec((3,), np.float32)
BOX = ArraySpec((2,), np.float32, np.array([-2.0, 0.0]), np.array([2.0, 10.0]))
TREE = {"steer": ArraySpec((), np.float64, -1.0, 1.0), "pedals": (ArraySpec((2, 1), np.float32, 0.0, 5.0),)}
SMALL = {"kind": "sac", "capacity": 2000, "learning_starts": 64, "train_every": 16, "hidden": [16], "batch": 32}


def steps_of(n: int, obs: Any = None) -> AgentSteps:
    seen = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32) if obs is None else obs
    flags = np.zeros(n, np.bool_)
    return AgentSteps(np.arange(n), seen, np.zeros(n, np.float32), flags, flags)


# The distribution.


def log_density(mean: np.ndarray, log_std: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Of the tanh of a Gaussian, by its formula in double precision."""
    u, std = np.arctanh(action.astype(np.float64)), np.exp(log_std)
    gaussian = -0.5 * ((u - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    found: np.ndarray = (gaussian - np.log(1 - action.astype(np.float64) ** 2)).sum(1)
    return found


def test_what_was_drawn_has_the_log_probability_that_it_is_said_to_have() -> None:
    torch.manual_seed(0)
    squashed = SquashedGaussian(BOX)
    mean, log_std = np.tile([0.3, -0.5], (400, 1)), np.tile([-0.7, 0.1], (400, 1))
    action, log_prob = squashed.sample(torch.tensor(np.hstack([mean, log_std])))
    np.testing.assert_allclose(log_prob.numpy(), log_density(mean, log_std, action.numpy()), rtol=1e-6, atol=1e-6)


def test_actions_are_drawn_as_often_as_their_density_says() -> None:
    torch.manual_seed(0)
    squashed = SquashedGaussian(ArraySpec((1,), np.float32, -1.0, 1.0))
    action, _ = squashed.sample(torch.tensor([[0.2, -0.1]]).expand(200_000, 2))
    share = np.histogram(action.numpy(), 10, (-1.0, 1.0))[0] / 200_000

    middles = (np.arange(100_000) + 0.5) / 50_000 - 1.0
    density = np.exp(log_density(np.array([0.2]), np.array([-0.1]), middles[:, None]))
    np.testing.assert_allclose(share, density.reshape(10, -1).sum(1) / 50_000, atol=0.005)


def test_the_log_probability_stays_right_where_the_tanh_rounds_to_1() -> None:
    squashed = SquashedGaussian(ArraySpec((1,), np.float32, -1.0, 1.0))
    inputs = torch.tensor([[15.0, -20.0]], requires_grad=True)
    action, log_prob = squashed.sample(inputs)
    assert action.item() == 1.0
    # log(1 - tanh(u)²) is log 4 - 2u there
    assert log_prob.item() == pytest.approx(20.0 - 0.5 * math.log(2 * math.pi) - math.log(4.0) + 30.0, abs=10.0)
    log_prob.sum().backward()
    assert inputs.grad is not None
    assert torch.isfinite(inputs.grad).all()


def test_the_gradient_goes_through_what_was_drawn() -> None:
    inputs = torch.zeros(1, 4, requires_grad=True)
    action, _ = SquashedGaussian(BOX).sample(inputs)
    action.sum().backward()
    assert inputs.grad is not None
    assert (inputs.grad != 0).all()


def test_actions_fill_the_bounds_of_every_leaf() -> None:
    squashed = SquashedGaussian(TREE)
    actions = squashed.to_environment(np.array([[-1.0, -1.0, 0.0], [1.0, 0.2, 1.0]], np.float32))
    assert actions["steer"].tolist() == [-1.0, 1.0]
    np.testing.assert_allclose(actions["pedals"][0][:, :, 0], [[0.0, 2.5], [3.0, 5.0]], rtol=1e-6)
    check_batch(TREE, actions, 2, "action")


@pytest.mark.parametrize("greedy", [False, True], ids=["exploring", "greedy"])
@pytest.mark.parametrize("action", [BOX, TREE], ids=["box", "tree"])
def test_the_policy_draws_within_the_spec(action: Any, greedy: bool) -> None:
    trainer = SAC("default", BehaviorSpec(SEEN, action), SACOptions(hidden=(8,), learning_starts=10), device="cpu")
    policy = trainer.greedy_policy() if greedy else trainer.policy
    for n_steps in (0, 10):
        trainer.collected(n_steps)
        taken = policy.get_action(steps_of(50))
        check_batch(action, taken.action, 50, "action")
        assert taken.outputs[COLUMN].shape == (50, trainer._squashed.n)
        assert np.abs(taken.outputs[COLUMN]).max() <= 1.0


def test_the_greedy_policy_always_does_the_same_and_the_exploring_one_does_not() -> None:
    trainer = SAC("default", BehaviorSpec(SEEN, BOX), SACOptions(learning_starts=0, capacity=10), device="cpu")
    greedy, exploring = trainer.greedy_policy(), trainer.policy
    first, again = (greedy.get_action(steps_of(5)).action for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (exploring.get_action(steps_of(5)).action != exploring.get_action(steps_of(5)).action).all()


@pytest.mark.filterwarnings("ignore")  # PyTorch has a newer way to export, and says so
@pytest.mark.parametrize("action", [BOX, TREE], ids=["box", "tree"])
def test_the_greedy_policy_as_a_module_that_was_traced_acts_alike(action: Any) -> None:
    options = SACOptions(hidden=(8,), normalize_observations=True)
    trainer = SAC("default", BehaviorSpec(SEEN, action), options, device="cpu")
    trainer.encoder.learn_scale([torch.randn(100, 3) * 5 + 2])
    traced = torch.jit.trace(trainer.greedy_module(), (torch.zeros(2, 3),))
    for n in (1, 7):
        steps = steps_of(n)
        wanted = leaves(trainer.greedy_policy().get_action(steps).action)
        for got, own in zip(traced(torch.from_numpy(steps.obs)), wanted, strict=True):
            assert got.detach().numpy().dtype == own.dtype
            np.testing.assert_allclose(got.detach().numpy(), own, rtol=1e-5, atol=1e-6)


# One update.


def a_batch(n: int, n_numbers: int) -> Drawn[torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    obs, next_obs = (torch.randn(n, 3, generator=chance) for _ in range(2))
    action = torch.rand(n, n_numbers, generator=chance) * 2 - 1
    reward, discount = torch.randn(n, generator=chance), torch.tensor([0.0, 0.9] * (n // 2))
    return Drawn(np.arange(n), [obs], {COLUMN: action}, reward, [next_obs], discount, torch.ones(n))


def mlp_by_hand(network: Any, values: np.ndarray) -> np.ndarray:
    """What linear layers with ReLUs between them make of rows."""
    linear = [layer for layer in network if hasattr(layer, "weight")]
    for number, layer in enumerate(linear):
        values = values @ layer.weight.detach().numpy().T.astype(np.float64) + layer.bias.detach().numpy()
        if number < len(linear) - 1:
            values = np.maximum(values, 0.0)
    return values


def test_the_goal_is_the_reward_and_the_lower_target_value_and_what_randomness_is_worth() -> None:
    trainer = SAC("default", BehaviorSpec(SEEN, BOX), SACOptions(hidden=(8,)), device="cpu")
    for parameter in trainer.target.parameters():
        torch.nn.init.normal_(parameter)
    batch, temperature = a_batch(6, 2), torch.tensor(0.3)
    torch.manual_seed(5)
    goal = trainer._goal(batch, temperature)

    torch.manual_seed(5)
    noise = torch.randn(6, 2).numpy().astype(np.float64)
    next_obs = batch.next_obs[0].numpy()
    mean, log_std = np.split(mlp_by_hand(trainer.model.actor.last, next_obs), 2, axis=1)
    action = np.tanh(mean + np.exp(log_std) * noise)
    rows = np.hstack([next_obs, action])
    after = np.minimum(*(mlp_by_hand(network, rows)[:, 0] for network in trainer.target.values))
    after -= 0.3 * log_density(mean, log_std, action)
    np.testing.assert_allclose(
        goal.numpy(), batch.reward.numpy() + batch.discount.numpy() * after, rtol=1e-4, atol=1e-4
    )


def test_targets_follow_by_their_share_of_the_way() -> None:
    trainer = SAC("default", BehaviorSpec(SEEN, BOX), SACOptions(hidden=(8,), tau=0.1), device="cpu")
    before = [parameter.clone() for parameter in trainer.target.parameters()]
    trainer._n_batches = 1
    trainer._learn(a_batch(8, 2))
    for old, follower, leader in zip(
        before, trainer.target.parameters(), trainer.model.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(follower, old + 0.1 * (leader.detach() - old))


@pytest.mark.parametrize(("target_entropy", "rises"), [(50.0, True), (-50.0, False)])
def test_the_temperature_rises_while_the_policy_is_less_random_than_wanted(target_entropy: float, rises: bool) -> None:
    options = SACOptions(hidden=(8,), target_entropy=target_entropy, initial_temperature=0.5)
    trainer = SAC("default", BehaviorSpec(SEEN, BOX), options, device="cpu")
    before = trainer.model.log_temperature.item()
    assert math.exp(before) == pytest.approx(0.5)
    trainer._learn(a_batch(8, 2))
    assert (trainer.model.log_temperature.item() > before) == rises


def test_a_fixed_temperature_stays_and_everything_else_learns() -> None:
    trainer = SAC("default", BehaviorSpec(SEEN, BOX), SACOptions(hidden=(8,), temperature=0.2), device="cpu")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    figures = trainer._learn(a_batch(8, 2))
    changed = {name for name, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(before) - {"log_temperature"}
    assert figures["temperature"].item() == pytest.approx(0.2)


def test_the_actor_does_not_change_the_critics() -> None:
    """Their goals are met, so the critics have nothing to learn, and the actor's loss must not move them."""
    trainer = SAC("default", BehaviorSpec(SEEN, BOX), SACOptions(hidden=(8,), temperature=1e-9), device="cpu")
    for parameter in [*trainer.model.critics.parameters(), *trainer.target.parameters()]:
        parameter.data.zero_()
    batch = attrs.evolve(a_batch(8, 2), reward=torch.zeros(8), discount=torch.zeros(8))
    trainer._learn(batch)
    assert all((parameter == 0).all() for parameter in trainer.model.critics.parameters())
    assert all(parameter.requires_grad for parameter in trainer.model.critics.parameters())


# What it refuses.


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (ArraySpec((2,), np.float32), "finite bounds, or use PPO"),
        (ArraySpec((2,), np.float32, 0.0, np.array([1.0, np.inf])), "finite bounds, or use PPO"),
        (ArraySpec((), np.int64, 0, 3), "use PPO or DQN"),
        ({"move": BOX, "fire": ArraySpec((), np.int64, 0, 1)}, "use PPO or DQN"),
    ],
    ids=["unbounded", "half bounded", "discrete", "mixed"],
)
def test_actions_without_finite_bounds_are_refused(action: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SAC("default", BehaviorSpec(SEEN, action), device="cpu")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"tau": 0.0}, "tau must be a number above 0 to 1"),
        ({"temperature": 0.0}, "temperature must be a number above 0 or None"),
        ({"learning_rate": -1.0}, "learning_rate must be a number from 0"),
        ({"gamma": 1.5}, "gamma must be a number from 0 to 1"),
        ({"hidden": [64, 0]}, "hidden must be a list of sizes of at least 1"),
        ({"target_every": 0}, "target_every must be a whole number of at least 1"),
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"temprature": 1.0}, "did you mean trainers.default.temperature"),
    ],
    ids=str,
)
def test_mistakes_in_a_config_are_named(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_trainer("default", BehaviorSpec(SEEN, BOX), {"kind": "sac", **option}, seed=0, device="cpu")


def test_sac_is_known() -> None:
    assert "sac" in known_kinds()


# Whole training runs.


class Silent(Report):
    """Says nothing."""


class Aim(gymnasium.Env):  # type: ignore[misc]
    """Say where the target is, eight times; the punishment is the squared distance."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-2, 4, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n_steps = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        reward = -float((action[0] - 2.0 * self._target) ** 2)
        self._n_steps += 1
        return self._look(), reward, False, self._n_steps == 8, {}

    def _look(self) -> Any:
        self._target = self.np_random.uniform(-0.9, 0.9)
        return np.array([self._target], np.float32)


def tables(env: Any, trainer: dict[str, Any], **training: Any) -> dict[str, Any]:
    return {
        "manager": {"kind": "simple", "env": env, "n_envs": 4, "wait": "all"},
        "training": {"steps": 400, "evaluation_episodes": 0, "device": "cpu", **training},
        "trainers": {"default": trainer},
    }


@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalized"])
def test_it_learns_to_aim(tmp_path: Path, normalize: bool) -> None:
    trainer = {"kind": "sac", "learning_rate": 3e-3, "hidden": [32], "gamma": 0.5, "batch": 64, "train_every": 2,
               "normalize_observations": normalize, "normalize_rewards": normalize}  # fmt: skip
    config = tables(Aim, trainer, steps=1600, evaluation_episodes=40)
    result = TrainingRun(TrainingPlan.parse(config, tmp_path), Silent()).go()
    assert result.evaluation is not None
    assert result.evaluation.mean > -1.5, "who always says 0 gets -9"


def test_a_state_that_was_written_and_read_is_the_same_state(tmp_path: Path) -> None:
    run = TrainingRun(TrainingPlan.parse(tables("Pendulum-v1", SMALL), tmp_path), Silent())
    run.go()
    arrays, facts = run.trainers["default"].state()
    read = checkpoints.load_latest(tmp_path / "checkpoints")
    with SimpleEnvManager("Pendulum-v1") as manager:
        other = make_trainer("default", manager.behavior_specs["default"], SMALL, seed=5, device="cpu")
    other.restore(*read.trainers["default"])
    arrays_again, facts_again = other.state()
    assert facts == facts_again == json.loads(json.dumps(facts))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, arrays_again[name], err_msg=name)


def test_resumed_it_goes_on_with_what_it_had_and_explores_blindly_no_more(tmp_path: Path) -> None:
    first = TrainingRun(TrainingPlan.parse(tables("Pendulum-v1", SMALL), tmp_path), Silent())
    first.go()
    again = TrainingRun(TrainingPlan.parse(tables("Pendulum-v1", SMALL, steps=500), tmp_path, resume=True), Silent())
    result = again.go()
    trainer: Any = again.trainers["default"]
    assert result.n_steps == 500
    assert trainer.replay.store.n_acted == 500
    assert trainer.version > first.trainers["default"].version > 0
    assert not trainer.policy.is_blind


def test_until_learning_starts_any_action_is_taken_and_nothing_is_learned(tmp_path: Path) -> None:
    config = tables("Pendulum-v1", {**SMALL, "learning_starts": 1000}, steps=400)
    run = TrainingRun(TrainingPlan.parse(config, tmp_path), Silent())
    run.go()
    trainer: Any = run.trainers["default"]
    drawn = trainer.replay.store.columns[COLUMN][:400]
    assert trainer.version == 0
    assert np.histogram(drawn, 4, (-1.0, 1.0))[0].min() > 60


def test_it_learns_apart_and_its_policy_here_knows_when_to_look(tmp_path: Path) -> None:
    with SimpleEnvManager("Pendulum-v1", 2, seed=0) as manager:
        spec = manager.behavior_specs["default"]
        with make_trainer("default", spec, {**SMALL, "apart": 50}, seed=0, device="cpu") as trainer:
            assert isinstance(trainer, LearnerProcess)
            policy: Any = trainer.policy
            assert policy.is_blind
            TrainerController(manager, {"default": trainer}).train(300)
            assert not policy.is_blind
            assert trainer.state()[1]["version"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(
    "more", [{}, {"normalize_observations": True, "normalize_rewards": True}, {"apart": 50}], ids=str
)
def test_on_a_gpu_it_trains_is_saved_and_goes_on(tmp_path: Path, more: dict[str, Any]) -> None:
    config = tables("Pendulum-v1", {**SMALL, **more}, device="cuda")
    TrainingRun(TrainingPlan.parse(config, tmp_path), Silent()).go()
    config["training"]["steps"] = 500
    result = TrainingRun(TrainingPlan.parse(config, tmp_path, resume=True), Silent()).go()
    assert result.n_steps == 500
