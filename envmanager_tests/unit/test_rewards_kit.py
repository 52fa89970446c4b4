"""The conformance kit for trainers that must not score lost rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from envmanager.testing import check_lost_rollouts


def standardized(rewards: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """The advantages of GRPO over the rollouts that are not lost."""
    total = np.where(lost, np.nan, rewards.sum(axis=2))
    with np.errstate(all="ignore"):
        left = (~lost).sum(axis=1, keepdims=True)
        mean = np.nansum(total, axis=1, keepdims=True) / left
        std = np.sqrt(np.nansum((total - mean) ** 2, axis=1, keepdims=True) / left)
        return np.nan_to_num((total - mean) / (std + 1e-4))


def zeros(rewards: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """A trainer that takes a lost rollout for one with the reward 0."""
    return standardized(np.where(lost[..., None], 0.0, rewards), np.zeros_like(lost))


def test_a_trainer_that_leaves_lost_rollouts_out_passes_over_a_hundred_thousand_groups() -> None:
    verdict = check_lost_rollouts(standardized)
    assert verdict.passes
    assert verdict.n_groups == 100_000
    assert 35_000 < verdict.n_lost < 45_000
    assert max(verdict.worst_error, verdict.worst_of_lost) <= 1e-12
    assert str(verdict).startswith("passes")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_trainer_that_scores_lost_rollouts_zero_is_caught_and_teaches_to_be_brief(seed: int) -> None:
    verdict = check_lost_rollouts(zeros, n_groups=5_000, seed=seed)
    assert not verdict.passes
    assert verdict.worst_error > 1.0 < verdict.worst_of_lost
    assert verdict.bias_of_long < -0.005
    assert str(verdict).startswith("FAILS")


def test_a_trainer_that_only_sets_the_advantage_of_lost_rollouts_to_zero_is_caught() -> None:
    verdict = check_lost_rollouts(lambda rewards, lost: np.where(lost, 0.0, zeros(rewards, lost)), n_groups=1_000)
    assert (verdict.worst_of_lost, verdict.passes) == (0.0, False)


def test_advantages_that_are_not_numbers_do_not_pass() -> None:
    verdict = check_lost_rollouts(lambda rewards, lost: np.full(lost.shape, np.nan), n_groups=10)
    assert not verdict.passes
