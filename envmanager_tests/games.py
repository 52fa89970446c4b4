"""A game of turns in which all happens by chance: who moves next, who gets rewards, and who dies in whose turn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import gymnasium
import numpy as np
from pettingzoo import AECEnv


class Brawl(AECEnv[Any, Any, Any]):
    """Agents that move in any order. What happens depends on the seed and on all moves.

    ``dies``: "first" (the dead are selected at once), "later" (when they would be next) or "never". ``order``: the
    agents by name. An observation has the state of the game, and a mask of the legal moves of the agent that is next.
    """

    render_mode = None
    N_MOVES = 4

    def __init__(self, order: tuple[str, ...] = ("a_0", "a_1", "a_2", "b_0"), *, dies: str = "first") -> None:
        self.metadata = {"name": "brawl", "is_parallelizable": False}
        self.possible_agents, self._dies = list(order), dies
        self._random = np.random.default_rng(0)
        self._seen = np.zeros(3, np.float32)
        self.given: Counter[Any] = Counter()
        """Sum of the rewards of each agent in the present episode, as ``rewards`` told them after each move."""

    def observation_space(self, agent: Any) -> Any:
        seen = gymnasium.spaces.Box(-np.inf, np.inf, (3 if agent[0] == "a" else 2,), np.float32)
        mask = gymnasium.spaces.Box(0, 1, (self.N_MOVES,), np.int8)
        return gymnasium.spaces.Dict({"observation": seen, "action_mask": mask})

    def action_space(self, agent: Any) -> Any:
        return gymnasium.spaces.Discrete(self.N_MOVES)

    def observe(self, agent: Any) -> Any:
        """Return what the agent sees, in an array that all agents share."""
        self._seen[:] = [self._state, self._n, self.possible_agents.index(agent)]
        legal = np.array([(self._n + move) % 3 != 0 for move in range(self.N_MOVES)], np.int8)
        mask = legal if agent == self.agent_selection else np.zeros(self.N_MOVES, np.int8)
        return {"observation": self._seen[: 3 if agent[0] == "a" else 2], "action_mask": mask}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {"name": agent} for agent in self.agents}
        self._n, self._state = 0, float(self._random.random())
        self.agent_selection = self._next(self.agents)
        self.given.clear()

    def _next(self, agents: list[Any]) -> Any:
        return agents[int(self._random.integers(len(agents)))]

    def step(self, action: Any) -> None:
        mover = self.agent_selection
        if self.terminations[mover] or self.truncations[mover]:
            self._was_dead_step(action)
            if self._dies == "later" and self.agents:
                self.agent_selection = self._next(self.agents)
            return
        assert self.observe(mover)["action_mask"][int(action)], f"{action} is no legal move"
        self._n += 1
        self._state = (self._state * 3.7 + int(action) + float(self._random.random())) % 10.0
        self._cumulative_rewards[mover] = 0.0
        self.rewards = {agent: float(self._random.integers(-2, 3)) for agent in self.agents}
        self._accumulate_rewards()
        self.given.update(self.rewards)
        ends = self.terminations if self._random.random() < 0.7 else self.truncations
        alive = [agent for agent in self.agents if not (self.terminations[agent] or self.truncations[agent])]
        if self._n >= 25:
            ends.update(dict.fromkeys(alive, True))
        elif self._dies != "never" and self._random.random() < 0.15:
            ends[self._next(alive)] = True
        alive = [agent for agent in alive if not ends[agent]]
        self.agent_selection = self._next(alive if self._dies != "later" and alive else self.agents)
        if self._dies != "later":
            self._deads_step_first()
