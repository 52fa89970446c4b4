"""Policies: the interface of objects that choose actions for the agents of one behavior, and a random policy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from envmanager.data.specs import ACTION_MASK, ArraySpec, BehaviorSpec
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.data.trees import build, leaves
from envmanager.errors import UsageError


class Policy(Protocol):
    """The interface of a policy: any object with the method ``get_action``."""

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return an ActionInfo with one row of actions for each row of ``steps``, in the same order.

        The rows are the agents of this policy's behavior that need an action, from one or more workers. Their number
        changes from call to call. ``steps.agent_id`` identifies the agents.
        """
        ...


class RandomPolicy:
    """A policy of random actions, reproducible from the seed.

    Each agent has its own generator. Actions depend on the seed, the ``agent_id`` and the agent's number of steps, but
    not on the number of workers or the order of responses. Action values are uniform, or normal for unbounded floats.
    If observations have action masks, only what these allow is drawn, or anything where they allow nothing.
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
        self._ranges = [range_of(leaf) for leaf in self._leaf_specs]
        self._n_ahead = max(1, 128 // (1 + sum(int(np.prod(leaf.shape)) for leaf in self._leaf_specs)))
        self._generators: dict[int, np.random.Generator] = {}
        self._ahead: dict[int, Any] = {}
        """Iterator over the next actions of each agent. Drawing many at once is faster."""
        mask = spec.observation.get(ACTION_MASK) if isinstance(spec.observation, dict) else None
        choices = _choices_of(self._leaf_specs, self._ranges) if isinstance(mask, ArraySpec) else []
        is_mask = isinstance(mask, ArraySpec) and mask.shape == (sum(n for *_, n in choices),)
        self._choices = choices if is_mask else []

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        """Return a random action for each row of ``steps``."""
        columns = [np.empty((len(steps), *spec.shape), spec.dtype) for spec in self._leaf_specs]
        for row, agent_id in enumerate(steps.agent_id.tolist()):
            drawn = next(self._ahead.get(agent_id, iter(())), None) or self._draw_ahead(agent_id)
            for column, value in zip(columns, drawn):  # noqa: B905  # strict=True would be slower
                column[row] = value
            if self._choices:
                numbers = [column.reshape(len(steps), -1)[row] for column in columns]
                self._obey(steps.obs[ACTION_MASK][row], numbers, self._generators[agent_id])
        return ActionInfo(build(self.spec.action, columns))

    def _obey(self, mask: np.ndarray, numbers: list[np.ndarray], generator: np.random.Generator) -> None:
        """Draw those of an action's ``numbers`` again that ``mask`` forbids. A number without a choice is left."""
        start = 0
        for leaf, place, low, n in self._choices:
            allowed, start = np.flatnonzero(mask[start : start + n]), start + n
            if len(allowed) and int(numbers[leaf][place]) - low not in allowed:
                numbers[leaf][place] = low + int(generator.choice(allowed))

    def _draw_ahead(self, agent_id: int) -> tuple[Any, ...]:
        """Draw about 128 numbers for an agent's next actions. Return the first action; store the rest in ``_ahead``."""
        if agent_id not in self._generators:
            sequence = np.random.SeedSequence(self._seed, spawn_key=(agent_id >> 32, agent_id & 0xFFFFFFFF))
            self._generators[agent_id] = np.random.Generator(np.random.PCG64(sequence))
        generator, drawn = self._generators[agent_id], []
        for spec, (low, high) in zip(self._leaf_specs, self._ranges, strict=True):
            shape = (self._n_ahead, *spec.shape)
            if spec.dtype.kind in "biu":
                drawn.append(generator.integers(low, high, shape, dtype=spec.dtype.type, endpoint=True))
            elif np.all(high / 2 - low / 2 <= np.finfo(np.float64).max / 2):  # halves, which cannot overflow
                drawn.append(generator.uniform(low, high, shape).astype(spec.dtype))
            else:
                drawn.append(np.clip(generator.standard_normal(shape), low, high).astype(spec.dtype))
        self._ahead[agent_id] = zip(*drawn, strict=True)
        return next(self._ahead[agent_id], ())


def _choices_of(specs: list[ArraySpec], ranges: list[tuple[Any, Any]]) -> list[tuple[int, int, int, int]]:
    """Return each whole number of an action: the index of its leaf, its place there, its least value, its choices."""
    choices = []
    for leaf, (spec, bounds) in enumerate(zip(specs, ranges, strict=True)):
        if spec.dtype.kind in "biu":
            lows, highs = (np.broadcast_to(bound, spec.shape).reshape(-1).tolist() for bound in bounds)
            choices += [(leaf, k, int(low), int(highs[k]) - int(low) + 1) for k, low in enumerate(lows)]
    return choices


def range_of(spec: ArraySpec) -> tuple[Any, Any]:
    """Return the least and greatest values that ``spec`` and its dtype allow. Unbounded floats have infinite limits."""
    low, high, kind = spec.minimum, spec.maximum, spec.dtype.kind
    least, most = (np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max) if kind in "iu" else (-np.inf, np.inf)
    low, high = least if low is None else low, most if high is None else high
    if kind == "f":  # a cast to float32 must not round a number to one beyond a bound
        near, far, inf = np.asarray(low, spec.dtype), np.asarray(high, spec.dtype), spec.dtype.type(np.inf)
        low = np.where(near < low, np.nextafter(near, inf), near).astype(np.float64)
        high = np.where(far > high, np.nextafter(far, -inf), far).astype(np.float64)
    return (False, True) if kind == "b" else (low, high)
