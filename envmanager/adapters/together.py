"""An environment of several agents as one of a single agent, whose observations and actions are mappings by agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envmanager.adapters.names import base_names
from envmanager.adapters.pettingzoo import game_of_turns, turns_of
from envmanager.adapters.resets import Resetter
from envmanager.adapters.texts import Game, Texts
from envmanager.errors import UsageError


class Together(Texts):
    """A wrapper of a PettingZoo environment or a game of TextArena, for managers of all kinds and their pools.

    An observation has what each agent sees that is to act next, and an action what each of them does, both by agent. In
    games of turns that is one agent. The reward is the sum over all; ``info`` has ``rewards``, ``terminated`` and
    ``truncated`` by agent, of those that have got one, and their ``infos``. The episode ends when no agent is left.
    """

    def __init__(self, env: Any) -> None:
        self._is_text = "textarena.core.Env" in base_names(env)
        super().__init__(Game(env) if self._is_text else turns_of(env))
        self._reset = Resetter(self.env)
        self._turns = None if self._is_text else game_of_turns(self.env)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Begin an episode. Return what the agents see that act first."""
        obs, infos = self._reset(self.env, seed=seed, options=options)
        return self._seen(obs), {} if self._is_text else {"infos": infos}

    def step(self, actions: Mapping[Any, Any]) -> Any:
        """Let the agents act that are to. A list stands for an array. Raises UsageError for actions of others."""
        if actions.keys() != self._asked:
            raise UsageError(f"the agents {sorted(self._asked, key=str)} are to act, not {sorted(actions, key=str)}.")
        if self._is_text:
            ((player, move),) = actions.items()
            obs, reward, is_over, _, info = self.env.step(move)
            rewards = info.get("rewards") or {player: reward}
            ends = dict.fromkeys(rewards, is_over), dict.fromkeys(rewards, False)
        else:
            given = {agent: np.asarray(each) if isinstance(each, list) else each for agent, each in actions.items()}
            obs, rewards, *ends, infos = self.env.step(given)
            info, is_over = {"infos": infos}, not self.env.agents
        terminated, truncated = ends
        info = {**info, "rewards": dict(rewards), "terminated": terminated, "truncated": truncated}
        is_cut = is_over and any(truncated.values()) and not any(terminated.values())
        return self._seen(obs), float(sum(rewards.values())), is_over and not is_cut, is_cut, info

    def _seen(self, obs: Any) -> dict[Any, Any]:
        if self._is_text:
            seen = dict([obs])
        elif self._turns is not None and self.env.agents:
            seen = {agent: each for agent, each in obs.items() if agent == self._turns.agent_selection}
        else:
            seen = {agent: obs[agent] for agent in self.env.agents or obs}
        self._asked = seen.keys()
        return seen

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def if_several(env: Any) -> Any:
    """Return a PettingZoo environment wrapped in Together, and any other environment unchanged. A wrapper too."""
    names = {"pettingzoo.utils.env.ParallelEnv", "pettingzoo.utils.env.AECEnv"}
    return env if names.isdisjoint(base_names(env)) else Together(env)
