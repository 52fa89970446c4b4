"""Environments for engines to host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager import ArraySpec, BehaviorSpec, EnvContext, Environment
from envmanager.data.steps import Steps
from envmanager.data.trees import Tree
from envmanager_tests.godot.strategies import Population


class Crowd(Environment):
    """Two behaviors whose agents join, leave and end as the seed decides. It remembers the actions that it was given."""

    SPECS = {
        "hero": BehaviorSpec(
            {"rays": ArraySpec((3,), np.float32, 0, 8), "seen": ArraySpec((5,), np.uint8)}, ArraySpec((), np.int64, 0, 4)
        ),
        "coin": BehaviorSpec(
            ArraySpec((), np.int32), {"push": ArraySpec((2,), np.float32, -1, 1), "jump": ArraySpec((), np.int32, 0, 1)}
        ),
    }
    partial_actions = True

    def __init__(self, context: EnvContext) -> None:
        self._people = Population(self.SPECS, [0], context.seed or 0, infos=True)
        self.last_actions: Any = None
        self.options: Any = None
        self.seed: int | None = None
        self.height = 1.5

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        return self.SPECS

    @property
    def max_agents(self) -> Mapping[str, int]:
        return {"hero": 30, "coin": 30}

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self.seed, self.options = seeds[0], options
        return self._people.reset()

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        self.last_actions = actions
        return self._people.step()

    def close(self) -> None:
        pass

    def render(self) -> np.ndarray:
        return np.arange(4, dtype=np.uint8).reshape(2, 2)

    def add(self, one: float, other: float = 0.0) -> float:
        return self.height + one + other


class Speaks(Crowd):
    """Its observations are words, which no engine can send."""

    SPECS = {"default": BehaviorSpec(ArraySpec((), object), ArraySpec((), np.int64))}
