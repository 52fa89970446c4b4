"""Actions that a mask forbids are never taken, never counted, and a mask that makes no sense is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from envmanager import AgentSteps, ArraySpec, BehaviorSpec, SimpleEnvManager, UsageError
from envmanager.training.algorithms.actions import FORBIDDEN, ActionHeads, NothingAllowed
from envmanager.training.algorithms.dqn import DQN, DQNOptions
from envmanager.training.algorithms.ppo import PPO, PPOOptions
from envmanager.training.algorithms.replay import Drawn
from envmanager.training.controller import TrainerController
from envmanager.training.evaluation import evaluate
from envmanager.training.runs.run import Report, TrainingPlan, TrainingRun

SEEN = ArraySpec((3,), np.float32)
CHOICE = ArraySpec((), np.int64, 2, 5)
SEVERAL = ArraySpec((2,), np.int64, 0, np.array([1, 2]))
MIXED = {"move": ArraySpec((2,), np.float32, -1.0, 1.0), "fire": ArraySpec((), np.int64, 0, 2)}


def spec_with(n: int, action: Any = CHOICE, dtype: Any = np.int8) -> BehaviorSpec:
    return BehaviorSpec({"action_mask": ArraySpec((n,), dtype, 0, 1), "observation": SEEN}, action)


def steps_with(masks: list[list[int]], *, first_id: int = 0) -> AgentSteps:
    n = len(masks)
    obs = {"action_mask": np.array(masks, np.int8), "observation": np.random.default_rng(0).random((n, 3), np.float32)}
    flags = np.zeros(n, np.bool_)
    return AgentSteps(np.arange(first_id, first_id + n), obs, np.zeros(n, np.float32), flags, flags)


TRAINERS = {
    "ppo": lambda spec: PPO("player", spec, PPOOptions(hidden=(8,), policy_gain=1.0), device="cpu"),
    "dqn": lambda spec: DQN("player", spec, DQNOptions(hidden=(8,), epsilon=0.5), device="cpu"),
}


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("greedy", [False, True], ids=["exploring", "greedy"])
def test_only_what_is_allowed_is_done(kind: str, greedy: bool) -> None:
    trainer = TRAINERS[kind](spec_with(4))
    policy = trainer.greedy_policy() if greedy else trainer.policy
    masks = np.random.default_rng(1).integers(0, 2, (500, 4))
    masks[~masks.any(1), 2] = 1

    action = policy.get_action(steps_with(masks.tolist())).action

    assert masks[np.arange(500), action - 2].all()


@pytest.mark.parametrize("kind", TRAINERS)
def test_all_that_is_allowed_is_tried(kind: str) -> None:
    policy = TRAINERS[kind](spec_with(4)).policy
    policy.epsilon = 1.0
    action = policy.get_action(steps_with([[1, 0, 1, 1]] * 2000)).action
    assert set(action.tolist()) == {2, 4, 5}


def test_several_numbers_have_their_masks_in_a_row() -> None:
    trainer = PPO("player", spec_with(5, SEVERAL), PPOOptions(hidden=()), device="cpu")
    action = trainer.policy.get_action(steps_with([[1, 0, 0, 1, 1]] * 200)).action
    assert set(map(tuple, action.tolist())) == {(0, 1), (0, 2)}


def test_probabilities_and_entropy_are_those_of_what_is_allowed() -> None:
    heads = ActionHeads(CHOICE)
    logits = torch.tensor([[0.0, 5.0, 0.0, 1.0]], requires_grad=True)
    inputs = heads.masked(logits, torch.tensor([[True, False, True, True]]))
    log_prob, entropy = heads.evaluate(inputs, {"raw0": torch.tensor([[3]])})

    chances = np.exp([0.0, 0.0, 1.0]) / np.exp([0.0, 0.0, 1.0]).sum()
    assert log_prob.item() == pytest.approx(np.log(chances[2]), abs=1e-6)
    assert entropy.item() == pytest.approx(-(chances * np.log(chances)).sum(), abs=1e-6)
    (log_prob + entropy).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 1] == 0.0
    assert torch.isfinite(logits.grad).all()


def test_of_mixed_actions_the_choices_are_masked_and_the_floats_are_left_alone() -> None:
    trainer = PPO("player", spec_with(3, MIXED), PPOOptions(hidden=()), device="cpu")
    action = trainer.policy.get_action(steps_with([[0, 1, 0]] * 50)).action
    assert (action["fire"] == 1).all()
    assert np.unique(action["move"]).size > 50


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_mask_is_no_feature_of_the_network(kind: str) -> None:
    assert TRAINERS[kind](spec_with(4)).model.encoder.n_features == 3


def test_the_goal_of_dqn_is_the_best_of_what_is_allowed_then_and_nothing_where_nothing_is() -> None:
    trainer = DQN("player", spec_with(4), DQNOptions(hidden=(), duelling=False, double=False, gamma=1.0), device="cpu")
    for tensor in trainer.target.last.parameters():
        tensor.data.zero_()
    trainer.target.last[-1].bias.data = torch.tensor([1.0, 7.0, 3.0, 2.0])
    masks = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int8)
    obs = [masks, torch.zeros(3, 3)]
    batch = Drawn(np.arange(3), obs, {}, torch.zeros(3), obs, torch.ones(3), torch.ones(3))

    assert trainer._goal(batch).tolist() == [3.0, 1.0, 0.0]
    assert trainer.target(obs)[1].tolist() == [1.0, FORBIDDEN, FORBIDDEN, FORBIDDEN]


def test_double_dqn_chooses_among_what_is_allowed() -> None:
    trainer = DQN("player", spec_with(4), DQNOptions(hidden=(), duelling=False, gamma=1.0), device="cpu")
    for network, values in ((trainer.model, [0.0, 9.0, 1.0, 2.0]), (trainer.target, [5.0, 6.0, 7.0, 8.0])):
        network.last[-1].weight.data.zero_()
        network.last[-1].bias.data = torch.tensor(values)
    obs = [torch.tensor([[1, 0, 1, 0]], dtype=torch.int8), torch.zeros(1, 3)]
    batch = Drawn(np.arange(1), obs, {}, torch.zeros(1), obs, torch.ones(1), torch.ones(1))

    assert trainer._goal(batch).tolist() == [7.0]


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_mask_that_allows_nothing_is_an_error_that_names_the_agent(kind: str) -> None:
    trainer = TRAINERS[kind](spec_with(4))
    with pytest.raises(NothingAllowed, match=r"agent 1 of env 1 \(behavior 'player'\)") as raised:
        trainer.policy.get_action(steps_with([[1, 0, 0, 0], [0, 0, 0, 0]], first_id=1 << 32))
    assert raised.value.agent_ids == ((1 << 32) + 1,)
    assert raised.value.env_ids == (1,)


def test_each_of_several_numbers_needs_a_choice() -> None:
    trainer = PPO("player", spec_with(5, SEVERAL), PPOOptions(hidden=()), device="cpu")
    with pytest.raises(NothingAllowed):
        trainer.policy.get_action(steps_with([[1, 1, 0, 0, 0]]))


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_mask_that_does_not_fit_is_refused_when_the_trainer_is_made(kind: str) -> None:
    with pytest.raises(UsageError, match=r"it should be one row of 4 numbers.*action_mask=false"):
        TRAINERS[kind](spec_with(3))


def test_a_mask_where_nothing_is_a_choice_is_refused() -> None:
    with pytest.raises(UsageError, match="none of its actions is a choice"):
        PPO("player", spec_with(2, MIXED["move"]), device="cpu")


def test_observations_that_are_only_a_mask_are_refused() -> None:
    spec = BehaviorSpec({"action_mask": ArraySpec((4,), np.int8)}, CHOICE)
    with pytest.raises(UsageError, match="would see nothing"):
        PPO("player", spec, device="cpu")


@pytest.mark.parametrize("make", [
    lambda spec: PPO("player", spec, PPOOptions(action_mask=False), device="cpu"),
    lambda spec: DQN("player", spec, DQNOptions(action_mask=False), device="cpu"),
], ids=["ppo", "dqn"])  # fmt: skip
def test_without_the_option_a_mask_is_an_observation_like_any_other(make: Any) -> None:
    trainer = make(spec_with(3))
    assert trainer.model.encoder.n_features > 3
    trainer.policy.get_action(steps_with([[0, 0, 0]]))


def test_masks_of_ml_agents_are_observations_since_they_mean_the_opposite() -> None:
    masks = (ArraySpec((4,), np.bool_),)
    trainer = PPO("player", BehaviorSpec({"observations": (SEEN,), "action_mask": masks}, CHOICE), device="cpu")
    assert trainer.model.mask.place is None


class Silent(Report):
    """Says nothing."""


class Doors(gymnasium.Env):  # type: ignore[misc]
    """Four doors, of which two are open, others at each step: 1 for the right-hand one; the others raise."""

    observation_space = gymnasium.spaces.Dict(
        {"observation": gymnasium.spaces.Box(0, 1, (2,)), "action_mask": gymnasium.spaces.MultiBinary(4)}
    )
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._n_steps = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        if action not in self._open:
            raise ValueError(f"door {action} is closed")
        reward = float(action == self._open.max())
        self._n_steps += 1
        return self._look(), reward, self._n_steps == 10, False, {}

    def _look(self) -> Any:
        self._open = self.np_random.choice(4, 2, replace=False)
        mask = np.isin(np.arange(4), self._open).astype(np.int8)
        return {"observation": np.array([0.5, 1.0], np.float32), "action_mask": mask}


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "ppo", "rollout": 128, "epochs": 8, "minibatch": 32, "learning_rate": 1e-2},
        {"kind": "dqn", "learning_starts": 100, "learning_rate": 1e-2, "target_every": 50, "exploration_steps": 800,
         "hidden": [16], "gamma": 0.1},
    ],
    ids=["ppo", "dqn"],
)  # fmt: skip
def test_a_game_whose_forbidden_moves_raise_is_learned_and_resumed(tmp_path: Path, table: dict[str, Any]) -> None:
    tables = {
        "manager": {"kind": "simple", "env": Doors, "n_envs": 4, "wait": "all"},
        "training": {"steps": 1600, "evaluation_episodes": 8, "device": "cpu"},
        "trainers": {"default": table},
    }
    first = TrainingRun(TrainingPlan.parse(tables, tmp_path), Silent()).go()
    assert first.evaluation is not None
    assert first.evaluation.mean > 8.5, "blindly it is 5"
    tables["training"]["steps"] = 1800  # type: ignore[index]
    again = TrainingRun(TrainingPlan.parse(tables, tmp_path, resume=True), Silent()).go()
    assert again.n_steps == 1800


def connect_four() -> Any:
    from pettingzoo.classic.connect_four.connect_four import raw_env
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    return turn_based_aec_to_parallel(raw_env())  # which asserts that a move is legal


@pytest.mark.parametrize("kind", TRAINERS)
def test_connect_four_is_played_in_turns_without_an_illegal_move(kind: str) -> None:
    pytest.importorskip("pettingzoo.classic.connect_four.connect_four")
    with SimpleEnvManager(connect_four, 3, seed=0) as manager:
        (behavior,) = manager.behavior_specs
        spec = manager.behavior_specs[behavior]
        trainer = {
            "ppo": lambda: PPO(behavior, spec, PPOOptions(rollout=100, epochs=2), device="cpu"),
            "dqn": lambda: DQN(behavior, spec, DQNOptions(learning_starts=50, hidden=(16,)), device="cpu"),
        }[kind]()
        controller = TrainerController(manager, {behavior: trainer})
        controller.train(400)
        assert trainer.version > 0
        assert 400 <= controller.n_steps < 403
        result = evaluate(manager, {behavior: trainer.greedy_policy()}, episodes_per_env=1)
        assert sorted(result.returns)[0] in (-1.0, 0.0)
        assert sum(result.returns) == 0.0
