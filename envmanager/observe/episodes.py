"""Counts while a manager runs: environment steps, episodes and their returns.

An episode that was cut because its worker failed has no return: it is counted as lost and not as an episode.

This runs once per StepInfo, tens of thousands of times a second, so it is as cheap as it can be: who the rows of a
worker belong to is looked up once and remembered until its agents change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from envmanager.data.steps import AGENT_BITS, AgentSteps, StepInfo

RECENT = 100
"""Over how many of the last episodes the running mean is taken."""


@attrs.frozen
class _RowOwners:
    """Who the rows of one worker's StepInfo belong to."""

    agent_ids: tuple[tuple[str, bytes], ...]
    places: tuple[np.ndarray, ...]  # per behavior, where each row's running return is kept
    n_envs: int


@attrs.define
class Episodes:
    """What has happened so far. ``returns`` maps each agent_id to the returns of its episodes, in order.

    ``count``: episodes that ended; ``lost``: those that were cut because their worker failed. ``on_end`` is called with
    the behavior, the agent_id and the return of each that ends. Without ``keeps_returns``, ``returns`` stays empty, and
    a billion episodes, or agents one after the other, take no more memory than those who play.
    """

    on_end: Callable[[str, int, float], Any] | None = None
    keeps_returns: bool = True
    env_steps: int = 0
    worker_steps: int = 0
    count: int = 0
    lost: int = 0
    returns: dict[int, list[float]] = attrs.field(factory=dict)
    recent: deque[float] = attrs.field(factory=lambda: deque(maxlen=RECENT))
    _place_of: dict[int, int] = attrs.field(factory=dict, init=False)
    _agent_at: list[int] = attrs.field(factory=list, init=False)
    _free: list[int] = attrs.field(factory=list, init=False)
    _running: np.ndarray = attrs.field(factory=lambda: np.zeros(64), init=False)
    _owners_of: dict[int, _RowOwners] = attrs.field(factory=dict, init=False)

    def add(self, info: StepInfo) -> None:
        """Count one StepInfo; one without a step taken (after a reset or a loss) begins episodes instead."""
        owners = self._owners(info)
        if info.previous is None or info.lost is not None:
            self.lost += sum(int(np.count_nonzero(steps.truncated)) for steps in info.current.values())
            for places in owners.places:
                self._running[places] = 0.0
            return
        self.worker_steps += 1
        self.env_steps += owners.n_envs
        for places, (behavior, steps) in zip(owners.places, info.current.items(), strict=True):
            self._running[places] += steps.reward
            ended = steps.terminated | steps.truncated
            if np.count_nonzero(ended):  # cheaper than any()
                self._end_episodes(behavior, places[ended])

    def mean_of_recent(self) -> float:
        """The mean return of the last episodes; NaN before the first has ended."""
        return sum(self.recent) / len(self.recent) if self.recent else math.nan

    def all_returns(self) -> list[float]:
        """The returns of all episodes, agent by agent."""
        return [value for values in self.returns.values() for value in values]

    def returns_by_env(self) -> dict[str, list[float]]:
        """The returns per environment, ``{"0": […]}``; where it has several agents, per agent, ``{"0/0": […], …}``."""
        agents_of: dict[int, list[int]] = {}
        for agent_id in sorted(self.returns):
            agents_of.setdefault(agent_id >> AGENT_BITS, []).append(agent_id)
        named = {}
        for env_id, agents in agents_of.items():
            for agent_id in agents:
                name = str(env_id) if len(agents) == 1 else f"{env_id}/{agent_id & (1 << AGENT_BITS) - 1}"
                named[name] = self.returns[agent_id]
        return named

    def _end_episodes(self, behavior: str, places: np.ndarray) -> None:
        for place, value in zip(places.tolist(), self._running[places].tolist(), strict=True):
            agent_id = self._agent_at[place]
            if self.keeps_returns:
                self.returns[agent_id].append(value)
            self.recent.append(value)
            if self.on_end is not None:
                self.on_end(behavior, agent_id, value)
        self.count += len(places)
        self._running[places] = 0.0

    def _owners(self, info: StepInfo) -> _RowOwners:
        agent_ids = tuple([(behavior, steps.agent_id.tobytes()) for behavior, steps in info.current.items()])
        owners = self._owners_of.get(info.worker_id)
        if owners is None or owners.agent_ids != agent_ids:
            new = self._look_up(info, agent_ids)
            if owners is not None:
                self._forget_those_who_left(owners, new)
            owners = self._owners_of[info.worker_id] = new
        return owners

    def _look_up(self, info: StepInfo, agent_ids: tuple[tuple[str, bytes], ...]) -> _RowOwners:
        current = list(info.current.values())
        env_ids = {env_id for steps in current for env_id in steps.env_id.tolist()}
        return _RowOwners(agent_ids, tuple(self._places(steps) for steps in current), len(env_ids))

    def _places(self, steps: AgentSteps) -> np.ndarray:
        places = []
        for agent_id in steps.agent_id.tolist():
            place = self._place_of.get(agent_id)
            if place is None:
                place = self._place_of[agent_id] = self._new_place(agent_id)
                if self.keeps_returns:
                    self.returns.setdefault(agent_id, [])
            places.append(place)
        return np.array(places, dtype=np.intp)

    def _new_place(self, agent_id: int) -> int:
        if self._free:
            place = self._free.pop()
            self._agent_at[place] = agent_id
            return place
        self._agent_at.append(agent_id)
        if len(self._agent_at) > len(self._running):
            self._running = np.append(self._running, np.zeros(len(self._agent_at)))
        return len(self._agent_at) - 1

    def _forget_those_who_left(self, before: _RowOwners, now: _RowOwners) -> None:
        """Others may have the places of agents that are not there any more, once there is no return to remember."""
        left = set().union(*(places.tolist() for places in before.places))
        for place in left.difference(*(places.tolist() for places in now.places)):
            if self._running[place] == 0.0:
                del self._place_of[self._agent_at[place]]
                self._free.append(place)
