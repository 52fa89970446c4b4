"""Environments for engines to host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envmanager import ArraySpec, BehaviorSpec, EnvContext, Environment
from envmanager.data.steps import AGENT_BITS, AgentSteps, Steps
from envmanager.data.trees import Tree, map_tree


class Population:
    """Agents of some behaviors that come and go in some environments, as a random generator decides."""

    def __init__(self, specs: dict[str, BehaviorSpec], env_ids: list[int], seed: int, *, infos: bool) -> None:
        self._specs = specs
        self._env_ids = env_ids
        self._random = np.random.default_rng(seed)
        self._infos = infos
        self._n_seen = dict.fromkeys(env_ids, 0)
        self._alive: dict[str, list[int]] = {name: [] for name in specs}

    def reset(self) -> dict[str, AgentSteps]:
        """Everybody leaves, some join."""
        self._alive = {name: [self._new(env_id) for env_id in self._env_ids] for name in self._specs}
        return {name: self._steps(name, ids, ids, is_first=True) for name, ids in self._alive.items()}

    def step(self) -> dict[str, AgentSteps]:
        """Some leave, some join, some end; or, half of the time, nobody comes or goes."""
        found = {}
        for name, ids in self._alive.items():
            stay, rows = ids, ids
            if self._random.random() < 0.5:
                stay = [agent_id for agent_id in ids if self._random.random() < 0.8]
                stay = stay + [self._new(env_id) for env_id in self._env_ids if self._random.random() < 0.2]
                rows = [*ids, *(agent_id for agent_id in stay if agent_id not in ids)]
            self._alive[name] = stay
            if rows and self._random.random() < 0.9:
                found[name] = self._steps(name, rows, stay)
        return found

    def actions(self, steps: dict[str, AgentSteps]) -> dict[str, Any]:
        """Random actions for those that want one; for some behaviors, none."""
        return {
            name: self._arrays(self._specs[name].action, len(own.acting_rows))
            for name, own in steps.items()
            if self._random.random() < 0.8
        }

    def _new(self, env_id: int) -> int:
        self._n_seen[env_id] += 1
        return (env_id << AGENT_BITS) + self._n_seen[env_id] - 1

    def _steps(self, name: str, rows: list[int], stay: list[int], *, is_first: bool = False) -> AgentSteps:
        n = len(rows)
        kind = np.zeros(n, np.int64) if is_first or self._random.random() < 0.5 else self._random.integers(0, 4, n)
        acting = np.array([agent_id in stay for agent_id in rows], np.bool_)
        m = int(np.count_nonzero(kind))
        spec = self._specs[name].observation
        return AgentSteps(
            np.array(rows, np.int64),
            self._arrays(spec, n),
            np.zeros(n, np.float32) if is_first else self._random.normal(size=n).astype(np.float32),
            (kind & 1).astype(np.bool_),
            (kind >> 1).astype(np.bool_),
            self._arrays(spec, m) if m else None,
            None if acting.all() else acting,
            self._dicts(n) if self._infos else None,
            self._dicts(m) if self._infos and m else None,
        )

    def _dicts(self, n: int) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = [{}, {"score": 1.5}, {"name": "ü", "path": [1, [2, {}]]}]
        return [dict(choices[index]) for index in self._random.integers(0, 3, n)]

    def _arrays(self, spec: Any, n: int) -> Any:
        def of(leaf: ArraySpec) -> np.ndarray:
            drawn: np.ndarray = self._random.integers(0, 8, (n, *leaf.shape)).astype(leaf.dtype)
            return drawn

        return map_tree(of, spec)


class Crowd(Environment):
    """Two behaviors whose agents join, leave and end as the seed decides. It remembers the actions it was given."""

    SPECS = {
        "hero": BehaviorSpec(
            {"rays": ArraySpec((3,), np.float32, 0, 8), "seen": ArraySpec((5,), np.uint8)},
            ArraySpec((), np.int64, 0, 4),
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

    def add_text(self, one: str) -> str:
        return f"{self.height}{one}"


class Speaks(Crowd):
    """Its observations are words, which no engine can send."""

    SPECS = {"default": BehaviorSpec(ArraySpec((), object), ArraySpec((), np.int64))}
