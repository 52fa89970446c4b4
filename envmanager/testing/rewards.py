"""A conformance kit for trainers of language models: lost rollouts change no advantage, and their own is zero.

::

    groups, some rollouts lost ── the trainer ──▶ advantages of the others ◀── equal? ── the trainer ── the others alone

Longer rollouts fail more often and earn more, as in practice, so a trainer that scores a lost rollout as 0 teaches to
answer briefly. Nothing here imports a trainer.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

Advantages = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function that returns the advantages of a trainer, with the shape ``(groups, rollouts)``.

Its arguments are the rewards, with the shape ``(groups, rollouts, functions)``, and which rollouts are lost, with the
shape ``(groups, rollouts)``. The rewards of a lost rollout are what the functions say of a text that breaks off. The
function tells the trainer of lost rollouts as its adapter would.
"""


@attrs.frozen
class Verdict:
    """What a trainer makes of lost rollouts."""

    n_groups: int
    n_lost: int
    """Number of rollouts that were lost."""
    worst_error: float
    """Largest difference of an advantage from that without the lost rollouts."""
    worst_of_lost: float
    """Largest absolute advantage of a lost rollout."""
    bias_of_long: float
    """Mean change of the advantages of the longer half of all rollouts, lost ones included."""
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether lost rollouts count for nothing. False if an advantage is NaN."""
        return self.worst_error <= self.tolerance and self.worst_of_lost <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{'passes' if self.passes else 'FAILS'}: with {self.n_lost} lost rollouts in {self.n_groups} groups, "
            f"advantages of others differ by up to {self.worst_error:.1e}, those of lost ones are up to "
            f"{self.worst_of_lost:.1e}, and those of long rollouts change by {self.bias_of_long:+.1e} on average"
        )


def check_lost_rollouts(
    advantages: Advantages,
    *,
    n_groups: int = 100_000,
    n_rollouts: int = 8,
    n_functions: int = 2,
    lost_share: float = 0.05,
    tolerance: float = 1e-12,
    seed: int = 0,
) -> Verdict:
    """Return what a trainer makes of groups of which some rollouts are lost, the longer ones more often.

    The trainer is asked for the advantages of all groups, then for those of the surviving rollouts alone, with all
    groups of as many survivors in one call: its advantages of a group must not depend on other groups.
    """
    rng = np.random.default_rng(seed)
    length = rng.lognormal(sigma=0.7, size=(n_groups, n_rollouts))
    lost = rng.random(length.shape) < lost_share * length / length.mean()
    rewards = rng.random((*length.shape, n_functions))
    rewards[..., 0] = rng.random(length.shape) < length / (1.0 + length)  # longer ones solve more
    rewards[lost, 0] = 0.0
    got = np.asarray(advantages(rewards.copy(), lost.copy()), np.float64)
    wanted = np.zeros_like(got)
    n_left = (~lost).sum(axis=1)
    for n in range(1, n_rollouts + 1):
        groups = n_left == n
        if groups.any():
            left = ~lost & groups[:, None]
            kept = rewards[left].reshape(-1, n, n_functions)
            wanted[left] = np.asarray(advantages(kept, np.zeros(kept.shape[:2], np.bool_)), np.float64).ravel()
    change = got - wanted
    return Verdict(
        n_groups=n_groups,
        n_lost=int(lost.sum()),
        worst_error=float(np.abs(change[~lost]).max(initial=0.0)),
        worst_of_lost=float(np.abs(got[lost]).max(initial=0.0)),
        bias_of_long=float(change[length > np.median(length)].mean()),
        tolerance=tolerance,
    )
