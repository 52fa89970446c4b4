"""Tasks that agents play in a pool, each once, alone or in groups of siblings."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from envmanager import (
    AsyncioEnvManager,
    EnvManager,
    EnvRaised,
    GroupResult,
    LostEpisode,
    RestartPolicy,
    StalePolicy,
    Task,
    TaskResult,
    Timeouts,
    UsageError,
)
from envmanager_tests.process.test_pool import ALWAYS, WAITING, Words, run

SUITE = "waiting portable"


class Sums:
    """An environment of one number, which the options begin with and actions are added to.

    ``faults`` says what happens in the second step of an episode, by option ``name``: of a list, each takes one.
    """

    faults: dict[Any, list[str]]

    def __init__(self) -> None:
        self.options: Any = {}

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.options, self.n_steps = options or {}, 0
        self.total, self.seed = self.options.get("start", 0), seed
        own = self.faults.get(self.options.get("name"))
        self.fault = own.pop(0) if own else ""
        return self.total, {"seed": seed}

    async def step(self, action: Any) -> Any:
        self.n_steps += 1
        self.total += action
        await asyncio.sleep(0)
        if self.n_steps == 2 and self.fault == "raises":
            raise ValueError("it is broken")
        if self.n_steps == 2 and self.fault == "hangs":
            await asyncio.sleep(3600)
        return self.total, float(action), self.n_steps == 3, False, {"seed": self.seed}


def sums(n_envs: int = 4, faults: dict[Any, list[str]] | None = None, **options: Any) -> EnvManager:
    Sums.faults = faults or {}
    return AsyncioEnvManager(Sums, n_envs, infos=True, **{"restarts": ALWAYS, **options})


async def add_one(episode: Any) -> Any:
    while not episode.is_over:
        await episode.step(1)
    return episode.task.id, episode.obs


async def all_of(play: Any) -> list[Any]:
    return [each async for each in play]


def tasks_of(n: int) -> list[Task]:
    return [Task(id=k, options={"start": 10 * k, "name": k}) for k in range(n)]


@pytest.mark.parametrize("make", WAITING)
def test_each_task_is_played_once_by_the_agent_and_its_result_says_what_came_of_it(make: Any) -> None:
    async def agent(episode: Any) -> Any:
        while not episode.is_over:
            await episode.step(2)
        return episode.obs.tolist()

    async def test(pool: Any) -> list[TaskResult]:
        return await all_of(pool.play(({"level": k, "length": 1 + k % 5} for k in range(40)), agent))

    with make() as manager:
        results = sorted(run(test(manager.pool())), key=lambda result: result.index)
    assert [result.index for result in results] == [*range(40)]
    for k, result in enumerate(results):
        n = 1 + k % 5
        assert result.value == [k, n, 2 * n]
        assert (result.total, result.length, result.terminated, result.cut, result.error) == (
            n * k,
            n,
            True,
            False,
            None,
        )
        assert (result.attempts, result.task.options["level"]) == (1, k)
        assert result.times is not None
        assert min(result.times) >= 0
        assert result.times.stepping_s > 0


def test_no_more_are_played_at_once_than_the_concurrency() -> None:
    n_at_once = most = 0

    async def agent(episode: Any) -> None:
        nonlocal n_at_once, most
        n_at_once += 1
        most = max(most, n_at_once)
        await episode.step(1)
        n_at_once -= 1

    with sums(8) as manager:
        results = run(all_of(manager.pool().play(range(20), agent, concurrency=3)))
    assert (most, len(results)) == (3, 20)
    assert all(result.cut and result.length == 1 for result in results)


def test_what_is_lost_is_played_again_with_the_same_seed_and_given_up_with_its_error() -> None:
    seeds: dict[Any, set[Any]] = {}

    async def agent(episode: Any) -> Any:
        seeds.setdefault(episode.task.id, set()).add(episode.info["seed"])
        return await add_one(episode)

    class Source:
        def __init__(self) -> None:
            self.tasks, self.told = tasks_of(9), Counter[str]()

        def next_task(self, env_id: int) -> Task:
            if not self.tasks:
                raise StopIteration
            return self.tasks.pop(0)

        def ended(self, result: TaskResult) -> None:
            self.told[f"ended {result.task.id}"] += 1

        def lost(self, task: Task, error: Exception) -> None:
            self.told[f"lost {task.id}"] += 1

    source = Source()
    with sums(faults={1: ["raises"], 2: ["raises", "raises"], 3: ["raises"] * 9}) as manager:
        play = manager.pool(seed=5).play(source, agent)
        results = {result.task.id: result for result in run(all_of(play))}
    assert {k: result.attempts for k, result in results.items()} == {**dict.fromkeys(range(9), 1), 1: 2, 2: 3, 3: 3}
    assert [k for k, result in results.items() if result.error is not None] == [3]
    assert isinstance(results[3].error, LostEpisode)
    assert isinstance(results[3].error.cause, EnvRaised)
    assert (results[3].value, results[3].episodes) == (None, ())
    assert (play.n_ended, play.n_lost) == (8, 1)
    assert source.told == {f"{'lost' if k == 3 else 'ended'} {k}": 1 for k in range(9)}
    assert all(len(own) == 1 for own in seeds.values())
    assert len(set().union(*seeds.values())) == 9


def test_an_agent_that_catches_the_loss_of_its_episode_has_lost_it_all_the_same() -> None:
    async def agent(episode: Any) -> Any:
        try:
            return await add_one(episode)
        except LostEpisode:
            return 0.0

    with sums(faults={1: ["raises"] * 9}) as manager:
        results = run(all_of(manager.pool().play(tasks_of(3), agent)))
    assert {result.task.id: result.error is None for result in results} == {0: True, 1: False, 2: True}


def test_an_agent_that_takes_too_long_is_played_again() -> None:
    async def agent(episode: Any) -> Any:
        return await add_one(episode)

    with sums(faults={1: ["hangs"], 2: ["hangs"] * 9}, timeouts=Timeouts(step_s=3600)) as manager:
        results = run(all_of(manager.pool(cancel_s=0.05).play(tasks_of(4), agent, timeout_s=0.2, attempts=2)))
    assert {result.task.id: result.attempts for result in results} == {0: 1, 1: 2, 2: 2, 3: 1}
    (lost,) = [result for result in results if result.error is not None]
    assert lost.task.id == 2
    assert isinstance(lost.error, asyncio.TimeoutError)


def test_an_error_of_the_agent_is_raised_if_nothing_has_ended_and_is_a_loss_later() -> None:
    async def wrong(episode: Any) -> None:
        raise KeyError("of the agent")

    async def sometimes_wrong(episode: Any) -> Any:
        if episode.task.id == 7:
            raise KeyError("of the agent")
        return await add_one(episode)

    with sums() as manager:
        with pytest.raises(KeyError, match="of the agent"):
            run(all_of(manager.pool().play(tasks_of(20), wrong)))
        results = run(all_of(manager.pool().play(tasks_of(20), sometimes_wrong)))
    assert [result.task.id for result in results if result.error is not None] == [7]


def test_an_error_of_the_source_is_raised_and_nothing_is_lost_by_it() -> None:
    class Source:
        n = 0

        def next_task(self, env_id: int) -> Task:
            self.n += 1
            if self.n == 5:
                raise KeyError("of the source")
            if self.n > 10:
                raise StopIteration
            return tasks_of(self.n)[-1]

    async def test(pool: Any) -> list[Any]:
        play, ids = pool.play(Source(), add_one), []
        try:
            async for result in play:
                ids.append(result.task.id)
        except KeyError:
            ids += [result.task.id async for result in play]
        return ids

    with sums() as manager:
        assert sorted(run(test(manager.pool()))) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_a_source_that_has_no_task_now_is_asked_again() -> None:
    class Source:
        n = 0

        def next_task(self, env_id: int) -> Task | None:
            self.n += 1
            if self.n > 12:
                raise StopIteration
            return None if self.n % 3 else Task(id=self.n)

    with sums() as manager:
        results = run(all_of(manager.pool().play(Source(), add_one)))
    assert sorted(result.task.id for result in results) == [3, 6, 9, 12]


def test_when_no_environment_is_left_the_error_of_the_last_is_raised() -> None:
    faults = {k: ["raises"] * 9 for k in range(9)}
    with sums(2, faults=faults, restarts=RestartPolicy()) as manager, pytest.raises(EnvRaised):
        run(all_of(manager.pool().play(tasks_of(9), add_one)))


def test_leaving_the_block_ends_what_plays() -> None:
    async def test(pool: Any) -> None:
        before = asyncio.all_tasks()
        async with pool.play(range(1000), add_one) as play:
            await play.__anext__()
        assert asyncio.all_tasks() == before
        assert len(await all_of(play)) <= 7  # that had ended before

    with sums() as manager:
        run(test(manager.pool()))


# Groups.


@pytest.mark.parametrize("is_labelled", [True, False])
def test_a_group_is_delivered_once_and_whole_with_a_lost_sibling_played_again_alone(is_labelled: bool) -> None:
    n_played = Counter[Any]()

    async def agent(episode: Any) -> Any:
        n_played[episode.task.id] += 1
        return await add_one(episode)

    tasks = tasks_of(6)
    if is_labelled:
        tasks = [Task(id=task.id, options=task.options, group=f"p{task.id}") for task in tasks for _ in range(5)]
    with sums(faults={2: ["raises"] * 2}) as manager:
        groups = run(all_of(manager.pool(seed=1).play(tasks, agent, group=5)))
    assert sorted(group.index for group in groups) == [*range(6)]
    for group in groups:
        assert isinstance(group, GroupResult)
        assert [result.value for result in group.results] == [(group.index, 10 * group.index + 3)] * 5
        assert (group.task.id, group.is_whole, group.lost) == (group.index, True, ())
        assert len({result.task.seed for result in group.results}) == 1
    assert n_played == {**dict.fromkeys(range(6), 5), 2: 7}


def test_stragglers_are_cancelled_when_enough_siblings_have_ended() -> None:
    faults = {k: ["hangs", "hangs"] for k in range(20)}
    with sums(10, faults=faults, timeouts=Timeouts(step_s=3600)) as manager:
        groups = run(all_of(manager.pool(cancel_s=0.05).play(tasks_of(20), add_one, group=5, keep=3)))
        assert manager.tasks.n_lost == 0
    assert sorted(group.task.id for group in groups) == [*range(20)]
    assert all(group.is_whole and len(group.results) == 3 and not group.lost for group in groups)


def test_a_group_of_which_too_few_end_is_told_with_the_reasons() -> None:
    with sums(faults={1: ["raises"] * 11}) as manager:
        groups = run(all_of(manager.pool().play(tasks_of(3), add_one, group=4, keep=3, attempts=3)))
    incomplete = {group.task.id: group for group in groups if not group.is_whole}
    assert incomplete.keys() == {1}
    assert len(groups) == 3
    assert (len(incomplete[1].results), len(incomplete[1].lost)) == (1, 3)
    assert {type(result.error) for result in incomplete[1].lost} == {LostEpisode}


def test_an_old_policys_results_are_played_again_and_each_result_has_the_version_of_each_step() -> None:
    async def test(pool: Any) -> list[Any]:
        play = pool.play(tasks_of(12), agent, max_policy_lag=1, attempts=9, concurrency=4)
        results = []
        async for result in play:
            assert play.version - min(result.versions) <= 1
            results.append(result)
            play.version += 1
        return results

    async def agent(episode: Any) -> Any:
        await episode.step(1)
        episode.version += 1
        return await add_one(episode)

    with sums() as manager:
        results = run(test(manager.pool()))
    assert sorted(result.task.id for result in results) == [*range(12)]
    assert all(result.versions == (result.versions[0], *[result.versions[0] + 1] * 2) for result in results)
    assert max(result.attempts for result in results) > 1


def test_a_result_that_stays_too_old_is_lost() -> None:
    async def test(pool: Any) -> list[Any]:
        play = pool.play(tasks_of(2), agent, max_policy_lag=3, group=2)
        play.version = 9
        return await all_of(play)

    async def agent(episode: Any) -> Any:
        episode.version = 5
        return await add_one(episode)

    with sums() as manager:
        groups = run(test(manager.pool()))
    assert [len(group.lost) for group in groups] == [2, 2]
    assert {(type(result.error), result.attempts) for group in groups for result in group.lost} == {(StalePolicy, 3)}


@pytest.mark.parametrize(
    "given", [{"group": 4, "keep": 5}, {"attempts": 0}, {"concurrency": 0}, {"max_policy_lag": -1}]
)
def test_arguments_that_cannot_be_are_refused(given: Any) -> None:
    with AsyncioEnvManager(Words, 1) as manager, pytest.raises(UsageError):
        manager.pool().play([], add_one, **given)


# A run that was killed.


def test_tasks_whose_ids_are_done_are_skipped() -> None:
    with sums() as manager:
        results = run(all_of(manager.pool().play(tasks_of(9), add_one, done_ids={2, 3, 8})))
    assert sorted(result.task.id for result in results) == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("how", ["list", "labels", "generator", "state"])
def test_a_run_that_goes_on_from_its_state_delivers_each_group_once_and_repeats_nothing_that_has_ended(
    how: str,
) -> None:
    chance = random.Random(3)
    n_ended = Counter[int]()

    class Source:
        def __init__(self) -> None:
            self.n = 0

        def next_task(self, env_id: int) -> Task:
            if self.n == 30:
                raise StopIteration
            self.n += 1
            return tasks_of(self.n)[-1]

        def state(self) -> int:
            return self.n

        def restore(self, state: int) -> None:
            self.n = state

    async def agent(episode: Any) -> Any:
        value = await add_one(episode)
        await asyncio.sleep(chance.random() / 100)
        n_ended[episode.task.id] += 1
        return value

    def source() -> Any:
        if how == "labels":
            return [Task(id=k, options={"start": 10 * k}, group=k) for k in range(30) for _ in range(3)]
        return {"list": tasks_of(30), "generator": iter(tasks_of(30)), "state": Source()}.get(how)

    async def some(pool: Any, state: Any, n: int) -> tuple[list[Any], Any]:
        taken: list[Any] = []
        async with pool.play(source(), agent, group=3, state=state) as play:
            async for group in play:
                taken.append(group)
                state = pickle.dumps(play.state())
                if len(taken) == n:
                    break
        return taken, pickle.loads(state)

    state, groups = None, []
    for n in (4, 1, 9, 100):
        with sums(7) as manager:
            own, state = run(some(manager.pool(seed=4), state, n))
            groups += own
    assert sorted(group.task.id for group in groups) == [*range(30)]
    for group in groups:
        assert [result.value for result in group.results] == [(group.task.id, 10 * group.task.id + 3)] * 3
        assert len({result.index for result in group.results}) == 3
    indices = [result.index for group in groups for result in group.results]
    assert sorted(indices) == [*range(90)]
    assert sum(n_ended.values()) == 90


def test_a_state_with_more_tasks_than_there_are_is_refused() -> None:
    async def state_of(pool: Any) -> Any:
        async with pool.play(range(9), add_one) as play:
            await play.__anext__()
        return play.state()

    with sums() as manager:
        state = run(state_of(manager.pool()))
        with pytest.raises(UsageError, match="fewer"):
            manager.pool().play(range(2), add_one, state=state)


def endless() -> Iterator[int]:
    k = 0
    while True:
        yield k
        k += 1


def test_a_slow_caller_lets_no_more_results_wait_than_play() -> None:
    async def test(pool: Any) -> int:
        async with pool.play(endless(), add_one, concurrency=4) as play:
            await play.__anext__()
            await asyncio.sleep(0.3)
            return int(play.n_ended)

    with sums() as manager:
        assert run(test(manager.pool())) <= 1 + 4 + 4 + 1
