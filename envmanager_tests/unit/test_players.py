"""The players of an episode, when its next observations are there before the step has returned to who took it."""

from __future__ import annotations

import asyncio
from typing import Any

from envmanager.kernel.players import Player, Table

LENGTH = 3


class Early:
    """An episode of two agents in turns, whose observations change while a step is awaited."""

    def __init__(self) -> None:
        self.obs, self.is_over, self.n_steps, self.is_stepping = {"a": 0}, False, 0, False
        self.told = asyncio.Event()

    async def step(self, actions: Any) -> Any:
        assert not self.is_stepping
        self.is_stepping = True
        assert actions.keys() == self.obs.keys()
        self.n_steps += 1
        self.obs, self.is_over = {"ab"[self.n_steps % 2]: self.n_steps}, self.n_steps == LENGTH
        self.told.set()
        for _ in range(5):
            await asyncio.sleep(0)
        self.is_stepping = False
        return None, 1.0, self.is_over, False, {"rewards": {"a": 1.0, "b": 10.0}}


def test_a_player_neither_acts_nor_ends_before_the_step_has_been_taken() -> None:
    async def player(own: Player) -> tuple[list[int], float]:
        seen = []
        if own.agent == "b":
            await own.episode.told.wait()
        async for obs in own:
            seen.append(obs)
            await own.act(obs)
        return seen, own.total

    async def play() -> Any:
        return await Table(Early(), {"a": player, "b": player}).play()

    assert asyncio.run(play()) == {"a": ([0, 2], 3.0), "b": ([1], 30.0)}
