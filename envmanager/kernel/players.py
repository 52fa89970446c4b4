"""The agents of one episode of a pool, each in a coroutine of its own: ``Episode.play_each``.

::

    async for obs in player ── act ──┐
                                     ├── all that are to act have ──▶ episode.step({agent: action, …}) ──▶ next turns
    async for obs in player ── act ──┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from envmanager.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self


class Player:
    """One agent of an episode: ``async for obs in player`` gives its turns, until the episode is over."""

    def __init__(self, agent: Any, episode: Any, table: Table) -> None:
        self.agent, self.episode = agent, episode
        self.total = 0.0
        """Sum of its rewards so far."""
        self._table = table

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        table = self._table
        while not table.is_over and (self.agent not in table.obs or self.agent in table.actions):
            await table.stepped.wait()
        if table.is_over:
            raise StopAsyncIteration
        return table.obs[self.agent]

    async def act(self, action: Any) -> None:
        """Act, and wait until the others have that are to act now, and the environment has taken the step."""
        table = self._table
        if self.agent not in table.obs or self.agent in table.actions:
            raise UsageError(f"agent {self.agent!r} acts once in each of its turns: `async for obs in player`.")
        table.actions[self.agent] = action
        if table.actions.keys() >= table.obs.keys():
            await table.step()
        else:
            await table.stepped.wait()


class Table:
    """The players of one episode, and their actions in the present turn."""

    def __init__(self, episode: Any, agents: Mapping[Any, Callable[[Player], Awaitable[Any]]]) -> None:
        self.obs, self.is_over = episode.obs, episode.is_over
        """What is seen in the present turn. The episode has what comes next before all players know that they acted."""
        self.actions: dict[Any, Any] = {}
        self.stepped = asyncio.Event()
        """Is set when the present step has been taken."""
        self._episode, self._agents = episode, agents
        self._players = {agent: Player(agent, episode, self) for agent in agents}

    async def step(self) -> None:
        """Take the step, and give each player its reward."""
        episode = self._episode
        *_, info = await episode.step(self.actions)
        for agent, reward in info.get("rewards", {}).items():
            if agent in self._players:
                self._players[agent].total += float(reward)
        self.obs, self.is_over = episode.obs, episode.is_over
        stepped, self.stepped, self.actions = self.stepped, asyncio.Event(), {}
        stepped.set()

    async def play(self) -> dict[Any, Any]:
        """Run all coroutines until they have returned. Return what each has returned, by agent."""
        tasks = dict[Any, asyncio.Future[Any]]()
        for agent, player in self._players.items():
            tasks[agent] = asyncio.ensure_future(self._agents[agent](player))
        try:
            while True:
                left = {agent for agent, task in tasks.items() if not task.done()}
                missing = set() if self.is_over else self.obs.keys() - left - self.actions.keys()
                for task in tasks.values():
                    if task.done():
                        task.result()
                if missing:
                    raise UsageError(f"the agents {sorted(missing, key=str)} are to act, but no coroutine plays them.")
                if not left:
                    return {agent: task.result() for agent, task in tasks.items()}
                await asyncio.wait([tasks[agent] for agent in left], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
