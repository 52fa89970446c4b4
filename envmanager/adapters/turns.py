"""PettingZoo's AECEnv, whose agents move in turns, with the methods of a ParallelEnv: a step is the move of one agent.

::

    step({agent: action}) ──▶ aec.step(action) ──▶ last() of each agent that died, step(None) ──▶ last() of the next
                                                   row of its end                                 row that acts

The rule: what an agent gets is what ``last()`` returns when it is selected, as in a loop over ``agent_iter()``. Rewards
from the turns of others have been added up by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envmanager.adapters.resets import Resetter
from envmanager.data.specs import ACTION_MASK, SpecMismatch, describe_value
from envmanager.data.trees import snapshot


class Turns:
    """An AECEnv whose ``reset`` and ``step`` are those of a ParallelEnv. Only ``agent_selection`` acts.

    Results have all agents that live. An agent that waits has its present observation and reward 0; its reward comes
    when it is next to move, or with its end. Agents that have died are removed by ``step(None)`` in the same step.

    ``mask_from_info``: whether the action masks are in the infos, as in shimmy's games of OpenSpiel. Observations are
    then ``{"observation": …, "action_mask": …}``, so that policies and trainers obey the masks.
    """

    def __init__(self, env: Any, *, mask_from_info: bool = False) -> None:
        self.env = env
        self._mask_from_info = mask_from_info
        self._reset = Resetter(env)

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def observation_space(self, agent: Any) -> Any:
        """Return the observation space of ``agent``. With ``mask_from_info`` it has the mask too."""
        space = self.env.observation_space(agent)
        if not self._mask_from_info:
            return space
        from gymnasium import spaces

        n_choices = getattr(self.env.action_space(agent), "n", None)
        if n_choices is None:
            raise SpecMismatch(f"the action space of agent {agent!r}", "Discrete, with mask_from_info", "another")
        return spaces.Dict({"observation": space, ACTION_MASK: spaces.Box(0, 1, (int(n_choices),), np.int8)})

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Begin an episode. Return the observations and infos of the agents that live."""
        self._reset(self.env, seed=seed, options=options)
        obs, *_, infos = self._told(())
        return {agent: obs[agent] for agent in self.env.agents}, infos

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Let the agent move whose turn it is. Return five dicts by agent: all that lived before or live now."""
        before = list(self.env.agents)
        self.env.step(actions[self.env.agent_selection])
        return self._told(before)

    def _told(self, before: Any) -> tuple[dict[Any, Any], ...]:
        """Remove the agents that have died. Return what they and the next to move are told, and the others see."""
        env, told = self.env, dict[Any, tuple[Any, ...]]()
        while env.agents:
            agent, n_agents = env.agent_selection, len(env.agents)
            if agent not in env.agents:
                raise SpecMismatch("agent_selection", f"one of the agents {list(env.agents)}", repr(agent))
            obs, *rest = env.last()
            told[agent] = (self._observed(agent, obs, rest[-1]), *rest)
            if not (told[agent][2] or told[agent][3]):
                break
            env.step(None)
            if len(env.agents) >= n_agents:
                what = f"the agents after step(None) of agent {agent!r}, which has ended"
                raise SpecMismatch(what, f"{n_agents - 1}", f"{len(env.agents)}; call _was_dead_step(action) in step()")
        for agent in dict.fromkeys([*env.agents, *before]):
            if agent not in told:
                told[agent] = self._told_without_turn(agent)
        return tuple({agent: entry[part] for agent, entry in told.items()} for part in range(5))

    def _told_without_turn(self, agent: Any) -> tuple[Any, ...]:
        """Return what an agent sees that waits, or the end of one that the environment has removed by itself."""
        env, reward, ends = self.env, 0.0, [False, False]
        if agent not in env.agents:
            reward = env._cumulative_rewards.get(agent, 0.0)
            ends = [flags.get(agent, False) for flags in (env.terminations, env.truncations)]
            if not any(ends):
                raise SpecMismatch(f"terminated or truncated of agent {agent!r}", "true, as it left", "false")
        obs, info = env.observe(agent), env.infos.get(agent, {})
        return self._observed(agent, obs, info), reward, *ends, info

    def _observed(self, agent: Any, obs: Any, info: Any) -> Any:
        """Return a copy of ``obs``, because the environment may reuse its arrays for the next agent."""
        if self._mask_from_info:
            n_choices = int(self.env.action_space(agent).n)
            mask = info.get(ACTION_MASK) if isinstance(info, Mapping) else None
            allowed = np.ones(n_choices, np.int8) if mask is None else np.asarray(mask)
            if allowed.shape != (n_choices,):
                path = f"info[{ACTION_MASK!r}] of agent {agent!r}"
                raise SpecMismatch(path, f"{n_choices} numbers", describe_value(mask))
            obs = {"observation": obs, ACTION_MASK: (allowed != 0).astype(np.int8)}
        return snapshot(obs)
