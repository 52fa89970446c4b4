"""What trains the policy of one behavior."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from envmanager.data.steps import StepInfo
from envmanager.errors import UsageError
from envmanager.policy import Policy

if TYPE_CHECKING:
    from torch import nn

Arrays = Mapping[str, np.ndarray]


class Trainer(ABC):
    """Learns from the steps of one behavior. The controller gives it every StepInfo, and asks for an update when ready.

    ``version`` counts the updates; the policy puts it into every ActionInfo.
    """

    behavior: str
    policy: Policy
    """What acts, for the manager."""
    version: int = 0
    max_policy_lag: float = 1
    """By how many versions a step may be older than what it is learned for, unless the controller says otherwise."""
    frozen: bool = False
    """Whether it only acts, greedily. The controller changes that: ``TrainerController.freeze``."""
    learns_while_playing: bool = False
    """Whether the weights of its policy change between two updates too."""

    @abstractmethod
    def add(self, info: StepInfo) -> int:
        """Take one worker's steps; how many of them can be learned from. The arrays are the manager's: copy them."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether there is enough for an update; asked again after each, until there is not."""

    @abstractmethod
    def update(self, progress: float) -> dict[str, float]:
        """Learn, and give the policy a new version. ``progress``: 0 at the beginning of training, 1 at its end.

        Returns figures worth looking at, by name.
        """

    @abstractmethod
    def greedy_policy(self) -> Policy:
        """A policy that explores nothing, for evaluation; it has the same weights, also later."""

    @abstractmethod
    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """All that a resumed training needs: arrays by name, and what JSON can hold."""

    @abstractmethod
    def restore(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Go on from what ``state`` told."""

    def restore_policy(self, arrays: Arrays, facts: Mapping[str, Any]) -> None:
        """Take over only what its greedy policy needs of what ``state`` told; nothing is learned afterwards.

        ``arrays`` are read when they are asked for, so a replay that is left out takes no time.
        """
        self.restore(arrays, facts)

    def greedy_module(self) -> nn.Module:
        """The greedy policy as a module, for export; it need not have the same weights later.

        ``forward(*leaves)`` takes the leaves of an observation, tensors ``[n, …]`` in the order of the spec, and
        returns a tuple of the leaves of the action, in the same way, as the environment gets them: shifted, scaled,
        clipped and in its dtypes. It normalizes what the policy normalizes, can be traced (``torch.jit.trace``), and
        asks nothing of the number of rows, which changes. Raises UsageError for a trainer that has none.
        """
        raise UsageError(
            f"the trainer of {self.behavior!r} cannot be exported: {type(self).__name__} has no greedy_module(), which "
            "returns its greedy policy as a torch.nn.Module."
        )

    def can_update(self) -> bool:
        """Whether it can learn from what it has, be that less than ``is_ready`` wants. Asked at the end of a round, and
        again after each update, until it cannot.
        """
        return self.is_ready()

    def pause(self) -> None:  # noqa: B027  (one that learns only in update() has nothing to end)
        """It is about to be frozen: when this returns, nothing changes its weights before the next ``add``."""

    def collected(self, n_steps: int) -> None:  # noqa: B027  (most explore in the same way all the time)
        """So many steps of its behavior were taken in all: its policy explores as it should after that many."""

    def close(self) -> None:  # noqa: B027
        """Give back what it holds besides memory. Any number of times."""

    def environments_were_reset(self) -> None:  # noqa: B027  (one that keeps nothing between steps needs none)
        """What is in flight will never be answered."""


def require_can_learn_apart(trainer: Any) -> None:
    """Raise UsageError for a trainer, or a class of trainers, that cannot learn in a process of its own.

    PPO cannot: it needs steps of its present policy. Nor can any outside of Linux.
    """
    if sys.platform != "linux":
        raise UsageError("learning in a process of its own needs Linux (pidfd): leave out `apart` here.")
    if not math.isinf(trainer.max_policy_lag):
        name = trainer.__name__ if isinstance(trainer, type) else type(trainer).__name__
        raise UsageError(
            f"{name} cannot learn in a process of its own: its policy would change while it plays, and it learns only "
            f"from steps of its present one (max_policy_lag is {trainer.max_policy_lag:g}). Leave out `apart`, or take "
            "a trainer with a replay: dqn, sac."
        )
