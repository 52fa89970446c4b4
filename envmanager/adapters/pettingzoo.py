"""Adapter for PettingZoo's ParallelEnv and AECEnv, environments with a changing set of agents.

The rule: an agent that acted always has a row with the result of its action, even in a step in which it leaves or a new
episode begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.adapters.names import base_names
from envmanager.adapters.resets import Resetter
from envmanager.adapters.rows import RowReader, check_info, flag, groups_of_equals, real_number, stack_rows
from envmanager.adapters.spaces import behavior_spec, row_reader
from envmanager.adapters.turns import Turns
from envmanager.data.casting import Casting
from envmanager.data.specs import BehaviorSpec, BehaviorSpecs, SpecMismatch, describe_value
from envmanager.data.steps import AgentSteps, Steps
from envmanager.data.trees import Tree, concat_rows, snapshot, take_rows
from envmanager.environment import Environment

Agent = Any
"""Name of an agent in PettingZoo, nearly always a str."""


class ParallelEnvironment(Environment):
    """A PettingZoo ParallelEnv or AECEnv as an Environment. Agents with equal spaces form one behavior.

    A single behavior is called ``"default"``. Several behaviors are named after their agents, without numbers
    (``speaker_0`` → ``"speaker"``; see ``name_behaviors``). ``behavior_of``, a mapping or function from agent name to
    behavior, replaces this grouping. An environment without ``possible_agents`` has the behaviors of the agents that
    have appeared so far.

    In an AECEnv a step is the move of one agent: all agents have rows, but only the agent whose turn it is needs an
    action; see ``Turns``. The same holds for a ParallelEnv that PettingZoo's ``turn_based_aec_to_parallel`` made. If an
    agent joins in the reset after an episode, its ``info`` comes from that reset.
    """

    can_rest = True

    def __init__(self, env: Any, behavior_of: Mapping[Agent, str] | Callable[[Agent], str] | None = None) -> None:
        self._env = env = turns_of(env)
        self._reset = Resetter(env)
        self.casting: Casting = Casting()
        self._behavior_of = behavior_of.__getitem__ if isinstance(behavior_of, Mapping) else behavior_of
        self._behaviors: dict[Agent, str] = {}
        self._read_action: dict[Agent, RowReader] = {}
        self._specs: dict[str, BehaviorSpec] = {}
        possible = list(getattr(env, "possible_agents", None) or ())
        self._numbers: dict[Agent, int] = {agent: number for number, agent in enumerate(possible)}
        """Numbers of the agents: by ``possible_agents``, so that they do not depend on earlier episodes."""
        self._playing: list[Agent] = []
        self._acting: dict[str, list[Agent]] = {}
        self._game = game_of_turns(env)
        self._options: dict[str, Any] | None = None
        self._know_all(possible)

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return dict(self._specs)

    @property
    def max_agents(self) -> Mapping[str, int]:
        return Counter(self._behaviors.values())

    @property
    def wrapped(self) -> Any:
        return self._env

    @property
    def subject(self) -> Any:
        return self._env.env if isinstance(self._env, Turns) else self._env

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self._options = None if options is None else dict(options)
        return self._as_steps([], self._begin(seeds[0]))

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        return self.steps_of(self._env.step(self.action_of(actions)))

    def action_of(self, actions: Mapping[str, Tree]) -> dict[Agent, Any]:
        return {
            agent: self._read_action[agent](actions[behavior], row)
            for behavior, agents in self._acting.items()
            for row, agent in enumerate(agents)
        }

    def steps_of(self, result: Any) -> Steps:
        if not isinstance(result, tuple) or len(result) != 5:
            what = "a tuple of 5 dicts (obs, reward, terminated, truncated, info)"
            raise SpecMismatch("the result of step", what, describe_value(result))
        outcome = _Outcome(*result)
        alive = list(self._env.agents)
        rows = [outcome.row(agent, self.casting) for agent in self._playing]
        for row in rows:
            if row.agent not in alive and not row.ended:
                raise SpecMismatch(f"terminated or truncated of agent {row.agent!r}", "true, as it left", "false")
            if row.ended:
                row.final_obs = self._stacked([row], [row.obs])
        if all(row.ended for row in rows) and set(alive) <= set(self._playing):
            for row in rows:  # the reset may change what the environment has returned
                row.obs, row.info = take_rows(row.final_obs, 0), snapshot(row.info)
            return self._as_steps(rows, [] if self.rests else self._begin(None))
        for row in rows:
            # An agent that ended but is still listed plays on, so its last observation also begins its next episode.
            row.next_obs = row.obs if row.agent in alive else None
        joined = [outcome.joined(agent) for agent in alive if agent not in self._playing]
        return self._as_steps(rows, joined)

    def close(self) -> None:
        self._env.close()

    def _begin(self, seed: int | None) -> list[_Row]:
        """Reset the environment and return one row per agent. Raises SpecMismatch for a malformed result."""
        result = self._reset(self._env, seed=seed, options=None if self._options is None else dict(self._options))
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpecMismatch("the result of reset", "a tuple of 2 dicts (obs, info)", describe_value(result))
        if not self._env.agents:
            raise SpecMismatch("the agents after reset", "at least one", "none")
        outcome = _Outcome(result[0], {}, {}, {}, result[1])
        return [outcome.joined(agent) for agent in self._env.agents]

    def _as_steps(self, rows: list[_Row], joined: list[_Row]) -> Steps:
        """Return Steps with one row per agent that played or joined. Record which agents play and act next."""
        known = {row.agent: row for row in rows}
        for new in joined:
            old = known.setdefault(new.agent, new)
            if old is not new:
                old.next_obs, old.reset_info = new.obs, new.info
        self._know_all(known)
        for agent in known:
            self._numbers.setdefault(agent, len(self._numbers))
        groups: dict[str, list[_Row]] = {}
        for agent, row in known.items():
            groups.setdefault(self._behaviors[agent], []).append(row)
        self._playing = [row.agent for group in groups.values() for row in group if row.next_obs is not None]
        turn = None if self._game is None else self._game.agent_selection
        for row in known.values():
            row.acts = row.next_obs is not None and (self._game is None or row.agent == turn)
        self._acting = {behavior: [row.agent for row in group if row.acts] for behavior, group in groups.items()}
        return {behavior: self._stack(group) for behavior, group in groups.items()}

    def _stack(self, rows: list[_Row]) -> AgentSteps:
        ended = [row for row in rows if row.ended]
        acting = np.array([row.acts for row in rows])
        seen = [row.obs if row.next_obs is None else row.next_obs for row in rows]
        return AgentSteps.stepped(
            agent_id=np.array([self._numbers[row.agent] for row in rows], np.int64),
            obs=self._stacked(rows, seen),
            reward=np.array([row.reward for row in rows], np.float32),
            terminated=np.array([row.terminated for row in rows], np.bool_),
            truncated=np.array([row.truncated for row in rows], np.bool_),
            final_obs=concat_rows([row.final_obs for row in ended]) if ended else None,
            acting=None if acting.all() else acting,
            info=[row.info for row in rows],
            reset_info=[row.reset_info for row in ended] if ended else None,
        )

    def _stacked(self, rows: list[_Row], observations: list[Any]) -> Tree:
        """Stack the observations of the agents of ``rows``, all of one behavior. Raises SpecMismatch for a bad one."""
        spec = self._specs[self._behaviors[rows[0].agent]].observation
        return stack_rows(spec, observations, [f"obs of agent {row.agent!r}" for row in rows], self.casting)

    def _know_all(self, agents: Iterable[Agent]) -> None:
        """Assign each new agent to a behavior. Raises SpecMismatch if agents of one behavior have unequal specs."""
        env = self._env
        new = {
            agent: (env.observation_space(agent), env.action_space(agent))
            for agent in agents
            if agent not in self._behaviors
        }
        if not new:
            return
        specs = {agent: behavior_spec(*spaces) for agent, spaces in new.items()}
        for agent, behavior in self._named(specs).items():
            known = self._specs.setdefault(behavior, specs[agent])
            if known != specs[agent]:
                raise SpecMismatch(f"agent {agent!r} of behavior {behavior!r}", str(known), str(specs[agent]))
            self._behaviors[agent], self._read_action[agent] = behavior, row_reader(new[agent][1])

    def _named(self, specs: Mapping[Agent, BehaviorSpec]) -> dict[Agent, str]:
        if self._behavior_of is not None:
            return {agent: self._behavior_of(agent) for agent in specs}
        if not self._specs:
            return name_behaviors(specs)
        known = self._specs.items()
        new = {agent: str(agent) if prefix(agent) in self._specs else prefix(agent) for agent in specs}
        return {agent: next((name for name, own in known if own == specs[agent]), new[agent]) for agent in specs}


def name_behaviors(specs: Mapping[Agent, BehaviorSpec]) -> dict[Agent, str]:
    """Return the name of each agent's behavior, by agent. Agents with equal specs share a behavior.

    A single behavior is ``"default"``. Otherwise a behavior is named after the prefixes of its agents, sorted and
    joined by ``+``. Behaviors that would share a name are instead named after their first agents. If some names are
    still equal, every behavior is named after its first agent.
    """
    groups = groups_of_equals(specs, lambda one, other: specs[one] == specs[other])
    if len(groups) == 1:
        return dict.fromkeys(groups[0], "default")
    by_prefix = ["+".join(sorted({prefix(agent) for agent in group})) for group in groups]
    by_first = [str(group[0]) for group in groups]
    names = [name if by_prefix.count(name) == 1 else first for name, first in zip(by_prefix, by_first, strict=True)]
    if len(set(names)) < len(names):
        names = by_first
    return {agent: name for name, group in zip(names, groups, strict=True) for agent in group}


_OF_TURNS = "turn_based_aec_to_parallel_wrapper"
_MOST_WRAPPERS = 32


def turns_of(env: Any) -> Any:
    """Return an AECEnv as Turns, and any other environment unchanged."""
    return Turns(env) if "pettingzoo.utils.env.AECEnv" in base_names(env) else env


def game_of_turns(env: Any) -> Any:
    """Return the AECEnv inside ``env`` if Turns or ``turn_based_aec_to_parallel`` converted it, else None."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(env, Turns):
            return env.env
        if any(cls.__name__ == _OF_TURNS for cls in type(env).__mro__):
            return env.aec_env
        env = getattr(env, "__dict__", {}).get("env")
    return None


def prefix(agent: Agent) -> str:
    """Return the agent's name without its number: ``"speaker_0"`` → ``"speaker"``."""
    name = str(agent)
    stem, _, number = name.rpartition("_")
    return stem if stem and number.isdecimal() else name


@attrs.define
class _Row:
    """One agent's row of a step. ``next_obs`` is the observation to act on next, or None if the agent leaves."""

    agent: Agent
    obs: Any
    next_obs: Any
    info: dict[str, Any]
    final_obs: Tree = None
    """The last observation of an agent that ended, as arrays of one row."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    reset_info: dict[str, Any] = attrs.field(factory=dict)
    acts: bool = True

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


@attrs.define
class _Outcome:
    """The result of a step or a reset, in five dicts by agent. After a reset only ``obs`` and ``info`` have entries."""

    obs: Mapping[Agent, Any]
    reward: Mapping[Agent, Any]
    terminated: Mapping[Agent, Any]
    truncated: Mapping[Agent, Any]
    info: Mapping[Agent, Any]

    def row(self, agent: Agent, casting: Casting) -> _Row:
        """Return the row of an agent that played, with ``next_obs`` None. Raises SpecMismatch for an invalid entry."""
        return _Row(
            agent,
            _entry(self.obs, "obs", agent),
            None,
            self._info(agent),
            None,
            real_number(_entry(self.reward, "reward", agent), f"reward of agent {agent!r}", casting),
            flag(_entry(self.terminated, "terminated", agent), f"terminated of agent {agent!r}", casting),
            flag(_entry(self.truncated, "truncated", agent), f"truncated of agent {agent!r}", casting),
        )

    def joined(self, agent: Agent) -> _Row:
        """Return the row of an agent that joins, with its first observation, its first info, and reward 0."""
        obs = _entry(self.obs, "obs", agent)
        return _Row(agent, obs, obs, self._info(agent))

    def _info(self, agent: Agent) -> dict[str, Any]:
        if not isinstance(self.info, Mapping):
            raise SpecMismatch("info of the agents", "a dict by agent", describe_value(self.info))
        info: dict[str, Any] = self.info.get(agent, {})
        check_info(info, f"info of agent {agent!r}")
        return info


def _entry(entries: Any, what: str, agent: Agent) -> Any:
    if not isinstance(entries, Mapping):
        raise SpecMismatch(f"{what} of the agents", "a dict by agent", describe_value(entries))
    try:
        return entries[agent]
    except KeyError:
        raise SpecMismatch(
            f"{what} of agent {agent!r}", "there", f"missing (there are {sorted(map(str, entries))})"
        ) from None
