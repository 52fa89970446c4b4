"""Environments of texts that other libraries have registered, in workers of all kinds."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import numpy as np
import pytest

from envmanager import AsyncioEnvManager, SimpleEnvManager, SubprocessEnvManager, UsageError, make_manager
from envmanager.adapters.factories import resolve
from envmanager.adapters.together import Together

textarena = pytest.importorskip("textarena", reason="TextArena is not installed: make test-openenv")
gem = pytest.importorskip("gem")
reasoning_gym = pytest.importorskip("reasoning_gym")

KINDS = pytest.mark.parametrize("kind", [SimpleEnvManager, SubprocessEnvManager, AsyncioEnvManager])
DRAW = [0, 1, 2, 4, 3, 5, 7, 6, 8]  # nobody has three in a row


@KINDS
def test_a_game_of_two_is_played_to_its_end_by_one_agent(kind: Any) -> None:
    with kind("textarena:TicTacToe-v0", 2, seed=1, infos=True) as manager:
        manager.reset()
        batch = manager.recv("all")
        first = batch.obs.tolist()
        for nth, cell in enumerate(DRAW):
            players = [obs[0] for obs in batch.obs]
            assert players == [nth % 2] * 2
            assert all(f"[{cell}]" in obs[1] for obs in batch.obs)
            manager.send([f"[{cell}]"] * 2, [0, 1])
            batch = manager.recv("all")
            assert batch.terminated.tolist() == [nth == 8] * 2
        assert batch.reward.tolist() == [0, 0]
        assert batch.info[0]["rewards"] == {0: 0, 1: 0}
        assert batch.obs.tolist() == first  # the next game, of which the last one says nothing
        for cell in (0, 3, 1, 4, 2):
            manager.send([f"[{cell}]"] * 2, [0, 1])
            batch = manager.recv("all")
        assert batch.reward.tolist() == [1, 1]
        assert batch.info[1]["rewards"] == {0: 1, 1: -1}


@KINDS
def test_games_and_the_number_of_players_may_be_tasks(kind: Any) -> None:
    with kind("textarena:LiarsDice-v0", 2, seed=1) as manager:
        manager.reset(tasks=[{"num_players": n} for n in (2, 3, 4, 5)])
        seen: dict[int, set[int]] = {}
        while not manager.tasks.done:
            batch = manager.recv()
            for obs, task in zip(batch.obs, batch.task.tolist(), strict=True):
                seen.setdefault(task, set()).add(obs[0])
            manager.send(["[Call]" if len(seen) % 2 else "no idea"] * len(batch), batch.env_ids)
        assert [result.terminated for result in manager.tasks.results] == [True] * 4
        assert all(max(players) < task + 2 for task, players in seen.items())
    with SimpleEnvManager("textarena:TicTacToe-v0", 1) as manager, pytest.raises(Exception, match="num_players"):
        manager.reset(options={"level": 3})


@KINDS
def test_environments_of_gem_are_taken_as_they_are(kind: Any) -> None:
    with kind("gem:game:GuessTheNumber-v0-easy", 2, seed=1, infos=True) as manager:
        manager.reset()
        batch = manager.recv("all")
        assert all("Guess The Number" in obs for obs in batch.obs)
        ended = np.zeros(2, bool)
        for number in range(1, 11):
            manager.send([f"\\boxed{{{number}}}"] * 2, [0, 1])
            batch = manager.recv("all")
            ended |= batch.terminated | batch.truncated
        assert ended.all()
        assert "suffix" in batch.info[0]


@KINDS
def test_a_data_set_of_reasoning_gym_is_a_list_of_tasks(kind: Any) -> None:
    dataset = reasoning_gym.create_dataset("chain_sum", size=20, seed=3)
    answers = {entry["question"]: entry["answer"] for entry in dataset}

    with kind("reasoning_gym:chain_sum", 4, seed=1, infos=True) as manager:
        manager.reset(tasks=dataset)
        while not manager.tasks.done:
            batch = manager.recv()
            acting = [env_id for env_id, ended in zip(batch.env_ids, batch.terminated, strict=True) if not ended]
            said = [
                answers[obs] if task % 2 else "no idea"
                for obs, task, ended in zip(batch.obs, batch.task, batch.terminated, strict=True)
                if not ended
            ]
            manager.send(said, acting)
        results = manager.tasks.results
    assert [result.total for result in results] == [k % 2 for k in range(20)]
    assert [result.task.options["question"] for result in results] == [*answers]


def test_questions_come_from_the_seed_without_tasks_and_repeat() -> None:
    seen = []
    for _ in range(2):
        with SimpleEnvManager("reasoning_gym:chain_sum", 3) as manager:
            manager.reset(seed=5)
            batch, asked = manager.recv("all"), []
            for _ in range(4):
                asked.append(batch.obs.tolist())
                manager.send(["0"] * 3, [0, 1, 2])
                batch = manager.recv("all")
                assert batch.terminated.all()
            seen.append(asked)
    assert seen[0] == seen[1]
    assert len({question for questions in seen[0] for question in questions}) > 8


def test_coroutines_play_games_from_a_config_with_arguments() -> None:
    config = {
        "kind": "asyncio",
        "n_envs": 3,
        "env": "reasoning_gym:chain_sum",
        "env_kwargs": {"min_terms": 2, "max_terms": 2},
    }

    async def answer(pool: Any, seed: int) -> float:
        async with pool.begin(seed) as episode:
            terms = episode.obs.partition(":")[2].removesuffix("=")
            _, reward, terminated, *_ = await episode.step(str(eval(terms)))
            assert terminated
            return reward

    async def all_answers(pool: Any) -> list[float]:
        return await asyncio.gather(*(answer(pool, seed) for seed in range(12)))

    with make_manager(config) as manager:
        assert asyncio.run(all_answers(manager.pool())) == [1.0] * 12


@KINDS
@pytest.mark.parametrize(
    "env", ["textarena:TicTacToe-v0", "gem:game:GuessTheNumber-v0-easy", "reasoning_gym:chain_sum"]
)
def test_they_are_closed_without_a_word(kind: Any, env: str, caplog: pytest.LogCaptureFixture) -> None:
    with kind(env, 2) as manager:
        manager.reset()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@KINDS
def test_the_rewards_of_all_players_are_in_the_info_of_an_episode_without_infos(kind: Any) -> None:
    async def play(pool: Any) -> dict[str, Any]:
        async with pool.begin(7) as episode:
            for number in range(9):
                if not episode.is_over:
                    await episode.step(f"[{number}]")
            return dict(episode.info)

    with kind("textarena:TicTacToe-v0", 1) as manager:
        assert asyncio.run(play(manager.pool()))["rewards"] == {0: 1, 1: -1}


@KINDS
def test_the_two_players_of_a_game_are_two_coroutines(kind: Any) -> None:
    async def first_free(player: Any) -> tuple[int, float]:
        n_turns = 0
        async for text in player:
            cell = min(int(each) for each in re.findall(r"\[(\d)\]", text.rpartition("Available Moves")[2] or text))
            await player.act(f"[{cell}]")
            n_turns += 1
        return n_turns, player.total

    async def play(pool: Any) -> dict[str, Any]:
        async with pool.begin(7) as episode:
            return await episode.play_each({0: first_free, 1: first_free})  # type: ignore[no-any-return]

    with kind(lambda: Together(textarena.make("TicTacToe-v0")), 1) as manager:
        assert asyncio.run(play(manager.pool())) == {0: (4, 1.0), 1: (3, -1.0)}


@pytest.mark.parametrize(
    ("env", "near"),
    [
        ("textarena:TicTacTo-v0", "; did you mean TicTacToe-v0?"),
        ("gem:game:GuessTheNumber-v0-eas", "; did you mean game:GuessTheNumber-v0-easy?"),
        ("reasoning_gym:chain_sun", "; did you mean chain_sum?"),
        ("textarena:", "."),
    ],
)
def test_a_name_that_is_not_registered_is_refused(env: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"has no environment .*'{re.escape(near)}$"):
        resolve(env)
