"""Environments of several agents in a pool: one coroutine that answers for all, or one for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.agent_selector import AgentSelector
from pettingzoo.utils.conversions import turn_based_aec_to_parallel

from envmanager import AsyncioEnvManager, EnvManager, LostEpisode, SimpleEnvManager, SubprocessEnvManager, UsageError
from envmanager.adapters.together import Together
from envmanager_tests.process.test_pool import ALWAYS, run

SUITE = "waiting portable"


class Debate(ParallelEnv[Any, Any, Any]):
    """Two agents say a number at once. Each gets the difference to the other's. ``con`` leaves after ``n`` steps."""

    metadata = {"name": "debate"}
    possible_agents = ["pro", "con"]

    def observation_space(self, agent: Any) -> Any:
        return spaces.Discrete(100)

    action_space = observation_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.n_steps, self.n = list(self.possible_agents), 0, (options or {}).get("n", 2)
        return dict.fromkeys(self.agents, f"begin {self.n}"), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        if "dies" in actions.values():
            raise ValueError("it is broken")
        self.n_steps += 1
        played, self.agents = self.agents, [*self.agents]
        said = sum(actions.values())
        if self.n_steps >= self.n:
            self.agents = ["pro"] if self.n_steps == self.n else []
        gone = {agent: agent not in self.agents for agent in played}
        rewards = {agent: 2 * actions[agent] - said for agent in played}
        return dict.fromkeys(played, actions), rewards, gone, dict.fromkeys(played, False), {a: {} for a in played}


class Count(AECEnv[Any, Any, Any]):
    """Two agents count in turns to five. The one who says it wins."""

    metadata = {"name": "count", "is_parallelizable": True}
    possible_agents = ["a", "b"]
    render_mode = None

    def observation_space(self, agent: Any) -> Any:
        return spaces.Discrete(10)

    action_space = observation_space

    def observe(self, agent: Any) -> Any:
        return self.count

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.count = list(self.possible_agents), 0
        for name, value in (
            ("rewards", 0),
            ("terminations", False),
            ("truncations", False),
            ("_cumulative_rewards", 0),
        ):
            setattr(self, name, dict.fromkeys(self.agents, value))
        self.infos = {agent: {} for agent in self.agents}
        self._selector = AgentSelector(self.agents)
        self.agent_selection = self._selector.next()

    def step(self, action: Any) -> Any:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self.count += int(action)
        if self.count >= 5:
            self.terminations = dict.fromkeys(self.agents, True)
            self.rewards = {agent: 1 if agent == self.agent_selection else -1 for agent in self.agents}
        self.agent_selection = self._selector.next()
        self._accumulate_rewards()


def debate() -> Any:
    return Together(Debate())


def count() -> Any:
    return Together(turn_based_aec_to_parallel(Count()))


def in_process(make: Callable[[], Any]) -> EnvManager:
    return SimpleEnvManager(make, 2, restarts=ALWAYS)


def in_processes(make: Callable[[], Any]) -> EnvManager:
    return SubprocessEnvManager(make, 2, restarts=ALWAYS)


def in_threads(make: Callable[[], Any]) -> EnvManager:
    return AsyncioEnvManager(make, 2, restarts=ALWAYS)


KINDS = pytest.mark.parametrize("kind", [in_process, in_processes, in_threads])


@KINDS
def test_one_coroutine_answers_for_all_agents(kind: Any) -> None:
    async def test(pool: Any) -> None:
        async with pool.begin({"n": 2}) as episode:
            assert episode.obs == {"pro": "begin 2", "con": "begin 2"}
            obs, reward, terminated, truncated, info = await episode.step({"pro": 3, "con": 1})
            assert obs == {agent: {"pro": 3, "con": 1} for agent in ("pro", "con")}
            assert (reward, terminated, truncated) == (0.0, False, False)
            assert info["rewards"] == {"pro": 2, "con": -2}
            obs, *_, info = await episode.step({"pro": 1, "con": 1})
            assert (obs.keys(), info["terminated"]) == ({"pro"}, {"pro": False, "con": True})
            *_, terminated, _, info = await episode.step({"pro": 9})
            assert (terminated, info["rewards"], episode.is_over) == (True, {"pro": 9}, True)

    with kind(debate) as manager:
        run(test(manager.pool()))


@KINDS
def test_a_coroutine_for_each_agent_sees_its_own_turns_and_rewards(kind: Any) -> None:
    async def speaker(player: Any) -> Any:
        seen = []
        async for obs in player:
            seen.append(obs)
            await player.act(5 if player.agent == "pro" else 2)
        return seen, player.total

    async def agent(episode: Any) -> Any:
        return await episode.play_each({"pro": speaker, "con": speaker})

    async def test(pool: Any) -> list[Any]:
        return [result.value async for result in pool.play([{"n": 2}] * 6, agent)]

    with kind(debate) as manager:
        values = run(test(manager.pool()))
    both, last = {"pro": 5, "con": 2}, {"pro": 5, "con": 2}
    assert values == [{"pro": (["begin 2", both, last], 3 + 3 + 5), "con": (["begin 2", both], -6)}] * 6


def test_in_a_game_of_turns_the_agent_acts_whose_turn_it_is() -> None:
    async def counter(player: Any) -> Any:
        seen = []
        async for obs in player:
            seen.append(int(obs))
            await player.act(np.int64(1))
        return seen, player.total

    async def test(pool: Any) -> Any:
        async with pool.begin() as episode:
            with pytest.raises(LostEpisode, match="are to act"):
                await episode.step({"b": 1})
        async with pool.begin() as episode:
            return await episode.play_each({"a": counter, "b": counter})

    with in_threads(count) as manager:
        assert run(test(manager.pool())) == {"a": ([0, 2, 4], 1.0), "b": ([1, 3], -1.0)}


def test_an_error_of_one_player_ends_the_others_and_one_that_stops_is_told() -> None:
    async def patient(player: Any) -> None:
        async for _ in player:
            await player.act(1)

    async def wrong(player: Any) -> None:
        raise KeyError("of a player")

    async def gone(player: Any) -> None:
        async for _ in player:
            await player.act(1)
            return

    async def broken(player: Any) -> None:
        async for _ in player:
            await player.act("dies")

    async def twice(player: Any) -> None:
        async for _ in player:
            first = asyncio.ensure_future(player.act(1))
            await asyncio.sleep(0)
            try:
                await player.act(1)
            finally:
                first.cancel()
                await asyncio.wait([first])

    async def test(pool: Any) -> None:
        for con, error, text in (
            (wrong, KeyError, "of a player"),
            (gone, UsageError, "'con'"),
            (broken, LostEpisode, "it is broken"),
            (twice, UsageError, "once in each"),
        ):
            async with pool.begin() as episode:
                with pytest.raises(error, match=text):
                    await episode.play_each({"pro": patient, "con": con})
        async with pool.begin() as episode:
            with pytest.raises(UsageError, match="'con'"):
                await episode.play_each({"pro": patient})

    with in_threads(debate) as manager:
        run(test(manager.pool()))
