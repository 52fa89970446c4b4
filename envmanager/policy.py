"""The interface of policies, which choose actions for observations, and a random policy. Each behavior has a policy."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.data.trees import Tree, build, leaves
from envmanager.errors import UsageError


class Policy(Protocol):
    """The interface of a policy: any object with the method ``get_action``."""

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return one action row per row of ``steps``, in order.

        The rows are the agents of this policy's behavior that need an action, from all idle workers, so their number
        changes from call to call. ``steps.agent_id`` identifies the agents.
        """
        ...


class RandomPolicy:
    """A policy of uniform random actions, reproducible from the seed.

    Each agent has its own generator. So actions depend on the seed, the ``agent_id`` and how often the agent acted, but
    not on the number of workers or the order in which they respond. Unbounded floats are drawn from a standard normal.
    Raises UsageError for actions that are objects, because no spec says which objects are valid.
    """

    is_random = True
    """Whether the policy is random, so that ``ManagerStats.verdict`` gives no advice on its speed."""

    def __init__(self, spec: BehaviorSpec, seed: int = 0) -> None:
        self.spec = spec
        self._leaf_specs: list[ArraySpec] = leaves(spec.action)
        if any(leaf.is_object for leaf in self._leaf_specs):
            raise UsageError(
                "RandomPolicy cannot draw actions that are not arrays; write a policy for this environment "
                "(envmanager run --policy)."
            )
        self._seed = seed
        self._generators: dict[int, np.random.Generator] = {}

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return a random action for each row."""
        columns = [np.empty((len(steps), *spec.shape), spec.dtype) for spec in self._leaf_specs]
        for row, agent_id in enumerate(steps.agent_id.tolist()):
            generator = self._generators.get(agent_id)
            if generator is None:
                sequence = np.random.SeedSequence(self._seed, spawn_key=(agent_id >> 32, agent_id & 0xFFFFFFFF))
                generator = self._generators[agent_id] = np.random.Generator(np.random.PCG64(sequence))
            for spec, column in zip(self._leaf_specs, columns, strict=True):
                column[row] = _draw_one(spec, generator)
        action: Tree = build(self.spec.action, columns)
        return ActionInfo(action)


def _draw_one(spec: ArraySpec, generator: np.random.Generator) -> np.ndarray | float | int:
    low, high = spec.minimum, spec.maximum
    if spec.dtype.kind == "b":
        return generator.integers(0, 2, spec.shape).astype(bool)
    if spec.dtype.kind in "iu":
        limits = np.iinfo(spec.dtype)
        low, high = limits.min if low is None else low, limits.max if high is None else high
        return generator.integers(low, high, spec.shape or None, dtype=spec.dtype.type, endpoint=True)
    bounded = low is not None and high is not None and np.isfinite(low).all() and np.isfinite(high).all()
    if bounded:
        return generator.uniform(low, high, spec.shape or None)
    drawn = generator.standard_normal(spec.shape or None)
    return np.clip(drawn, -np.inf if low is None else low, np.inf if high is None else high)
