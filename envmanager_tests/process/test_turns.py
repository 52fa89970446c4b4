"""Games of turns in managers: tasks, episodes that are kept, recordings, and a coroutine for each agent of a pool."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmanager import (
    ActionInfo,
    AgentSteps,
    AsyncioEnvManager,
    EnvManager,
    RestartPolicy,
    SimpleEnvManager,
    SubprocessEnvManager,
    Task,
    Wait,
)
from envmanager.adapters.together import Together, if_several
from envmanager.observe import events
from envmanager.replay_env_manager import ReplayEnvManager
from envmanager_tests.games import Brawl
from envmanager_tests.process.test_pool import run

ALL = Wait.all()
KEPT = RestartPolicy(max_restarts=1000, backoff_s=0, keep_episodes=True, on_exception="restart")
ORDERS = [("a_0", "a_1", "a_2", "b_0"), ("b_0", "a_1", "b_1")]


class Legal:
    """A legal move that depends on nothing but what the agent sees."""

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        seen, masks = steps.obs["observation"], steps.obs["action_mask"]
        return ActionInfo(np.array([chosen(*row) for row in zip(seen, masks, strict=True)], np.int64))


def chosen(seen: np.ndarray, mask: np.ndarray) -> int:
    legal = np.flatnonzero(mask)
    return int(legal[int(abs(float(seen[0])) * 1000) % len(legal)])


def digests(manager: EnvManager, *, rounds: int, kill_every: int = 0, tasks: Any = None) -> dict[int, str]:
    """Play, and return a digest of all rows of each environment, or of each task."""
    order, own = random.Random(1), dict[int, Any]()
    for behavior in manager.behavior_specs:
        manager.set_policy(behavior, Legal())
    infos = manager.reset(seed=None if tasks else 1, tasks=tasks)
    for round_ in range(rounds):
        for info in infos:
            assert info.lost is None
            for steps in info.current.values():
                finals = iter(range(len(steps)))
                for row, env_id in enumerate(steps.env_id.tolist()):
                    seen = [
                        steps.agent_id[row] & 0xFFFF,
                        steps.reward[row],
                        steps.terminated[row],
                        steps.truncated[row],
                    ]
                    if steps.ended[row]:
                        at = next(finals)
                        seen += [column[at] for column in steps.final_obs.values()]
                        if tasks is None and steps.acting is not None:
                            seen.append(steps.acting[row])
                    key = info.final_tasks.get(env_id, info.tasks.get(env_id)) if tasks else env_id
                    if key is not None:
                        own.setdefault(key, hashlib.sha256()).update(b"".join(np.asarray(x).tobytes() for x in seen))
        if tasks is not None and manager.tasks.done:
            break
        if kill_every and round_ % kill_every == 0:
            worker = manager.stats().workers[order.randrange(manager.n_workers)]
            if worker.pid is not None and not worker.replacing:
                os.kill(worker.pid, signal.SIGKILL)
        infos = manager.step(ALL)
    return {key: each.hexdigest() for key, each in own.items()}


@pytest.mark.parametrize("dies", ["first", "later"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_rows_of_kept_games_are_the_same_after_kills(order: tuple[str, ...], dies: str) -> None:
    found = []
    for kill_every in (0, 7):
        make = partial(Brawl, order, dies=dies)
        with SubprocessEnvManager(make, 4, n_workers=2, seed=1, restarts=KEPT) as manager:
            found.append(digests(manager, rounds=90, kill_every=kill_every))
            assert manager.events.count(events.Died) >= 5 * bool(kill_every)
            assert manager.events.count(events.EpisodesDiverged) == 0
    assert found[0] == found[1]
    assert len(found[0]) == 4


@pytest.mark.parametrize("kill_every", [0, 9])
def test_tasks_of_games_begin_on_demand_in_whichever_environment_is_free(kill_every: int) -> None:
    tasks = [Task(seed=number) for number in range(12)]
    with SimpleEnvManager(Brawl) as manager:
        expected = digests(manager, rounds=1000, tasks=tasks)
        totals = [result.total for result in manager.tasks.results]
    with SubprocessEnvManager(Brawl, 4, n_workers=2, restarts=KEPT) as manager:
        assert digests(manager, rounds=1000, tasks=tasks, kill_every=kill_every) == expected
        assert [result.total for result in manager.tasks.results] == totals
    assert len(expected) == 12


def test_a_recorded_game_is_replayed_without_its_environments(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    path = str(tmp_path / "run.emrec")
    with SubprocessEnvManager(Brawl, 3, seed=1, record=path, restarts=KEPT) as manager:
        recorded = digests(manager, rounds=60, kill_every=11)
    with ReplayEnvManager(recording=path) as manager:
        assert digests(manager, rounds=60) == recorded


def in_processes(make: Callable[[], Any]) -> EnvManager:
    return SubprocessEnvManager(make, 2, restarts=KEPT)


def in_threads(make: Callable[[], Any]) -> EnvManager:
    return AsyncioEnvManager(make, 2, restarts=KEPT)


def brawl() -> Any:
    return Together(Brawl())


def told_by_agent_iter(seed: int) -> tuple[dict[str, float], int]:
    """Return the sum of what ``last()`` says to each agent, and the number of moves."""
    env, totals, n_moves = Brawl(), Counter[str](), 0
    env.reset(seed=seed)
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, _ = env.last()
        totals[agent] += reward
        if terminated or truncated:
            env.step(None)
        else:
            n_moves += 1
            env.step(chosen(obs["observation"], obs["action_mask"]))
    return dict(totals), n_moves


@pytest.mark.parametrize(("kind", "kills"), [(in_processes, False), (in_processes, True), (in_threads, False)])
def test_a_coroutine_for_each_agent_plays_its_turns_until_the_game_is_over(kind: Any, kills: bool) -> None:
    n_moves = Counter[int]()

    async def player(own: Any) -> float:
        async for obs in own:
            n_moves[own.episode.task.seed] += 1
            if kills and n_moves.total() % 40 == 20:
                for worker in manager.stats().workers:
                    if worker.pid is not None and not worker.replacing:
                        os.kill(worker.pid, signal.SIGKILL)
            await own.act(chosen(obs["observation"], obs["action_mask"]))
        return float(own.total)

    async def agent(episode: Any) -> Any:
        return await episode.play_each(dict.fromkeys(ORDERS[0], player))

    async def test(pool: Any) -> dict[int, Any]:
        tasks = [Task(seed=seed) for seed in range(8)]
        return {result.task.seed: result.value async for result in pool.play(tasks, agent)}

    with kind(brawl) as manager:
        values = run(test(manager.pool()))
        assert manager.events.count(events.Died) >= 2 * kills
    assert values == {seed: told_by_agent_iter(seed)[0] for seed in range(8)}
    assert n_moves == {seed: told_by_agent_iter(seed)[1] for seed in range(8)}


def test_what_serves_environments_plays_all_agents_of_a_game_of_turns() -> None:
    env = if_several(Brawl())
    assert isinstance(env, Together)
    obs, _ = env.reset(seed=1)
    ((agent, seen),) = obs.items()
    obs, reward, *_, info = env.step({agent: chosen(seen["observation"], seen["action_mask"])})
    assert reward == sum(info["rewards"].values())
