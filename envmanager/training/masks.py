"""Masks of allowed actions, under the key ``action_mask`` of an observation, as in PettingZoo.

::

    {"observation": …, "action_mask": [1, 0, 1]}     network ── logits ──▶ [0.3, forbidden, -1.2] ──▶ draw, likeliest, …

The rule: unless the option ``action_mask`` is false, a mask is applied to the network's outputs and is not an input of
the network, so that no policy chooses a forbidden action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import AGENT_BITS, AgentSteps
from envmanager.data.trees import leaves
from envmanager.errors import EnvManagerError, UsageError
from envmanager.importing import needed_by

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor

KEY = "action_mask"
FORBIDDEN: float = float(np.finfo(np.float32).min)
"""Network output for a forbidden action. It is finite because 0 * -inf, as in an entropy, is NaN."""


class NothingAllowed(EnvManagerError):
    """Error raised when agents have to act but their masks allow no action. ``agent_ids`` has these agents' ids."""

    def __init__(self, *, behavior: str, agent_ids: Sequence[int]) -> None:
        self.behavior = behavior
        self.agent_ids = tuple(int(agent_id) for agent_id in agent_ids)
        self.env_ids = tuple(agent_id >> AGENT_BITS for agent_id in self.agent_ids)
        numbers = [agent_id - (agent_id >> AGENT_BITS << AGENT_BITS) for agent_id in self.agent_ids]
        whose = ", ".join(f"agent {k} of env {env_id}" for k, env_id in zip(numbers, self.env_ids, strict=True))
        super().__init__(
            f"the {KEY} of {whose} (behavior {behavior!r}) allows no action, but the agent has to act. The environment "
            "should allow an action that does nothing, end the episode, or mark the agent as not acting. With "
            f"{KEY}=false the trainer treats masks as observations."
        )


class ActionMask:
    """The action mask of a behavior. ``place`` is its index among an observation's leaves, or None if no mask applies.

    A mask is an array under the key ``action_mask`` at the top level of a dict observation. A zero forbids a choice.
    ``counts`` has the number of choices for each integer in the action. Unless ``enabled`` is False, raises UsageError
    for a mask that is not one row of numbers with an entry for each choice, or that is an observation's only leaf.
    """

    def __init__(self, behavior: str, spec: BehaviorSpec, counts: Sequence[int], *, enabled: bool = True) -> None:
        self._behavior = behavior
        self._starts = np.cumsum([0, *counts])[:-1]
        self.place = _place_of_mask(spec.observation) if enabled else None
        if self.place is not None:
            _check(behavior, spec.observation, counts)

    def allowed(self, steps: AgentSteps) -> np.ndarray | None:
        """Return which choices the masks in ``steps`` allow, as bool ``[n, choices]``, or None without a mask.

        Raises NothingAllowed if a mask forbids all choices for one of the integers in an action.
        """
        if self.place is None:
            return None
        allowed: np.ndarray = steps.obs[KEY].reshape(len(steps), -1) != 0
        if len(steps):
            stuck = ~np.logical_or.reduceat(allowed, self._starts, axis=1).all(1)
            if stuck.any():
                raise NothingAllowed(behavior=self._behavior, agent_ids=steps.agent_id[stuck].tolist())
        return allowed

    def of(self, obs: Sequence[Tensor]) -> Tensor | None:
        """Return which choices the mask leaf in ``obs`` allows, as bool ``[n, choices]``, or None without a mask."""
        return None if self.place is None else obs[self.place].flatten(1) != 0


def forbid(outputs: Tensor, allowed: Tensor | None) -> Tensor:
    """Return ``outputs``, ``[n, choices]``, with ``FORBIDDEN`` where ``allowed`` is False. None allows all choices."""
    return outputs if allowed is None else torch.where(allowed, outputs, FORBIDDEN)


def _place_of_mask(observation: Any) -> int | None:
    """Return the index of the mask among the leaves of an observation, or None without a mask."""
    if not isinstance(observation, dict) or not isinstance(observation.get(KEY), ArraySpec):
        return None
    before = list(observation)[: list(observation).index(KEY)]
    return sum(len(leaves(observation[key])) for key in before)


def _check(behavior: str, observation: Any, counts: Sequence[int]) -> None:
    mask: ArraySpec = observation[KEY]
    n = sum(counts)
    if mask.shape != (n,) or n == 0 or mask.dtype.kind not in "biuf":
        wanted = f"it should be one row of {n} numbers" if n else "but none of its actions is a choice"
        raise UsageError(
            f"the observations of behavior {behavior!r} have an {KEY} that does not fit its actions: it is {mask}; "
            f"{wanted}. Fix the environment, or set {KEY}=false: then it is an observation like any other."
        )
    if len(leaves(observation)) == 1:
        raise UsageError(
            f"the observations of behavior {behavior!r} have nothing but an {KEY}: the network would see nothing."
        )
